"""What the benchmark `chaos` trains in all its arms, and how often somebody is killed. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from islands.chaos import Fault
from islands.config import RunConfig
from islands.goodput import victims
from islands.sections import (
    ClusterConfig,
    DataConfig,
    IslandConfig,
    ModelConfig,
    PipelineConfig,
    SyncConfig,
)
from tasks.arms import MODEL

_MOST_DEATHS = 100
ISLANDS = ("west", "east", "europe", "asia")


@dataclass(frozen=True, slots=True)
class Plan:
    """What is trained, and how often somebody is killed.

    `until_share`: no deaths once an island has trained so much of its share, so that each is followed by a return.
    `job_checkpoint_seconds`: of the job that is not elastic, by Young's rule: sqrt(2 * cost * kill_seconds), for a copy
    that costs some 25 ms.
    `bandwidth_mbit`: of an island's link, each way. A data-parallel step of `model` needs 38 Mbit each way.
    """

    model: ModelConfig = MODEL
    batch_size: int = 8
    period_steps: int = 24
    num_fragments: int = 4
    tokens: int = 1_800_000
    kill_seconds: float = 20.0
    bandwidth_mbit: float = 50.0
    until_share: float = 0.8
    checkpoint_seconds: float = 5.0
    job_checkpoint_seconds: float = 1.0
    seed: int = 0
    source: str = "stdlib"

    def faults(self) -> list[Fault]:
        """Return more deaths than there is time for: of everybody once, in a seeded order, before anybody twice."""
        whom = islice(victims(ISLANDS, self.seed), _MOST_DEATHS)
        return [
            Fault("kill", island=island, after_seconds=number * self.kill_seconds)
            for number, island in enumerate(whom, start=1)
        ]

    def config(self, folder: Path) -> RunConfig:
        """Return the configuration of the runs; everything is kept, so that every version can be made again."""
        islands = tuple(
            IslandConfig(
                name=name,
                batch_size=self.batch_size,
                bandwidth_mbit=self.bandwidth_mbit,
                cluster=ClusterConfig(spares=1),
            )
            for name in ISLANDS
        )
        return RunConfig(
            store=f"file://{folder}/runs",
            retention="all",
            total_tokens=self.tokens,
            seed=self.seed,
            model=self.model,
            data=DataConfig(source=self.source),
            sync=SyncConfig(num_fragments=self.num_fragments, period_steps=self.period_steps),
            pipeline=PipelineConfig(checkpoint_seconds=self.checkpoint_seconds),
            islands=islands,
        )
