"""`open_mesh`, `Mesh` and `MeshGraph`: task graphs on several devices, with the bits of one.

A graph is cut into pieces; a call sends one message for each piece, and at most `in_flight` calls
are under way. Values travel between the servers, not through the client, each once per link.
"""

from __future__ import annotations

import inspect
import itertools
import json
import math
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, wraps
from pathlib import Path
from threading import RLock
from typing import Any, ParamSpec, Self, TypedDict, TypeVar

from stitch.argument_kinds import (
    BOOL,
    MAPPING,
    PATH,
    TEXT,
    WHOLE,
    WORDS,
    arranged,
    either,
    instance_of,
    optional,
    takes,
)
from stitch.errors import OutOfMemoryError, TaskError, UsageError
from stitch.files import write_files
from stitch.machine import Machine
from stitch.mesh.carrier import Carrier
from stitch.mesh.client import (
    MAX_RECORDS,
    Entry,
    MeshClient,
    PreparedPiece,
    RemoteValue,
    sha256_of,
)
from stitch.mesh.local_carrier import LocalCarrier
from stitch.mesh.messages import (
    Report,
    RunRecord,
    Source,
    Target,
    from_wire,
    to_wire,
    wire_dtype,
)
from stitch.mesh.pieces import Piece, pieces_of
from stitch.mesh.placement import place
from stitch.mesh.server import open_server
from stitch.mesh.specification import MachineSpecification, specification_of
from stitch.mesh.trace import trace_bytes, trace_of
from stitch.option_values import BACKENDS, IN_FLIGHT
from stitch.program import Array, DataType, Program, TensorDesc
from stitch.report import counted
from stitch.runtime import capture
from stitch.tasks import HostFunction, TaskGraph, TaskTable, check_can_run
from stitch.ttb import Binary, encode

#: Numbers of prepared graphs, of which no two have one: persistent buffers are named by them.
_NUMBERS = itertools.count()


P = ParamSpec("P")
R = TypeVar("R")


def one_at_a_time(method: Callable[P, R]) -> Callable[P, R]:
    """Decorate a method of a mesh, or of what has one: a thread waits for the others in it."""

    @wraps(method)
    def in_turn(*arguments: P.args, **named: P.kwargs) -> R:
        owner: Any = arguments[0]
        with getattr(owner, "mesh", owner).lock:
            return method(*arguments, **named)

    return in_turn


class DeviceStatistics(TypedDict):
    """What a device of a mesh did; `totals` and the peak are of its present server.

    `node`: the label of the machine specification. `computer`: the name of the computer.
    """

    machine: str
    node: str | None
    computer: str
    pid: int
    executor: str
    restarts: int
    totals: dict[str, Any]
    host_memory_peak_nbytes: int
    peak_bytes_per_bank: dict[str, int]


class MeshStatistics(TypedDict):
    """What a mesh did: messages by type, values that travelled, and each device by name."""

    messages: dict[str, int]
    crossings: int
    devices: dict[str, DeviceStatistics]


