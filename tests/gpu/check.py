"""The check on a GPU: a learner of 100 million parameters, two islands on one device, and what exchanging costs them.

    python tests/gpu/check.py --json FILE                           on CUDA: about 6 minutes
    python tests/gpu/check.py --json FILE --device cpu --small      the very same script, tiny, in half a minute

Options: `--folder DIR` for the store (about 20 GB), if not in the temp folder; `--seconds S` per measured stretch.
Needs torch and, of the requirements in pyproject.toml: numpy, pydantic, tomli-w, zarr, obstore, google-crc32c, dask,
distributed, safetensors. Nothing has to be installed: the project is imported from the folder this file lies in.

First, in this process: what CUDA computes of copies, adoption, checkpoints is what the CPU computes, bit by bit, and
how long the learner's thread is held up by each. Then two islands and a synchronizer, a process each, on one store. All
islands train in turn a run they exchange in ("shared") and one they never push in ("alone"), so that both see the same
machine. Exit status: 0 if every check holds, 1 if one does not. Figures decide nothing.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
import torch

from infra.arrays import ArrayReader
from islands.codecs import decode, encode
from islands.config import parse_config
from islands.contributions import Telemetry
from islands.data import batch_at
from islands.fragments import pseudo_gradient
from islands.landing import landed
from islands.learner import Base, Copy, Learner, LearnerState
from islands.merging import nesterov_step
from islands.model import build_model
from tasks import building, creating, exchanging, history, records, stopping
from tasks.collecting import collect
from tasks.exchanging import Exchange
from tasks.living import Life
from tasks.merging import Synchronizer
from tasks.reporting import status
from tasks.runs import Run, open_run, read_shard
from tasks.synchronizing import Merged, synchronize
from tasks.verifying import verify

ISLANDS = ("east", "west")
TEXT = """
total_tokens = 4_000_000_000
durable = false
[model]
width = 768
num_layers = 14
num_heads = 12
context = 1024
[data]
eval_bytes = 8_192
[inner]
learning_rate = 6e-4
warmup_fraction = 0.0005
beta2 = 0.95
precision = "bfloat16"
[sync]
num_fragments = 8
period_steps = 96
codec_down = "bfloat16"
[pipeline]
checkpoint_seconds = 30
[[islands]]
name = "east"
batch_size = 16
cluster = { threads = 4 }
[[islands]]
name = "west"
batch_size = 16
cluster = { threads = 4 }
"""
SMALL = (
    *("model.width=32", "model.num_layers=1", "model.num_heads=2", "model.context=32"),
    *("sync.num_fragments=2", "sync.period_steps=24", "pipeline.checkpoint_seconds=1"),
    *(f"islands.{name}.batch_size=4" for name in ISLANDS),
    *(f"islands.{name}.cluster.threads=1" for name in ISLANDS),
    "inner.learning_rate=4e-3",
)
EXACT = (
    "sync.period_steps=8",
)  # a synchronizer just started merges what half a period was trained for
ALONE = ("sync.period_steps=1_000_000", "pipeline.checkpoint_seconds=86_400")
NUM_TIMED = 16


@dataclass(frozen=True, slots=True)
class Plan:
    """What is run where: `seconds` per measured stretch, `settle_seconds` for what is still under way after one."""

    device: str
    is_small: bool
    folder: Path
    num_rounds: int
    seconds: float
    settle_seconds: float
    patience_seconds: float


def create(plan: Plan, name: str, *assignments: str) -> Run:
    """Create a run in a store of its own."""
    doors = [f'store="{(plan.folder / name).as_uri()}"']
    doors += [f'islands.{island}.device="{plan.device}"' for island in ISLANDS]
    if plan.is_small:
        doors += [f'data.source="{write_text(plan.folder / "text")}"', *SMALL]
    config = parse_config(TEXT, assignments=[*doors, *assignments], source="check")
    prepared = creating.prepare_run(config, name)
    return creating.create_run(prepared, creating.attempts_of(prepared))


def write_text(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    for n in range(8):
        lines = [f"island {n} adds {k} to {k + n} and gets {2 * k + n}" for k in range(400)]
        (folder / f"{n}.txt").write_text("\n".join(lines), encoding="utf-8")
    return folder


def timed(call: Callable[[], Any]) -> tuple[Any, float]:
    """Return what a call returns, and its milliseconds on this thread."""
    begun = time.perf_counter()
    result = call()
    return result, 1000 * (time.perf_counter() - begun)


# --- one learner: exact, and never held up -------------------------------------------------------


class Bench:
    """A learner of `east` with its text."""

    def __init__(self, run: Run, learner: Learner) -> None:
        self.run = run
        self.learner = learner
        self._shard = read_shard(run, "east")

    def step(self) -> float:
        config, island = self.run.config, self.run.island("east")
        batch = batch_at(
            self._shard,
            cursor=self.learner.cursor,
            batch_size=island.batch_size,
            context=config.model.context,
            seed=config.seed,
            learner="east",
        )
        num_tokens = island.batch_size * config.model.context
        return self.learner.step(batch, num_tokens=num_tokens, num_samples=island.batch_size)


def cpu_learner(run: Run) -> Learner:
    model = build_model(building.model_shape(run.config), run.config.seed)
    schedule = building.schedule_of(run.config, 10**9)
    return building.assemble(run.config, "east", model, run.layouts, schedule=schedule)


def are_equal(one: LearnerState, other: LearnerState) -> bool:
    """Say whether two states are the same, bit by bit."""
    pairs = zip(
        (*one.values, *one.first, *one.second),
        (*other.values, *other.first, *other.second),
        strict=True,
    )
    same = all(np.array_equal(landed(a), landed(b)) for a, b in pairs)
    accounts = [
        (state.record.position, state.record.trained, state.record.cursor, state.record.clocks)
        for state in (one, other)
    ]
    return same and one.tensor_steps == other.tensor_steps and accounts[0] == accounts[1]


def check_one_learner(plan: Plan, checks: dict[str, bool], figures: dict[str, Any]) -> None:
    """Train one learner; compare with a twin on the CPU, push, merge, adopt, save, restore; then time its thread."""
    run = create(plan, "exact", *EXACT)
    past = history.register(run, "east", records.new_attempt, stamp=time.time)
    exchange = Exchange(
        run,
        "east",
        past.incarnation,
        past.last_digest,
        records.new_attempt,
        stamp=time.time,
        link=exchanging.link_of(run, "east", past.last),
    )
    heads = exchanging.fetch_heads(run)
    bench = Bench(run, building.build_learner(run, "east"))
    learner, anchors = bench.learner, [head.values for head in heads]
    learner.begin(heads, incarnation=past.incarnation)
    figures["num_parameters"] = sum(layout.size for layout in run.layouts)
    checks["mixed precision starts at the loss of float32"] = starts_alike(run, heads, bench)
    for _ in range(7):
        bench.step()
    twin = cpu_learner(run)
    twin.restore(learner.state(""), anchors)
    checks["a twin on the CPU holds the same state"] = are_equal(learner.state(""), twin.state(""))
    check_exchange(bench, twin, exchange, checks)
    check_saving(bench, exchange, checks)
    figures["learner_thread"] = thread_costs(bench)
    if plan.device == "cuda":
        figures["peak_gpu_bytes_one_learner"] = torch.cuda.max_memory_allocated()
    shutil.rmtree(plan.folder / "exact")


def starts_alike(run: Run, heads: list[Base], bench: Bench) -> bool:
    """Take the first step in both precisions, and compare the losses."""
    inner = run.config.inner.model_copy(update={"precision": "float32"})
    config = run.config.model_copy(update={"inner": inner})
    device = run.island("east").device
    model = build_model(building.model_shape(config), config.seed).to(device)
    schedule = building.schedule_of(config, 10**9)
    plain = building.assemble(config, "east", model, run.layouts, schedule=schedule, device=device)
    plain.begin(heads, incarnation=0)
    expected = Bench(run, plain).step()
    return abs(bench.step() - expected) < 0.02 * expected


def check_exchange(
    bench: Bench, twin: Learner, exchange: Exchange, checks: dict[str, bool]
) -> None:
    """Push what the GPU copied, merge it, adopt it, all beside the twin and plain numpy."""
    run, learner = bench.run, bench.learner
    fragments = range(len(run.layouts))
    copies = [learner.copy(p, next_push_steps=8) for p in fragments]
    account = learner.record("")
    bench.step()  # what was copied must not move with it
    bench.step()
    locals_ = [landed(twin.copy(p, next_push_steps=8).local) for p in fragments]
    checks["a copy holds what was there when it was made"] = all(
        np.array_equal(landed(copy.local), local)
        for copy, local in zip(copies, locals_, strict=True)
    )
    expected = [outer_step(run, copy, locals_[copy.fragment]) for copy in copies]
    for copy in copies:
        exchange.push(copy, account, step_seconds=0.1, telemetry=Telemetry())
    synchronizer = Synchronizer(run, records.new_attempt, stamp=time.time)
    synchronizer.poll(now=0.0)
    synchronizer.poll(now=1e6)
    bases = [exchanging.fetch(run, p, 1) for p in fragments]
    commits = [records.require_commit(run.store, p, 1)[0] for p in fragments]
    merged = [ArrayReader(run.store, c.payload).read("params") for c in commits]
    checks["a merge of it is the outer step that numpy takes"] = all(
        np.allclose(ours, theirs, rtol=1e-5, atol=1e-7)
        for ours, theirs in zip(merged, expected, strict=True)
    )
    checks["what is public is that, coded"] = all(
        np.array_equal(base.values, decode(encode(values, run.config.sync.codec_down)))
        for base, values in zip(bases, merged, strict=True)
    )
    adopt_both((learner, twin), bases, alpha=0.0)
    checks["adoption takes over every bit"] = all(
        np.array_equal(one.local_values(p), bases[p].values)
        for one in (learner, twin)
        for p in fragments
    )
    mixed = [Base(2, "two", base.values[::-1].copy()) for base in bases]
    adopt_both((learner, twin), mixed, alpha=0.3)
    checks["mixing at adoption is what the CPU computes"] = all(
        np.array_equal(learner.local_values(p), twin.local_values(p)) for p in fragments
    )


def outer_step(run: Run, copy: Copy, local: np.ndarray) -> np.ndarray:
    """Return the parameters after a merge of this contribution alone: its own mean, whichever way means are taken."""
    commit, _ = records.require_commit(run.store, copy.fragment, 0)
    params = ArrayReader(run.store, commit.payload).read("params")
    delta = pseudo_gradient(copy.anchor, local)
    outer = run.config.outer
    return nesterov_step(
        params,
        np.zeros_like(params),
        delta,
        learning_rate=outer.learning_rate,
        momentum_factor=outer.momentum,
    )[0]


def adopt_both(learners: tuple[Learner, ...], bases: list[Base], *, alpha: float) -> None:
    for learner in learners:
        for p, base in enumerate(bases):
            learner.adopt(p, base, alpha=alpha, next_push_steps=8)


def check_saving(bench: Bench, exchange: Exchange, checks: dict[str, bool]) -> None:
    """Save, read back, restore into a fresh learner, and let both go on."""
    run, learner = bench.run, bench.learner
    previous = exchange.previous
    state = learner.state(previous)
    saved = exchanging.read_checkpoint(run, exchange.save(state)).state
    checks["a checkpoint is what was handed over"] = are_equal(state, saved)
    other = Bench(run, building.build_learner(run, "east"))
    anchors = [learner.copy(p, next_push_steps=8).anchor for p in range(len(run.layouts))]
    other.learner.restore(saved, anchors)
    restored = other.learner.state(previous)
    checks["a restored learner has every bit, moments too"] = are_equal(state, restored)
    device = next(iter(learner.model.parameters())).device
    checks["its step counts lie where the kernels want them"] = all(
        slot["step"].device == device for slot in other.learner.optimizer.state.values()
    )
    pairs = [(bench.step(), other.step()) for _ in range(4)][1:]
    checks["a restored learner goes on as the other does"] = all(
        abs(ours - theirs) < 0.01 * ours for ours, theirs in pairs
    )


def thread_costs(bench: Bench) -> dict[str, float]:
    """Return median milliseconds of the learner's thread, a step in flight each time, and of what happens beside it."""
    run, learner = bench.run, bench.learner
    bases = [Base(9, "nine", learner.local_values(p)) for p in range(len(run.layouts))]
    took: dict[str, list[float]] = {}

    def note(what: str, call: Callable[[], Any]) -> Any:
        result, milliseconds = timed(call)
        took.setdefault(what, []).append(milliseconds)
        return result

    def note_beside(what: str, call: Callable[[], Any]) -> None:
        """Run it in another thread while this one trains."""
        thread = threading.Thread(target=note, args=(what, call))
        thread.start()
        while thread.is_alive():
            bench.step()
        thread.join()

    for _ in range(3):
        bench.step()
    _, milliseconds = timed(lambda: [bench.step() for _ in range(NUM_TIMED)])
    for n in range(NUM_TIMED):
        p = n % len(run.layouts)
        bench.step()
        copy = note("copy", partial(learner.copy, p, next_push_steps=8))
        note_beside("copy_lands_beside", partial(landed, copy.local))
        note("adopt", partial(learner.adopt, p, bases[p], alpha=0.0, next_push_steps=8))
        bench.step()
        note("copy_if_waited_for", partial(learner.local_values, p))
    for _ in range(3):
        bench.step()
        state = note("checkpoint", partial(learner.state, ""))
        vectors = (*state.values, *state.first, *state.second)
        note_beside("checkpoint_lands_beside", partial(_land_all, vectors))
    medians = {f"{what}_ms": statistics.median(row) for what, row in took.items()}
    return {"step_ms": milliseconds / NUM_TIMED, **medians}


