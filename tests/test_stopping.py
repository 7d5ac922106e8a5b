"""Requests to stop and to go on: which entry counts, what takes it back, and two that ask at once."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from islands import names
from tasks import adjusting, creating, records, stopping
from tasks.runs import Run
from tasks.verifying import verify
from tests import runs
from tests.faulty import Deed, Passing

ISLANDS = ("east", "north", "west")


@pytest.fixture
def run(tmp_path: Path) -> Run:
    config = runs.tiny_config(tmp_path, store=f"memory://stopping-{tmp_path.name}")
    prepared = creating.prepare_run(config, "r")
    return creating.create_run(prepared, creating.attempts_of(prepared))


def marks() -> Callable[[], str]:
    numbers = count()
    return lambda: f"mark-{next(numbers)}"


def ask(run: Run, island: str | None, *, is_stop: bool = True) -> None:
    number = records.next_number(run.store, stopping.FOLDER)
    stopping.ask(run, is_stop=is_stop, reason="test", mark=f"asked-{number}", island=island)


def asked(run: Run) -> set[str | None]:
    """Return who is asked to stop; None stands for the run as a whole."""
    return {whom for whom in (None, *ISLANDS) if stopping.is_asked(run, whom)}


def require_sound(run: Run) -> None:
    found = verify(run.store_url, run.run_id)
    assert found.problems == []
    assert all(row.imbalance == 0 for row in found.rows)


def test_nobody_is_asked_at_first_and_nothing_is_written_to_take_that_back(run: Run) -> None:
    stopping.let_go_on(run, marks())
    stopping.let_go_on(run, marks(), "east")
    assert asked(run) == set()
    assert records.numbers_in(run.store, stopping.FOLDER) == []


def test_an_islands_own_stop_concerns_it_alone(run: Run) -> None:
    ask(run, "east")
    assert asked(run) == {"east"}


def test_a_run_wide_stop_concerns_everybody(run: Run) -> None:
    ask(run, None)
    assert asked(run) == {None, *ISLANDS}


@pytest.mark.parametrize(
    ("entries", "expected"),
    [
        ([("east", True), (None, False)], set()),
        ([(None, True), ("east", False)], {None, "north", "west"}),
        ([(None, False), ("east", True)], {"east"}),
        ([("east", True), ("north", True), ("east", False)], {"north"}),
        ([(None, True), (None, False), (None, True)], {None, *ISLANDS}),
    ],
)
def test_the_newest_entry_that_concerns_an_island_counts(
    run: Run, entries: list[tuple[str | None, bool]], expected: set[str | None]
) -> None:
    for whom, is_stop in entries:
        ask(run, whom, is_stop=is_stop)
    assert asked(run) == expected
    require_sound(run)


def test_more_than_ten_entries_are_ordered_as_numbers(run: Run) -> None:
    for number in range(12):
        ask(run, "east", is_stop=number < 10)
    assert asked(run) == set()


def test_an_islands_own_stop_is_taken_back_for_it_alone(run: Run) -> None:
    ask(run, "east")
    ask(run, "north")
    stopping.let_go_on(run, marks(), "east")
    assert asked(run) == {"north"}


@pytest.mark.parametrize("order", [[None], ["east", None], [None, "east"], ["east", None, "east"]])
def test_an_island_does_not_take_back_a_run_wide_stop(run: Run, order: list[str | None]) -> None:
    """Whichever came first: a cancelled island's flow that starts again must not train while the run is stopped."""
    for whom in order:
        ask(run, whom)
    stopping.let_go_on(run, marks(), "east")
    assert asked(run) == {None, *ISLANDS}


@pytest.mark.parametrize("order", [[None], ["east"], ["east", None], [None, "east"]])
def test_letting_the_run_go_on_takes_back_everything(run: Run, order: list[str | None]) -> None:
    for whom in order:
        ask(run, whom)
    stopping.let_go_on(run, marks())
    assert asked(run) == set()
    require_sound(run)


def test_those_who_ask_at_the_same_moment_all_get_a_number(run: Run) -> None:
    start = threading.Barrier(8)

    def work(who: int) -> None:
        start.wait(10)
        stopping.ask(run, is_stop=True, reason="test", mark=f"thread-{who}", island="east")

    threads = [threading.Thread(target=work, args=(who,)) for who in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    numbers = sorted(records.numbers_in(run.store, stopping.FOLDER))
    assert numbers == list(range(8))
    written = {records.require(run.store, f"stops/{number}.json")[0]["mark"] for number in numbers}
    assert written == {f"thread-{who}" for who in range(8)}
    require_sound(run)


def test_of_a_finished_run_nothing_is_asked_and_it_stays_sound(tmp_path: Path) -> None:
    finished = runs.train(runs.tiny_config(tmp_path))
    ask(finished, None)
    assert records.numbers_in(finished.store, stopping.FOLDER) == []
    require_sound(finished)


class Unfinished(Passing):
    """The run as it was before its end."""

    def act(self, verb: str, name: str, deed: Deed) -> Any:
        return None if (verb, name) == ("read", names.FINISHED) else deed()


@pytest.mark.parametrize("verb", ["ask", "adjust"])
def test_a_request_that_races_the_end_of_a_run_is_harmless(tmp_path: Path, verb: str) -> None:
    """It looked before the end was written, and writes after the end has listed all there is."""
    finished = runs.train(runs.tiny_config(tmp_path))
    late = replace(finished, store=Unfinished(finished.store))
    if verb == "ask":
        stopping.ask(late, is_stop=True, reason="test", mark="late")
    else:
        adjusting.adjust(late, ["inner.weight_decay=0.03"])
    assert records.numbers_in(finished.store, "stops" if verb == "ask" else "changes") == [0]
    require_sound(finished)


def test_a_damaged_request_is_passed_over_and_named_by_verify(run: Run) -> None:
    ask(run, None)
    run.store.create(names.numbered(stopping.FOLDER, 1), b"no record")
    assert asked(run) == {None, *ISLANDS}
    named = [problem.name for problem in verify(run.store_url, run.run_id).problems]
    assert named == ["stops/1.json"]
