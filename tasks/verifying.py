"""`verify`: read every kept object of a run and derive the ledger again, from both ends. No torch.

Trusts nothing it can recompute: seals, checksums, the chain of versions, every tally, every verdict's arithmetic, the
learners' chains, and the inventory of a finished run. Finds problems, mends nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from infra.arrays import check_payload
from infra.store import open_store
from islands import names
from islands.contributions import Contribution, Tally, after_merge, contribution_from_json, merge_weight, running_median
from islands.ledger import FragmentClock, LearnerRecord, check_link, record_from_json
from islands.retention import Facts, collectable
from islands.sealing import unseal
from islands.types import DamagedObject, IslandsError, Manifest, Position, manifest_from_json
from islands.versions import Commit, commit_from_json, snapshot_from_json
from tasks import records
from tasks.collecting import live_names, retention_facts
from tasks.runs import Run, open_run

_COUNTED = ("synchronizers", "changes", "stops")


@dataclass(frozen=True, slots=True)
class Problem:
    """What is wrong with which object."""

    name: str
    text: str


@dataclass(frozen=True, slots=True)
class Row:
    """One learner's tokens, summed over fragments. `trained` = all the others together.

    `pending` is offered and may yet be merged; `passed_over` was offered and will not be.
    """

    learner: str
    trained: int
    merged: int
    passed_over: int
    pending: int
    overwritten: int
    rolled_back: int
    open: int

    @property
    def imbalance(self) -> int:
        """Tokens without a fate, or with two: 0 in a sound run."""
        return self.trained - sum(
            (self.merged, self.passed_over, self.pending, self.overwritten, self.rolled_back, self.open)
        )


@dataclass(slots=True)
class Verification:
    """Problems found, the ledger, and how much was read."""

    problems: list[Problem] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    num_objects: int = 0
    num_versions: int = 0

    def note(self, name: str, text: str) -> None:
        self.problems.append(Problem(name, text))


@dataclass(slots=True)
class _Evidence:
    """Everything of a run that could be read."""

    run: Run
    present: frozenset[str]
    dead: frozenset[str]
    facts: Facts
    bodies: dict[str, dict[str, Any]]
    digests: dict[str, str]
    found: Verification


def verify(store_url: str, run_id: str) -> Verification:
    """Return everything that is wrong with a run, and its ledger.

    Raises:
        ConfigError: there is nothing under that name.
    """
    found = Verification()
    store = open_store(store_url).within(run_id)
    everything = store.list_names("")
    if everything and names.RUN not in everything:
        found.note(names.RUN, "is missing")
        return found
    try:
        run = open_run(store_url, run_id)
        facts = retention_facts(run, live_names(run))
    except DamagedObject as exc:
        found.note(exc.name, exc.problem)
        return found
    everything = run.store.list_names("")  # some of it may lie elsewhere
    dead = frozenset(() if run.config.retention == "all" else collectable(everything, facts))
    evidence = _Evidence(run, frozenset(everything), dead, facts, {}, {}, found)
    found.num_objects = len(everything)
    _read_headers(evidence)
    _check_payloads(evidence)
    commits = _check_versions(evidence)
    offers = _check_contributions(evidence, commits)
    links = _check_chains(evidence, offers)
    _check_snapshots(evidence, commits)
    _check_counts(evidence)
    _check_driver(evidence)
    _check_inventory(evidence)
    _balance(evidence, commits, offers, links)
    return found


# --- objects ---


def _read_headers(evidence: _Evidence) -> None:
    for name in sorted(evidence.present):
        if name.startswith("payloads/"):
            continue
        try:
            data = evidence.run.store.read(name)
            if data is None:
                raise DamagedObject(name, "is missing")
            evidence.bodies[name], evidence.digests[name] = unseal(name, data)
        except DamagedObject as exc:
            evidence.found.note(name, exc.problem)


def _check_payloads(evidence: _Evidence) -> None:
    """Check every byte behind every header that must still have its payload; name what belongs to nothing."""
    accounted: set[str] = set(evidence.dead)
    for name, body in evidence.bodies.items():
        value = records.payload_of(name, body)
        if value is None:
            continue
        manifest = _tolerate(evidence, name, manifest_from_json, value)
        if manifest is None or not _needs_payload(evidence, name):
            continue
        accounted |= {f"{manifest.folder}/{item.name}" for item in manifest.objects}
        _check_payload(evidence, manifest)
    for name in sorted(evidence.present - accounted):
        if name.startswith("payloads/") and not _is_attempt(evidence, name):
            evidence.found.note(name, "belongs to no record")


def _check_payload(evidence: _Evidence, manifest: Manifest) -> None:
    try:
        check_payload(evidence.run.store, manifest)
    except DamagedObject as exc:
        evidence.found.note(exc.name, exc.problem)


def _needs_payload(evidence: _Evidence, header: str) -> bool:
    version = names.parse_version(header)
    if version is not None and evidence.run.config.retention == "bounded":
        return version in evidence.facts.kept_versions
    return header not in evidence.dead


def _is_attempt(evidence: _Evidence, name: str) -> bool:
    """Say whether an object may belong to a writer that has not committed, or will never."""
    found = names.header_of_payload(name)
    if found is None:
        return False
    header, folder = found
    payload = records.payload_of(header, evidence.bodies[header]) if header in evidence.bodies else None
    return header not in evidence.present or (payload is not None and payload["folder"] != folder)


# --- versions ---


def _check_versions(evidence: _Evidence) -> list[list[Commit]]:
    """Return the commits of each fragment, oldest first, with the chain and every tally recomputed."""
    fragments: list[list[Commit]] = []
    for layout in evidence.run.layouts:
        numbers = [v[1] for v in map(names.parse_version, evidence.present) if v is not None and v[0] == layout.index]
        commits: list[Commit] = []
        for version in range(max(numbers, default=0) + 1):
            name = names.version(layout.index, version)
            if name not in evidence.present:
                evidence.found.note(name, "is missing: a later version exists")
                break
            commit = _tolerate(evidence, name, commit_from_json, evidence.bodies.get(name))
            if commit is None:
                break
            for text in _wrong_with_commit(evidence, name, commit, commits[-1] if commits else None):
                evidence.found.note(name, text)
            commits.append(commit)
        evidence.found.num_versions += len(commits)
        fragments.append(commits)
    return fragments


def _wrong_with_commit(evidence: _Evidence, name: str, commit: Commit, parent: Commit | None) -> Iterator[str]:
    if names.version(commit.fragment, commit.version) != name:
        yield f"holds version {commit.version} of fragment {commit.fragment}"
    expected = evidence.run.digest
    if parent is not None:
        expected = evidence.digests[names.version(parent.fragment, parent.version)]
    if commit.parent_digest != expected:
        yield f"names parent {commit.parent_digest[:12]}, its parent is {expected[:12]}"
    if parent is None:
        return
    learners = [entry.learner for entry in commit.consumed]
    if not learners or learners != sorted(set(learners)):
        yield f"consumes {learners}: it must be one contribution per learner, ordered by name"
    for entry in commit.consumed:
        before = parent.tallies.get(entry.learner, Tally())
        if entry.start < before.consumed_to or entry.offered_before < before.offered:
            yield f"counts work of {entry.learner} twice: {entry.start} is before {before.consumed_to}"
    if dict(commit.tallies) != after_merge(parent.tallies, commit.consumed, commit.refused, version=commit.version):
        yield "its tallies are not its parent's moved on by what it consumed and refused"
    if commit.median_norm != running_median(parent.median_norm, [entry.norm for entry in commit.consumed]):
        yield "its median norm is not its parent's moved on by what it consumed"


# --- contributions and learners ---


def _check_contributions(evidence: _Evidence, fragments: list[list[Commit]]) -> dict[str, Contribution]:
    offers: dict[str, Contribution] = {}
    for name, body in evidence.bodies.items():
        if name.startswith("inbox/"):
            offer = _tolerate(evidence, name, contribution_from_json, body)
            if offer is not None and offer.name == name:
                offers[name] = offer
            elif offer is not None:
                evidence.found.note(name, f"holds the header of {offer.name}")
    for commits in fragments:
        for commit in commits:
            for entry in commit.consumed:
                _check_consumed(evidence, commit, commits[-1].version, entry, offers.get(entry.name))
    return offers


def _check_consumed(
    evidence: _Evidence, commit: Commit, head_version: int, entry: Any, offer: Contribution | None
) -> None:
    if offer is None:
        is_kept = evidence.run.config.retention == "all" or commit.version >= head_version - 1
        if is_kept and entry.name not in evidence.present:
            evidence.found.note(entry.name, f"is missing: version {commit.version} consumed it")
        return
    if evidence.digests[entry.name] != entry.digest:
        evidence.found.note(entry.name, f"is not what version {commit.version} consumed")
    if merge_weight(offer, commit.version - 1) != entry.weight:
        evidence.found.note(names.version(commit.fragment, commit.version), f"weighs {entry.name} wrongly")


def _check_chains(evidence: _Evidence, offers: Mapping[str, Contribution]) -> dict[str, LearnerRecord]:
    """Return each learner's last link; check every link, alone and against the one before."""
    chains: dict[str, list[tuple[LearnerRecord, str]]] = {island.name: [] for island in evidence.run.config.islands}
    for name, body in evidence.bodies.items():
        if "record" in body:
            record = offers[name].record if name in offers else _tolerate(evidence, name, record_from_json, body["record"])
            if record is not None and record.learner in chains:
                chains[record.learner].append((record, name))
    last = {}
    for learner, chain in chains.items():
        chain.sort(key=lambda link: records.progress(link[0]))
        earlier: LearnerRecord | None = None
        for record, name in chain:
            if (text := check_link(record, earlier)) is not None:
                evidence.found.note(name, text)
            earlier = record
        if earlier is not None:
            last[learner] = earlier
        _check_links(evidence, chain)
    return last


