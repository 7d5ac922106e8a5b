"""The operator's four questions and the drift alarm: numbers by hand, diseases injected, silence on healthy runs."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import pytest

from islands import health
from islands.config import parse_config
from islands.contributions import Consumed, Tally, Telemetry, after_merge
from islands.health import Finding, Limits, Member, Setting
from islands.limits import HealthConfig
from islands.steering import LOCKSTEP_KEYS
from islands.types import Manifest, Position
from islands.versions import Commit
from islands.vitals import WINDOW, examine, window_points

LIMITS = Limits(**HealthConfig().model_dump())
MEMBER = Member(rate=1.0, speed=1.0, batch_size=2)
FOUR = dict.fromkeys(("asia", "east", "north", "west"), MEMBER)
SETTING = Setting(
    run_id="r",
    members=FOUR,
    quorum=2,
    least=2,
    blocks=False,
    period_steps=24,
    grace_fraction=0.25,
    rate_key="outer.learning_rate",
    learning_rate=0.7,
)


def entry(learner: str, version: int) -> Consumed:
    """Return what a version remembers of ten steps of a learner that is as all others are."""
    start, stop = Position(0, 100 + 10 * version), Position(0, 110 + 10 * version)
    return Consumed(
        name=f"{learner}-{version}",
        digest="",
        learner=learner,
        start=start,
        stop=stop,
        num_tokens=100,
        num_steps=10,
        offered_before=100 * version,
        staleness=0,
        weight=1.0,
        norm=3.0,
        step_seconds=0.1,
        telemetry=Telemetry(loss=2.0),
        cosine=0.5,
    )


Change = Callable[[Consumed], Consumed | None]


def merges(
    changes: Mapping[str, Change] | None = None,
    *,
    islands: Sequence[str] = tuple(FOUR),
    num: int = WINDOW,
) -> list[Commit]:
    """Return versions 1 to `num` of a fragment; a change bends an island's entries, or leaves one out."""
    commits: list[Commit] = []
    tallies: Mapping[str, Tally] = {}
    for version in range(1, num + 1):
        entries = []
        for name in islands:
            change = (changes or {}).get(name)
            bent = entry(name, version) if change is None else change(entry(name, version))
            entries += [] if bent is None else [bent]
        tallies = after_merge(tallies, entries, (), version=version)
        commits.append(
            Commit(
                fragment=0,
                version=version,
                parent_digest="",
                consumed=tuple(entries),
                refused=(),
                tallies=tallies,
                median_norm=3.0,
                learning_rate=0.7,
                momentum=0.7,
                codec="float32",
                synchronizer=0,
                payload=Manifest("", (), ()),
                at=float(version),
            )
        )
    return commits


def version_of(entry: Consumed) -> int:
    return entry.offered_before // 100


def found(
    changes: Mapping[str, Change] | None = None, setting: Setting = SETTING
) -> dict[str, Finding]:
    rows = [merges(changes, islands=tuple(setting.members))]
    return {finding.key: finding for finding in health.find(rows, LIMITS, setting)}


# --- the numbers


def test_an_islands_vitals_by_hand() -> None:
    def west(e: Consumed) -> Consumed | None:
        # Out in versions 11 and 12, late in 1 to 5, and by two versions in 1.
        n = version_of(e)
        if n > 10:
            return None
        late = {1: 2, 2: 1, 3: 1, 4: 1, 5: 1}.get(n, 0)
        return replace(e, staleness=late, weight=0.5, norm=6.0, num_tokens=50, cosine=n / 10)

    def lossy(e: Consumed) -> Consumed:
        return replace(e, telemetry=Telemetry(loss=3.0 if version_of(e) > 6 else 2.5))

    rows = [merges({"west": west, "north": lossy})]
    vitals = examine(rows, {name: 1.0 for name in FOUR})
    own = vitals.islands["west"]
    assert own.num_merged == 10
    assert own.staleness == pytest.approx(0.6)  # (2 + 4 * 1) / 10
    assert own.late_share == pytest.approx(0.5)
    assert own.missed == 2
    assert own.token_share == pytest.approx(50 / 350 / 0.25)
    assert own.weight_share == pytest.approx(0.5 / 3.5)  # after version 10 it is not there
    assert (own.norm_ratio, own.norm_drift) == (2.0, 1.0)
    assert own.cosine == pytest.approx(0.55)  # (0.1 + ... + 1.0) / 10
    assert own.cosine_error == pytest.approx(0.302765 / 10**0.5, rel=1e-5)
    assert own.loss_gap == 0.0
    # North: 3 beside 2, 2, 2 in versions 7 to 12; its own loss was 2.5 before.
    assert vitals.islands["north"].loss_gap == pytest.approx(0.5)
    assert vitals.loss_rise == 0.0  # of the rises 0, 0, 0 and 0.2 the median
    assert vitals.participation == 1.0
    # West offered 50 of each 100 that it passed on: from version 1 to 10 it offered 850, of which 450 are merged.
    assert vitals.lost_share == pytest.approx(450 / (3 * 1100 + 900))


