"""The operator's four questions, and the drift alarm: vitals and limits in, findings out.

    how stale is each island                         stale, silent, starved
    does one keep sending weak or late updates       late, small, weak
    is the quorum too permissive                     permissive, wasteful
    do fast islands dominate                         dominant
    drift                                            strong, drifting, opposed, apart, rising

Knows numbers and settings; must not know a store, a clock, or whom to tell. A finding names the setting that acts on it
and the very command; whether to give it is for people.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from islands.vitals import WINDOW, RunVitals, Vitals, Window, examine

# What a finding's value is, by its kind.
MEANINGS: Mapping[str, str] = {
    "stale": "versions behind when its work is merged",
    "silent": "versions since it last counted",
    "starved": "periods trained since it last counted",
    "late": "share of its merged work that came at least one version late",
    "small": "of the tokens that its speed lets expect",
    "weak": "times the others' length of update per step",
    "permissive": "of the islands take part in a merge",
    "wasteful": "share of the offered tokens that no merge took",
    "dominant": "of the merges' weight is its own",
    "strong": "times the others' length of update per step",
    "drifting": "times its earlier length of update beside the others'",
    "opposed": "cosine of its updates to the others'",
    "apart": "of the others' training loss, above or below it",
    "rising": "of the training loss, added within the last merges",
}


@dataclass(frozen=True, slots=True)
class Finding:
    """What is not as it should be. `island`: None where it is the run's. `knob`: the setting that acts on it."""

    kind: str
    island: str | None
    value: float
    threshold: float
    knob: str
    remedy: str

    @property
    def key(self) -> str:
        """What makes it the same finding again: its kind, and whose it is."""
        return self.kind if self.island is None else f"{self.kind} {self.island}"

    @property
    def meaning(self) -> str:
        """What its value is."""
        return MEANINGS[self.kind]

    @property
    def text(self) -> str:
        """One line: what is wrong, by how much, and what to do."""
        return (
            f"{self.key}: {self.value:.3g} {self.meaning} (limit {self.threshold:.3g}); "
            f"{self.remedy}"
        )


@dataclass(frozen=True, slots=True)
class Limits:
    """The values of the configuration's section `health`, which says what each is."""

    max_staleness: float
    max_missed_merges: int
    max_late_share: float
    min_token_share: float
    max_norm_ratio: float
    min_participation: float
    max_lost_share: float
    max_share: float | None
    min_cosine: float
    max_loss_gap: float
    max_loss_rise: float


@dataclass(frozen=True, slots=True)
class Member:
    """An island that may count: it has not left, nor is it in quarantine.

    `rate`: expected tokens beside the others'. `num_periods`: of one that counted in no version of the window, how many
    it has trained since it last did.
    """

    rate: float
    speed: float
    batch_size: int
    num_periods: int = 0


@dataclass(frozen=True, slots=True)
class Setting:
    """What a run is set to, as far as a remedy depends on it.

    `rate_key`, `learning_rate`: of the optimizer whose steps all follow. `least`: islands that must stay outside
    quarantine. `blocks`: learners wait for one another. `is_over`: all have left, so nobody is missed.
    """

    run_id: str
    members: Mapping[str, Member]
    quorum: int
    least: int
    blocks: bool
    period_steps: int
    grace_fraction: float
    rate_key: str
    learning_rate: float
    is_over: bool = False


