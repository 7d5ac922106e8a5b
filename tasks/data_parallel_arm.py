"""One rank of a data-parallel job that must survive deaths: `python -m tasks.data_parallel_arm …`.

It takes the place of a learner of a run, of which it has the model, the text and the batch: each step's gradients are
averaged over all ranks (gloo, as one flat vector), then everybody takes the same AdamW step. Orders come line by line
on the standard input: "GENERATION RANK SIZE ISLAND" is a group to join. Whoever loses its group, or gets a newer order
at a step boundary, drops the group and joins the next one; the step under way is lost. A group begins with the state of
whoever in it has come furthest.

Where the islands' links have a cap, a step takes as long as the ring needs on them, if that is longer: the exchange is
granted to overlap with all of the forward and backward pass. What a newcomer fetches of the state passes its link too.

Whoever drops a group closes its connections, so its neighbours' all-reduce fails at once, and so on around the ring:
nobody waits for a time-out, unless one of them stands still.
"""

from __future__ import annotations

import os
import pickle
import queue
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed import FileStore, ProcessGroupGloo  # type: ignore[attr-defined]

from islands.data import batch_at
from islands.learner import Base, Learner, LearnerState, flatten, trainable
from islands.model import build_model
from tasks import building
from tasks.data_parallel import Place, lost_mark, place_from, ring_seconds, warm_mark
from tasks.runs import Run, open_run, read_shard
from tasks.step_log import StepLog
from tasks.stepping import schedule_of

_HOST = "127.0.0.1"
# For a rank that dies while the group forms, or stands still; the next order finds the others again after that.
_PATIENCE = timedelta(seconds=10)
_LOOK_SECONDS = 0.01


class Group:
    """The ranks of one generation; to drop it is to close its connections."""

    def __init__(self, place: Place, folder: Path) -> None:
        gloo: Any = ProcessGroupGloo  # torch types only a part of it
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname=_HOST)]
        options._timeout = _PATIENCE
        store = FileStore(str(folder / f"{place.generation:03d}.meeting"), place.size)
        store.set_timeout(_PATIENCE)
        self.size = place.size
        self._gloo = gloo(store, place.rank, place.size, options)

    def mean(self, values: Tensor) -> None:
        """Replace the values by their mean over all ranks."""
        self._gloo.allreduce([values]).wait()
        values /= self.size

    def gather(self, number: int) -> list[int]:
        """Return every rank's number."""
        numbers = torch.zeros(self.size, dtype=torch.int64)
        numbers[self._gloo.rank()] = number
        self._gloo.allreduce([numbers]).wait()
        return [int(one) for one in numbers]

    def broadcast(self, data: bytes, source: int) -> bytes:
        """Return the bytes of one rank."""
        length = self.gather(len(data))[source]
        values = torch.zeros(length, dtype=torch.uint8)
        if self._gloo.rank() == source:
            values = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        self._gloo.broadcast(values, source).wait()
        return values.numpy().tobytes()


