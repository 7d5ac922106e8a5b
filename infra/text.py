"""Reads text from the disk: a folder of text files, or the prose inside the running Python.

This module knows files, gzip and encodings, and returns whole documents as bytes. It must not know
shards, windows, islands or what the text is for.
"""

from __future__ import annotations

import ast
import gzip
import importlib
import inspect
import sysconfig
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from islands.types import ConfigError

STDLIB = "stdlib"
SUFFIXES = (".txt", ".txt.gz")
# Tests are not prose, site-packages is not the standard library, and `encodings` is one docstring
# repeated over a hundred generated tables. `pydoc_data` is read through its own dictionary.
SKIPPED_FOLDERS = frozenset(
    {
        "test",
        "tests",
        "idle_test",
        "site-packages",
        "dist-packages",
        "lib-dynload",
        "encodings",
        "pydoc_data",
        "__pycache__",
    }
)
# The only statements a definition can hide in, besides the body of another definition.
BLOCK_FIELDS = ("body", "orelse", "handlers", "finalbody", "cases")


@dataclass(frozen=True, slots=True)
class Document:
    """One text: its name within the source, with `/` between folders, and its UTF-8 bytes."""

    name: str
    text: bytes


@dataclass(frozen=True, slots=True)
class Corpus:
    """What a source holds, in the order of the names.

    `dropped` names what was looked at and held no text; `source` says in words what was read.
    """

    documents: tuple[Document, ...]
    dropped: tuple[str, ...]
    source: str

    @property
    def num_bytes(self) -> int:
        return sum(len(document.text) for document in self.documents)


def load_documents(source: str) -> Corpus:
    """Return every document of `source`, read now from the disk.

    Args:
        source: "stdlib" for the docstrings, help topics and licence of the running Python (about
            2 MB, and other bytes on another Python version), or the path of a folder whose .txt
            and .txt.gz files are read, subfolders included.

    Raises:
        ConfigError: the folder is missing, cannot be read or holds no text; a file is not UTF-8
            or not gzip.
    """
    if source == STDLIB:
        return _load_stdlib(Path(sysconfig.get_paths()["stdlib"]))
    return _load_folder(Path(source).expanduser())


def _load_folder(folder: Path) -> Corpus:
    if not folder.is_dir():
        raise ConfigError(
            f'a text source must be "{STDLIB}" or an existing folder, got {str(folder)!r}: '
            "create the folder or correct the path"
        )
    paths = [path for path in folder.rglob("*") if path.name.endswith(SUFFIXES) and path.is_file()]
    texts = {path.relative_to(folder).as_posix(): _read_text(path) for path in paths}
    return _corpus(texts, f"folder {folder}")


def _read_text(path: Path) -> bytes:
    try:
        raw = path.read_bytes()
        text = gzip.decompress(raw) if path.suffix == ".gz" else raw
    except (OSError, EOFError, zlib.error) as exc:
        raise ConfigError(
            f"a text file must be readable, {str(path)!r} is not ({exc}): repair or remove it"
        ) from exc
    try:
        text.decode("utf-8")
    except UnicodeDecodeError as exc:
        raise ConfigError(
            f"a text file must be UTF-8, {str(path)!r} has byte 0x{text[exc.start]:02x} at offset "
            f"{exc.start}: convert it (iconv -f latin1 -t utf-8) or remove it"
        ) from exc
    return text


def _load_stdlib(root: Path) -> Corpus:
    texts = {
        path.relative_to(root).as_posix(): module_prose(path.read_bytes())
        for path in _module_paths(root)
    }
    texts |= {f"topics/{name}": text.encode() for name, text in _help_topics().items()}
    licence = root / "LICENSE.txt"
    if licence.is_file():
        texts[licence.name] = _read_text(licence)
    return _corpus(texts, f"Python standard library at {root}")


def _module_paths(root: Path) -> Iterator[Path]:
    for path in root.iterdir():
        if path.suffix == ".py":
            yield path
        elif path.name not in SKIPPED_FOLDERS and not path.is_symlink() and path.is_dir():
            yield from _module_paths(path)


def module_prose(source: bytes) -> bytes:
    """Return the docstrings of a Python module's source, an empty line between two of them."""
    if b'"""' not in source and b"'''" not in source:
        return b""  # parsing is the slow part, and one-line strings are no prose
    docstrings = _docstrings(ast.parse(source))
    return "\n\n".join(docstrings).encode("utf-8", "replace")


def _docstrings(node: ast.AST) -> Iterator[str]:
    """Yield docstrings in source order; `ast.walk` would visit every expression, for seconds."""
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        text = ast.get_docstring(node, clean=False)
        if text:
            yield inspect.cleandoc(text)
    for field in BLOCK_FIELDS:
        block: Sequence[ast.AST] = getattr(node, field, ())
        if isinstance(block, list):  # a lambda's or conditional expression's body is a single node
            for child in block:
                yield from _docstrings(child)


def _help_topics() -> dict[str, str]:
    """Return the text behind `help("TOPIC")`; slim builds of Python leave it out."""
    try:
        module = importlib.import_module("pydoc_data.topics")
    except ModuleNotFoundError:
        return {}
    topics: dict[str, str] = module.topics
    return topics


def _corpus(texts: dict[str, bytes], source: str) -> Corpus:
    documents = tuple(Document(name, texts[name]) for name in sorted(texts) if texts[name].strip())
    if not documents:
        raise ConfigError(
            f"a text source must hold some text, {source} has none in {len(texts)} files: "
            f"put {' or '.join(SUFFIXES)} files there"
        )
    dropped = tuple(name for name in sorted(texts) if not texts[name].strip())
    return Corpus(documents, dropped, source)
