"""The tables of `db.sqlite`, as ttnn writes them and ttnn-visualizer reads them, and their rows.

Names, columns and words are those of tt-metal (`ttnn/ttnn/graph_report.py`,
`ttnn/core/reports.cpp`) and of ttnn-visualizer (`report_schemas.py`: version 2 of the schema,
`models.py`, `parseMemoryConfig.ts`).
"""

from __future__ import annotations

import sqlite3
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any, final

from stitch.errors import StitchError
from stitch.files import Sink, open_file
from stitch.machine import Machine
from stitch.program import DataType, Layout, MemoryLayout, Space, TensorDesc
from stitch.version import __version__

SCHEMA_VERSION = "2"
#: The one device of a report.
DEVICE = 0
_PIECE_NBYTES = 1 << 20
#: Columns and their types, by table.
TABLES = {
    "devices": "device_id int, num_y_cores int, num_x_cores int, num_y_compute_cores int, "
    "num_x_compute_cores int, worker_l1_size int, l1_num_banks int, l1_bank_size int, "
    "address_at_first_l1_bank int, address_at_first_l1_cb_buffer int, "
    "num_banks_per_storage_core int, num_compute_cores int, num_storage_cores int, "
    "total_l1_memory int, total_l1_for_tensors int, total_l1_for_interleaved_buffers int, "
    "total_l1_for_sharded_buffers int, cb_limit int",
    "operations": "operation_id int UNIQUE, name text, duration float",
    "operation_arguments": "operation_id int, name text, value text",
    "tensors": "tensor_id int UNIQUE, shape text, dtype text, layout text, memory_config text, "
    "device_id int, address int, buffer_type int",
    "device_tensors": "tensor_id int, device_id int, address int",
    "buffers": "operation_id int, device_id int, address int, max_size_per_bank int, "
    "buffer_type int, buffer_layout int",
    "captured_graph": "operation_id int, captured_graph text",
    "nodes": "operation_id int, unique_id int, node_operation_id int, name text",
    "edges": "operation_id int, source_unique_id int, sink_unique_id int, "
    "source_output_index int, sink_input_index int, key int",
    "report_metadata": "key text UNIQUE, value text",
    "errors": "operation_id int, operation_name text, error_type text, error_message text, "
    "stack_trace text, timestamp text",
    "stack_traces": "operation_id int, stack_trace text",
    "input_tensors": "operation_id int, input_index int, tensor_id int",
    "output_tensors": "operation_id int, output_index int, tensor_id int",
    "local_tensor_comparison_records": "tensor_id int, golden_tensor_id int, matches int, "
    "desired_pcc float, actual_pcc float",
    "global_tensor_comparison_records": "tensor_id int, golden_tensor_id int, matches int, "
    "desired_pcc float, actual_pcc float",
    "buffer_pages": "operation_id int, device_id int, address int, core_y int, core_x int, "
    "bank_id int, page_index int, page_address int, page_size int, buffer_type int",
}
#: tt-metal's numbers of buffer types, and of memory layouts.
BUFFER_TYPES = {Space.DRAM: 0, Space.L1: 1, Space.HOST: 2}
BUFFER_LAYOUTS = {
    MemoryLayout.INTERLEAVED: 0,
    MemoryLayout.HEIGHT_SHARDED: 2,
    MemoryLayout.WIDTH_SHARDED: 3,
    MemoryLayout.BLOCK_SHARDED: 4,
}
_BUFFER_TYPE_NAMES = {Space.DRAM: "DRAM", Space.L1: "L1", Space.HOST: "SYSTEM_MEMORY"}
#: Types that are called otherwise there; others have no counterpart, or the same name.
_TYPE_NAMES = {DataType.BFP8: "BFLOAT8_B", DataType.BFP4: "BFLOAT4_B"}