def test_who_starts_late_or_leaves_early_is_missed_by_no_merge() -> None:
    vitals = examine([merges({"west": lambda e: e if 4 <= version_of(e) <= 8 else None})], {})
    assert vitals.participation == 1.0
    # In every second version only: there from 2 to 12, in 6 of those 11 merges; version 1 is as whole as can be.
    half = examine([merges({"west": lambda e: None if version_of(e) % 2 else e})], {})
    assert half.participation == pytest.approx((1 + 6 * 1 + 5 * 0.75) / 12)
    west = half.islands["west"]
    assert west.weight_share == pytest.approx(6 * 0.25 / 11)


@pytest.mark.parametrize("told", [np.nan, np.inf, 1e308])
def test_a_loss_that_is_none_hides_nobody_elses(told: float) -> None:
    changes = {
        name: lambda e, loss=loss: replace(e, telemetry=Telemetry(loss=loss))
        for name, loss in (("asia", told), ("east", 3.0))
    }
    vitals = examine([merges(changes)], {})
    gaps = {name: own.loss_gap for name, own in vitals.islands.items()}
    assert gaps.pop("asia") is None
    assert gaps == pytest.approx({"east": 0.5, "north": -0.2, "west": -0.2})
    assert vitals.loss_rise == 0.0


def test_the_points_of_a_window_bear_an_islands_own_step() -> None:
    row = merges({"west": lambda e: replace(e, weight=2.0, staleness=1, cosine=None)})
    points = {(p.run, p.key): p for p in window_points(row, [row[-2]])}
    share = points["island/west", "health/weight_share"]
    assert (round(share.value, 9), share.step) == (
        0.4,
        2300,
    )  # 2 of 5; 10 tokens a step up to step 230
    assert points["island/west", "health/staleness"].value == 1.0
    assert points["island/west", "health/norm_ratio"].value == 1.0
    assert ("island/west", "health/cosine") not in points
    assert points["island/east", "health/cosine"].value == 0.5
    # 12 versions of 4 contributions of 100 tokens.
    run = points["run", "health/participation"]
    assert (run.value, run.step) == (1.0, 4800)
    assert points["run", "health/lost_share"].value == 0.0


# --- the findings


def late(e: Consumed) -> Consumed:
    return replace(e, staleness=1, weight=0.5)


def rising(e: Consumed) -> Consumed:
    return replace(e, telemetry=Telemetry(loss=2.07 if version_of(e) > 6 else 2.0))


DISEASES: dict[str, tuple[dict[str, Change], float]] = {
    "stale west": ({"west": lambda e: replace(e, staleness=2)}, 2.0),
    "late west": ({"west": late}, 1.0),
    "small west": ({"west": lambda e: replace(e, num_tokens=30)}, 30 / 330 / 0.25),
    "weak west": ({"west": lambda e: replace(e, norm=0.6)}, 0.2),
    "strong west": ({"west": lambda e: replace(e, norm=15.0)}, 5.0),
    "drifting west": (
        {"west": lambda e: replace(e, norm=9.0 if version_of(e) > 8 else 1.5)},
        6.0,
    ),
    "opposed west": ({"west": lambda e: replace(e, cosine=-0.1)}, -0.1),
    "apart west": ({"west": lambda e: replace(e, telemetry=Telemetry(loss=3.1))}, 0.55),
    "dominant west": ({"west": lambda e: replace(e, weight=4.0)}, 4 / 7),
    "silent west": ({"west": lambda e: None}, 13.0),
    "wasteful": (
        dict.fromkeys(FOUR, lambda e: replace(e, num_tokens=70)),
        0.3 * 1100 / 1100,
    ),
    "rising": (dict.fromkeys(FOUR, rising), 0.035),
}


@pytest.mark.parametrize("key", sorted(DISEASES))
def test_each_disease_is_found_and_measured(key: str) -> None:
    changes, value = DISEASES[key]
    if key == "silent west":  # it counted once, before the window
        rows = [merges({"west": lambda e: e if version_of(e) == 1 else None}, num=14)]
        every = {f.key: f for f in health.find([rows[0][2:]], LIMITS, SETTING)}
    else:
        every = found(changes)
    assert every[key].value == pytest.approx(value)
    assert {*every} - {key} <= ({"late west"} if key == "stale west" else set())


def test_a_healthy_run_has_no_findings() -> None:
    assert found() == {}


