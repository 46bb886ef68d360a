"""`VisualizerFolder`: a device's work as the folder that ttnn-visualizer opens.

Table names, columns and values are those of tt-metal (`ttnn/ttnn/graph_report.py`,
`ttnn/core/reports.cpp`) and of ttnn-visualizer (`report_schemas.py`: version 2 of the schema,
`models.py`, `parseMemoryConfig.ts`).
"""

from __future__ import annotations

import json
import sqlite3
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from stitch.argument_kinds import PATH, takes
from stitch.errors import StitchError
from stitch.files import OutputFiles, Sink, make_folder, open_file, resolved
from stitch.machine import Machine
from stitch.planner import Allocate, Buffer, Copy, Execute, Free, Instance, Relocate
from stitch.program import DataType, Layout, MemoryLayout, Space, TensorDesc
from stitch.report.device import DEVICE
from stitch.report.event_report import EventRecord, EventReport
from stitch.report.explanation import WRITTEN, Place, touched_at_start, touched_buffers
from stitch.runtime import Lying, PlanRun, PlanStopped, RuntimeDevice, Written
from stitch.version import __version__

# The tables of `db.sqlite`.

SCHEMA_VERSION = "2"
#: The one device of a report.
DEVICE_ID = 0
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
#: Types with other names in ttnn.
_TYPE_NAMES = {DataType.BFP8: "BFLOAT8_B", DataType.BFP4: "BFLOAT4_B"}


@final
class ReportTables:
    """A database in a temporary folder; one thread at a time may add rows."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._path = Path(self._folder.name) / "db.sqlite"
        self._database = sqlite3.connect(self._path, check_same_thread=False)
        # Written once and useless if incomplete: no transactions.
        self._database.execute("PRAGMA journal_mode = OFF")
        self._database.execute("PRAGMA synchronous = OFF")
        for table, columns in TABLES.items():
            self._database.execute(f"CREATE TABLE {table} ({columns})")

    def add(self, table: str, rows: Iterable[tuple[Any, ...]]) -> None:
        """Add rows to a table; raise `StitchError`, for example if the disk is full."""
        values = ", ".join("?" * (TABLES[table].count(",") + 1))
        try:
            self._database.executemany(f"INSERT INTO {table} VALUES ({values})", rows)
        except sqlite3.Error as error:
            raise StitchError(
                "cannot write the database", where=str(self._path), got=str(error),
                remedy="free disk space there, or set TMPDIR to another folder",
            ) from error  # fmt: skip

    def finish(self, name: str, machine: Machine) -> None:
        """Add the metadata of the report and the machine."""
        self.add("devices", [device_row(machine)])
        self.add("report_metadata", [
            ("schema_version", SCHEMA_VERSION), ("producer", f"stitch {__version__}"),
            ("machine", machine.name), ("report_name", name),
        ])  # fmt: skip
        self._database.commit()

    def copy_to(self, sink: Sink) -> None:
        """Write the file."""
        with open_file(self._path) as file:
            while piece := file.read(_PIECE_NBYTES):
                sink.write(piece)

    def close(self) -> None:
        """Delete the database; may be called twice."""
        self._database.close()
        self._folder.cleanup()


def device_row(machine: Machine) -> tuple[int, ...]:
    """Return the row of a machine with the figures of tt-metal's `get_device_info`."""
    shape = machine.shape
    rows, columns = shape.core_grid
    cores, l1 = rows * columns, shape.l1
    if l1 is None:
        return (DEVICE_ID, rows, columns, rows, columns, 0, 0, 0, 0, 0, 0, cores, 0, 0, 0, 0, 0, 0)
    each, size = l1.capacity, l1.limit
    return (
        DEVICE_ID, rows, columns, rows, columns, size, l1.banks, each, 0, l1.base, 1, cores, 0,
        cores * size, l1.banks * each, l1.banks * each, cores * each, each,
    )  # fmt: skip


def tensor_row(number: int, desc: TensorDesc, address: int | None) -> tuple[Any, ...]:
    """Return the row of a tensor; a host array has no address.

    >>> tensor_row(1, TensorDesc((2, 3), Layout(DataType.BFP8, Space.L1, (32, 32))), 64)[:4]
    (1, 'Shape([2, 3])', 'DataType.BFLOAT8_B', 'Layout.TILE')
    """
    layout = desc.layout
    kind = _TYPE_NAMES.get(layout.data_type, layout.data_type.value.upper())
    is_allocated = address is not None
    return (
        number, f"Shape({list(desc.shape)})", f"DataType.{kind}",
        "Layout.TILE" if layout.is_tiled else "Layout.ROW_MAJOR",
        memory_config(layout) if is_allocated else None, DEVICE_ID if is_allocated else None,
        address, BUFFER_TYPES[layout.space] if is_allocated else None,
    )  # fmt: skip


