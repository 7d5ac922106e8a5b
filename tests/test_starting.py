"""The form's door is as strict as the others, and a run is created, or taken up again, or nothing happens at all."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from prefect.logging import disable_run_logger

from infra import settings
from infra.store import open_store
from islands import names
from islands.config import RunConfig, config_from_json
from islands.sections import SyncConfig
from islands.types import ConfigError
from tasks import records, starting, stopping
from tasks.runs import read_held_out, read_shard
from tasks.starting import open_or_create, settled
from tests import runs

BROKEN: list[dict[str, Any]] = [
    {"sync": {"period_steps": "x"}},
    {"sync": {"period_steps": 2.5}},
    {"sync": 3},
    {"durable": 1},
    {"sync": {"perod_steps": 8}},
    {"syn": {}},
    {"sync": {"period_steps": 0}},
    {"inner": {"learning_rate": 5}},
    {"outer": {"merge": "sum"}},
    {"sync": {"min_learners": 9}},
    {"islands": [{"name": "a"}, {"name": "a"}]},
    {"islands": [{"name": "a", "cluster": {"kind": "address"}}]},
    {"seed": -1, "model": {"width": 30}},
    {"sync": {"min_learners": 9, "period_steps": 3}},
    {"pipeline": {"max_restarts": -1}},
]


def refusal(config: RunConfig | Mapping[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        settled(config)
    return str(caught.value)


@pytest.mark.parametrize("values", BROKEN, ids=json.dumps)
def test_the_form_is_refused_in_the_words_of_the_file(values: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        config_from_json(json.dumps(values), source="the form")
    assert refusal(values) == str(caught.value)
    assert all(line.startswith("the form: ") for line in refusal(values).splitlines())


def test_a_form_with_everything_at_its_default_is_the_default() -> None:
    assert settled({}) == RunConfig()
    assert settled(RunConfig()) == RunConfig()
    assert settled(json.loads(RunConfig().model_dump_json())) == RunConfig()


def test_a_form_may_hold_sections_that_were_read_already() -> None:
    """Prefect hands nested models over as models where the form's value was one."""
    sync = SyncConfig(period_steps=48)
    assert settled({"sync": sync}) == RunConfig(sync=sync)
    assert "must be plain, got object" in refusal({"sync": object()})


def test_what_needs_one_process_is_refused() -> None:
    message = refusal({"store": "memory://x"})
    for part in (
        "store must be a place that several processes share",
        "memory",
        "`--driver local`",
    ):
        assert part in message
    message = refusal({"islands": [{"name": "west", "checkpoints": "memory://x"}]})
    assert "islands.west.checkpoints must be a place that several processes share" in message


@pytest.mark.parametrize(
    "values",
    [
        {"sync": {"algorithm": "streaming"}},
        {"sync": {"algorithm": "diloco", "num_fragments": 1}},
    ],
)
def test_algorithms_whose_learners_wait_are_for_several_processes_too(
    values: dict[str, Any],
) -> None:
    assert settled(values).sync.blocks


# --- creating, and going on ---


def test_a_run_is_created_with_version_0_of_every_fragment(tmp_path: Path) -> None:
    config = runs.tiny_config(tmp_path)
    run = open_or_create(config, None, resume=False)
    assert (run.run_id, run.config) == ("run-1", config)
    heads = [records.find_head(run.store, layout.index)[0].version for layout in run.layouts]
    assert heads == [0, 0, 0]
    assert open_or_create(config, None, resume=False).run_id == "run-2"
    assert open_or_create(config, "mine", resume=False).run_id == "mine"


def test_a_request_to_stop_is_taken_back_by_resume_and_not_by_the_heir_of_a_crashed_train(
    tmp_path: Path,
) -> None:
    config = runs.tiny_config(tmp_path)
    run = open_or_create(config, "r", resume=False)
    stopping.ask(run, is_stop=True, reason="a test", mark="a-1")
    open_or_create(config, "r", resume=True, is_heir=True)
    assert stopping.is_asked(run)
    open_or_create(config, "r", resume=True)
    assert not stopping.is_asked(run)