@pytest.mark.parametrize(
    "change",
    [
        lambda e: replace(e, staleness=1 if version_of(e) % 2 else 0),  # late in every second one
        lambda e: replace(e, num_tokens=60),
        lambda e: replace(e, norm=1.0),  # a third
        lambda e: replace(e, norm=11.0),
        lambda e: replace(e, norm=3.0 if version_of(e) > 8 else 1.0),
        lambda e: replace(e, cosine=-0.04),
        lambda e: replace(e, cosine=-0.9 if version_of(e) % 4 == 0 else 0.1),  # chance
        lambda e: replace(e, telemetry=Telemetry(loss=2.9)),
        lambda e: replace(e, weight=3.0),
        lambda e: e if version_of(e) < 11 else None,
        lambda e: replace(e, telemetry=Telemetry()),  # it tells no loss
        lambda e: replace(
            e, stop=Position(0, 59), telemetry=Telemetry(loss=9.0)
        ),  # of its beginning
    ],
)
def test_what_keeps_within_the_limits_is_no_finding(change: Change) -> None:
    assert found({"west": change}) == {}


def test_a_quorum_is_permissive_where_few_take_part_and_more_could_be_waited_for() -> None:
    # East counts in all twelve, the others in three each, the first and the last among them.
    def seldom(*versions: int) -> Change:
        return lambda e: e if version_of(e) in (1, *versions, 12) else None

    changes = {"asia": seldom(4), "north": seldom(6), "west": seldom(8)}
    every = found(changes, replace(SETTING, quorum=1, least=1))
    assert set(every) == {"permissive", "dominant east", "wasteful"}
    assert every["permissive"].value == pytest.approx((2 * 4 + 3 * 2 + 7 * 1) / 48)
    assert "--set sync.min_learners=3`" in every["permissive"].remedy
    assert "permissive" not in found(changes, replace(SETTING, quorum=4))


def test_an_island_that_trains_and_never_counts_is_starved_and_makes_the_quorum_permissive() -> (
    None
):
    members = {**FOUR, **dict.fromkeys(("asia", "north", "west"), replace(MEMBER, num_periods=12))}
    setting = replace(SETTING, members=members, quorum=1)
    changes: dict[str, Change] = dict.fromkeys(("asia", "north", "west"), lambda e: None)
    every = found(changes, setting)
    assert set(every) == {"starved asia", "starved north", "starved west", "permissive"}
    assert every["permissive"].value == 0.25
    assert found(changes, replace(setting, members=FOUR)) == {}  # they have hardly begun


def test_nothing_is_said_before_twelve_versions_of_every_fragment() -> None:
    sick = {"west": lambda e: replace(e, norm=0.1)}
    rows = [merges(sick), merges(sick, num=WINDOW - 1)]
    assert health.find(rows, LIMITS, SETTING) == ()
    assert health.find([merges(sick), merges(sick)], LIMITS, SETTING)


@pytest.mark.parametrize(("num_islands", "most"), [(1, 1.0), (2, 0.75), (4, 0.5), (8, 0.3)])
def test_an_island_may_weigh_as_much_as_three_others(num_islands: int, most: float) -> None:
    assert health.largest_share(LIMITS, num_islands) == pytest.approx(most)
    assert health.largest_share(replace(LIMITS, max_share=0.9), num_islands) == 0.9


def test_nobody_is_missed_once_all_have_left() -> None:
    rows = [merges({"west": lambda e: e if version_of(e) == 1 else None}, num=14)[2:]]
    assert health.find(rows, LIMITS, replace(SETTING, is_over=True)) == ()


# --- the remedies


SITUATIONS = (
    SETTING,
    replace(SETTING, quorum=1, least=1),
    replace(SETTING, quorum=4, least=4),
    replace(SETTING, grace_fraction=1.0),
    replace(SETTING, blocks=True, rate_key="inner.learning_rate"),
    replace(SETTING, members={name: replace(MEMBER, batch_size=1) for name in FOUR}),
)
TEXT = "".join(f'[[islands]]\nname = "{name}"\nbatch_size = 2\n' for name in FOUR)


@pytest.mark.parametrize("setting", SITUATIONS)
def test_a_remedy_is_a_command_the_run_takes(setting: Setting) -> None:
    every = [one for changes, _ in DISEASES.values() for one in found(changes, setting).values()]
    assert len(every) > 8
    for finding in every:
        commands = re.findall(r"`(diloco [^`]+)`", finding.remedy)
        assert commands, finding.text
        least = [f"sync.min_learners={setting.least}"]
        for command in commands:
            verb, run, *rest = command.split()[1:]
            assert run == "r"
            if verb == "adjust":
                assert rest[0] == "--set"
                assert rest[1].startswith(finding.knob)
                if setting.blocks:  # learners that wait for one another take over no other pace
                    assert finding.knob not in (*LOCKSTEP_KEYS, "islands.west.speed")
                parse_config(TEXT, assignments=[*least, rest[1]], source="a remedy")
                least = [*least, rest[1]]
            elif verb == "quarantine":
                parse_config(TEXT, assignments=[*least, f'quarantine=["{rest[0]}"]'], source="it")
            else:
                assert verb in ("status", "stop")


def test_a_finding_says_value_limit_and_remedy_in_one_line() -> None:
    assert found(DISEASES["weak west"][0])["weak west"].text == (
        "weak west: 0.2 times the others' length of update per step (limit 0.25); "
        "set it apart: `diloco quarantine r west`"
    )
