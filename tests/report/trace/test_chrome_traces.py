"""Chrome traces: their form, what they tell, how much of it is kept."""

from __future__ import annotations

import gzip
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import stitch
from stitch.errors import UsageError
from stitch.program import DataType, Layout, Space
from stitch.report import ChromeTrace
from tests.support.machines import without_path
from tests.support.stitched_models import integers, one, scaled, tiny
from tests.support.trace_format import Checked, checked

IN_L1 = ("input.x.space=l1", "output.y.space=l1")
SHAPE = (8, 64)


def worked(device: stitch.Device) -> None:
    """Runs of several plans, one that stops half-way, reads and writes."""
    programs = [device.load(scaled(n, 2.0, placement=("input.x.space=l1",))) for n in "ab"]
    pipe = stitch.Pipeline(programs)

    def fail(context: Any) -> None:
        raise ValueError("told to")

    for start in range(20):
        made = one(pipe(integers(start=start)))
        if start % 3 == 0:
            made = one(programs[0](made))
        if start % 4 == 0:
            made.numpy()
        if start % 5 == 0:
            device.write(made, integers())
        if start % 6 == 0:
            end = device.hooks.register(after_program=fail)
            with pytest.raises(ValueError, match="told to"):
                pipe(integers())
            end()


def simulated(body: dict[str, Any]) -> list[tuple[Any, ...]]:
    """The slices of the simulated clock, without what the wall clock says of them."""
    told = []
    for each in checked(body).slices:
        if each.track[0] == 1:
            args = {key: value for key, value in each.args.items() if not key.endswith("_us")}
            told.append((each.name, each.kind, each.track, each.start, each.end, args))
    return told


def test_a_file_has_the_same_and_memory_holds_one_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ChromeTrace, "batch", 4)
    plain, packed = tmp_path / "t.json", tmp_path / "t.json.gz"
    most = 0
    with stitch.open_device("tiny") as device:
        kept = ChromeTrace(device)
        with ChromeTrace(device, plain) as trace, ChromeTrace(device, packed):

            def look(event: object) -> None:
                nonlocal most
                most = max(most, len(trace._seen))

            device.events.subscribe(look)
            worked(device)
            with pytest.raises(UsageError, match="is written to a file"):
                trace.as_json()
        body = kept.as_json()
        trace.close()
    assert 0 < most < 4
    assert sorted(path.name for path in tmp_path.iterdir()) == ["t.json", "t.json.gz"]
    written = json.loads(plain.read_text()), json.loads(gzip.decompress(packed.read_bytes()))
    for each in written:
        assert simulated(each) == simulated(body)
        assert each["otherData"] == body["otherData"]


def test_the_lines_of_a_run_are_those_of_its_plan_on_both_clocks() -> None:
    with stitch.open_device("tiny") as device:
        trace = ChromeTrace(device)
        pipe = stitch.Pipeline([device.load(scaled("a", 2.0, placement=("input.x.space=l1",)))])
        for start in range(6):
            np.testing.assert_array_equal(
                one(pipe(integers(start=start))).numpy(), integers(start=start) * 2 + 1
            )
        found = checked(trace.as_json())
        trace.close()
    runs = found.of("run")
    assert len(runs) == 6
    assert [run.args["tasks"] for run in runs] == [["a"]] * 6
    assert all(a.end <= b.start for a, b in pairwise(runs))
    timed = found.of("task")
    assert [task.inside for task in timed if task.name == "a"] == [(run.name,) for run in runs]
    slices = [each for each in found.slices if each.kind in ("copy", "program")]
    assert [each.kind for each in slices] == ["copy", "program"] * 6
    assert all(a.end == b.start for a, b in pairwise(slices)), "one after the other"
    programs = found.of("program")
    assert all(each.args["wall_us"] > 0 for each in programs)
    nbytes = integers().nbytes
    assert {(p.args["read_nbytes"], p.args["written_nbytes"]) for p in programs} == {
        (nbytes, nbytes)
    }


def test_tracks_have_the_names_of_device_lane_and_space() -> None:
    with stitch.open_device("tiny") as device:
        trace = ChromeTrace(device)
        worked(device)
        moved = device.tensor(integers()).to_layout(Layout(DataType.FLOAT32, Space.DRAM))
        moved.numpy()
        found = checked(trace.as_json())
    assert found.processes == {1: "tiny (simulated time)", 2: "host (wall time)"}
    names = {(each.kind, found.tracks[each.track]) for each in found.slices}
    assert names == {
        ("program", "inter-op thread 0"), ("copy", "inter-op thread 0: copies to l1"),
        ("copy", "inter-op thread 0: copies to dram"), ("run", "thread 1: runs"),
        ("task", "thread 1: runs"), ("read", "thread 1: reads"), ("wait", "thread 1: reads"),
    }  # fmt: skip


def test_a_read_shows_how_long_it_waited_and_for_what() -> None:
    with stitch.open_device("tiny") as device:
        trace = ChromeTrace(device)
        a = device.load(scaled("a", 2.0))
        one(a(integers())).numpy()
        found = checked(trace.as_json())
    ((read,), (wait,), (run,)) = found.of("read"), found.of("wait"), found.of("run")
    assert wait.inside == ("read",)
    assert wait.start <= run.start < run.end <= wait.end <= read.end
    assert read.args["nbytes"] == integers().nbytes


def under_pressure(machine: Any) -> Checked:
    """More results than L1 holds, of programs that work in L1, some at an address."""
    with stitch.open_device(machine) as device:
        trace = ChromeTrace(device)
        programs = [
            device.load(scaled("a", 2.0, SHAPE, target=machine, placement=IN_L1)),
            device.load(scaled("b", 3.0, SHAPE, target=machine,
                               placement=(*IN_L1, "input.x.address=0xa00"))),
        ]  # fmt: skip
        held: list[Any] = []
        for start in range(16):
            h: Any = integers(SHAPE, start)
            for program in programs:
                h = program(h)
                held.append(h)
            if start % 5 == 4:
                del held[::2]
        for tensor in held:
            tensor.numpy()
        again = [one(programs[0](each)) for each in held[:4]]
        stitch.wait(again[-1])
        trace.close()
        return checked(trace.as_json())


@pytest.mark.parametrize("bounces", [False, True])
def test_a_full_space_shows_who_left_and_who_moved(bounces: bool) -> None:
    machine = tiny(l1_nbytes=3072)
    if bounces:
        machine = without_path(machine, Space.L1, Space.L1)
    found = under_pressure(machine)
    names = {each.name for each in found.of("copy")}
    assert {"copy", "evict", "bounce" if bounces else "move"} <= names
    assert found.moved > 0
    assert found.ended > 30
    capacity = 3072 * 4
    used, hole = found.counters["l1: in use"], found.counters["l1: largest hole"]
    assert max(used) <= capacity
    assert max(used) > capacity // 2
    assert min(hole) < capacity // 4


def test_all_that_was_allocated_is_freed_or_open_at_the_end() -> None:
    with stitch.open_device("tiny") as device:
        trace = ChromeTrace(device)
        a = device.load(scaled("a", 2.0))
        held = [one(a(integers(start=start))) for start in range(5)]
        stitch.wait(held[-1])
        there = sum(len(use.buffers) for use in device.memory_use().values())
        found = checked(trace.as_json())
        assert found.begun - found.ended == there >= 5
        held.clear()
        stitch.wait(one(a(integers())))
        found = checked(trace.as_json())
        assert found.ended >= 5
