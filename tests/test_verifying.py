"""`verify` finds any changed byte and any missing object, and names it; a replay makes every version again."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from islands.types import ConfigError
from islands.versions import Commit
from tasks import verifying
from tasks.collecting import find_heads
from tasks.replaying import replay_into
from tasks.runs import Run, open_run
from tasks.verifying import verify
from tests import runs

FAULT = 'local.faults=[{island="north", step=7, return_after_steps=6}]'
SMALL = ("total_tokens=1_400", "sync.num_fragments=2", "local.checkpoint_steps=7", FAULT)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A small finished run with a death and a return, in memory."""
    folder = tmp_path_factory.mktemp("verify")
    return runs.train(runs.tiny_config(folder, *SMALL, store="memory://verify-bounded"))


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The same, with everything kept."""
    folder = tmp_path_factory.mktemp("replay")
    return runs.train(
        runs.tiny_config(folder, *SMALL, 'retention="all"', store="memory://verify-all")
    )


def problems(run: Run) -> set[str]:
    """Return the names of objects `verify` complains about."""
    return {problem.name for problem in verify(run.store_url, run.run_id).problems}


def test_a_version_published_while_it_reads_is_no_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = (*SMALL, "total_tokens=4_000", "local.checkpoint_steps=10_000")
    config = runs.tiny_config(tmp_path, *settings, store="memory://verify-live")
    driver = runs.start(config)

    def num_versions() -> int:
        return sum(head.version for head in find_heads(driver.run))

    def find_heads_of_a_moment_ago(run: Run) -> list[Commit]:
        heads, known = find_heads(run), num_versions()
        while num_versions() == known:
            assert driver.advance()
        return heads

    while num_versions() < 6:
        assert driver.advance()
    monkeypatch.setattr(verifying, "find_heads", find_heads_of_a_moment_ago)
    assert verify(driver.run.store_url, driver.run.run_id).problems == []


def replace(run: Run, name: str, data: bytes | None) -> None:
    """Put other bytes in an object's place, or nothing."""
    run.store.delete(name)
    if data is not None:
        run.store.create(name, data)


def places(length: int) -> Iterator[int]:
    """Yield every byte of a short object; of a long one its ends and some between."""
    step = max(1, length // 12)
    yield from sorted({*range(0, length, step), length - 1})


@pytest.mark.parametrize("which", ["finished", "kept"])
def test_a_sound_run_has_no_problems(which: str, request: pytest.FixtureRequest) -> None:
    run: Run = request.getfixturevalue(which)
    found = verify(run.store_url, run.run_id)
    assert found.problems == []
    assert [row.imbalance for row in found.rows] == [0, 0, 0]
    assert found.num_versions > 6


def test_each_object_that_is_deleted_is_named(finished: Run) -> None:
    everything = runs.objects(finished)
    assert len(everything) > 60
    for name, data in everything.items():
        replace(finished, name, None)
        assert name in problems(finished), name
        replace(finished, name, data)
    assert problems(finished) == set()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_each_object_with_a_changed_byte_is_named(finished: Run) -> None:
    for name, data in runs.objects(finished).items():
        for place in places(len(data)):
            changed = bytearray(data)
            changed[place] ^= 0x10
            replace(finished, name, bytes(changed))
            assert name in problems(finished), (name, place)
        replace(finished, name, data)
    assert problems(finished) == set()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_each_object_that_is_cut_or_grown_is_named(finished: Run) -> None:
    for name, data in runs.objects(finished).items():
        for other in (b"", data[:-1], data + b"\0"):
            replace(finished, name, other)
            assert name in problems(finished), name
        replace(finished, name, data)


def test_an_object_that_belongs_to_nothing_is_named(finished: Run) -> None:
    for name in ("stray.json", "notes/x.json", "payloads/stray"):
        finished.store.create(name, b"{}")
        assert name in problems(finished)
        finished.store.delete(name)


def test_nothing_under_a_name_is_a_wrong_question(finished: Run) -> None:
    with pytest.raises(ConfigError, match="must exist"):
        verify(finished.store_url, "another")


def test_a_replay_makes_every_version_again(kept: Run) -> None:
    found = verify(kept.store_url, kept.run_id)
    done: list[int] = []
    replay_into(open_run(kept.store_url, kept.run_id), found, watch=done.append)
    assert found.problems == []
    assert done == list(range(1, found.num_versions + 1))


def test_a_replay_needs_everything_kept(finished: Run) -> None:
    with pytest.raises(ConfigError, match="retention"):
        replay_into(finished, verify(finished.store_url, finished.run_id), watch=lambda done: None)


def test_a_replay_finds_a_version_that_does_not_follow(kept: Run) -> None:
    """An outer step with another learning rate than the commit says, seals and checksums all in order."""
    from dataclasses import replace as changed

    from islands import names
    from tasks import records

    head, _ = records.find_head(kept.store, 0)
    name = names.version(0, head.version)
    original = kept.store.read(name)
    kept.store.delete(name)
    records.write(
        kept.store, name, changed(head, learning_rate=head.learning_rate * 1.01).to_json()
    )
    found = verify(kept.store_url, kept.run_id)
    replay_into(kept, found, watch=lambda done: None)
    replace(kept, name, original)
    assert any(
        problem.name == name and "do not follow" in problem.text for problem in found.problems
    )


def test_a_replay_finds_a_cosine_that_is_another(kept: Run) -> None:
    from dataclasses import replace as changed

    from islands import names
    from tasks import records

    head, _ = records.find_head(kept.store, 0)
    shared, _ = next(
        found
        for version in range(head.version, 0, -1)
        if len((found := records.require_commit(kept.store, 0, version))[0].consumed) > 1
    )
    assert all(entry.cosine is not None for entry in shared.consumed)
    name = names.version(0, shared.version)
    original = kept.store.read(name)
    kept.store.delete(name)
    first, *rest = shared.consumed
    records.write(
        kept.store,
        name,
        changed(shared, consumed=(changed(first, cosine=0.125), *rest)).to_json(),
    )
    found = verify(kept.store_url, kept.run_id)
    replay_into(kept, found, watch=lambda done: None)
    replace(kept, name, original)
    assert any(p.name == name and "cosine is 0.125" in p.text for p in found.problems)
