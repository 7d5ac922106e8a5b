"""A run's supervisor on a real Prefect server where nobody serves: flow runs live and die as the tests say."""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterTags
from prefect.client.schemas.objects import FlowRun, State, StateType
from prefect.settings import PREFECT_API_URL, temporary_settings

from infra import automations
from infra.deployments import RunState
from infra.services import Services
from islands import names
from islands.sections import PipelineConfig
from islands.types import StoreLost, StoreUnavailable
from tasks import history, joining, records, stopping, supervising, trainers
from tasks.clockwork import Kind
from tasks.local import Driver
from tasks.ringing import RING_SECONDS, Ring
from tasks.runs import Run
from tasks.supervising import Post, Supervisor
from tests import runs
from tests.faulty import Deed, Passing

pytest_plugins = ["tests.prefect_server"]

NOBODY = "http://127.0.0.1:9/api"  # the discard port: nothing listens there
LOG = logging.getLogger("tests.supervising")
ISLANDS = ("east", "north", "west")


@pytest.fixture
def run(tmp_path: Path, prefect_api: Services) -> Run:
    """Return a new run; its store, and so its tag, is of this test alone."""
    return runs.start(runs.tiny_config(tmp_path, "pipeline.max_restarts=2")).run


def ticked(supervisor: Supervisor) -> dict[str, str]:
    """Let the supervisor look once, and return island -> flow run."""
    supervisor.tick()
    return {name: post.flow_run for name, post in supervisor.posts.items()}


def end(flow_run: str, kind: StateType, message: str = "the test says so") -> None:
    with get_client(sync_client=True) as client:
        client.set_flow_run_state(flow_run, State(type=kind, message=message), force=True)


def all_of(run: Run) -> list[FlowRun]:
    """Return every flow run that was started for an island of the run."""
    tags = FlowRunFilterTags(all_=[supervising.tag_of(run)])
    with get_client(sync_client=True) as client:
        return client.read_flow_runs(flow_run_filter=FlowRunFilter(tags=tags))


def synchronizers(run: Run) -> list[dict[str, Any]]:
    """Return the parameters of every flow run of `synchronize` for the run."""
    with get_client(sync_client=True) as client:
        found = [flow_run.parameters for flow_run in client.read_flow_runs()]
    return [p for p in found if p.get("store") == run.store_url and "ring" in p]


def write(run: Run, island: str) -> None:
    """Say farewell in the name of an island."""
    history.write_off(run, island, stamp=time.time)


# --- islands ---


@pytest.mark.slow
def test_each_island_gets_one_flow_run_with_its_tags_and_its_name(run: Run) -> None:
    supervisor = Supervisor(run, LOG)
    first = ticked(supervisor)
    assert ticked(supervisor) == first
    assert tuple(sorted(first)) == ISLANDS
    found = {str(flow_run.id): flow_run for flow_run in all_of(run)}
    assert set(found) == set(first.values())
    east = found[first["east"]]
    assert east.name == "east of r"
    assert east.parameters == {"store": run.store_url, "run": "r", "island": "east"}
    assert "island:east" in east.tags


@pytest.mark.slow
def test_an_island_whose_flow_fails_is_started_again_up_to_the_limit_then_written_off(
    run: Run,
) -> None:
    supervisor = Supervisor(run, LOG)
    flow_runs = [ticked(supervisor)["east"]]
    for kind in (StateType.FAILED, StateType.CRASHED):
        end(flow_runs[-1], kind)
        flow_runs.append(ticked(supervisor)["east"])
        assert ticked(supervisor)["east"] == flow_runs[-1]
    assert len(set(flow_runs)) == 3
    assert records.departed(run.store) == frozenset()
    end(flow_runs[-1], StateType.FAILED)
    ticked(supervisor)
    assert records.departed(run.store) == {"east"}
    ticked(supervisor)
    assert len(all_of(run)) == 3 + 2
    assert supervisor.outlook() == "goes on"


