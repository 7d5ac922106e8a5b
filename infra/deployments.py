"""The deployments: which flows Prefect offers, what triggers them, and starting and looking at their runs.

Knows flows by the string of their entrypoint and Prefect's client; must not import a flow, nor know what one does.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from typing import Any
from uuid import UUID

import httpx
from prefect import serve
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas import objects
from prefect.client.schemas.actions import DeploymentScheduleCreate, DeploymentScheduleUpdate
from prefect.client.schemas.filters import (
    DeploymentFilter,
    DeploymentFilterName,
    FlowFilter,
    FlowFilterName,
    FlowRunFilter,
    FlowRunFilterState,
    FlowRunFilterStateType,
    FlowRunFilterTags,
    TaskRunFilter,
    TaskRunFilterState,
    TaskRunFilterStateType,
)
from prefect.client.schemas.objects import State, StateType
from prefect.client.schemas.sorting import FlowRunSort
from prefect.deployments import run_deployment
from prefect.deployments.runner import RunnerDeployment
from prefect.exceptions import ObjectNotFound, PrefectException, PrefectHTTPStatusError
from prefect.flows import Flow, load_flow_from_entrypoint
from prefect.runner._scheduled_run_poller import ScheduledRunPoller
from prefect.types.entrypoint import EntrypointType

from infra import automations
from islands.types import ConfigError, ServiceUnavailable, StoreLost

NAME = "diloco"
FLOWS = ("train", "island", "synchronize", "evaluate", "benchmark", "chaos")
# A serve process starts five flow runs at most unless told otherwise: no room for a synchronizer beside four islands.
MOST_RUNS = 32
_LIVING = (StateType.SCHEDULED, StateType.PENDING, StateType.RUNNING)
_UNFINISHED = (*_LIVING, StateType.CANCELLING, StateType.PAUSED)
_FAILED = (StateType.FAILED, StateType.CRASHED)
_REFUSED = (409, 422)
_MOST_READ = 50
_log = logging.getLogger("prefect.diloco")  # where a serve process shows warnings
_VENDOR_ERRORS = (httpx.HTTPError, PrefectException, OSError, RuntimeError)


def serve_all(
    parameters: Mapping[str, Mapping[str, Any]],
    *,
    evaluate_seconds: float,
    also: Sequence[str] = (),
) -> None:
    """Create or update the deployments and serve them in this process until it is told to stop.

    Args:
        parameters: flow -> the values its form starts with.
        evaluate_seconds: interval of the schedule of `evaluate`, when it is first created.
        also: flows beside those that everybody is offered; there before them.
    """
    flows = (*also, *FLOWS)
    with _client() as client:
        automations.watch_heartbeats(client)
    _outlive_outages()
    serve(
        *(_deployment(flow, parameters.get(flow, {}), evaluate_seconds) for flow in flows),
        limit=MOST_RUNS,
        pause_on_shutdown=False,
        print_starting_message=False,
    )


def _outlive_outages() -> None:
    """Let this process serve on after any outage of Prefect.

    Its loop gives up after three looks in a row without an answer, and every flow that trains would go with it.
    """
    look = ScheduledRunPoller._get_and_submit_flow_runs

    async def look_patiently(self: ScheduledRunPoller, task_group: Any = None) -> None:
        try:
            await look(self, task_group)
        except httpx.HTTPError as exc:
            _log.warning("Prefect must answer, got: %s; it is asked again", _first_line(exc))

    ScheduledRunPoller._get_and_submit_flow_runs = look_patiently  # type: ignore[method-assign]


def _deployment(
    flow: str, parameters: Mapping[str, Any], evaluate_seconds: float
) -> RunnerDeployment:
    loaded: Flow[..., Any] = load_flow_from_entrypoint(f"flows.{flow}.{flow}")
    interval = timedelta(seconds=evaluate_seconds) if flow == "evaluate" else None
    made = loaded.to_deployment(
        NAME,
        interval=interval,
        triggers=[automations.quorum_trigger()] if flow == "synchronize" else None,
        parameters=dict(parameters),
        tags=[automations.TAG],
        entrypoint_type=EntrypointType.MODULE_PATH,
    )
    assert isinstance(made, RunnerDeployment)
    kept = _schedules_of(flow)
    if kept is not None:
        made.schedules = kept
    return made


def _schedules_of(flow: str) -> list[DeploymentScheduleCreate | DeploymentScheduleUpdate] | None:
    """Return the schedules of a deployment as a person may have left them; None where there is no deployment yet."""
    with _client() as client:
        try:
            found = client.read_deployment_by_name(f"{flow}/{NAME}")
        except ObjectNotFound:
            return None
    return [
        DeploymentScheduleCreate(
            schedule=one.schedule,
            active=one.active,
            max_scheduled_runs=one.max_scheduled_runs,
            parameters=one.parameters,
            slug=one.slug,
        )
        for one in found.schedules
    ]


def start(
    flow: str,
    parameters: Mapping[str, Any],
    *,
    tags: Sequence[str] = (),
    key: str | None = None,
    name: str | None = None,
    is_child: bool = False,
) -> str:
    """Start a run of a deployment and return the flow run's id at once; with a key, at most one run per key.

    `is_child`: show it as part of the flow run that calls.

    Raises:
        ConfigError: the parameters break the deployment's schema.
        ServiceUnavailable: Prefect did not answer, or has no such deployment.
    """
    try:
        run = run_deployment(
            f"{flow}/{NAME}",
            parameters=dict(parameters),
            timeout=0,
            tags=[*tags],
            idempotency_key=key,
            flow_run_name=name,
            as_subflow=is_child,
        )
    except PrefectHTTPStatusError as exc:
        if exc.response.status_code not in _REFUSED:
            raise _unanswered(exc) from exc
        raise ConfigError(
            f"the parameters of {flow}/{NAME} must fit its form, got: {_refusal(exc)}; correct them"
        ) from exc
    except ObjectNotFound as exc:
        raise ServiceUnavailable(
            f"Prefect must know the deployment {flow}/{NAME}, and does not; start `diloco up`"
        ) from exc
    except _VENDOR_ERRORS as exc:
        raise ServiceUnavailable(
            f"Prefect must start a run of {flow}/{NAME}, got: {_first_line(exc)}; "
            "is `diloco up` running, with this PREFECT_API_URL?"
        ) from exc
    assert not asyncio.iscoroutine(run)
    return str(run.id)


@dataclass(frozen=True, slots=True)
class RunState:
    """A flow run's state: its type, such as "RUNNING" or "CRASHED", and what Prefect says about it."""

    kind: str = "PENDING"
    message: str = ""

    @property
    def is_over(self) -> bool:
        """Whether the flow run has ended."""
        return self.kind not in {kind.value for kind in _UNFINISHED}

    @property
    def has_lost_store(self) -> bool:
        """Whether it gave up because the store had not answered for as long as it is waited for."""
        return self.kind == "FAILED" and StoreLost.__name__ in self.message

    @property
    def is_silent(self) -> bool:
        """Whether it only counts as dead because its heartbeats did not arrive: after an outage it may well live."""
        return self.kind == "CRASHED" and self.message.startswith(automations.SILENT)


