"""Report pages in Chromium: what readers do there."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import stitch
from stitch.planner import Cost, plan
from stitch.report import Recorder, difference, read_copies
from stitch.report.page import PageExtras, page_text
from stitch.report.run_record import RunRecord, read_record
from tests.report.test_report_pages import HOSTILE, full_l1, recorded
from tests.support.planner import cases
from tests.support.report_pages import chromium, data_of, opened, with_data
from tests.support.stitched_models import integers, one, scaled

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

__all__ = ["full_l1"]
pytestmark = pytest.mark.campaign("page")
WINDOW = "[stitchReport.maps.l1.shared.x0, stitchReport.maps.l1.shared.x1]"
#: The contrast of some texts with the page.
CONTRAST = """() => {
  const rgb = (c) => c.match(/[0-9.]+/g).slice(0, 3).map(
    (v) => ((v /= 255) <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4));
  const light = (c) => { const [r, g, b] = rgb(c); return .2126 * r + .7152 * g + .0722 * b; };
  const style = (q, k) => getComputedStyle(document.querySelector(q))[k];
  const paper = light(style("body", "backgroundColor"));
  return ["body", ".faint", "th"].map((q) => { const ink = light(style(q, "color"));
    return (Math.max(ink, paper) + .05) / (Math.min(ink, paper) + .05); });
}"""
Parts = dict[str, tuple[str, str]]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as opened_browser:
        yield opened_browser


def written(folder: Path, record: RunRecord, extras: PageExtras | None = None) -> Path:
    path = folder / "run.html"
    path.write_text(page_text({"run": record}, extras))
    return path


@pytest.fixture
def eviction(full_l1: Parts, tmp_path: Path) -> Path:
    return written(tmp_path, read_record(full_l1["evict"][0]))


def details(page: Page) -> str:
    return page.locator("#details").inner_text()


@pytest.mark.parametrize("part", ["move", "evict", "bounce"])
def test_the_example_of_a_full_l1_shows_its_remedy_with_its_proof(
    full_l1: Parts, browser: Browser, tmp_path: Path, part: str
) -> None:
    with opened(browser, written(tmp_path, read_record(full_l1[part][0]))) as page:
        card = page.locator(f".proof[data-kind={part}]")
        words = card.inner_text()
        if part == "move":
            assert "no proof is needed" in words and card.locator("svg line").count() == 1
        elif part == "evict":
            assert "18,432 B per bank, the gaps hold 15,360 B" in words
            # Four pieces beside one gap.
            assert card.locator("svg rect").count() == 5
        else:
            assert "form a cycle" in words and card.locator("svg line").count() > 2
        marks = page.evaluate("Object.values(stitchReport.maps).flatMap(m => m.marks).length")
        assert marks == {"move": 1, "evict": 1, "bounce": 2}[part]
        rows = page.locator(f"#copies tr[data-kind={part}]")
        assert rows.count() == {"move": 1, "evict": 1, "bounce": 2}[part]
        assert rows.first.get_attribute("data-nbytes") in ("14336", "30720")
        assert "room for" in rows.first.inner_text()


def test_a_bounce_that_is_cheaper_than_moves_inside_shows_both_prices(
    browser: Browser, tmp_path: Path
) -> None:
    made = plan(cases.swapped_with_a_spare_granule())
    copies = sum(c.count for c in made.copies), sum(c.nbytes for c in made.copies)
    cost = Cost(*copies, made.seconds)
    record = RunRecord(made.request.machine, {1: made}, ({"event": "run", "plan": 1},), cost)
    with opened(browser, written(tmp_path, record)) as page:
        card = page.locator(".proof[data-proof=cost]")
        assert re.search(r"Through another space it takes [\d.]+ µs. Inside", card.inner_text())
        assert card.locator("svg[aria-label*=through]").count() == 1
        assert page.evaluate("stitchReport.counts.copies") == copies[0]


def test_the_keyboard_walks_through_the_rectangles(eviction: Path, browser: Browser) -> None:
    with opened(browser, eviction) as page:
        canvas = page.locator("#memory canvas.map").last
        canvas.focus()
        assert page.evaluate("document.activeElement.matches('canvas.map:focus-visible')")
        told = []
        for key in (
            "ArrowRight",
            "ArrowRight",
            "ArrowRight",
            "ArrowUp",
            "ArrowDown",
            "End",
            "Home",
        ):
            page.keyboard.press(key)
            told.append(details(page))
        assert told[0] != told[1] and told[0] == told[6] and all("made by" in t for t in told)
        assert "output 'output' of 'quarter'" in told[0] and "evicted" in "".join(told)
        whole = page.evaluate(WINDOW)
        page.keyboard.press("+")
        low, high = page.evaluate(WINDOW)
        assert high - low == (whole[1] - whole[0]) / 2
        page.keyboard.press("0")
        assert page.evaluate(WINDOW) == whole
        page.keyboard.press("Escape")
        assert "Nothing chosen" in details(page)


def test_a_click_shows_the_biography(eviction: Path, browser: Browser) -> None:
    with opened(browser, eviction) as page:
        canvas = page.locator("#memory canvas.map").last
        canvas.scroll_into_view_if_needed()
        box = canvas.bounding_box()
        assert box is not None
        page.mouse.click(box["x"] + box["width"] * 0.8, box["y"] + box["height"] * 0.8)
        text = details(page)
        assert "output 'output' of 'half'" in text and "moments" in text and "released" in text
        assert "examples" in text or "full_l1.py" in text  # The line in the user's source.


def test_the_slider_shows_the_memory_at_a_moment(eviction: Path, browser: Browser) -> None:
    with opened(browser, eviction) as page:
        for moment, live in ((1, 1), (12, 3)):
            page.locator("#moment").evaluate(
                "(e, v) => { e.value = v; e.dispatchEvent(new Event('input')); }", moment
            )
            rows = page.locator("#moment-table tr[data-hole='0']").all_inner_texts()
            assert sum(row.startswith("l1") for row in rows) == live


def test_wheel_and_drag_zoom_and_pan(eviction: Path, browser: Browser) -> None:
    with opened(browser, eviction) as page:
        canvas = page.locator("#memory canvas.map").last
        canvas.scroll_into_view_if_needed()
        box = canvas.bounding_box()
        assert box is not None
        x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
        canvas.focus()
        page.mouse.move(x, y)
        page.mouse.wheel(0, -300)
        zoomed = page.evaluate(WINDOW)
        assert zoomed[1] - zoomed[0] < page.evaluate("stitchReport.counts.total")
        page.mouse.down()
        page.mouse.move(x + 120, y, steps=4)
        page.mouse.up()
        panned = page.evaluate(WINDOW)
        assert panned[0] < zoomed[0]
        assert panned[1] - panned[0] == pytest.approx(zoomed[1] - zoomed[0])
        page.locator("#memory button", has_text="Show all").last.click()
        assert page.evaluate(WINDOW) == [0, page.evaluate("stitchReport.counts.total")]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_both_schemes_have_readable_text(eviction: Path, browser: Browser, scheme: Any) -> None:
    with opened(browser, eviction, color_scheme=scheme) as page:
        ratio = page.evaluate(CONTRAST)
        assert min(ratio) >= 4.5


def test_a_narrow_screen_does_not_scroll_sideways(eviction: Path, browser: Browser) -> None:
    with opened(browser, eviction, viewport={"width": 360, "height": 740}) as page:
        assert page.evaluate("document.documentElement.scrollWidth") == 360
        widths = page.locator("canvas.map").evaluate_all("all => all.map(c => c.clientWidth)")
        assert all(280 < width <= 360 for width in widths)


def test_without_javascript_the_page_is_the_text_of_explain(
    full_l1: Parts, browser: Browser, tmp_path: Path
) -> None:
    text, said = full_l1["bounce"]
    path = written(tmp_path, read_record(text), PageExtras(said))
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(path.as_uri())
    assert said in page.locator("noscript pre").inner_text()
    context.close()


def test_hostile_names_stay_text(full_l1: Parts, browser: Browser, tmp_path: Path) -> None:
    extras = PageExtras(HOSTILE, (HOSTILE,), HOSTILE, [(HOSTILE, False)], {HOSTILE: [1.0, 2.0]},
                        {HOSTILE: [(HOSTILE, 0.0, 5.0)]})  # fmt: skip
    record = read_record(full_l1["evict"][0])
    text = page_text({HOSTILE: record, "two": record}, extras, title=HOSTILE)
    body = data_of(text)
    for run in body["runs"]:
        run["texts"] = [t if t in ("copy", "evict") else f"{t} {HOSTILE}" for t in run["texts"]]
    path = tmp_path / "run.html"
    path.write_text(with_data(text, body))
    with opened(browser, path) as page:
        page.locator("#memory canvas.map").last.focus()
        page.keyboard.press("ArrowRight")
        assert page.locator("img").count() == 0 and page.locator("script").count() == 3
        for panel in ("headline", "details", "links", "graph", "proofs", "copies"):
            words = page.locator(f"#{panel}").text_content() or ""
            assert "<img src=x" in words, panel
            assert not {"\u202e", "\u2066", "\x00", "\x1b"} & {*words}, panel
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_a_page_of_no_events_and_of_one(browser: Browser, tmp_path: Path) -> None:
    record, _ = recorded(1)
    for events in (0, 1):
        one_event = RunRecord(record.machine, {}, record.events[:events], record.cost)
        if events and one_event.events[0]["event"] == "run":
            one_event = RunRecord(record.machine, record.plans, record.events[:1], record.cost)
        with opened(browser, written(tmp_path, one_event)) as page:
            assert page.evaluate("stitchReport.counts.events") == events


def test_200_001_events_are_all_there_and_folded(browser: Browser, tmp_path: Path) -> None:
    with stitch.open_device("tiny") as device:
        recorder = Recorder(device)
        program = device.load(scaled("a", 2.0, (8, 64), placement=("input.x.space=l1",)))
        for _ in range(4):
            one(program(integers((8, 64)))).numpy()
        record = recorder.record()
        recorder.close()
    events = [*record.events]
    *_, last, run = [i for i, e in enumerate(events) if e["event"] == "run"]
    cycle = events[last:run]
    many = (*events[:last], *cycle * (200_001 // len(cycle) + 1))[:200_001]
    path = written(tmp_path, RunRecord(record.machine, record.plans, many, record.cost))
    with opened(browser, path) as page:
        assert page.evaluate("stitchReport.counts.events") == 200_001
        assert page.locator("#copies tbody tr").count() < 100
        times = page.locator("#copies tr[data-kind=copy]").evaluate_all(
            "rows => rows.reduce((n, r) => n + Number(r.dataset.times), 0)"
        )
        assert times == page.evaluate("stitchReport.counts.copies")


def test_curves_difference_and_wall_clock_are_shown(browser: Browser, tmp_path: Path) -> None:
    old, _ = recorded(1)
    new, text = recorded(2)
    curves = {"loss": [3.0, 2.0, float("nan"), 1.0], "rate": [0.1] * 4, "steps/s": [9.0] * 4}
    extras = PageExtras(
        curves=curves,
        tracks={"left": [("piece 0", 0.0, 40.0)], "right": [("piece 1", 20.0, 90.0)]},
        difference=difference(read_copies(recorded(1)[1]), read_copies(text)),
        budgets=[("copies: 9, at most 2", False)],
    )  # fmt: skip
    path = tmp_path / "run.html"
    path.write_text(page_text({"new": new, "old": old}, extras))
    with opened(browser, path) as page:
        assert page.locator("#training .uplot").count() == 3
        assert page.locator("#wall canvas").count() == 1
        assert page.locator("#difference tr[data-diff=more]").count() >= 1
        assert "broken" in page.locator("#headline").inner_text()
        before = page.evaluate("stitchReport.counts.copies")
        page.locator("#run").select_option("1")
        assert page.evaluate("stitchReport.counts.copies") < before


def test_a_sweep_is_curves_and_a_table(browser: Browser, tmp_path: Path) -> None:
    sweep: dict[str, list[float | None]] = {
        "noc.<b>clock": [1e9, 2e9, 3e9], "us": [3.0, None, 1.0], "copies": [2.0, 2.0, 1.0],
    }  # fmt: skip
    path = tmp_path / "sweep.html"
    path.write_text(page_text({}, PageExtras("as text", sweep=sweep)))
    with opened(browser, path) as page:
        assert page.locator("#sweep .uplot").count() == 2
        rows = page.locator("#sweep tr[data-point]").all_inner_texts()
        assert [row.split() for row in rows] == [
            ["1,000,000,000", "3", "2"], ["2,000,000,000", "2"], ["3,000,000,000", "1", "1"],
        ]  # fmt: skip
