"""What training costs the wire, in bytes per token.

Knows counts; must not know who counted them.
"""

from __future__ import annotations


def ring_all_reduce_bytes(
    num_parameters: float, *, num_islands: int, element_bytes: float = 4.0
) -> float:
    """Return the bytes that each island sends, and as many receives, in one ring all-reduce of a gradient.

        2 · (M - 1) / M · num_parameters · element_bytes        bytes per inner step, in each direction

    for M islands: the ring passes M - 1 parts of 1/M of the vector to sum it, and as many to spread the sums. Per
    token, over all islands: divide by the tokens that one island trains in a step, since both grow with M.

    Args:
        num_parameters: elements of the gradient.
        num_islands: M; one island alone sends nothing.
        element_bytes: bytes of one element, 4 for float32.

    Source: Patarasuk and Yuan, Bandwidth optimal all-reduce algorithms for clusters of workstations, 2009.
    """
    return 2 * (num_islands - 1) / num_islands * num_parameters * element_bytes


def per_merged_token(num_bytes: int, merged_tokens: float) -> float | None:
    """Return bytes per token that is in the model, whatever became of the others; None while none is."""
    return num_bytes / merged_tokens if merged_tokens > 0 else None
