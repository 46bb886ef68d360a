"""One stream of events: explain, trace, record, result file and page count what the spaces counted.

Random chains and pipelines, trainings and meshes; the campaign has more of each. The page's own
code (in Node) counts all pages of a test at once, which is cheap.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import stitch
from stitch.cli.run_target import Measured, OneDevice, SeveralDevices
from stitch.mesh import open_mesh
from stitch.program import DataType, Layout, Space
from stitch.report import ChromeTrace, VisualizerFolder, peaks_of, read_copies
from stitch.report.page import device_page, page_data
from stitch.report.run_record import Recorder, read_record, replay
from stitch.runtime import RuntimeDevice
from tests.support.machines import without_path
from tests.support.placed_graphs import MACHINE, placed_case
from tests.support.report_database import check_references, copies_told
from tests.support.report_pages import counts_of, data_of, expanded_by_node
from tests.support.stitched_models import integers, one, scaled, tiny, writes_seen
from tests.support.trace_format import checked

FIRST_LINE = re.compile(
    r"^tiny: (\d+) program runs?, (\d+) cop(?:y|ies), (\d+) B, [\d.]+ us simulated \((.*)\)$"
)
LINE = re.compile(r"^  (?:copy|evict|move|bounce|aside|write) +x(\d+) (\d+) B ")
OLDER = re.compile(r"^  (\d+) cop(?:y|ies) of older or failed plans, (\d+) B, not listed$")
SEEN = re.compile(r"^  the spaces saw (\d+) writes by copies and moves, (\d+) B$")
READ = re.compile(r"^  read +x(\d+) (\d+) B in all ")
Counted = tuple[int, int]


@dataclass(frozen=True)
class Explained:
    """What the text of `explain` says, read back."""

    period: str
    head: Counted
    listed: Counted
    seen: Counted
    reads: Counted


def explained(text: str) -> Explained:
    head, *lines = text.splitlines()
    first = FIRST_LINE.match(head)
    assert first is not None, head
    found = [tuple(map(int, m.groups())) for line in lines if (m := LINE.match(line))]
    older = [tuple(map(int, m.groups())) for line in lines if (m := OLDER.match(line))]
    reads = [tuple(map(int, m.groups())) for line in lines if (m := READ.match(line))]
    (seen,) = (tuple(map(int, m.groups())) for line in lines if (m := SEEN.match(line)))
    copies = sum(n for n, _ in found) + sum(n for n, _ in older)
    nbytes = sum(n * b for n, b in found) + sum(b for _, b in older)
    return Explained(
        first[4], (int(first[2]), int(first[3])), (copies, nbytes), (seen[0], seen[1]),
        (sum(n for n, _ in reads), sum(b for _, b in reads)),
    )  # fmt: skip


def traced(body: dict[str, Any]) -> tuple[Counted, Counted]:
    """Copies and reads among a trace's events."""
    copies = [e["args"] for e in body["traceEvents"] if e.get("cat") == "copy"]
    reads = [e["args"] for e in body["traceEvents"] if e.get("cat") == "read"]
    return (
        (sum(a["copies"] for a in copies), sum(a["nbytes"] for a in copies)),
        (len(reads), sum(a["nbytes"] for a in reads)),
    )


def recorded(text: str) -> tuple[Counted, Counted]:
    """Copies and reads among a recording's events, as a stranger would add them up."""
    copies, nbytes, reads, read_nbytes = 0, 0, 0, 0
    found = read_record(text)
    for event in found.events:
        if event["event"] in ("run", "stopped"):
            plan = found.plans[event["plan"]]
            for step in plan.steps[: event.get("steps")]:
                copies += getattr(step, "count", 0)
                nbytes += getattr(step, "nbytes", 0)
        elif event["event"] == "write":
            copies, nbytes = copies + 1, nbytes + event["nbytes"]
        elif event["event"] == "read":
            reads, read_nbytes = reads + 1, read_nbytes + event["nbytes"]
    return (copies, nbytes), (reads, read_nbytes)


#: The data of pages, what their rows have to add up to, and what else the page has to say.
Pages = list[tuple[dict[str, Any], tuple[Counted, Counted, dict[str, Any]]]]


