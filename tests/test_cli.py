"""The command line as people and scripts use it: exit statuses, messages, and the life of a run."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import NamedTuple

import pytest
from prefect.settings import PREFECT_API_URL, temporary_settings
from safetensors.numpy import load_file

from flows import screen
from flows.cli import run_command
from infra import deployments, services, settings
from infra.services import Services
from islands.config import parse_config
from tasks import creating, history, trainers
from tasks.records import new_attempt
from tasks.reporting import FragmentStatus, IslandStatus, Status
from tasks.runs import open_run

pytest_plugins = ["tests.prefect_server"]

ROOT = Path(__file__).resolve().parent.parent
WORDS = (
    "the",
    "quick",
    "brown",
    "fox",
    "jumps",
    "over",
    "lazy",
    "dogs",
    "while",
    "seven",
    "islands",
    "train",
)
CONFIG = """
store = "file://{folder}/runs"
durable = false
total_tokens = 4000
model = {{ width = 16, num_layers = 1, num_heads = 2, context = 16 }}
data = {{ source = "{folder}/text", eval_bytes = 512 }}
sync = {{ period_steps = 8 }}
islands = [{{ name = "west", batch_size = 2 }}, {{ name = "east", batch_size = 2 }}]
"""


class Said(NamedTuple):
    """How a command ended and what it printed."""

    status: int
    out: str
    err: str


class Desk:
    """A folder with text, a configuration and a store; `run` is the real command line, in this process."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder = folder
        self.config = folder / "run.toml"
        self.store = folder / "runs"
        self.url = f"file://{self.store}"
        self._capsys = capsys

    def run(self, *arguments: str) -> Said:
        self._capsys.readouterr()
        status = run_command(arguments)
        return Said(status, *self._capsys.readouterr())

    def train(self, *arguments: str, run: str = "first", driver: str = "local") -> Said:
        return self.run("train", str(self.config), f"--run={run}", f"--driver={driver}", *arguments)

    def on(self, command: str, *arguments: str, run: str = "first") -> Said:
        return self.run(command, run, "--store", self.url, *arguments)

    def objects(self) -> dict[str, bytes]:
        """Return everything below the store's folder."""
        return {str(path): path.read_bytes() for path in self.store.rglob("*") if path.is_file()}


