"""`verify`: read every kept object of a run and derive the ledger again, from both ends. No torch.

Trusts nothing it can recompute: seals, checksums, the chain of versions, every tally, every verdict's arithmetic, the
learners' chains, and the inventory of a finished run. Finds problems, mends nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from infra.arrays import check_payload
from infra.store import open_store
from islands import chaos, names
from islands.contributions import (
    Consumed,
    Contribution,
    Tally,
    after_merge,
    consume,
    contribution_from_json,
    has_sound_counts,
    running_median,
)
from islands.retention import collectable
from islands.types import DamagedObject, Manifest, manifest_from_json
from islands.versions import Commit, commit_from_json, snapshot_from_json
from tasks import records
from tasks.balancing import balance, check_chains
from tasks.collecting import find_heads, live_names, retention_facts
from tasks.evidence import Evidence, Verification
from tasks.runs import as_most_forgiving, open_run

_COUNTED = ("synchronizers", "trainers", "changes", "stops", chaos.FOLDER)


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
        run = as_most_forgiving(open_run(store_url, run_id))
        facts = retention_facts(run, live_names(run), find_heads(run))
    except DamagedObject as exc:
        found.note(exc.name, exc.problem)
        return found
    everything = run.store.list_names("")  # some of it may lie elsewhere
    dead = frozenset(() if run.config.retention == "all" else collectable(everything, facts))
    evidence = Evidence(run, frozenset(everything), dead, facts, {}, {}, found)
    found.num_objects = len(everything)
    _read_headers(evidence)
    _check_payloads(evidence)
    commits = _check_versions(evidence)
    offers = _check_contributions(evidence, commits)
    consumed = frozenset(
        entry.name for fragment in commits for commit in fragment for entry in commit.consumed
    )
    chains = check_chains(evidence, offers, consumed)
    _check_snapshots(evidence, commits)
    _check_counts(evidence)
    _check_names(evidence)
    _check_authors(evidence, commits)
    _check_driver(evidence)
    _check_inventory(evidence)
    balance(evidence, commits, offers, chains)
    return found


# --- objects ---


def _read_headers(evidence: Evidence) -> None:
    for name in sorted(evidence.present):
        if name.startswith("payloads/"):
            continue
        try:
            evidence.bodies[name], evidence.digests[name] = records.require(
                evidence.run.store, name
            )
        except DamagedObject as exc:
            evidence.found.note(name, exc.problem)


def _check_payloads(evidence: Evidence) -> None:
    """Check every byte behind every header that must still have its payload; name what belongs to nothing."""
    accounted: set[str] = set(evidence.dead)
    spoiled = _spoiled(evidence)
    for name, body in evidence.bodies.items():
        value = records.payload_of(name, body)
        if value is None:
            continue
        manifest = evidence.parsed(name, manifest_from_json, value)
        if manifest is None or not _needs_payload(evidence, name):
            continue
        accounted |= {f"{manifest.folder}/{item.name}" for item in manifest.objects}
        _check_payload(evidence, manifest, spoiled)
    for name in sorted(evidence.present - accounted):
        if name.startswith("payloads/") and not _is_attempt(evidence, name):
            evidence.found.note(name, "belongs to no record")


def _check_payload(evidence: Evidence, manifest: Manifest, spoiled: frozenset[str]) -> None:
    try:
        check_payload(evidence.run.store, manifest)
    except DamagedObject as exc:
        if exc.name not in spoiled:
            evidence.found.note(exc.name, exc.problem)


def _spoiled(evidence: Evidence) -> frozenset[str]:
    """Return the objects that were damaged on purpose, as the records of that say."""
    strikes = (
        evidence.parsed(name, chaos.strike_from_json, body)
        for name, body in evidence.bodies.items()
        if name.startswith(f"{chaos.FOLDER}/")
    )
    return frozenset(s.spoiled for s in strikes if s is not None and s.spoiled is not None)


def _needs_payload(evidence: Evidence, header: str) -> bool:
    version = names.parse_version(header)
    if version is not None and evidence.run.config.retention == "bounded":
        return version in evidence.facts.kept_versions or evidence.is_news(*version)
    return header not in evidence.dead


def _is_attempt(evidence: Evidence, name: str) -> bool:
    """Say whether an object may belong to a writer that has not committed, or will never."""
    found = names.header_of_payload(name)
    if found is None:
        return False
    header, folder = found
    payload = (
        records.payload_of(header, evidence.bodies[header]) if header in evidence.bodies else None
    )
    return header not in evidence.present or (payload is not None and payload["folder"] != folder)


# --- versions ---


def _check_versions(evidence: Evidence) -> list[list[Commit]]:
    """Return the commits of each fragment, oldest first, with the chain and every tally recomputed."""
    fragments: list[list[Commit]] = []
    for layout in evidence.run.layouts:
        numbers = [
            v[1]
            for v in map(names.parse_version, evidence.present)
            if v is not None and v[0] == layout.index
        ]
        commits: list[Commit] = []
        for version in range(max(numbers, default=0) + 1):
            name = names.version(layout.index, version)
            if name not in evidence.present:
                evidence.found.note(name, "is missing: a later version exists")
                break
            commit = evidence.parsed(name, commit_from_json, evidence.bodies.get(name))
            if commit is None:
                break
            for text in _wrong_with_commit(
                evidence, name, commit, commits[-1] if commits else None
            ):
                evidence.found.note(name, text)
            commits.append(commit)
        evidence.found.num_versions += len(commits)
        fragments.append(commits)
    return fragments


def _wrong_with_commit(
    evidence: Evidence, name: str, commit: Commit, parent: Commit | None
) -> Iterator[str]:
    if names.version(commit.fragment, commit.version) != name:
        yield f"holds version {commit.version} of fragment {commit.fragment}"
    expected = evidence.run.digest
    if parent is not None:
        expected = evidence.digests[names.version(parent.fragment, parent.version)]
    if commit.parent_digest != expected:
        yield f"names parent {commit.parent_digest[:12]}, its parent is {expected[:12]}"
    if parent is None:
        if (
            commit.consumed
            or commit.refused
            or any(tally != Tally() for tally in commit.tallies.values())
        ):
            yield "has an account before anything was offered"
        return
    learners = [entry.learner for entry in commit.consumed]
    if not learners or learners != sorted(set(learners)):
        yield f"consumes {learners}: it must be one contribution per learner, ordered by name"
    for entry in commit.consumed:
        before = parent.tallies.get(entry.learner, Tally())
        if entry.start < before.consumed_to or entry.offered_before < before.offered:
            yield f"counts work of {entry.learner} twice: {entry.start} is before {before.consumed_to}"
    if dict(commit.tallies) != after_merge(
        parent.tallies, commit.consumed, commit.refused, version=commit.version
    ):
        yield "its tallies are not its parent's moved on by what it consumed and refused"
    if commit.median_norm != running_median(
        parent.median_norm, [entry.norm for entry in commit.consumed]
    ):
        yield "its median norm is not its parent's moved on by what it consumed"


# --- contributions and learners ---


def _check_contributions(
    evidence: Evidence, fragments: list[list[Commit]]
) -> dict[str, Contribution]:
    offers: dict[str, Contribution] = {}
    for name, body in evidence.bodies.items():
        if name.startswith("inbox/"):
            offer = evidence.parsed(name, contribution_from_json, body)
            if offer is not None and offer.name == name:
                offers[name] = offer
            elif offer is not None:
                evidence.found.note(name, f"holds the header of {offer.name}")
    for commits in fragments:
        for commit in commits:
            for entry in commit.consumed:
                _check_consumed(evidence, commit, commits[-1].version, entry, offers)
    return offers


def _check_consumed(
    evidence: Evidence,
    commit: Commit,
    head_version: int,
    entry: Consumed,
    offers: dict[str, Contribution],
) -> None:
    if entry.name not in offers:
        is_kept = evidence.run.config.retention == "all" or commit.version >= head_version - 1
        if is_kept and entry.name not in evidence.present:
            evidence.found.note(entry.name, f"is missing: version {commit.version} consumed it")
        return
    offer, digest = offers[entry.name], evidence.digests[entry.name]
    if digest != entry.digest:
        evidence.found.note(entry.name, f"is not what version {commit.version} consumed")
    elif not has_sound_counts(offer) or _consumed(evidence, commit, offer, entry) != entry:
        name = names.version(commit.fragment, commit.version)
        evidence.found.note(
            name, f"does not say of {entry.name} what its header says, or weighs it wrongly"
        )


def _consumed(evidence: Evidence, commit: Commit, offer: Contribution, entry: Consumed) -> Consumed:
    weighting = evidence.run.config.outer.weighting
    again = consume(offer, entry.digest, commit.version - 1, weighting)
    return replace(again, cosine=entry.cosine)  # only a replay has the numbers


# --- the rest ---


def _check_snapshots(evidence: Evidence, fragments: list[list[Commit]]) -> None:
    for name, body in evidence.bodies.items():
        if not name.startswith("snapshots/"):
            continue
        snapshot = evidence.parsed(name, snapshot_from_json, body)
        if snapshot is None:
            continue
        if names.snapshot(snapshot.number) != name or len(snapshot.versions) != len(fragments):
            text = f"holds snapshot {snapshot.number} of {len(snapshot.versions)} fragments, not {len(fragments)}"
            evidence.found.note(name, text)
            continue
        tokens = 0
        for p, (version, digest) in enumerate(
            zip(snapshot.versions, snapshot.digests, strict=True)
        ):
            if evidence.digests.get(names.version(p, version)) != digest:
                evidence.found.note(
                    name, f"names a version {version} of fragment {p} that is not there"
                )
            elif version < len(fragments[p]):
                tokens += fragments[p][version].merged_tokens
        if tokens // len(fragments) != snapshot.merged_tokens:
            evidence.found.note(
                name, f"claims {snapshot.merged_tokens} merged tokens, its versions have {tokens}"
            )
        before = names.snapshot(snapshot.number - 1)
        if evidence.digests.get(before, snapshot.previous) != snapshot.previous:
            evidence.found.note(name, f"does not follow {before}")
    for number in sorted(evidence.facts.kept_snapshots):
        if names.snapshot(number) not in evidence.present:
            evidence.found.note(names.snapshot(number), "is missing")


def _check_counts(evidence: Evidence) -> None:
    """Folders that count from 0 must have no gap."""
    folders = [*_COUNTED, *(f"learners/{island.name}" for island in evidence.run.config.islands)]
    for folder in folders:
        numbers = {
            names.number_of(n) for n in evidence.present if n.rpartition("/")[0] == folder
        } - {None}
        for number in range(max((n for n in numbers if n is not None), default=-1)):
            if number not in numbers:
                evidence.found.note(names.numbered(folder, number), "is missing")


def _check_names(evidence: Evidence) -> None:
    """Every header must have a name that some part of this run would give it."""
    islands = {island.name for island in evidence.run.config.islands}
    num_fragments = len(evidence.run.layouts)
    for name in sorted(evidence.present):
        if name.startswith("payloads/") or name in (names.RUN, names.FINISHED):
            continue
        folder, _, _ = name.rpartition("/")
        top, _, owner = folder.partition("/")
        number = names.number_of(name)
        is_numbered = number is not None and name == names.numbered(folder, number)
        if (key := names.parse_contribution(name)) is not None:
            is_ours = (
                key.fragment < num_fragments
                and key.learner in islands
                and names.contribution(key) == name
            )
        elif (version := names.parse_version(name)) is not None:
            is_ours = version[0] < num_fragments and names.version(*version) == name
        elif (saved := names.parse_checkpoint(name)) is not None:
            is_ours = saved[0] in islands and names.checkpoint(*saved) == name
        elif (advised := names.parse_advisory(name)) is not None:
            is_ours = advised[0] < num_fragments and names.advisory(*advised) == name
        elif top == "learners":
            is_ours = owner in islands and (is_numbered or name == names.left(owner))
        elif top == "evaluations":
            is_ours = is_numbered and "/" not in owner
        else:
            is_ours = is_numbered and folder in (*_COUNTED, "snapshots", "driver")
        if not is_ours:
            evidence.found.note(name, "belongs to no run")


def _check_authors(evidence: Evidence, fragments: list[list[Commit]]) -> None:
    """Who wrote something must have announced itself before."""
    authors = {}
    for name in evidence.present:
        if (key := names.parse_contribution(name)) is not None:
            authors[names.incarnation(key.learner, key.stop.incarnation)] = name
        elif (saved := names.parse_checkpoint(name)) is not None:
            authors[names.incarnation(saved[0], saved[1].incarnation)] = name
    for commit in (
        commit for commits in fragments for commit in commits if commit.synchronizer >= 0
    ):
        authors[names.numbered("synchronizers", commit.synchronizer)] = names.version(
            commit.fragment, commit.version
        )
    for author, name in sorted(authors.items()):
        if author not in evidence.present:
            evidence.found.note(author, f"is missing: it wrote {name}")


def _check_driver(evidence: Evidence) -> None:
    """What the newest driver state saw, or goes on from, must be there unless a rule lets it go."""
    numbers = [names.number_of(name) for name in evidence.bodies if name.startswith("driver/")]
    saved = [number for number in numbers if number is not None]
    if not saved:
        return
    newest = names.numbered("driver", max(saved))
    body = evidence.bodies.get(newest, {})
    seen = {
        *body.get("present", ()),
        *(seat["checkpoint"] for seat in body.get("seats", {}).values()),
    }
    absent = {name for name in seen if name is not None and name not in evidence.present}
    may_go = set(collectable([*evidence.present, *absent], evidence.facts))
    for name in sorted(absent):
        if name not in may_go or evidence.run.config.retention == "all":
            evidence.found.note(name, f"is missing: {newest} saw it")


def _check_inventory(evidence: Evidence) -> None:
    islands = {island.name for island in evidence.run.config.members}
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
        # A request, or a second `train` that enlists, may race the end: either changes nothing any more.
        may_be_late = name == names.FINISHED or name.startswith(("changes/", "stops/", "trainers/"))
        if inventory and name not in inventory and not may_be_late:
            evidence.found.note(name, "was added after the run had finished")