def check_pages(pages: Pages) -> None:
    """Compare what the page's own code makes of pages, rows as well, with the other reports."""
    for (data, (head, reads, others)), code in zip(
        pages, expanded_by_node([data for data, _ in pages]), strict=True
    ):
        assert (code["copies"], code["nbytes"]) == head
        assert (code["reads"], code["readNbytes"]) == reads
        rows = [row for row in code["rows"] if row["kind"] != "allocation"]
        assert sum(row["times"] for row in rows) == head[0]
        assert sum(row["times"] * row["nbytes"] for row in rows) == head[1]
        allocated = [row["times"] for row in code["rows"] if row["kind"] == "allocation"]
        assert sum(allocated) == code["allocations"] == counts_of(data).allocations
        assert others == {name: code[name] for name in others}


def agree(
    device: stitch.Device, trace: ChromeTrace | None, recorder: Recorder | None,
    pages: Pages | None = None,
) -> Counted:  # fmt: skip
    """Compare all reports of a device that was watched from its first moment."""
    said = explained(stitch.report.explain(device))
    assert said.head == said.listed == said.seen == writes_seen(device)
    assert said.period == "whole run"
    totals = {"period": "whole run", "copies": said.head[0], "nbytes": said.head[1]}
    result = OneDevice(device).as_json(Measured())
    assert totals.items() <= result["totals"].items()
    assert listed_in(result) == said.head
    if trace is not None:
        body = json.loads(json.dumps(trace.as_json()))
        assert traced(body) == (said.head, said.reads)
        checked(body)
        assert totals.items() <= body["otherData"].items()
    if recorder is not None:
        text = recorder.text()
        assert recorded(text) == (said.head, said.reads)
        assert totals.items() <= json.loads(text)["totals"].items()
        data = page_data(read_record(text))
        page = counts_of(data)
        assert ((page.copies, page.nbytes), (page.reads, page.read_nbytes)) == recorded(text)
        assert page.allocations == replay(text).allocations
        (by_history,) = data_of(device_page(device))["runs"]
        page, earlier = counts_of(by_history), device.account().earlier
        assert (page.copies + earlier.copies, page.nbytes + earlier.nbytes) == said.head
        if pages is not None:
            used = {"used": [use.used_nbytes for use in device.memory_use().values()]}
            total = device.account().total
            spent = {"seconds": pytest.approx(total.seconds), "programs": total.programs}
            peaks = {"peaks": peaks_in(text, result)}
            pages.append((data, (said.head, said.reads, used | spent | peaks)))
            pages.append((by_history, ((page.copies, page.nbytes), said.reads, used)))
    return said.head


def peaks_in(record: str, result: dict[str, Any]) -> dict[str, int]:
    """Return the peaks of all spaces in a record, after comparing them with a result file's.

    The latter may be lower; see `peaks_of`.
    """
    copies = read_copies(record)
    told = result["peak_bytes_per_bank"]
    assert all(told.get(space, 0) <= copies.peaks.get(space, 0) for space in copies.spaces)
    return {space: copies.peaks.get(space, 0) for space in copies.spaces}


def listed_in(result: dict[str, Any]) -> Counted:
    """Add up the copies that a result file lists: by plan, others, and of older plans."""
    copies, nbytes = result["older_copies"]["copies"], result["older_copies"]["nbytes"]
    lines = [(1, line) for line in result["other_copies"]]
    lines += [(plan["runs"], line) for plan in result["plans"] for line in plan["copies"]]
    for runs, line in lines:
        copies += runs * line["times"]
        nbytes += runs * line["times"] * line["nbytes"]
    return copies, nbytes


PLACEMENTS = st.sampled_from(
    [
        (), ("input.x.space=l1", "output.y.space=l1"), ("input.x.space=dram",),
        ("input.x.layout=tile", "output.y.space=l1"), ("output.y.layout=tile",),
        ("input.x.memory_layout=height_sharded",), ("input.x.space=l1", "input.x.address=0xa00"),
        ("output.y.data_type=bfloat16", "output.y.layout=tile"),
    ]
)  # fmt: skip
ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["call", "chain", "pipeline", "drop", "read", "write", "convert", "hook"]),
        st.integers(0, 7),
    ),
    min_size=4, max_size=24,
)  # fmt: skip