@pytest.fixture
def desk(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Desk:
    for name in [name for name in os.environ if name.upper().startswith("DILOCO_")]:
        monkeypatch.delenv(name)
    # No test finds a server that somebody else runs on this machine.
    for name in (settings.PREFECT_API_URL, settings.MLFLOW_TRACKING_URI):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(settings.HOME, str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text").mkdir()
    rng = random.Random(0)
    for index in range(8):
        words = " ".join(rng.choice(WORDS) for _ in range(600))
        (tmp_path / "text" / f"{index}.txt").write_text(words, encoding="utf-8")
    made = Desk(tmp_path, capsys)
    made.config.write_text(CONFIG.format(folder=tmp_path), encoding="utf-8")
    return made


def spawn(*arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "flows", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    return subprocess.Popen(
        command, text=True, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


# --- the life of a run --------------------------------------------------------------------------


def test_a_run_is_trained_looked_at_scored_exported_sampled_and_verified(desk: Desk) -> None:
    trained = desk.train()
    assert (trained.status, trained.err) == (0, "")
    assert "training: 100 %" in trained.out
    assert "run first: finished, 4,032 of 4,000 tokens" in trained.out

    seen = desk.on("status")
    assert seen.status == 0
    assert [line.split()[0] for line in seen.out.splitlines() if "left" in line] == ["west", "east"]
    told = json.loads(desk.on("status", "--json").out)
    assert (told["is_finished"], told["trained"]) == (True, 4032)

    listed = desk.run("runs", "--store", desk.url)
    assert (listed.status, "first  finished" in listed.out) == (0, True)

    scored = desk.on("evaluate", "--json")
    assert 0 < json.loads(scored.out)["bits_per_byte"] < 8
    assert f"{json.loads(scored.out)['bits_per_byte']:.4f} bits/byte" in desk.on("evaluate").out

    target = desk.folder / "weights.safetensors"
    assert desk.on("export", "--to", str(target)).status == 0
    shapes = {name: values.shape for name, values in load_file(target).items()}
    assert shapes["token_embedding"] == (256, 16)
    layouts = open_run(desk.url, "first").layouts
    assert shapes == {tensor.name: tensor.shape for layout in layouts for tensor in layout.tensors}

    text = desk.on("sample", "--prompt", "[bold]the ", "--num-bytes", "20")
    assert text.status == 0
    assert text.out.startswith("[bold]the ")
    assert text == desk.on("sample", "--prompt", "[bold]the ", "--num-bytes", "20")

    verified = desk.on("verify")
    assert (verified.status, verified.err) == (0, "")
    assert "balanced" in verified.out

    before = desk.objects()
    refused = desk.on("resume")
    assert (refused.status, refused.out) == (2, "")
    assert "needs a run that has not ended, got 'first'" in refused.err
    assert desk.objects() == before


def test_settings_are_adjusted_with_both_values_and_when_they_act(desk: Desk) -> None:
    create(desk, "first")
    settings = ("sync.min_learners=2", "islands.east.batch_size=4", "durable=true")
    said = desk.on("adjust", "--set", *settings)
    assert (said.status, said.err) == (0, "")
    assert said.out.splitlines() == [
        "durable false → true, when the run is stopped and resumed",
        "sync.min_learners null → 2, at once",
        "islands.east.batch_size 2 → 4, with the learner's next incarnation",
    ]
    assert open_run(desk.url, "first").config.sync.min_learners == 2
    again = desk.on("adjust", "--set", *settings)
    assert again.out == "run first: nothing differs, nothing was changed\n"
    told = json.loads(desk.on("adjust", "--json", "--set", "sync.alpha=0.25").out)
    assert told == {
        "changes": [{"key": "sync.alpha", "before": 0.0, "after": 0.25, "acts": "at once"}],
        "departed": [],
    }


def test_an_island_is_set_apart_and_shown_so(desk: Desk) -> None:
    create(desk, "first")
    said = desk.on("quarantine", "west")
    assert (said.status, said.out) == (0, 'quarantine [] → ["west"], at once\n')
    rows = [line.split() for line in desk.on("status").out.splitlines()]
    states = {row[0]: row[2] for row in rows if row and row[0] in ("west", "east")}
    assert states == {"west": "quarantined", "east": "waiting"}
    too_many = desk.on("quarantine", "east")
    assert too_many.status == 2
    assert "quarantine must leave as many islands as a merge needs (1), got 0 left" in too_many.err
    assert desk.on("quarantine", "west", "--release").out == 'quarantine ["west"] → [], at once\n'


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["adjust"], "an adjustment must name a setting"),
        (
            ["adjust", "--set", "sync.codec=bfloat16"],
            "identity cannot change, got other values for",
        ),
        (["adjust", "--set", "sync.min_learner=1"], "did you mean sync.min_learners?"),
        (["adjust", "--set", "sync.min_learners=9"], "sync.min_learners must be <="),
        (["quarantine", "mars"], "an island must be one of the run's (west, east), got 'mars'"),
    ],
)
def test_a_change_that_cannot_be_is_refused_and_the_run_untouched(
    desk: Desk, arguments: list[str], part: str
) -> None:
    create(desk, "first")
    before = desk.objects()
    said = desk.on(arguments[0], *arguments[1:])
    assert (said.status, said.out) == (2, "")
    assert part in said.err
    assert desk.objects() == before


def test_an_island_joins_and_another_leaves_and_both_are_shown(desk: Desk) -> None:
    create(desk, "first")
    said = desk.on("join", "south", "--set", "region=ap-south", "batch_size=4")
    assert (said.status, said.err) == (0, "")
    shown = '{"name": "south", "region": "ap-south", "batch_size": 4}'
    assert said.out == (
        f"south joins: whoever trains run first starts it\nislands.south null → {shown}, at once\n"
    )
    left = json.loads(desk.on("leave", "west", "--json").out)["changes"]
    assert left == [{"key": "islands.west.tokens", "before": None, "after": 0, "acts": "at once"}]
    config = open_run(desk.url, "first").config
    # 4,000 tokens for batches of 2 and 4: 1,333.3 and 2,666.7.
    assert [config.share_of(name) for name in ("west", "east", "south")] == [0, 1334, 2667]
    names = [island["name"] for island in json.loads(desk.on("status", "--json").out)["islands"]]
    assert names == ["west", "east", "south"]
    again = desk.on("join", "south")
    assert again.status == 2
    assert "got 'south', which takes part already; choose another name" in again.err


def test_what_has_finished_is_not_adjusted(desk: Desk) -> None:
    desk.train("--set", "total_tokens=64")
    before = desk.objects()
    said = desk.on("adjust", "--set", "sync.alpha=0.5")
    assert said.status == 2
    assert (
        "needs a run that has not ended, got 'first', which has; `diloco train --from first`"
        in said.err
    )
    assert desk.objects() == before


def test_a_run_begins_from_another_under_its_configuration_or_from_a_file(desk: Desk) -> None:
    desk.train()
    number = json.loads(desk.on("evaluate", "--json").out)["snapshot"]
    where = ("--set", f"store={desk.url}", "total_tokens=640")
    local = ("--driver=local", "--run")
    said = desk.run("train", "--from", f"first@{number}", *local, "second", *where)
    assert (said.status, said.err) == (0, "")
    first, second = open_run(desk.url, "first").config, open_run(desk.url, "second").config
    assert second == first.model_copy(update={"total_tokens": 640})
    origin = f"{desk.url}/first@{number}"
    assert f", from {origin}\n" in desk.on("status", run="second").out
    assert json.loads(desk.on("status", "--json", run="second").out)["origin"] == origin
    assert desk.on("verify", run="second").status == 0

    desk.on("export", "--to", str(desk.folder / "w.safetensors"))
    said = desk.run("train", str(desk.config), "--from", "w.safetensors", *local, "third", *where)
    assert (said.status, said.err) == (0, "")
    assert f", from {desk.folder}/w.safetensors\n" in desk.on("status", run="third").out


@pytest.mark.parametrize("driver", ["local", "prefect"])
@pytest.mark.parametrize(
    ("origin", "part"),
    [
        ("nobody", "run must exist in"),
        ("first@999", "an origin's snapshot must be one of"),
        ("none.safetensors", "must be a readable safetensors file"),
        ("first", "the tensors of an origin must be those of the configured model"),
    ],
)
def test_an_origin_that_cannot_be_is_refused_before_anything_is_written(
    desk: Desk, origin: str, part: str, driver: str
) -> None:
    desk.train("--set", "total_tokens=640")
    before = desk.objects()
    said = desk.train("--from", origin, "--set", "model.width=32", run="second", driver=driver)
    assert (said.status, said.out) == (2, "")
    assert part in said.err
    assert desk.objects() == before


def test_a_run_without_a_name_takes_the_next_free_one(desk: Desk) -> None:
    for name in ("run-1", "run-2"):
        said = desk.run("train", str(desk.config), "--driver", "local", "--set", "total_tokens=64")
        assert said.out.startswith(f"run {name} in {desk.url}\n")


def test_json_is_one_document_and_nothing_else(desk: Desk) -> None:
    trained = desk.train("--json", "--set", "total_tokens=600", "retention=all")
    assert (trained.status, trained.err) == (0, "")
    assert set(json.loads(trained.out)) == {"status", "score"}
    verified = desk.on("verify", "--replay", "--json")
    assert (verified.status, verified.err) == (0, "")
    told = json.loads(verified.out)
    assert told["is_sound"]
    assert [row["imbalance"] for row in told["rows"]] == [0, 0]
    assert [
        row["run_id"] for row in json.loads(desk.run("runs", "--store", desk.url, "--json").out)
    ] == ["first"]


def test_an_altered_object_is_named_on_standard_error_and_the_ledger_still_shown(
    desk: Desk,
) -> None:
    desk.train("--set", "total_tokens=600")
    altered = max(
        path
        for path in (desk.store / "first" / "payloads" / "versions").rglob("*")
        if path.is_file()
    )
    altered.write_bytes(altered.read_bytes()[:-1] + b"\x00\x01")
    verified = desk.on("verify")
    assert verified.status == 1
    assert altered.relative_to(desk.store / "first").as_posix() in verified.err
    assert "west" in verified.out
    assert "1 problem" in verified.out


def test_a_damaged_run_does_not_hide_the_others(desk: Desk) -> None:
    for name in ("first", "second"):
        desk.train("--set", "total_tokens=64", run=name)
    (desk.store / "first" / "run.json").write_bytes(b"{}")
    listed = desk.run("runs", "--store", desk.url)
    assert listed.status == 0
    assert "second" in listed.out
    assert "first: cannot be read" in listed.err
    said = desk.on("status")
    assert said.status == 1
    assert "run.json: is no sealed record" in said.err
    assert "; put that object back from a copy of the store" in said.err
    written = json.loads((desk.store / "second" / "run.json").read_bytes())
    older = {**written, "format": written["format"] - 1}
    (desk.store / "first" / "run.json").write_text(json.dumps(older))
    said = desk.on("status")
    assert "; use the version of diloco that wrote it, or begin a new run" in said.err
    assert "put that object back" not in said.err


def test_refused_contributions_are_visible_and_tables_stay_narrow(
    capsys: pytest.CaptureFixture[str],
) -> None:
    island = IslandStatus(
        "europe",
        "eu-north",
        "training",
        3,
        123_456,
        10**9,
        0.25,
        0.912,
        2,
        {"stale": 3, "fenced": 1},
    )
    fragment = FragmentStatus(0, 10**9, 12_345, 10**12, 3)
    screen.show_status(Status("demo-1", False, 4 * 10**9, 10**12, 0.9, (island,), (fragment,)))
    lines = capsys.readouterr().out.splitlines()
    assert any("fenced 1, stale 3" in line for line in lines)
    assert max(map(len, lines)) <= 114


def test_what_the_wire_carried_and_could_not_carry_is_visible(
    capsys: pytest.CaptureFixture[str],
) -> None:
    island = IslandStatus(
        "west", "us-west", "training", 0, 9, 288, 1.0, 0.5, 0, {}, replaced_copies=3, replaced_tokens=1_536
    )  # fmt: skip
    fragment = FragmentStatus(0, 8, 1, 144, 1, waiting=1, quorum=2)
    plain = Status("r", False, 288, 1_000, 0.5, (island,), (fragment,))
    seen = replace(plain, bytes_per_merged_token_up=10.25, bytes_per_merged_token_down=8.0)
    screen.show_status(seen)
    out = capsys.readouterr().out
    assert "1 of 2" in out
    assert "payload bytes per merged token: 10.25 up, 8.00 down\n" in out
    assert (
        "copies replaced before they were sent: west 3 of 1,536 tokens, counted once per fragment\n"
        in out
    )
    screen.show_status(replace(seen, bytes_per_merged_token_up=None))
    assert "payload bytes" not in capsys.readouterr().out


def test_the_effective_configuration_is_a_configuration(desk: Desk) -> None:
    set_ = (
        "--set",
        "seed=1",
        "--set=sync.period_steps=12",
        "--set",
        "islands.west.speed=0.5",
        "outer.merge=mean",
    )
    first = desk.run("config", str(desk.config), *set_)
    assert first.status == 0
    for line in ("seed = 1", "period_steps = 12", "speed = 0.5", 'merge = "mean"'):
        assert line in first.out
    again = desk.folder / "again.toml"
    again.write_text(first.out, encoding="utf-8")
    assert desk.run("config", str(again)) == first


# --- bad usage ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [
        ["nope"],
        ["train", "--bogus"],
        ["train", "--set"],
        ["train", "--run", "-rf"],
        ["train", "--driver", "cloud"],
        ["train", "--driver", "local", "--detach"],
        ["train", "--set", "store=memory://x"],
        ["status"],
        ["status", "-rf"],
        ["status", "a", "b"],
        ["status", "a", "--watch", "--json"],
        ["sample", "a"],
        ["sample", "a", "--prompt", "x", "--num-bytes", "0"],
        ["sample", "a", "--prompt", "x", "--temperature", "nan"],
        ["sample", "a", "--prompt", "x", "--temperature", "1e-30"],
        ["sample", "a", "--prompt", "\udcff"],
        ["export", "a"],
        ["export", "a", "--to", "."],
        ["export", "a", "--to", "no/such/folder/x"],
        ["bench", "nope"],
        ["bench", "start", "--json", "no/such/folder/x"],
        ["train", "nofile.toml"],
        ["train", "."],
        ["train", "latin.toml"],
        ["train", "broken.toml"],
        ["train", "--set", "seed=1", "run.toml"],
        ["train", "--set", "seed"],
        ["status", "nosuchrun"],
        ["verify", "nosuchrun"],
        ["evaluate", "nosuchrun"],
        ["resume", "nosuchrun"],
        ["report", "nosuchrun"],
        ["report", "a", "--to", "no/such/folder/x"],
        ["track"],
        ["track", "nosuchrun", "--uri", "http://127.0.0.1:9"],
        ["stop"],
        ["up", "--evaluate-seconds", "1"],
        ["chaos", "a"],
        ["chaos", "a", "--seed", "1", "--plan", "run.toml"],
        ["chaos", "a", "--seed", "1", "--kinds", "nope"],
        ["chaos", "a", "--seed", "1", "--every", "0"],
        ["chaos", "nosuchrun", "--seed", "1"],
    ],
    ids=" ".join,
)
def test_bad_usage_is_one_message_and_exit_status_2(desk: Desk, arguments: list[str]) -> None:
    (desk.folder / "latin.toml").write_bytes('store = "ü"'.encode("latin-1"))
    (desk.folder / "broken.toml").write_text("store = ", encoding="utf-8")
    said = desk.run(*arguments)
    assert (said.status, said.out) == (2, "")
    assert said.err.count("\n") == 1
    assert ";" in said.err
    assert not desk.store.exists()


