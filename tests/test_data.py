"""Claims about splitting documents and about the windows of a batch."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from islands.bigram import bigram_bits_per_byte
from islands.data import (
    SEPARATOR,
    Split,
    batch_at,
    digest,
    num_windows,
    require_enough,
    split_documents,
)
from islands.types import ConfigError

CONTEXT = 8


def numbered_documents(num_documents: int, num_lines: int) -> dict[str, bytes]:
    """Return documents of which no two lines are equal; a line has 12 bytes with its end."""
    return {
        f"doc{d}": b"".join(b"d%04d l%04d\n" % (d, line) for line in range(num_lines))
        for d in range(num_documents)
    }


def split(documents: Mapping[str, bytes], num_shards: int, fraction: float = 0.1) -> Split:
    names = [f"island{i}" for i in range(num_shards)]
    return split_documents(documents, shards=names, weights=None, held_out_fraction=fraction)


def text_lines(array: np.ndarray) -> list[bytes]:
    return [line for line in array.tobytes().split(b"\n") if line]


def counting_tokens(num_bytes: int) -> np.ndarray:
    """Return bytes 0, 1, 2, ...: with at most 256 of them a byte's value is its place."""
    return np.arange(num_bytes, dtype=np.uint8)


# --- split_documents


def test_the_parts_are_disjoint_and_hold_every_line_once() -> None:
    documents = numbered_documents(40, 50)
    parts = split(documents, 4)
    found = text_lines(parts.held_out)
    for shard in parts.shards.values():
        found += text_lines(shard)
    assert len(found) == len(set(found)) == 40 * 50
    assert set(found) == {line for text in documents.values() for line in text.splitlines()}


def test_held_out_documents_are_whole_and_fill_their_fraction() -> None:
    parts = split(numbered_documents(40, 50), 4)
    # 40 equal documents: 10 % of the bytes are exactly 4 documents of 50 lines.
    assert parts.num_held_out_documents == 4
    assert len(text_lines(parts.held_out)) == 4 * 50
    assert len({line[:5] for line in text_lines(parts.held_out)}) == 4
    # 4 * 50 lines of 12 bytes, and 3 separators of 2.
    assert len(parts.held_out) == 4 * 50 * 12 + 3 * len(SEPARATOR)


def test_documents_that_need_no_cut_go_whole_to_one_shard() -> None:
    # 36 documents are left to 4 shards, 9 each.
    assert list(split(numbered_documents(40, 50), 4).num_documents.values()) == [9, 9, 9, 9]


def test_five_shards_of_seven_documents_are_balanced_to_two_percent_and_a_line() -> None:
    parts = split(numbered_documents(7, 1000), 5)
    # One document of 1000 lines is held out: 10 % of 7 is not even one. 6000 lines for 5 shards.
    assert parts.num_held_out_documents == 1
    for shard in parts.shards.values():
        assert abs(len(text_lines(shard)) - 1200) <= 0.02 * 1200 + 1
    assert sum(len(text_lines(shard)) for shard in parts.shards.values()) == 6000


def test_weights_are_shares_of_the_bytes() -> None:
    parts = split_documents(
        numbered_documents(30, 100), shards=["a", "b"], weights=[2, 1], held_out_fraction=0
    )
    assert len(text_lines(parts.shards["a"])) == pytest.approx(2000, rel=0.02)
    assert len(text_lines(parts.shards["b"])) == pytest.approx(1000, rel=0.02)
    assert len(parts.held_out) == 0


def test_a_text_of_one_endless_line_is_cut_between_words() -> None:
    text = b" ".join(b"w%05d" % i for i in range(3000))
    parts = split({"one": text}, 3, fraction=0)
    words = [word for shard in parts.shards.values() for word in shard.tobytes().split()]
    assert sorted(words) == text.split()
    sizes = [len(shard) for shard in parts.shards.values()]
    assert max(sizes) - min(sizes) <= 0.02 * len(text) / 3


def test_a_text_without_spaces_is_cut_between_characters() -> None:
    parts = split({"one": "\u6c34".encode() * 1000}, 7, fraction=0)
    found = "".join(shard.tobytes().decode() for shard in parts.shards.values())
    assert found.replace("\n", "") == "\u6c34" * 1000
    assert all(len(shard) > 0 for shard in parts.shards.values())


