"""Claims about reading text from the disk."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from infra.text import Corpus, Document, load_documents, module_prose
from islands.types import ConfigError


def test_a_folder_is_read_recursively_in_the_order_of_names(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "b.txt").write_bytes(b"second")
    (tmp_path / "z.txt").write_bytes("dritt\u00e9".encode())
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b"first"))
    (tmp_path / "notes.md").write_bytes(b"not read")
    (tmp_path / "table.gz").write_bytes(b"not read either")
    corpus = load_documents(str(tmp_path))
    assert corpus.documents == (
        Document("a.txt.gz", b"first"),
        Document("sub/b.txt", b"second"),
        Document("z.txt", "dritt\u00e9".encode()),
    )
    assert corpus.num_bytes == 5 + 6 + 7
    assert str(tmp_path) in corpus.source


def test_files_without_text_are_named_as_dropped(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_bytes(b"")
    (tmp_path / "blank.txt").write_bytes(b" \n\n")
    (tmp_path / "full.txt").write_bytes(b"text")
    corpus = load_documents(str(tmp_path))
    assert [document.name for document in corpus.documents] == ["full.txt"]
    assert corpus.dropped == ("blank.txt", "empty.txt")


def test_a_file_that_is_not_utf8_is_refused_by_name_and_offset(tmp_path: Path) -> None:
    (tmp_path / "good.txt").write_bytes(b"text")
    (tmp_path / "latin.txt").write_bytes("caf\u00e9".encode("latin-1"))
    with pytest.raises(ConfigError, match=r"UTF-8, .*latin\.txt' has byte 0xe9 at offset 3: conv"):
        load_documents(str(tmp_path))


def test_a_packed_file_that_is_not_utf8_is_refused_too(tmp_path: Path) -> None:
    (tmp_path / "latin.txt.gz").write_bytes(gzip.compress(b"\xff"))
    with pytest.raises(ConfigError, match=r"latin\.txt\.gz' has byte 0xff at offset 0"):
        load_documents(str(tmp_path))


@pytest.mark.parametrize("damage", ["cut", "not gzip", "flipped"])
def test_a_damaged_gzip_file_is_refused_by_name(tmp_path: Path, damage: str) -> None:
    whole = gzip.compress(b"text " * 100)
    damaged = {"cut": whole[:-9], "not gzip": b"text", "flipped": whole[:10] + b"\xff" * 20}
    (tmp_path / "a.txt.gz").write_bytes(damaged[damage])
    with pytest.raises(ConfigError, match=r"must be readable, .*a\.txt\.gz"):
        load_documents(str(tmp_path))


def test_a_missing_folder_is_refused_with_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"existing folder, got .*nowhere': create the folder"):
        load_documents(str(tmp_path / "nowhere"))


def test_a_folder_without_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"has none in 1 files: put \.txt or \.txt\.gz files"):
        load_documents(str(tmp_path))


@pytest.fixture(scope="module")
def stdlib() -> Corpus:
    return load_documents("stdlib")


def test_the_standard_library_holds_over_one_and_a_half_megabytes(stdlib: Corpus) -> None:
    assert stdlib.num_bytes > 1_500_000
    names = [document.name for document in stdlib.documents]
    assert names == sorted(names)
    assert {"argparse.py", "asyncio/events.py", "topics/while"} <= set(names)


def test_the_standard_library_reads_the_same_each_time(stdlib: Corpus) -> None:
    assert load_documents("stdlib") == stdlib


def test_the_standard_library_prose_has_no_tests_and_no_packages(stdlib: Corpus) -> None:
    for document in stdlib.documents:
        folders = set(document.name.split("/")[:-1])
        assert not folders & {"test", "tests", "idle_test", "site-packages", "encodings"}
        assert document.text.decode("utf-8").strip()


def test_docstrings_are_found_at_every_depth_and_no_other_strings() -> None:
    source = b'''"""Module."""
if True:
    class A:
        """Class A.

            Indented more.
        Rest.
        """
        async def method(self):
            """Method."""
            x = """not a docstring"""
            f = lambda: """nor this"""
else:
    try:
        pass
    except ValueError:
        def g():
            """Function g."""
'''
    assert module_prose(source) == (
        b"Module.\n\nClass A.\n\n    Indented more.\nRest.\n\nMethod.\n\nFunction g."
    )