@pytest.mark.parametrize("arguments", [[], ["--help"], ["train", "--help"], ["--version"]], ids=str)
def test_help_and_version_are_no_errors(desk: Desk, arguments: list[str]) -> None:
    said = desk.run(*arguments)
    assert (said.status, said.err) == (0, "")
    assert said.out


# --- bad configurations: nothing is created -------------------------------------------------------

BAD_VALUES = {
    "misspelt": ("sync.perod_steps", "8", ["sync.perod_steps is unknown", "got ", "8", "sync.period_steps?"]),
    "wrong type": ("sync.period_steps", '"x"', ["sync.period_steps must be", 'got "x"', "; write"]),
    "out of bounds": ("sync.period_steps", "0", ["sync.period_steps must be greater", "got 0", "; choose"]),
}  # fmt: skip
DOORS = ("file", "set", "environment")


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("case", BAD_VALUES)
def test_a_bad_value_is_named_by_every_door(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, case: str, door: str
) -> None:
    key, value, parts = BAD_VALUES[case]
    arguments = []
    if door == "set":
        arguments = ["--set", f"{key}={value}"]
    elif door == "environment":
        monkeypatch.setenv(f"DILOCO_{key.upper().replace('.', '__')}", value)
        parts = [part.replace("sync.period_steps?", "DILOCO_SYNC__PERIOD_STEPS?") for part in parts]
    else:
        text = desk.config.read_text(encoding="utf-8").replace(
            "period_steps = 8", f"{key[5:]} = {value}"
        )
        desk.config.write_text(text, encoding="utf-8")
    require_refused(desk, desk.train(*arguments), *parts)