def test_equal_content_counts_once_and_empty_documents_not_at_all() -> None:
    documents = numbered_documents(10, 20)
    more = documents | {"copy": documents["doc3"], "again": documents["doc3"], "empty": b""}
    parts = split(more, 2)
    assert parts.num_duplicates == 2
    assert parts.digests == split(documents, 2).digests


def test_the_split_depends_on_content_not_on_names_or_order() -> None:
    documents = numbered_documents(20, 30)
    renamed = {f"x{i}": text for i, text in enumerate(reversed(documents.values()))}
    first, second = split(documents, 3), split(renamed, 3)
    assert first.digests == second.digests
    assert first.held_out_digest == second.held_out_digest


def test_three_processes_with_different_hash_seeds_split_alike() -> None:
    program = (
        "from test_data import numbered_documents, split\n"
        "parts = split(numbered_documents(23, 40), 5)\n"
        "print(parts.held_out_digest, *parts.digests.values())\n"
    )
    tests = Path(__file__).parent
    printed = [
        subprocess.run(
            [sys.executable, "-c", program],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": f"{tests}{os.pathsep}{tests.parent}"},
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for seed in ("0", "1", "2")
    ]
    assert len(set(printed)) == 1
    assert len(printed[0].split()) == 6


def test_a_digest_is_the_sha256_of_the_bytes() -> None:
    parts = split(numbered_documents(9, 9), 2)
    for name, shard in parts.shards.items():
        assert parts.digests[name] == hashlib.sha256(shard.tobytes()).hexdigest()
    assert digest(np.frombuffer(b"abc", dtype=np.uint8)).startswith("ba7816bf8f01cfea")


def test_holding_out_of_a_single_document_is_refused() -> None:
    with pytest.raises(ConfigError, match="needs 2 or more different documents, got 1"):
        split({"one": b"a\nb\n", "twin": b"a\nb\n"}, 2)


@pytest.mark.parametrize(
    ("shards", "weights", "fraction", "message"),
    [
        ([], None, 0.1, "one or more different names"),
        (["a", "a"], None, 0.1, "one or more different names"),
        (["a", "b"], [1.0], 0.1, r"one per shard \(2\), got 1"),
        (["a", "b"], [1.0, 0.0], 0.1, "finite and > 0"),
        (["a", "b"], [1.0, float("nan")], 0.1, "finite and > 0"),
        (["a", "b"], None, 1.0, r"in \[0, 1\), got 1.0"),
    ],
)
def test_a_senseless_split_is_refused_with_its_rule(
    shards: list[str], weights: list[float] | None, fraction: float, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        split_documents(
            numbered_documents(5, 5), shards=shards, weights=weights, held_out_fraction=fraction
        )


def test_a_source_without_text_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least one byte"):
        split({"empty": b""}, 2)


# --- require_enough


@pytest.mark.parametrize("num_bytes", [0, CONTEXT - 1, 4 * CONTEXT])
def test_a_shard_below_one_batch_is_refused(num_bytes: int) -> None:
    with pytest.raises(ConfigError, match=rf"'iowa' .* = 33 bytes, got {num_bytes}: .*lower"):
        require_enough("iowa", num_bytes, batch_size=4, context=CONTEXT)


def test_a_shard_of_exactly_one_batch_is_enough() -> None:
    require_enough("iowa", 4 * CONTEXT + 1, batch_size=4, context=CONTEXT)


# --- batch_at


def starts_of(batch: np.ndarray) -> list[int]:
    """Return where the windows begin in `counting_tokens`, having checked that each is whole."""
    assert (np.diff(batch, axis=1) == 1).all()
    return [int(start) for start in batch[:, 0]]


def starts_at(num_bytes: int, cursor: int, batch_size: int, learner: str = "a") -> list[int]:
    batch = batch_at(
        counting_tokens(num_bytes),
        cursor=cursor,
        batch_size=batch_size,
        context=CONTEXT,
        seed=7,
        learner=learner,
    )
    assert batch.shape == (batch_size, CONTEXT + 1)
    assert batch.dtype == np.int64
    return starts_of(batch)


def test_an_epoch_visits_each_window_once() -> None:
    # 250 bytes: 31 whole windows of 8 and 2 bytes over; one window is given up to the shift.
    assert num_windows(250, context=CONTEXT) == 30
    for epoch in range(5):
        starts = sorted(starts_at(250, cursor=30 * epoch, batch_size=30))
        assert starts[0] < CONTEXT
        assert starts == [starts[0] + CONTEXT * i for i in range(30)]
        assert starts[-1] + CONTEXT < 250


def test_epochs_differ_in_order_and_shift() -> None:
    epochs = [starts_at(250, cursor=30 * epoch, batch_size=30) for epoch in range(40)]
    assert len({tuple(starts) for starts in epochs}) == 40
    assert {min(starts) for starts in epochs} == set(range(CONTEXT))


def test_learners_differ_in_order() -> None:
    assert starts_at(250, 0, 30, learner="a") != starts_at(250, 0, 30, learner="b")


def test_a_batch_may_straddle_epochs() -> None:
    first, second = starts_at(250, 0, 30), starts_at(250, 30, 30)
    assert starts_at(250, cursor=27, batch_size=8) == first[27:] + second[:5]


def test_a_batch_may_span_more_than_two_epochs() -> None:
    # 33 bytes: 4 windows, 3 of them counted; a batch of 8 ends in the third epoch.
    assert num_windows(33, context=CONTEXT) == 3
    epochs = [starts_at(33, cursor=3 * epoch, batch_size=3) for epoch in range(3)]
    assert starts_at(33, cursor=0, batch_size=8) == epochs[0] + epochs[1] + epochs[2][:2]


def test_a_batch_is_a_function_of_the_cursor_alone() -> None:
    one_by_one = [starts_at(250, cursor, 1)[0] for cursor in range(100)]
    backwards = [starts_at(250, cursor, 10) for cursor in range(90, -1, -10)]
    assert [start for batch in reversed(backwards) for start in batch] == one_by_one


def test_the_order_is_the_same_on_every_version() -> None:
    # Golden: a change here changes what resumed runs read.
    assert starts_at(80, cursor=0, batch_size=9) == [68, 60, 36, 12, 20, 52, 28, 4, 44]


def test_the_shortest_shard_has_its_one_window_every_time() -> None:
    assert num_windows(CONTEXT + 1, context=CONTEXT) == 1
    assert starts_at(CONTEXT + 1, cursor=5, batch_size=3) == [0, 0, 0]


def test_a_shard_without_a_window_is_refused() -> None:
    assert num_windows(CONTEXT, context=CONTEXT) == 0
    with pytest.raises(ConfigError, match="'a' must hold one batch"):
        starts_at(CONTEXT, cursor=0, batch_size=1)


# --- bigram_bits_per_byte


def array_of(text: bytes) -> np.ndarray:
    return np.frombuffer(text, dtype=np.uint8)


def test_the_bigram_gives_the_hand_computed_bits() -> None:
    # train "abab": N = 4, P(a) = P(b) = 2.1 / 29.6. Pairs ab, ba, ab.
    #   P(b|a) = (2 + 1 * 2.1/29.6) / (2 + 1) = 0.690315
    #   P(a|b) = (1 + 1 * 2.1/29.6) / (1 + 1) = 0.535473
    # held out "aba" scores b after a and a after b:
    #   (log2(1/0.690315) + log2(1/0.535473)) / 2 = (0.534673 + 0.901115) / 2 = 0.717894
    assert bigram_bits_per_byte(array_of(b"abab"), array_of(b"aba")) == pytest.approx(
        0.717894, abs=1e-6
    )


def test_a_context_never_seen_falls_back_to_the_unigram() -> None:
    # P(b) = 2.1 / 29.6 = 0.0709459, which is 3.817136 bits; z was never followed.
    assert bigram_bits_per_byte(array_of(b"abab"), array_of(b"zb")) == pytest.approx(
        3.817136, abs=1e-6
    )


def test_a_bigram_of_nothing_is_uniform() -> None:
    assert bigram_bits_per_byte(array_of(b""), array_of(b"any text")) == pytest.approx(8.0)


def test_a_bigram_refuses_a_text_with_nothing_to_score() -> None:
    with pytest.raises(ConfigError, match="must have >= 2 bytes, got 1"):
        bigram_bits_per_byte(array_of(b"abab"), array_of(b"a"))
