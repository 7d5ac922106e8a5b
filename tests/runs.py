"""Small real runs for the tests: a model of a few hundred parameters, a folder of generated text, the local driver.

Not a test itself; nothing here replaces a part of the project.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from infra.store import Store
from islands.config import RunConfig, parse_config
from islands.learner import Learner
from tasks import building, creating, evaluating
from tasks.local import Driver
from tasks.local_state import restore_state
from tasks.runs import Run, open_run

MODEL = """[model]
width = 16
num_layers = 1
num_heads = 2
context = 16
[data]
eval_bytes = 512
"""
TINY = f"""
total_tokens = 4_000
durable = false
{MODEL}[sync]
num_fragments = 3
period_steps = 6
[local]
checkpoint_steps = 9
[[islands]]
name = "east"
batch_size = 2
push_delay_steps = 1.0
fetch_delay_steps = 1.0
[[islands]]
name = "north"
batch_size = 2
speed = 0.7
push_delay_steps = 2.0
[[islands]]
name = "west"
batch_size = 2
start_steps = 3.0
fetch_delay_steps = 0.5
"""
# Long enough for a full window, and nobody late.
CALM = (
    "total_tokens=3_600",
    "sync.num_fragments=2",
    "sync.period_steps=2",
    "islands.north.speed=1.0",
    "islands.west.start_steps=0",
    "islands.west.fetch_delay_steps=0",
    "islands.north.push_delay_steps=0",
    "islands.east.push_delay_steps=0",
    "islands.east.fetch_delay_steps=0",
)


def write_text(folder: Path, num_documents: int = 12) -> Path:
    """Write documents of plain words, the same ones every time."""
    words = (
        *("the", "of", "island", "learner", "merges", "a", "fragment", "while"),
        *("another", "trains", "and", "no", "token", "is", "lost"),
    )
    generator = random.Random(7)
    folder.mkdir(parents=True, exist_ok=True)
    for n in range(num_documents):
        lines = (" ".join(generator.choices(words, k=12)) for _ in range(20))
        (folder / f"d{n:02d}.txt").write_text("\n".join(lines), encoding="utf-8")
    return folder


def tiny_config(
    folder: Path, *assignments: str, store: str | None = None, text: str = TINY
) -> RunConfig:
    """Return a configuration whose text and (unless named) store lie in `folder`."""
    documents = write_text(folder / "text")
    doors = (f'data.source="{documents}"', f'store="{store or (folder / "runs").as_uri()}"')
    return parse_config(text, assignments=[*doors, *assignments], source="tiny")


def start(config: RunConfig, run_id: str = "r") -> Driver:
    """Create a run and return its driver, ready to advance."""
    prepared = creating.prepare_run(config, run_id)
    driver = driver_of(creating.create_run(prepared, creating.attempts_of(prepared)))
    driver.start()
    return driver


def driver_of(run: Run, build: Callable[[str], Learner] | None = None) -> Driver:
    """Return a driver over the real learner; `build` makes another kind of learner."""
    building.use_one_thread()
    return Driver(
        run,
        build or (lambda name: building.build_learner(run, name)),
        lambda beat: None,
        partial(evaluating.evaluate, closes=True),
    )


def finish(driver: Driver) -> Run:
    """Advance to the end."""
    while driver.advance():
        pass
    return driver.run


def train(config: RunConfig, run_id: str = "r") -> Run:
    """Create a run and train it to its end."""
    return finish(start(config, run_id))


def reopen(run: Run) -> Driver:
    """Return a driver for an interrupted run, restored from the store alone."""
    opened = open_run(run.store_url, run.run_id)
    creating.complete_run(opened)
    driver = driver_of(opened)
    if not restore_state(driver):
        driver.start()
    return driver


def fill(store: Store, saved: dict[str, bytes]) -> None:
    """Make a store hold exactly these objects."""
    for name in store.list_names(""):
        store.delete(name)
    for name, data in saved.items():
        store.create(name, data)


def objects(run: Run, folders: Sequence[str] = ("",)) -> dict[str, bytes]:
    """Return every object below the folders, name -> bytes."""
    found = {}
    for folder in folders:
        for name in run.store.list_names(folder):
            data = run.store.read(name)
            assert data is not None
            found[name] = data
    return found
