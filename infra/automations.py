"""What Prefect does by itself: start a synchronizer where a quorum waits, call a flow run dead that has fallen silent.

Knows events and Prefect's triggers; must not know what a flow does.
"""

from __future__ import annotations

from datetime import timedelta

from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.objects import StateType
from prefect.events import DeploymentEventTrigger
from prefect.events.actions import ChangeFlowRunState
from prefect.events.schemas.automations import AutomationCore, EventTrigger, Posture
from prefect.events.schemas.events import ResourceSpecification

from infra import events

# Of every deployment, and so of every flow run and of all its events.
TAG = "diloco"
SILENCE_SECONDS = 90
# Begins the message of the state that the automation sets.
SILENT = f"no heartbeat for {SILENCE_SECONDS} s"
_SILENCE_NAME = "diloco: a flow run without heartbeat has crashed"
_HEARTBEAT = "prefect.flow-run.heartbeat"
_ENDINGS = ("Completed", "Failed", "Crashed", "Cancelling", "Cancelled", "Paused", "Suspended")


def quorum_trigger() -> DeploymentEventTrigger:
    """Return what starts the deployment `synchronize` for a quorum, once per key."""
    labels = {"store": events.STORE_LABEL, "run": events.RUN_LABEL, "ring": events.KEY_LABEL}
    return DeploymentEventTrigger(
        name="a quorum waits",
        expect={events.QUORUM},
        match={"prefect.resource.id": f"{events.RESOURCE}.*"},
        for_each={events.KEY_LABEL},
        threshold=1,
        within=timedelta(seconds=60),
        parameters={name: f"{{{{ event.resource['{label}'] }}}}" for name, label in labels.items()},
    )


def watch_heartbeats(client: SyncPrefectClient) -> None:
    """Have Prefect mark a flow run of ours as Crashed when its heartbeats stop; called again, it changes nothing.

    One that is as it must be is left alone: making it anew would forget whose heartbeats have been heard.
    """
    wanted, is_there = _silence(), False
    for found in client.read_automations_by_name(_SILENCE_NAME):
        if not is_there and _essence(found) == _essence(wanted):
            is_there = True
        else:
            client.delete_automation(found.id)
    if not is_there:
        client.create_automation(wanted)


def _silence() -> AutomationCore:
    return AutomationCore(
        name=_SILENCE_NAME,
        description="Its process died together with what watched it, or cannot reach this server. Nothing is lost: "
        "an island is started again only if the store shows no sign of it either.",
        trigger=EventTrigger(
            posture=Posture.Proactive,
            match=ResourceSpecification({"prefect.resource.id": "prefect.flow-run.*"}),
            match_related=ResourceSpecification(
                {"prefect.resource.id": f"prefect.tag.{TAG}", "prefect.resource.role": "tag"}
            ),
            after={_HEARTBEAT},
            expect={_HEARTBEAT, *(f"prefect.flow-run.{name}" for name in _ENDINGS)},
            for_each={"prefect.resource.id"},
            threshold=1,
            within=timedelta(seconds=SILENCE_SECONDS),
        ),
        actions=[
            ChangeFlowRunState(state=StateType.CRASHED, name="Crashed", message=SILENT, force=False)
        ],
    )


def _essence(automation: AutomationCore) -> object:
    """Return what an automation does, without what a server adds."""
    parts = automation.model_dump(mode="json", include={"description", "trigger", "actions"})
    parts["trigger"].pop("id", None)
    return {
        **parts,
        "sets": {key: sorted(parts["trigger"].pop(key)) for key in ("after", "expect")},
    }