def memory_config(layout: Layout) -> str:
    """Return a layout as tt-metal prints its memory config.

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


# Rows: one operation for each program run, copy and move.


@dataclass(frozen=True, slots=True)
class _Where:
    """The key of a tensor; `place` is its buffer's address, or the number of a host array."""

    place: Place | int
    offset_nbytes: int
    desc: TensorDesc


class StepRows:
    """Converts events to rows; keeps the present buffers and tensors."""

    def __init__(self, tables: ReportTables) -> None:
        self._tables = tables
        self._operations = self._tensors = 0
        #: The sizes of the present buffers, and their memory layouts, if known.
        self._sizes: dict[Place, int] = {}
        self._layouts: dict[Place, MemoryLayout] = {}
        #: The numbers of the present tensors.
        self._numbers: dict[_Where, int] = {}

    def plan(self, event: PlanRun | PlanStopped, contents: Sequence[Lying] | None) -> None:
        """Add a plan that ran or stopped (then the memory contents are unknown)."""
        plan = event.plan
        started = touched_at_start(plan)
        if contents is not None:
            ended = touched_buffers(plan, plan.final_buffers)
            self._update(
                {one.place: one.size for one in contents if one.place not in ended}
                | {place: buffer.size_per_bank for place, buffer in started.items()}
            )
        buffers = {buffer.number: buffer for buffer in plan.request.buffers}
        for buffer in buffers.values():
            self._note_layout(buffer)
        run = _Run(self, event, buffers)
        numbers = event.steps if isinstance(event, PlanStopped) else range(len(plan.steps))
        for number in numbers:
            run.step(number)
        if contents is not None:
            self._update({one.place: one.size for one in contents})
        # Host arrays are those of one run.
        self._numbers = {w: t for w, t in self._numbers.items() if isinstance(w.place, tuple)}

    def written(self, event: Written) -> None:
        """Add a write of the host."""
        arguments = [("nbytes", event.nbytes), ("target", event.desc.text()), ("reason", WRITTEN)]
        self.operation("write", event.seconds, arguments, (), ())

    def operation(
        self, name: str, seconds: float, arguments: Iterable[tuple[str, object]],
        inputs: Iterable[int], outputs: Iterable[int],
    ) -> None:  # fmt: skip
        """Add an operation with its tensors, and the buffers after it."""
        self._operations += 1
        own = self._operations
        self._tables.add("operations", [(own, name, seconds)])
        self._tables.add(
            "operation_arguments", [(own, key, str(value)) for key, value in arguments]
        )
        self._tables.add("input_tensors", [(own, i, t) for i, t in enumerate(inputs)])
        self._tables.add("output_tensors", [(own, i, t) for i, t in enumerate(outputs)])
        self._tables.add("buffers", [
            (own, DEVICE_ID, address, size, BUFFER_TYPES[space],
             BUFFER_LAYOUTS[self._layouts.get((space, address), MemoryLayout.INTERLEAVED)])
            for (space, address), size in self._sizes.items()
        ])  # fmt: skip

    def tensor(self, where: _Where, *, is_new: bool) -> int:
        """Return the number of a tensor, a new one for an output."""
        number = self._numbers.get(where)
        if number is None or is_new:
            if is_new:
                self._forget({where.place}, where.offset_nbytes)  # The overwritten tensor.
            self._tensors += 1
            number = self._numbers[where] = self._tensors
            place = where.place
            address = place[1] + where.offset_nbytes if isinstance(place, tuple) else None
            self._tables.add("tensors", [tensor_row(number, where.desc, address)])
            if address is not None:
                self._tables.add("device_tensors", [(number, DEVICE_ID, address)])
        return number

    def allocate(self, buffer: Buffer) -> None:
        """Add an allocated buffer."""
        if buffer.address is not None:
            place = buffer.space, buffer.address
            self._forget({place})
            self._sizes[place] = buffer.size_per_bank
            self._note_layout(buffer)

    def free(self, place: Place) -> None:
        """Remove a freed buffer."""
        self._sizes.pop(place, None)
        self._layouts.pop(place, None)
        self._forget({place})

    def _note_layout(self, buffer: Buffer) -> None:
        if buffer.address is not None:
            place = buffer.space, buffer.address
            self._layouts[place] = buffer.desc.layout.memory_layout

    def _update(self, sizes: dict[Place, int]) -> None:
        """Replace the present buffers."""
        freed = {place for place, size in self._sizes.items() if sizes.get(place) != size}
        for place in freed:
            self._layouts.pop(place, None)
        if freed:
            self._forget(freed)
        self._sizes = sizes

    def _forget(self, places: set[Place] | set[Place | int], offset: int | None = None) -> None:
        self._numbers = {
            where: tensor
            for where, tensor in self._numbers.items()
            if where.place not in places or offset not in (None, where.offset_nbytes)
        }


