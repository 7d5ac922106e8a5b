"""A learner's side of the store: push, fetch, checkpoint.

Knows records and the learner's copies; must not know when any of it is due, nor a synchronizer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from infra.arrays import ArrayReader, write_arrays
from infra.link import Link
from islands import names
from islands.codecs import coded_length, encode
from islands.codecs import decode as decoded
from islands.contributions import Contribution, Lineage, Tally, Telemetry, judge
from islands.feedback import Feedback, Outstanding, after_merge, after_push, compensated
from islands.fragments import layout_digest, pseudo_gradient
from islands.landing import landed
from islands.learner import Base, Copy, LearnerState
from islands.ledger import LearnerRecord, record_from_json
from islands.merging import Vector, tensor_norms
from islands.types import Position, Refused, manifest_from_json
from tasks import records
from tasks.records import NewAttempt, Stamp
from tasks.runs import Run


@dataclass(frozen=True, slots=True)
class Saved:
    """A checkpoint as read: its name, the state, the digest of its record, what coding owes per fragment."""

    name: str
    state: LearnerState
    digest: str
    feedback: tuple[Feedback, ...]


class Exchange:
    """Writes one incarnation's records, each linked to the one before. One thread at a time.

    Args:
        run: the open run.
        learner: name of the learner.
        incarnation: under which this process registered.
        previous: digest of the newest link so far, "" if none.
        new_attempt: returns a name no other writer uses.
        stamp: the time to write beside records, for people.
        link: through which all of this goes, see `link_of`.
        saved: the account in this incarnation's newest checkpoint, if it has one.
        feedback: per fragment, what coding owes from before; absent: nothing.
    """

    def __init__(
        self,
        run: Run,
        learner: str,
        incarnation: int,
        previous: str,
        new_attempt: NewAttempt,
        *,
        stamp: Stamp,
        link: Link,
        saved: LearnerRecord | None = None,
        feedback: Sequence[Feedback] | None = None,
    ) -> None:
        self.run = replace(run, store=link)
        self.link = link
        self.learner = learner
        self.incarnation = incarnation
        self.previous = previous
        self._new_attempt = new_attempt
        self._stamp = stamp
        self._saved = saved
        sync = run.config.sync
        self._owes = sync.error_feedback and sync.codec != "float32"
        self.feedback = list(feedback or [Feedback()] * len(run.layouts))

    def settle(self, fragment: int, consumed_to: Position) -> None:
        """Take in up to where a version has merged this learner's work; versions in the order of their numbers."""
        self.feedback[fragment] = after_merge(self.feedback[fragment], consumed_to)

    def catch_up(self, fragment: int, after: int, upto: int) -> None:
        """Take in what the versions (after, upto] have merged of this learner."""
        for mark in merged_marks(self.run, self.learner, fragment, after=after, upto=upto):
            self.settle(fragment, mark)

    def push(
        self, copy: Copy, account: LearnerRecord, *, step_seconds: float, telemetry: Telemetry
    ) -> Contribution:
        """Encode, write and commit one copy; return the committed contribution.

        `account` is the learner's newest, not the copy's: links only ever move forward.

        Raises:
            Refused: it breaks a rule the synchronizer would refuse it for; nothing was written.
        """
        run, layout = self.run, self.run.layouts[copy.fragment]
        delta = pseudo_gradient(copy.anchor, landed(copy.local))
        owed = self.feedback[copy.fragment]
        encoded = encode(compensated(owed, delta) if self._owes else delta, run.config.sync.codec)
        values = decoded(encoded)
        norms = tensor_norms(values, layout)
        key = names.ContributionKey(copy.fragment, self.learner, copy.base_version, copy.stop)
        name = names.contribution(key)

        def header(payload: dict[str, object]) -> Contribution:
            return Contribution(
                learner=self.learner,
                fragment=copy.fragment,
                base_version=copy.base_version,
                base_digest=copy.base_digest,
                start=copy.start,
                stop=copy.stop,
                num_tokens=copy.num_tokens,
                num_steps=copy.num_steps,
                offered_before=copy.offered_before,
                norms=norms,
                step_seconds=step_seconds,
                layout=layout_digest(layout),
                codec=run.config.sync.codec,
                payload=manifest_from_json(payload),
                record=self.linked(account),
                telemetry=self._told(telemetry, account),
            )

        draft = header({"folder": "", "arrays": [], "objects": []})
        if (reason := judge(draft, self._lineage(copy))) is not None:
            raise Refused(reason, f"{name} was not sent")
        folder = names.payload_folder(name, self._new_attempt())
        payload = write_arrays(
            run.store,
            folder,
            {"delta": encoded.values},
            chunk_elements=run.chunk_elements,
            chunk_lengths={"delta": coded_length(encoded.codec, run.chunk_of(layout))},
        )
        offer = header(payload.to_json())
        if self._owes:  # before the header: it may be written though the store does not say so
            self.feedback[copy.fragment] = after_push(owed, copy.stop, delta, values)
        self.previous = records.write(run.store, name, offer.to_json())
        return offer

    def linked(self, account: LearnerRecord) -> LearnerRecord:
        """Return an account as the chain's next link, with the bytes moved so far."""
        return replace(
            account,
            previous=self.previous,
            bytes_up=self.link.bytes_up,
            bytes_down=self.link.bytes_down,
        )

    def can_save(self, account: LearnerRecord) -> bool:
        """Say whether a learner's state has a name: each position has one, and it is free or holds this very state.

        A learner that waits in place (a blocking algorithm) may adopt a version there after its checkpoint.
        """
        return (
            self._saved is None
            or self._saved.position != account.position
            or self.is_saved(account)
        )

    def is_saved(self, account: LearnerRecord) -> bool:
        """Say whether the learner's newest checkpoint is of the state with this account."""
        saved = self._saved
        if saved is None:
            return False
        same = replace(
            account,
            previous=saved.previous,
            bytes_up=saved.bytes_up,
            bytes_down=saved.bytes_down,
        )
        return same == saved

    def save(self, state: LearnerState) -> str:
        """Write a checkpoint of a learner's state, a private copy, and return its name.

        Raises:
            Refused: the run has ended, or a value is not finite: a checkpoint of it would outlive the healthy ones.
        """
        record = self.linked(state.record)
        if self.run.store.read(names.FINISHED) is not None:
            raise Refused("finished", f"{self.learner} at {record.position} was not saved")
        arrays: dict[str, npt.NDArray[Any]] = {}
        for p in range(len(self.run.layouts)):
            arrays |= {
                f"values-{p}": landed(state.values[p]),
                f"first-{p}": landed(state.first[p]),
                f"second-{p}": landed(state.second[p]),
            }
        if not all(np.isfinite(vector).all() for vector in arrays.values()):
            raise Refused("non-finite", f"{self.learner} at {record.position} was not saved")
        name = names.checkpoint(self.learner, record.position)
        for b, buffer in enumerate(state.buffers.values()):
            arrays[f"buffer-{b}"] = buffer.reshape(-1)
        arrays |= feedback_arrays(self.feedback)
        folder = names.payload_folder(name, self._new_attempt())
        payload = write_arrays(
            self.run.store, folder, arrays, chunk_elements=self.run.chunk_elements
        )
        body = {
            "record": record.to_json(),
            "at": self._stamp(),
            "tensor_steps": state.tensor_steps,
            "buffers": [[name, list(buffer.shape)] for name, buffer in state.buffers.items()],
            "feedback": feedback_to_json(self.feedback),
            "payload": payload.to_json(),
        }
        self.previous = records.write(self.run.store, name, body)
        self._saved = record
        return name

    def _told(self, telemetry: Telemetry, account: LearnerRecord) -> Telemetry:
        return replace(
            telemetry,
            at=self._stamp(),
            bytes_up=self.link.bytes_up,
            bytes_down=self.link.bytes_down,
            replaced_copies=account.replaced_copies,
            replaced_tokens=account.replaced_tokens,
        )

    def _lineage(self, copy: Copy) -> Lineage:
        """Return the lineage as the sender knows it: its own base is the newest version it has seen."""
        return Lineage(
            head_version=copy.base_version,
            digests={copy.base_version: copy.base_digest},
            tallies={},
            incarnations={self.learner: self.incarnation},
            listed=frozenset(),
            layout=layout_digest(self.run.layouts[copy.fragment]),
            codec=self.run.config.sync.codec,
            num_tensors=len(self.run.layouts[copy.fragment].tensors),
            max_staleness=0,
            is_finished=self.run.store.read(names.FINISHED) is not None,
        )


