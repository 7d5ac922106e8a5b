"""The section `health`: limits beyond which people are told that a run is unwell.

Knows single limits with their bounds; must not know how what they bound is measured (`islands/vitals.py`).
"""

from __future__ import annotations

from pydantic import Field

from islands.sections import Section


class HealthConfig(Section):
    """Limits beyond which a run is said to be unwell. They are for people: no merge depends on one."""

    max_staleness: float = Field(
        default=1.0,
        ge=0,
        le=1_000_000,
        description="Mean versions that an island's merged work may lie behind.",
    )
    max_late_share: float = Field(
        default=0.5,
        ge=0,
        le=1,
        description="Share of an island's merged work that may be late, which halves its weight.",
    )
    max_missed_merges: int = Field(
        default=12,
        ge=1,
        le=1_000_000,
        description="Versions of a fragment in a row without an island that counted before.",
    )
    min_token_share: float = Field(
        default=0.5, ge=0, le=1, description="Least tokens of an island, over what its speed says."
    )
    max_norm_ratio: float = Field(
        default=4.0,
        gt=1,
        le=1_000_000,
        description="Most by which an island's updates, per step, may be longer or shorter than the others'.",
    )
    min_participation: float = Field(
        default=0.5, ge=0, le=1, description="Least mean share of the islands that a merge has."
    )
    max_lost_share: float = Field(
        default=0.25, ge=0, le=1, description="Share of the offered tokens that no merge may take."
    )
    max_share: float | None = Field(
        default=None,
        gt=0,
        le=1,
        description="Largest share of the merges' weight of one island; absent: what three others weigh.",
    )
    min_cosine: float = Field(
        default=-0.05,
        ge=-1,
        le=1,
        description="Least mean cosine of an island's updates to the others'.",
    )
    max_loss_gap: float = Field(
        default=0.5,
        gt=0,
        le=1_000_000,
        description="Most by which an island's training loss may differ from the others', as a share of theirs.",
    )
    max_loss_rise: float = Field(
        default=0.03,
        gt=0,
        le=1_000_000,
        description="Most by which the training loss may rise within twelve merges, as a share of it.",
    )