BAD_SETTINGS = [
    (["sync.min_learners=3"], ["sync.min_learners must be <= the number of islands (2)", "got 3", "; lower it"]),
    (["islands.1.name=west"], ["islands must have unique names", "got west", "; rename"]),
    (["islands.0.batch_size=9999"], ["shard 'west' must hold one batch", "got ", "lower batch_size (9999)"]),
    (["sync.num_fragments=99", "sync.period_steps=99"], ["sync.num_fragments must be", "got 99", "; choose"]),
    (["store=ftp://host/runs"], ["a store URL must begin with", "got 'ftp'", "; for a local folder"]),
    (["store=runs"], ["a store URL must begin with", "got 'runs'", "; for a local folder"]),
    (["islands.0.tokens=9", "islands.1.tokens=7"], ["must add up to total_tokens (", "got 16;", "leave one out"]),
    (["data.source=/no/such/folder"], ["a text source must be", "got '/no/such/folder'", "create the folder"]),
]  # fmt: skip


@pytest.mark.parametrize(("settings", "parts"), BAD_SETTINGS, ids=lambda value: value[0])
def test_a_run_that_cannot_be_is_refused_before_anything_is_written(
    desk: Desk, settings: list[str], parts: list[str]
) -> None:
    require_refused(desk, desk.train("--set", *settings), *parts)