def link_of(run: Run, island: str, past: LearnerRecord | None) -> Link:
    """Return an island's own way to the run's store, not paced yet; its counts go on from its last account.

    Contributions and versions count. They pay where the bandwidth has a cap, and so do checkpoints, unless they lie in
    a store of their own.
    """
    exchanged = ("payloads/inbox/", "payloads/versions/")
    is_near = run.island(island).checkpoints is not None
    return Link(
        run.store,
        counted=exchanged,
        paced=exchanged if is_near else (*exchanged, f"payloads/checkpoints/{island}/"),
        bytes_up=0 if past is None else past.bytes_up,
        bytes_down=0 if past is None else past.bytes_down,
    )


def fetch(run: Run, fragment: int, version: int, known: tuple[int, Vector] | None = None) -> Base:
    """Return a published version as learners adopt it; `known`: an earlier one with its values, to go on from."""
    commit, digest = records.require_commit(run.store, fragment, version)
    if known is None:
        return Base(version, digest, records.read_public(run.store, commit))
    between = range(known[0] + 1, version)
    news = [records.require_commit(run.store, fragment, earlier)[0] for earlier in between]
    return Base(version, digest, records.fetch_newest(run.store, [*news, commit], known[1]))


def merged_marks(
    run: Run, learner: str, fragment: int, *, after: int, upto: int
) -> Iterator[Position]:
    """Yield up to where each of the versions (after, upto] has merged a learner's work; collected ones are left out."""
    for version in range(after + 1, upto + 1):
        found = records.read_commit(run.store, fragment, version)
        if found is not None:
            yield found[0].tallies.get(learner, Tally()).consumed_to


