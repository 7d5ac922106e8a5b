"""The report is one well-formed page that shows all of a run, asks for nothing outside itself, and holds any size."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from flows.lanes import MOST_PUSHES, thin_out
from flows.report import render, write_report
from islands import names
from islands.timeline import Axis
from islands.types import ConfigError, IslandsError, Position
from tasks import records
from tasks.blows import Blow
from tasks.evidence import Row, Verification
from tasks.reporting import FragmentStatus, IslandStatus, Status, status
from tasks.runs import Run
from tasks.scores import Evaluation
from tasks.timeline import (
    Adoption,
    Bar,
    Entry,
    Lane,
    Merge,
    Push,
    Refusal,
    Timeline,
    read_timeline,
)
from tasks.verifying import verify
from tests import runs

ROOT = Path(__file__).resolve().parent.parent
VOID = {"meta", "br", "img", "input", "link", "hr"}
FAULTS = (
    'local.faults=[{island="north", step=7, return_after_steps=6}, {island="west", step=40}]',
    "total_tokens=6_000",
)


class Page(HTMLParser):
    """A page as parsed: every element with its attributes and the text straight in it; a tag left open is an error."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str], list[str]]] = []
        self.errors: list[str] = []
        self._open: list[int] = []
        self.feed(text)
        self.close()
        self.errors += [f"{self.elements[i][0]} is never closed" for i in self._open]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if len({key for key, _ in attrs}) != len(attrs):
            self.errors.append(f"{tag} has an attribute twice")
        self.elements.append((tag, {key: value or "" for key, value in attrs}, []))
        if tag not in VOID:
            self._open.append(len(self.elements) - 1)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self._open.pop()

    def handle_endtag(self, tag: str) -> None:
        if not self._open or self.elements[self._open[-1]][0] != tag:
            self.errors.append(f"{tag} is closed at {self.getpos()}, but not open")
        else:
            self._open.pop()

    def handle_data(self, data: str) -> None:
        if self._open:
            self.elements[self._open[-1]][2].append(data)

    def of_class(self, kind: str) -> list[dict[str, str]]:
        return [a for _, a, _ in self.elements if kind in a.get("class", "").split()]

    def texts(self, tag: str) -> list[str]:
        return ["".join(parts) for name, _, parts in self.elements if name == tag]


def page_of(run: Run, folder: Path) -> tuple[str, Page]:
    write_report(run, folder / "page.html")
    text = (folder / "page.html").read_text(encoding="utf-8")
    page = Page(text)
    assert page.errors == []
    require_self_contained(text, page)
    return text, page


def require_self_contained(text: str, page: Page) -> None:
    """A page may name nothing outside itself, nor use an id twice."""
    for _, attributes, _ in page.elements:
        assert not {"src", "href", "xlink:href", "srcset", "action", "data"} & attributes.keys()
        assert not any(key.startswith("on") for key in attributes)
    assert not re.search(r"url\(|@import|https?://|fetch\(|XMLHttpRequest|import\(", text)
    ids = [attributes["id"] for _, attributes, _ in page.elements if "id" in attributes]
    assert len(ids) == len(set(ids))


