"""Two synchronizers on one store, interleaved at every store operation: one version wins, momentum moves once.

Also what one synchronizer does with contributions that break a rule, arrive twice, or are damaged on the way.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from infra.arrays import ArrayReader
from infra.store import Store
from islands import names
from islands.contributions import Contribution
from islands.metrics import points_of
from islands.sealing import seal
from islands.types import Position, VersionTaken
from tasks import collecting, history, records
from tasks.clockwork import Kind
from tasks.local import Driver
from tasks.merging import Synchronizer
from tasks.reporting import status
from tasks.runs import Run
from tasks.verifying import verify
from tests import runs
from tests.faulty import Counting, Deed, Killed, Passing

SMALL = ("total_tokens=1_400", "sync.num_fragments=2", "local.checkpoint_steps=7")


class Turns:
    """Lets operations through in a scripted order: segments of (who, how many)."""

    def __init__(self, segments: Iterable[tuple[str, float]]) -> None:
        self._segments = list(segments)
        self._changed = threading.Condition()

    def wait(self, who: str) -> None:
        with self._changed:
            self._changed.wait_for(
                lambda: not self._segments or self._segments[0][0] == who, timeout=30
            )
            if not self._segments:
                return
            left = self._segments[0][1] - 1
            if left > 0:
                self._segments[0] = (who, left)
            else:
                del self._segments[0]
            self._changed.notify_all()

    def leave(self, who: str) -> None:
        """Give up the rest of one party's turns: it has ended."""
        with self._changed:
            self._segments = [segment for segment in self._segments if segment[0] != who]
            self._changed.notify_all()


class Taking(Counting):
    """A store whose operations wait for their turn."""

    def __init__(self, inner: Store, turns: Turns, who: str, *, only_creates: bool = False) -> None:
        super().__init__(inner)
        self.turns, self.who, self.only_creates = turns, who, only_creates

    def act(self, verb: str, name: str, deed: Deed) -> Any:
        if verb == "create" or not self.only_creates:
            self.turns.wait(self.who)
        return super().act(verb, name, deed)


def until_due(folder: Path, store: str, *assignments: str) -> Driver:
    """Return a driver stopped just before a merge of a fragment that has its quorum, some versions on."""
    driver = runs.start(runs.tiny_config(folder, *SMALL, *assignments, store=store))
    while True:
        event = driver.events[0]
        if event.kind is Kind.MERGE and event.time > 8:
            saved = runs.objects(driver.run)
            if Synchronizer(driver.run, lambda: "a-probe", stamp=float).poll(now=1e9).published:
                runs.fill(driver.run.store, saved)
                return driver
            runs.fill(driver.run.store, saved)
        driver.advance()


def attempts(who: str) -> Callable[[], str]:
    """Return attempt names of one party's own."""
    numbers = iter(range(1000))
    return lambda: f"a-{who}{next(numbers)}"


def poll_both(
    run: Run, segments: Iterable[tuple[str, float]], *, only_creates: bool = False
) -> list[Taking]:
    """Let two synchronizers each poll once, their operations in the given order; return their stores."""
    turns = Turns(segments)
    stores = [Taking(run.store, turns, who, only_creates=only_creates) for who in "xy"]
    failures: list[BaseException] = []

    def work(store: Taking) -> None:
        try:
            Synchronizer(replace(run, store=store), attempts(store.who), stamp=float).poll(now=1e9)
        except BaseException as exc:  # reported by the main thread
            failures.append(exc)
        finally:
            turns.leave(store.who)

    threads = [threading.Thread(target=work, args=(store,)) for store in stores]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failures, failures
    return stores