@pytest.mark.parametrize(
    ("assignment", "run_id", "part"),
    [
        ("islands.0.batch_size=9999", "new", "must hold one batch"),
        ("data.source=/no/such/folder", "new", "a text source must be"),
        ("seed=0", "No Name", "a run id must be 1 to 64"),
    ],
)
def test_a_run_that_cannot_be_is_refused_and_nothing_is_created(
    tmp_path: Path, assignment: str, run_id: str, part: str
) -> None:
    config = runs.tiny_config(tmp_path, assignment)
    with pytest.raises(ConfigError, match=part):
        open_or_create(config, run_id, resume=False)
    assert not (tmp_path / "runs").exists()


def test_no_two_islands_read_the_same_text_and_nothing_is_left_out(tmp_path: Path) -> None:
    run = open_or_create(runs.tiny_config(tmp_path), "r", resume=False)
    parts = [read_shard(run, island.name) for island in run.config.islands]
    words = [word for part in (*parts, read_held_out(run)) for word in part.tobytes().split()]
    written = [word for path in (tmp_path / "text").iterdir() for word in path.read_bytes().split()]
    assert Counter(words) == Counter(written)


def test_a_name_in_use_is_refused_and_that_run_untouched(tmp_path: Path) -> None:
    config = runs.tiny_config(tmp_path)
    run = open_or_create(config, "mine", resume=False)
    before = runs.objects(run)
    with pytest.raises(ConfigError, match="a run id must be new, got 'mine'"):
        open_or_create(config, "mine", resume=False)
    assert runs.objects(run) == before


@pytest.mark.parametrize(
    ("run_id", "part"),
    [
        (None, "run is required with resume, got nothing; name the run"),
        ("nosuchrun", "run must exist in .*, got 'nosuchrun'"),
        ("No Name", "a run id must be 1 to 64"),
    ],
)
def test_going_on_with_a_run_that_is_not_there_is_refused_and_nothing_is_created(
    tmp_path: Path, run_id: str | None, part: str
) -> None:
    with pytest.raises(ConfigError, match=part):
        open_or_create(runs.tiny_config(tmp_path), run_id, resume=True)
    assert not (tmp_path / "runs").exists()


def test_a_finished_run_does_not_go_on(tmp_path: Path) -> None:
    run = runs.train(runs.tiny_config(tmp_path, "total_tokens=300"))
    before = runs.objects(run)
    with pytest.raises(ConfigError, match="needs a run that has not ended, got 'r'"):
        open_or_create(run.config, "r", resume=True)
    assert runs.objects(run) == before


def test_a_stopped_run_goes_on_by_its_own_configuration_and_may_train_again(
    tmp_path: Path,
) -> None:
    config = runs.tiny_config(tmp_path)
    run = open_or_create(config, "mine", resume=False)
    stopping.ask(run, is_stop=True, reason="a test", mark="a-1")
    stopping.ask(run, is_stop=True, reason="a test", mark="a-2", island="east")
    again = open_or_create({"store": config.store, "seed": 5}, "mine", resume=True)
    assert again.config == config
    assert not stopping.is_asked(again)
    assert not stopping.is_asked(again, "east")


def test_a_run_whose_creation_was_interrupted_is_completed(tmp_path: Path) -> None:
    config = runs.tiny_config(tmp_path)
    run = open_or_create(config, "mine", resume=False)
    whole = runs.objects(run, ["versions"])
    run.store.delete(names.version(2, 0))
    open_or_create(config, "mine", resume=True)
    found = open_store(config.store).within("mine")
    assert set(found.list_names("versions/")) == set(whole)


def test_without_an_address_of_mlflow_training_goes_on_and_nothing_is_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(settings.MLFLOW_TRACKING_URI, raising=False)
    run = open_or_create(runs.tiny_config(tmp_path), None, resume=False)
    before = runs.objects(run)
    with disable_run_logger(), starting.tracked(run) as ending:
        assert ending.status == "FAILED"  # until somebody says otherwise
    assert runs.objects(run) == before
