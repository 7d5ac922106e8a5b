"""The rules about imports and shape that no single test of a module can hold.

Each rule is a function from {path: source} to a list of problems. Two tests go with it: the project has none, and a
source that breaks the rule has some.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping
from fnmatch import fnmatch
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

NEEDS_SERVICES = pytest.mark.skipif(
    not all(importlib.util.find_spec(name) for name in ("prefect", "mlflow")),
    reason="Prefect or MLflow is not installed",
)
ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("flows", "tasks", "infra", "islands")
Sources = Mapping[str, str]
Checker = Callable[[Sources], list[str]]

MAY_IMPORT = {
    "flows": (
        "flows",
        "tasks",
        "islands.chaos",
        "islands.config",
        "islands.sections",
        "islands.types",
        "infra",
    ),
    "tasks": ("tasks", "infra", "islands"),
    "infra": ("infra", "islands.types"),
    "islands": ("islands",),
}
# How long ago something was, for people; when a benchmark ran; which litter is older than an hour.
READ_THE_WALL_CLOCK = (
    "flows/screen.py",
    "infra/disk.py",
    "tasks/benchmarks.py",
    "tasks/reporting.py",
)
# What opens a cluster or starts a service; the composition root also reads settings and opens stores.
INFRA_FOR_FLOWS = ("infra.clusters", "infra.deployments", "infra.services")
INFRA_FOR_THE_ROOT = (*INFRA_FOR_FLOWS, "infra.settings", "infra.store", "infra.tracking")
# The demo is a command too: it starts its own services where none run.
ROOT_FILES = ("flows/cli*.py", "flows/demo.py")
TORCH_FILES = tuple(
    f"islands/{name}.py"
    for name in ("model", "data", "optimizers", "learner", "gradients", "landing", "scoring")
)
VENDORS_OF_ISLANDS = {
    "numpy": ("islands/*.py", "islands/simulation/*.py"),
    "pydantic": ("islands/config.py", "islands/limits.py", "islands/sections.py"),
    "tomli_w": ("islands/config.py",),
    "torch": TORCH_FILES,
}
PREFECT_FILES = (
    "flows/*.py",
    "tasks/*.py",
    *(f"infra/{name}.py" for name in ("automations", "events", "services", "deployments")),
)
VENDOR_FILES = {
    "cyclopts": ("flows/cli*.py",),
    "dask": ("infra/clusters.py",),
    "distributed": ("infra/clusters.py",),
    "google_crc32c": ("infra/arrays.py",),
    "httpx": PREFECT_FILES,  # what Prefect's client raises
    "matplotlib": ("infra/plots.py",),
    "mlflow": ("infra/tracking.py",),
    "numcodecs": ("infra/arrays.py",),
    "obstore": ("infra/store.py",),
    "prefect": PREFECT_FILES,
    "torchft": ("tasks/peer_arm.py",),
    "zarr": ("infra/arrays.py",),
}
ONE_FILE_VENDORS = ("safetensors",)
HEAVY_VENDORS = ("dask", "distributed", "mlflow", "torch")
# What an import of the flow may load: an island opens its cluster, the local driver is a learner.
HEAVY_NEEDS = {
    "flows/island.py": ("dask", "distributed"),
    "flows/local.py": ("torch",),
}
# What runs inside a Dask worker begins here; Prefect must not come along, however deep.
WORKER_FILES = ("tasks/segments.py", "tasks/living.py")
ORCHESTRATORS = ("prefect", "httpx")
FORBIDDEN_NAMES = ("utils.py", "helpers.py", "common.py", "manager.py")
LONGEST_MODULE_LINES = 400
LONGEST_IMPORT_SECONDS = 0.5


class Import(NamedTuple):
    path: str
    line: int
    module: str
    is_at_top: bool

    @property
    def top(self) -> str:
        return self.module.split(".")[0]

    def is_of(self, names: tuple[str, ...]) -> bool:
        return any(self.module == name or self.module.startswith(f"{name}.") for name in names)

    def __str__(self) -> str:
        return f"{self.path}:{self.line} imports {self.module}"


def project_sources() -> dict[str, str]:
    return {
        path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8")
        for package in PACKAGES
        for path in sorted((ROOT / package).rglob("*.py"))
    }


@cache
def imports_of(path: str, source: str) -> tuple[Import, ...]:
    """Return what the file imports; `from a import b` counts as `a.b`, a relative import as the full one."""
    return tuple(_imports(path, source))


def _imports(path: str, source: str) -> Iterator[Import]:
    tree = ast.parse(source)
    top_level = set(ast.iter_child_nodes(tree))
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(path, node.lineno, alias.name, node in top_level)
        elif isinstance(node, ast.ImportFrom):
            base = path.split("/")[: -node.level] if node.level else []
            for alias in node.names:
                module = ".".join([*base, *filter(None, [node.module]), alias.name])
                yield Import(path, node.lineno, module, node in top_level)


def all_imports(sources: Sources) -> Iterator[Import]:
    for path, source in sources.items():
        yield from imports_of(path, source)


def package_of(path: str) -> str:
    return path.split("/")[0]


def matches(path: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch(path, pattern) for pattern in patterns)


def file_of(module: str, sources: Sources) -> str | None:
    """Return the file that an import loads, None if it is none of these; `a.b` may also be a name in `a`."""
    parts = module.split(".")
    bases = ["/".join(parts[:length]) for length in (len(parts), len(parts) - 1)]
    candidates = [f"{base}{end}" for base in bases if base for end in (".py", "/__init__.py")]
    return next((path for path in candidates if path in sources), None)


def reach(start: str, sources: Sources, *, only_at_top: bool) -> Iterator[Import]:
    """Yield every import of the file and of whatever of ours it imports, at any depth, each file once."""
    waiting, seen = [start], {start}
    while waiting:
        path = waiting.pop()
        for found in imports_of(path, sources[path]):
            if only_at_top and not found.is_at_top:
                continue
            yield found
            target = file_of(found.module, sources)
            if target is not None and target not in seen:
                seen.add(target)
                waiting.append(target)


# --- the rules ---------------------------------------------------------------------------------


def imports_that_point_upward(sources: Sources) -> list[str]:
    return [
        str(found)
        for found in all_imports(sources)
        if found.top in PACKAGES and not found.is_of(MAY_IMPORT[package_of(found.path)])
    ]


def infra_imports_beyond_a_flows_needs(sources: Sources) -> list[str]:
    return [
        str(found)
        for found in all_imports(sources)
        if package_of(found.path) == "flows"
        and found.top == "infra"
        and not found.is_of(
            INFRA_FOR_THE_ROOT if matches(found.path, ROOT_FILES) else INFRA_FOR_FLOWS
        )
    ]


def vendors_inside_islands(sources: Sources) -> list[str]:
    return [
        str(found)
        for found in all_imports(sources)
        if package_of(found.path) == "islands"
        and found.top not in sys.stdlib_module_names
        and found.top not in PACKAGES
        and not matches(found.path, VENDORS_OF_ISLANDS.get(found.top, ()))
    ]


def torch_inside_infra(sources: Sources) -> list[str]:
    return [
        str(found)
        for found in all_imports(sources)
        if package_of(found.path) == "infra" and found.top == "torch"
    ]


def heavy_imports_at_the_top_of_a_flow(sources: Sources) -> list[str]:
    return [
        f"{path}: {found}"
        for path in sources
        if package_of(path) == "flows"
        for found in reach(path, sources, only_at_top=True)
        if found.top in HEAVY_VENDORS and found.top not in HEAVY_NEEDS.get(path, ())
    ]


def orchestrators_in_reach_of_a_worker(sources: Sources) -> list[str]:
    return [
        f"{path} reaches {found}"
        for path in WORKER_FILES
        if path in sources
        for found in reach(path, sources, only_at_top=False)
        if found.top in ORCHESTRATORS
    ]


def vendors_outside_their_file(sources: Sources) -> list[str]:
    strays = [
        str(found)
        for found in all_imports(sources)
        if found.top in VENDOR_FILES and not matches(found.path, VENDOR_FILES[found.top])
    ]
    for vendor in ONE_FILE_VENDORS:
        files = sorted({found.path for found in all_imports(sources) if found.top == vendor})
        if len(files) > 1:
            strays.append(f"{vendor} is imported by {', '.join(files)}")
    return strays


def modules_that_are_too_long(sources: Sources) -> list[str]:
    counts = {path: len(source.splitlines()) for path, source in sources.items()}
    return [
        f"{path} has {count} lines"
        for path, count in counts.items()
        if count > LONGEST_MODULE_LINES
    ]


def names_that_say_nothing(sources: Sources) -> list[str]:
    return [path for path in sources if path.split("/")[-1] in FORBIDDEN_NAMES]


def readers_of_the_environment(sources: Sources) -> list[str]:
    return [
        f"{path}:{node.lineno} reads the environment"
        for path, source in sources.items()
        if path != "infra/settings.py"
        for node in ast.walk(ast.parse(source))
        if (
            isinstance(node, ast.Attribute)
            and ast.unparse(node) in ("os.environ", "os.environb", "os.getenv")
        )
        or (
            isinstance(node, ast.ImportFrom)
            and node.module == "os"
            and any(alias.name in ("environ", "environb", "getenv") for alias in node.names)
        )
    ]


def handlers_that_catch_everything(sources: Sources) -> list[str]:
    return [
        f"{path}:{node.lineno} catches everything"
        for path, source in sources.items()
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ExceptHandler) and _catches_everything(node)
    ]


def _catches_everything(handler: ast.ExceptHandler) -> bool:
    kinds = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    names = {ast.unparse(kind) if kind else "BaseException" for kind in kinds}
    # Cleaning up before any way out is no catching, as long as the last statement hands it on.
    hands_on = isinstance(handler.body[-1], ast.Raise) and handler.body[-1].exc is None
    return "Exception" in names or ("BaseException" in names and not hands_on)


def signatures_that_swallow_keywords(sources: Sources) -> list[str]:
    return [
        f"{path}:{node.lineno} takes **{node.args.kwarg.arg}"
        for path, source in sources.items()
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) and node.args.kwarg
    ]


def readers_of_the_wall_clock(sources: Sources) -> list[str]:
    """It is written down for people and read by nobody: order is by versions, waiting by the monotonic clock."""
    return [
        f"{path}:{node.lineno} reads the wall clock"
        for path, source in sources.items()
        if path not in READ_THE_WALL_CLOCK
        for node in _not_written_down(ast.parse(source))
        if ast.unparse(node) in ("time.time", "time.time_ns", "datetime.now", "datetime.utcnow")
    ]


def _not_written_down(tree: ast.AST) -> Iterator[ast.Attribute]:
    """Yield every attribute in the tree but those handed over as a stamp."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.keyword) and node.arg in ("stamp", "at"):
            continue
        if isinstance(node, ast.Attribute):
            yield node
        yield from _not_written_down(node)


