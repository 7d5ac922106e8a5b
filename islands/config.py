"""The one configuration tree of a run, and the doors through which a configuration comes in.

This module knows every option and its bounds, and how TOML text, environment variables and
assignments become one `RunConfig`. It must not know the process environment, a file, a store or a
model: text comes in as an argument. Every door ends in the same strict
`RunConfig.model_validate_json`.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Self

import tomli_w
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from islands.overrides import (
    assign,
    describe,
    from_assignments,
    from_environment,
    origin_of,
    to_json,
)
from islands.rules import broken_rules
from islands.types import FORMAT_VERSION, PLAIN_NAME_PATTERN, ConfigError

ENVIRONMENT_PREFIX = "DILOCO_"
LARGEST_INTEGER = 2**63 - 1  # TOML promises 64 signed bits, no more

Codec = Literal["float32", "bfloat16"]


class _Section(BaseModel):
    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
    )


class ModelConfig(_Section):
    """The transformer every learner trains."""

    width: int = Field(
        default=64,
        ge=1,
        le=65_536,
        description="Elements of the residual stream; a multiple of num_heads.",
    )
    num_layers: int = Field(default=2, ge=1, le=1024, description="Transformer blocks.")
    num_heads: int = Field(default=4, ge=1, le=1024, description="Attention heads per block.")
    context: int = Field(default=64, ge=1, le=1_048_576, description="Tokens in one sequence.")
    tied: bool = Field(default=True, description="Whether the embedding is also the output matrix.")


class DataConfig(_Section):
    """The text; islands train on disjoint shards of it."""

    source: str = Field(
        default="stdlib",
        min_length=1,
        description='"stdlib" (the running Python\'s own sources) or a folder of text.',
    )
    held_out_fraction: float = Field(
        default=0.05,
        gt=0,
        lt=0.5,
        description="Share of the text that no learner sees and every evaluation scores.",
    )
    eval_bytes: int = Field(
        default=65_536,
        ge=2,
        le=LARGEST_INTEGER,
        description="Bytes of held-out text per evaluation.",
    )


class InnerConfig(_Section):
    """AdamW at a learner, scheduled over the learner's own tokens."""

    learning_rate: float = Field(default=4e-3, gt=0, le=1, description="Peak rate.")
    warmup_fraction: float = Field(
        default=0.05,
        ge=0,
        lt=1,
        description="Share of the learner's own tokens over which the rate rises to its peak.",
    )
    final_fraction: float = Field(
        default=0.01, ge=0, le=1, description="Share of the peak rate at which the cosine ends."
    )
    beta1: float = Field(
        default=0.9, ge=0, lt=1, description="Decay of the first moment per inner step."
    )
    beta2: float = Field(
        default=0.99, ge=0, lt=1, description="Decay of the second moment per inner step."
    )
    weight_decay: float = Field(
        default=0.1, ge=0, le=10, description="Decoupled decay, multiplied by the rate."
    )
    clip_norm: float = Field(
        default=1.0, gt=0, description="Largest global gradient norm of an inner step."
    )


class OuterConfig(_Section):
    """Nesterov momentum at the synchronizer."""

    learning_rate: float = Field(default=0.7, gt=0, le=10, description="Rate of an outer step.")
    momentum: float = Field(
        default=0.7, ge=0, lt=1, description="Momentum factor of an outer step."
    )
    merge: Literal["rda", "mean"] = Field(
        default="rda",
        description="Radial-directional average or token-weighted mean of the pseudo-gradients.",
    )


