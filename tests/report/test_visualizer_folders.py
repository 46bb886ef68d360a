"""The folder that ttnn-visualizer opens, read back: it counts what all other reports count."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import stitch
from stitch.errors import StitchError
from stitch.machine import load_machine
from stitch.program import Space
from stitch.report import VisualizerFolder, memory_views
from stitch.report.visualizer import (
    BUFFER_TYPES,
    TABLES,
    ReportTables,
)
from stitch.runtime import RuntimeDevice
from tests.support.machines import without_path
from tests.support.report_database import check_references, copies_told, rows
from tests.support.stitched_models import integers, one, scaled, tiny

SHAPE = (8, 64)


def last_buffers(folder: Path) -> dict[int, int]:
    """Bytes per bank that lie in each space when the last operation has run."""
    return dict(
        rows(
            folder,
            "SELECT buffer_type, SUM(max_size_per_bank) FROM buffers WHERE operation_id = "
            "(SELECT MAX(operation_id) FROM operations) GROUP BY buffer_type",
        )
    )


def allocated(device: RuntimeDevice) -> dict[int, int]:
    """The same, as the memory report says."""
    views = memory_views(device)
    each = {
        BUFFER_TYPES[space]: views[space.value]["total_bytes_allocated_per_bank"]
        for space in device.machine.shape.spaces
    }
    return {kind: nbytes for kind, nbytes in each.items() if nbytes}


@pytest.mark.parametrize("window", [1, 64])
@pytest.mark.parametrize("debug", [False, True])
def test_it_counts_copies_times_and_memory_as_the_reports_do(
    tmp_path: Path, window: int, debug: bool
) -> None:
    machine = tiny(l1_nbytes=6144)
    placement = ("input.x.space=l1", "output.y.space=l1")
    with stitch.open_device(machine, window=window, debug=debug) as device:
        with VisualizerFolder(device, tmp_path / "report"):
            a = device.load(scaled("a", 2.0, SHAPE, target=machine, placement=placement))
            b = device.load(
                scaled("b", 3.0, SHAPE, target=machine, placement=("input.x.layout=tile",))
            )
            held = [one(b(one(a(integers(SHAPE, i))))) for i in range(6)]
            held += [one(a(held[0])) for _ in range(4)]
            stitch.wait(held)
            total, use = device.account().total, allocated(device)
        folder = tmp_path / "report"
        assert copies_told(folder) == (total.copies, total.nbytes)
        (seconds,) = rows(folder, "SELECT SUM(duration) FROM operations")[0]
        assert seconds == pytest.approx(total.seconds + total.program_seconds)
        programs = rows(folder, "SELECT COUNT(*) FROM operations WHERE name IN ('a', 'b')")
        assert programs == [(total.programs,)]
        assert last_buffers(folder) == use
        check_references(folder)
        del held


@pytest.mark.parametrize("kind", ["move", "bounce"])
def test_a_tensor_that_moves_is_another_one_at_another_address(tmp_path: Path, kind: str) -> None:
    machine = tiny(l1_nbytes=2048)
    if kind == "bounce":
        machine = without_path(machine, Space.L1, Space.L1)
    placement = ("input.x.space=l1", "output.y.space=l1")
    with stitch.open_device(machine) as device:
        with VisualizerFolder(device, tmp_path):
            a = device.load(scaled("a", 2.0, SHAPE, target=machine, placement=placement))
            fixed = (*placement, "input.x.address=0xa00")
            b = device.load(scaled("b", 3.0, SHAPE, target=machine, placement=fixed))
            held = [one(a(integers(SHAPE, i))) for i in range(5)]
            stitch.wait(one(b(held[-1])))
            total = device.account().total
        del held
    (number, *_), *_ = rows(tmp_path, f"SELECT * FROM operations WHERE name = '{kind}'")
    query = "SELECT address FROM {} JOIN tensors USING (tensor_id) WHERE operation_id = {}"
    before = rows(tmp_path, query.format("input_tensors", number))
    after = rows(tmp_path, query.format("output_tensors", number))
    assert len(before) == len(after) > 0
    assert all(old != new for old, new in zip(before, after, strict=True))
    assert copies_told(tmp_path) == (total.copies, total.nbytes)
    check_references(tmp_path)


def test_what_the_host_writes_and_a_failed_plan_did_is_there(tmp_path: Path) -> None:
    def fail(context: Any) -> None:
        raise ValueError("told to")

    with stitch.open_device("tiny") as device:
        with VisualizerFolder(device, tmp_path):
            a = device.load(scaled("a", 2.0, SHAPE, placement=("input.x.space=l1",)))
            y = one(a(integers(SHAPE)))
            device.write(y, integers(SHAPE))
            with (
                device.hooks.registered({"before_program": fail}),
                pytest.raises(ValueError, match="told to"),
            ):
                one(a(integers(SHAPE, 3))).numpy()
            total = device.account().total
        del y
    assert copies_told(tmp_path) == (total.copies, total.nbytes)
    assert ("write",) in rows(tmp_path, "SELECT name FROM operations")


def test_the_device_row_is_what_tt_metal_would_say(tmp_path: Path) -> None:
    with stitch.open_device("wormhole_n150", executor="null") as device:
        VisualizerFolder(device, tmp_path).close()
    names = [column.split()[0] for column in TABLES["devices"].split(", ")]
    device_row = dict(zip(names, rows(tmp_path, "SELECT * FROM devices")[0], strict=True))
    l1 = load_machine("wormhole_n150").shape.l1
    assert l1 is not None
    assert device_row["l1_num_banks"] == device_row["num_compute_cores"] == 64
    assert device_row["address_at_first_l1_cb_buffer"] == l1.base
    assert device_row["cb_limit"] == l1.limit - l1.base
    assert device_row["total_l1_for_sharded_buffers"] == 64 * l1.capacity


def test_a_database_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    tables = ReportTables()
    tables.close()
    with pytest.raises(StitchError, match="cannot write the database"):
        tables.add("operations", [(1, "a", 0.0)])
