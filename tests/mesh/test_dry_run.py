"""Dry runs: what they tell before anything starts is what computing devices then do."""

from __future__ import annotations

import numpy as np
import pytest

from stitch.errors import TaskError, UsageError
from stitch.machine import load_machine
from stitch.mesh.dry_runs import dry_run
from stitch.mesh.mesh import Mesh, open_mesh
from stitch.mesh.specification import DeviceEntry, Link, MachineSpecification
from stitch.program import DataType, Layout, TensorDesc
from stitch.tasks import TaskGraph
from tests.support.placed_graphs import DEVICES, compiled, placed_case

FUNCTIONS = ("tests.support.placed_graphs",)
X = TensorDesc((4, 8), Layout(DataType.FLOAT32))


def three(rate: float = 10e9) -> MachineSpecification:
    links = tuple(
        Link(a, b, 1e-6, rate, provenance="chosen") for a in DEVICES for b in DEVICES if a != b
    )
    entry = DeviceEntry(load_machine("tiny"))
    return MachineSpecification("three", dict.fromkeys(DEVICES, entry), links)


def mesh_of(executor: str, specification: MachineSpecification | None = None) -> Mesh:
    return open_mesh(specification or three(), executor=executor, functions=FUNCTIONS)


def chain(*devices: str) -> TaskGraph:
    """Equal tasks, one after the other."""
    graph = TaskGraph("chain")
    value = graph.input(X, "x")
    for device in devices:
        with graph.on(device):
            value = graph.call(compiled("dense"), value)
    graph.output(value, "y")
    return graph


@pytest.mark.parametrize("seed", range(8))
def test_a_dry_run_has_the_seconds_and_the_memory_of_a_real_one(seed: int) -> None:
    case = placed_case(seed)
    with mesh_of("numpy") as real, mesh_of("null") as empty:
        run = real.prepare(case.graph)
        for _ in range(3):
            run(**case.inputs)
            run.wait()
        told = dry_run(empty.prepare(case.graph))
        assert told.seconds == pytest.approx([r.simulated_seconds for r in run.last_records()])
        devices = real.statistics()["devices"]
        assert told.peaks == {name: devices[name]["peak_bytes_per_bank"] for name in told.peaks}
        crossing = [(a, b, n) for (a, b), values in told.traffic.items() for n, _ in values if a]
        made = {n: piece.device for piece in run.pieces for n in piece.outputs}
        assert sorted(crossing) == sorted({
            (made[n], piece.device, n) for piece in run.pieces for n in piece.inputs
            if made.get(n, piece.device) != piece.device
        })  # fmt: skip


def test_a_pipeline_of_equal_stages_takes_a_stage_more_for_each_micro_batch() -> None:
    with mesh_of("null") as mesh:
        run = mesh.prepare(chain(*DEVICES))
        one, nine = dry_run(run), dry_run(run, 9)
    (stage,) = {round(seconds, 12) for seconds in one.seconds}
    link = 1e-6 + 128 / 10e9
    assert one.timeline.makespan == pytest.approx(3 * stage + 2 * link)
    assert nine.timeline.makespan == pytest.approx(11 * max(stage, link) + 2 * min(stage, link))


def test_no_more_calls_than_in_flight_are_under_way() -> None:
    with open_mesh(three(), executor="null", in_flight=1) as mesh:
        told = dry_run(mesh.prepare(chain("left", "middle")), 5)
    assert told.timeline.makespan == pytest.approx(5 * (sum(told.seconds) + 1e-6 + 128 / 10e9))


def test_a_carried_value_makes_calls_wait_for_each_other() -> None:
    with mesh_of("null") as mesh:
        run = mesh.prepare(chain("left", "right"), carry={"x": "y"})
        told = dry_run(run, 5)
    assert told.timeline.makespan == pytest.approx(5 * sum(told.seconds) + 9 * (1e-6 + 128 / 10e9))
    assert set(told.traffic) == {("left", "right"), ("right", "left")}


def test_the_text_names_pieces_traffic_links_memory_and_time() -> None:
    with mesh_of("null") as mesh:
        told = dry_run(mesh.prepare(chain("left", "left", "right")), 2)
    one, two = (f"{seconds * 1e6:.1f} us" for seconds in told.seconds)
    lines = told.text().splitlines()
    whole = f"{told.timeline.makespan * 1e6:.1f} us"
    assert lines[0].startswith(f"three: 2 pieces on 2 devices, 2 micro-batches: {whole} simulated")
    assert lines[1:5] == [
        f"  piece 0 on left: {one}, 2 tasks (dense, dense)",
        f"  piece 1 on right: {two}, 1 task (dense)",
        "  client -> left: 1 value, 128 B a micro-batch, not in the time",
        "  left -> right: 1 value, 128 B a micro-batch, 1.0 us (chosen)",
    ]
    left = told.peaks["left"]
    busy = f"{2 * told.seconds[0] * 1e6:.1f} us"
    assert lines[5].startswith(f"  left (tiny): busy {busy}; at most ")
    for space, nbytes in left.items():
        assert f"{space} {nbytes} of " in lines[5]
    assert len(lines) == 7


def test_a_dry_run_needs_a_mesh_that_computes_nothing_and_a_micro_batch() -> None:
    with mesh_of("numpy") as mesh, pytest.raises(UsageError, match="that computes nothing"):
        dry_run(mesh.prepare(chain("left")))
    with mesh_of("null") as mesh, pytest.raises(UsageError, match="dry run of 0 micro-batches"):
        dry_run(mesh.prepare(chain("left")), 0)


def test_no_value_of_a_mesh_that_computes_nothing_can_be_read() -> None:
    with mesh_of("null") as mesh:
        result = mesh.prepare(chain("left", "right"))(np.ones((4, 8), np.float32))
        result.settle()
        with pytest.raises(TaskError, match="cannot read tensor 'y': the null executor computes"):
            result.numpy()