def heads(run: Run) -> list[tuple[int, bytes, bytes, dict[str, int]]]:
    """Return what the heads hold: version, parameters, momentum, merged tokens per learner."""
    found = []
    for layout in run.layouts:
        head, _ = records.find_head(run.store, layout.index)
        reader = ArrayReader(run.store, head.payload)
        merged = {name: tally.merged for name, tally in head.tallies.items()}
        found.append(
            (
                head.version,
                reader.read("params").tobytes(),
                reader.read("momentum").tobytes(),
                merged,
            )
        )
    return found


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_synchronizers_interleaved_at_every_operation_make_one_version(tmp_path: Path) -> None:
    """Each is stopped after each of its operations while the other does all it can; then it wakes up and goes on."""
    driver = until_due(tmp_path, "memory://two-synchronizers")
    run = driver.run
    before = runs.objects(run)
    Synchronizer(run, attempts("alone"), stamp=float).poll(now=1e9)
    expected = heads(run)
    num_stops = 0
    for first, second in ("xy", "yx"):
        stop_after, num_operations = 0, 1
        while stop_after <= num_operations:
            runs.fill(run.store, before)
            script = [(first, stop_after)] if stop_after else []
            stores = poll_both(run, [*script, (second, np.inf), (first, np.inf)])
            num_operations = max(store.num_operations for store in stores)
            assert heads(run) == expected, (first, stop_after)
            assert verify(run.store_url, run.run_id).problems == []
            stop_after += 1
            num_stops += 1
    assert num_stops > 40


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_synchronizers_stopped_between_any_two_writes_make_one_version(tmp_path: Path) -> None:
    """x stops after its i-th create, y after its j-th, then x goes on to its end, then y: all (i, j)."""
    driver = until_due(tmp_path, "memory://two-writers")
    run = driver.run
    before = runs.objects(run)
    num_creates = poll_both(run, [("x", np.inf), ("y", np.inf)], only_creates=True)[0].counts[
        "create"
    ]
    expected = heads(run)
    for i in range(1, num_creates + 1):
        for j in range(1, num_creates + 1):
            runs.fill(run.store, before)
            script = [("x", i), ("y", j), ("x", np.inf), ("y", np.inf)]
            poll_both(run, script, only_creates=True)
            assert heads(run) == expected, (i, j)
            assert verify(run.store_url, run.run_id).problems == []


def test_the_run_goes_on_after_a_race(tmp_path: Path) -> None:
    driver = until_due(tmp_path, "memory://after-a-race")
    poll_both(driver.run, [("x", 9), ("y", 9)] * 50)
    found = verify(driver.run.store_url, driver.run.run_id)
    assert found.problems == []
    finished = runs.finish(runs.reopen(driver.run))
    assert verify(finished.store_url, finished.run_id).problems == []


class Halting(Passing):
    """Its process is killed where it would commit a version."""

    def act(self, verb: str, name: str, deed: Deed) -> Any:
        if verb == "create" and name.startswith("versions/"):
            raise Killed
        return deed()


def test_what_a_killed_synchronizer_had_begun_is_in_nobodys_way(tmp_path: Path) -> None:
    """The next one merges fewer contributions into the same version: other numbers, beside those that lie there."""
    driver = until_due(tmp_path, "memory://begun-before")
    run = driver.run
    killed = Synchronizer(replace(run, store=Halting(run.store)), records.new_attempt, stamp=float)
    with pytest.raises(Killed):
        killed.poll(now=1e9)
    before = records.find_head(run.store, 0)[0].version
    run.store.delete(pending(run).name)
    successor = Synchronizer(run, records.new_attempt, stamp=float)
    published = [successor.poll(now=now).published for now in (1e9, 2e9)]
    assert published == [(), ((0, before + 1),)]
    assert len(records.find_head(run.store, 0)[0].consumed) == 2
    assert verify(run.store_url, run.run_id).problems == []


# --- contributions that break a rule ---


def pending(run: Run) -> Contribution:
    """Return one acceptable contribution to fragment 0."""
    head, _ = records.find_head(run.store, 0)
    for name in run.store.list_names("inbox/f0000/"):
        found = records.read_contribution(run.store, name)
        assert found is not None
        if (
            found[0].base_version == head.version
            and found[0].stop > head.tallies[found[0].learner].consumed_to
        ):
            return found[0]
    raise AssertionError("nothing pending")


def refusals(run: Run) -> dict[str, str]:
    """Return name -> reason of what fragment 0's head refused."""
    return {verdict.name: verdict.reason for verdict in records.find_head(run.store, 0)[0].refused}


def poll(run: Run) -> None:
    Synchronizer(run, attempts("z"), stamp=float).poll(now=1e9)


