"""One run on a real fleet and one fault in it: begun, hurt, watched until it has come back by itself, then audited.

Not a test itself. It looks at processes, at objects in the store and at HTTP answers, as `tests/fleet.py` does, and
kills only processes that belong to its run.
"""

from __future__ import annotations

import json
import signal
import time
import tomllib
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from infra import processes
from tasks import history
from tasks.adjusting import adjust
from tasks.runs import open_run
from tests.far_cluster import FarCluster
from tests.fleet import FLEET, Fleet, wait_until

ISLANDS = ("west", "east")
# It ends when it is told to, once it has recovered.
ENDLESS = 400_000_000
TOKENS_PER_STEP = 8 * 32
# A service that dies needs to be started again, and what watches for silence acts within 100 s.
PATIENCE_SECONDS = 300.0
Claim = Callable[[], object]


@dataclass
class Scene:
    """A run from its beginning to its audit. One thread.

    `happened`: the fault in words. `since`: when it was over, on the monotonic clock. `ends`: what the case started;
    `far`: a cluster elsewhere, if it has one.
    """

    services: Fleet
    run: str
    islands: tuple[str, ...] = ISLANDS
    happened: str = ""
    since: float = 0.0
    ends: ExitStack = field(default_factory=ExitStack)
    far: FarCluster | None = None
    tokens: int = ENDLESS

    # --- the run ---

    def begin(self, settings: dict[str, Any]) -> None:
        """Start the run with settings by section, such as {"sync": {"period_steps": 400}}."""
        config = tomllib.loads(FLEET.format(tokens=self.tokens))
        config["data"]["source"] = f"{self.services.folder}/text"
        config["store"] = self.services.store
        named = settings.get("islands", {})
        config["islands"] = [{"name": name, **named.get(name, {})} for name in self.islands]
        for section, values in settings.items():
            if section != "islands":
                is_section = isinstance(values, dict)
                config[section] = {**config.get(section, {}), **values} if is_section else values
        self.services.start("train", {"config": config, "run": self.run}, f"train {self.run}")

    def resume(self) -> None:
        """Start `train` for the run once more."""
        config = {"store": self.services.store}
        parameters = {"config": config, "run": self.run, "resume": True}
        self.services.start("train", parameters, f"train {self.run}")

    def until(self, claim: Claim, seconds: float = PATIENCE_SECONDS) -> None:
        """Wait for a claim about the run, which must not end before."""
        self.wait(lambda: claim() or self.has_finished(), seconds)
        assert claim(), f"{self.run} ended too early"

    def wait(self, claim: Claim, seconds: float = PATIENCE_SECONDS) -> None:
        """Wait for a claim while there is a fleet."""

        def holds() -> object:
            assert self.services.process.poll() is None, "the fleet has ended"
            return claim()

        wait_until(holds, seconds)

    def has_finished(self) -> bool:
        return self.services.has_finished(self.run)

    def has_left(self, island: str) -> bool:
        return (self._folder / "learners" / island / "left.json").exists()

    def versions(self) -> int:
        return self.services.versions(self.run)

    def commits(self) -> dict[str, list[dict[str, Any]]]:
        """Return every fragment's commits, first to last."""
        folders = sorted((self._folder / "versions").glob("f*"))
        return {f.name: [_body(path) for path in sorted(f.glob("v*.json"))] for f in folders}

    def merged_to(self, island: str) -> tuple[int, int]:
        """Return up to which (incarnation, step) an island's work is in the model, over all fragments."""
        newest = [
            max(folder.glob("v*.json"), default=None)
            for folder in (self._folder / "versions").glob("f*")
        ]
        tallies = [_body(path)["tallies"] for path in newest if path is not None]
        found = [tuple(its[island]["consumed_to"]) for its in tallies if island in its]
        return max(found, default=(-1, 0))

    @property
    def _folder(self) -> Any:
        return self.services.folder / "runs" / self.run

    # --- its processes ---

    def learner(self, island: str) -> tuple[int, dict[str, Any]]:
        """Return an island's newest incarnation and where it runs; (-1, {}) before the first."""
        return self._newest(f"learners/{island}")

    def trainer(self) -> tuple[int, dict[str, Any]]:
        """Return the newest trainer's number and where it runs."""
        return self._newest("trainers")

    def synchronizer(self) -> tuple[int, dict[str, Any]]:
        """Return the newest synchronizer's number and where it runs; (-1, {}) before the first."""
        return self._newest("synchronizers")

    def _newest(self, folder: str) -> tuple[int, dict[str, Any]]:
        found = [path for path in (self._folder / folder).glob("[0-9]*.json")]
        if not found:
            return -1, {}
        path = max(found, key=lambda one: int(one.stem))
        return int(path.stem), dict(_body(path)["where"])

    def flow_runs(self, *kinds: str) -> list[dict[str, Any]]:
        """Return this run's flow runs, oldest first: of "train", "synchronize", an island; of all if none is named."""
        exact = {"train": f"train {self.run}", "synchronize": f"synchronize {self.run}"}
        chosen = kinds or ("train", "synchronize", *self.islands)
        wanted = {exact.get(kind, f"{kind} of {self.run}") for kind in chosen}
        found = self.services.flow_runs("", with_scheduled=True, having=self.run)
        return [flow_run for flow_run in found if flow_run["name"] in wanted]

    def process_of(self, kind: str) -> int:
        """Wait for the process of the newest flow run of a kind, and return it."""
        found: list[int] = []

        def is_there() -> bool:
            living = self.flow_runs(kind)[-1:]
            pids = [self.services.process_of(flow_run["id"]) for flow_run in living]
            found[:] = [pid for pid in pids if pid is not None]
            return bool(found)

        self.until(is_there)
        return found[0]

    def leftovers(self) -> list[str]:
        """Return what still runs of this run."""
        flow_runs = [flow_run["id"] for flow_run in self.flow_runs()]
        running = processes.with_variable("PREFECT__FLOW_RUN_ID")
        return [processes.command_line(pid) for pid, its in running.items() if its in flow_runs]

    # --- the fault ---

    def struck(self, happened: str) -> None:
        """Note what happened; recovery is counted from here."""
        self.happened, self.since = happened, time.monotonic()

    def signal(self, where: dict[str, Any] | int, number: signal.Signals) -> int:
        """Send a signal to a process that must be there, and return its id."""
        known = processes.of(where) if isinstance(where, int) else where
        assert known is not None, f"process {where} has ended by itself"
        assert processes.send(known, number), f"{known} has ended by itself"
        return int(known["process"])

    def catch_in_mid_merge(self) -> int:
        """Stop the synchronizer between the payload of a version and its commit, and return its process."""
        payloads = self._folder / "payloads" / "versions"
        ends = time.monotonic() + PATIENCE_SECONDS
        while time.monotonic() < ends and not self.has_finished():
            for folder in payloads.glob("f*/v*"):
                commit = self._folder / "versions" / folder.parent.name / f"{folder.name}.json"
                if not commit.exists() and processes.find(self.synchronizer()[1]) is not None:
                    process = self.signal(self.synchronizer()[1], signal.SIGSTOP)
                    time.sleep(0.05)
                    if not commit.exists():
                        return process
                    self.signal(process, signal.SIGCONT)
            time.sleep(0.004)
        raise AssertionError("no synchronizer was caught between payload and commit")

    # --- what recovery is ---

    def is_back(self, island: str) -> Claim:
        """Return a claim: a later incarnation's work is merged, or it had nothing left but to say farewell."""
        number = self.learner(island)[0]
        return lambda: self.merged_to(island)[0] > number or self.has_left(island)

    def goes_on(self, island: str) -> Claim:
        """Return a claim: more of the island's work is merged than now."""
        before = self.merged_to(island)
        return lambda: self.merged_to(island) > before

    def merges_again(self) -> Claim:
        """Return a claim: another synchronizer has made a version."""
        number = self.synchronizer()[0]
        return lambda: any(
            commit["synchronizer"] > number
            for its in self.commits().values()
            for commit in its[-2:]
        )

    # --- its end ---

    def wind_up(self, *, further_steps: int = 0) -> None:
        """Tell a run to train no further, or so many steps more; its islands leave as they always do."""
        if self.tokens == ENDLESS:
            run = open_run(self.services.store, self.run)
            links = [history.last_link(run, island) for island in self.islands]
            trained = [0 if link is None else link.trained for link in links]
            most = max(trained) if further_steps else min(trained)
            self.tokens = max(1, len(trained) * (most + further_steps * TOKENS_PER_STEP))
            self.adjust(f"total_tokens={self.tokens}")

    def adjust(self, assignment: str) -> None:
        """Change a setting of the run."""
        adjust(open_run(self.services.store, self.run), [assignment])

    def abandon(self) -> None:
        """Have Prefect cancel the run where it did not get to its end: other cases need its cores."""
        if self.services.process.poll() is not None or self.has_finished():
            return
        for flow_run in self.flow_runs("train")[-1:]:
            cancelling = {"state": {"type": "CANCELLING", "name": "Cancelling"}}
            self.services.post(f"/flow_runs/{flow_run['id']}/set_state", cancelling)

    def finish(self, *, replays: bool = False, seconds: float = 400) -> str:
        """Let the run end, demand that nothing is left or lost, and return its ledger in words."""
        self.wait(self.has_finished, seconds)
        self.wait(lambda: not self.leftovers())
        self.wait(lambda: not self._unended())
        options = ["--replay"] if replays else []
        done = self.services.diloco("verify", self.run, "--json", *options, timeout=200)
        assert done.returncode == 0, done.stdout + done.stderr
        rows = json.loads(done.stdout)["rows"]
        assert sum(row["trained"] for row in rows) >= self.tokens * len(self.commits())
        lost = sum(abs(row["imbalance"]) for row in rows)
        double = sum(_num_overlaps(commits) for commits in self.commits().values())
        assert (lost, double) == (0, 0), rows
        replayed = ", replayed bit for bit" if replays else ""
        return f"{self.versions()} versions{replayed}; 0 lost, 0 double-counted"

    def _unended(self) -> list[str]:
        ended = ("COMPLETED", "FAILED", "CRASHED", "CANCELLED")
        return [one["name"] for one in self.flow_runs() if one["state_type"] not in ended]


def _body(path: Any) -> dict[str, Any]:
    return dict(json.loads(path.read_text())["body"])


def _num_overlaps(commits: Iterable[dict[str, Any]]) -> int:
    """Return how many merged intervals of one fragment begin before an earlier one of their learner ended."""
    spans: dict[str, list[tuple[list[int], list[int]]]] = {}
    for commit in commits:
        for entry in commit["consumed"]:
            spans.setdefault(entry["learner"], []).append((entry["start"], entry["stop"]))
    ordered = [sorted(its) for its in spans.values()]
    return sum(later[0] < earlier[1] for its in ordered for earlier, later in pairwise(its))
