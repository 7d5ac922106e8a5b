"""Damage on purpose to a contribution that waits: one byte of its payload becomes another. No torch.

Knows contributions and their payloads; must not know who asks for it. The record of it comes first, so that `verify`
knows whose work the damage is. A merge that is under way may take the contribution all the same, from what it had read
before: then the bytes are put back, for whoever merges that version again.
"""

from __future__ import annotations

from dataclasses import dataclass

from islands import names
from islands.contributions import Contribution, Tally
from islands.versions import Commit
from tasks import records
from tasks.runs import Run


@dataclass(slots=True)
class Spoil:
    """One object of a pending contribution, to be damaged, and what it held.

    Attributes:
        contribution: name of the contribution.
        fragment: of which fragment.
        name: of the object.
        data: its bytes as they were committed.
        version: of the fragment, up to which its fate has been looked for.
    """

    contribution: str
    fragment: int
    name: str
    data: bytes
    version: int

    def damage(self, run: Run) -> None:
        """Replace the object by one with another byte in the middle; until that is there, it is missing."""
        spoiled = bytearray(self.data)
        spoiled[len(spoiled) // 2] ^= 0x10
        run.store.delete(self.name)
        run.store.create(self.name, bytes(spoiled))

    def is_settled(self, run: Run) -> bool:
        """Say whether the contribution's fate is decided; if it was merged all the same, put its bytes back first.

        Raises:
            StoreUnavailable: the store did not answer; ask again.
        """
        key = names.parse_contribution(self.contribution)
        is_over = run.store.read(names.FINISHED) is not None  # first: no version comes after that
        while (
            found := records.read_commit(run.store, self.fragment, self.version + 1)
        ) is not None:
            if self.contribution in {entry.name for entry in found[0].consumed}:
                self._mend(run)
                return True
            if self.contribution in {verdict.name for verdict in found[0].refused}:
                return True
            if key is not None and not _may_count(key, found[0]):
                return True  # later work of the learner was merged
            self.version += 1
        return is_over or run.store.read(self.contribution) is None

    def _mend(self, run: Run) -> None:
        """Put the bytes back, unless the contribution has been collected meanwhile: they would belong to nothing."""
        run.store.delete(self.name)
        if run.store.read(self.contribution) is not None:
            run.store.create(self.name, self.data)


def find_pending(run: Run, island: str) -> Spoil | None:
    """Return the largest object of an island's newest contribution that no version has consumed; None without one."""
    heads = [
        records.find_head(run.store, layout.index, version)[0]
        for layout, version in zip(
            run.layouts, records.known_versions(run.store, len(run.layouts)), strict=True
        )
    ]
    pending = [
        (key.stop, name, heads[key.fragment])
        for name in run.store.list_names("inbox/")
        if (key := names.parse_contribution(name)) is not None
        and key.learner == island
        and key.fragment < len(heads)
        and _is_open(name, key, heads[key.fragment])
    ]
    for _, name, head in sorted(pending, key=lambda one: one[:2], reverse=True)[:1]:
        found = records.read_contribution(run.store, name)
        return None if found is None else _spoil(run, found[0], head)
    return None


def _is_open(name: str, key: names.ContributionKey, head: Commit) -> bool:
    is_refused = name in {verdict.name for verdict in head.refused}
    return not is_refused and _may_count(key, head)


def _may_count(key: names.ContributionKey, head: Commit) -> bool:
    return key.stop > head.tallies.get(key.learner, Tally()).consumed_to


def _spoil(run: Run, offer: Contribution, head: Commit) -> Spoil | None:
    item = max(offer.payload.objects, key=lambda item: item.num_bytes)
    name = f"{offer.payload.folder}/{item.name}"
    data = run.store.read(name)
    return None if data is None else Spoil(offer.name, offer.fragment, name, data, head.version)
