"""The rules about imports and shape that no single test of a module can hold.

Each rule is a function from {path: source} to a list of problems. Two tests go with it: the project has none, and a
source that breaks the rule has some.
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("flows", "tasks", "infra", "islands")
Sources = Mapping[str, str]
Checker = Callable[[Sources], list[str]]

MAY_IMPORT = {
    "flows": ("flows", "tasks", "islands.config", "islands.sections", "islands.types", "infra"),
    "tasks": ("tasks", "infra", "islands"),
    "infra": ("infra", "islands.types"),
    "islands": ("islands",),
}
# What opens a cluster or starts a service; the composition root also reads settings and opens stores.
INFRA_FOR_FLOWS = ("infra.clusters", "infra.deployments", "infra.services")
INFRA_FOR_THE_ROOT = (*INFRA_FOR_FLOWS, "infra.settings", "infra.store", "infra.tracking")
TORCH_FILES = tuple(
    f"islands/{name}.py" for name in ("model", "data", "optimizers", "learner", "scoring")
)
VENDORS_OF_ISLANDS = {
    "numpy": ("islands/*.py", "islands/simulation/*.py"),
    "pydantic": ("islands/config.py", "islands/sections.py"),
    "tomli_w": ("islands/config.py",),
    "torch": TORCH_FILES,
}
VENDOR_FILES = {
    "cyclopts": ("flows/cli*.py",),
    "google_crc32c": ("infra/arrays.py",),
    "numcodecs": ("infra/arrays.py",),
    "obstore": ("infra/store.py",),
    "zarr": ("infra/arrays.py",),
}
ONE_FILE_VENDORS = ("dask", "distributed", "mlflow", "safetensors")
HEAVY_VENDORS = ("dask", "distributed", "mlflow", "torch")
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


def imports_of(path: str, source: str) -> Iterator[Import]:
    """Yield what the file imports; `from a import b` counts as `a.b`, a relative import as the full one."""
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
            INFRA_FOR_THE_ROOT if matches(found.path, ("flows/cli*.py",)) else INFRA_FOR_FLOWS
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
        str(found)
        for found in all_imports(sources)
        if package_of(found.path) == "flows" and found.top in HEAVY_VENDORS and found.is_at_top
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
    (heavy_imports_at_the_top_of_a_flow, {"flows/train.py": "import torch"}),
    (vendors_outside_their_file, {"tasks/merging.py": "from obstore.store import LocalStore"}),
    (vendors_outside_their_file, {"infra/store.py": "import google_crc32c"}),
    (vendors_outside_their_file, {"infra/store.py": "import zarr"}),
    (vendors_outside_their_file, {"flows/train.py": "import cyclopts"}),
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
    (heavy_imports_at_the_top_of_a_flow, {"flows/train.py": "def f():\n    import torch"}),
    (readers_of_the_environment, {"infra/settings.py": "import os\nvalues = dict(os.environ)"}),
    (
        handlers_that_catch_everything,
        {"tasks/x.py": "try:\n    f()\nexcept BaseException:\n    g()\n    raise"},
    ),
    (modules_that_are_too_long, {"tasks/long.py": "x = 1\n" * 400}),
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


def import_problems(module: str, *, folder: Path, max_seconds: float) -> list[str]:
    """Import the module in five fresh processes; say if torch came along or the best was too slow.

    Processor time: on a shared machine the clock on the wall measures the neighbours.
    """
    runs = []
    for _ in range(5):
        command = [sys.executable, "-c", MEASURE.format(module=module)]
        done = subprocess.run(
            command, cwd=folder, check=True, capture_output=True, text=True, timeout=60
        )
        runs.append(json.loads(done.stdout))
    seconds = min(run[0] for run in runs)
    problems = [f"importing {module} loads torch"] if "torch" in runs[0][1] else []
    if seconds >= max_seconds:
        problems.append(f"importing {module} takes {seconds:.2f} s")
    return problems


def test_the_synchronizers_path_imports_without_torch_and_fast() -> None:
    assert import_problems("tasks.merging", folder=ROOT, max_seconds=LONGEST_IMPORT_SECONDS) == []


def test_an_import_that_loads_torch_or_is_slow_is_found(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("sum(range(10_000_000))\n")
    (tmp_path / "heavy.py").write_text("import torch\n")
    problems = import_problems("heavy", folder=tmp_path, max_seconds=0.1)
    assert problems[0] == "importing heavy loads torch"
    assert len(problems) == 2


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