def _land_all(vectors: tuple[Any, ...]) -> None:
    for vector in vectors:
        landed(vector)


# --- two islands and a synchronizer, a process each ----------------------------------------------


@dataclass(frozen=True, slots=True)
class Row:
    """One stretch of one island: `stall_share` of its thread's seconds went into neither steps nor adoptions."""

    island: str
    run_id: str
    round: int
    tokens: int
    seconds: float
    stall_share: float
    loss: float


class Seat:
    """A life of one island in one run, as its worker's process keeps it warm between segments."""

    def __init__(self, plan: Plan, run_id: str, island: str) -> None:
        self._run = open_run((plan.folder / run_id).as_uri(), run_id)
        self._name = island
        self.num_pushes = 0
        self.life = Life(self._run, island, records.new_attempt, stamp=time.time, tell=self._listen)
        self._begun_at = 0.0
        self._useful = 0.0
        self._trained = 0

    def _listen(self, message: Any) -> None:
        self.num_pushes += message["kind"] == "pushed"
        if message["kind"] == "log" and message["level"] != "info":
            print(f"{self._name}: {message['text']}", file=sys.stderr)

    def train(self, seconds: float, number: int) -> Row:
        """Train one stretch. A life's idle share is since it first trained: take the stretch out of it."""
        self._begun_at = self._begun_at or time.perf_counter()
        stretch = self.life.train(seconds)
        useful = (1 - stretch.idle_share) * (time.perf_counter() - self._begun_at)
        stall = 1 - (useful - self._useful) / stretch.seconds
        tokens = stretch.trained - self._trained
        self._useful, self._trained = useful, stretch.trained
        run_id = self._run.run_id
        return Row(self._name, run_id, number, tokens, stretch.seconds, stall, stretch.loss)

    def stop(self) -> str:
        """Ask everybody to stop, do so with the state saved, and return how it ended."""
        mark = records.new_attempt()
        stopping.ask(self._run, is_stop=True, reason="the check is over", mark=mark)
        return self.life.train(60.0).outcome