def fetch_heads(run: Run) -> list[Base]:
    """Return the newest version of every fragment."""
    bases = []
    for layout in run.layouts:
        commit, digest = records.find_head(run.store, layout.index)
        bases.append(Base(commit.version, digest, records.read_public(run.store, commit)))
    return bases


def read_checkpoint(run: Run, name: str) -> Saved:
    """Return one checkpoint, every byte checked.

    Raises:
        DamagedObject: it is missing or not what was written.
    """
    body, digest = records.require(run.store, name)
    reader = ArrayReader(run.store, records.parsed(name, manifest_from_json, body["payload"]))
    fragments = range(len(run.layouts))
    state = LearnerState(
        record=records.parsed(name, record_from_json, body["record"]),
        values=tuple(reader.read(f"values-{p}") for p in fragments),
        first=tuple(reader.read(f"first-{p}") for p in fragments),
        second=tuple(reader.read(f"second-{p}") for p in fragments),
        tensor_steps=tuple(tuple(row) for row in body["tensor_steps"]),
        buffers={
            name: reader.read(f"buffer-{b}").reshape(shape)
            for b, (name, shape) in enumerate(body["buffers"])
        },
    )
    return Saved(
        name, state, digest, records.parsed(name, partial(read_feedback, reader), body["feedback"])
    )


# --- what coding owes, as a checkpoint holds it ---


def feedback_arrays(feedback: Sequence[Feedback], prefix: str = "") -> dict[str, Vector]:
    """Return the arrays of every fragment's feedback, by name."""
    arrays = {}
    for p, owed in enumerate(feedback):
        if owed.residual is not None:
            arrays[f"{prefix}residual-{p}"] = owed.residual
        for k, one in enumerate(owed.outstanding):
            arrays[f"{prefix}error-{p}-{k}"] = one.error
    return arrays


def feedback_to_json(feedback: Sequence[Feedback]) -> list[dict[str, Any]]:
    """Return what `feedback_arrays` leaves out, as plain JSON values."""
    return [
        {
            "settled": list(owed.settled),
            "is_owed": owed.residual is not None,
            "stops": [list(one.stop) for one in owed.outstanding],
        }
        for owed in feedback
    ]


def read_feedback(
    reader: ArrayReader, rows: Sequence[Mapping[str, Any]], prefix: str = ""
) -> tuple[Feedback, ...]:
    """Return the feedback that `feedback_arrays` and `feedback_to_json` wrote."""
    return tuple(
        Feedback(
            residual=reader.read(f"{prefix}residual-{p}") if row["is_owed"] else None,
            settled=Position(*row["settled"]),
            outstanding=tuple(
                Outstanding(Position(*stop), reader.read(f"{prefix}error-{p}-{k}"))
                for k, stop in enumerate(row["stops"])
            ),
        )
        for p, row in enumerate(rows)
    )
