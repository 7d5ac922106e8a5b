"""A real Prefect server for the tests that need one: one per session, in a folder of its own, gone afterwards.

A test module asks for it with `pytest_plugins = ["tests.prefect_server"]`, and imports nothing from here.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from prefect.settings import PREFECT_API_URL, temporary_settings

from infra import deployments, services, settings
from infra.keeping import Started
from infra.services import Services


@pytest.fixture(scope="session")
def prefect_services(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Services]:
    """Where the session's server is; there is no MLflow."""
    server = services.prefect_server(tmp_path_factory.mktemp("home"), services.free_port(0))
    started = Started(server)
    try:
        started.wait_until_ready(print)
        yield Services(f"{server.where}/api", server.where, "")
    finally:
        started.stop(print)


@pytest.fixture(scope="session")
def deployed(prefect_services: Services) -> Services:
    """The same, with the deployments of all flows, as a serve process makes them; nobody runs what they start."""
    with temporary_settings({PREFECT_API_URL: prefect_services.prefect_api_url}):
        for flow in deployments.FLOWS:
            deployments._deployment(flow, {}, 300).apply()
    return prefect_services


@pytest.fixture
def prefect_api(deployed: Services, monkeypatch: pytest.MonkeyPatch) -> Iterator[Services]:
    """Point this process at that server for one test."""
    monkeypatch.setenv(settings.PREFECT_API_URL, deployed.prefect_api_url)
    with temporary_settings({PREFECT_API_URL: deployed.prefect_api_url}):
        yield deployed