@dataclass(frozen=True, slots=True)
class FlowRun:
    """A flow run, of which flow and with what."""

    id: str
    flow: str
    name: str
    parameters: Mapping[str, Any]
    tags: tuple[str, ...]
    state: RunState


def state_of(flow_run: str) -> RunState:
    """Return the state of a flow run.

    Raises:
        ServiceUnavailable: Prefect did not answer.
    """
    with _client() as client:
        try:
            return _state(client.read_flow_run(UUID(flow_run)))
        except ObjectNotFound:
            return RunState("DELETED", "its flow run was deleted")
        except _VENDOR_ERRORS as exc:
            raise _unanswered(exc) from exc


def living_run(flow: str, tags: Sequence[str]) -> str | None:
    """Return the newest flow run of a flow with all these tags that works or will, None if there is none.

    Raises:
        ServiceUnavailable: Prefect did not answer.
    """
    found = _read(flow, tags, _LIVING)
    ordered = sorted(found, key=lambda run: str(run.created))
    return str(ordered[-1].id) if ordered else None


def newest_run(flow: str, tags: Sequence[str]) -> tuple[str, RunState] | None:
    """Return the newest flow run of a flow with all these tags and its state, None if there never was one.

    Raises:
        ServiceUnavailable: Prefect did not answer.
    """
    ordered = sorted(_read(flow, tags, None), key=lambda run: str(run.created))
    return (str(ordered[-1].id), _state(ordered[-1])) if ordered else None


def unfinished_runs() -> list[FlowRun]:
    """Return the flow runs of ours that Prefect believes to be at work, or about to be.

    Raises:
        ServiceUnavailable: Prefect did not answer.
    """
    kinds = (StateType.PENDING, StateType.RUNNING, StateType.CANCELLING)
    return [_flow_run(run) for run in _read(None, [automations.TAG], kinds)]


