"""The operator's four questions and the drift alarm: numbers by hand, diseases injected, silence on healthy runs."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from flows import screen
from flows.report import write_report
from islands import health
from islands.config import RunConfig, parse_config
from islands.contributions import Consumed, Tally, Telemetry, after_merge
from islands.health import Finding, Limits, Member, Setting
from islands.learner import Learner
from islands.limits import HealthConfig
from islands.steering import LOCKSTEP_KEYS
from islands.types import Manifest, Position
from islands.versions import Commit
from islands.vitals import WINDOW, examine, window_points
from tasks import building, creating
from tasks.health import Doctor, WindowPoints
from tasks.local import Driver
from tasks.reporting import status
from tasks.runs import Run
from tests import runs

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


def test_a_loss_that_is_no_number_hides_nobody_elses() -> None:
    changes = {
        name: lambda e, loss=loss: replace(e, telemetry=Telemetry(loss=loss))
        for name, loss in (("asia", np.nan), ("east", 3.0))
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


# --- real learners on the local driver

BODY = (
    """
total_tokens = 10_500
durable = false
[model]
width = 16
num_layers = 1
num_heads = 2
context = 16
[data]
eval_bytes = 512
[sync]
num_fragments = 2
period_steps = 4
"""
    + "".join(f'[[islands]]\nname = "{name}"\nbatch_size = 2\n' for name in ("east", "north", "west"))
)  # fmt: skip
Bend = Callable[[Run, Learner], None]


def driver_of(folder: Path, *sets: str, bend: Bend | None = None) -> Driver:
    """Return a started driver; `bend` makes west's learner another one."""
    config = runs.tiny_config(folder, *sets, store=f"memory://health-{folder.name}", text=BODY)
    prepared = creating.prepare_run(config, "r")
    run = creating.create_run(prepared, creating.attempts_of(prepared))

    def build(name: str) -> Learner:
        learner = building.build_learner(run, name)
        if name == "west" and bend is not None:
            bend(run, learner)
        return learner

    return runs.driver_of(run, build)


def watched(driver: Driver) -> dict[str, Finding]:
    """Train to the end, looking every eight base steps, and return all that was found; the last of each kind."""
    driver.start()
    doctor, every, due = Doctor(driver.run), dict[str, Finding](), 0.0
    while driver.advance():
        if driver.now >= due:
            due = driver.now + 8
            every |= {finding.key: finding for finding in doctor.look(driver.run)}
    return every | {finding.key: finding for finding in doctor.look(driver.run)}