@pytest.mark.parametrize(
    ("reason", "change"),
    [
        ("unknown", {"learner": "stranger"}),
        ("layout", {"layout": "0" * 16}),
        ("layout", {"codec": "bfloat16"}),
        ("tokens", {"num_tokens": 0}),
        ("tokens", {"num_tokens": -5}),
        ("tokens", {"num_steps": 0}),
        ("non-finite", {"step_seconds": float("nan")}),
        ("future", {"base_version": 99}),
        ("lineage", {"base_digest": "f" * 64}),
        ("overlap", {"start": Position(0, 0)}),
        ("overlap", {"offered_before": 0}),
    ],
)
def test_a_contribution_that_breaks_a_rule_is_refused_by_name_and_the_others_merge(
    tmp_path: Path, reason: str, change: dict[str, object]
) -> None:
    driver = until_due(tmp_path, f"memory://rule-{reason}-{len(str(change))}")
    run = driver.run
    good = pending(run)
    bad = replace(good, stop=Position(good.stop.incarnation, good.stop.step + 1), **change)  # type: ignore[arg-type]
    records.write(run.store, bad.name, bad.to_json())
    version = records.find_head(run.store, 0)[0].version
    poll(run)
    head, _ = records.find_head(run.store, 0)
    assert head.version == version + 1
    assert refusals(run) == {bad.name: reason}
    assert good.learner in {entry.learner for entry in head.consumed}
    assert head.tallies[bad.learner].refused[reason][0] == 1
    seen = {island.name: island.refused for island in status(run).islands}
    if bad.learner in seen:
        assert seen[bad.learner] == {reason: 1}
    points = points_of(head, [records.find_head(run.store, p)[0] for p in range(2)], {})
    assert (f"sync/refused_{reason}", 1.0) in {(point.key, point.value) for point in points}


def test_a_round_in_which_everybody_says_zero_tokens_changes_and_advances_nothing(
    tmp_path: Path,
) -> None:
    driver = until_due(tmp_path, "memory://all-zero")
    run = driver.run
    before = heads(run)
    for fragment in range(len(run.layouts)):
        for name in run.store.list_names(f"inbox/f{fragment:04d}/"):
            found = records.read_contribution(run.store, name)
            assert found is not None
            run.store.delete(name)
            run.store.create(name, seal(replace(found[0], num_tokens=0).to_json())[0])
    poll(run)
    assert heads(run) == before


def test_an_island_whose_name_differs_by_case_alone_is_unknown(tmp_path: Path) -> None:
    driver = until_due(tmp_path, "memory://by-case")
    run = driver.run
    good, expected = pending(run), fold_alone(run)
    twin = replace(good, learner=good.learner.upper())
    run.store.create(twin.name, seal(twin.to_json())[0])
    poll(run)
    assert refusals(run) == {twin.name: "unknown"}
    for made, alone in zip(heads(run), expected, strict=True):
        assert made[:3] == alone[:3]
        assert {**alone[3], twin.learner: 0} == {twin.learner: 0, **made[3]}


@pytest.mark.parametrize("at", [-86_400.0, 86_400.0, 0.0, float("nan"), 1e300])
def test_an_islands_clock_changes_no_byte_of_what_is_merged(tmp_path: Path, at: float) -> None:
    """A day behind, a day ahead, or no clock at all: parameters, momentum and tallies of tokens are the same.

    And at the same moment: by the synchronizer's own seconds none of these times has come yet, or is long past.
    """
    driver = until_due(tmp_path, f"memory://clock-{at}")
    run = driver.run
    expected = fold_alone(run)
    for name in run.store.list_names("inbox/"):
        found = records.read_contribution(run.store, name)
        assert found is not None
        told = replace(found[0].telemetry, at=at)
        run.store.delete(name)
        run.store.create(name, seal(replace(found[0], telemetry=told).to_json())[0])
    Synchronizer(run, attempts("z"), stamp=float).poll(now=0.0)
    assert heads(run) == expected


def test_a_synchronizers_clock_that_jumps_changes_no_byte_of_what_it_merges(tmp_path: Path) -> None:
    """Summer time ends, then somebody sets the clock a day ahead, all within one look."""
    driver = until_due(tmp_path, "memory://jumps")
    run = driver.run
    expected = fold_alone(run)
    jumps = iter([0.0, -3_600.0, 86_400.0, -86_400.0] * 100)
    Synchronizer(run, attempts("z"), stamp=lambda: 1.7e9 + next(jumps)).poll(now=1e9)
    assert heads(run) == expected
    assert verify(run.store_url, run.run_id).problems == []