def _check_links(evidence: _Evidence, chain: list[tuple[LearnerRecord, str]]) -> None:
    """With everything kept, each link's predecessor must be there."""
    if evidence.run.config.retention != "all":
        return
    known = {evidence.digests[name] for _, name in chain}
    for record, name in chain:
        if record.previous and record.previous not in known:
            evidence.found.note(name, f"follows a record {record.previous[:12]} that is missing")


# --- the rest ---


def _check_snapshots(evidence: _Evidence, fragments: list[list[Commit]]) -> None:
    for name, body in evidence.bodies.items():
        if not name.startswith("snapshots/"):
            continue
        snapshot = _tolerate(evidence, name, snapshot_from_json, body)
        if snapshot is None:
            continue
        tokens = 0
        for p, (version, digest) in enumerate(zip(snapshot.versions, snapshot.digests, strict=True)):
            if evidence.digests.get(names.version(p, version)) != digest:
                evidence.found.note(name, f"names a version {version} of fragment {p} that is not there")
            elif version < len(fragments[p]):
                tokens += fragments[p][version].merged_tokens
        if tokens // len(fragments) != snapshot.merged_tokens:
            evidence.found.note(name, f"claims {snapshot.merged_tokens} merged tokens, its versions have {tokens}")
    for number in sorted(evidence.facts.kept_snapshots):
        if names.snapshot(number) not in evidence.present:
            evidence.found.note(names.snapshot(number), "is missing")


