"""`VisualizerFolder`: a device's work as the folder that ttnn-visualizer opens.

Table names, columns and values are those of tt-metal (`ttnn/ttnn/graph_report.py`,
`ttnn/core/reports.cpp`) and of ttnn-visualizer (`report_schemas.py`: version 2 of the schema,
`models.py`, `parseMemoryConfig.ts`). Observes only: events are kept while the device works, and
turned into rows in batches; memory holds one batch.
"""

from __future__ import annotations

import json
import sqlite3
import tempfile
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple, Self, final

from stitch.argument_kinds import PATH, takes
from stitch.errors import StitchError
from stitch.files import OutputFiles, Sink, make_folder, open_file, resolved, write_added
from stitch.machine import Machine
from stitch.planner import Allocate, Buffer, Copy, Execute, Free, Instance, Relocate
from stitch.program import DataType, Layout, MemoryLayout, Space, TensorDesc
from stitch.report.device import DEVICE
from stitch.report.explanation import WRITTEN, Place, assign_arenas, own_at_start
from stitch.runtime import Event, Lying, PlanRun, PlanStopped, RuntimeDevice, Written
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

    def copy_to(self, sink: Sink) -> None:
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
        return (DEVICE_ID, rows, columns, rows, columns, 0, 0, 0, 0, 0, 0, cores, 0, 0, 0, 0, 0, 0)
    each, size = l1.capacity, l1.limit
    return (
        DEVICE_ID, rows, columns, rows, columns, size, l1.banks, each, 0, l1.base, 1, cores, 0,
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
        memory_config(layout) if lies else None, DEVICE_ID if lies else None, address,
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


# Rows: one operation for each program run, copy and move.


@dataclass(frozen=True, slots=True)
class _Where:
    """A place in a buffer: the key of a tensor, together with its descriptor."""

    place: Place | int
    offset_nbytes: int
    desc: TensorDesc


class ToldSteps:
    """What is known of a device after so many events."""

    def __init__(self, tables: ReportTables) -> None:
        self._tables = tables
        self._operations = self._tensors = 0
        #: What lies in the spaces, and how it is spread, where that is known.
        self._lying: dict[Place, int] = {}
        self._layouts: dict[Place, MemoryLayout] = {}
        #: The tensor that was last made, or first read, at a place.
        self._known: dict[_Where, int] = {}

    def plan(self, event: PlanRun | PlanStopped, lying: Sequence[Lying] | None) -> None:
        """A plan ran, or stopped half-way (and then nobody knows what lies where)."""
        plan = event.plan
        started = own_at_start(plan)
        if lying is not None:
            ended = assign_arenas(plan, plan.final_buffers)
            self._become(
                {one.place: one.size for one in lying if one.place not in ended}
                | {place: buffer.size_per_bank for place, buffer in started.items()}
            )
        buffers = {buffer.number: buffer for buffer in plan.request.buffers}
        for buffer in buffers.values():
            self._lay_out(buffer)
        run = _Run(self, event, buffers)
        numbers = event.steps if isinstance(event, PlanStopped) else range(len(plan.steps))
        for number in numbers:
            run.step(number)
        if lying is not None:
            self._become({one.place: one.size for one in lying})
        # Arrays of the host's are those of one run.
        self._known = {w: t for w, t in self._known.items() if isinstance(w.place, tuple)}

    def written(self, event: Written) -> None:
        """The host overwrote a tensor."""
        arguments = [("nbytes", event.nbytes), ("target", event.desc.text()), ("reason", WRITTEN)]
        self.operation("write", event.seconds, arguments, (), ())

    def operation(
        self, name: str, seconds: float, arguments: Iterable[tuple[str, object]],
        read: Iterable[int], made: Iterable[int],
    ) -> None:  # fmt: skip
        """Something was done; what lies in the spaces is what lay there when it had been."""
        self._operations += 1
        own = self._operations
        self._tables.add("operations", [(own, name, seconds)])
        self._tables.add(
            "operation_arguments", [(own, key, str(value)) for key, value in arguments]
        )
        self._tables.add("input_tensors", [(own, i, t) for i, t in enumerate(read)])
        self._tables.add("output_tensors", [(own, i, t) for i, t in enumerate(made)])
        self._tables.add("buffers", [
            (own, DEVICE_ID, address, size, BUFFER_TYPES[space],
             BUFFER_LAYOUTS[self._layouts.get((space, address), MemoryLayout.INTERLEAVED)])
            for (space, address), size in self._lying.items()
        ])  # fmt: skip

    def tensor(self, where: _Where, *, is_new: bool) -> int:
        """The number of the tensor that lies there; `is_new`: it was made just now."""
        number = self._known.get(where)
        if number is None or is_new:
            if is_new:
                # Whatever lay in these bytes before is another tensor.
                self._forget({where.place}, where.offset_nbytes)
            self._tensors += 1
            number = self._known[where] = self._tensors
            place = where.place
            address = place[1] + where.offset_nbytes if isinstance(place, tuple) else None
            self._tables.add("tensors", [tensor_row(number, where.desc, address)])
            if address is not None:
                self._tables.add("device_tensors", [(number, DEVICE_ID, address)])
        return number

    def allocate(self, buffer: Buffer) -> None:
        """A buffer takes its place."""
        if buffer.address is not None:
            place = buffer.space, buffer.address
            self._forget({place})
            self._lying[place] = buffer.size_per_bank
            self._lay_out(buffer)

    def free(self, place: Place) -> None:
        """Nothing lies there any more."""
        self._lying.pop(place, None)
        self._layouts.pop(place, None)
        self._forget({place})

    def _lay_out(self, buffer: Buffer) -> None:
        if buffer.address is not None:
            place = buffer.space, buffer.address
            self._layouts[place] = buffer.desc.layout.memory_layout

    def _become(self, lying: dict[Place, int]) -> None:
        """This is what lies in the spaces now."""
        gone = {place for place, size in self._lying.items() if lying.get(place) != size}
        for place in gone:
            self._layouts.pop(place, None)
        if gone:
            self._forget(gone)
        self._lying = lying

    def _forget(self, places: set[Place] | set[Place | int], offset: int | None = None) -> None:
        self._known = {
            where: tensor
            for where, tensor in self._known.items()
            if where.place not in places or offset not in (None, where.offset_nbytes)
        }


class _Run:
    """The steps of one run of a plan, as they are told."""

    def __init__(
        self, told: ToldSteps, event: PlanRun | PlanStopped, buffers: dict[int, Buffer]
    ) -> None:
        self._told, self._index, self._plan = told, event.index, event.plan
        self._buffers = buffers

    def step(self, number: int) -> None:
        """One more step."""
        step = self._plan.steps[number]
        if isinstance(step, Allocate):
            self._buffers[step.buffer.number] = step.buffer
            self._told.allocate(step.buffer)
        elif isinstance(step, Free):
            buffer = self._buffers[step.buffer]
            if buffer.address is not None:
                self._told.free((buffer.space, buffer.address))
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
        read = [self._tensor(step.source)]
        made = [self._tensor(step.target, is_new=True)]
        self._told.operation(step.kind, step.seconds, arguments, read, made)

    def _relocate(self, step: Relocate) -> None:
        kind = "move" if step.stage is None else "bounce"
        arguments = [
            ("plan", self._index), ("nbytes", step.nbytes), ("tensors", step.count),
            ("space", step.space.value), ("reason", step.reason),
        ]  # fmt: skip
        moved = [(self._buffers[number], number, address) for number, address in step.targets]
        whole = [Instance(number, 0, buffer.desc) for buffer, number, _ in moved]
        read = [self._tensor(instance) for instance in whole]
        for buffer, _, _ in moved:
            assert buffer.address is not None
            self._told.free((buffer.space, buffer.address))
        for buffer, number, address in moved:
            self._buffers[number] = buffer.where({number: address})
            self._told.allocate(self._buffers[number])
        made = [self._tensor(instance, is_new=True) for instance in whole]
        self._told.operation(kind, step.seconds, arguments, read, made)

    def _execute(self, step: Execute) -> None:
        what = self._plan.request.tasks[step.task].transformation
        arguments: list[tuple[str, object]] = [("plan", self._index), ("kind", what.kind.value)]
        if step.scratch is not None:
            space, address, size = step.scratch
            arguments.append(("scratch", f"{space.value} [{address:#x}, {address + size:#x})"))
        read = [self._tensor(instance) for instance in step.inputs]
        made = [self._tensor(instance, is_new=True) for instance in step.outputs]
        self._told.operation(what.name, what.seconds, arguments, read, made)

    def _tensor(self, instance: Instance, *, is_new: bool = False) -> int:
        buffer = self._buffers[instance.buffer]
        place = buffer.number if buffer.address is None else (buffer.space, buffer.address)
        where = _Where(place, instance.offset_nbytes, instance.desc)
        return self._told.tensor(where, is_new=is_new)


# The folder.

DATABASE = "db.sqlite"
CONFIG = "config.json"

#: Events of a device after which rows are written.
BATCH = 256


class _Heard(NamedTuple):
    event: PlanRun | PlanStopped | Written
    lying: tuple[Lying, ...] | None


class VisualizerFolder:
    """Subscribes to a device until `close`, which writes the folder; use it as a context manager.

    An operation is a program run, a copy, a move, or a write of the host, with its simulated time;
    `buffers` is what lies in the spaces when it has run. Subscribe before programs are loaded, so
    that their constants are seen.
    """

    @takes(device=DEVICE, folder=PATH)
    def __init__(self, device: RuntimeDevice, folder: str | Path) -> None:
        """Raises `UsageError`."""
        self._device, self._folder = device, Path(folder)
        self._tables = ReportTables()
        self._steps = ToldSteps(self._tables)
        self._memory = device.watch_memory()
        self._seen: deque[_Heard] = deque()
        self._is_busy = Lock()
        self._unsubscribe = device.events.subscribe(self._on_event)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Listen no more, and write the folder. Raises `StitchError`."""
        write_added(self.add_to, self.forget)

    def forget(self) -> None:
        """Listen no more, and write nothing; twice does no harm."""
        self._unsubscribe()
        self._tables.close()

    def add_to(self, batch: OutputFiles) -> None:
        """Listen no more, and add the files to those that a batch is going to write; `forget` it
        when that has happened."""
        self._unsubscribe()
        self._write()
        name = resolved(self._folder).name
        self._tables.finish(name, self._device.machine)
        make_folder(self._folder)
        batch.add(self._folder / DATABASE, self._tables.copy_to)
        batch.add(self._folder / CONFIG, json.dumps(_config(name), indent=2) + "\n")

    def _on_event(self, event: Event) -> None:
        if not isinstance(event, PlanRun | PlanStopped | Written):
            return
        lying = self._memory.now() if isinstance(event, PlanRun) else None
        self._seen.append(_Heard(event, lying))
        if len(self._seen) >= BATCH:
            self._write()

    def _write(self) -> None:
        """Make rows of what was kept."""
        # Whoever comes in between, a signal handler of this thread perhaps, leaves it to this call.
        if not self._is_busy.acquire(blocking=False):
            return
        try:
            while self._seen:
                event, lying = self._seen.popleft()
                if isinstance(event, Written):
                    self._steps.written(event)
                else:
                    self._steps.plan(event, lying)
        finally:
            self._is_busy.release()


def _config(name: str) -> dict[str, object]:
    """What ttnn would have been told to report: what is in the folder, and what is not."""
    return {
        "report_name": name,
        "enable_logging": True,
        "enable_graph_report": False,
        "enable_detailed_buffer_report": False,
        "enable_detailed_tensor_report": False,
        "enable_comparison_mode": False,
    }