BAD_NAMES = [
    "..", ".", "", "a/b", "/abs", "a\\b", "%2e%2e", " a ", "Ünï", "-rf", "a" * 300, "a\nb", "A", "a-", "\udcff",
]  # fmt: skip


@pytest.mark.parametrize("name", BAD_NAMES, ids=ascii)
def test_a_run_id_that_is_no_plain_name_is_refused_everywhere(desk: Desk, name: str) -> None:
    require_refused(
        desk, desk.train(run=name), "a run id must be 1 to 64 of a-z", "got ", "; choose"
    )
    if name.startswith("-"):
        return
    for command in ("resume", "status", "evaluate", "verify"):
        said = desk.on(command, run=name)
        require_refused(desk, said, "a run id must be 1 to 64 of a-z", "got ", "; choose")


@pytest.mark.parametrize("name", [name for name in BAD_NAMES if name != "\udcff"], ids=ascii)
def test_an_island_name_that_is_no_plain_name_is_refused(desk: Desk, name: str) -> None:
    said = desk.train("--set", f"islands.0.name={json.dumps(name)}")
    require_refused(
        desk, said, "islands.0.name must", "got ", "; choose", "alphanumeric at both ends"
    )


def test_a_file_in_the_way_of_the_store_is_named(desk: Desk) -> None:
    desk.store.write_text("a file", encoding="utf-8")
    said = desk.train()
    assert (said.status, said.out, said.err.count("\n")) == (2, "", 1)
    assert f"a file URL must name a folder, got '{desk.url}'" in said.err
    assert desk.store.read_text(encoding="utf-8") == "a file"