class RemoteTensor:
    """A value on a device of a mesh, perhaps pending; an argument of other calls in its mesh."""

    __slots__ = ("__weakref__", "_value", "desc", "device", "mesh", "name")

    def __init__(
        self, mesh: Mesh, device: str, desc: TensorDesc, value: RemoteValue, name: str
    ) -> None:
        self.mesh, self.device, self.desc, self.name = mesh, device, desc, name
        self._value = value

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape."""
        return self.desc.shape

    @property
    def data_type(self) -> DataType:
        """The data type of its elements."""
        return self.desc.layout.data_type

    @property
    def dtype(self) -> Any:
        """The NumPy type of its elements."""
        return self.data_type.in_arrays.dtype

    def numpy(self) -> Array:
        """Return the elements as a NumPy array of its own; wait for them.

        Raises the error of the task that failed, or of one without results; `TaskError` if the mesh
        is closed.
        """
        return self.__array__(copy=True)

    @one_at_a_time
    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        """Return the elements; unless `copy` or another type asks for a copy, as a view that cannot
        be written, on Ray of its store."""
        client = self.mesh.open_client(f"tensor {self.name!r}", is_read=True)
        array = from_wire(client.value(self._value, f"tensor {self.name!r}"), self.data_type)
        if copy or dtype not in (None, array.dtype):
            return array.astype(dtype or array.dtype)
        view = array.view()
        view.flags.writeable = False
        return view

    def __dlpack__(self, **options: Any) -> Any:
        """Export a copy of the elements; raise as `numpy` does."""
        return self.numpy().__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("a tensor with 0 dimensions has no length")
        return self.shape[0]

    def __bool__(self) -> bool:
        return bool(self.numpy())

    @one_at_a_time
    def settle(self) -> None:
        """Wait for the value; raise the error of the task that failed."""
        self.mesh.open_client(f"tensor {self.name!r}").value(self._value)

    def __reduce__(self) -> Any:
        raise TypeError("a remote tensor belongs to its mesh; copy it out with .numpy()")

    def __repr__(self) -> str:
        return f"<RemoteTensor {self.name} {self.desc.text()} on {self.device!r}>"


@dataclass(frozen=True, slots=True)
class MeshDevice:
    """A device of a mesh: its name, its machine, and the process of its server."""

    name: str
    machine: Machine
    mesh: Mesh

    @property
    def pid(self) -> int:
        """The number of the process in which its server runs."""
        return self.statistics()["pid"]

    def statistics(self) -> DeviceStatistics:
        """Return what it did, and where."""
        mesh = self.mesh
        told: DeviceStatistics = json.loads(mesh.report(self.name, "statistics"))
        return told | {
            "machine": self.machine.name, "node": mesh.specification.devices[self.name].node,
            "restarts": mesh.client.restarts[self.name],
        }  # fmt: skip

    def explain(self) -> str:
        """Describe every copy on this device."""
        return self.mesh.report(self.name, "explain")

    def memory_report(self) -> str:
        """Describe the contents of the spaces of this device."""
        return self.mesh.report(self.name, "memory")


class Mesh:
    """The opened devices of a machine specification; see `open_mesh`. Use it as a context manager.

    Attributes:
        specification: Its devices and links.
        devices: Its devices by name.
        in_flight: Calls of a prepared graph that are under way at once.
        computes: Whether its values can be read.
        strict_types: Whether a link may not change the floating-point storage type.
        client: Sends messages to the device servers.
        lock: Held by the thread that uses the client.
    """

    def __init__(
        self, specification: MachineSpecification, carrier: Carrier, in_flight: int = IN_FLIGHT,
        functions: Sequence[str] = (), *, trace: bool = False, computes: bool = True,
        strict_types: bool = False,
    ) -> None:  # fmt: skip
        self.specification, self.in_flight = specification, in_flight
        self.functions, self.computes = tuple(functions), computes
        self.strict_types = strict_types
        self.client = MeshClient(carrier, specification.devices, None if trace else MAX_RECORDS)
        self.devices = {
            name: MeshDevice(name, entry.machine, self)
            for name, entry in specification.devices.items()
        }
        self.is_closed = False
        self.lock = RLock()

    @one_at_a_time
    @takes(graph=instance_of("a task graph", TaskGraph), carry=optional(MAPPING))
    def prepare(self, graph: TaskGraph, carry: Mapping[str, str] | None = None) -> MeshGraph:
        """Prepare a task graph as a callable of its inputs, by position or name.

        Tasks that name no device are placed automatically.

        Args:
            graph: The graph.
            carry: Inputs that an output of the call before gives: input → output. They are no
                arguments, and these outputs no results: `write` sets them, `read` returns them.

        Raises:
            TaskError: The graph has defects; the text lists all.
            UsageError: A device is unknown, a host function cannot be imported on a server, or
                `carry` names a slot that is unknown or of another type.
            OutOfMemoryError: A device cannot hold its tasks.
        """
        self.open_client("the mesh")
        return MeshGraph(self, graph, carry or {})

    def open_client(self, what: str, *, is_read: bool = False) -> MeshClient:
        """Return the client; raise `TaskError` if the mesh is closed, or a value is to be read
        that it does not compute."""
        if self.is_closed:
            raise TaskError(f"{what} cannot be used: its mesh was closed",
                            remedy="use it and read results before close() or the end of its "
                            "`with` block, or open another mesh")  # fmt: skip
        if is_read and not self.computes:
            raise TaskError(f"cannot read {what}: the null executor computes no data",
                            remedy="open the mesh with executor='numpy'")  # fmt: skip
        return self.client

    @one_at_a_time
    def wait(self) -> None:
        """Wait until all calls have ended; raise the error of a task without results.

        Other errors are raised by the tensors that they concern.
        """
        self.open_client("the mesh").wait()

    @one_at_a_time
    def report(self, device: str, what: str) -> str:
        """Return a report of a device; see `messages.REPORTS`."""
        return str(self.open_client("the mesh").ask(device, Report(what)))

    def explain(self) -> str:
        """Describe what was run and what travelled, and every copy on every device."""
        client = self.client
        runs = counted(client.messages["Run"], "run")
        values = counted(client.crossed, "value")
        restarts = counted(sum(client.restarts.values()), "restart")
        return (
            f"mesh {self.specification.name}: {runs} of pieces, {values} travelled, "
            f"{restarts} of servers\n" + self._joined("explain")
        )

    def memory_report(self) -> str:
        """Describe the memory of every device."""
        return self._joined("memory")

    def statistics(self) -> MeshStatistics:
        """Return what the devices did, and the messages and values between them."""
        devices = {name: device.statistics() for name, device in self.devices.items()}
        client = self.client
        return {"messages": dict(client.messages), "crossings": client.crossed,
                "devices": devices}  # fmt: skip

    @one_at_a_time
    def trace(self) -> dict[str, Any]:
        """Return one Chrome trace of all devices as a JSON object.

        Raises `UsageError` unless the mesh was opened with `trace=True`.
        """
        whole = trace_of(self.open_client("the mesh"), list(self.devices))
        whole["otherData"] |= self.statistics()
        return whole

    @takes(path=PATH)
    def write_trace(self, path: str | Path) -> None:
        """Write `trace()` into a file, compressed if it ends with `.gz`."""
        write_files({path: trace_bytes(self.trace(), path)})

    def _joined(self, what: str) -> str:
        return "\n".join([
            f"device {name} ({device.machine.name})\n{self.report(name, what)}"
            for name, device in self.devices.items()
        ])  # fmt: skip

    @one_at_a_time
    def close(self) -> None:
        """End all device servers. Closing twice is allowed."""
        self.is_closed = True
        self.client.close()

    def __enter__(self) -> Self:
        self.open_client("the mesh")
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Mesh {self.specification.name}: {', '.join(self.devices)}>"


class MeshGraph:
    """A task graph on a mesh, called with arrays or remote tensors.

    A call returns the outputs of the graph, pending: one `RemoteTensor`, or a tuple.
    """

    def __init__(self, mesh: Mesh, graph: TaskGraph, carry: Mapping[str, str]) -> None:
        self.mesh, self._number = mesh, next(_NUMBERS)
        self._table = table = graph.table().flattened()
        self.name = table.name or "task graph"
        check_can_run(table, f"task graph {table.name!r}" if table.name else "the task graph")
        self.pieces = pieces_of(table, place(table, mesh.specification))
        self._where = {n: p.device for p in self.pieces for n in p.outputs}
        #: The carried inputs by name: the values that they have, and that they get.
        self._carried = _carried(table, carry)
        gets = {*carry.values()}
        self._inputs = [one for one in table.inputs if one.name not in self._carried]
        self._outputs = [one for one in table.outputs if one.name not in gets]
        #: Carried values that stay on a device, by their buffer; the others travel.
        self._buffers = self._stationary()
        self._between: dict[str, RemoteValue] = {}
        #: An entry of the last call, and the carried values that travel after it.
        self._last: tuple[Entry, dict[str, RemoteValue]] | None = None
        self._written: set[str] = set()
        results = {one.value for one in self._outputs}
        for name, (_, after) in self._carried.items():
            if name not in self._buffers:
                results.add(after)
        routes = _routes(self.pieces, frozenset(results), self._ends())
        self._prepared = [
            self._prepare(piece, *ends) for piece, ends in zip(self.pieces, routes, strict=True)
        ]
        self._in_flight = self._most_in_flight()
        #: The numbers of the calls under way.
        self._under_way: deque[int] = deque()

    def _most_in_flight(self) -> int:
        """Return how many calls can be under way; raise `OutOfMemoryError` if not even one."""
        capacity = self.mesh.client.carrier.capacity
        numbers = {n for _, sent, answered in self._prepared for n in (*sent, *answered)}
        descs = [self._table.descs[number] for number in numbers]
        nbytes = sum(
            math.prod(desc.shape) * wire_dtype(desc.layout.data_type).itemsize for desc in descs
        )
        if capacity is None or not nbytes:
            return self.mesh.in_flight
        if nbytes > capacity:
            raise OutOfMemoryError(
                f"the values of one call of {self.name!r} that travel do not fit into the store",
                expected=f"at most {capacity:,} bytes", got=f"{nbytes:,} bytes",
                remedy="smaller batches, or a cluster with a larger object store",
            )  # fmt: skip
        return min(self.mesh.in_flight, capacity // nbytes)

    def _stationary(self) -> dict[str, str]:
        """Return the devices of the carried values that one piece reads and writes, by name.

        An output that several inputs get travels: it is written into one buffer at most.
        """
        stay = {}
        gets = [after for _, after in self._carried.values()]
        for name, (before, after) in self._carried.items():
            reading = [piece for piece in self.pieces if before in piece.inputs]
            if len(reading) == 1 and after in reading[0].outputs and gets.count(after) == 1:
                stay[name] = reading[0].device
        return stay

    def _ends(self) -> dict[int, str]:
        """Return the buffer of each value that stays on its device."""
        return {
            number: f"graph {self._number}.{name}"
            for name in self._buffers for number in self._carried[name]
        }  # fmt: skip

    def _prepare(
        self, piece: Piece, sources: tuple[Source, ...], targets: tuple[Target, ...]
    ) -> tuple[PreparedPiece, tuple[int, ...], tuple[int, ...]]:
        """Send a piece to its device; return it with the numbers of the values that it is sent
        and that it answers."""
        graph = TaskGraph.of(piece.table)
        prepared = send_piece(self.mesh, piece.device, graph, sources, targets)
        sent = [n for n, s in zip(piece.inputs, sources, strict=True) if s.kind == "sent"]
        answered = [n for n, t in zip(piece.outputs, targets, strict=True) if t.is_sent]
        return prepared, tuple(sent), tuple(answered)

    @one_at_a_time
    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """Send one call; wait first while `in_flight` calls are under way.

        Raises:
            UsageError: Inputs are missing or surplus, or a tensor is of another mesh.
            LinkError: An argument does not match its input.
        """
        client = self.mesh.open_client(f"task graph {self.name!r}")
        if named or len(arguments) != len(self._inputs):
            types = [(name, self._table.descs[n].text()) for name, n in self._inputs]
            arguments = arranged(f"task graph {self.name!r}", types, arguments, named)
        values = {
            number: self._value(name, self._table.descs[number], argument)
            for (name, number), argument in zip(self._inputs, arguments, strict=True)
        }
        for name, (before, _) in self._carried.items():
            if name not in self._written:
                raise UsageError(f"carried input {name!r} has no value yet",
                                 remedy=f"write({name}=array) before the first call")  # fmt: skip
            if name in self._travelling():
                values[before] = self._between[name]
        while len(self._under_way) >= self._in_flight:
            self._finish_first()
        run = client.begin_run()
        entries = []
        for prepared, sent, answered in self._prepared:
            entry = client.entry(prepared, run, [values[number] for number in sent])
            values.update(zip(answered, entry.outputs, strict=True))
            entries.append(entry)
        self._under_way.append(run)
        if self._between:
            after = {name: values[self._carried[name][1]] for name in self._between}
            self._last = entries[0], after
        client.submit(entries)
        client.end_run(run)
        results = tuple([
            RemoteTensor(
                self.mesh, self._where[number], self._table.descs[number], values[number], name
            )
            for name, number in self._outputs
        ])  # fmt: skip
        return results[0] if len(results) == 1 else results

    @property
    def table(self) -> TaskTable:
        """Return the graph."""
        return self._table

    @property
    def carried(self) -> Mapping[str, tuple[int, int]]:
        """Return, by name, the numbers of the values that carried inputs have and that they get."""
        return self._carried

    @one_at_a_time
    def last_records(self) -> tuple[RunRecord, ...]:
        """Wait until no call is under way; return what the last one took, for each piece."""
        self.wait()
        last = {record.piece: record for record in self.mesh.client.records}
        numbers = [prepared.number for prepared, _, _ in self._prepared]
        if not last.keys() >= {*numbers}:
            raise UsageError(
                f"there is no record of a call of task graph {self.name!r}",
                expected=f"a call, and fewer than {MAX_RECORDS} runs of pieces since",
            )
        return tuple([last[number] for number in numbers])

    def _travelling(self) -> dict[str, RemoteValue]:
        """Return the carried values that travel, after the last call that was sent.

        An interrupted call was sent wholly, or not at all.
        """
        if self._last is not None:
            entry, after = self._last
            if self.mesh.client.has_sent(entry):
                self._between = after
            self._last = None
        return self._between

    def _finish_first(self) -> None:
        """Wait until the oldest call under way has ended."""
        self.mesh.client.finish_run(self._under_way[0])
        self._under_way.popleft()

    @one_at_a_time
    def write(self, **values: Any) -> None:
        """Set carried inputs, by name, to arrays or tensors: all of them, or none after an error of
        an argument."""
        client = self.mesh.open_client(f"task graph {self.name!r}")
        self.wait()
        new: dict[str, RemoteValue] = {}
        for name, argument in values.items():
            if name not in self._carried:
                raise UsageError(f"there is no carried input {name!r}",
                                 expected=", ".join(self._carried) or "none")  # fmt: skip
            number, _ = self._carried[name]
            new[name] = self._value(name, self._table.descs[number], argument)
        for value in new.values():
            client.value(value)
        for name, value in new.items():
            if name in self._buffers:
                number, _ = self._carried[name]
                client.write(self._buffers[name], {self._ends()[number]: value})
            else:
                self._travelling()[name] = value
            self._written.add(name)

    @one_at_a_time
    def read(self, name: str) -> Array:
        """Return the value that a carried input has after the calls so far."""
        client = self.mesh.open_client(f"task graph {self.name!r}", is_read=True)
        if name not in self._written:
            raise UsageError(f"there is no carried input {name!r} with a value",
                             expected=", ".join(sorted(self._written)) or "none")  # fmt: skip
        number, _ = self._carried[name]
        kind = self._table.descs[number].layout.data_type
        if name in self._travelling():
            return from_wire(client.value(self._between[name]), kind).copy()
        (array,) = client.read(self._buffers[name], [self._ends()[number]])
        return from_wire(array, kind).copy()

    @one_at_a_time
    def wait(self) -> None:
        """Wait until no call is under way; raise the error of a task without results."""
        while self._under_way:
            self._finish_first()

    def _value(self, name: str, desc: TensorDesc, argument: Any) -> RemoteValue:
        if isinstance(argument, RemoteTensor):
            if argument.mesh is not self.mesh:
                raise UsageError(f"input {name!r} is a tensor of another mesh",
                                 remedy="copy it out with .numpy()")  # fmt: skip
            if (
                argument.shape != desc.shape
                or argument.dtype != desc.layout.data_type.in_arrays.dtype
            ):
                raise UsageError(f"input {name!r} has another type", expected=desc.text(),
                                 got=argument.desc.text())  # fmt: skip
            return argument._value
        kind = desc.layout.data_type
        array = capture(
            argument, desc.shape, kind.in_arrays, True, f"input {name!r} of {self.name!r}"
        )
        return self.mesh.client.put(to_wire(array))

    def __repr__(self) -> str:
        return f"<MeshGraph {self.name}: {len(self.pieces)} pieces on {self.mesh!r}>"


def _carried(table: TaskTable, carry: Mapping[str, str]) -> dict[str, tuple[int, int]]:
    """Return the values of carried inputs, and those that they get; raise `UsageError`."""
    inputs, outputs = dict(table.inputs), dict(table.outputs)
    carried = {}
    for name, after in carry.items():
        for word, known, side in ((name, inputs, "input"), (after, outputs, "output")):
            if word not in known:
                raise UsageError(f"carry names {word!r}, which is no {side} of the graph",
                                 expected=", ".join(known) or "none")  # fmt: skip
        pair = inputs[name], outputs[after]
        kinds = [(table.descs[n].shape, table.descs[n].layout.data_type) for n in pair]
        if kinds[0] != kinds[1]:
            raise UsageError(f"input {name!r} cannot be carried: it has another type",
                             expected=table.descs[pair[0]].text(),
                             got=f"{after}: {table.descs[pair[1]].text()}")  # fmt: skip
        carried[name] = pair
    return carried


def _routes(
    pieces: Sequence[Piece], results: frozenset[int], buffers: Mapping[int, str]
) -> list[tuple[tuple[Source, ...], tuple[Target, ...]]]:
    """Return where the inputs of each piece come from, and where its outputs go.

    `buffers`: the persistent buffers of values that stay on their device between calls.

    A value that several pieces of one device read is sent to the first of them, which keeps it.
    """
    made_on = {number: piece.device for piece in pieces for number in piece.outputs}
    readers: dict[tuple[str, int], list[int]] = {}
    for at, piece in enumerate(pieces):
        for number in piece.inputs:
            readers.setdefault((piece.device, number), []).append(at)
    devices: dict[int, set[str]] = {}
    for device, number in readers:
        devices.setdefault(number, set()).add(device)
    routes = []
    for at, piece in enumerate(pieces):
        sources = []
        for number in piece.inputs:
            reading = readers[piece.device, number]
            is_first, is_last = at == reading[0], at == reading[-1]
            if number in buffers and number not in made_on:
                sources.append(Source("buffer", buffers[number]))
            elif made_on.get(number) != piece.device and is_first:
                sources.append(Source("sent", "" if is_last else f"v{number}"))
            else:
                sources.append(Source("kept", f"v{number}", is_last))
        targets = [
            Target(
                number in results or bool(devices.get(number, set()) - {piece.device}),
                buffers.get(number, ""),
                f"v{number}" if (piece.device, number) in readers else "",
            )
            for number in piece.outputs
        ]
        routes.append((tuple(sources), tuple(targets)))
    return routes


def send_piece(
    mesh: Mesh, device: str, graph: TaskGraph, sources: Sequence[Source],
    targets: Sequence[Target],
) -> PreparedPiece:  # fmt: skip
    """Send a piece with the files of its programs to a device; see `MeshClient.prepare`."""
    files: dict[str, bytes] = {}
    named: dict[str, tuple[str, int]] = {}
    machine = mesh.specification.devices[device].machine
    for name, source in graph.programs.items():
        data, index = file_of(source, machine)
        sha256 = sha256_of(data)
        files[sha256] = data
        named[name] = sha256, index
    functions = [
        (name, _importable(function, mesh.functions)) for name, function in graph.functions.items()
    ]
    return mesh.client.prepare(
        device, graph.as_json(files=named), files, functions, sources, targets
    )


def file_of(source: Any, machine: Machine) -> tuple[bytes, int]:
    """Return the bytes of a `.ttb` file with a program, and the program's index in it."""
    binary = source if isinstance(source, Binary) else getattr(source, "binary", None)
    program = source if isinstance(source, Program) else getattr(source, "program", None)
    if not isinstance(binary, Binary):
        assert isinstance(program, Program), "a task graph calls programs"
        binary = Binary((program,), machine.shape, "stitch mesh")
    if not isinstance(program, Program):
        return encode(binary), 0
    names = [each.name for each in binary.programs]
    return encode(binary), names.index(program.name)