# --- each rule twice: kept by the project, and able to fail --------------------------------------

VIOLATIONS: list[tuple[Checker, dict[str, str]]] = [
    (imports_that_point_upward, {"islands/quorum.py": "from infra import store"}),
    (imports_that_point_upward, {"islands/quorum.py": "def f():\n    import tasks.merging"}),
    (
        imports_that_point_upward,
        {"islands/simulation/x.py": "from ...infra.store import open_store"},
    ),
    (imports_that_point_upward, {"infra/store.py": "from islands.names import header_name"}),
    (imports_that_point_upward, {"infra/store.py": "import islands"}),
    (imports_that_point_upward, {"infra/deployments.py": "import flows.train"}),
    (imports_that_point_upward, {"tasks/merging.py": "from flows.cli import main"}),
    (imports_that_point_upward, {"flows/train.py": "from islands.quorum import decide"}),
    (infra_imports_beyond_a_flows_needs, {"flows/train.py": "from infra.store import open_store"}),
    (infra_imports_beyond_a_flows_needs, {"flows/cli.py": "from infra.arrays import read"}),
    (vendors_inside_islands, {"islands/versions.py": "import zarr"}),
    (vendors_inside_islands, {"islands/quorum.py": "from prefect import task"}),
    (vendors_inside_islands, {"islands/merging.py": "import torch.nn as nn"}),
    (vendors_inside_islands, {"islands/types.py": "from pydantic import BaseModel"}),
    (torch_inside_infra, {"infra/arrays.py": "def f():\n    import torch"}),
    (infra_imports_beyond_a_flows_needs, {"flows/train.py": "from infra import settings"}),
    (infra_imports_beyond_a_flows_needs, {"flows/demo.py": "from infra.arrays import read"}),
    (heavy_imports_at_the_top_of_a_flow, {"flows/evaluate.py": "import torch"}),
    (heavy_imports_at_the_top_of_a_flow, {"flows/train.py": "import mlflow"}),
    (heavy_imports_at_the_top_of_a_flow, {"flows/synchronize.py": "import distributed"}),
    (
        heavy_imports_at_the_top_of_a_flow,
        {
            "flows/evaluate.py": "from tasks.scoring_runs import score",
            "tasks/scoring_runs.py": "from tasks import evaluating",
            "tasks/evaluating.py": "import torch",
        },
    ),
    (orchestrators_in_reach_of_a_worker, {"tasks/segments.py": "import prefect"}),
    (orchestrators_in_reach_of_a_worker, {"tasks/living.py": "def f():\n    import httpx"}),
    (
        orchestrators_in_reach_of_a_worker,
        {
            "tasks/segments.py": "def f():\n    from tasks.sending import send",
            "tasks/sending.py": "from infra import events",
            "infra/events.py": "from prefect.events import emit_event",
        },
    ),
    (vendors_outside_their_file, {"tasks/merging.py": "from obstore.store import LocalStore"}),
    (vendors_outside_their_file, {"infra/store.py": "import google_crc32c"}),
    (vendors_outside_their_file, {"infra/store.py": "import zarr"}),
    (vendors_outside_their_file, {"flows/train.py": "import cyclopts"}),
    (vendors_outside_their_file, {"infra/store.py": "from prefect import get_client"}),
    (vendors_outside_their_file, {"infra/tracking.py": "def f():\n    import httpx"}),
    (vendors_outside_their_file, {"tasks/segments.py": "from distributed import get_worker"}),
    (vendors_outside_their_file, {"flows/island.py": "def f():\n    import dask.config"}),
    (vendors_outside_their_file, {"tasks/tracking.py": "def f():\n    import mlflow"}),
    (vendors_outside_their_file, {"flows/charts.py": "from matplotlib.figure import Figure"}),
    (vendors_outside_their_file, {"tasks/peering.py": "def f():\n    import torchft"}),
    (
        vendors_outside_their_file,
        {"tasks/a.py": "import safetensors", "tasks/b.py": "import safetensors.numpy"},
    ),
    (modules_that_are_too_long, {"tasks/long.py": "x = 1\n" * 401}),
    (names_that_say_nothing, {"islands/simulation/utils.py": ""}),
    (readers_of_the_environment, {"flows/cli.py": "import os\nhome = os.environ['HOME']"}),
    (readers_of_the_environment, {"flows/cli.py": "import os\nhome = os.getenv('HOME')"}),
    (readers_of_the_environment, {"flows/cli.py": "from os import environ"}),
    (handlers_that_catch_everything, {"tasks/x.py": "try:\n    f()\nexcept Exception:\n    pass"}),
    (
        handlers_that_catch_everything,
        {"tasks/x.py": "try:\n    f()\nexcept (ValueError, Exception):\n    raise"},
    ),
    (handlers_that_catch_everything, {"tasks/x.py": "try:\n    f()\nexcept:\n    pass"}),
    (
        handlers_that_catch_everything,
        {"tasks/x.py": "try:\n    f()\nexcept BaseException:\n    pass"},
    ),
    (signatures_that_swallow_keywords, {"tasks/x.py": "def f(**options): ..."}),
    (signatures_that_swallow_keywords, {"tasks/x.py": "async def f(*, a, **options): ..."}),
    (readers_of_the_wall_clock, {"tasks/x.py": "import time\nlate = time.time() > 9"}),
    (readers_of_the_wall_clock, {"islands/x.py": "now = datetime.now(UTC)"}),
]
KEPT: list[tuple[Checker, dict[str, str]]] = [
    (
        imports_that_point_upward,
        {"infra/store.py": "from islands.types import StoreUnavailable\nimport infra.text"},
    ),
    (
        imports_that_point_upward,
        {"flows/cli.py": "from islands import config\nfrom tasks.local import run"},
    ),
    (
        infra_imports_beyond_a_flows_needs,
        {"flows/cli.py": "from infra import store\nimport infra.settings"},
    ),
    (
        vendors_inside_islands,
        {"islands/model.py": "import torch", "islands/config.py": "import pydantic, json"},
    ),
    (
        vendors_outside_their_file,
        {"infra/store.py": "import obstore", "flows/cli_inspect.py": "import cyclopts"},
    ),
    (
        infra_imports_beyond_a_flows_needs,
        {"flows/demo.py": "from infra import services, settings"},
    ),
    (
        vendors_outside_their_file,
        {
            "tasks/watching.py": "from prefect import task",
            "infra/deployments.py": "import httpx, prefect",
            "infra/clusters.py": "import dask\nfrom distributed import Client",
            "infra/plots.py": "def f():\n    import matplotlib",
        },
    ),
    (heavy_imports_at_the_top_of_a_flow, {"flows/evaluate.py": "def f():\n    import torch"}),
    (
        heavy_imports_at_the_top_of_a_flow,
        {
            "flows/island.py": "from infra.clusters import open_cluster",
            "flows/evaluate.py": "def f():\n    from infra.clusters import open_cluster",
            "infra/clusters.py": "import distributed",
        },
    ),
    (
        orchestrators_in_reach_of_a_worker,
        {
            "tasks/watching.py": "import prefect\nfrom tasks import segments",
            "tasks/segments.py": "from infra.clusters import teller",
            "infra/clusters.py": "from distributed import get_worker",
        },
    ),
    (readers_of_the_environment, {"infra/settings.py": "import os\nvalues = dict(os.environ)"}),
    (
        handlers_that_catch_everything,
        {"tasks/x.py": "try:\n    f()\nexcept BaseException:\n    g()\n    raise"},
    ),
    (modules_that_are_too_long, {"tasks/long.py": "x = 1\n" * 400}),
    (readers_of_the_wall_clock, {"tasks/x.py": "f(stamp=time.time, at=time.time())"}),
]
CHECKERS = list(dict.fromkeys(checker for checker, _ in VIOLATIONS))