def test_a_text_file_that_is_not_utf8_is_named(desk: Desk) -> None:
    path = desk.folder / "text" / "latin.txt"
    path.write_bytes("Übung".encode("latin-1"))
    require_refused(desk, desk.train(), "must be UTF-8", str(path), "0xdc", "convert it")


def test_a_device_this_machine_lacks_is_refused_before_anything_is_written(desk: Desk) -> None:
    said = desk.train("--set", 'islands.east.device="cuda:99"')
    require_refused(desk, said, "islands.east.device must", 'got "cuda:99"', "; choose")


def require_refused(desk: Desk, said: Said, *parts: str) -> None:
    assert (said.status, said.out) == (2, "")
    assert said.err.count("\n") == 1
    for part in parts:
        assert part in said.err
    assert not desk.store.exists()


def test_an_occupied_run_id_is_refused_and_the_run_untouched(desk: Desk) -> None:
    desk.train("--set", "total_tokens=64")
    before = desk.objects()
    said = desk.train()
    assert (said.status, said.out, said.err.count("\n")) == (2, "", 1)
    assert "a run id must be new, got 'first'" in said.err
    assert "`diloco resume first`" in said.err
    assert desk.objects() == before


# --- stopping and going on ------------------------------------------------------------------------


def started(desk: Desk) -> subprocess.Popen[str]:
    """Return a run in another process that has trained a few steps and would go on for long."""
    process = spawn(
        "train",
        str(desk.config),
        "--run",
        "first",
        "--driver",
        "local",
        "--set",
        "total_tokens=400_000",
        "local.checkpoint_steps=16",
    )
    assert process.stdout is not None
    assert process.stdout.readline() == f"run first in {desk.url}\n"
    time.sleep(0.5)
    return process


def require_an_end(desk: Desk) -> None:
    """Resume the run a little further than it has come, to its end, and verify it."""
    trained = json.loads(desk.on("status", "--json").out)["trained"]
    resumed = desk.on("resume", "--set", f"total_tokens={trained + 1000}")
    assert (resumed.status, resumed.err) == (0, "")
    assert "run first: finished" in resumed.out
    assert desk.on("verify").status == 0


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_run_stops_on_request_within_seconds_and_resumes(
    desk: Desk, number: signal.Signals
) -> None:
    process = started(desk)
    process.send_signal(number)
    _, err = process.communicate(timeout=20)
    assert process.returncode == 130
    assert f"`diloco resume first --store {desk.url}` continues" in err
    assert "Traceback" not in err
    before = desk.objects()
    said = desk.on(
        "resume", "--set", "seed=1", "model.width=32", "islands.0.name=north", "sync.period_steps=9"
    )
    assert (said.status, said.out, said.err.count("\n")) == (2, "", 1)
    assert "got other values for seed, model.width, islands.names;" in said.err
    said = desk.on("resume", "--set", "islands.west.batch_size=9999")
    assert (said.status, said.out, said.err.count("\n")) == (2, "", 1)
    assert "shard 'west' must hold one batch" in said.err
    assert desk.objects() == before
    require_an_end(desk)


