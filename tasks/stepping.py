"""Which outer step makes a fragment's next version, and its chunks. No torch.

Knows the configuration and what a commit keeps of a step, so that `replay` takes the very same one; must not know how
the deltas were merged.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from infra.arrays import ArrayReader
from islands.codecs import encode
from islands.config import RunConfig
from islands.merging import BLOCK, Vector, spans
from islands.outer import AdamW, OuterStep, adamw_step, clip_factor, decay_of
from islands.schedule import Schedule, learning_rate_at
from islands.types import FragmentLayout
from islands.versions import Commit
from tasks.publishing import Stepped, step_chunks
from tasks.runs import Run


def schedule_of(config: RunConfig, total_tokens: int, *, begins_at: float = 0.0) -> Schedule:
    """Return the learning-rate schedule over `total_tokens` tokens, or over what of it comes after `begins_at`."""
    return Schedule(
        config.inner.learning_rate,
        total_tokens,
        config.inner.warmup_fraction,
        config.inner.final_fraction,
        begins_at,
    )


def next_step(config: RunConfig, parent: Commit) -> OuterStep:
    """Return the outer step a configuration takes from a version: under data-parallel the inner optimizer's."""
    inner, outer = config.inner, config.outer
    if not config.sync.sends_gradients:
        return OuterStep(outer.learning_rate, outer.momentum)
    rate = learning_rate_at(parent.merged_tokens, schedule_of(config, config.total_tokens))
    adamw = AdamW(parent.version + 1, inner.beta1, inner.beta2, inner.weight_decay, inner.clip_norm)
    return OuterStep(rate, 0.0, adamw)


def step_taken(commit: Commit) -> OuterStep:
    """Return the outer step that made a version."""
    return OuterStep(commit.learning_rate, commit.momentum, commit.adamw)


def next_chunks(
    run: Run, layout: FragmentLayout, parent: Commit, delta: Vector, *, step: OuterStep, codec: str
) -> Iterator[Stepped]:
    """Yield the version after `parent` chunk by chunk: the outer step on the parent's own arrays."""
    if step.adamw is None:
        yield from step_chunks(
            run.store,
            parent,
            delta,
            codec=codec,
            learning_rate=step.learning_rate,
            momentum=step.momentum,
            chunk_elements=run.chunk_of(layout),
        )
        return
    reader = ArrayReader(run.store, parent.payload)
    factor = np.float32(clip_factor(delta, step.adamw.clip_norm))
    decay = decay_of(layout.tensors, step.adamw.weight_decay)
    for start, stop in spans(layout.size, run.chunk_of(layout)):
        params = reader.read("params", start, stop)
        first, second = reader.read("momentum", start, stop), reader.read("second", start, stop)
        for low, high in spans(stop - start, BLOCK):
            block, place = slice(low, high), slice(start + low, start + high)
            params[block], (first[block], second[block]) = adamw_step(
                params[block],
                (first[block], second[block]),
                delta[place] * factor,
                decay=decay[place],
                learning_rate=step.learning_rate,
                adamw=step.adamw,
            )
        yield Stepped(start, params, first, encode(params, codec), second=second)
