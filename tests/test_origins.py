"""A run that begins from another one's snapshot, or from a file: the same numbers, however it is cut."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from prefect.logging import disable_run_logger
from safetensors.numpy import load_file, save_file
from safetensors.torch import save_file as save_torch_file

from infra.arrays import ArrayReader
from islands import names
from islands.config import RunConfig
from islands.fragments import list_mismatches
from islands.merging import Vector
from islands.scoring import bits_per_byte
from islands.types import ConfigError
from islands.versions import Snapshot
from tasks import creating, evaluating, records
from tasks.evidence import Verification
from tasks.origins import open_origin
from tasks.replaying import replay_into
from tasks.reporting import status
from tasks.runs import Run, open_run, read_held_out
from tasks.starting import open_or_create
from tasks.verifying import verify
from tests import runs
from tests.faulty import Killed

SHORT = ("total_tokens=2_400", "local.checkpoint_steps=20")


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A finished run with several snapshots; nobody changes it."""
    return runs.train(runs.tiny_config(tmp_path_factory.mktemp("old"), *SHORT), "old")


def forked(folder: Path, origin: str, *assignments: str, store: str = "") -> Run:
    """Create a run from an origin; nobody trains it yet."""
    config = runs.tiny_config(folder, *SHORT, *assignments)
    source = open_origin(origin, store or config.store)
    prepared = creating.prepare_run(config, "new", origin=source)
    return creating.create_run(prepared, creating.attempts_of(prepared))


def tensors(run: Run, versions: tuple[int, ...], array: str) -> dict[str, Vector]:
    """Return the synchronizer's own values by tensor."""
    found = {}
    for layout, version in zip(run.layouts, versions, strict=True):
        commit, _ = records.require_commit(run.store, layout.index, version)
        values = ArrayReader(run.store, commit.payload).read(array)
        found |= {spec.name: values[spec.offset : spec.stop] for spec in layout.tensors}
    return found


def require_equal(found: dict[str, Vector], wanted: dict[str, Vector]) -> None:
    assert found.keys() == wanted.keys()
    for name, values in wanted.items():
        assert found[name].tobytes() == values.tobytes(), name


def begins(run: Run) -> tuple[int, ...]:
    return (0,) * len(run.layouts)


def score_of_the_beginning(run: Run) -> float:
    digests = tuple(records.require_commit(run.store, layout.index, 0)[1] for layout in run.layouts)
    model = evaluating.load_snapshot(run, Snapshot(0, begins(run), digests, 0, ""))
    config = run.config
    return bits_per_byte(
        model,
        read_held_out(run),
        context=config.model.context,
        max_bytes=config.data.eval_bytes,
    )


# --- from a run ---


@pytest.mark.parametrize("num_fragments", [1, 3, 5])
def test_a_fork_holds_the_origins_parameters_and_momentum_bit_for_bit(
    tmp_path: Path, old: Run, num_fragments: int
) -> None:
    new = forked(tmp_path, "old", f"sync.num_fragments={num_fragments}", store=old.store_url)
    newest, digest = evaluating.pick_snapshot(old, None)
    for array in ("params", "momentum"):
        require_equal(tensors(new, begins(new), array), tensors(old, newest.versions, array))
    momentum = tensors(new, begins(new), "momentum")
    assert any(values.any() for values in momentum.values())
    assert new.facts["origin"]["spec"] == f"{old.store_url}/old@{newest.number}"
    assert new.facts["origin"]["snapshot_digest"] == digest
    assert status(new).origin == f"{old.store_url}/old@{newest.number}"
    assert verify(new.store_url, "new").problems == []


def test_a_fork_begins_with_its_origins_score(tmp_path: Path, old: Run) -> None:
    kept = [snapshot.number for snapshot, _ in records.read_snapshots(old.store)]
    for number in (kept[0], kept[-1]):
        place = tmp_path / str(number)
        place.mkdir()
        new = forked(place, f"{old.store_url}/old@{number}", "sync.num_fragments=2")
        assert score_of_the_beginning(new) == evaluating.evaluate(old, number).bits_per_byte