@pytest.fixture(scope="module", params=["bounded", "all"])
def finished(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A finished run with a death, a return and a write-off, under each retention."""
    folder = tmp_path_factory.mktemp("report")
    keeps = f'retention="{request.param}"'
    return runs.train(
        runs.tiny_config(folder, *FAULTS, keeps, store=f"memory://report-{request.param}")
    )


def test_a_finished_run_has_a_lane_for_each_island_and_a_mark_for_each_merge(
    finished: Run, tmp_path: Path
) -> None:
    text, page = page_of(finished, tmp_path)
    heads = [records.find_head(finished.store, layout.index)[0] for layout in finished.layouts]
    assert len(page.of_class("merge")) == sum(head.version for head in heads) > 6
    assert len(page.of_class("lane")) == 3
    shown = page.texts("b")
    for name in ("east", "north", "west", "synchronizer"):
        assert name in shown
    titles = page.texts("title")
    for head in heads:
        for version in range(1, head.version + 1):
            told = f"fragment {head.fragment}, version {version}, base step "
            assert sum(title.startswith(told) for title in titles) == 1
    assert "finished" in page.texts("span")
    assert "base steps" in page.texts("small")
    assert finished.config.total_tokens == 6_000
    assert "of 6,000 tokens trained" in page.texts("span")
    assert "retention = " in text


def test_the_page_tells_what_the_wire_carried(finished: Run, tmp_path: Path) -> None:
    _, page = page_of(finished, tmp_path)
    seen = status(finished)
    up, down = seen.bytes_per_merged_token_up, seen.bytes_per_merged_token_down
    assert f"{up:,.1f} / {down:,.1f}" in page.texts("b")
    assert "copies replaced unsent" in page.texts("th")


def test_a_death_and_a_return_are_marked_in_place(finished: Run, tmp_path: Path) -> None:
    _, page = page_of(finished, tmp_path)
    _, north, west = read_timeline(finished).lanes
    length = read_timeline(finished).axis.length
    gone, back = north.bars
    crosses = [attributes["x"] for attributes in page.of_class("death") if "x" in attributes]
    # The axis runs from 2.4 % to 98.8 % of the drawing's width.
    assert crosses == [f"{2.4 + 96.4 * bar.end / length:.2f}%" for bar in (gone, west.bars[0])]
    (circle,) = [attributes for attributes in page.of_class("return") if "cx" in attributes][-1:]
    assert circle["cx"] == f"{2.4 + 96.4 * back.begin / length:.2f}%"
    titles = page.texts("title")
    assert sum("north is back as incarnation 1" in title for title in titles) == 1
    assert sum("gone without a farewell" in title for title in titles) >= 1
    assert sum("west was written off, or sent away" in title for title in titles) == 1
    assert sum(title.startswith("east left, base step") for title in titles) == 1


def test_the_ledger_on_the_page_is_the_one_verify_derives(finished: Run, tmp_path: Path) -> None:
    text, page = page_of(finished, tmp_path)
    found = verify(finished.store_url, finished.run_id)
    cells = page.texts("td")
    for row in found.rows:
        line = [
            row.learner,
            *(f"{count:,}" for count in (row.trained, row.merged, row.passed_over)),
        ]
        assert any(cells[i : i + 4] == line for i in range(len(cells)))
    assert f"{found.num_objects:,} objects, {found.num_versions:,} versions: " in text
    assert "balanced, nothing missing, nothing altered" in page.texts("span")
    (score,) = read_timeline(finished).evaluations
    assert f"{score.bits_per_byte:.3f}" in page.texts("b")
    assert f"byte bigram {score.bigram:.3f}" in page.texts("text")


def test_what_verify_complains_about_is_on_the_page(finished: Run, tmp_path: Path) -> None:
    name = names.incarnation("east", 0)
    data = finished.store.read(name)
    assert data is not None
    finished.store.delete(name)
    finished.store.create(name, data[:-9] + b"<b>'\"&...")
    try:
        _, page = page_of(finished, tmp_path)
    finally:
        finished.store.delete(name)
        finished.store.create(name, data)
    assert any(item.startswith(f"{name}: ") for item in page.texts("li"))
    assert any(text.endswith(("1 problem", "problems")) for text in page.texts("b"))
    assert len(page.of_class("lane")) == 3


def test_a_live_run_is_a_snapshot_in_motion_before_and_after_its_first_merge(
    tmp_path: Path,
) -> None:
    driver = runs.start(runs.tiny_config(tmp_path, store="memory://report-live"))
    text, page = page_of(driver.run, tmp_path)
    assert page.of_class("merge") == []
    assert "Nothing has been merged yet." in page.texts("p")
    assert "unfinished: a snapshot, perhaps in motion" in page.texts("span")
    while sum(head.version for head in driver.synchronizer.heads()) < 4:
        assert driver.advance()
    text, page = page_of(driver.run, tmp_path)
    assert len(page.of_class("merge")) >= 4
    assert "The run has not ended" in text
    assert "no snapshot has been evaluated" in page.texts("span")


def test_a_run_whose_creation_was_interrupted_is_refused_with_the_way_out(tmp_path: Path) -> None:
    run = runs.start(runs.tiny_config(tmp_path, store="memory://report-unborn")).run
    for name in run.store.list_names("versions/"):
        run.store.delete(name)
    with pytest.raises(IslandsError, match="diloco resume r"):
        write_report(run, tmp_path / "page.html")
    assert not (tmp_path / "page.html").exists()


def test_a_place_that_cannot_be_written_is_named(finished: Run, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=re.escape(str(tmp_path / "none" / "page.html"))):
        write_report(finished, tmp_path / "none" / "page.html")


# --- any size, any text ---


def synthetic(num_merges: int, learners: list[str], region: str = "here") -> Timeline:
    """Return the story of a run in which everybody is in every merge, a second apart, of 4 fragments in turn."""

    def push(learner: str, n: int, fate: str) -> Push:
        return Push(learner, n % 4, n // 4, Position(0, 3 * n), 1_000, float(n), 3.5, fate)

    merges = tuple(
        Merge(
            n % 4,
            n // 4 + 1,
            n + 0.5,
            1_000.0 * n,
            tuple(Entry(push(name, n, "merged"), n % 3, 1 / len(learners)) for name in learners),
        )
        for n in range(num_merges)
    )
    lanes = tuple(
        Lane(
            learner=name,
            region=region,
            bars=(
                Bar(0, 0.0, num_merges / 2, "gone", region),
                Bar(1, num_merges / 2 + 1, num_merges, "left"),
            ),
            adoptions=tuple(Adoption(n % 4, n // 4, 3 * n, float(n)) for n in range(num_merges)),
            pushes=tuple(push(name, n, f"refused: {region}") for n in range(num_merges)),
            left_at=float(num_merges),
        )
        for name in learners
    )
    scores = tuple(Evaluation(n, 4_000.0 * n, n % 2 == 0, 3.4, 3.7) for n in range(num_merges // 4))
    refusals = tuple(Refusal(name, region, 1, 10) for name in learners)
    axis = Axis(1.75e9, float(num_merges + 1), False, {learners[0]: 86_400.0}, 2, 3)
    return Timeline(axis, 4, lanes, merges, ((0, 0.0), (1, 9.0)), scores, refusals)


def rendered(timeline: Timeline, problem: str = "") -> tuple[str, Page]:
    learners = [lane.learner for lane in timeline.lanes]
    islands = tuple(
        IslandStatus(name, "here", "left", 1, 9, 1_000, 0.25, 0.9, 0, {}) for name in learners
    )
    fragments = tuple(FragmentStatus(p, 8, 1, 100, 0) for p in range(4))
    seen = Status("run", True, 4_000, 4_000, 0.9, islands, fragments)
    found = Verification(rows=[Row(name, 10, 9, 0, 0, 1, 0, 0) for name in learners])
    if problem:
        found.note(problem, problem)
    text = render(seen, timeline, found, f"name = '{problem}'")
    page = Page(text)
    assert page.errors == []
    return text, page


@pytest.mark.parametrize(("num_merges", "num_islands"), [(20_000, 4), (1_500, 64)])
def test_twenty_thousand_merges_or_many_islands_still_fit_a_page(
    num_merges: int, num_islands: int
) -> None:
    timeline = synthetic(num_merges, [f"island-{n}" for n in range(num_islands)])
    began = time.process_time()
    text, page = rendered(timeline)
    assert time.process_time() - began < 20
    assert len(text.encode()) < 5_000_000
    drawn = len(page.of_class("merge"))
    assert 0 < drawn * num_islands <= MOST_PUSHES
    (note,) = [item for item in page.texts("li") if item.startswith("Left out of the drawing")]
    assert f"{num_merges - drawn:,} of {num_merges:,} merges" in note
    assert f" of {num_merges * num_islands:,} adoptions" in note
    assert f"{num_merges:,}" in page.texts("b")


def test_a_fault_on_purpose_is_a_mark_on_whom_it_met_as_long_as_it_lasted() -> None:
    """Axis of 101 s: its marks lie from 2.4 % on, 96.4 / 101 % a second."""
    plain = synthetic(100, ["east", "west"])
    assert not rendered(plain)[1].of_class("blow")
    blows = (
        Blow("west", "west's learner: <b> stands still", 50.5, 10.1),
        Blow("", "train: SIGKILL to process 7", 0.0, 0.0),
    )
    _, page = rendered(replace(plain, blows=blows))
    marks = page.of_class("blow")
    places = [(mark["x"], mark["y"]) for mark in marks if "x" in mark]
    assert places == [("50.60%", "58"), ("50.60%", "73"), ("2.40%", "129")]  # 56 a lane; two lanes
    assert next(mark["width"] for mark in marks if "width" in mark) == "9.64%"
    titles = page.texts("title")
    assert "west's learner: <b> stands still\nat 50.5 s, on purpose" in titles
    assert any("a fault on purpose" in item for item in page.texts("li"))


def test_thinning_leaves_marks_of_every_fragment_and_the_newest_of_each() -> None:
    timeline = synthetic(20_000, ["east", "west"])
    drawn, _ = thin_out(timeline)
    for p in range(4):
        mine = [merge.version for merge in drawn.merges if merge.fragment == p]
        assert len(mine) > 100
        assert max(mine) == 5_000
    small = synthetic(40, ["east", "west"])
    assert thin_out(small) == (small, "")


@pytest.mark.parametrize(
    "hostile",
    [
        "</title><script>alert(1)</script>",
        '"><img src=x onerror=alert(1)>',
        "' onmouseover='alert(1)",
        "$run_id ${state} $$ & &amp; &lt;b&gt;",
        "]]></svg></pre>--><!-- \x00\x07",
    ],
)
def test_hostile_text_is_shown_and_never_taken_for_markup(hostile: str) -> None:
    timeline = synthetic(12, [hostile, "east"], region=hostile)
    _, plain = rendered(synthetic(12, ["west", "east"], region="here"), "problem")
    _, page = rendered(timeline, hostile)
    assert [tag for tag, _, _ in page.elements] == [tag for tag, _, _ in plain.elements]
    assert [sorted(a) for _, a, _ in page.elements] == [sorted(a) for _, a, _ in plain.elements]
    shown = hostile.replace("\x00", "\ufffd")
    assert any(hostile in text or shown in text for text in page.texts("b"))


def test_bent_clocks_are_said_on_the_page() -> None:
    text, page = rendered(synthetic(8, ["east", "west"]))
    assert any("The clock of east runs 1 d 0:00:00 ahead" in item for item in page.texts("li"))
    assert any(item.startswith("2 records bear an absurd stamp") for item in page.texts("li"))
    assert "since 2025-06-15 15:06:40 UTC" in text
    assert "h:mm:ss" in page.texts("small")


def test_a_page_is_made_without_torch() -> None:
    made_of = "flows.report, tasks.timeline, tasks.reporting, tasks.verifying"
    code = f"import sys, {made_of}; sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=60, check=False)
    assert done.returncode == 0