def island(plan: Plan, name: str, together: Barrier, results: Queue[Any]) -> None:
    """Train both runs in turn, in step with the other island; the round before the first is for warming up."""
    seats = [Seat(plan, run_id, name) for run_id in ("shared", "alone")]
    rows = []
    for number in range(-1, plan.num_rounds):
        for seat in seats:
            together.wait(plan.patience_seconds)
            rows.append(seat.train(plan.seconds, number))
            time.sleep(plan.settle_seconds)
    shared = seats[0]
    together.wait(plan.patience_seconds)
    outcome = shared.stop()
    facts = {"outcome": outcome, "pushes": shared.num_pushes}
    if plan.device == "cuda":
        facts["peak_gpu_bytes_two_learners"] = torch.cuda.max_memory_allocated()
    for seat in seats:
        seat.life.close()
    results.put((name, rows, facts))


def merge_all(plan: Plan, results: Queue[Any]) -> None:
    """Merge what the islands push until they are asked to stop."""
    run = open_run((plan.folder / "shared").as_uri(), "shared")
    synchronizer = Synchronizer(run, records.new_attempt, stamp=time.time)
    merges: list[Merged] = []
    ending = "idle"
    while ending == "idle":  # it starts long before the first contribution
        ending = synchronize(
            run,
            synchronizer,
            on_merges=merges.extend,
            say=lambda text: print(f"synchronizer: {text}", file=sys.stderr),
            is_stopped=lambda: False,
        )
    both = sum(len(merged.learners) == len(ISLANDS) for merged in merges)
    facts = {"outcome": ending, "merges": len(merges), "merges_of_both_islands": both}
    results.put(("synchronizer", [], facts))


