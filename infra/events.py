"""Events to Prefect: hints that something may be due. Losing one costs time, never work.

Knows event names and labels; must not know when to emit one.
"""

from __future__ import annotations

import hashlib
import uuid

from prefect.events import emit_event

QUORUM = "diloco.quorum"
RESOURCE = "diloco.run"
# Labels that the trigger of the deployment `synchronize` reads.
KEY_LABEL, RUN_LABEL, STORE_LABEL = "diloco.key", "diloco.run", "diloco.store"


def emit_quorum(store_url: str, run_id: str, key: str) -> None:
    """Say that a quorum waits to be merged. Whoever says so with the same key says the same thing: one event."""
    unique = unique_key(store_url, key)
    emit_event(
        QUORUM,
        resource={
            "prefect.resource.id": f"{RESOURCE}.{run_id}",
            KEY_LABEL: unique,
            RUN_LABEL: run_id,
            STORE_LABEL: store_url,
        },
        id=uuid.uuid5(uuid.NAMESPACE_URL, unique),
    )


def unique_key(store_url: str, key: str) -> str:
    """Return the key with a short digest of the store: two stores may hold runs of one name."""
    return f"{key}-{hashlib.sha256(store_url.encode()).hexdigest()[:8]}"