def _check_counts(evidence: _Evidence) -> None:
    """Folders that count from 0 must have no gap, and every name must be of a known kind."""
    folders = [*_COUNTED, *(f"learners/{island.name}" for island in evidence.run.config.islands)]
    for folder in folders:
        numbers = {names.number_of(n) for n in evidence.present if n.rpartition("/")[0] == folder} - {None}
        for number in range(max((n for n in numbers if n is not None), default=-1)):
            if number not in numbers:
                evidence.found.note(names.numbered(folder, number), "is missing")
    known = ("payloads/", "inbox/", "versions/", "snapshots/", "learners/", "checkpoints/", "advisories/", "driver/")
    for name in evidence.present:
        if not name.startswith((*known, *_COUNTED, "evaluations/")) and name not in (names.RUN, names.FINISHED):
            evidence.found.note(name, "belongs to no run")


def _check_driver(evidence: _Evidence) -> None:
    saved = [name for name in evidence.bodies if name.startswith("driver/")]
    if saved:
        newest = max(saved, key=lambda name: names.number_of(name) or 0)
        for name in evidence.bodies[newest]["present"]:
            if name not in evidence.present and evidence.run.config.retention == "all":
                evidence.found.note(name, f"is missing: {newest} saw it")


def _check_inventory(evidence: _Evidence) -> None:
    islands = {island.name for island in evidence.run.config.islands}
    departed = {name.split("/")[1] for name in evidence.present if name.endswith("/left.json")}
    if names.FINISHED not in evidence.present:
        if islands <= departed:
            text = f"is missing, but every island has left; `diloco resume {evidence.run.run_id}` completes the end"
            evidence.found.note(names.FINISHED, text)
        return
    inventory = evidence.bodies.get(names.FINISHED, {}).get("inventory", {})
    for name, digest in inventory.items():
        if name not in evidence.present:
            evidence.found.note(name, "is missing: the finished run lists it")
        elif evidence.digests.get(name, digest) != digest:
            evidence.found.note(name, "is not what the finished run lists")
    for name in evidence.bodies:
        if inventory and name not in inventory and name != names.FINISHED:
            evidence.found.note(name, "was added after the run had finished")


