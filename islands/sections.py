"""The sections of a run's configuration: every option with its bounds, unit and meaning.

Knows single fields; must not know the rules between them (`islands/rules.py`) nor where a value came from
(`islands/config.py`).
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from islands.types import PLAIN_NAME_PATTERN, Weighting

LARGEST_INTEGER = 2**63 - 1  # TOML promises 64 signed bits, no more
Algorithm = Literal["decoupled", "streaming", "diloco", "data-parallel"]
Codec = Literal["float32", "bfloat16", "int8", "int4", "e3m0"]
CodecDown = Literal[
    "float32",
    "bfloat16",
    "int8",
    "int4",
    "e3m0",
    "int8-delta",
    "int4-delta",
    "e3m0-delta",
]


class Section(BaseModel):
    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
    )


class ModelConfig(Section):
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


class DataConfig(Section):
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


class InnerConfig(Section):
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
    precision: Literal["float32", "bfloat16"] = Field(
        default="float32",
        description="Number format of the passes over the model; parameters and moments stay float32.",
    )


class OuterConfig(Section):
    """Nesterov momentum at the synchronizer; under data-parallel it takes an AdamW step with `inner` instead."""

    learning_rate: float = Field(default=0.7, gt=0, le=10, description="Rate of an outer step.")
    momentum: float = Field(
        default=0.7, ge=0, lt=1, description="Momentum factor of an outer step."
    )
    merge: Literal["rda", "mean"] = Field(
        default="rda",
        description="Radial-directional average or token-weighted mean of the pseudo-gradients.",
    )
    weighting: Weighting = Field(
        default="quality",
        description='What a contribution weighs: "quality", tokens times tokens per step, or "tokens" alone.',
    )


class SyncConfig(Section):
    """When fragments travel, in which form, and what is merged."""

    algorithm: Algorithm = Field(
        default="decoupled",
        description="Decoupled DiLoCo; or, waiting for each other: Streaming DiLoCo, DiLoCo, data-parallel.",
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
        description="Learners a merge needs; absent: half of the islands, rounded up (all but decoupled: all).",
    )
    grace_fraction: float = Field(
        default=0.25,
        ge=0,
        le=1,
        description="Longest wait after the quorum, as a share of the period; decoupled only.",
    )
    alpha: float = Field(
        default=0.0, ge=0, le=1, description="Share of the local value kept at adoption."
    )
    overlap_steps: int = Field(
        default=0, ge=0, description="Inner steps between copy and adoption; streaming only."
    )
    max_staleness: int = Field(
        default=4,
        ge=0,
        description="Versions a contribution's base may lie behind the head; decoupled only.",
    )
    outlier_factor: float = Field(
        default=10.0,
        gt=1,
        description="Decoupled: one this many times longer than the running median and its learner's last is refused.",
    )
    codec: Codec = Field(default="float32", description="Number format of contributions.")
    codec_down: CodecDown = Field(
        default="bfloat16",
        description='Number format of published parameters; "…-delta" codes their change since the parent version.',
    )
    error_feedback: bool = Field(
        default=True,
        description="Whether what coding cut off a merged contribution is added to the learner's next one.",
    )
    chunk_bytes: int = Field(
        default=16 * 2**20,
        ge=4096,
        le=2**30,
        description="Size of one stored chunk, before coding.",
    )

    @property
    def blocks(self) -> bool:
        """Whether every learner waits at its turn until what all of them have sent is merged."""
        return self.algorithm != "decoupled"

    @property
    def sends_gradients(self) -> bool:
        """Whether contributions are gradients for an optimizer at the synchronizer, not differences of parameters."""
        return self.algorithm == "data-parallel"


class FaultConfig(Section):
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


class LocalConfig(Section):
    """The local driver: one process, a virtual clock that counts base steps."""

    checkpoint_steps: int = Field(
        default=96, ge=1, description="Base steps between two checkpoints of a learner."
    )
    faults: tuple[FaultConfig, ...] = Field(default=(), description="Scripted faults.")


class PipelineConfig(Section):
    """Islands on clusters: how their work is cut up, saved and restarted."""

    segment_seconds: float = Field(
        default=60.0, gt=0, le=86_400, description="Longest stretch of training in one Dask call."
    )
    checkpoint_seconds: float = Field(
        default=20.0, gt=0, le=86_400, description="Seconds between two checkpoints of a learner."
    )
    max_restarts: int = Field(
        default=5,
        ge=0,
        le=10_000,
        description="Restarts of a learner, or of its flow, without a completed segment in between.",
    )
    linger_periods: float = Field(
        default=10.0,
        ge=0,
        le=100_000,
        description="Periods an idle synchronizer waits for work, at least ten seconds, before it ends.",
    )
    store_patience_seconds: float = Field(
        default=600.0,
        ge=1,
        le=604_800,
        description="How long a store that does not answer is asked before a learner, or the run, gives up.",
    )


class ClusterConfig(Section):
    """Where an island's learner runs."""

    kind: Literal["local", "address"] = Field(
        default="local",
        description="A Dask cluster of its own on the machine that serves the flow, or an existing scheduler.",
    )
    address: str | None = Field(
        default=None,
        pattern=r"^(tcp|tls)://[^\s/@]+:\d+$",
        description='The scheduler, such as "tcp://10.0.0.7:8786"; only with kind "address".',
    )
    ca_file: str | None = Field(
        default=None, min_length=1, description="Certificate authority of a tls:// scheduler."
    )
    cert_file: str | None = Field(
        default=None, min_length=1, description="This client's certificate for a tls:// scheduler."
    )
    key_file: str | None = Field(
        default=None, min_length=1, description="The certificate's key, if not in the same file."
    )
    threads: int = Field(default=1, ge=1, le=1024, description="Threads torch computes on.")
    spares: int = Field(
        default=0,
        ge=0,
        le=64,
        description="Further workers, idle and warm, for when one dies; local.",
    )
    memory_mb: int | None = Field(
        default=None, ge=64, le=2**24, description="Mebibytes above which a worker is ended; local."
    )


class IslandConfig(Section):
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
    bandwidth_mbit: float | None = Field(
        default=None,
        gt=0,
        le=1_000_000,
        description="Megabits a second, each way, for its payloads in the run's store; absent: no cap. Clusters only.",
    )
    cluster: ClusterConfig = Field(default=ClusterConfig(), description="Where its learner runs.")
    speed: float = Field(
        default=1.0,
        gt=0,
        le=100,
        description="Expected speed beside the others: if decoupled, its share of the tokens; and the local clock.",
    )
    tokens: int | None = Field(
        default=None,
        ge=0,
        le=LARGEST_INTEGER,
        description="Tokens it trains; absent: its part, by speed and batch, of what those leave that have a number.",
    )
    joined_at: float = Field(
        default=0.0, ge=0, lt=1, description="Share of the run that was trained when it joined."
    )
    spare: bool = Field(
        default=False, description="Whether it waits until another leaves with its share untrained."
    )
    start_steps: float = Field(
        default=0.0, ge=0, le=1_000_000, description="Base steps after which the island starts."
    )
    push_delay_steps: float = Field(
        default=0.0, ge=0, le=1_000_000, description="Base steps a contribution travels."
    )
    fetch_delay_steps: float = Field(
        default=0.0, ge=0, le=1_000_000, description="Base steps a version travels."
    )

    @property
    def bytes_per_second(self) -> float | None:
        """The cap in bytes; None: no cap. A megabit is a million bits."""
        return None if self.bandwidth_mbit is None else self.bandwidth_mbit * 1e6 / 8