class SyncConfig(_Section):
    """When fragments travel, in which form, and what is merged."""

    algorithm: Literal["decoupled", "streaming"] = Field(
        default="decoupled",
        description="Decoupled DiLoCo, or the blocking Streaming DiLoCo baseline.",
    )
    num_fragments: int = Field(
        default=4, ge=1, le=9_999, description="Parts of the model that are synced on their own."
    )
    period_steps: int = Field(
        default=24,
        ge=1,
        le=1_000_000,
        description="Inner steps of the fastest learner between two pushes of the same fragment.",
    )
    min_learners: int | None = Field(
        default=None,
        ge=1,
        description="Learners a merge needs; absent: half of the islands, rounded up (streaming: all).",
    )
    grace_fraction: float = Field(
        default=0.25,
        ge=0,
        le=1,
        description="Longest wait after the quorum, as a share of the period.",
    )
    alpha: float = Field(
        default=0.0, ge=0, le=1, description="Share of the local value kept at adoption."
    )
    overlap_steps: int = Field(
        default=0, ge=0, description="Inner steps between copy and adoption; streaming only."
    )
    max_staleness: int = Field(
        default=4, ge=0, description="Versions a contribution's base may lie behind the head."
    )
    outlier_factor: float = Field(
        default=10.0,
        gt=1,
        description="A contribution whose norm exceeds this multiple of the running median is refused.",
    )
    codec: Codec = Field(default="float32", description="Number format of contributions.")
    codec_down: Codec = Field(
        default="bfloat16", description="Number format of published parameters."
    )
    chunk_bytes: int = Field(
        default=16 * 2**20,
        ge=4096,
        le=2**30,
        description="Size of one stored chunk, before coding.",
    )


class FaultConfig(_Section):
    """One scripted fault of the local driver."""

    island: str = Field(description="Name of the island it strikes.")
    step: int = Field(ge=1, description="The island's own inner step at which it strikes.")
    kind: Literal["kill"] = Field(
        default="kill",
        description="What happens: the learner is gone, with all it had not committed.",
    )
    return_after_steps: int | None = Field(
        default=None,
        ge=0,
        description="Base steps until a new incarnation starts; absent: it never returns.",
    )


class LocalConfig(_Section):
    """The local driver: one process, a virtual clock that counts base steps."""

    checkpoint_steps: int = Field(
        default=96, ge=1, description="Base steps between two checkpoints of a learner."
    )
    faults: tuple[FaultConfig, ...] = Field(default=(), description="Scripted faults.")


class IslandConfig(_Section):
    """One learner and the devices it runs on."""

    name: str = Field(
        pattern=f"^{PLAIN_NAME_PATTERN}$",
        description="The learner's name, unique in the run: 1 to 64 of a-z 0-9 - _, alphanumeric at both ends.",
    )
    region: str = Field(
        default="local",
        min_length=1,
        max_length=64,
        description="Where it runs, for people and reports.",
    )
    batch_size: int = Field(default=8, ge=1, le=65_536, description="Sequences per inner step.")
    device: str = Field(
        default="cpu",
        pattern=r"^(cpu|cuda(:\d+)?)$",
        description='Torch device: "cpu", "cuda" or "cuda:<index>".',
    )
    checkpoints: str | None = Field(
        default=None,
        min_length=1,
        description="URL of a store of its own for checkpoints; absent: the run's store.",
    )
    speed: float = Field(
        default=1.0,
        gt=0,
        le=100,
        description="Inner steps per base step of the local driver's clock.",
    )
    start_steps: float = Field(
        default=0.0, ge=0, description="Base steps after which the island starts."
    )
    push_delay_steps: float = Field(
        default=0.0, ge=0, description="Base steps a contribution travels."
    )
    fetch_delay_steps: float = Field(default=0.0, ge=0, description="Base steps a version travels.")


DEFAULT_ISLANDS = tuple(IslandConfig(name=name) for name in ("west", "east", "europe", "asia"))


class RunConfig(_Section):
    """Everything a run can be told."""

    store: str = Field(
        default="file://./runs", min_length=1, description="URL under which runs lie."
    )
    retention: Literal["bounded", "all"] = Field(
        default="bounded",
        description="Collect what no rule needs any more, or keep everything (for replay).",
    )
    durable: bool = Field(
        default=True, description="Whether a write to local disk is fsynced before it counts."
    )
    total_tokens: int = Field(
        default=4_000_000,
        gt=0,
        le=LARGEST_INTEGER,
        description="Tokens to train, counted over all islands.",
    )
    seed: int = Field(default=0, ge=0, le=LARGEST_INTEGER, description="Root of all randomness.")
    model: ModelConfig = Field(default=ModelConfig(), description="The model.")
    data: DataConfig = Field(default=DataConfig(), description="The text.")
    inner: InnerConfig = Field(default=InnerConfig(), description="The inner optimizer.")
    outer: OuterConfig = Field(default=OuterConfig(), description="The outer optimizer.")
    sync: SyncConfig = Field(default=SyncConfig(), description="Synchronization.")
    local: LocalConfig = Field(default=LocalConfig(), description="The local driver.")
    islands: tuple[IslandConfig, ...] = Field(
        default=DEFAULT_ISLANDS, min_length=1, max_length=1024, description="The learners."
    )

    @property
    def quorum(self) -> int:
        """Learners a merge needs: all under streaming, else min_learners or half of the islands rounded up."""
        if self.sync.algorithm == "streaming":
            return len(self.islands)
        return self.sync.min_learners or (len(self.islands) + 1) // 2

    @model_validator(mode="after")
    def _hold_cross_field_rules(self) -> Self:
        broken = [*broken_rules(self)]
        if broken:
            raise ValueError("\n".join(broken))
        return self