@pytest.mark.slow
def test_a_plan_that_breaks_rules_is_told_line_by_line_and_strikes_nothing(desk: Desk) -> None:
    config = parse_config(desk.config.read_text(encoding="utf-8"), source="run.toml")
    prepared = creating.prepare_run(config, "first")
    creating.create_run(prepared, creating.attempts_of(prepared))
    before = desk.objects()
    plan = desk.folder / "plan.toml"
    plan.write_text('[[faults]]\nkind = "kill"\nisland = "nowhere"\nstep = 1', encoding="utf-8")
    said = desk.on("chaos", "--plan", str(plan))
    assert said.status == 2
    assert "plan.toml: faults.0.island must be one of west, east, got nowhere" in said.err
    said = desk.on("chaos", "--plan", "no/such/file")
    assert said.status == 2
    assert "--plan must be a readable UTF-8 file, got 'no/such/file'" in said.err
    said = desk.on("chaos", "--plan", str(plan), "--every", "5", "--kinds", "cut")
    assert said.status == 2
    assert "--plan must be alone" in said.err
    assert "got --every, --kinds beside it" in said.err
    said = desk.on("chaos", "--seed", "1", "--kinds", "cut", "--targets", "train")
    assert said.status == 2
    assert "a kind of fault must be able to strike a target, got cut for train" in said.err
    assert desk.objects() == before


def test_a_killed_run_resumes(desk: Desk) -> None:
    process = started(desk)
    process.kill()
    process.communicate(timeout=20)
    assert process.returncode == -signal.SIGKILL
    require_an_end(desk)


# --- with and without services --------------------------------------------------------------------


def require_no_prefect(said: Said) -> None:
    assert (said.status, said.out, said.err.count("\n")) == (1, "", 1)
    assert "a Prefect server must be running, found none; " in said.err
    for remedy in ("`diloco up`", "set PREFECT_API_URL", "`--driver local`"):
        assert remedy in said.err


@pytest.mark.parametrize("arguments", [[], ["--detach"], ["--json"]], ids=str)
def test_without_a_prefect_server_training_ends_with_the_remedies_and_nothing_created(
    desk: Desk, arguments: list[str]
) -> None:
    require_no_prefect(desk.run("train", str(desk.config), *arguments))
    assert not desk.store.exists()
    assert not (desk.folder / "home").exists()


def test_what_needs_one_process_is_refused_by_the_prefect_driver(desk: Desk) -> None:
    said = desk.train("--set", "store=memory://x", driver="prefect")
    parts = ("store must be a place that several processes share", "memory://x")
    require_refused(desk, said, *parts, "`--driver local`")


@pytest.mark.parametrize("driver", ["prefect", "local"])
def test_what_cannot_be_is_refused_by_both_drivers(desk: Desk, driver: str) -> None:
    said = desk.train("--set", "islands.0.batch_size=9999", driver=driver)
    require_refused(desk, said, "shard 'west' must hold one batch")


def test_a_run_of_flows_is_not_changed_by_a_resumption_that_finds_no_server(desk: Desk) -> None:
    desk.train("--set", "total_tokens=64")
    (desk.store / "first" / "finished.json").unlink()
    before = desk.objects()
    for options in (["--driver", "prefect"], ["--driver=prefect", "--detach"]):
        require_no_prefect(desk.on("resume", *options, "--set", "total_tokens=999"))
    assert desk.objects() == before


def test_a_run_that_prefect_trained_never_goes_on_locally_not_even_after_an_island_was_written_off(
    desk: Desk,
) -> None:
    config = parse_config(desk.config.read_text(encoding="utf-8"), source="run.toml")
    prepared = creating.prepare_run(config, "first")
    run = creating.create_run(prepared, creating.attempts_of(prepared))
    trainers.enlist(run, "a flow run", new_attempt, stamp=lambda: 5.0)
    history.register(run, "west", new_attempt, stamp=lambda: 5.0)
    history.write_off(run, "west", stamp=lambda: 5.0)
    before = desk.objects()
    require_no_prefect(desk.on("resume"))
    said = desk.on("resume", "--driver", "local")
    assert (said.status, said.out, said.err.count("\n")) == (2, "", 1)
    assert "must be one that Prefect never trained, got 'first'" in said.err
    assert desk.objects() == before


