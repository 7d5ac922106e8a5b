"""Flow `island`: one learner, segment after segment, on its region's cluster; it owns every restart."""

from __future__ import annotations

import time
from dataclasses import replace
from itertools import count

from prefect import flow
from prefect.client.schemas.objects import State
from prefect.states import Completed

from infra.clusters import ClusterSpec, open_cluster
from islands.types import StoreLost
from tasks import stopping
from tasks.records import new_attempt
from tasks.runs import open_run
from tasks.segments import PRELOAD, Segment, Stretch
from tasks.watching import Doorman, watch_segment

_LONGEST_PAUSE_SECONDS = 30.0


@flow(name="island", flow_run_name="{island} of {run}")
def island(store: str, run: str, island: str) -> State[str]:
    """Train one island of a run to the end of its share.

    Args:
        store: URL of the store.
        run: name of the run.
        island: name of the island in the run's configuration.
    """
    opened = open_run(store, run)
    cluster = opened.island(island).cluster
    stopping.let_go_on(opened, new_attempt, island)
    pipeline = opened.config.pipeline
    segment = Segment(store, run, island, pipeline.segment_seconds, pipeline.store_patience_seconds)
    spec = ClusterSpec(island, **cluster.model_dump(exclude={"kind"}), preload=PRELOAD)
    doorman, num_deaths = Doorman(opened), 0
    with open_cluster(spec, segment.topic) as opened_cluster:
        for number in count():
            pipeline = doorman.run.config.pipeline  # as it stands now
            segment = replace(
                segment,
                seconds=pipeline.segment_seconds,
                patience_seconds=pipeline.store_patience_seconds,
            )
            state = watch_segment(
                opened, opened_cluster, segment, number, doorman, return_state=True
            )
            if state.is_completed():
                num_deaths = 0
                stretch = state.result()
                if stretch.outcome not in ("goes on", "drained"):
                    return Completed(message=_ending(stretch), data=stretch.outcome)
                continue
            num_deaths += 1
            has_lost_store = isinstance(state.result(raise_on_failure=False), StoreLost)
            if has_lost_store or num_deaths > pipeline.max_restarts:
                state.result()  # raises what happened last
            # A first death costs no more than its replacement; what fails again and again needs time to mend.
            time.sleep(min(2.0 ** (num_deaths - 1) - 1.0, _LONGEST_PAUSE_SECONDS))
    raise AssertionError("a segment either goes on or ends the flow")


def _ending(stretch: Stretch) -> str:
    endings = {
        "left": "trained its share",
        "stopped": "stopped on request, saved",
        "superseded": "a later incarnation goes on elsewhere",
        "finished": "the run has ended",
    }
    return f"{endings[stretch.outcome]}, at step {stretch.step:,}"
