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
from pydantic import Field, ValidationError, model_validator

from islands.limits import HealthConfig
from islands.overrides import (
    assign,
    describe,
    from_assignments,
    from_environment,
    origin_of,
    to_json,
)
from islands.rules import broken_rules
from islands.schedule import own_share
from islands.sections import (
    LARGEST_INTEGER,
    DataConfig,
    InnerConfig,
    IslandConfig,
    LocalConfig,
    ModelConfig,
    OuterConfig,
    PipelineConfig,
    Section,
    SyncConfig,
)
from islands.types import FORMAT_VERSION, ConfigError

ENVIRONMENT_PREFIX = "DILOCO_"

DEFAULT_ISLANDS = tuple(IslandConfig(name=name) for name in ("west", "east", "europe", "asia"))


class RunConfig(Section):
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
    health: HealthConfig = Field(
        default=HealthConfig(), description="Limits of a healthy run; beyond them `status` warns."
    )
    local: LocalConfig = Field(default=LocalConfig(), description="The local driver.")
    pipeline: PipelineConfig = Field(
        default=PipelineConfig(), description="Islands on clusters, run by flows."
    )
    islands: tuple[IslandConfig, ...] = Field(
        default=DEFAULT_ISLANDS, min_length=1, max_length=1024, description="The learners."
    )
    quarantine: tuple[str, ...] = Field(
        default=(),
        description="Islands that train and adopt, but whose contributions are refused and not waited for.",
    )

    @property
    def members(self) -> tuple[IslandConfig, ...]:
        """The islands that take part, those that have left included; not the spares."""
        return tuple(island for island in self.islands if not island.spare)

    @property
    def quorum(self) -> int:
        """Learners a merge needs: all where they wait, else min_learners or half of the islands rounded up."""
        if self.sync.blocks:
            return len(self.members)
        return self.sync.min_learners or (len(self.members) + 1) // 2

    @property
    def rates(self) -> dict[str, float]:
        """Tokens of each island beside the others': by speed and batch; where all wait, all take as many steps."""
        return {i.name: (1.0 if self.sync.blocks else i.speed) * i.batch_size for i in self.islands}

    def share_of(self, name: str) -> int:
        """Return the tokens a member trains."""
        bound = {i.name: i.tokens for i in self.members if i.tokens is not None}
        rates = {i.name: self.rates[i.name] for i in self.members}
        return own_share(self.total_tokens, rates, name, bound)

    def as_founded(self) -> RunConfig:
        """Return the configuration of a new run: all that this one lists, with shards and shares as at a beginning."""
        plain = {"tokens": None, "joined_at": 0.0}
        islands = tuple(island.model_copy(update=plain) for island in self.islands)
        return self.model_copy(update={"islands": islands})

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


# What a run is: a run that changed one of these would be another run under the same name. When a change of any other
# key acts, `islands/steering.py` says.
IDENTITY_KEYS: tuple[str, ...] = (
    "format_version",
    "seed",
    *(f"model.{name}" for name in ModelConfig.model_fields),
    "data.source",
    "data.held_out_fraction",
    "outer.merge",
    "outer.weighting",
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