@pytest.mark.parametrize("checker", CHECKERS, ids=lambda checker: checker.__name__)
def test_the_project_keeps_the_rule_against(checker: Checker) -> None:
    assert checker(project_sources()) == []


@pytest.mark.parametrize(("checker", "sources"), VIOLATIONS)
def test_a_source_that_breaks_the_rule_is_found(checker: Checker, sources: Sources) -> None:
    assert len(checker(sources)) == 1


@pytest.mark.parametrize(("checker", "sources"), KEPT)
def test_a_source_that_keeps_the_rule_is_left_alone(checker: Checker, sources: Sources) -> None:
    assert checker(sources) == []


# --- the synchronizer's path starts light --------------------------------------------------------

MEASURE = """
import sys, time, json
started = time.process_time()
import {module}
print(json.dumps([time.process_time() - started, sorted({{name.split(".")[0] for name in sys.modules}})]))
"""
# Prefect alone takes most of it: what is measured here is that nothing of ours comes on top.
LONGEST_FLOW_IMPORT_SECONDS = 6.0


def import_problems(
    module: str, *unwanted: str, folder: Path, max_seconds: float, num_tries: int = 5
) -> list[str]:
    """Import the module in fresh processes; say which unwanted packages came along, and if the best was too slow.

    Processor time: on a shared machine the clock on the wall measures the neighbours.
    """
    runs = []
    for _ in range(num_tries):
        command = [sys.executable, "-c", MEASURE.format(module=module)]
        done = subprocess.run(
            command, cwd=folder, check=True, capture_output=True, text=True, timeout=60
        )
        runs.append(json.loads(done.stdout))
    seconds = min(run[0] for run in runs)
    problems = [f"importing {module} loads {name}" for name in unwanted if name in runs[0][1]]
    if seconds >= max_seconds:
        problems.append(f"importing {module} takes {seconds:.2f} s")
    return problems