def test_a_local_run_that_ended_before_its_first_checkpoint_goes_on_locally(desk: Desk) -> None:
    desk.train("--set", "total_tokens=64")
    for name in desk.store.glob("first/driver/*"):
        name.unlink()
    (desk.store / "first" / "finished.json").unlink()
    assert desk.on("resume", "--detach").err.startswith("--detach needs a process that goes on")


def create(desk: Desk, run: str) -> None:
    """Create a run that nobody trains yet."""
    from tasks import creating

    text = desk.config.read_text(encoding="utf-8")
    config = parse_config(text, assignments=[f'store="{desk.url}"'], source="desk")
    prepared = creating.prepare_run(config, run)
    creating.create_run(prepared, creating.attempts_of(prepared))


def test_a_request_to_stop_lies_in_the_store_also_without_a_prefect_server(desk: Desk) -> None:
    create(desk, "first")
    require_no_prefect(desk.on("stop"))
    assert (desk.store / "first" / "stops" / "0.json").exists()


def test_what_is_over_or_trained_by_the_local_driver_is_not_stopped(desk: Desk) -> None:
    desk.train("--set", "total_tokens=64")
    before = desk.objects()
    said = desk.on("stop")
    assert said.status == 2
    assert "needs a run that has not ended" in said.err
    assert desk.objects() == before


def test_sending_to_mlflow_without_a_server_names_the_remedies(desk: Desk) -> None:
    desk.train("--set", "total_tokens=64")
    said = desk.on("track")
    assert (said.status, said.out, said.err.count("\n")) == (1, "", 1)
    assert "an MLflow server must be running, found none; " in said.err
    for remedy in ("`diloco up`", "set MLFLOW_TRACKING_URI", "--uri"):
        assert remedy in said.err


def test_a_report_is_one_page(desk: Desk) -> None:
    desk.train("--set", "total_tokens=600")
    target = desk.folder / "first.html"
    said = desk.on("report", "--to", str(target))
    assert (said.status, said.out, said.err) == (0, f"run first: {target}\n", "")
    text = target.read_text(encoding="utf-8")
    assert text.lower().startswith("<!doctype html>")
    assert "first" in text


@pytest.mark.slow
def test_a_server_that_only_the_home_tells_of_is_found_by_train_and_stop(
    desk: Desk, deployed: Services
) -> None:
    """In processes of their own, as people have it: Prefect's library reads its address once."""
    home = desk.folder / "home"
    home.mkdir()
    record = {**asdict(deployed), "pid": os.getpid()}
    (home / services.RECORD).write_text(json.dumps(record), encoding="utf-8")
    process = spawn("train", str(desk.config), "--run", "first", "--detach", "--json")
    out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, "")
    told = json.loads(out)
    assert told["run_id"] == "first"
    assert told["page"].startswith(deployed.prefect_url)
    with temporary_settings({PREFECT_API_URL: deployed.prefect_api_url}):
        assert deployments.state_of(told["flow_run"]).kind == "SCHEDULED"
    assert not (desk.store / "first").exists()  # the flow creates it, once somebody serves
    create(desk, "second")
    process = spawn("stop", "second", "--store", desk.url)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, "")
    assert out == (f"run second has stopped; `diloco resume second --store {desk.url}` continues\n")


# --- speed ----------------------------------------------------------------------------------------


def test_looking_needs_no_torch(desk: Desk) -> None:
    create(desk, "first")
    script = f"""
import sys
from flows.cli import run_command
for heavy in ("torch", "zarr", "numpy"):
    assert heavy not in sys.modules, heavy
apart = ["quarantine", "first", "west"]
for command in (["runs"], ["status", "first"], ["verify", "first"], ["config"], apart):
    assert run_command([*command, *([] if command == ["config"] else ["--store", {desk.url!r}])]) == 0
assert "torch" not in sys.modules
"""
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
