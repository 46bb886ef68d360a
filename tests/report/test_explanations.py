"""`explain` and the memory report: every copy with its reason, every byte with its owner."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

import stitch
from stitch.budget import BUDGET
from stitch.program import DataType, Layout, Space
from stitch.report import (
    Recorder,
    RunCopies,
    copy_lines,
    difference,
    explain,
    memory_views,
    plan_json,
    read_copies,
)
from tests.support.machines import without_path
from tests.support.stitched_models import integers, one, scaled, tiny

F32 = DataType.FLOAT32
KEYS = {
    "num_banks", "total_bytes_per_bank", "total_bytes_allocated_per_bank",
    "total_bytes_free_per_bank", "total_bytes_leased_per_bank",
    "largest_contiguous_bytes_free_per_bank", "block_table",
}  # fmt: skip


def test_a_chain_that_fits_needs_one_copy_and_says_which() -> None:
    placement = ("input.x.space=l1", "output.y.space=l1")
    with stitch.open_device("tiny") as device:
        a, b = (device.load(scaled(n, 2.0, placement=placement)) for n in "ab")
        for _ in range(3):
            one(b(one(a(integers())))).numpy()
        text = device.explain()
        (line,) = copy_lines(device.account().plans)
    assert text.startswith("tiny: 6 program runs, 3 copies, 3072 B")
    assert (line.kind, line.times, line.nbytes) == ("copy", 3, 1024)
    assert line.reason.startswith("input 'x' of 'a' wants f32:l1:row_major:interleaved")
    assert line.reason in text
    assert "read   x3 3072 B in all" in text
    assert "the spaces saw 3 writes by copies and moves, 3072 B" in text


def test_every_conversion_between_programs_is_listed_with_its_reason() -> None:
    with stitch.open_device("tiny") as device:
        a = device.load(scaled("a", 2.0, (32, 32), placement=("output.y.space=l1",)))
        b = device.load(scaled("b", 2.0, (32, 32),
                               placement=["input.x.space=dram",
                                          "input.x.layout=tile"]))  # fmt: skip
        one(b(one(a(integers((32, 32)))))).numpy()
        text = explain(device)
        lines = copy_lines(device.account().plans)
    assert len(lines) == 2
    assert "input 'x' of 'b' wants f32:dram:tile:interleaved, it is f32:l1:row_major" in text
    assert "kernel staging: up to" in text
    assert all(line.seconds > 0 for line in lines)


@pytest.mark.parametrize("bounces", [False, True], ids=["moves", "bounces"])
def test_evictions_and_moves_carry_reason_and_certificate(bounces: bool) -> None:
    machine = tiny(l1_nbytes=2048)
    if bounces:
        machine = without_path(machine, Space.L1, Space.L1)
    placement = ("input.x.space=l1", "output.y.space=l1")
    fixed = (*placement, "input.x.address=0xa00")
    with stitch.open_device(machine) as device:
        a = device.load(scaled("a", 2.0, (8, 64), target=machine, placement=placement))
        b = device.load(scaled("b", 3.0, (8, 64), target=machine, placement=fixed))
        held = [one(a(integers((8, 64), i))) for i in range(5)]
        last = one(b(held[-1]))
        text = device.explain()
        lines = copy_lines(device.account().plans)
        for i, tensor in enumerate(held):
            np.testing.assert_array_equal(tensor.numpy(), integers((8, 64), i) * 2 + 1)
        np.testing.assert_array_equal(last.numpy(), (integers((8, 64), 4) * 2 + 1) * 3 + 1)
    evictions = [line for line in lines if line.kind == "evict"]
    moves = [line for line in lines if line.kind == ("bounce" if bounces else "move")]
    assert evictions
    assert moves
    assert all(line.certificate and line.certificate.startswith("capacity: ") for line in evictions)
    assert all("room for" in line.reason for line in (*evictions, *moves))
    assert "[capacity: " in text
    if bounces:
        assert all(line.certificate == "no_path" for line in moves)
        assert "through dram" in text.lower()


def test_copies_name_the_slots_of_their_link_and_the_lines_of_the_source(tmp_path: Path) -> None:
    for name, text in (
        ("a", "inputs: {x: {shape: [8, 64], type: float32}}\n"
              "operations:\n  - h = Relu(x)\n  - y = Add(h, 1.0)\noutputs: {y: {space: l1}}\n"),
        ("b", "inputs:\n  x: {shape: [8, 64], type: float32, space: dram}\n"
              "operations:\n  - y = Add(x, 1.0)\noutputs: [y]\n"),
    ):  # fmt: skip
        (tmp_path / f"{name}.yaml").write_text(text)
    models = [stitch.compile(tmp_path / f"{name}.yaml", target="tiny") for name in "ab"]
    # With windows of 1 the tensor between the programs was made by an earlier plan.
    for window in (1, 64):
        with stitch.open_device("tiny", window=window) as device:
            recorder = Recorder(device)
            a, b = (device.load(model) for model in models)
            y = one(b(a(integers((8, 64)))))
            y.to_layout(Layout(F32, Space.DRAM)).numpy()
            lines = copy_lines(device.account().plans)
            recorded = read_copies(recorder.text()).lines
        assert [line.link_text() for line in lines] == [
            "input 'x' of 'a' (a.yaml:3)",
            "output 'y' of 'a' (a.yaml:4) -> input 'x' of 'b' (b.yaml:4)",
            "output 'y' of 'b' (b.yaml:4) -> to_layout",
        ]
        assert [line.location for line in lines] == ["a.yaml:3", "b.yaml:4", "b.yaml:4"]
        assert [line.link_text() for line in recorded] == [line.link_text() for line in lines]


def test_an_eviction_names_the_evicted_tensor_and_the_program_that_needs_room() -> None:
    machine = tiny(l1_nbytes=2048)
    placement = ("input.x.space=l1", "output.y.space=l1")
    with stitch.open_device(machine) as device:
        a = device.load(scaled("a", 2.0, (8, 64), target=machine, placement=placement))
        held = [one(a(integers((8, 64), i))) for i in range(5)]
        lines = copy_lines(device.account().plans)
        assert len(held) == 5
    (evicted,) = {line.link_text() for line in lines if line.kind == "evict"}
    assert re.fullmatch(
        r"output 'y' of 'a' \(stitched_models.py:\d+\) -> 'a' \(stitched_models.py:\d+\)", evicted
    )


def test_a_change_that_saves_conversions_is_no_run_of_another_length() -> None:
    def ran(conversions: int, runs: int = 1) -> RunCopies:
        with stitch.open_device("tiny") as device:
            recorder = Recorder(device)
            a = device.load(scaled("a", 2.0))
            for _ in range(runs):
                y = one(a(integers()))
                for at in range(conversions):
                    y = y.to_layout(Layout(F32, (Space.DRAM, Space.L1)[at % 2]))
                y.numpy()
            plans = [plan_json(plan) for plan, _ in device.account().plans]
            assert all(plan["tasks"].count("to_layout") == conversions for plan in plans)
            return read_copies(recorder.text())

    change = difference(ran(3), ran(1))
    assert change.unequal == ()
    assert change.added.nbytes == -2 * 1024
    assert difference(ran(3), ran(1, runs=2)).unequal == (("a", 1, 2),)


def test_the_memory_report_names_every_buffer_and_adds_up() -> None:
    with stitch.open_device("tiny") as device:
        a = device.load(scaled("a", 2.0))
        y = one(a(integers()))
        x = device.tensor(integers()).to_layout(Layout(F32, Space.DRAM))
        views = memory_views(device)
        text = device.memory_report()
        assert views == device.memory_views()
        assert set(views) == {"host", "dram", "l1"}
        for name, view in views.items():
            assert set(view) == KEYS
            table = view["block_table"]
            taken = [entry for entry in table if entry["allocated"]]
            free = [entry for entry in table if not entry["allocated"]]
            assert sum(e["size"] for e in taken) == view["total_bytes_allocated_per_bank"]
            assert sum(e["size"] for e in free) == view["total_bytes_free_per_bank"]
            assert max(e["size"] for e in free) == view["largest_contiguous_bytes_free_per_bank"]
            assert sum(e["size"] for e in table) == view["total_bytes_per_bank"]
            many = "bank" if view["num_banks"] == 1 else "banks"
            assert f"{name}: {view['num_banks']} {many} x" in text
            assert all(entry["tensor"] in text for entry in taken)
        owners = {e["tensor"] for v in views.values() for e in v["block_table"] if e["allocated"]}
        assert "output 'y' of 'a'" in owners
        assert any("constant" in owner and "'a'" in owner for owner in owners)
        table = memory_views(device)["l1"]["block_table"]
        assert any(e["address"] == y.address and e["allocated"] for e in table)
        assert x.is_allocated


def test_the_memory_report_counts_leases_apart() -> None:
    with stitch.open_device("tiny") as device:
        program = device.load(scaled("a", 2.0))
        y = one(program(integers()))
        y.numpy()
        held = memory_views(device)["l1"]
        assert held["total_bytes_leased_per_bank"] == 0
        assert "leased" not in device.memory_report()
        del y
        idle = memory_views(device)["l1"]
        size = idle["total_bytes_leased_per_bank"]
        assert size == held["total_bytes_allocated_per_bank"] > 0
        assert idle["total_bytes_allocated_per_bank"] == 0
        assert f"{size} B of the free leased" in device.memory_report()


def test_the_memory_report_ends_with_what_the_host_gave_as_explain_does() -> None:
    # The budget is the process's: what other tests' devices take counts.
    allowed = BUDGET.taken_nbytes + (64 << 20)
    with stitch.open_device("tiny", max_memory=allowed) as device:
        one(device.load(scaled("a", 2.0))(integers())).numpy()
        line = device.memory_report().splitlines()[-1]
        peak = device.host_memory.peak_nbytes
        assert line.startswith(f"host memory: at most {peak} B claimed, {allowed} B allowed")
        assert peak > 0
        assert line in device.explain()


def test_events_tell_of_plans_runs_and_reads() -> None:
    seen: list[str] = []
    with stitch.open_device("tiny") as device:
        a = device.load(scaled("a", 2.0))
        end = device.events.subscribe(lambda event: seen.append(type(event).__name__))
        for _ in range(2):
            one(a(integers())).numpy()
        end()
        one(a(integers())).numpy()
        assert not device.events.active
    assert seen == ["PlanMade", "PlanRun", "ReadBack", "PlanRun", "ReadBack"]
