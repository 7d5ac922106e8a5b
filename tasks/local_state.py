"""The local driver's state between two events: written whole, restored whole.

Resuming repeats what came after the last saved state, bit for bit. So whatever the interrupted process wrote after it
is deleted first: this process is the run's only writer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from infra.arrays import ArrayReader, write_arrays
from islands import names
from islands.landing import landed
from islands.learner import Copy
from islands.merging import Vector
from islands.types import Position, manifest_from_json
from tasks import exchanging, records
from tasks.clockwork import Event, Kind, Seat
from tasks.collecting import collect
from tasks.exchanging import Exchange
from tasks.runs import Run

if TYPE_CHECKING:
    from tasks.local import Driver

# Where a driver writes headers, but for the versions: there are ever more of those, and their heads say as much.
_FOLDERS = (
    "advisories",
    "checkpoints",
    "driver",
    "evaluations",
    "inbox",
    "learners",
    "snapshots",
    "stops",
    "synchronizers",
)


def write_state(driver: Driver) -> None:
    """Write the driver's state; every training learner's checkpoint of this very moment must be written already."""
    run = driver.run
    name = names.numbered("driver", driver.num_saves)
    arrays: dict[str, Vector] = {}
    for learner, seat in driver.seats.items():
        for fragment, copy in seat.outbox.items():
            arrays |= {
                f"{learner}-{fragment}-local": landed(copy.local),
                f"{learner}-{fragment}-anchor": copy.anchor,
            }
        if seat.exchange is not None:
            arrays |= exchanging.feedback_arrays(seat.exchange.feedback, f"{learner}-")
    folder = names.payload_folder(name, driver.new_attempt())
    payload = write_arrays(run.store, folder, arrays, chunk_elements=run.chunk_elements)
    present = [names.RUN, *_list(run, _FOLDERS)]
    driver.num_saves += 1
    body = {
        "now": driver.now,
        "events": [
            [e.time, int(e.kind), e.order, e.island, list(e.numbers)] for e in sorted(driver.events)
        ],
        "num_attempts": driver.num_attempts,
        "num_events": driver.num_events,
        "num_saves": driver.num_saves,
        "trained": driver.trained,
        "seats": {learner: _seat_to_json(seat) for learner, seat in driver.seats.items()},
        "synchronizer": {
            "number": driver.synchronizer.number,
            "estimates": driver.synchronizer.estimates(),
        },
        "present": present,
        "heads": [head.version for head in driver.synchronizer.heads()],
        "payload": payload.to_json(),
    }
    records.write(run.store, name, body)


def restore_state(driver: Driver) -> bool:
    """Bring a fresh driver to the newest saved state, and the store with it; False if there is none.

    Without one, the store is brought back to what it was when the run was created.

    Raises:
        DamagedObject: the saved state is damaged.
    """
    run = driver.run
    saved = [n for n in run.store.list_names("driver/") if names.number_of(n) is not None]
    if not saved:
        for layout in run.layouts:
            exchanging.fetch(
                run, layout.index, 0
            )  # nothing is deleted unless there is something to start from
        truncate(run, {names.RUN}, [0] * len(run.layouts))
        driver.reopen_synchronizer()
        return False
    name = max(saved, key=lambda n: names.number_of(n) or 0)
    body, _ = records.require(run.store, name)
    truncate(run, {*body["present"], name}, body["heads"])
    driver.now = body["now"]
    driver.events = [
        Event(time, Kind(kind), order, i, tuple(rest))
        for time, kind, order, i, rest in body["events"]
    ]
    driver.num_attempts, driver.num_events = body["num_attempts"], body["num_events"]
    driver.num_saves = body["num_saves"]
    driver.trained = dict(body["trained"])
    driver.reopen_synchronizer()
    driver.synchronizer.restore_estimates(
        body["synchronizer"]["estimates"], number=body["synchronizer"]["number"]
    )
    reader = ArrayReader(run.store, records.parsed(name, manifest_from_json, body["payload"]))
    for learner, seat in driver.seats.items():
        _restore_seat(driver, seat, body["seats"][learner], reader)
    collect(run)
    return True


def truncate(run: Run, present: set[str], heads: Sequence[int]) -> None:
    """Delete what a driver writes that is neither in `present`, nor a version up to a head, nor the payload of one."""
    seen = {(p, version) for p, head in enumerate(heads) for version in range(head + 1)}
    for name in [names.FINISHED, *_list(run, (*_FOLDERS, "versions", "payloads"))]:
        found = names.header_of_payload(name)
        header = name if found is None else found[0]
        version = names.parse_version(header)
        is_seen = version in seen if version is not None else header in present
        if not is_seen:
            run.store.delete(name)


def _list(run: Run, folders: Sequence[str]) -> list[str]:
    return [name for folder in folders for name in run.store.list_names(f"{folder}/")]


def _seat_to_json(seat: Seat) -> dict[str, Any]:
    body: dict[str, Any] = {
        "status": seat.status,
        "arrived": sorted(seat.arrived.items()),
        "struck": sorted(seat.struck),
        "is_blocked": seat.is_blocked,
        "num_breaks": seat.num_breaks,
        "loss": seat.loss,
        "checkpoint": None,
    }
    if seat.learner is not None and seat.exchange is not None:
        body |= {
            "checkpoint": names.checkpoint(seat.island.name, seat.learner.position),
            "incarnation": seat.exchange.incarnation,
            "previous": seat.exchange.previous,
            "bytes": [seat.exchange.link.bytes_up, seat.exchange.link.bytes_down],
            "outbox": [_copy_to_json(copy) for _, copy in sorted(seat.outbox.items())],
            # Not the checkpoint's: a push may land between a checkpoint and this state.
            "feedback": exchanging.feedback_to_json(seat.exchange.feedback),
        }
    return body


def _copy_to_json(copy: Copy) -> dict[str, Any]:
    keys = (
        "fragment",
        "base_version",
        "base_digest",
        "start",
        "stop",
        "num_tokens",
        "num_steps",
        "offered_before",
    )
    return {key: getattr(copy, key) for key in keys}


def _restore_seat(driver: Driver, seat: Seat, body: dict[str, Any], reader: ArrayReader) -> None:
    run, learner_name = driver.run, seat.island.name
    seat.status, seat.is_blocked = body["status"], body["is_blocked"]
    seat.arrived = dict(body["arrived"])
    seat.struck = set(body["struck"])
    seat.num_breaks = body["num_breaks"]
    seat.loss = body["loss"]
    if body["checkpoint"] is None:
        return
    saved = exchanging.read_checkpoint(run, body["checkpoint"])
    learner = seat.build()
    bases = [
        exchanging.fetch(run, p, clock.base_version)
        for p, clock in enumerate(saved.state.record.clocks)
    ]
    learner.restore(saved.state, [base.values for base in bases])
    seat.learner = learner
    bytes_up, bytes_down = body["bytes"]
    moved = replace(saved.state.record, bytes_up=bytes_up, bytes_down=bytes_down)
    seat.exchange = Exchange(
        run,
        learner_name,
        body["incarnation"],
        body["previous"],
        driver.new_attempt,
        stamp=driver.clock,
        link=exchanging.link_of(run, learner_name, moved),
        saved=saved.state.record,
        feedback=exchanging.read_feedback(reader, body["feedback"], f"{learner_name}-"),
    )
    for row in body["outbox"]:
        positions = {"start": Position(*row["start"]), "stop": Position(*row["stop"])}
        arrays: dict[str, Any] = {
            key: reader.read(f"{learner_name}-{row['fragment']}-{key}")
            for key in ("local", "anchor")
        }
        seat.outbox[row["fragment"]] = Copy(**{**row, **positions}, **arrays)