def test_a_fork_trains_to_its_end_from_where_its_origin_stood(tmp_path: Path, old: Run) -> None:
    new = forked(tmp_path, "old", "retention=all", store=old.store_url)
    begun_at = score_of_the_beginning(new)
    driver = runs.driver_of(new)
    driver.start()
    run = runs.finish(driver)
    fresh = evaluating.evaluate(old).bits_per_byte
    assert begun_at == fresh
    assert evaluating.evaluate(run).bits_per_byte < fresh
    found = verify(run.store_url, "new")
    replay_into(run, found, watch=lambda done: None)
    assert found.problems == []


def test_a_replay_compares_version_0_with_the_origin(tmp_path: Path, old: Run) -> None:
    from islands.codecs import encode
    from tasks.publishing import first_chunks, write_version

    new = forked(tmp_path, "old", "retention=all", store=old.store_url)
    layout = new.layouts[0]
    commit, _ = records.require_commit(new.store, 0, 0)
    values = np.zeros(layout.size, np.float32)
    pieces = first_chunks(new, layout, values, None)
    payload = write_version(new, layout, 0, pieces, lambda: "a-forged")
    new.store.delete(names.version(0, 0))
    records.write(new.store, names.version(0, 0), replace(commit, payload=payload).to_json())
    found = Verification()
    replay_into(new, found, watch=lambda done: None)
    assert [problem.name for problem in found.problems] == [names.version(0, 0)]
    assert encode(values, commit.codec).values.size == layout.size


JOINED = (
    *("sync.algorithm=data-parallel", "sync.num_fragments=1", "sync.period_steps=1"),
    *("sync.codec_down=float32", "outer.merge=mean", "outer.weighting=tokens"),
)


def test_adamws_moments_are_no_outer_momentum(tmp_path: Path, old: Run) -> None:
    """Nor is outer momentum a moment: taken up without its count of steps, it would weigh 1 / (1 - beta1), tenfold."""

    def require_rest(run: Run) -> None:
        assert not any(values.any() for values in tensors(run, begins(run), "momentum").values())

    for folder in ("joined", "back"):
        (tmp_path / folder).mkdir()
    joined = forked(tmp_path / "joined", "old", *JOINED, "total_tokens=960", store=old.store_url)
    require_rest(joined)
    driver = runs.driver_of(joined)
    driver.start()
    runs.finish(driver)
    newest, _ = evaluating.pick_snapshot(joined, None)
    assert any(values.any() for values in tensors(joined, newest.versions, "momentum").values())
    back = forked(tmp_path / "back", f"{joined.store_url}/new")
    require_rest(back)
    require_equal(tensors(back, begins(back), "params"), tensors(joined, newest.versions, "params"))


# --- from a file ---


def test_a_file_gives_parameters_and_no_momentum(tmp_path: Path, old: Run) -> None:
    file = tmp_path / "weights.safetensors"
    evaluating.export(old, file)
    new = forked(tmp_path, str(file))
    params = tensors(new, begins(new), "params")
    wanted = {name: values.reshape(-1) for name, values in load_file(file).items()}
    require_equal(params, wanted)
    assert not any(values.any() for values in tensors(new, begins(new), "momentum").values())
    assert new.facts["origin"].keys() == {"spec", "sha256"}
    assert score_of_the_beginning(new) == evaluating.evaluate(old).bits_per_byte


def test_a_file_and_a_run_say_under_which_configuration_they_were_trained(
    tmp_path: Path, old: Run
) -> None:
    file = tmp_path / "weights.safetensors"
    evaluating.export(old, file)
    assert open_origin(str(file), "").config == old.config
    assert open_origin("old", old.store_url).config == old.config
    save_file(load_file(file), file)
    assert open_origin(str(file), "").config is None