def run_islands(plan: Plan) -> dict[str, tuple[list[Row], dict[str, Any]]]:
    """Run the three processes to their end, collecting meanwhile as `train` does; return what each reports."""
    context = multiprocessing.get_context("spawn")
    together, results = context.Barrier(len(ISLANDS)), context.Queue()
    parts = [
        context.Process(target=island, args=(plan, name, together, results)) for name in ISLANDS
    ]
    parts.append(context.Process(target=merge_all, args=(plan, results)))
    run = open_run((plan.folder / "shared").as_uri(), "shared")
    for part in parts:
        part.start()
    reports: dict[str, tuple[list[Row], dict[str, Any]]] = {}
    planned = 2 * (plan.num_rounds + 1) * (plan.seconds + plan.settle_seconds)
    deadline = time.monotonic() + planned + 1.5 * plan.patience_seconds
    try:
        while len(reports) < len(parts) and time.monotonic() < deadline:
            if any(part.exitcode for part in parts):
                break
            while not results.empty():
                name, rows, facts = results.get()
                reports[name] = (rows, facts)
            collect(run)
            time.sleep(1.0)
        for part in parts:
            part.join(10.0)
    finally:
        for part in parts:
            if part.is_alive():
                part.kill()
                part.join()
    return reports


def check_islands(plan: Plan, checks: dict[str, bool], figures: dict[str, Any]) -> None:
    """Let two islands train and exchange; work out what that costs beside training alone."""
    create(plan, "shared")
    create(plan, "alone", *ALONE)
    reports = run_islands(plan)
    for name, (_, facts) in reports.items():
        figures[name] = facts
    checks["both islands and the synchronizer came to their end"] = [
        facts["outcome"] for _, facts in reports.values()
    ] == ["stopped"] * 3
    rows = [row for rows, _ in reports.values() for row in rows]
    for name in ISLANDS:
        losses = [row.loss for row in rows if (row.island, row.run_id) == (name, "shared")]
        checks[f"the loss of {name} falls"] = len(losses) > 1 and losses[-1] < losses[0]
    figures |= overhead([row for row in rows if row.round >= 0])
    url = (plan.folder / "shared").as_uri()
    run = open_run(url, "shared")
    seen = status(run)
    figures["merged_share"] = seen.merged_share
    figures["bytes_up"] = sum(one.bytes_up for one in seen.islands)
    figures["bytes_down"] = sum(one.bytes_down for one in seen.islands)
    checks["something was merged"] = figures["merged_share"] > 0
    collect(run)
    found, milliseconds = timed(lambda: verify(url, "shared"))
    figures["verify_seconds"] = milliseconds / 1000
    figures["problems"] = [str(problem) for problem in found.problems]
    checks["verify finds nothing"] = not found.problems