def _balance(
    evidence: _Evidence,
    fragments: list[list[Commit]],
    offers: Mapping[str, Contribution],
    links: Mapping[str, LearnerRecord],
) -> None:
    for learner, record in sorted(links.items()):
        sums = {key: 0 for key in ("merged", "passed_over", "pending", "overwritten", "rolled_back", "open")}
        for p, clock in enumerate(record.clocks):
            tally = fragments[p][-1].tallies.get(learner, Tally()) if fragments[p] else Tally()
            if tally.offered > clock.all_offered:
                text = f"fragment {p}: {tally.offered} tokens were taken, {clock.all_offered} were offered"
                evidence.found.note(names.left(learner), text)
            pending = _pending(offers, p, learner, tally, names.FINISHED in evidence.present)
            for key, value in _fates(clock, tally, pending).items():
                sums[key] += value
        row = Row(learner, record.trained * len(record.clocks), **sums)
        evidence.found.rows.append(row)
        if row.imbalance:
            evidence.found.note(f"ledger of {learner}", f"{row.imbalance} tokens have no fate, or two")


def _fates(clock: FragmentClock, tally: Tally, pending: int) -> dict[str, int]:
    return {
        "merged": tally.merged,
        "passed_over": clock.all_offered - tally.merged - pending,
        "pending": pending,
        "overwritten": clock.overwritten,
        "rolled_back": clock.rolled_back,
        "open": clock.open_tokens - clock.copied_tokens,
    }


def _pending(
    offers: Mapping[str, Contribution], fragment: int, learner: str, tally: Tally, is_finished: bool
) -> int:
    """Return the tokens of the learner's furthest contribution that may still be merged."""
    waiting = [
        offer
        for offer in offers.values()
        if (offer.fragment, offer.learner) == (fragment, learner)
        and offer.start >= tally.consumed_to
        and offer.offered_before >= tally.offered
    ]
    if is_finished or not waiting:
        return 0
    return max(waiting, key=lambda offer: (offer.stop, Position(0, 0))).num_tokens


def _tolerate(evidence: _Evidence, name: str, parse: Callable[[Any], Any], value: Any) -> Any:
    """Return `parse(value)`, or None with a problem noted; None in, None out."""
    if value is None:
        return None
    try:
        return records.parsed(name, parse, value)
    except IslandsError as exc:
        evidence.found.note(name, str(exc))
        return None
