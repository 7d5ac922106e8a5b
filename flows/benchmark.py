"""Flow `benchmark`: one named benchmark, one MLflow run."""

from __future__ import annotations

from typing import Annotated, Any

from prefect import flow
from prefect.client.schemas.objects import State
from prefect.states import Completed, Failed
from pydantic import Field

from tasks.bench_command import run_command
from tasks.benchmarks import Name

Count = Annotated[int, Field(ge=1)]


@flow(name="benchmark", flow_run_name="benchmark {name}")
def benchmark(name: Name, seeds: Count = 3, tokens: Count | None = None) -> State[Any]:
    """Measure one thing on the machine that serves this flow; the figures go to MLflow and to this run's log.

    Args:
        name: What to measure. `quality` takes long, `chaos` over half an hour; every other one under four minutes, on
            two idle cores.
        seeds: Seeds 0..n-1 of `quality`, `codecs` and `chaos`.
        tokens: Tokens per training of `quality`, `codecs` and `chaos`. Empty: the benchmark's own number.
    """
    status = run_command(name, seeds, tokens)
    if status == 0:
        return Completed(message="every target is met")
    return Failed(message="a target is missed" if status == 1 else f"it ended with status {status}")
