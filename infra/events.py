"""Events to Prefect: hints that something may be due. Losing one costs time, never work.

Knows event names and labels; must not know when to emit one.
"""

from __future__ import annotations

import hashlib
import uuid

from prefect.events import emit_event

QUORUM = "diloco.quorum"
# A finding begins, a finding has ended. What to do then is for automations of the server's owner.
ALARM, ALARM_OVER = "diloco.alarm", "diloco.alarm.over"
RESOURCE = "diloco.run"
# Labels that the trigger of the deployment `synchronize` reads.
KEY_LABEL, RUN_LABEL, STORE_LABEL = "diloco.key", "diloco.run", "diloco.store"
KIND_LABEL, ISLAND_LABEL = "diloco.kind", "diloco.island"


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


def emit_alarm(
    store_url: str, run_id: str, kind: str, *, island: str, message: str, is_over: bool = False
) -> None:
    """Say that something is wrong with a run, or is no longer. `island`: "" where it is the run's."""
    emit_event(
        ALARM_OVER if is_over else ALARM,
        resource={
            "prefect.resource.id": f"{RESOURCE}.{run_id}",
            RUN_LABEL: run_id,
            STORE_LABEL: store_url,
            KIND_LABEL: kind,
            ISLAND_LABEL: island,
        },
        payload={"message": message},
    )


def unique_key(store_url: str, key: str) -> str:
    """Return the key with a short digest of the store: two stores may hold runs of one name."""
    return f"{key}-{hashlib.sha256(store_url.encode()).hexdigest()[:8]}"