def _importable(function: HostFunction, modules: Sequence[str]) -> str:
    """Return `module:function` of a host function; raise `UsageError` for one without a name."""
    called = function.function
    module, path = getattr(called, "__module__", None), getattr(called, "__qualname__", "")
    if not module or "<" in path or module == "__main__":
        raise UsageError(
            f"host function {function.name!r} cannot be imported by a device server",
            expected="a function at the top of an imported module", got=f"{module}:{path}",
            remedy="move it to a file of its own, functions.py, import it from there, and "
            "open_mesh(..., functions=['functions'])",
        )  # fmt: skip
    found: Any = sys.modules.get(module)
    for part in path.split("."):
        found = getattr(found, part, None)
    found = found.function if isinstance(found, HostFunction) else found
    if found is not called and not (inspect.ismethod(called) and found == called):
        raise UsageError(
            f"host function {function.name!r} is not what a device server finds by its name",
            where=f"{module}:{path}", expected=repr(called), got=repr(found),
        )  # fmt: skip
    if module not in modules:
        raise UsageError(
            f"host function {function.name!r} is of a module that the mesh does not allow",
            expected=", ".join(modules) or "no module", got=module,
            remedy=f"open_mesh(..., functions=[{module!r}])",
        )  # fmt: skip
    return f"{module}:{path}"


