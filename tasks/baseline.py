"""Data-parallel training on the same tokens: the baseline every comparison names.

One model, one AdamW, each step on the joined batch of all islands: what synchronous data parallelism computes, without
its communication. The islands' own data cursors make sure both sides see the very same samples.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from islands.config import RunConfig
from islands.data import Split, batch_at
from islands.learner import Base, flatten, trainable
from islands.model import build_model
from islands.scoring import bits_per_byte
from tasks.building import assemble, model_shape
from tasks.creating import lay_out_model
from tasks.stepping import schedule_of


def train_data_parallel(
    config: RunConfig, split: Split, *, watch: Callable[[int], None] = lambda num_tokens: None
) -> float:
    """Train to `total_tokens` on the joined batch and return held-out bits per byte.

    Args:
        config: the run's configuration; speeds, delays and faults play no part.
        split: the run's shards.
        watch: told the tokens so far after each step.
    """
    model = build_model(model_shape(config), config.seed)
    layouts = lay_out_model(model, config)
    learner = assemble(
        config, "joined", model, layouts, schedule=schedule_of(config, config.total_tokens)
    )
    parameters = trainable(model)
    learner.begin([Base(0, "", flatten(layout, parameters)) for layout in layouts], incarnation=0)
    context = config.model.context
    num_samples = sum(island.batch_size for island in config.islands)
    step = 0
    while learner.trained < config.total_tokens:
        batches = [
            batch_at(
                split.shards[island.name],
                cursor=step * island.batch_size,
                batch_size=island.batch_size,
                context=context,
                seed=config.seed,
                learner=island.name,
            )
            for island in config.islands
        ]
        learner.step(
            np.concatenate(batches), num_tokens=num_samples * context, num_samples=num_samples
        )
        step += 1
        watch(learner.trained)
    return bits_per_byte(model, split.held_out, context=context, max_bytes=config.data.eval_bytes)
