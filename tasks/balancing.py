"""The ledger of a run, derived again from both ends: what learners offered, and what versions made of it. No torch.

Knows the learners' chains and the heads' tallies; must not know a store or a payload.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from islands import names
from islands.contributions import Contribution, Tally, has_sound_counts
from islands.ledger import FragmentClock, LearnerRecord, check_link, record_from_json
from islands.versions import Commit
from tasks import records
from tasks.evidence import Evidence, Row

Link = tuple[LearnerRecord, str]


def check_chains(
    evidence: Evidence, offers: Mapping[str, Contribution], consumed: frozenset[str]
) -> dict[str, list[Link]]:
    """Return each learner's chain, its links as (account, name) in order; check every link, alone and in its place.

    What a predecessor still wrote after its successor had looked back is fenced off, and no part of the chain.
    """
    chains = _read_chains(evidence, offers)
    for learner, chain in chains.items():
        fenced = _fenced(evidence, learner, chain) - consumed
        for record, name in chain:
            if name in fenced and (text := check_link(record, None)) is not None:
                evidence.found.note(name, text)
        chains[learner] = [link for link in chain if link[1] not in fenced]
        earlier: LearnerRecord | None = None
        for record, name in chains[learner]:
            if (text := check_link(record, earlier)) is not None:
                evidence.found.note(name, text)
            earlier = record
        _check_predecessors(evidence, chain)
    return chains


def balance(
    evidence: Evidence,
    fragments: Sequence[Sequence[Commit]],
    offers: Mapping[str, Contribution],
    chains: Mapping[str, Sequence[Link]],
) -> None:
    """Add each learner's row to the ledger: every token it trained, and its fate in each fragment."""
    refused = {
        verdict.name for commits in fragments for commit in commits for verdict in commit.refused
    }
    linked = {name for chain in chains.values() for _, name in chain}
    waiting = [
        offer
        for name, offer in offers.items()
        if name in linked and name not in refused and has_sound_counts(offer)
    ]
    for learner, chain in sorted(chains.items()):
        if not chain:
            continue
        record = chain[-1][0]
        sums = dict.fromkeys(
            ("merged", "passed_over", "pending", "overwritten", "rolled_back", "open"), 0
        )
        for p, (clock, commits) in enumerate(zip(record.clocks, fragments, strict=False)):
            tally = commits[-1].tallies.get(learner, Tally()) if commits else Tally()
            if tally.offered > clock.all_offered:
                text = f"fragment {p}: {tally.offered} tokens were taken, {clock.all_offered} were offered"
                evidence.found.note(names.left(learner), text)
            is_open = names.FINISHED not in evidence.present
            pending = (
                _pending([o for o in waiting if (o.fragment, o.learner) == (p, learner)], tally)
                if is_open
                else 0
            )
            for key, value in _fates(clock, tally, pending).items():
                sums[key] += value
        row = Row(learner, record.trained * len(record.clocks), **sums)
        evidence.found.rows.append(row)
        if row.imbalance or row.passed_over < 0:
            tokens = row.imbalance or row.passed_over
            evidence.found.note(f"ledger of {learner}", f"{tokens} tokens have no fate, or two")


def _read_chains(evidence: Evidence, offers: Mapping[str, Contribution]) -> dict[str, list[Link]]:
    chains: dict[str, list[Link]] = {island.name: [] for island in evidence.run.config.islands}
    for name, body in evidence.bodies.items():
        if name.startswith("inbox/"):
            record = offers[name].record if name in offers else None
        else:
            record = evidence.parsed(name, record_from_json, body.get("record"))
        if record is None or record.learner not in chains:
            continue
        if len(record.clocks) == len(evidence.run.layouts):
            chains[record.learner].append((record, name))
        else:
            text = f"has an account of {len(record.clocks)} fragments, the run has {len(evidence.run.layouts)}"
            evidence.found.note(name, text)
    for chain in chains.values():
        chain.sort(key=lambda link: records.progress(link[0]))
    return chains


def _fenced(evidence: Evidence, learner: str, chain: Sequence[Link]) -> set[str]:
    """Return the names of links beyond the one their writer's successor goes on from."""
    places = {evidence.digests[name]: records.progress(record) for record, name in chain}
    fenced: set[str] = set()
    for header, body in evidence.bodies.items():
        number = names.number_of(header)
        if (
            number is None
            or header != names.incarnation(learner, number)
            or body.get("last") not in places
        ):
            continue
        end = places[body["last"]]
        fenced |= {
            name
            for record, name in chain
            if record.position.incarnation < number and records.progress(record) > end
        }
    return fenced


def _check_predecessors(evidence: Evidence, chain: Sequence[Link]) -> None:
    """With everything kept, each link's predecessor must be there."""
    if evidence.run.config.retention != "all":
        return
    known = {evidence.digests[name] for _, name in chain}
    for record, name in chain:
        if record.previous and record.previous not in known:
            evidence.found.note(name, f"follows a record {record.previous[:12]} that is missing")


def _fates(clock: FragmentClock, tally: Tally, pending: int) -> dict[str, int]:
    return {
        "merged": tally.merged,
        "passed_over": clock.all_offered - tally.merged - pending,
        "pending": pending,
        "overwritten": clock.overwritten,
        "rolled_back": clock.rolled_back,
        "open": clock.open_tokens - clock.copied_tokens,
    }


def _pending(offers: Sequence[Contribution], tally: Tally) -> int:
    """Return the tokens of the furthest of one learner's contributions to a fragment that may still be merged."""
    waiting = [
        o for o in offers if o.start >= tally.consumed_to and o.offered_before >= tally.offered
    ]
    return max(waiting, key=lambda offer: offer.stop).num_tokens if waiting else 0