@final
class ReportTables:
    """A database under way, in a folder that is gone with it; any thread may add rows, one at a
    time."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._path = Path(self._folder.name) / "db.sqlite"
        self._database = sqlite3.connect(self._path, check_same_thread=False)
        # It is written once, and a part of it is no use: nothing is to be undone.
        self._database.execute("PRAGMA journal_mode = OFF")
        self._database.execute("PRAGMA synchronous = OFF")
        for table, columns in TABLES.items():
            self._database.execute(f"CREATE TABLE {table} ({columns})")

    def add(self, table: str, rows: Iterable[tuple[Any, ...]]) -> None:
        """Rows with a value for each column of a table. Raises `StitchError`, as where the disk is
        full."""
        places = ", ".join("?" * (TABLES[table].count(",") + 1))
        try:
            self._database.executemany(f"INSERT INTO {table} VALUES ({places})", rows)
        except sqlite3.Error as error:
            raise StitchError(
                "cannot write the database", where=str(self._path), got=str(error),
                remedy="make room there, or set TMPDIR to a folder that has some",
            ) from error  # fmt: skip

    def finish(self, name: str, machine: Machine) -> None:
        """What the report says of itself, and of the machine."""
        self.add("devices", [device_row(machine)])
        self.add("report_metadata", [
            ("schema_version", SCHEMA_VERSION), ("producer", f"stitch {__version__}"),
            ("machine", machine.name), ("report_name", name),
        ])  # fmt: skip
        self._database.commit()

    def pour(self, sink: Sink) -> None:
        """Write the file."""
        with open_file(self._path) as file:
            while piece := file.read(_PIECE_NBYTES):
                sink.write(piece)

    def close(self) -> None:
        """Forget all of it; twice does no harm."""
        self._database.close()
        self._folder.cleanup()


def device_row(machine: Machine) -> tuple[int, ...]:
    """The row of a machine, as tt-metal's `get_device_info` finds its figures; what a machine
    without L1 has none of is 0."""
    shape = machine.shape
    rows, columns = shape.core_grid
    cores, l1 = rows * columns, shape.l1
    if l1 is None:
        return (DEVICE, rows, columns, rows, columns, 0, 0, 0, 0, 0, 0, cores, 0, 0, 0, 0, 0, 0)
    each, size = l1.capacity, l1.limit
    return (
        DEVICE, rows, columns, rows, columns, size, l1.banks, each, 0, l1.base, 1, cores, 0,
        cores * size, l1.banks * each, l1.banks * each, cores * each, each,
    )  # fmt: skip


def tensor_row(number: int, desc: TensorDesc, address: int | None) -> tuple[Any, ...]:
    """The row of a tensor; without an address it lies outside the spaces.

    >>> tensor_row(1, TensorDesc((2, 3), Layout(DataType.BFP8, Space.L1, (32, 32))), 64)[:4]
    (1, 'Shape([2, 3])', 'DataType.BFLOAT8_B', 'Layout.TILE')
    """
    layout = desc.layout
    kind = _TYPE_NAMES.get(layout.data_type, layout.data_type.value.upper())
    lies = address is not None
    return (
        number, f"Shape({list(desc.shape)})", f"DataType.{kind}",
        "Layout.TILE" if layout.is_tiled else "Layout.ROW_MAJOR",
        memory_config(layout) if lies else None, DEVICE if lies else None, address,
        BUFFER_TYPES[layout.space] if lies else None,
    )  # fmt: skip


def memory_config(layout: Layout) -> str:
    """Where a tensor lies, as tt-metal prints it.

    >>> memory_config(Layout(DataType.FLOAT32, Space.DRAM)).split(",")[1]
    'buffer_type=BufferType::DRAM'
    """
    shards, spec = "std::nullopt", layout.shard_spec
    if spec is not None:
        rows, columns = spec.core_grid
        grid = f"[(x=0,y=0) - (x={columns - 1},y={rows - 1})]"
        shards = (
            f"ShardSpec(grid={{{grid}}},shape={{{spec.shape[0]}, {spec.shape[1]}}},"
            f"orientation=ShardOrientation::{spec.orientation.name},halo=0)"
        )
    return (
        f"MemoryConfig(memory_layout=TensorMemoryLayout::{layout.memory_layout.name},"
        f"buffer_type=BufferType::{_BUFFER_TYPE_NAMES[layout.space]},shard_spec={shards})"
    )
