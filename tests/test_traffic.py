"""Claims about bytes per token, by hand."""

from __future__ import annotations

from islands.traffic import per_merged_token, ring_all_reduce_bytes


def test_a_ring_passes_each_part_twice_save_for_ones_own() -> None:
    # 4 islands, 1,000 float32 elements: 3 parts of 250 to sum them, 3 to spread the sums, 4 bytes each.
    assert ring_all_reduce_bytes(1_000, num_islands=4) == 2 * 3 * 250 * 4
    assert ring_all_reduce_bytes(1_000, num_islands=2, element_bytes=2) == 2 * 500 * 2
    assert ring_all_reduce_bytes(1_000, num_islands=1) == 0.0


def test_bytes_per_merged_token_are_unknown_while_nothing_is_merged() -> None:
    assert per_merged_token(600, 400) == 1.5
    assert per_merged_token(600, 0) is None
