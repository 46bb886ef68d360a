"""What Tenstorrent's own tests and reports say of layouts and addresses, of both shipped machines.

Each case stands in `tenstorrent/*.json` beside its source: shapes and figures are theirs.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import stitch
from stitch.errors import LayoutError, OutOfMemoryError
from stitch.machine import Machine, Policy, footprint, load_machine
from stitch.machine import parse_machine as parse
from stitch.machine.shipped import shipped_text
from stitch.memory import Allocator
from stitch.program import DataType, Layout, MemoryLayout, ShardSpec, Space, TensorDesc

HERE = Path(__file__).resolve().parent / "tenstorrent"
Case = dict[str, Any]
LAYOUTS: list[Case] = json.loads((HERE / "layouts.json").read_text())
FREE_LISTS: list[Case] = json.loads((HERE / "free_lists.json").read_text())
ON_MACHINES = [(case, machine) for case in LAYOUTS for machine in case["machines"]]
FIGURES = ("pages", "page_nbytes", "aligned_page_nbytes", "size_per_bank")


def name_of(case: Case) -> str:
    kind = "tiled" if case["tile"] else "row-major"
    return f"{case['shape']} {case['type']} {kind} {case.get('layout', 'interleaved')}"


def desc_of(case: Case) -> TensorDesc:
    spec = None
    if "shard" in case:
        spec = ShardSpec(tuple(case["grid"]), tuple(case["shard"]))
    return TensorDesc(
        tuple(case["shape"]),
        Layout(
            DataType(case["type"]), Space(case["space"]), case["tile"] and tuple(case["tile"]),
            MemoryLayout(case.get("layout", "interleaved")), spec,
        ),
    )  # fmt: skip


def first_fit(machine: str) -> Machine:
    """A shipped machine whose L1 and DRAM take the first hole that fits, as devices do."""
    text = shipped_text(machine)
    for space in ("dram", "l1"):
        text = text.replace(f"\n{space}:\n", f"\n{space}:\n  policy: first_fit\n")
    return parse(text.encode(), "first_fit.yaml")


@pytest.mark.parametrize(("case", "machine"), ON_MACHINES, ids=str)
def test_a_layout_is_as_it_was_published(case: Case, machine: str) -> None:
    shape = load_machine(machine).shape
    if "illegal" in case:
        with pytest.raises(LayoutError):
            footprint(desc_of(case), shape)
        return
    desc = desc_of(case)
    taken = footprint(desc, shape)
    if "physical" in case:
        rows, columns = desc.rows_and_columns
        height, width = case["tile"] or (1, 1)
        physical = [rows, -(-columns // width) * width]
        assert (physical, rows % height) == (case["physical"], 0)
    for figure in FIGURES:
        if figure in case:
            assert getattr(taken, figure) == case[figure], figure


@pytest.mark.parametrize(
    ("case", "machine"), [pair for pair in ON_MACHINES if "addresses" in pair[0]], ids=str
)
@pytest.mark.parametrize("policy", ["best_fit", "first_fit"])
def test_tensors_lie_where_a_device_puts_them(case: Case, machine: str, policy: str) -> None:
    target = first_fit(machine) if policy == "first_fit" else load_machine(machine)
    with stitch.open_device(target) as device:
        tensors = [device.empty(desc_of(case)) for _ in case["addresses"]]
        assert [tensor.address for tensor in tensors] == case["addresses"]


@pytest.mark.parametrize("case", FREE_LISTS, ids=lambda case: str(case["name"]))
def test_a_free_list_gives_the_published_addresses(case: Case) -> None:
    policy = Policy(case["policy"])
    allocator = Allocator(case["base"], case["limit"], case["granule"], policy)
    for number, step in enumerate(case["steps"]):
        if step["do"] == "alloc":
            address = allocator.try_alloc(step["size"], low=step["low"])
            assert address == step["address"], f"step {number}: {step}"
        elif step["do"] == "free":
            allocator.free(step["address"])
        elif step["do"] == "clear":
            allocator.become(())
        elif step["free"]:
            allocator.alloc_at(step["address"], step["size"])
        else:
            with pytest.raises(OutOfMemoryError):
                allocator.alloc_at(step["address"], step["size"])
        allocator.check()


def test_by_first_fit_dram_fills_from_the_bottom_up_and_l1_from_the_top_down() -> None:
    """`tech_reports/memory/allocator.md` of tt-metal, 3."""
    machine = first_fit("wormhole_n150")
    l1, dram = machine.shape.l1, machine.shape.dram
    assert l1 is not None and dram is not None
    with stitch.open_device(machine) as device:
        row = TensorDesc((1, 8), Layout(DataType.FLOAT32, Space.DRAM))
        above = TensorDesc((1, 8), Layout(DataType.FLOAT32, Space.L1))
        lying = [device.empty(desc) for desc in (row, row, above, above)]
        assert [t.address for t in lying] == [
            dram.base, dram.base + 32, l1.limit - 32, l1.limit - 64
        ]  # fmt: skip


def test_every_published_case_names_its_source() -> None:
    assert all(case["source"].startswith("tenstorrent/") for case in (*LAYOUTS, *FREE_LISTS))
    assert len(LAYOUTS) + len(FREE_LISTS) >= 40
