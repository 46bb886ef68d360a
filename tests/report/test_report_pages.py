"""Report pages: what they count, show and refuse, and one of them in a browser."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import stitch
import stitch.report.page as page_package
from stitch.errors import FormatError
from stitch.report import Recorder, peaks_of
from stitch.report.page import PageExtras, page_data, page_text
from stitch.report.page.page_data import expanded, fold
from stitch.report.run_record import RunRecord, read_record, replay
from tests.support.report_pages import chromium, counts_of, data_of, expanded_by_node, opened
from tests.support.stitched_models import integers, one, scaled

EXAMPLES = Path(__file__).parents[2] / "examples"
HOSTILE = "<img src=x onerror=alert(1)></script>\x00\x1b[31m\u202eevil\u2066" + "n" * 10_000


def example(name: str) -> ModuleType:
    """A script of the examples, as a module."""
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def full_l1(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, tuple[str, str]]]:
    """The record and the explanation of each part of the example, by its name."""
    seen: list[tuple[str, str]] = []

    class Watched(stitch.Device):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            self.recorder = Recorder(self)

        def close(self) -> None:
            if not self.is_closed:
                seen.append((self.recorder.text(), self.explain()))
                self.recorder.close()
            super().close()

    monkeypatch.setattr(stitch, "open_device", lambda machine: Watched(machine))
    module = example("full_l1")
    for part in (module.move, module.evict, module.bounce):
        part()
    yield dict(zip(("move", "evict", "bounce"), seen, strict=True))


def recorded(passes: int) -> tuple[RunRecord, str]:
    """A chain of two programs, run some times: its record, parsed and as text."""
    with stitch.open_device("tiny") as device:
        recorder = Recorder(device)
        programs = [
            device.load(scaled(name, 2.0, (8, 64), placement=("input.x.space=l1",)))
            for name in ("a", "b")
        ]
        for _ in range(passes):
            one(programs[1](one(programs[0](integers((8, 64)))))).numpy()
        text = recorder.text()
        recorder.close()
    return read_record(text), text


def test_a_page_opened_from_disk_shows_every_copy_and_every_allocation(
    full_l1: dict[str, tuple[str, str]], tmp_path: Path
) -> None:
    with chromium() as browser:
        for kind, (text, explained) in full_l1.items():
            record, path = read_record(text), tmp_path / f"{kind}.html"
            path.write_text(page_text({kind: record}, PageExtras(explained)))
            with opened(browser, path) as page:
                counts = page.evaluate("stitchReport.counts")
                rows = page.locator("#copies tbody tr").evaluate_all(
                    "rows => rows.map(r => [r.dataset.kind, Number(r.dataset.nbytes)])"
                )
                copies = [nbytes for what, nbytes in rows if what != "allocation"]
                assert len(copies) == record.cost.copies and sum(copies) == record.cost.nbytes
                assert len(rows) - len(copies) == replay(text).allocations
                assert counts["drawnAllocations"] == replay(text).allocations
                assert f"{counts['copies']} copies, {counts['nbytes']} B" in explained
                assert any(what == kind for what, _ in rows)
                proof = page.locator(f".proof[data-kind={kind}]").inner_text()
                words = {
                    "move": "Nothing had to leave",
                    "evict": "Proof: capacity",
                    "bounce": "cycle",
                }
                assert words[kind] in proof
                assert re.search("room for '(half|difference)'", proof)


def test_the_data_of_a_page_counts_as_the_record_does() -> None:
    record, text = recorded(5)
    data = page_data(record)
    counts = counts_of(data)
    assert (counts.copies, counts.nbytes) == (record.cost.copies, record.cost.nbytes)
    assert counts.allocations == replay(text).allocations
    assert len([*expanded(data["events"])]) == len(record.events)


def test_equal_passes_are_stored_once() -> None:
    few, many = (page_text({"run": recorded(passes)[0]}) for passes in (20, 400))
    assert len(many) < len(few) + 400
    assert max(times for times, _ in data_of(many)["runs"][0]["events"]) > 300


@pytest.mark.parametrize(
    "order", [[], [1], [1, 1], [1, 2, 1, 2, 3], [3, 1, 1, 2, 1, 1, 2, 1, 1, 2], list(range(9)) * 3]
)
def test_folded_events_expand_to_the_same(order: list[int]) -> None:
    assert list(expanded(fold(order))) == order


def test_names_are_text_wherever_they_stand() -> None:
    record, _ = recorded(1)
    (plan,) = record.plans.values()
    task = plan.request.tasks[0]
    named = replace(task.transformation, name=HOSTILE)
    tasks = (task._replace(transformation=named), *plan.request.tasks[1:])
    plans = {1: replace(plan, request=replace(plan.request, tasks=tasks))}
    extras = PageExtras(HOSTILE, (HOSTILE,), HOSTILE, [(HOSTILE, False)])
    text = page_text({HOSTILE: replace(record, plans=plans)}, extras, title=HOSTILE)
    assert "<img" not in text and "\u202e" not in text and "\x00" not in text
    assert HOSTILE[:30] in json.dumps(data_of(text))
    assert text.count("</script>") == 3 and len(re.findall(r"<script", text)) == 3


def test_a_page_needs_nothing_else_and_allows_nothing_else() -> None:
    text = page_text({"run": recorded(1)[0]})
    (policy,) = re.findall(r'Content-Security-Policy" content="([^"]*)"', text)
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe" not in policy and "http" not in policy
    assert not re.search(r"\s(src|href)=.(?!#)", re.sub(r"(?s)<script>.*?</script>", "", text))


@pytest.mark.parametrize(
    "event",
    [
        {"event": "sing"}, {"event": "run", "plan": 99}, {"event": "run"},
        {"event": "reserve", "space": "moon", "address": 0, "size_per_bank": 4},
        {"event": "reserve", "space": "l1", "address": 0},
        {"event": "stopped", "plan": 1, "steps": [999]},
        {"event": "write", "nbytes": "x", "desc": "y"},
    ],
)  # fmt: skip
def test_a_malformed_event_is_named(event: dict[str, Any]) -> None:
    record, _ = recorded(1)
    with pytest.raises(FormatError) as caught:
        page_data(replace(record, events=(*record.events, event)))
    assert caught.value.where == f"events[{len(record.events)}]"


def test_a_run_of_no_events_has_a_page() -> None:
    record, _ = recorded(1)
    data = page_data(replace(record, events=(), plans={}))
    assert data["events"] == [] and counts_of(data).copies == 0


def test_the_code_of_the_page_takes_60_kb_beside_uplot() -> None:
    text = page_text({"run": recorded(1)[0]})
    data = re.search(r'(?s)<script type="text/plain" id="data">.*?</script>', text)
    uplot = re.search(r"(?s)<script>/\*! uPlot.*?</script>", text)
    assert data is not None and uplot is not None
    style = len((Path(page_package.__file__).parent / "vendor" / "uPlot.min.css").read_text())
    assert len(text.encode()) - len(data[0]) - len(uplot[0]) - style < 60_000


def test_a_device_writes_a_page_of_its_history(tmp_path: Path) -> None:
    with stitch.open_device("tiny") as device:
        programs = [
            device.load(scaled(name, 2.0, (8, 64), placement=("input.x.space=l1",)))
            for name in ("a", "b")
        ]
        for _ in range(3):
            one(programs[1](one(programs[0](integers((8, 64)))))).numpy()
        kept = one(programs[0](integers((8, 64))))
        device.write(kept, integers((8, 64)))
        device.report(tmp_path / "run.html")
        (data,) = data_of((tmp_path / "run.html").read_text())["runs"]
        total = device.account().total
        counts = counts_of(data)
        assert (counts.copies, counts.nbytes) == (total.copies, total.nbytes)
        (expanded_run,) = expanded_by_node([data])
        assert (expanded_run["copies"], expanded_run["nbytes"]) == (total.copies, total.nbytes)
        assert expanded_run["seconds"] == pytest.approx(total.seconds)
        used = {space.value: use.used_nbytes for space, use in device.memory_use().items()}
        names = [name for name, *_ in data["spaces"]]
        assert dict(zip(names, expanded_run["used"], strict=True)) == used
        # The page keeps results until a later plan lacks them, so its peaks may be above.
        peaks = peaks_of(device)
        assert all(peaks.get(space, 0) <= n for space, n in expanded_run["peaks"].items())
        assert f"{total.copies} copies" in device._repr_html_()
        del kept
    assert "closed" in device._repr_html_()


def test_objects_show_themselves_in_notebooks() -> None:
    model = scaled("<i>", 2.0, (8, 64), placement=("input.x.space=l1",))
    assert "&lt;i&gt;" in model._repr_html_() and "8x64xf32:l1" in model._repr_html_()
    with stitch.open_device("tiny") as device:
        one(device.load(model)(integers((8, 64)))).numpy()
        ((plan, _),) = device.account().plans
        text = plan._repr_html_()
        assert text.startswith("<table>") and "1 copies, 2,048 B" in text and "<i>" not in text