def overhead(rows: list[Row]) -> dict[str, Any]:
    """Return tokens per second of both runs over all islands, and what share of them exchanging costs, by round."""
    figures: dict[str, Any] = {"rounds": []}
    for number in sorted({row.round for row in rows}):
        paces = {
            run_id: sum(
                row.tokens / row.seconds
                for row in rows
                if (row.round, row.run_id) == (number, run_id)
            )
            for run_id in ("shared", "alone")
        }
        figures["rounds"].append({**paces, "overhead": 1 - paces["shared"] / paces["alone"]})
    if figures["rounds"]:
        for key, name in (
            ("shared", "tokens_per_second_shared"),
            ("alone", "tokens_per_second_alone"),
            ("overhead", "overhead"),
        ):
            figures[name] = statistics.median(one[key] for one in figures["rounds"])
    for run_id in ("shared", "alone"):
        stalls = [row.stall_share for row in rows if row.run_id == run_id]
        figures[f"learner_stall_fraction_{run_id}"] = max(stalls, default=0.0)
    return figures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, required=True, help="where the figures go")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--small", action="store_true", help="a tiny model, seconds")
    parser.add_argument("--seconds", type=float, help="per stretch of training")
    parser.add_argument("--folder", type=Path, help="where the stores lie meanwhile")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error(
            "--device cuda needs a CUDA device, torch finds none; say --device cpu --small"
        )
    torch.set_num_threads(1 if options.small else 8)
    begun = time.monotonic()
    checks: dict[str, bool] = {}
    figures: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if options.device == "cuda" else "cpu",
        "torch": str(torch.__version__),
    }
    with tempfile.TemporaryDirectory(prefix="diloco-check-", dir=options.folder) as folder:
        plan = Plan(
            device=options.device,
            is_small=options.small,
            folder=Path(folder),
            num_rounds=1 if options.small else 3,
            seconds=options.seconds or (1.5 if options.small else 22.0),
            settle_seconds=0.2 if options.small else 3.0,
            patience_seconds=60.0 if options.small else 90.0,
        )
        check_one_learner(plan, checks, figures)
        check_islands(plan, checks, figures)
    figures["seconds"] = time.monotonic() - begun
    report = {"checks": checks, "figures": figures}
    options.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(report, indent=2))
    return 0 if all(checks.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