def test_a_synchronizer_that_slept_for_ten_minutes_merges_once_and_expires_nobody(
    tmp_path: Path,
) -> None:
    driver = until_due(tmp_path, "memory://ten-minutes")
    run = driver.run
    before = {p.index: records.find_head(run.store, p.index)[0].version for p in run.layouts}
    synchronizer = Synchronizer(run, attempts("z"), stamp=float)
    num_early = len(synchronizer.poll(now=100.0).published)
    published = synchronizer.poll(now=700.0).published
    assert num_early + len(published) > 0
    assert synchronizer.poll(now=700.1).published == ()
    assert {p: version for p, version in published if version > before[p] + 1} == {}
    assert refusals(run) == {}
    assert verify(run.store_url, run.run_id).problems == []
    finished = runs.finish(runs.reopen(run))
    assert verify(finished.store_url, finished.run_id).problems == []


def test_a_synchronizer_that_slept_in_its_grace_merges_all_that_had_come(tmp_path: Path) -> None:
    """It waited for a third island; ten minutes later what the other two had sent is as good as before."""
    driver = until_due(tmp_path, "memory://slept-in-grace")
    run, late = driver.run, pending(driver.run)
    run.store.delete(late.name)
    before = records.find_head(run.store, 0)[0].version
    synchronizer = Synchronizer(run, attempts("z"), stamp=float)
    polled = synchronizer.poll(now=100.0)
    assert polled.published == ()
    assert 0 < polled.wait_seconds < 60
    assert synchronizer.poll(now=700.0).published == ((0, before + 1),)
    head, _ = records.find_head(run.store, 0)
    others = {island.name for island in run.config.islands} - {late.learner}
    assert {entry.learner for entry in head.consumed} == others
    assert head.refused == ()


def fold_alone(run: Run) -> list[tuple[int, bytes, bytes, dict[str, int]]]:
    """Return the heads one synchronizer makes of what the store holds, and take them back."""
    kept = runs.objects(run)
    poll(run)
    made = heads(run)
    runs.fill(run.store, kept)
    return made


@pytest.mark.parametrize("age", [1, 2, 3, 5])
def test_a_contribution_beyond_the_staleness_is_refused_as_stale_once_however_late_it_comes(
    tmp_path: Path, age: int
) -> None:
    """It first appears one, two, three and five versions too late: nobody can have judged it before."""
    options = ("sync.max_staleness=1", "total_tokens=8_000")
    driver = runs.start(runs.tiny_config(tmp_path, *options, store=f"memory://too-late-{age}"))
    run = driver.run
    while records.find_head(run.store, 0)[0].version < 7 or not fresh_pushes(run):
        assert driver.advance()
    good = pending(run)
    base = good.base_version - 1 - age
    digest = records.require_commit(run.store, 0, base)[1]
    stop = Position(good.stop.incarnation, good.stop.step + 1)
    old = replace(good, base_version=base, base_digest=digest, stop=stop)
    records.write(run.store, old.name, old.to_json())
    collecting.collect(run)
    runs.finish(driver)
    recorded = [
        verdict.reason
        for version in range(1, records.find_head(run.store, 0)[0].version + 1)
        for verdict in records.require_commit(run.store, 0, version)[0].refused
        if verdict.name == old.name
    ]
    assert recorded == ["stale"]
    assert {i.name: i for i in status(run).islands}[good.learner].refused["stale"] >= 1
    assert run.store.read(old.name) is None  # written down, so it could go


def fresh_pushes(run: Run) -> list[str]:
    """Return what waits in fragment 0 on its head."""
    head, _ = records.find_head(run.store, 0)
    found = []
    for name in run.store.list_names("inbox/f0000/"):
        key = names.parse_contribution(name)
        is_fresh = key is not None and key.base_version == head.version
        if is_fresh and key.stop > head.tallies[key.learner].consumed_to:
            found.append(name)
    return found


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("fragment",), "0"),
        (("base_version",), "1"),
        (("stop", 0), "0"),
        (("norms", 0), "x"),
        (("norms", 0), 10**400),
        (("step_seconds",), "x"),
        (("num_tokens",), []),
        (("learner",), 5),
        (("payload", "objects", 0, 0), []),
        (("payload", "objects", 0, 2), "x"),
        (("payload", "arrays", 0, 1), "float128"),
        (("payload", "arrays", 0, 3), 2**70),
        (("record", "position", 0), "x"),
        (("record", "clocks", 0, "offered"), "x"),
    ],
)
def test_a_sealed_header_of_wrong_types_is_a_verdict_and_no_crash(
    tmp_path: Path, place: tuple[str | int, ...], value: object
) -> None:
    driver = until_due(tmp_path, f"memory://types-{'-'.join(map(str, place))}-{len(str(value))}")
    run = driver.run
    good = pending(run)
    bad = replace(good, stop=Position(good.stop.incarnation, good.stop.step + 1))
    body = json.loads(json.dumps(bad.to_json()))
    inner = body
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    records.write(run.store, bad.name, body)
    poll(run)
    assert refusals(run) == {bad.name: "damaged"}
    history.last_link(run, good.learner)
    assert bad.name in {problem.name for problem in verify(run.store_url, run.run_id).problems}