def find(window: Window, limits: Limits, setting: Setting) -> tuple[Finding, ...]:
    """Return what is wrong with a run, ordered as its kinds are, then by island; nothing before the window is full.

    Args:
        window: as in `examine`, a row for each fragment.
    """
    if min((len(row) for row in window), default=0) < WINDOW or not setting.members:
        return ()
    rates = {name: member.rate for name, member in setting.members.items()}
    most = limits.max_missed_merges
    starved = [name for name, member in setting.members.items() if member.num_periods >= most]
    vitals = examine(window, rates, starved)
    # An island is judged by what it did in at least an eighth of the merges.
    enough = max(2, WINDOW * len(window) // 8)
    found = [*_of_run(vitals, limits, setting)]
    for name, member in setting.members.items():
        own = vitals.islands.get(name)
        if name in starved:
            knob, remedy = _wait_for_more(setting)
            found.append(Finding("starved", name, member.num_periods, most, knob, remedy))
        elif own is None:
            continue  # it has hardly begun
        elif own.missed >= most and not setting.is_over:
            found.append(_silent(name, own.missed, limits, setting))
        elif own.num_merged >= enough:
            found += [*_of_island(name, own, limits, setting), *_drift(name, own, limits, setting)]
    kinds = [*MEANINGS]
    return tuple(sorted(found, key=lambda one: (kinds.index(one.kind), one.island or "")))


def largest_share(limits: Limits, num_islands: int) -> float:
    """Return the limit of one island's share of the merges' weight: unless it is set, what three others weigh.

    Beside M - 1 equal ones an island of r times their weight has r / (r + M - 1): with r = 3, half of it among four.
    """
    return 3 / (num_islands + 2) if limits.max_share is None else limits.max_share


def _of_run(vitals: RunVitals, limits: Limits, setting: Setting) -> Iterator[Finding]:
    least = limits.min_participation
    if vitals.participation < least and setting.quorum < len(setting.members):
        knob, remedy = _wait_for_more(setting)
        yield Finding("permissive", None, vitals.participation, least, knob, remedy)
    if vitals.lost_share > limits.max_lost_share:
        knob, remedy = _wait_longer(setting)
        yield Finding("wasteful", None, vitals.lost_share, limits.max_lost_share, knob, remedy)
    if vitals.loss_rise is not None and vitals.loss_rise > limits.max_loss_rise:
        halved = f"{setting.rate_key}={setting.learning_rate / 2:g}"
        yield Finding(
            "rising",
            None,
            vitals.loss_rise,
            limits.max_loss_rise,
            setting.rate_key,
            f"take smaller steps: {_adjust(setting, halved)}",
        )


def _silent(name: str, missed: int, limits: Limits, setting: Setting) -> Finding:
    knob, remedy = _set_apart(name, setting)
    return Finding(
        "silent",
        name,
        missed,
        limits.max_missed_merges,
        knob,
        f"unless `diloco status {setting.run_id}` shows it coming back, {remedy}",
    )


def _of_island(name: str, own: Vitals, limits: Limits, setting: Setting) -> Iterator[Finding]:
    if own.staleness > limits.max_staleness:
        knob, remedy = _lengthen(setting)
        yield Finding("stale", name, own.staleness, limits.max_staleness, knob, remedy)
    if own.late_share > limits.max_late_share:
        knob, remedy = _wait_longer(setting)
        yield Finding("late", name, own.late_share, limits.max_late_share, knob, remedy)
    share = None if setting.blocks else own.token_share  # where all wait, all take as many steps
    if share is not None and share < limits.min_token_share:
        knob = f"islands.{name}.speed"
        true = _adjust(setting, f"{knob}={setting.members[name].speed * share:.2g}")
        remedy = f"say how fast it is: {true}"
        yield Finding("small", name, share, limits.min_token_share, knob, remedy)
    if own.norm_ratio is not None and own.norm_ratio < 1 / limits.max_norm_ratio:
        knob, remedy = _set_apart(name, setting)
        yield Finding("weak", name, own.norm_ratio, 1 / limits.max_norm_ratio, knob, remedy)
    most = largest_share(limits, len(setting.members))
    if own.weight_share is not None and own.weight_share > most:
        knob, remedy = _lighten(name, own.weight_share, setting)
        yield Finding("dominant", name, own.weight_share, most, knob, remedy)


def _drift(name: str, own: Vitals, limits: Limits, setting: Setting) -> Iterator[Finding]:
    knob, remedy = _set_apart(name, setting)
    most = limits.max_norm_ratio
    if own.norm_ratio is not None and own.norm_ratio > most:
        yield Finding("strong", name, own.norm_ratio, most, knob, remedy)
    if own.norm_drift is not None and not 1 / most <= own.norm_drift <= most:
        limit = most if own.norm_drift > 1 else 1 / most
        yield Finding("drifting", name, own.norm_drift, limit, knob, remedy)
    # By more than chance: one batch's gradient, as data-parallel learners send, points anywhere.
    if own.cosine is not None and own.cosine + 2 * own.cosine_error < limits.min_cosine:
        yield Finding("opposed", name, own.cosine, limits.min_cosine, knob, remedy)
    if own.loss_gap is not None and abs(own.loss_gap) > limits.max_loss_gap:
        yield Finding("apart", name, abs(own.loss_gap), limits.max_loss_gap, knob, remedy)


# --- remedies: (knob, sentence)


def _adjust(setting: Setting, assignment: str) -> str:
    return f"`diloco adjust {setting.run_id} --set {assignment}`"


def _wait_for_more(setting: Setting) -> tuple[str, str]:
    num_members = len(setting.members)
    if setting.quorum >= num_members:
        return _wait_longer(setting)
    wanted = min(num_members, max(setting.quorum + 1, -(-3 * num_members // 4)))
    more = _adjust(setting, f"sync.min_learners={wanted}")
    return "sync.min_learners", f"let a merge wait for more islands: {more}"


def _wait_longer(setting: Setting) -> tuple[str, str]:
    if setting.grace_fraction < 1 and not setting.blocks:
        longer = min(1.0, max(0.25, 2 * setting.grace_fraction))
        wait = _adjust(setting, f"sync.grace_fraction={longer:g}")
        return "sync.grace_fraction", f"let merges wait longer for the late: {wait}"
    return _lengthen(setting)


def _lengthen(setting: Setting) -> tuple[str, str]:
    """Return the way to more time for what is sent, as far as the run's rules let it."""
    if setting.blocks:
        return (
            "sync.algorithm",
            f"`diloco status {setting.run_id}` shows who comes back: where all wait, only deaths lose work",
        )
    command = _adjust(setting, f"sync.period_steps={2 * setting.period_steps}")
    return "sync.period_steps", f"a longer period leaves time for its way: {command}"


def _set_apart(name: str, setting: Setting) -> tuple[str, str]:
    """Return the way to keep an island's work out, as far as the run's rules let it."""
    if setting.blocks:
        return (
            "quarantine",
            f"`diloco stop {setting.run_id}` and look at it: none is set apart where all wait",
        )
    apart = f"`diloco quarantine {setting.run_id} {name}`"
    if (num_left := len(setting.members) - 1) >= setting.least:
        return "quarantine", f"set it apart: {apart}"
    if num_left == 0:
        return "quarantine", f"`diloco stop {setting.run_id}` and look at it: nobody else trains"
    fewer = _adjust(setting, f"sync.min_learners={num_left}")
    return "sync.min_learners", f"set it apart: {fewer}, then {apart}"


def _lighten(name: str, weight_share: float, setting: Setting) -> tuple[str, str]:
    batch_size = setting.members[name].batch_size
    if batch_size > 1:
        knob = f"islands.{name}.batch_size"
        return knob, f"make its steps smaller: {_adjust(setting, f'{knob}={batch_size // 2}')}"
    raised = f"{min(1.0, 1.1 * weight_share):.2g}"
    return "health.max_share", f"if that is meant: {_adjust(setting, f'health.max_share={raised}')}"