@takes(
    specification=either(WHOLE, PATH, instance_of("a MachineSpecification", MachineSpecification)),
    backend=TEXT, executor=TEXT, in_flight=WHOLE,
    functions=WORDS, address=optional(TEXT), seed=optional(WHOLE),
    strict_types=BOOL, trace=BOOL,
)  # fmt: skip
def open_mesh(
    specification: int | str | Path | MachineSpecification,
    *,
    backend: str = "local",
    executor: str = "numpy",
    machine: str | Path | Machine = "wormhole_n150",
    in_flight: int = IN_FLIGHT,
    functions: Sequence[str] = (),
    address: str | None = None,
    seed: int | None = None,
    strict_types: bool = False,
    trace: bool = False,
) -> Mesh:
    """Open the devices of a machine specification.

    Args:
        specification: A `MachineSpecification`, its YAML file, or a number of equal devices.
        backend: Where the devices are: `local`, all in this process; `ray`, each in a process of
            its own, on this computer or on the nodes of a Ray cluster.
        executor: How operations are computed, as for `open_device`.
        machine: The machine of each device, if `specification` is a number.
        in_flight: Calls of a prepared graph that are under way at once.
        functions: Modules whose functions may be host functions of graphs.
        address: With `ray`, a running cluster: `auto`, or HOST:PORT. By default one is started on
            this computer, and ended with the mesh.
        seed: With `local`, draws the order in which devices work; results do not depend on it.
        strict_types: Refuse links that change the floating-point storage type.
        trace: Keep what every device does, for `mesh.trace()`.

    Raises:
        UsageError: An argument is wrong.
        FormatError: The file has defects; the text lists all.
        TaskError: The cluster does not answer.
    """
    if backend not in BACKENDS:
        raise UsageError(f"there is no backend {backend!r}", expected=" or ".join(BACKENDS))
    if address is not None and backend != "ray":
        raise UsageError("the address is of a Ray cluster, and the devices are in this process",
                         got=f"address {address!r}, backend {backend!r}")  # fmt: skip
    if in_flight < 1:
        raise UsageError("in_flight must be at least 1", got=str(in_flight))
    described = specification_of(specification, machine)
    opened = partial(
        open_server, executor=executor, modules=tuple(functions), strict_types=strict_types,
        trace=trace,
    )  # fmt: skip
    carrier: Carrier
    if backend == "ray":
        try:
            from stitch.mesh.ray_carrier import RayCarrier
        except ModuleNotFoundError as error:
            if error.name != "ray":
                raise
            raise UsageError(
                "the backend 'ray' needs 'ray', which is not installed",
                remedy="pip install 'stitch-runtime[ray]'",
            ) from error
        carrier = RayCarrier(described, opened, address)
    else:
        carrier = LocalCarrier(lambda name: opened(name, described.devices[name].machine), seed)
    return Mesh(described, carrier, in_flight, functions, trace=trace, computes=executor != "null",
                strict_types=strict_types)  # fmt: skip