def test_a_learner_that_leaves_while_its_inbox_is_read_is_merged_before_the_end(
    tmp_path: Path,
) -> None:
    """Its last push and its farewell land after the synchronizer has listed the inbox: the run is not settled yet."""
    driver = runs.start(runs.tiny_config(tmp_path, *SMALL, store="memory://late-farewell"))
    run = driver.run
    while not any(event.kind is Kind.LEAVE for event in driver.events):
        driver.advance()
    while len(records.departed(run.store)) != 2:
        driver.advance()
    staying = next(
        iter({island.name for island in run.config.islands} - records.departed(run.store))
    )

    class LateFarewell:
        """The run's store; once armed, the last island's farewell appears right after the last inbox was listed."""

        is_armed = False

        def __getattr__(self, name: str) -> Any:
            return getattr(run.store, name)

        def list_names(self, prefix: str) -> list[str]:
            found = run.store.list_names(prefix)
            if prefix == "inbox/f0001/" and self.is_armed:
                history.write_off(run, staying, stamp=float)
            return found

    store = LateFarewell()
    synchronizer = Synchronizer(replace(run, store=store), attempts("z"), stamp=float)
    now = 0.0
    while np.isfinite(synchronizer.poll(now=now).wait_seconds):
        now += 1e6
    now += 1e6  # past the pace of what the last look has merged
    store.is_armed = True
    assert not synchronizer.poll(now=now).is_settled
    assert synchronizer.poll(now=now).is_settled


@pytest.mark.parametrize("value", [np.nan, np.inf, 1e30])
def test_poison_never_reaches_a_version(tmp_path: Path, value: float) -> None:
    """One element of the payload is poison, with true checksums; the header lies about its norm."""
    from infra.arrays import write_arrays

    driver = until_due(tmp_path, f"memory://poison-{value}")
    run = driver.run
    good = pending(run)
    delta = ArrayReader(run.store, good.payload).read("delta").copy()
    delta[3] = value
    stop = Position(good.stop.incarnation, good.stop.step + 1)
    name = replace(good, stop=stop).name
    payload = write_arrays(run.store, names.payload_folder(name, "a-poison"), {"delta": delta})
    records.write(run.store, name, replace(good, stop=stop, payload=payload).to_json())
    poll(run)
    head, _ = records.find_head(run.store, 0)
    assert refusals(run) == {name: "damaged"}
    assert np.isfinite(ArrayReader(run.store, head.payload).read("params")).all()
    assert np.isfinite(ArrayReader(run.store, head.payload).read("momentum")).all()


def test_poison_with_an_honest_norm_is_outsized_from_the_first_version_on(tmp_path: Path) -> None:
    from infra.arrays import write_arrays
    from islands.merging import tensor_norms

    driver = until_due(tmp_path, "memory://honest-poison")
    run = driver.run
    good = pending(run)
    delta = np.full_like(ArrayReader(run.store, good.payload).read("delta"), 1e19)
    stop = Position(good.stop.incarnation, good.stop.step + 1)
    name = replace(good, stop=stop).name
    payload = write_arrays(run.store, names.payload_folder(name, "a-poison"), {"delta": delta})
    norms = tensor_norms(delta, run.layouts[0])
    records.write(run.store, name, replace(good, stop=stop, payload=payload, norms=norms).to_json())
    poll(run)
    assert refusals(run) == {name: "outsized"}