@pytest.mark.slow
def test_a_spare_is_started_when_another_leaves_early_and_before_the_run_counts_as_left(
    tmp_path: Path, prefect_api: Services
) -> None:
    spare = '[[islands]]\nname = "south"\nspare = true\n'
    run = runs.start(runs.tiny_config(tmp_path, text=runs.TINY + spare)).run
    supervisor = Supervisor(run, LOG)
    assert supervisor.outlook() == "goes on"
    assert set(ticked(supervisor)) == set(ISLANDS)
    for island in ISLANDS:
        write(run, island)
    assert supervisor.outlook() == "goes on"
    assert set(ticked(supervisor)) == {*ISLANDS, "south"}
    assert len(all_of(run)) == 4
    assert supervisor.run.own_tokens("south") == 4_000
    write(run, "south")
    assert supervisor.outlook() == "left"


@pytest.mark.slow
def test_who_was_cancelled_and_asked_to_leave_is_written_off(
    tmp_path: Path, prefect_api: Services
) -> None:
    run = runs.start(runs.tiny_config(tmp_path)).run
    supervisor = Supervisor(run, LOG)
    end(ticked(supervisor)["east"], StateType.CANCELLED)
    ticked(supervisor)
    assert records.departed(run.store) == frozenset()
    joining.leave(run, "east")
    ticked(supervisor)
    assert records.departed(run.store) == {"east"}
    assert supervisor.outlook() == "goes on"


@pytest.mark.slow
def test_progress_forgives_earlier_deaths(tmp_path: Path, prefect_api: Services) -> None:
    driver = runs.start(runs.tiny_config(tmp_path, "pipeline.max_restarts=1"))
    supervisor = Supervisor(driver.run, LOG)
    for _ in range(3):
        progress(driver, "east")
        end(ticked(supervisor)["east"], StateType.CRASHED)
        ticked(supervisor)
    assert records.departed(driver.run.store) == frozenset()
    end(ticked(supervisor)["east"], StateType.CRASHED)
    ticked(supervisor)
    assert records.departed(driver.run.store) == {"east"}


def progress(driver: Driver, island: str) -> None:
    """Advance until the store holds a later account of the island."""
    before = history.last_link(driver.run, island)
    while history.last_link(driver.run, island) == before:
        assert driver.advance()


@pytest.mark.slow
class Silent(Passing):
    """Answers no more."""

    def act(self, verb: str, name: str, deed: Deed) -> Any:
        raise StoreUnavailable("no answer")


def test_islands_that_lost_the_store_wait_for_one_another_and_when_all_have_the_run_fails(
    run: Run,
) -> None:
    """A full disk answers the supervisor and no learner: it must not write them all off, nor start them for ever."""
    supervisor = Supervisor(run, LOG)
    first = ticked(supervisor)
    lost = "Flow run encountered an exception: StoreLost: a store must answer"
    end(first["east"], StateType.FAILED, lost)
    assert ticked(supervisor) == first  # not started again at once
    end(first["north"], StateType.FAILED, lost)
    assert ticked(supervisor) == first
    end(first["west"], StateType.FAILED, lost)
    with pytest.raises(StoreLost, match=r"no island reaches the store: .*a store must answer"):
        supervisor.tick()
    assert records.departed(run.store) == frozenset()


def look_again_and_again(supervisor: Supervisor) -> None:
    while supervisor.outlook() == "goes on":
        supervisor.tick()
        time.sleep(0.1)