def parse_config(
    text_toml: str,
    *,
    assignments: Sequence[str] = (),
    environment: Mapping[str, str] = {},
    source: str,
) -> RunConfig:
    """Return the configuration that the file's text, then the environment, then the assignments make.

    Args:
        text_toml: the file's text; empty for all defaults.
        assignments: `a.b=c`, applied in order. c is a TOML literal, or a bare word where text is
            expected. An island is addressed by name or by index.
        environment: variables such as `DILOCO_SYNC__PERIOD_STEPS`, case-insensitive, with values
            like those of assignments; names without the prefix are ignored.
        source: the file's name, for messages.

    Raises:
        ConfigError: rules are broken; one line each with origin, dotted path, rule, value, remedy.
    """
    try:
        tree = tomllib.loads(text_toml)
    except ValueError as exc:  # not TOML, or an integer of more digits than Python converts
        raise ConfigError(
            f"{source}: must be TOML, got an error: {exc}; correct that place"
        ) from exc
    schema = RunConfig.model_json_schema()
    origins: dict[str, str] = {}
    problems: list[str] = []
    for override in [
        *from_environment(environment, ENVIRONMENT_PREFIX),
        *from_assignments(assignments),
    ]:
        try:
            origins[assign(tree, override, schema)] = override.origin
        except ConfigError as exc:
            problems.append(f"{override.origin}: {exc}")
    try:
        config = _validate(to_json(tree, source=source), source=source, origins=origins)
    except ConfigError as exc:
        raise ConfigError("\n".join([*problems, str(exc)])) from exc
    if problems:
        raise ConfigError("\n".join(problems))
    return config


def config_from_json(text: str, *, source: str) -> RunConfig:
    """Return the configuration in a JSON text, such as `model_dump_json` wrote; or raise ConfigError."""
    return _validate(text, source=source, origins={})


def _validate(text: str, *, source: str, origins: Mapping[str, str]) -> RunConfig:
    try:
        return RunConfig.model_validate_json(text)
    except ValidationError as exc:
        errors = exc.errors(include_url=False)
        schema = RunConfig.model_json_schema()
        lines = [line for error in errors for line in describe(error, schema)]
        named = [f"{origin_of(line, origins) or source}: {line}" for line in lines]
        raise ConfigError("\n".join(named)) from exc


def to_toml(config: RunConfig) -> str:
    """Return the effective configuration as TOML that `parse_config` turns into an equal one."""
    return tomli_w.dumps(config.model_dump(mode="json", exclude_none=True))


# What a run is: a resumed run that changed one of these would be another run under the same name.
IDENTITY_KEYS: tuple[str, ...] = (
    "format_version",
    "seed",
    *(f"model.{name}" for name in ModelConfig.model_fields),
    "data.source",
    "data.held_out_fraction",
    "outer.merge",
    "sync.algorithm",
    "sync.num_fragments",
    "sync.codec",
    "sync.codec_down",
    "islands.names",
)


def identity(config: RunConfig) -> dict[str, Any]:
    """Return the values of `IDENTITY_KEYS`, flat and JSON-ready."""
    tree = config.model_dump(mode="json")
    tree["format_version"] = FORMAT_VERSION
    tree["islands"] = {"names": [island.name for island in config.islands]}
    values = {}
    for key in IDENTITY_KEYS:
        section, _, name = key.rpartition(".")
        values[key] = tree[section][name] if section else tree[name]
    return values


def changed_identity(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Return the keys whose values differ, or that only one side has, in a stable order."""
    absent = object()
    return [key for key in {**old, **new} if old.get(key, absent) != new.get(key, absent)]
