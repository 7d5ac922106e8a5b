"""The process that serves the deployments: `python -m flows.serving --store URL`."""

from __future__ import annotations

import argparse
import json
import threading
import time

from infra.deployments import serve_all
from islands.config import RunConfig
from tasks.reviving import Reviver

_LOOK_SECONDS = 3.0


def main() -> None:
    """Serve until told to stop."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--store", required=True)
    parser.add_argument("--evaluate-seconds", type=float, required=True)
    parser.add_argument("--also", nargs="*", default=[], help="further flows, such as empty")
    given = parser.parse_args()
    reviver = Reviver(lambda text: print(f"serving: {text}", flush=True))
    reviver.look(now=time.monotonic(), patience_seconds=0.0)
    threading.Thread(target=_watch, args=(reviver,), name="diloco-reviver", daemon=True).start()
    config = json.loads(RunConfig(store=given.store).model_dump_json())
    serve_all(
        {
            "train": {"config": config},
            "evaluate": {"store": given.store},
            "chaos": {"store": given.store},
        },
        evaluate_seconds=given.evaluate_seconds,
        also=given.also,
    )


def _watch(reviver: Reviver) -> None:
    """Bring back what dies, as long as this process lives."""
    while True:
        time.sleep(_LOOK_SECONDS)
        reviver.look(now=time.monotonic())


if __name__ == "__main__":
    main()