HEALTHY = {
    "equal": (),
    "speeds": ("islands.north.speed=0.85", "islands.west.speed=0.7", "sync.period_steps=8",
               "total_tokens=18_000"),
    "phases": ("islands.north.start_steps=1.3", "islands.west.start_steps=2.6"),
    "delays": ("sync.period_steps=6", "total_tokens=14_000",
               *(f"islands.{name}.push_delay_steps=1" for name in ("east", "north", "west"))),
    "diloco": ("sync.algorithm=diloco", "sync.num_fragments=1"),
    "coded": ("sync.codec=int4", "sync.codec_down=int4-delta"),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize("name", sorted(HEALTHY))
def test_nothing_is_said_of_a_healthy_run(tmp_path: Path, name: str) -> None:
    driver = driver_of(tmp_path, *HEALTHY[name])
    assert watched(driver) == {}
    assert min(f.version for f in status(driver.run).fragments) > WINDOW


def backwards(run: Run, learner: Learner) -> None:
    """Climb instead of descend."""
    for group in learner.optimizer.param_groups:
        group["maximize"] = True


def timid(run: Run, learner: Learner) -> None:
    """Train at a hundredth of the rate."""
    inner = run.config.inner
    small = inner.model_copy(update={"learning_rate": inner.learning_rate / 100})
    building.retune(learner, replace(run, config=run.config.model_copy(update={"inner": small})))


FAR = ("islands.west.fetch_delay_steps=10", "sync.max_staleness=8")
NEVER = ("sync.min_learners=1", "sync.grace_fraction=0.0", "total_tokens=12_000",
         "islands.east.push_delay_steps=6", "islands.west.push_delay_steps=6")  # fmt: skip
SICK: dict[str, tuple[Sequence[str], Bend | None, set[str]]] = {
    "far away": (FAR, None, {"stale west", "late west"}),
    "deltas scaled down": ((), timid, {"weak west"}),
    "deltas that point elsewhere": ((), backwards, {"opposed west"}),
    "a quorum of one": (NEVER, None, {"permissive", "starved east", "starved west"}),
    "five times as fast": (("islands.west.speed=5",), None, {"dominant west"}),
    "outer steps too large": (
        ("outer.learning_rate=10.0", "outer.momentum=0.95"),
        None,
        {"rising"},
    ),
    "gone": (
        ('local.faults=[{island="west", step=40, return_after_steps=500}]',),
        None,
        {"silent west"},
    ),
}


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize("name", sorted(SICK))
def test_each_disease_of_a_real_run_is_found(tmp_path: Path, name: str) -> None:
    sets, bend, expected = SICK[name]
    every = watched(driver_of(tmp_path, *sets, bend=bend))
    # What nobody took by the end of a run whose islands never counted was in vain.
    assert expected <= set(every) <= {*expected, "wasteful"}


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_an_island_on_another_text_is_apart(tmp_path: Path) -> None:
    driver = driver_of(tmp_path)
    seat = driver.seats["west"]
    noise = np.random.default_rng(0).integers(0, 256, len(seat.shard))
    seat.shard = noise.astype(np.uint8)
    every = watched(driver)
    assert "apart west" in every
    assert set(every) <= {"apart west", "opposed west"}


# --- what reads the store


def test_a_limit_acts_at_once_and_a_status_says_the_three_numbers(tmp_path: Path) -> None:
    driver = driver_of(tmp_path)
    driver.start()
    while driver.advance() and driver.now < 60:
        pass
    seen = status(driver.run)
    assert (seen.live, seen.contributing, seen.quorum, seen.findings) == (3, 3, 2, ())
    strict = config_with(driver.run.config, max_share=0.3)
    found = status(replace(driver.run, config=strict)).findings
    assert [f.key for f in found] == ["dominant east", "dominant north", "dominant west"]
    apart = strict.model_copy(update={"quarantine": ("west",)})
    found = status(replace(driver.run, config=apart)).findings
    assert [f.key for f in found] == ["dominant east", "dominant north"]


def config_with(config: RunConfig, **limits: float) -> RunConfig:
    return config.model_copy(update={"health": HealthConfig(**limits)})  # type: ignore[arg-type]


def test_a_window_is_the_same_wherever_its_reader_begins(tmp_path: Path) -> None:
    from tasks import records

    driver = driver_of(tmp_path)
    driver.start()
    while driver.advance() and driver.now < 80:
        pass
    run = driver.run
    heads = [records.require_commit(run.store, p, 1)[0] for p in range(2)]
    early, made = WindowPoints(run), []
    newest = records.find_head(run.store, 0)[0].version
    assert newest > WINDOW
    for version in range(newest + 1):
        commit, _ = records.require_commit(run.store, 0, version)
        made = list(early.of(commit, heads))
        if version == 0:
            assert made == []
    assert made == list(WindowPoints(run).of(commit, heads))
    assert len(made) == 2 + 3 * 4
    # A tracker whose last batch was lost goes back, and must make the same points again.
    before, _ = records.require_commit(run.store, 0, newest - 2)
    assert list(early.of(before, heads)) == list(WindowPoints(run).of(before, heads))
    assert list(early.of(commit, heads)) == made


def test_status_and_report_show_each_finding_with_its_remedy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    driver = driver_of(tmp_path)
    driver.start()
    while driver.advance() and driver.now < 60:
        pass
    healthy = driver.run
    sick = replace(healthy, config=config_with(healthy.config, max_share=0.3))
    remedy = "make its steps smaller: `diloco adjust r --set islands.east.batch_size=1`"
    screen.show_status(status(sick))
    shown = capsys.readouterr().out
    assert "islands: 3 live, 3 contributing, 2 needed for a merge\n" in shown
    assert "warning: dominant east: 0.333 of the merges' weight is its own (limit 0.3); " in shown
    assert shown.count("warning: ") == 3
    assert remedy in shown
    screen.show_status(status(healthy))
    assert "warning" not in capsys.readouterr().out

    write_report(sick, tmp_path / "sick.html")
    write_report(healthy, tmp_path / "healthy.html")
    page = (tmp_path / "sick.html").read_text()
    assert (
        f"<td>dominant</td><td>east</td><td>0.333 of the merges&#x27; weight is its own</td><td>{remedy}</td>"
        in page
    )
    assert "3 live, 3 contributing, 2 needed for a merge" in page
    assert "nothing found" in (tmp_path / "healthy.html").read_text()


def test_who_has_written_nothing_for_long_is_not_alive(tmp_path: Path) -> None:
    fault = 'local.faults=[{island="west", step=12, return_after_steps=500}]'
    driver = driver_of(tmp_path, fault)
    driver.start()
    while driver.advance() and driver.now < 60:
        pass
    seen = status(driver.run)
    # Three periods of 4 steps are long: west wrote last at step 12.
    assert (seen.live, seen.contributing, seen.quorum) == (2, 2, 2)
    assert [island.state for island in seen.islands] == ["training"] * 3
