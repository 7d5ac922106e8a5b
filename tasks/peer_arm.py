"""The peer's processes: torchft's DiLoCo over our learner. The only file that imports torchft.

`python -m tasks.peer_arm lighthouse` is the service its replicas meet at; it says its address and lives until its
standard input ends. `python -m tasks.peer_arm replica …` trains: each line on its standard input, "with 48" or
"without 48", is so many steps with or without torchft's exchange, and "done" is the answer. What is trained is our
learner, so both sides take the same steps; torchft hooks into its optimizer, and gets the very same fragments.
"""

from __future__ import annotations

import sys
import time
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path

import torch
from torch import nn
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torchft import Manager, ProcessGroupGloo
from torchft.coordination import LighthouseServer
from torchft.local_sgd import DiLoCo

from islands.data import batch_at
from islands.learner import Learner, trainable
from tasks import building
from tasks.exchanging import fetch_heads
from tasks.runs import Run, open_run, read_shard
from tasks.step_log import StepLog

_HOST = "127.0.0.1"
_PATIENCE = timedelta(seconds=60)


def lighthouse(num_replicas: int) -> None:
    """Serve until the standard input ends."""
    server = LighthouseServer(bind=f"{_HOST}:0", min_replicas=num_replicas, join_timeout_ms=2000)
    print(f"http://{_HOST}:{server.address().rpartition(':')[2]}", flush=True)
    sys.stdin.read()
    server.shutdown()


class Replica:
    """One replica group of one process.

    Args:
        run: of which the model, the text and the period are taken; nothing is written to it.
        name: of the island whose place it takes.
        log: where its steps go.
        address: the lighthouse's.
        overlap_steps: inner steps between torchft's sending a fragment and taking its mean.
    """

    def __init__(
        self, run: Run, name: str, log: StepLog, address: str, *, overlap_steps: int
    ) -> None:
        building.use_one_thread()
        self._run, self._log = run, log
        self._island, self._shard = run.island(name), read_shard(run, name)
        self._learner = building.build_learner(run, name)
        self._learner.begin(fetch_heads(run), incarnation=0)
        # A server that lives as long as somebody holds it; the replicas find each other's gloo there.
        self._store = TCPStore(_HOST, 0, is_master=True, wait_for_workers=False)
        self._manager = _manager(self._learner, name, address, self._store.port)
        fragments = _fragments(self._learner)
        outer = run.config.outer
        self._exchange = DiLoCo(
            self._manager,
            fragments,
            self._learner.optimizer,
            [
                torch.optim.SGD(
                    fragment.parameters(),
                    lr=outer.learning_rate,
                    momentum=outer.momentum,
                    nesterov=True,
                )
                for fragment in fragments
            ],
            sync_every=run.config.sync.period_steps,
            fragment_sync_delay=overlap_steps,
        )

    def train(self, num_steps: int, *, exchanges: bool) -> None:
        """Take so many steps; with an exchange, a multiple of the steps from one fragment to the next."""
        config = self._run.config
        num_samples = self._island.batch_size
        with self._exchange if exchanges else nullcontext():
            begun = time.perf_counter()
            for _ in range(num_steps):
                batch = batch_at(
                    self._shard,
                    cursor=self._learner.cursor,
                    batch_size=num_samples,
                    context=config.model.context,
                    seed=config.seed,
                    learner=self._island.name,
                )
                num_tokens = num_samples * config.model.context
                self._learner.step(batch, num_tokens=num_tokens, num_samples=num_samples)
                now = time.perf_counter()
                self._log.add(begun, now, now - begun, num_tokens)
                begun = now

    def close(self) -> None:
        """Leave the others."""
        self._manager.shutdown(wait=False)


def _manager(learner: Learner, name: str, address: str, store_port: int) -> Manager:
    return Manager(
        pg=ProcessGroupGloo(timeout=_PATIENCE),
        min_replica_size=2,
        use_async_quorum=False,
        load_state_dict=learner.model.load_state_dict,
        state_dict=learner.model.state_dict,
        replica_id=name,
        store_addr=_HOST,
        store_port=store_port,
        rank=0,
        world_size=1,
        lighthouse_addr=address,
        hostname=_HOST,
        timeout=_PATIENCE,
        quorum_timeout=_PATIENCE,
        connect_timeout=_PATIENCE,
    )


def _fragments(learner: Learner) -> list[nn.Module]:
    """Return our fragments as modules that hold the model's own parameters."""
    parameters = trainable(learner.model)
    return [
        nn.ParameterList([parameters[spec.name] for spec in layout.tensors])
        for layout in learner.layouts
    ]


def main() -> None:
    """Be a lighthouse or a replica, as the arguments say."""
    role, *rest = sys.argv[1:]
    if role == "lighthouse":
        lighthouse(int(rest[0]))
        return
    store, run_id, name, log, address, overlap_steps = rest
    steps = StepLog(Path(log))
    replica = Replica(
        open_run(store, run_id), name, steps, address, overlap_steps=int(overlap_steps)
    )
    print("ready", flush=True)
    for line in sys.stdin:
        what, num_steps = line.split()
        replica.train(int(num_steps), exchanges=what == "with")
        print("done", flush=True)
    replica.close()


if __name__ == "__main__":
    main()
