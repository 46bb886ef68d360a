"""`DeviceServer`: an ordinary device behind messages.

It verifies every `.ttb` file and task graph that it is sent, runs pieces, and holds what stays on
the device: persistent buffers, and values that one piece of a run leaves for another. It never
raises for what a client sent: errors are answered as `Failure`.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, overload

import numpy as np

from stitch.budget import DEFAULT_PART, machine_nbytes
from stitch.errors import FormatError, StitchError, TaskError, UsageError
from stitch.machine import Machine
from stitch.mesh.messages import (
    Close,
    Drop,
    Failure,
    Load,
    Message,
    NotDone,
    Prepare,
    Read,
    Report,
    Run,
    RunRecord,
    Source,
    Target,
    Write,
    check_message,
    from_wire,
    to_wire,
)
from stitch.program import Array, TensorDesc
from stitch.report import ChromeTrace, Device, Recorder, open_device, peaks_of, totals_json
from stitch.runtime import LoadedProgram, PreparedGraph, Tensor, Totals
from stitch.tasks import HostFunction, TaskGraph, TaskTable, tasks_without
from stitch.ttb import Binary
from stitch.ttb import load as load_binary

Values = Mapping[str, Tensor]


@dataclass(slots=True, eq=False)
class _Piece:
    """A prepared piece; `partial`: prepared graphs of the tasks that remain without some inputs."""

    number: int
    table: TaskTable
    graph: PreparedGraph
    sources: tuple[Source, ...]
    targets: tuple[Target, ...]
    donated: frozenset[int]
    partial: dict[frozenset[int], tuple[PreparedGraph | None, tuple[int, ...], tuple[int, ...]]]

    #: The number of values of an answer, without the record.
    returns: int = field(init=False)
    #: Whether it reads or writes persistent buffers.
    is_stateful: bool = field(init=False)
    #: Kept values that it reads, and those that no other piece reads after it.
    reads_kept: tuple[str, ...] = field(init=False)
    drops: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        self.returns = sum(target.is_sent for target in self.targets)
        self.is_stateful = any(target.buffer for target in self.targets) or any(
            source.kind == "buffer" for source in self.sources
        )
        kept = [source for source in self.sources if source.kind == "kept"]
        self.reads_kept = tuple([source.name for source in kept])
        self.drops = tuple([source.name for source in kept if source.is_last])


@dataclass(frozen=True, slots=True)
class _State:
    """The persistent buffers, and the last turn that is done.

    It is replaced as a whole: an interrupt finds it before a turn or after it.
    """

    buffers: Mapping[str, Tensor | Failure]
    turn: int


_NO_STATE = _State({}, 0)


def open_server(
    name: str, machine: Machine, *, executor: str, modules: Sequence[str],
    strict_types: bool = False, trace: bool = False, copies: bool = True, processes: int = 1,
) -> DeviceServer:  # fmt: skip
    """Open a device and its server; see `open_device` and `DeviceServer`.

    `processes`: how many servers share the host memory of this computer, each in a process.
    """
    share = None if processes == 1 else int(DEFAULT_PART * machine_nbytes() / processes)
    device = open_device(machine, executor=executor, strict_types=strict_types, max_memory=share)
    return DeviceServer(name, device, modules, copies=copies, trace=trace)


class DeviceServer:
    """A device that takes messages.

    Args:
        name: The name of the device in its mesh.
        device: The device; it is the server's own.
        modules: Names of the modules whose functions pieces may call.
        copies: Whether answers are copies; otherwise they may be views of the device's memory,
            for a carrier that copies them at once.
        trace: Whether the lines of a trace and a record are kept, for `Report`.
    """

    def __init__(
        self, name: str, device: Device, modules: Sequence[str] = (), *, copies: bool = True,
        trace: bool = False,
    ) -> None:  # fmt: skip
        self.name, self.device = name, device
        self._trace = ChromeTrace(device) if trace else None
        self._recorder = Recorder(device) if trace else None
        self._modules, self._copies = tuple(modules), copies
        self._binaries: dict[str, Binary] = {}
        self._pieces: dict[int, _Piece] = {}
        self._state = _NO_STATE
        #: Values that a piece left for others of its run; by piece, run and turn the answers of
        #: runs that cannot be done twice.
        self._kept: dict[tuple[int, str], Tensor | Failure] = {}
        self._answers: dict[tuple[int, int, int], tuple[object, ...]] = {}
        self._settled = 0
        #: What the device has done, unless messages other than runs came in between.
        self._totals: Totals | None = None
        self._handlers: dict[type, Callable[[Any, Sequence[Any]], object]] = {
            Load: self._load, Prepare: self._prepare, Run: self._run, Write: self._write,
            Read: self._read, Drop: self._drop, Report: self._report, Close: self._close,
        }  # fmt: skip

    def handle(self, message: Message, *values: Any) -> object:
        """Take a message; answer a value, or of `Run` and `Read` a tuple of values.

        The answer of `Run` ends with a `RunRecord`, or with a `Failure` if persistent buffers could
        not be written. An error of the message is a `Failure`.
        """
        try:
            check_message(message, [v for v in values if type(v) is not NotDone])
            if type(message) is not Run:
                self._totals = None
            return self._handlers[type(message)](message, values)
        except Exception as error:
            failure = Failure.of(error, f"device {self.name!r}")
            if isinstance(message, Run):
                piece = self._pieces.get(message.piece)
                return failure if piece is None else (failure,) * (1 + piece.returns)
            return (failure,) * (1 + len(message.buffers)) if type(message) is Read else failure

    # -- files and graphs --------------------------------------------------------------------------

    def _load(self, message: Load, values: Sequence[Any]) -> object:
        found = hashlib.sha256(message.data).hexdigest()
        if found != message.sha256:
            raise FormatError(
                "the bytes of a .ttb file changed on the way", expected=f"SHA-256 {message.sha256}",
                got=f"SHA-256 {found}",
            )  # fmt: skip
        if message.sha256 not in self._binaries:
            self._binaries[message.sha256] = load_binary(message.data, verify="full")
        return True

    def _prepare(self, message: Prepare, values: Sequence[Any]) -> object:
        programs = {
            sha256: _Programs(self.device, binary) for sha256, binary in self._binaries.items()
        }
        functions = {name: self._function(word) for name, word in message.functions}
        graph = TaskGraph.from_json(message.graph, programs=programs, functions=functions)
        prepared, table = self.device.prepare(graph), graph.table()
        ends = (len(message.sources), len(message.targets))
        if ends != (len(table.inputs), len(table.outputs)):
            raise UsageError(
                "a piece has one source for each input and one target for each output",
                expected=f"{len(table.inputs)} and {len(table.outputs)}",
                got=f"{ends[0]} and {ends[1]}",
            )
        donated = frozenset(
            task.inputs[position]
            for task in table.tasks for position in task.gone
            if task.inputs[position] < len(table.inputs)
        )  # fmt: skip
        self._pieces[message.piece] = _Piece(
            message.piece, table, prepared, message.sources, message.targets, donated, {}
        )
        return True

    def _function(self, word: str) -> HostFunction | Callable[..., Any]:
        """Return an importable function of an allowed module."""
        module, _, path = word.partition(":")
        if module not in self._modules:
            raise UsageError(
                f"host function {word!r} is of a module that this device server does not allow",
                expected=", ".join(self._modules) or "no module",
                remedy=f"open_mesh(..., functions=[{module!r}])",
            )
        found: Any = importlib.import_module(module)
        for part in path.split("."):
            found = getattr(found, part, None)
        if not (isinstance(found, HostFunction) or callable(found)):
            raise UsageError(f"module {module!r} has no function {path!r} on this device server")
        function: HostFunction | Callable[..., Any] = found
        return function

    # -- running -----------------------------------------------------------------------------------

    def _run(self, message: Run, values: Sequence[Any]) -> tuple[object, ...]:
        piece = self._pieces.get(message.piece)
        if piece is None:
            raise UsageError(f"there is no piece {message.piece}", expected="Prepare before Run")
        if message.settled > self._settled:
            self._drop_settled(message.settled)
        nothing = (NotDone(),) * (piece.returns + 1)
        if any(type(value) is NotDone for value in values):
            return nothing
        key = (message.piece, message.run, message.turn)
        if not piece.is_stateful:
            is_done = key in self._answers
        elif message.turn > self._state.turn + 1:
            return nothing
        else:
            is_done = message.turn <= self._state.turn
        if is_done:
            return self._answers.get(key, nothing)
        for name in piece.reads_kept:
            if (message.run, name) not in self._kept:
                return nothing
        return self._answer(piece, message, values)

    def _drop_settled(self, settled: int) -> None:
        """Drop kept values and answers of runs that the client will not ask for again."""
        self._settled = settled
        for name in [name for name in self._kept if name[0] < settled]:
            del self._kept[name]
        for key in [key for key in self._answers if key[1] < settled]:
            del self._answers[key]

    def _answer(self, piece: _Piece, message: Run, values: Sequence[Any]) -> tuple[object, ...]:
        begin, before = time.time(), self._totals or self.device.history.whole()
        where = f"device {self.name!r}, piece {piece.number}"
        results: Sequence[Tensor | Failure]
        state, untold = self._state, None
        try:
            results, untold = self._results(
                piece, self._arguments(piece, message.run, values), where
            )
        except Exception as error:
            results = [Failure.of(error, where)] * len(piece.targets)
        sent = self._sent(piece, results, where)
        after = self._totals = self.device.history.whole()
        written = {t.buffer: r for t, r in zip(piece.targets, results, strict=True) if t.buffer}
        failed = [result for result in written.values() if isinstance(result, Failure)]
        record = failed[0] if failed else RunRecord(
            self.name, piece.number, message.run, begin, time.time(),
            after.seconds + after.program_seconds - before.seconds - before.program_seconds,
            after.copies - before.copies, after.nbytes - before.nbytes, untold,
        )  # fmt: skip
        answer = (*sent, record)
        for target, result in zip(piece.targets, results, strict=True):
            if target.kept:
                self._kept[message.run, target.kept] = result
        if piece.is_stateful or piece.drops:
            self._answers[message.piece, message.run, message.turn] = answer
        if piece.is_stateful:
            self._state = _State({**state.buffers, **written}, state.turn + 1)
        for name in piece.drops:
            self._kept.pop((message.run, name), None)
        return answer

    def _arguments(
        self, piece: _Piece, run: int, values: Sequence[Any]
    ) -> list[Array | Tensor | Failure]:
        """Return the arguments of a piece, by the sources of its inputs."""
        wanted = sum(source.kind == "sent" for source in piece.sources)
        if len(values) != wanted:
            raise UsageError("a run has one array for each input that is sent",
                             expected=str(wanted), got=str(len(values)))  # fmt: skip
        arguments: list[Array | Tensor | Failure] = []
        sent = iter(values)
        for source, (_, number) in zip(piece.sources, piece.table.inputs, strict=True):
            desc = piece.table.descs[number]
            if source.kind == "sent":
                value: Any = next(sent)
                if isinstance(value, np.ndarray):
                    value = _checked(value, desc)
                    if source.name:  # Other pieces of the run read it too: it crossed once.
                        value = self.device.tensor(value)
                if source.name:
                    self._kept[run, source.name] = value
            elif source.kind == "buffer":
                value = self._state.buffers.get(source.name)
                if value is None:
                    raise TaskError(f"persistent buffer {source.name!r} has no value yet")
            else:
                value = self._kept[run, source.name]
            if number in piece.donated and isinstance(value, Tensor):
                value = value.to_layout(value.layout, copy=True)
            arguments.append(value)
        return arguments

    def _results(
        self, piece: _Piece, arguments: Sequence[Array | Tensor | Failure], where: str
    ) -> tuple[Sequence[Tensor | Failure], Failure | None]:
        """Run a piece, without the tasks that depend on inputs that do not exist.

        Return the results, and the error of a task without results, if none of them tells it.
        """
        failed = {i: a for i, a in enumerate(arguments) if isinstance(a, Failure)}
        graph: PreparedGraph | None = piece.graph
        inputs: Sequence[int] = range(len(arguments))
        outputs: Sequence[int] = range(len(piece.targets))
        results: list[Tensor | Failure] = [Failure("", "")] * len(piece.targets)
        if failed:
            missing = frozenset(failed)
            if missing not in piece.partial:
                piece.partial[missing] = self._without(piece.table, missing)
            graph, inputs, outputs = piece.partial[missing]
            results = _cancelled(piece.table, failed)
        if graph is None:
            return results, None
        if not (failed or piece.donated or graph.calls_host):
            try:
                given = graph(*arguments)
                return given if isinstance(given, tuple) else (given,), None
            except StitchError:
                pass  # Run again, as programs change nothing, for what does not depend on it.
        # The error itself would keep the values of its frames.
        raised, kind, untold = None, "", None
        pending = graph.pending(*[arguments[i] for i in inputs])
        try:
            self.device.wait()
        except Exception as error:
            raised, kind = str(error), type(error).__name__
            if not all(row.outputs for row in piece.table.tasks):
                untold = Failure.of(error, where)
        for position, tensor in zip(outputs, pending, strict=True):
            try:
                tensor.settle()
                results[position] = tensor
            except StitchError as error:
                # It tells of an error that the client has not seen.
                failure, untold = replace(Failure.of(error, where), remedy=None), None
                if raised is not None and f"failed: {raised}" in str(failure.where):
                    failure = replace(failure, got=f"{kind}: {raised}")
                results[position] = failure
        return results, untold

    def _without(
        self, table: TaskTable, missing: frozenset[int]
    ) -> tuple[PreparedGraph | None, tuple[int, ...], tuple[int, ...]]:
        """Return the prepared graph of the tasks that do not depend on the missing inputs, the
        positions of its inputs, and of its outputs."""
        rest, inputs, outputs = tasks_without(table, missing)
        return (self.device.prepare(rest) if len(rest) else None), inputs, outputs

    def _sent(
        self, piece: _Piece, results: Sequence[Tensor | Failure], where: str
    ) -> list[Array | Failure]:
        """Return the values of an answer: views, unless the answer is kept, as views pin bytes."""
        leaving = [r for r, target in zip(results, piece.targets, strict=True) if target.is_sent]
        if not (self._copies or piece.is_stateful or piece.drops):
            sent = [self._exported(result, where, copies=False) for result in leaving]
            if all(
                type(value) is not Failure or value is result
                for value, result in zip(sent, leaving, strict=True)
            ):
                return sent
            # A view pins what a copy needs.
            sent.clear()
        return [self._exported(result, where) for result in leaving]

    def _exported(
        self, result: Tensor | Failure, where: str, *, copies: bool = True
    ) -> Array | Failure:
        if isinstance(result, Failure):
            return result
        if not self.device.computes:
            result.settle()
            return np.broadcast_to(to_wire(np.zeros((), result.dtype)), result.shape)
        if not copies:
            try:
                return to_wire(np.from_dlpack(result))
            except (BufferError, RuntimeError, TypeError):
                pass  # Not dense, or of a type that NumPy does not take: copy.
        try:
            return to_wire(result.numpy())
        except Exception as error:
            return Failure.of(error, where)

    # -- persistent buffers ------------------------------------------------------------------------

    def _write(self, message: Write, values: Sequence[Any]) -> object:
        kinds = self._buffer_descs()
        new: dict[str, Tensor | Failure] = {}
        for name, value in zip(message.buffers, values, strict=True):
            desc = kinds.get(name)
            if desc is None:
                raise UsageError(f"there is no persistent buffer {name!r}",
                                 expected=", ".join(kinds) or "none")  # fmt: skip
            if isinstance(value, Failure):
                new[name] = value
            else:
                tensor = self.device.tensor(_checked(value, desc))
                new[name] = tensor.to_layout(desc.without_address())
        self._state = _State({**self._state.buffers, **new}, message.turn)
        return True

    def _buffer_descs(self) -> dict[str, TensorDesc]:
        """Return the descriptors of the persistent buffers that pieces read or write."""
        descs = dict[str, TensorDesc]()
        for piece in self._pieces.values():
            outputs = zip(piece.targets, piece.table.outputs, strict=True)
            descs |= {t.buffer: piece.table.descs[n] for t, (_, n) in outputs if t.buffer}
            inputs = zip(piece.sources, piece.table.inputs, strict=True)
            descs |= {s.name: piece.table.descs[n] for s, (_, n) in inputs if s.kind == "buffer"}
        return descs

    def _read(self, message: Read, values: Sequence[Any]) -> tuple[object, ...]:
        buffers, where = self._state.buffers, f"device {self.name!r}"
        told = [
            self._exported(buffers[name], where) if name in buffers
            else Failure("UsageError", f"persistent buffer {name!r} has no value yet", where)
            for name in message.buffers
        ]  # fmt: skip
        return (*told, self._state.turn)

    def _drop(self, message: Drop, values: Sequence[Any]) -> object:
        for number in message.pieces:
            self._pieces.pop(number, None)
        for sha256 in message.files:
            self._binaries.pop(sha256, None)
        named, state = self._buffer_descs(), self._state
        remaining = {name: value for name, value in state.buffers.items() if name in named}
        self._state = _State(remaining, state.turn)
        return True

    # -- reports and the end -----------------------------------------------------------------------

    def _report(self, message: Report, values: Sequence[Any]) -> object:
        device = self.device
        if message.what == "explain":
            return device.explain()
        if message.what == "memory":
            return device.memory_report()
        if message.what == "clock":
            return repr(time.time())
        if message.what == "trace":
            if self._trace is None:
                raise UsageError("no trace is kept", remedy="open_mesh(..., trace=True)")
            began = time.time() - (time.perf_counter() - self._trace.began)
            return json.dumps({"began": began, "lines": self._trace.as_json()["traceEvents"]})
        if message.what == "record":
            if self._recorder is None:
                raise UsageError("no record is kept", remedy="open_mesh(..., trace=True)")
            return self._recorder.text()
        account = device.account()
        return json.dumps({
            "pid": os.getpid(), "computer": platform.node(), "executor": device.executor,
            "totals": totals_json(account.period, account.total),
            "host_memory_peak_nbytes": device.peak_nbytes,
            "peak_bytes_per_bank": peaks_of(device),
        })  # fmt: skip

    def _close(self, message: Close, values: Sequence[Any]) -> object:
        for held in (self._kept, self._answers, self._pieces, self._binaries):
            held.clear()
        self._state = _NO_STATE
        if self._trace is not None:
            self._trace.forget()
        if self._recorder is not None:
            self._recorder.close()
        self.device.close()
        return True


class _Programs(Sequence[LoadedProgram]):
    """The programs of a file, loaded on the device when a graph asks for them."""

    def __init__(self, device: Device, binary: Binary) -> None:
        self._device, self._binary = device, binary

    def __len__(self) -> int:
        return len(self._binary.programs)

    @overload
    def __getitem__(self, index: int) -> LoadedProgram: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[LoadedProgram]: ...

    def __getitem__(self, index: int | slice) -> LoadedProgram | Sequence[LoadedProgram]:
        if isinstance(index, slice):
            return [self[i] for i in range(len(self))[index]]
        return self._device.loaded(self._binary, range(len(self))[index])


def _cancelled(table: TaskTable, failed: Mapping[int, Failure]) -> list[Tensor | Failure]:
    """Return for each output why it does not exist, by the positions of the inputs that do not."""
    causes = {
        table.inputs[position].value: replace(failure, is_cancelled=True)
        for position, failure in failed.items()
    }
    for row in table.tasks:
        cause = next((causes[number] for number in row.inputs if number in causes), None)
        if cause is not None:
            causes |= dict.fromkeys(row.outputs, cause)
    return [causes.get(number, Failure("", "")) for _, number in table.outputs]


def _checked(value: Array, desc: TensorDesc) -> Array:
    """Return an array that travelled as elements of a descriptor; raise `UsageError`."""
    kind = desc.layout.data_type
    array = from_wire(value, kind)
    if array.shape != desc.shape or array.dtype != kind.in_arrays.dtype:
        raise UsageError("a value of a message has another type", expected=desc.text(),
                         got=f"{array.dtype} of shape {array.shape}")  # fmt: skip
    # The type of an array that was pickled is equal, and calls compare identities, which is faster.
    return array.view(kind.in_arrays.dtype)