def test_the_synchronizers_path_imports_without_torch_and_fast() -> None:
    limit = LONGEST_IMPORT_SECONDS
    assert import_problems("tasks.merging", "torch", folder=ROOT, max_seconds=limit) == []


def test_the_synchronizers_loop_imports_without_torch_dask_and_prefect() -> None:
    unwanted = ("torch", "dask", "distributed", "mlflow", "prefect")
    limit = LONGEST_IMPORT_SECONDS
    problems = import_problems(
        "tasks.synchronizing", *unwanted, folder=ROOT, max_seconds=limit, num_tries=3
    )
    assert problems == []


@NEEDS_SERVICES
def test_the_synchronizers_flow_imports_without_torch_dask_and_mlflow() -> None:
    unwanted = ("torch", "dask", "distributed", "mlflow", "matplotlib")
    limit = LONGEST_FLOW_IMPORT_SECONDS
    problems = import_problems(
        "flows.synchronize", *unwanted, folder=ROOT, max_seconds=limit, num_tries=2
    )
    assert problems == []


def test_an_import_that_loads_torch_or_is_slow_is_found(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("sum(range(50_000_000))\n")
    (tmp_path / "distributed.py").write_text("")
    (tmp_path / "heavy.py").write_text("import torch, distributed\n")
    unwanted = ("torch", "dask", "distributed")
    problems = import_problems("heavy", *unwanted, folder=tmp_path, max_seconds=0.1)
    assert problems[:2] == ["importing heavy loads torch", "importing heavy loads distributed"]
    assert len(problems) == 3


# --- every package is installed ------------------------------------------------------------------


def package_mismatches(listed: list[str], paths: list[str]) -> set[str]:
    """Return the packages that only pyproject or only the disk knows; either breaks an installation."""
    return {path.removesuffix("/__init__.py").replace("/", ".") for path in paths} ^ set(listed)


def test_pyproject_lists_exactly_the_packages_on_disk() -> None:
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    paths = [path for path in project_sources() if path.endswith("/__init__.py")]
    assert package_mismatches(listed, paths) == set()


def test_a_package_that_only_one_side_knows_is_found() -> None:
    paths = ["islands/__init__.py", "islands/x/__init__.py"]
    assert package_mismatches(["islands", "tasks"], paths) == {"islands.x", "tasks"}