class Rank:
    """A learner whose gradients are the group's mean.

    Args:
        run: of which the model, the text and the batch are taken; nothing is written to it.
        folder: where ranks meet, and log their steps: a file per group, named by generation, island, first step.
        checkpoint: where rank 0 keeps the state, and everybody begins from it; None: nobody does.
        checkpoint_seconds: between two checkpoints.
        has_links: whether it keeps to the cap of its island's link.
    """

    def __init__(
        self,
        run: Run,
        folder: Path,
        checkpoint: Path | None,
        checkpoint_seconds: float,
        *,
        has_links: bool,
    ) -> None:
        building.use_one_thread()
        self._run, self._folder = run, folder
        self._shards = {island.name: read_shard(run, island.name) for island in run.config.islands}
        self._learner = _joined_learner(run)
        self._learner.optimizer.register_step_pre_hook(self._share_gradients)
        self._parameters = list(trainable(self._learner.model).values())
        self._has_links = has_links
        self._bytes_per_second: float | None = None
        self._group: Group | None = None
        self._orders: queue.SimpleQueue[Place] = queue.SimpleQueue()
        self._begun = self._waited = 0.0
        self._checkpoint, self._checkpoint_seconds = checkpoint, checkpoint_seconds
        self._writer = threading.Thread()
        self._saved_at = time.monotonic()
        if checkpoint is not None and checkpoint.exists():
            self._load(checkpoint.read_bytes())

    def train(self, place: Place, orders: queue.SimpleQueue[Place]) -> None:
        """Train as part of a group until it breaks or there is a newer order.

        Raises:
            RuntimeError: a rank of the group has gone, which is what gloo raises, or the next group forms already.
        """
        self._orders = orders
        try:
            self._group = Group(place, self._folder)
            pace = self._run.island(place.island).bytes_per_second
            self._bytes_per_second = pace if self._has_links else None
            self._agree(self._group)
            first = self._learner.position.step
            log = StepLog(self._folder / f"{place.generation:03d}-{place.island}-{first}.steps")
            while orders.empty():
                self._one_step(place, log)
        finally:
            self._group = None

    def _agree(self, group: Group) -> None:
        """Take over the state of whoever has come furthest, unless all have come as far."""
        steps = group.gather(self._learner.position.step)
        if len(set(steps)) > 1:
            state = pickle.dumps(self._learner.state(""))
            found = group.broadcast(state, steps.index(max(steps)))
            if self._bytes_per_second is not None:
                self._wait_until(time.perf_counter() + len(found) / self._bytes_per_second)
            self._load(found)

    def _one_step(self, place: Place, log: StepLog) -> None:
        config, step = self._run.config, self._learner.position.step
        self._begun, self._waited = time.perf_counter(), 0.0
        num_samples = self._run.island(place.island).batch_size
        batch = batch_at(
            self._shards[place.island],
            cursor=step * num_samples,
            batch_size=num_samples,
            context=config.model.context,
            seed=config.seed,
            learner=place.island,
        )
        num_tokens = num_samples * config.model.context
        self._learner.step(batch, num_tokens=num_tokens * place.size, num_samples=num_samples)
        ended = time.perf_counter()
        log.add(self._begun, ended, ended - self._begun - self._waited, num_tokens)
        if self._checkpoint is not None and place.rank == 0:
            self._save(self._checkpoint)

    def _share_gradients(self, *arguments: Any) -> None:
        """Make every gradient the group's mean, and clip that. What it waits for the others is no training."""
        assert self._group is not None, "steps are taken in a group"
        begun = time.perf_counter()
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        self._group.mean(flat)
        self._wait_until(
            self._begun + ring_seconds(flat.nbytes, self._group.size, self._bytes_per_second)
        )
        offset = 0
        for gradient in gradients:
            gradient.copy_(flat[offset : offset + gradient.numel()].view_as(gradient))
            offset += gradient.numel()
        self._waited = time.perf_counter() - begun
        nn.utils.clip_grad_norm_(self._parameters, self._run.config.inner.clip_norm)

    def _wait_until(self, moment: float) -> None:
        """Wait for a link until then, by `time.perf_counter`.

        Raises:
            RuntimeError: there is a newer group meanwhile; what was to come over the link has not been taken over.
        """
        while (left := moment - time.perf_counter()) > 0:
            if not self._orders.empty():
                raise RuntimeError("a newer group forms")
            time.sleep(min(left, _LOOK_SECONDS))

    def _save(self, path: Path) -> None:
        """Copy the state when it is time, and let a thread of its own write it."""
        if self._writer.is_alive() or (
            time.monotonic() - self._saved_at < self._checkpoint_seconds
        ):
            return
        self._saved_at = time.monotonic()
        state = self._learner.state("")
        self._writer = threading.Thread(target=_write, args=(path, state), daemon=True)
        self._writer.start()

    def _load(self, data: bytes) -> None:
        state: LearnerState = pickle.loads(data)
        empty = [np.empty(0, np.float32)] * len(self._run.layouts)
        self._learner.restore(state, empty)


def _joined_learner(run: Run) -> Learner:
    """Return a learner as the whole job is one: its rate follows all tokens, and it clips the mean, not its own."""
    config = run.config
    model = build_model(building.model_shape(config), config.seed)
    schedule = schedule_of(config, config.total_tokens)
    learner = building.assemble(config, "joined", model, run.layouts, schedule=schedule)
    learner.begin(
        [Base(0, "", flatten(layout, trainable(model))) for layout in run.layouts], incarnation=0
    )
    learner.retune(
        schedule=schedule,
        clip_norm=float("inf"),
        period_steps=config.sync.period_steps,
    )
    return learner


def _write(path: Path, state: LearnerState) -> None:
    """Write a checkpoint under another name and move it: whoever reads finds a whole one."""
    draft = path.with_suffix(f".{os.getpid()}")
    draft.write_bytes(pickle.dumps(state))
    draft.replace(path)


def main() -> None:
    """Say when it is warm, then follow orders until the standard input ends."""
    store, run_id, folder, checkpoint, checkpoint_seconds, links = sys.argv[1:]
    rank = Rank(
        open_run(store, run_id),
        Path(folder),
        Path(checkpoint) if checkpoint else None,
        float(checkpoint_seconds),
        has_links=links == "links",
    )
    orders: queue.SimpleQueue[Place] = queue.SimpleQueue()

    def listen() -> None:
        for line in sys.stdin:
            orders.put(place_from(line))
        os._exit(0)  # nobody waits for this process any more

    threading.Thread(target=listen, daemon=True).start()
    warm_mark(Path(folder), os.getpid()).touch()
    while True:
        place = orders.get()
        while not orders.empty():  # of several groups only the newest will form
            place = orders.get()
        try:
            rank.train(place, orders)
        except RuntimeError as exc:  # a rank has gone, or a newer order is there
            print(f"generation {place.generation}: {exc}", file=sys.stderr, flush=True)
            if orders.empty():
                lost_mark(Path(folder), place.generation).touch()


if __name__ == "__main__":
    main()
