"""What a checkpoint costs in processor time, on both of a learner's threads: copying the state, writing, committing."""

from __future__ import annotations

import statistics
import time

from islands.config import RunConfig
from islands.data import batch_at
from tasks import building, creating, history
from tasks.exchanging import Exchange, fetch_heads, link_of
from tasks.records import new_attempt
from tasks.runs import read_shard

NUM_CHECKPOINTS = 15


def checkpoint_seconds(config: RunConfig, run_id: str) -> float:
    """Return the processor seconds of a checkpoint of one learner of a new run, median of some.

    Waiting for the disk takes none, and no thread of training waits for it.
    """
    prepared = creating.prepare_run(config, run_id)
    run = creating.create_run(prepared, creating.attempts_of(prepared))
    island = config.islands[0]
    building.use_one_thread()
    learner, shard = building.build_learner(run, island.name), read_shard(run, island.name)
    learner.begin(fetch_heads(run), incarnation=0)
    past = history.register(run, island.name, new_attempt, stamp=time.time)
    exchange = Exchange(
        run,
        island.name,
        past.incarnation,
        past.last_digest,
        new_attempt,
        stamp=time.time,
        link=link_of(run, island.name, past.last),
    )
    spent = []
    for _ in range(NUM_CHECKPOINTS):
        batch = batch_at(
            shard,
            cursor=learner.cursor,
            batch_size=island.batch_size,
            context=config.model.context,
            seed=config.seed,
            learner=island.name,
        )
        num_tokens = island.batch_size * config.model.context
        learner.step(batch, num_tokens=num_tokens, num_samples=island.batch_size)
        begun = time.process_time()
        exchange.save(learner.state(""))
        spent.append(time.process_time() - begun)
    exchange.link.close()
    return statistics.median(spent)