def work(
    device: RuntimeDevice, programs: list[Any], pipeline: Callable[..., Any], actions: list[Any],
    shape: tuple[int, int],
) -> None:  # fmt: skip
    """Calls that hold their results, or not, in an order that was drawn."""
    held: list[stitch.Tensor] = []
    end: Callable[[], None] | None = None
    for action, number in actions:
        x = integers(shape, number)
        if action == "call":
            held.append(one(programs[number % len(programs)](x)))
        elif action == "chain":
            made: Any = x
            for program in programs:
                made = program(made)
            held.append(made)
        elif action == "pipeline":
            made = [pipeline(x) for _ in range(1 + number)]
            held += made[: number // 2]
            del made
        elif action == "drop":
            del held[::2]
        elif action == "hook":
            if end is None:
                end = device.hooks.register(before_operation=lambda context: None)
            else:
                end = end()
        elif held and action == "read":
            held[number % len(held)].numpy()
        elif held and action == "write":
            device.write(held[number % len(held)], x)
        elif held:
            space = Space.DRAM if number % 2 else Space.L1
            held.append(held[number % len(held)].to_layout(Layout(DataType.FLOAT32, space)))
    if end is not None:
        end()


def chains_and_pipelines(
    pages: Pages, placement: list[tuple[str, ...]], actions: list[Any], window: int, small: bool,
    watched: bool, debug: bool,
) -> None:  # fmt: skip
    machine = tiny(l1_nbytes=6144) if small else "tiny"
    shape = (8, 64)
    models = [
        scaled(f"p{i}", 2.0, shape, target=machine, placement=w) for i, w in enumerate(placement)
    ]
    with (
        stitch.open_device(machine, window=window, debug=debug) as device,
        TemporaryDirectory() as name,
    ):
        trace = ChromeTrace(device) if watched else None
        recorder = Recorder(device) if watched else None
        folder = VisualizerFolder(device, name) if watched else None
        programs = [device.load(m) for m in models]
        work(device, programs, stitch.Pipeline(programs), actions, shape)
        counted = agree(device, trace, recorder, pages)
        if trace is not None and recorder is not None and folder is not None:
            trace.close()
            recorder.close()
            recorder.close()
            folder.close()
            assert copies_told(Path(name)) == counted
            check_references(Path(name))


def test_copies_of_a_plan_that_fails_half_way_are_counted() -> None:
    def fail(context: Any) -> None:
        raise ValueError("told to")

    with stitch.open_device("tiny") as device:
        a = device.load(scaled("a", 2.0, placement=("input.x.space=l1",)))
        pipeline = stitch.Pipeline([a])
        for _ in range(4):
            pipeline(integers())
        before = agree(device, None, None)[0]
        end = device.hooks.register(before_program=fail)
        with pytest.raises(ValueError, match="told to"):
            one(a(integers())).numpy()
        end()
        assert agree(device, None, None)[0] == before + 1


def test_peaks_count_results_that_are_held_when_a_known_plan_runs_again() -> None:
    placement = ("input.x.space=l1", "output.y.space=l1")
    model = scaled("a", 2.0, (8, 64), placement=placement)
    with stitch.open_device("tiny", window=1) as device:
        a, b = (stitch.Pipeline([device.load(model)]) for _ in range(2))
        most = 0

        def hold(pipelines: list[Any], count: int) -> None:
            """Hold so many results of each; during a run its input needs memory too."""
            nonlocal most
            held: list[Any] = []
            for pipeline in pipelines:
                for number in range(count):
                    held.append(pipeline(integers((8, 64), number)))
                    used = device.memory_use()[Space.L1].used_nbytes
                    most = max(most, used + rise)
                    assert peaks_of(device)["l1"] == most, (count, number)

        first = a(integers((8, 64)))
        rise = peaks_of(device)["l1"] - device.memory_use()[Space.L1].used_nbytes
        assert rise > 0
        del first
        for count in (1, 4, 2, 9, 9):
            hold([a, b], count)
            hold([a], count)
        before, bindings = most, device.statistics().bindings_made
        device.history.clear()
        most = 0
        hold([a, b], 3)
        assert most < before
        assert device.statistics().bindings_made == bindings


def trainings(
    pages: Pages, optimizer: str, batches: int, steps: int, watched: bool, hold: bool, window: int
) -> None:
    b = stitch.ComputationGraphBuilder("line")
    x = b.input("x", (4, 8), "float32")
    b.output("y", b.op("MatMul", x, b.parameter("w", np.ones((8, 4), np.float32))))
    model = stitch.compile(b.build(), target="tiny", optimizer=optimizer, loss="mse")
    with stitch.open_device("tiny", window=window) as device:
        trace = ChromeTrace(device) if watched else None
        recorder = Recorder(device) if watched else None
        assert model.training is not None
        held: list[Any] = []
        with model.training.start(device) as instance:
            for step in range(steps):
                for _ in range(batches):
                    held.append(instance(integers((4, 8), step)))
                    instance.compute_loss(np.zeros((4, 4), np.float32))
                    instance.backward()
                instance.update()
                instance.zero_grad()
                if not hold:
                    held.clear()
            agree(device, trace, recorder, pages)
            held.clear()
        if trace is not None and recorder is not None:
            trace.close()
            recorder.close()


def meshes(pages: Pages, seed: int, count: int, tasks: int, calls: int) -> None:
    """Graphs with host functions and copies, on devices that others send values to."""
    names = [f"device{number}" for number in range(count)]
    case = placed_case(seed, tasks, names)
    with open_mesh(count, machine=MACHINE, functions=[placed_case.__module__], trace=True) as mesh:
        run = mesh.prepare(case.graph)
        for _ in range(calls):
            run(**case.inputs)
        run.wait()
        trace = mesh.trace()["traceEvents"]
        result = SeveralDevices(mesh, "local").as_json(Measured())["devices"]
        process = {line["args"]["name"]: line["pid"] for line in trace
                   if line["name"] == "process_name"}  # fmt: skip
        for name in names:
            said = explained(mesh.devices[name].explain())
            assert said.head == said.listed == said.seen
            own = process[f"{name}: {MACHINE} (simulated time)"]
            assert traced({"traceEvents": [e for e in trace if e["pid"] == own]})[0] == said.head
            totals = {"period": "whole run", "copies": said.head[0], "nbytes": said.head[1]}
            assert totals.items() <= result[name]["totals"].items()
            text = mesh.report(name, "record")
            assert recorded(text) == (said.head, said.reads)
            data = page_data(read_record(text))
            assert counts_of(data).allocations == replay(text).allocations
            pages.append((data, (said.head, said.reads, {"peaks": peaks_in(text, result[name])})))


#: A check of one run, what is drawn for it, and the number of runs: quickly, and in the campaign.
KINDS: dict[str, tuple[Any, dict[str, Any], int, int]] = {
    "chains and pipelines": (
        chains_and_pipelines,
        {
            "placement": st.lists(PLACEMENTS, min_size=1, max_size=3),
            "actions": ACTIONS,
            "window": st.sampled_from([1, 2, 5, 64]),
            "small": st.booleans(),
            "watched": st.booleans(),
            "debug": st.booleans(),
        },
        15,
        150,
    ),
    "trainings": (
        trainings,
        {
            "optimizer": st.sampled_from(["sgd", "adam"]),
            "batches": st.integers(1, 2),
            "steps": st.integers(1, 9),
            "watched": st.booleans(),
            "hold": st.booleans(),
            "window": st.sampled_from([1, 64]),
        },
        8,
        40,
    ),
    "meshes": (
        meshes,
        {
            "seed": st.integers(0, 10_000),
            "count": st.integers(1, 3),
            "tasks": st.integers(5, 16),
            "calls": st.integers(1, 5),
        },
        6,
        100,
    ),
}


def check_reports(kind: str, is_campaign: bool) -> None:
    pages: Pages = []
    check, drawn, *counts = KINDS[kind]
    count = counts[is_campaign]
    check = given(**drawn)(check)
    settings(max_examples=count, deadline=None, suppress_health_check=list(HealthCheck))(check)(
        pages
    )
    check_pages(pages)


@pytest.mark.parametrize("kind", KINDS)
def test_all_reports_count_what_the_spaces_counted(kind: str) -> None:
    check_reports(kind, is_campaign=False)


@pytest.mark.campaign("page")
@pytest.mark.parametrize("kind", KINDS)
def test_all_reports_of_many_runs_count_what_the_spaces_counted(kind: str) -> None:
    check_reports(kind, is_campaign=True)


def test_relocations_count_each_tensor_once_whatever_its_way() -> None:
    for bounces in (False, True):
        machine = tiny(l1_nbytes=2048)
        if bounces:
            machine = without_path(machine, Space.L1, Space.L1)
        placement = ("input.x.space=l1", "output.y.space=l1")
        with stitch.open_device(machine) as device:
            trace, recorder = ChromeTrace(device), Recorder(device)
            a = device.load(scaled("a", 2.0, (8, 64), target=machine, placement=placement))
            b = device.load(scaled("b", 3.0, (8, 64), target=machine,
                                   placement=(*placement, "input.x.address=0xa00")))  # fmt: skip
            held = [one(a(integers((8, 64), i))) for i in range(5)]
            stitch.wait(one(b(held[-1])))
            copies, nbytes = agree(device, trace, recorder)
            kinds = {line.kind for line in stitch.report.copy_lines(device.account().plans)}
            trace.close()
            recorder.close()
        assert ("bounce" if bounces else "move") in kinds
        assert nbytes == copies * 8 * 64 * 4
