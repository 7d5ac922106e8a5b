"""Plans of faults: what a file may say, what a seed makes, when a fault is due. No process, no store."""

from __future__ import annotations

import pytest

from islands.chaos import (
    KINDS,
    OF_AN_ISLAND,
    Fault,
    Plan,
    Strike,
    checked,
    is_due,
    plan_from_toml,
    random_plan,
    strike_from_json,
)
from islands.types import ConfigError

ISLANDS = ("west", "east")


def plan(text: str) -> Plan:
    return plan_from_toml(text, ISLANDS, source="p.toml")


def problems(text: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        plan(text)
    return str(caught.value).splitlines()


def test_a_file_says_what_strikes_whom_when_and_for_how_long() -> None:
    found = plan(
        """
        [[faults]]
        kind = "kill"
        island = "west"
        step = 300
        [[faults]]
        kind = "slow"
        target = "cluster"
        island = "east"
        after_seconds = 20
        seconds = 5
        factor = 2.5
        [[faults]]
        kind = "blackhole"
        target = "mlflow"
        after_seconds = 0.5
        seconds = 10
        """
    )
    assert found.faults == (
        Fault("kill", island="west", step=300),
        Fault("slow", "cluster", "east", after_seconds=20.0, seconds=5.0, factor=2.5),
        Fault("blackhole", "mlflow", after_seconds=0.5, seconds=10.0),
    )
    assert [str(fault) for fault in found.faults] == [
        "kill west's learner, at west's step 300",
        "slow east's cluster, 2.5 times slower for 5 s, after 20 s",
        "blackhole mlflow for 10 s, after 0.5 s",
    ]


def test_every_wrong_field_is_named_with_its_place() -> None:
    assert problems(
        '[[faults]]\nkind = "kil"\n[[faults]]\nkind = "kill"\nstep = "7"\nwhen = 3\n[[faults]]\nstep = 1'
    ) == [
        "p.toml: faults.0.kind must be one of kill, stop, slow, cut, corrupt, fill, blackhole, got str kil; correct it",
        "p.toml: faults.1.step must be of type int, got str 7; correct it",
        "p.toml: faults.1.when must be one of kind, target, island, step, after_seconds, seconds, factor, "
        "got another; correct the name",
        "p.toml: faults.2.kind must be one of kill, stop, slow, cut, corrupt, fill, blackhole, got nothing; add it",
    ]


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ('kind="kill"\nstep=1', "island must be one of west, east, got nothing"),
        ('kind="kill"\nisland="north"\nstep=1', "island must be one of west, east, got north"),
        ('kind="kill"\nisland="west"', "step or after_seconds must be given, one of them, got neither"),
        ('kind="kill"\nisland="west"\nstep=1\nafter_seconds=1', "one of them, got both"),
        ('kind="kill"\nisland="west"\nstep=0', "step must be >= 1, got 0"),
        ('kind="kill"\nisland="west"\nafter_seconds=-1', "after_seconds must be >= 0 and <= 86400, got -1"),
        ('kind="kill"\nisland="west"\nstep=1\nseconds=2', "seconds must be absent for kill, got 2"),
        ('kind="stop"\nisland="west"\nstep=1', "seconds must be > 0 and <= 86400 for stop, got nothing"),
        ('kind="cut"\nisland="west"\nstep=1\nseconds=0', "for cut, got 0"),
        ('kind="slow"\nisland="west"\nstep=1\nseconds=2\nfactor=1', "factor must be > 1 and <= 1000 for slow, got 1"),
        ('kind="stop"\nisland="west"\nstep=1\nseconds=2\nfactor=3', "factor must be absent for stop, got 3"),
        ('kind="cut"\ntarget="train"\nafter_seconds=1\nseconds=2', "target must be learner for cut, got train"),
        ('kind="blackhole"\nisland="west"\nstep=1\nseconds=2', "target must be prefect or mlflow for blackhole"),
        ('kind="kill"\ntarget="train"\nisland="west"\nafter_seconds=1', "island must be absent for train"),
        ('kind="kill"\ntarget="train"\nstep=1', "island must be one of west, east, got nothing"),
    ],
)  # fmt: skip
def test_a_fault_that_breaks_a_rule_is_refused(fields: str, problem: str) -> None:
    assert any(problem in line for line in problems(f"[[faults]]\n{fields}"))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("faults = 3", "a plan must hold [[faults]] and nothing else, got faults"),
        ("[[faults]]\nkind = 'kill'\n[other]", "got faults, other"),
        ("", "got nothing"),
        ("faults = []", "a plan must have 1 to 10,000 faults, got 0"),
        ("faults = [7]", "faults.0 must be a table, got 7"),
        ("[[faults", "must be TOML"),
    ],
)
def test_what_is_no_plan_is_refused(text: str, problem: str) -> None:
    assert any(problem in line for line in problems(text))


def test_a_plan_has_an_end() -> None:
    fault = '[[faults]]\nkind = "kill"\ntarget = "train"\nafter_seconds = 1\n'
    assert problems(fault * 10_001) == [
        "p.toml: a plan must have 1 to 10,000 faults, got 10,001; add or remove some"
    ]


def test_a_seed_is_a_plan_and_another_seed_another_one() -> None:
    made = [random_plan(ISLANDS, seed=seed, seconds=600, every_seconds=10) for seed in (1, 1, 2)]
    assert made[0] == made[1] != made[2]
    assert [fault.after_seconds for fault in made[0].faults] == [10.0 * n for n in range(1, 61)]
    assert {fault.kind for fault in made[0].faults} == set(KINDS)
    assert checked(made[0], ISLANDS, source="seed 1") == made[0]  # keeps every rule


def test_a_random_plan_keeps_to_the_kinds_and_targets_it_is_given() -> None:
    made = random_plan(
        ISLANDS,
        seed=0,
        seconds=300,
        every_seconds=3,
        kinds=("kill", "cut"),
        targets=("learner", "train"),
    )
    assert len(made.faults) == 100
    assert {(fault.kind, fault.target) for fault in made.faults} == {
        ("kill", "learner"),
        ("kill", "train"),
        ("cut", "learner"),
    }
    assert all((fault.island in ISLANDS) == (fault.target in OF_AN_ISLAND) for fault in made.faults)


def test_kinds_that_can_strike_none_of_the_targets_are_refused() -> None:
    with pytest.raises(ConfigError, match="got cut for train"):
        random_plan(ISLANDS, seed=0, seconds=9, every_seconds=3, kinds=("cut",), targets=("train",))
    with pytest.raises(ConfigError, match="got one every 10 s of 5 s"):
        random_plan(ISLANDS, seed=0, seconds=5, every_seconds=10)


def test_a_fault_is_due_at_its_islands_step_or_after_its_seconds() -> None:
    at_step = Fault("kill", island="west", step=300)
    assert not is_due(at_step, steps={"west": 299, "east": 900}, elapsed=1e6)
    assert is_due(at_step, steps={"west": 300}, elapsed=0.0)
    later = Fault("kill", "train", after_seconds=20.0)
    assert not is_due(later, steps={"west": 10**6}, elapsed=19.9)
    assert is_due(later, steps={}, elapsed=20.0)


def test_a_strike_is_read_back_from_what_is_written() -> None:
    strike = Strike(Fault("cut", island="west", step=3, seconds=2.0), "told", 5.0, "m", 7, "a/b")
    assert strike_from_json(strike.to_json()) == strike
    with pytest.raises(ValueError, match="one of kill"):
        strike_from_json({**strike.to_json(), "fault": {**strike.to_json()["fault"], "kind": "x"}})
