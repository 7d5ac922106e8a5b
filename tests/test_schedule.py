"""Claims about the learning rate over own tokens, and about the parts of a token budget."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from islands.schedule import Schedule, learning_rate_at, own_share

SCHEDULE = Schedule(peak=1.0, total_tokens=1000, warmup_fraction=0.1, final_fraction=0.2)


@pytest.mark.parametrize(
    ("num_tokens", "rate"),
    [
        (0, 0.005),  # the first step is not wasted
        (25, 0.25),
        (50, 0.5),
        (100, 1.0),  # warm-up ends at a tenth
        # A third of the way down, cos(60 deg) = 1/2: 0.2 + 0.8 * 0.75
        (400, 0.8),
        (550, 0.6),  # half-way down: the middle of 1 and 0.2
        (700, 0.4),
        (1000, 0.2),
        (5000, 0.2),  # constant after
    ],
)
def test_the_rate_warms_up_and_falls_along_a_cosine_to_its_floor(
    num_tokens: int, rate: float
) -> None:
    assert learning_rate_at(num_tokens, SCHEDULE) == pytest.approx(rate)


def test_the_rate_scales_with_its_peak() -> None:
    scaled = Schedule(peak=3e-4, total_tokens=1000, warmup_fraction=0.1, final_fraction=0.2)
    assert learning_rate_at(550, scaled) == pytest.approx(1.8e-4)


def test_without_warm_up_the_first_step_has_the_peak() -> None:
    schedule = Schedule(peak=1.0, total_tokens=100, warmup_fraction=0.0, final_fraction=0.0)
    assert learning_rate_at(0, schedule) == 1.0
    assert learning_rate_at(50, schedule) == pytest.approx(0.5)
    assert learning_rate_at(100, schedule) == pytest.approx(0.0, abs=1e-12)


def test_a_budget_of_warm_up_alone_ends_at_the_floor() -> None:
    schedule = Schedule(peak=1.0, total_tokens=100, warmup_fraction=1.0, final_fraction=0.2)
    assert learning_rate_at(50, schedule) == 0.5
    assert learning_rate_at(100, schedule) == pytest.approx(0.2)


def test_the_rate_never_rises_after_the_warm_up() -> None:
    rates = [learning_rate_at(n, SCHEDULE) for n in range(100, 1100)]
    assert rates == sorted(rates, reverse=True)


def test_shares_go_by_tokens_per_second_and_are_rounded_up() -> None:
    rates = {"east": 1.0, "west": 1.0, "asia": 2.0}
    assert [own_share(1000, rates, name) for name in rates] == [250, 250, 500]
    assert [own_share(10, rates, name) for name in rates] == [3, 3, 5]  # 2.5, 2.5, 5
    assert own_share(7, {"alone": 0.3}, "alone") == 7


@settings(max_examples=200, deadline=None)
@given(
    st.integers(1, 10**12),
    st.lists(st.floats(0.01, 1e6), min_size=1, max_size=20),
)
def test_the_shares_together_are_at_least_the_total(total_tokens: int, rates: list[float]) -> None:
    named = {str(i): rate for i, rate in enumerate(rates)}
    parts = [own_share(total_tokens, named, name) for name in named]
    assert total_tokens <= sum(parts) <= total_tokens + len(parts)
    assert min(parts) >= 1