def test_a_store_that_answers_nobody_fails_the_run_after_its_patience_and_is_told_of_once(
    run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    config = run.config.model_copy(update={"pipeline": PipelineConfig(store_patience_seconds=1)})
    silent = replace(run, config=config, store=Silent(run.store))
    supervisor = Supervisor(silent, LOG)
    begun = time.monotonic()
    with pytest.raises(StoreLost, match=r"within pipeline.store_patience_seconds \(1\)"):
        look_again_and_again(supervisor)
    assert 1.0 <= time.monotonic() - begun < 10.0
    assert [r.message for r in caplog.records if "no answer" in r.message] == [
        "the store: no answer; asked until it answers"
    ]


def test_a_cancelled_island_stays_away_while_others_train(run: Run) -> None:
    supervisor = Supervisor(run, LOG)
    first = ticked(supervisor)
    end(first["east"], StateType.CANCELLED)
    for _ in range(3):
        assert ticked(supervisor) == first
    assert records.departed(run.store) == frozenset()
    write(run, "north")
    assert ticked(supervisor) == first
    assert records.departed(run.store) == {"north"}
    write(run, "west")
    assert supervisor.outlook() == "goes on"
    ticked(supervisor)
    assert supervisor.outlook() == "stopped"
    assert records.departed(run.store) == {"north", "west"}
    assert len(all_of(run)) == 3


@pytest.mark.parametrize(
    ("algorithm", "outlook"), [("decoupled", "goes on"), ("streaming", "stopped")]
)
def test_a_cancelled_island_stops_the_run_only_where_all_wait_for_each_other(
    tmp_path: Path, algorithm: str, outlook: str
) -> None:
    run = runs.start(runs.tiny_config(tmp_path, f"sync.algorithm={algorithm}")).run
    supervisor = Supervisor(run, LOG)
    supervisor._replace("east", Post("", RunState("CANCELLED")))
    assert supervisor.outlook() == outlook


@pytest.mark.slow
def test_when_every_island_is_cancelled_the_run_stops_and_can_go_on(run: Run) -> None:
    supervisor = Supervisor(run, LOG)
    for flow_run in ticked(supervisor).values():
        end(flow_run, StateType.CANCELLED)
    ticked(supervisor)
    assert supervisor.outlook() == "stopped"
    assert supervisor.are_all_away()
    assert records.departed(run.store) == frozenset()
    stopping.let_go_on(run, records.new_attempt)
    again = Supervisor(run, LOG)
    assert len(ticked(again)) == 3
    assert again.outlook() == "goes on"
    assert len(all_of(run)) == 6


@pytest.mark.slow
def test_a_cancelled_island_stays_away_when_a_crashed_train_is_started_again_and_returns_on_resume(
    run: Run,
) -> None:
    first = ticked(Supervisor(run, LOG))
    end(first["east"], StateType.CANCELLED)
    heir = Supervisor(run, LOG, is_heir=True)
    assert ticked(heir) == ticked(heir) == first
    assert heir.outlook() == "goes on"
    assert ticked(Supervisor(run, LOG))["east"] != first["east"]


@pytest.mark.slow
def test_an_island_that_has_left_is_not_started(run: Run) -> None:
    write(run, "west")
    supervisor = Supervisor(run, LOG)
    assert sorted(ticked(supervisor)) == ["east", "north"]
    end(supervisor.posts["east"].flow_run, StateType.COMPLETED)
    write(run, "east")
    ticked(supervisor)
    assert len(all_of(run)) == 2


@pytest.mark.slow
def test_a_later_supervisor_adopts_the_living_and_starts_the_dead(run: Run) -> None:
    first = ticked(Supervisor(run, LOG))
    end(first["east"], StateType.RUNNING)
    end(first["north"], StateType.CRASHED)
    second = ticked(Supervisor(run, LOG))
    assert (second["east"], second["west"]) == (first["east"], first["west"])
    assert second["north"] != first["north"]
    assert len(all_of(run)) == 4


@pytest.mark.slow
def test_another_store_with_a_run_of_that_name_has_islands_of_its_own(
    run: Run, tmp_path: Path
) -> None:
    other = runs.start(runs.tiny_config(tmp_path / "other")).run
    assert other.run_id == run.run_id
    assert not set(ticked(Supervisor(run, LOG)).values()) & set(
        ticked(Supervisor(other, LOG)).values()
    )


@pytest.mark.slow
def test_while_prefect_is_away_nothing_is_started_and_nothing_ends(
    run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    supervisor = Supervisor(run, LOG)
    first = ticked(supervisor)
    end(first["east"], StateType.FAILED)
    begun = time.monotonic()
    with temporary_settings({PREFECT_API_URL: NOBODY}):
        for _ in range(2):
            assert ticked(supervisor) == first
        assert ticked(Supervisor(run, LOG)) == {}
    assert time.monotonic() - begun < 30
    assert "Prefect must answer" in caplog.text
    assert ticked(supervisor)["east"] != first["east"]
    assert len(all_of(run)) == 4


# --- a quorum that nobody merges ---


@pytest.mark.slow
def test_a_ring_starts_one_synchronizer_whoever_answers_it(run: Run) -> None:
    ring = Ring("r", 3, 1, 2)
    for _ in range(2):
        supervising.start_synchronizer(run, ring)
    supervising.start_synchronizer(run, Ring("r", 3, 2, 2))
    found = synchronizers(run)
    assert sorted(parameters["ring"] for parameters in found) == ["r-m3-n1-k2", "r-m3-n2-k2"]
    assert {parameters["run"] for parameters in found} == {"r"}


@pytest.mark.slow
def test_a_synchronizer_is_started_where_the_islands_rings_go_unanswered(
    tmp_path: Path, prefect_api: Services
) -> None:
    run = pending(tmp_path).run
    supervisor = Supervisor(run, LOG)
    for now in (0.0, RING_SECONDS - 0.1):
        supervisor._watch_quorum(now)
        assert synchronizers(run) == []
    for now in (RING_SECONDS, RING_SECONDS + 1):
        supervisor._watch_quorum(now)
        assert [parameters["ring"] for parameters in synchronizers(run)] == ["r-m0-n0-k1"]
    supervisor._watch_quorum(3 * RING_SECONDS)
    assert len(synchronizers(run)) == 2


# --- the end; no server is needed ---


def pending(folder: Path) -> Driver:
    """Return a driver stopped where a quorum is complete and nothing was merged."""
    driver = runs.start(runs.tiny_config(folder, "sync.grace_fraction=0"))
    while not (driver.events[0].kind is Kind.MERGE and len(pushed(driver.run)) >= 2):
        assert driver.advance()
    return driver


def pushed(run: Run) -> set[str]:
    """Return who has pushed to the fragment that most have pushed to."""
    keys = [names.parse_contribution(name) for name in run.store.list_names("inbox/")]
    by_fragment: dict[int, set[str]] = {}
    for key in filter(None, keys):
        by_fragment.setdefault(key.fragment, set()).add(key.learner)
    return max(by_fragment.values(), key=len, default=set())


def test_what_is_pending_is_merged_once_all_have_left(tmp_path: Path) -> None:
    run = pending(tmp_path).run
    for island in ISLANDS:
        write(run, island)
    synchronizer = supervising.settle(run, sleep=time.sleep)
    heads = [records.find_head(run.store, layout.index)[0] for layout in run.layouts]
    assert sum(head.version for head in heads) > 0
    assert synchronizer.heads() == heads
    assert supervising.settle(run, sleep=time.sleep).heads() == heads  # nothing more to do


def test_another_synchronizer_at_the_end_is_no_obstacle(tmp_path: Path) -> None:
    """It enlists while this one waits; whoever is later merges, and both see the run settled."""
    run = pending(tmp_path).run
    for island in ISLANDS:
        write(run, island)
    name = names.numbered("synchronizers", 0)
    records.write(run.store, name, {"number": 0, "mark": "a-other", "at": 0.0})
    assert supervising.settle(run, sleep=time.sleep).number == 1


def test_a_request_to_stop_reaches_every_island_and_the_synchronizer(tmp_path: Path) -> None:
    run = runs.start(runs.tiny_config(tmp_path)).run
    assert not stopping.is_asked(run)
    supervising.ask_all_to_stop(run, "a test")
    assert stopping.is_asked(run)
    assert all(stopping.is_asked(run, island) for island in ISLANDS)


@pytest.mark.slow
def test_it_waits_for_islands_to_be_away_and_not_for_ever(run: Run) -> None:
    supervisor = Supervisor(run, LOG)
    flow_runs = ticked(supervisor)
    assert not supervising.wait_until_away(supervisor, 1.0)
    for flow_run in flow_runs.values():
        end(flow_run, StateType.COMPLETED)
    with temporary_settings({PREFECT_API_URL: NOBODY}):
        assert not supervising.wait_until_away(supervisor, 1.0)
    assert supervising.wait_until_away(supervisor, 10.0)


# --- flow runs that only look alive ---


@pytest.mark.slow
def test_a_flow_run_taken_over_that_shows_no_sign_of_life_is_replaced(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = ticked(Supervisor(run, LOG))
    end(first["east"], StateType.RUNNING)  # its process is gone, and so is what watched it
    end(first["west"], StateType.RUNNING)
    monkeypatch.setattr(supervising, "_DOUBT_SECONDS", 0.0)
    patient = replace(
        run,
        config=run.config.model_copy(update={"pipeline": PipelineConfig(checkpoint_seconds=0.01)}),
    )
    second = Supervisor(patient, LOG)
    assert ticked(second)["east"] == first["east"]
    history.register(run, "west", records.new_attempt, stamp=time.time)  # this one lives
    time.sleep(0.1)
    found = ticked(second)
    assert found["east"] != first["east"]
    assert found["west"] == first["west"]


@pytest.mark.slow
def test_a_crash_by_silence_replaces_an_island_only_if_the_store_knows_nothing_of_it_either(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After an outage of Prefect's, every living flow run may count as silent."""
    supervisor = Supervisor(run, LOG)
    first = ticked(supervisor)
    for island in ("east", "west"):
        end(first[island], StateType.CRASHED, automations.SILENT)
    assert ticked(supervisor) == first
    assert ticked(Supervisor(run, LOG)) == first
    assert not supervisor.are_all_away()
    history.register(run, "west", records.new_attempt, stamp=time.time)  # this one lives
    monkeypatch.setattr(supervising, "_DOUBT_SECONDS", 0.0)
    update = {"pipeline": PipelineConfig(checkpoint_seconds=0.01)}
    supervisor.run = replace(run, config=run.config.model_copy(update=update))
    found = ticked(supervisor)
    assert found["east"] != first["east"]
    assert found["west"] == first["west"]


# --- two of them ---


@pytest.mark.slow
def test_two_that_look_after_a_run_at_once_replace_an_island_by_one_flow_run(run: Run) -> None:
    one, other = Supervisor(run, LOG), Supervisor(run, LOG)
    first = ticked(one)
    assert ticked(other) == first
    end(first["east"], StateType.CRASHED)
    assert ticked(one)["east"] == ticked(other)["east"] != first["east"]
    assert len(all_of(run)) == 4
    end(one.posts["east"].flow_run, StateType.CRASHED)
    third = ticked(Supervisor(run, LOG))["east"]  # a later one, which has seen nothing of this
    assert third == ticked(one)["east"] == ticked(other)["east"]
    assert len(all_of(run)) == 5


def test_a_later_train_relieves_an_earlier_one(tmp_path: Path) -> None:
    run = runs.start(runs.tiny_config(tmp_path)).run
    numbers = [
        trainers.enlist(run, name, records.new_attempt, stamp=time.time) for name in ("a", "b")
    ]
    outlooks = [Supervisor(run, LOG, number).outlook() for number in numbers]
    assert outlooks == ["superseded", "goes on"]
    supervising.ask_all_to_stop(run, "a test")
    outlooks = [Supervisor(run, LOG, number).outlook() for number in numbers]
    assert outlooks == ["superseded", "stopped"]


@pytest.mark.slow
def test_a_flow_run_that_was_deleted_counts_as_ended(run: Run) -> None:
    supervisor = Supervisor(run, LOG)
    first = ticked(supervisor)
    with get_client(sync_client=True) as client:
        client.delete_flow_run(UUID(first["north"]))
    assert ticked(supervisor)["north"] != first["north"]
