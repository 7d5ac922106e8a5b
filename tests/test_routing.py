"""A store with folders elsewhere, alone and under a whole run."""

from __future__ import annotations

from pathlib import Path

import pytest

from infra.routing import RoutedStore
from infra.store import open_store
from islands.types import ConfigError, VersionTaken
from tasks import creating
from tasks.verifying import verify
from tests import runs


def test_each_name_has_one_place() -> None:
    main, other = open_store("memory://"), open_store("memory://")
    store = RoutedStore(main, {"checkpoints/west": other})
    store.create("checkpoints/west/0-1.json", b"w")
    store.create("checkpoints/westend/0-1.json", b"e")
    store.create("run.json", b"r")
    assert other.list_names("") == ["checkpoints/west/0-1.json"]
    assert main.list_names("") == ["checkpoints/westend/0-1.json", "run.json"]
    assert store.list_names("") == [
        "checkpoints/west/0-1.json",
        "checkpoints/westend/0-1.json",
        "run.json",
    ]
    assert store.list_names("checkpoints/") == [
        "checkpoints/west/0-1.json",
        "checkpoints/westend/0-1.json",
    ]
    assert store.list_names("checkpoints/west/") == ["checkpoints/west/0-1.json"]
    assert store.list_names("inbox/") == []
    assert store.read("checkpoints/west/0-1.json") == b"w"
    with pytest.raises(VersionTaken):
        store.create("checkpoints/west/0-1.json", b"again")
    store.delete("checkpoints/west/0-1.json")
    assert other.list_names("") == []


def test_what_lies_in_the_main_store_under_a_routed_name_does_not_count() -> None:
    main, other = open_store("memory://"), open_store("memory://")
    main.create("checkpoints/west/0-1.json", b"stray")
    store = RoutedStore(main, {"checkpoints/west": other})
    assert store.list_names("") == []
    assert store.read("checkpoints/west/0-1.json") is None


def test_an_island_keeps_its_checkpoints_in_a_store_of_its_own(tmp_path: Path) -> None:
    own = (tmp_path / "own").as_uri()
    fault = 'local.faults=[{island="north", step=13, return_after_steps=8}]'
    config = runs.tiny_config(tmp_path, f'islands.north.checkpoints="{own}"', fault)
    run = runs.train(config)
    assert verify(run.store_url, run.run_id).problems == []
    elsewhere = open_store(own).within(run.run_id).list_names("")
    assert any(name.startswith("checkpoints/north/") for name in elsewhere)
    assert not open_store(run.store_url).within(run.run_id).list_names("checkpoints/north/")
    open_store(own).within(run.run_id).delete(elsewhere[0])
    assert [problem.name for problem in verify(run.store_url, run.run_id).problems] == [
        elsewhere[0]
    ]


def test_a_store_for_checkpoints_that_cannot_be_opened_is_refused_first(tmp_path: Path) -> None:
    config = runs.tiny_config(tmp_path, 'islands.north.checkpoints="ftp://somewhere"')
    with pytest.raises(ConfigError, match="ftp"):
        creating.prepare_run(config, "r")
    assert open_store(config.store).list_names("") == []
