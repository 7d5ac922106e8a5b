"""Flow `empty`: does nothing. The benchmark `latency` starts it: what starting any flow costs."""

from __future__ import annotations

from prefect import flow


@flow(name="empty")
def empty() -> None:
    """Do nothing."""
