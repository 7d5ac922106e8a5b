"""The process that serves the deployments: `python -m flows.serving --store URL`."""

from __future__ import annotations

import argparse
import json

from infra.deployments import serve_all
from islands.config import RunConfig


def main() -> None:
    """Serve until told to stop."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--store", required=True)
    parser.add_argument("--evaluate-seconds", type=float, required=True)
    parser.add_argument("--also", nargs="*", default=[], help="further flows, such as empty")
    given = parser.parse_args()
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


if __name__ == "__main__":
    main()