class _Run:
    """Adds the steps of one run of a plan."""

    def __init__(
        self, rows: StepRows, event: PlanRun | PlanStopped, buffers: dict[int, Buffer]
    ) -> None:
        self._rows, self._index, self._plan = rows, event.index, event.plan
        self._buffers = buffers

    def step(self, number: int) -> None:
        """Add a step."""
        step = self._plan.steps[number]
        if isinstance(step, Allocate):
            self._buffers[step.buffer.number] = step.buffer
            self._rows.allocate(step.buffer)
        elif isinstance(step, Free):
            buffer = self._buffers[step.buffer]
            if buffer.address is not None:
                self._rows.free((buffer.space, buffer.address))
        elif isinstance(step, Copy):
            self._copy(step)
        elif isinstance(step, Relocate):
            self._relocate(step)
        else:
            self._execute(step)

    def _copy(self, step: Copy) -> None:
        arguments = [
            ("plan", self._index), ("nbytes", step.nbytes), ("source", step.source.desc.text()),
            ("target", step.target.desc.text()), ("reason", step.reason),
        ]  # fmt: skip
        inputs = [self._tensor(step.source)]
        outputs = [self._tensor(step.target, is_new=True)]
        self._rows.operation(step.kind, step.seconds, arguments, inputs, outputs)

    def _relocate(self, step: Relocate) -> None:
        kind = "move" if step.stage is None else "bounce"
        arguments = [
            ("plan", self._index), ("nbytes", step.nbytes), ("tensors", step.count),
            ("space", step.space.value), ("reason", step.reason),
        ]  # fmt: skip
        moved = [(self._buffers[number], number, address) for number, address in step.targets]
        whole = [Instance(number, 0, buffer.desc) for buffer, number, _ in moved]
        inputs = [self._tensor(instance) for instance in whole]
        for buffer, _, _ in moved:
            assert buffer.address is not None
            self._rows.free((buffer.space, buffer.address))
        for buffer, number, address in moved:
            self._buffers[number] = buffer.where({number: address})
            self._rows.allocate(self._buffers[number])
        outputs = [self._tensor(instance, is_new=True) for instance in whole]
        self._rows.operation(kind, step.seconds, arguments, inputs, outputs)

    def _execute(self, step: Execute) -> None:
        work = self._plan.request.tasks[step.task].transformation
        arguments: list[tuple[str, object]] = [("plan", self._index), ("kind", work.kind.value)]
        if step.scratch is not None:
            space, address, size = step.scratch
            arguments.append(("scratch", f"{space.value} [{address:#x}, {address + size:#x})"))
        inputs = [self._tensor(instance) for instance in step.inputs]
        outputs = [self._tensor(instance, is_new=True) for instance in step.outputs]
        self._rows.operation(work.name, work.seconds, arguments, inputs, outputs)

    def _tensor(self, instance: Instance, *, is_new: bool = False) -> int:
        buffer = self._buffers[instance.buffer]
        place = buffer.number if buffer.address is None else (buffer.space, buffer.address)
        where = _Where(place, instance.offset_nbytes, instance.desc)
        return self._rows.tensor(where, is_new=is_new)


# The folder.

DATABASE = "db.sqlite"
CONFIG = "config.json"


@final
class VisualizerFolder(EventReport):
    """Observes a device until `close`, which writes the folder; a context manager.

    An operation is a program run, a copy, a move, or a write of the host, with its simulated time;
    `buffers` has the buffers after it. Create it before programs are loaded, so that it has their
    constants.
    """

    batch = 256

    @takes(device=DEVICE, folder=PATH)
    def __init__(self, device: RuntimeDevice, folder: str | Path) -> None:
        self._folder = Path(folder)
        self._tables = ReportTables()
        self._rows = StepRows(self._tables)
        super().__init__(device)

    def _convert(self, record: EventRecord) -> None:
        if isinstance(record.event, Written):
            self._rows.written(record.event)
        elif isinstance(record.event, PlanRun | PlanStopped):
            self._rows.plan(record.event, record.contents)

    def _add_files(self, files: OutputFiles) -> None:
        name = resolved(self._folder).name
        self._tables.finish(name, self._device.machine)
        make_folder(self._folder)
        files[self._folder / DATABASE] = self._tables.copy_to
        files[self._folder / CONFIG] = json.dumps(_config(name), indent=2) + "\n"

    def _discard(self) -> None:
        self._tables.close()


def _config(name: str) -> dict[str, object]:
    """Return ttnn's configuration of a report with these contents."""
    return {
        "report_name": name,
        "enable_logging": True,
        "enable_graph_report": False,
        "enable_detailed_buffer_report": False,
        "enable_detailed_tensor_report": False,
        "enable_comparison_mode": False,
    }
