"""What every test shares: one thread for torch, and no test file that needs a large library which is not there.

The store, the codecs, the quorum and the merge need none of those: their tests run without.
"""

from __future__ import annotations

import ast
import importlib.util
import random
import textwrap
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("flows", "tasks", "infra", "islands", "tests")
LARGE = ("torch", "prefect", "distributed", "mlflow", "matplotlib")
ABSENT = frozenset(name for name in LARGE if importlib.util.find_spec(name) is None)

if "torch" not in ABSENT:
    import torch

    torch.set_num_threads(1)


def _is_for_types_only(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")


def _nodes(tree: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(tree):
        if not _is_for_types_only(child):
            yield child
            yield from _nodes(child)


def _names(tree: ast.AST) -> Iterator[str]:
    """Yield every module the source imports, at any depth, or runs by `-m` in a subprocess."""
    for node in _nodes(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.List | ast.Tuple):
            texts = [item.value if isinstance(item, ast.Constant) else None for item in node.elts]
            yield from (
                module
                for flag, module in pairwise(texts)
                if flag == "-m" and isinstance(module, str)
            )


def reaches(path: Path, libraries: frozenset[str], seen: set[Path] | None = None) -> bool:
    """Say whether the file, or a module of ours that it imports, imports one of these; lazily counts too."""
    seen = set() if seen is None else seen
    if path in seen or not path.is_file():
        return False
    seen.add(path)
    for name in _names(ast.parse(path.read_text(encoding="utf-8"))):
        parts = name.split(".")
        if parts[0] in libraries or (name == "safetensors.torch" and "torch" in libraries):
            return True
        if parts[0] in PACKAGES:
            target = ROOT.joinpath(*parts)
            if reaches(target.with_suffix(".py"), libraries, seen):
                return True
    return False


collect_ignore = [
    path.relative_to(Path(__file__).parent).as_posix()
    for path in sorted(Path(__file__).parent.rglob("test_*.py"))
    if ABSENT and reaches(path, ABSENT)
]


# --- the matrix of faults: a seeded sample of it, and its table ---

_CHAOS_ROWS = pytest.StashKey[list[tuple[str, str, str, str, str]]]()
_WIDTHS = (30, 12, 52, 8, 42)


@pytest.fixture
def chaos_rows(request: pytest.FixtureRequest) -> list[tuple[str, str, str, str, str]]:
    """Take rows of the table: fault, moment, what happened, seconds, ledger."""
    return request.config.stash[_CHAOS_ROWS]


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("chaos")
    group.addoption("--chaos-sample", type=int, metavar="N", help="N cases of the matrix only")
    group.addoption(
        "--chaos-seed", type=int, metavar="S", help="which; another each time if absent"
    )


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_CHAOS_ROWS] = []
    if config.getoption("--chaos-seed") is None:
        config.option.chaos_seed = random.SystemRandom().randrange(10_000)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    size = config.getoption("--chaos-sample")
    cases = [item for item in items if item.get_closest_marker("chaos")]
    if size is None or size >= len(cases):
        return
    chosen = set(random.Random(config.getoption("--chaos-seed")).sample(cases, size))
    left = [item for item in cases if item not in chosen]
    config.hook.pytest_deselected(items=left)
    items[:] = [item for item in items if item not in set(left)]


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    rows = config.stash[_CHAOS_ROWS]
    if not rows:
        return
    terminalreporter.section("faults")
    heads = ("fault", "moment", "what happened", "s to", "ledger")
    for row in (heads, ("", "", "", "recover", ""), *rows):
        columns = [
            textwrap.wrap(cell, width) or [""] for cell, width in zip(row, _WIDTHS, strict=True)
        ]
        for n in range(max(map(len, columns))):
            cells = [lines[n] if n < len(lines) else "" for lines in columns]
            padded = (cell.ljust(width) for cell, width in zip(cells, _WIDTHS, strict=True))
            terminalreporter.line("  ".join(padded).rstrip())
    if (size := config.getoption("--chaos-sample")) is not None:
        seed = config.getoption("--chaos-seed")
        terminalreporter.line(
            f"{size} cases by seed {seed}; again: pytest -m chaos --chaos-sample {size} --chaos-seed {seed}"
        )
