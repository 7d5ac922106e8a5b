"""Claims about bytes per token, by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from islands.traffic import per_merged_token, ring_all_reduce_bytes
from tasks.reporting import status
from tests import runs

# 116,032 parameters; each island trains 16 tokens a step, 800 steps of them.
FOUR = """
total_tokens = 51_200
durable = false
[model]
width = 64
num_layers = 2
num_heads = 4
context = 16
[data]
eval_bytes = 512
[sync]
num_fragments = 4
period_steps = 24
codec = "int4"
codec_down = "int4-delta"
[local]
checkpoint_steps = 100_000
""" + "".join(f'[[islands]]\nname = "i{n}"\nbatch_size = 1\n' for n in range(4))


def test_a_ring_passes_each_part_twice_save_for_ones_own() -> None:
    # 4 islands, 1,000 float32 elements: 3 parts of 250 to sum them, 3 to spread the sums, 4 bytes each.
    assert ring_all_reduce_bytes(1_000, num_islands=4) == 2 * 3 * 250 * 4
    assert ring_all_reduce_bytes(1_000, num_islands=2, element_bytes=2) == 2 * 500 * 2
    assert ring_all_reduce_bytes(1_000, num_islands=1) == 0.0


def test_bytes_per_merged_token_are_unknown_while_nothing_is_merged() -> None:
    assert per_merged_token(600, 400) == 1.5
    assert per_merged_token(600, 0) is None


@pytest.mark.slow
def test_four_bits_every_24_steps_are_200_times_fewer_bytes_than_a_ring_every_step(
    tmp_path: Path,
) -> None:
    """68 bytes for 128 parameters every 24 steps against 6 a parameter each step: 271 times fewer, before metadata.

    The first version, which every island fetches whole in float32, is counted too.
    """
    run = runs.train(runs.tiny_config(tmp_path, text=FOUR, store="memory://four"))
    seen = status(run)
    num_parameters = sum(layout.size for layout in run.layouts)
    ring = ring_all_reduce_bytes(num_parameters, num_islands=4) / 16
    assert ring == 6 * num_parameters / 16
    for cost in (seen.bytes_per_merged_token_up, seen.bytes_per_merged_token_down):
        assert cost is not None
        assert 200 * cost <= ring <= 272 * cost