@pytest.mark.parametrize("codec", ["int8", "int4", "e3m0", "bfloat16", "float32"])
def test_a_payload_of_another_kind_of_numbers_is_a_verdict_and_no_crash(
    tmp_path: Path, codec: str
) -> None:
    """As many of them as there should be, with true checksums."""
    from infra.arrays import write_arrays

    driver = until_due(tmp_path, f"memory://kind-{codec}", f"sync.codec={codec}")
    run = driver.run
    good = pending(run)
    coded = ArrayReader(run.store, good.payload).read("delta")
    stop = Position(good.stop.incarnation, good.stop.step + 1)
    name = replace(good, stop=stop).name
    folder = names.payload_folder(name, "a-kind")
    payload = write_arrays(run.store, folder, {"delta": coded.astype(np.float64)})
    records.write(run.store, name, replace(good, stop=stop, payload=payload).to_json())
    poll(run)
    assert refusals(run) == {name: "damaged"}


def test_a_damaged_payload_is_left_out_and_named(tmp_path: Path) -> None:
    driver = until_due(tmp_path, "memory://damaged-payload")
    run = driver.run
    good = pending(run)
    chunk = f"{good.payload.folder}/delta/c/0"
    data = run.store.read(chunk)
    assert data is not None
    run.store.delete(chunk)
    run.store.create(chunk, data[:-1] + bytes([data[-1] ^ 1]))
    poll(run)
    assert refusals(run).get(good.name, "damaged") == "damaged"
    assert good.name not in {entry.name for entry in records.find_head(run.store, 0)[0].consumed}


def test_a_damaged_header_is_left_out_and_named(tmp_path: Path) -> None:
    driver = until_due(tmp_path, "memory://damaged-header")
    run = driver.run
    good = pending(run)
    other = replace(good, stop=Position(good.stop.incarnation, good.stop.step + 1))
    run.store.create(other.name, b"{}")
    poll(run)
    assert refusals(run) == {other.name: "damaged"}


def test_a_round_that_can_commit_nothing_leaves_a_note(tmp_path: Path) -> None:
    """A single island whose only contribution is damaged: no version, an advisory, and the next one merges."""
    text = (
        runs.TINY[: runs.TINY.index("[[islands]]")] + '[[islands]]\nname = "solo"\nbatch_size = 2\n'
    )
    driver = runs.start(runs.tiny_config(tmp_path, *SMALL, store="memory://advisory", text=text))
    while not driver.run.store.list_names("inbox/f0000/"):
        driver.advance()
    run = driver.run
    name = run.store.list_names("inbox/f0000/")[0]
    found = records.read_contribution(run.store, name)
    assert found is not None
    run.store.delete(f"{found[0].payload.folder}/delta/c/0")
    version = records.find_head(run.store, 0)[0].version
    poll(run)
    assert records.find_head(run.store, 0)[0].version == version
    notes = run.store.list_names("advisories/")
    assert [records.require(run.store, note)[0]["refused"][0]["name"] for note in notes] == [name]


def test_the_same_header_twice_is_one_contribution(tmp_path: Path) -> None:
    driver = until_due(tmp_path, "memory://twice")
    run = driver.run
    good = pending(run)
    records.write(run.store, good.name, good.to_json())  # the same bytes: a repeated call
    with pytest.raises(VersionTaken):
        records.write(run.store, good.name, replace(good, num_tokens=good.num_tokens + 1).to_json())
    poll(run)
    merged = records.find_head(run.store, 0)[0].tallies[good.learner].merged
    poll(run)
    assert records.find_head(run.store, 0)[0].tallies[good.learner].merged == merged


def test_a_predecessors_work_is_fenced_unless_its_successor_listed_it(tmp_path: Path) -> None:
    driver = until_due(tmp_path, "memory://fenced")
    run = driver.run
    good = pending(run)
    history.register(run, good.learner, attempts("s"), stamp=float)
    stop = Position(good.stop.incarnation, good.stop.step + 1)
    clocks = tuple(
        replace(clock, open_tokens=clock.open_tokens + 32) for clock in good.record.clocks
    )
    record = replace(good.record, position=stop, trained=good.record.trained + 32, clocks=clocks)
    zombie = replace(good, stop=stop, record=record)
    records.write(run.store, zombie.name, zombie.to_json())
    poll(run)
    head, _ = records.find_head(run.store, 0)
    assert refusals(run) == {zombie.name: "fenced"}
    assert good.name in {entry.name for entry in head.consumed}
    position = Position(good.stop.incarnation + 1, good.record.position.step)
    returned = replace(good, stop=position, record=replace(good.record, position=position))
    records.write(run.store, returned.name, returned.to_json())
    # The successor's account has fewer tokens than the zombie's: another chain, not a shrunk one.
    assert verify(run.store_url, run.run_id).problems == []