def crashed_runs(flow: str | None = None) -> list[FlowRun]:
    """Return the newest flow runs of ours, or of one flow, that have crashed.

    Raises:
        ServiceUnavailable: Prefect did not answer.
    """
    return [_flow_run(run) for run in _read(flow, [automations.TAG], (StateType.CRASHED,))]


def set_state(flow_run: str, state: RunState) -> None:
    """Tell Prefect what has become of a flow run, whatever it believed.

    Raises:
        ServiceUnavailable: Prefect did not answer.
    """
    told = State[Any](type=StateType(state.kind), message=state.message)
    with _client() as client:
        try:
            client.set_flow_run_state(UUID(flow_run), told, force=True)
        except _VENDOR_ERRORS as exc:
            raise _unanswered(exc) from exc


def _read(
    flow: str | None, tags: Sequence[str], kinds: Sequence[StateType] | None
) -> list[objects.FlowRun]:
    """Return flow runs by flow, tags and kinds of state, the newest first."""
    of_kind = FlowRunFilterState(type=FlowRunFilterStateType(any_=[*kinds])) if kinds else None
    with _client() as client:
        try:
            return client.read_flow_runs(
                flow_filter=FlowFilter(name=FlowFilterName(any_=[flow])) if flow else None,
                flow_run_filter=FlowRunFilter(tags=FlowRunFilterTags(all_=[*tags]), state=of_kind),
                sort=FlowRunSort.EXPECTED_START_TIME_DESC,
                limit=_MOST_READ,
            )
        except _VENDOR_ERRORS as exc:
            raise _unanswered(exc) from exc


def _flow_run(run: objects.FlowRun) -> FlowRun:
    return FlowRun(
        str(run.id), _flow_name(run.flow_id), run.name, run.parameters, tuple(run.tags), _state(run)
    )


def _state(run: objects.FlowRun) -> RunState:
    state = run.state
    return RunState() if state is None else RunState(str(state.type.value), state.message or "")


@cache
def _flow_name(flow: UUID) -> str:
    with _client() as client:
        try:
            return str(client.read_flow(flow).name)
        except _VENDOR_ERRORS as exc:
            raise _unanswered(exc) from exc


def failures(tags: Sequence[str]) -> list[float]:
    """Return when task runs failed in flow runs with all these tags: seconds since 1970, in order.

    Raises:
        ServiceUnavailable: Prefect did not answer.
    """
    with _client() as client:
        try:
            found = client.read_task_runs(
                flow_run_filter=FlowRunFilter(tags=FlowRunFilterTags(all_=[*tags])),
                task_run_filter=TaskRunFilter(
                    state=TaskRunFilterState(type=TaskRunFilterStateType(any_=[*_FAILED]))
                ),
            )
        except _VENDOR_ERRORS as exc:
            raise _unanswered(exc) from exc
    return sorted(run.state.timestamp.timestamp() for run in found if run.state is not None)


def are_served() -> bool:
    """Say whether Prefect answers and knows every deployment."""
    with _client() as client:
        try:
            found = client.read_deployments(
                deployment_filter=DeploymentFilter(name=DeploymentFilterName(any_=[NAME]))
            )
            flows = {client.read_flow(deployment.flow_id).name for deployment in found}
        except _VENDOR_ERRORS:
            return False
    return flows >= set(FLOWS)


def rename(flow_run: str, name: str) -> None:
    """Give a flow run another name.

    Raises:
        ServiceUnavailable: Prefect did not answer.
    """
    with _client() as client:
        try:
            client.update_flow_run(UUID(flow_run), name=name)
        except _VENDOR_ERRORS as exc:
            raise _unanswered(exc) from exc


def _client() -> SyncPrefectClient:
    return get_client(sync_client=True)


def _unanswered(exc: Exception) -> ServiceUnavailable:
    return ServiceUnavailable(
        f"Prefect must answer, got: {_first_line(exc)}; is it running, and PREFECT_API_URL right?"
    )


def _first_line(exc: Exception) -> str:
    return (str(exc) or type(exc).__name__).partition("\n")[0]


def _refusal(exc: PrefectHTTPStatusError) -> str:
    """Return what a refusal of Prefect's says, without its address and web links."""
    try:
        detail = exc.response.json().get("detail")
    except ValueError:
        detail = None
    return str(detail or _first_line(exc)).removeprefix("Error creating flow run: ")