def test_an_origin_whose_momentum_is_damaged_leaves_nothing_under_the_new_name(
    tmp_path: Path, old: Run
) -> None:
    copied = tmp_path / "copied"
    shutil.copytree(old.store_url.removeprefix("file://"), copied)
    chunks = list(copied.glob("old/payloads/versions/**/momentum/c/0"))
    for chunk in chunks:
        data = bytearray(chunk.read_bytes())
        data[0] ^= 1
        chunk.write_bytes(data)
    assert chunks
    with pytest.raises(ConfigError, match="crc32c"):
        forked(tmp_path, "old", store=copied.as_uri())
    assert not (tmp_path / "runs").exists()


def shorter(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    return values[:-1]


def test_tensors_that_do_not_fit_are_named(tmp_path: Path, old: Run) -> None:
    file = tmp_path / "weights.safetensors"
    evaluating.export(old, file)
    with pytest.raises(ConfigError) as caught:
        forked(tmp_path, str(file), "model.num_layers=2")
    text = str(caught.value)
    assert "the tensors of an origin must be those of the configured model" in text
    assert "blocks.1." in text
    assert "is missing; " in text
    assert "train it with model.width=16, model.num_layers=1" in text
    with pytest.raises(ConfigError, match=r"is \(16, 16\) instead of \(32, 32\).* and \d+ more"):
        forked(tmp_path, str(file), "model.width=32")
    assert not (tmp_path / "runs").exists()


def test_mismatches_are_told_in_the_order_of_names() -> None:
    wanted = {"a": (2,), "b": (2, 3), "d": ()}
    found = {"b": (3, 2), "c": (1,), "d": ()}
    assert list_mismatches(wanted, found) == [
        "a (2,) is missing",
        "b is (3, 2) instead of (2, 3)",
        "c (1,) has no place in the model",
    ]


def bad_files(folder: Path) -> dict[str, str]:
    made = {
        "none": "must be a readable safetensors file",
        "text": "must be a readable safetensors file",
        "bfloat16": "must be a readable safetensors file",
        "whole": "must be floating point numbers, got int64 for w",
        "broken": "must be finite, got NaN or infinity in w",
    }
    (folder / "text.safetensors").write_text("weights")
    save_torch_file({"w": torch.ones(2, dtype=torch.bfloat16)}, folder / "bfloat16.safetensors")
    save_file({"w": np.ones(2, np.int64)}, folder / "whole.safetensors")
    save_file({"w": np.array([1, np.inf], np.float32)}, folder / "broken.safetensors")
    return made


def test_a_file_that_holds_no_weights_is_refused(tmp_path: Path) -> None:
    for name, rule in bad_files(tmp_path).items():
        with pytest.raises(ConfigError) as caught:
            open_origin(str(tmp_path / f"{name}.safetensors"), "")
        assert rule in str(caught.value)


def test_half_precision_is_widened(tmp_path: Path) -> None:
    file = tmp_path / "half.safetensors"
    save_file({"w": np.array([[0.5, -2.0]], np.float16)}, file)
    origin = open_origin(str(file), "")
    assert origin.shapes == {"w": (1, 2)}
    params, momentum = origin.load()["w"]
    assert (params.tolist(), momentum.tolist()) == ([0.5, -2.0], [0.0, 0.0])
    assert params.dtype == momentum.dtype == np.float32


# --- what an origin may be called ---


def test_what_names_no_origin_is_refused(tmp_path: Path, old: Run) -> None:
    empty = runs.start(runs.tiny_config(tmp_path)).run
    for spec, store, rule in (
        ("nobody", old.store_url, "run must exist"),
        ("old@last", old.store_url, "write the snapshot as a number"),
        ("old@999", old.store_url, "must be one of"),
        ("Old", old.store_url, "a run id must be"),
        (f"{old.store_url}/nobody@0", "", "run must exist"),
        ("r", empty.store_url, "must have a snapshot"),
    ):
        with pytest.raises(ConfigError, match=rule):
            open_origin(spec, store)


def test_a_folder_with_an_at_sign_is_no_snapshot(tmp_path: Path, old: Run) -> None:
    place = tmp_path / "a@b"
    shutil.copytree(Path(old.store_url.removeprefix("file://")), place)
    assert open_origin(f"file://{place}/old", "").spec.startswith(f"file://{place}/old@")


# --- interrupted creations ---


def interrupted(folder: Path, origin: str, num_versions: int) -> Run:
    """Create a run from an origin, and die before its version 0 is whole."""
    config = runs.tiny_config(folder, *SHORT)
    prepared = creating.prepare_run(config, "new", origin=open_origin(origin, config.store))
    left = iter(range(1 + num_versions))

    def attempt() -> str:
        number = next(left, None)
        if number is None:
            raise Killed
        return f"a-{number}"

    with pytest.raises(Killed):
        creating.create_run(prepared, attempt)
    return open_run(config.store, "new")


@pytest.mark.parametrize("num_versions", [0, 2])
def test_an_interrupted_creation_is_completed_from_the_same_origin(
    tmp_path: Path, old: Run, num_versions: int
) -> None:
    run = interrupted(tmp_path, f"{old.store_url}/old", num_versions)
    creating.complete_run(run)
    newest, _ = evaluating.pick_snapshot(old, None)
    for array in ("params", "momentum"):
        require_equal(tensors(run, begins(run), array), tensors(old, newest.versions, array))
    assert verify(run.store_url, "new").problems == []


def drop_run(copy: Path) -> None:
    shutil.rmtree(copy / "old")


def drop_payloads(copy: Path) -> None:
    shutil.rmtree(copy / "old" / "payloads" / "versions")


def drop_snapshots(copy: Path) -> None:
    shutil.rmtree(copy / "old" / "snapshots")


@pytest.mark.parametrize("drop", [drop_run, drop_payloads, drop_snapshots])
def test_that_the_origin_is_gone_is_said(
    tmp_path: Path, old: Run, drop: Callable[[Path], None]
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(Path(old.store_url.removeprefix("file://")), copy)
    run = interrupted(tmp_path, f"file://{copy}/old", 1)
    drop(copy)
    with pytest.raises(ConfigError, match=r"old@.*, which is gone") as caught:
        creating.complete_run(run)
    assert "start a new run from another origin" in str(caught.value)


def test_a_file_that_was_replaced_is_gone(tmp_path: Path, old: Run) -> None:
    file = tmp_path / "weights.safetensors"
    evaluating.export(old, file)
    run = interrupted(tmp_path, str(file), 1)
    save_file({name: values * 2 for name, values in load_file(file).items()}, file)
    with pytest.raises(ConfigError, match="it holds something else now"):
        creating.complete_run(run)


def test_a_run_that_is_whole_needs_its_origin_no_more(tmp_path: Path, old: Run) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(Path(old.store_url.removeprefix("file://")), copy)
    run = forked(tmp_path, f"file://{copy}/old", "retention=all")
    drop_run(copy)
    creating.complete_run(run)
    found = Verification()
    replay_into(run, found, watch=lambda done: None)
    assert found.problems == []


# --- by the flow's own door ---


def test_the_flow_resolves_the_origin_where_it_runs(tmp_path: Path, old: Run) -> None:
    config = runs.tiny_config(tmp_path, store=old.store_url)
    form = json.loads(config.model_dump_json())
    run = open_or_create(form, "by-flow", resume=False, origin="old")
    newest, _ = evaluating.pick_snapshot(old, None)
    require_equal(tensors(run, begins(run), "params"), tensors(old, newest.versions, "params"))
    with disable_run_logger(), pytest.raises(ConfigError, match="origin must be empty"):
        open_or_create(form, "by-flow", resume=True, origin="old")
    assert isinstance(run.config, RunConfig)
