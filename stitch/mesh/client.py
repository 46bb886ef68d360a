"""`MeshClient`: sends pieces to device servers, and runs again what a server that ended had lost.

It keeps every run until its answers are there, and every turn of a piece with persistent buffers
since the buffers were last read back. When a server ends, another one is started, is sent the same
files and pieces and the last buffers that were read, and the missing runs in their first order:
the results have the same bits.
"""

from __future__ import annotations

import hashlib
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from stitch.errors import TaskError
from stitch.mesh.carrier import Carrier, Outcome, Reference
from stitch.mesh.messages import (
    Failure,
    Load,
    Message,
    Prepare,
    Read,
    Run,
    RunRecord,
    Source,
    Target,
    Write,
)
from stitch.program import Array

#: Servers started again without a run that ended in between, at most.
MAX_RETRIES = 3
#: Turns of a device's stateful pieces after which its persistent buffers are read back.
KEEP_EVERY = 16
#: Records of runs, and of values that travelled, that are kept by default.
MAX_RECORDS = 4096


@dataclass(slots=True, eq=False)
class RemoteValue:
    """A value of a run, or of the client: a reference that a recovery may replace.

    `maker`: the device, the piece and the run that make it. `sent_to`: the other devices that it
    was sent to.
    """

    reference: Reference
    maker: tuple[str, int, int] | None = None
    sent_to: tuple[str, ...] = ()


class Crossing(NamedTuple):
    """A value that travelled to another device: from a run of a piece to one that reads it."""

    source: tuple[int, int]
    target: tuple[int, int]


@dataclass(frozen=True, slots=True)
class PreparedPiece:
    """A piece on its device: what it is sent, and what it answers."""

    number: int
    device: str
    message: Prepare
    sent: int
    returns: int
    #: Whether it leaves values on the device for other pieces of a run.
    keeps: bool

    @property
    def sequence(self) -> int:
        """The sequence whose turns its runs take, -1 for none."""
        return self.message.sequence


@dataclass(slots=True, eq=False)
class _Entry:
    """A run of a piece that was sent."""

    piece: PreparedPiece
    run: int
    turn: int
    inputs: tuple[RemoteValue, ...]
    outputs: tuple[RemoteValue, ...]
    record: RemoteValue
    is_done: bool = False


@dataclass(slots=True, eq=False)
class _Saved:
    """The persistent buffers of a device at a moment: names, values, the turns done by then."""

    names: tuple[str, ...]
    values: tuple[RemoteValue, ...]
    turns: dict[int, int]


@dataclass(slots=True, eq=False)
class _Device:
    """What a server is sent when it is started."""

    name: str
    files: dict[str, bytes] = field(default_factory=dict)
    pieces: dict[int, PreparedPiece] = field(default_factory=dict)
    turns: dict[int, int] = field(default_factory=dict)
    #: The last buffers that are certain, and those that are being read.
    saved: _Saved | None = None
    saving: _Saved | None = None
    is_started: bool = False
    since_saved: int = 0
    #: Why its persistent buffers could not be written.
    failure: Failure | None = None

    @property
    def buffers(self) -> tuple[str, ...]:
        """The names of the persistent buffers of its pieces."""
        named: dict[str, None] = {}
        for piece in self.pieces.values():
            named |= dict.fromkeys(s.name for s in piece.message.sources if s.kind == "buffer")
            named |= dict.fromkeys(t.buffer for t in piece.message.targets if t.buffer)
        return tuple(named)


class MeshClient:
    """The client of the device servers of a mesh.

    Args:
        carrier: Brings messages and values.
        devices: The names of the devices.
        max_records: How many of the last records are kept; None: all.

    Attributes:
        records: What the runs that ended took, in the order in which they were sent.
        crossings: The values that travelled between devices; one that is sent again after a restart
            is one.
        crossed: Their number.
        messages: The number of messages by type.
        runs: The number of the next run.
        restarts: The number of servers that were started again, by device.
    """

    def __init__(
        self, carrier: Carrier, devices: Iterable[str], max_records: int | None = MAX_RECORDS
    ) -> None:
        self.carrier = carrier
        self._devices = {name: _Device(name) for name in devices}
        self._log: list[_Entry] = []
        self._pieces = 0
        self.runs = 1
        self._open_runs: dict[int, int] = {}
        self.records: deque[RunRecord] = deque(maxlen=max_records)
        self.crossings: deque[Crossing] = deque(maxlen=max_records)
        self.crossed = 0
        self.messages: Counter[str] = Counter()
        self.restarts = dict.fromkeys(self._devices, 0)
        self._retries = 0

    # -- before a run ------------------------------------------------------------------------------

    def prepare(
        self, device: str, graph: str, files: Mapping[str, bytes],
        functions: Sequence[tuple[str, str]], sources: Sequence[Source], targets: Sequence[Target],
        after: PreparedPiece | None = None,
    ) -> PreparedPiece:  # fmt: skip
        """Send a piece to its device; raise what the server answers.

        Args:
            files: Bytes by SHA-256.
            after: A piece of the device in whose sequence this one takes turns; by default a piece
                that writes persistent buffers has a sequence of its own.
        """
        number = self._pieces
        self._pieces += 1
        own = number if any(t.buffer for t in targets) else -1
        message = Prepare(
            number, graph, tuple(functions), tuple(sources), tuple(targets),
            own if after is None else after.sequence,
        )  # fmt: skip
        piece = PreparedPiece(
            number, device, message, sum(s.kind == "sent" for s in sources),
            sum(t.is_sent for t in targets) + 1,
            any(t.kept for t in targets) or any(s.kind == "sent" and s.name for s in sources),
        )  # fmt: skip
        held = self._devices[device]
        self._start(held)
        for sha256, data in files.items():
            if sha256 not in held.files:
                self.ask(device, Load(sha256, data))
                held.files[sha256] = data
        self.ask(device, message)
        held.pieces[number] = piece
        return piece

    def _start(self, held: _Device) -> None:
        if not held.is_started:
            self.carrier.start(held.name)
            held.is_started = True

    def ask(
        self, device: str, message: Message, values: Sequence[RemoteValue] = (), returns: int = 1
    ) -> Any:
        """Send a message that may be sent twice, and return its answer; raise what it answers."""
        self._start(self._devices[device])
        answers: list[Any] = []
        for _ in range(MAX_RETRIES + 1):
            sent = self._carry(device, message, values, returns)
            self.carrier.wait(sent)
            outcomes = {self.carrier.outcome(reference) for reference in sent}
            if outcomes == {Outcome.READY}:
                answers = [self.carrier.value(reference) for reference in sent]
                break
            if Outcome.LOST in outcomes:
                self.recover()
        else:
            raise self._lost(device, f"message {type(message).__name__}")
        for answer in answers:
            if isinstance(answer, Failure):
                raise answer.error()
        return answers[0] if returns == 1 else answers

    def _carry(
        self, device: str, message: Message, values: Sequence[RemoteValue] = (), returns: int = 1
    ) -> tuple[Reference, ...]:
        """Send a message and count it."""
        self.messages[type(message).__name__] += 1
        return self.carrier.send(device, message, [value.reference for value in values], returns)

    def put(self, array: Array) -> RemoteValue:
        """Return an array of the client as a value."""
        return RemoteValue(self.carrier.put(array))

    # -- runs --------------------------------------------------------------------------------------

    def begin_run(self) -> int:
        """Return the number of a new run: kept values of a device belong to one."""
        number = self.runs
        self.runs += 1
        self._open_runs[number] = 0
        return number

    def send(
        self, piece: PreparedPiece, run: int, inputs: Sequence[RemoteValue], *, saves: bool = True
    ) -> tuple[RemoteValue, ...]:
        """Send a run of a piece; return the values that it answers, pending.

        `saves`: whether the persistent buffers may be read back behind this run; otherwise the
        caller calls `save` from time to time, where no run needs kept values of one before.
        """
        held = self._devices[piece.device]
        turn = 0
        if piece.sequence >= 0:
            turn = held.turns[piece.sequence] = held.turns.get(piece.sequence, 0) + 1
        entry = _Entry(piece, run, turn, tuple(inputs), (), RemoteValue(None))
        maker = (piece.device, piece.number, run)
        entry.outputs = tuple([RemoteValue(None, maker) for _ in range(piece.returns - 1)])
        self._log.append(entry)
        self._send(entry, entry.outputs)
        if turn:
            held.since_saved += 1
            if saves and held.since_saved >= KEEP_EVERY and held.saving is None:
                self.save(piece.device)
        return entry.outputs

    def _send(self, entry: _Entry, outputs: Sequence[RemoteValue]) -> None:
        settled = min(self._open_runs, default=self.runs)
        message = Run(entry.piece.number, entry.run, entry.turn, settled)
        device = entry.piece.device
        *sent, record = self._carry(device, message, entry.inputs, entry.piece.returns)
        for value in entry.inputs:
            maker = value.maker
            if maker is not None and maker[0] != device and device not in value.sent_to:
                value.sent_to += (device,)
                self.crossed += 1
                self.crossings.append(Crossing(maker[1:], (entry.piece.number, entry.run)))
        for value, reference in zip(outputs, sent, strict=False):
            value.reference = reference
        entry.record.reference = record

    def save(self, device: str) -> None:
        """Ask for the persistent buffers of a device, behind the runs that were sent: what a server
        that is started again begins with."""
        held = self._devices[device]
        names = held.buffers
        values = self._carry(held.name, Read(names), (), len(names))
        held.saving = _Saved(names, tuple(map(RemoteValue, values)), dict(held.turns))
        held.since_saved = 0

    def write(self, device: str, buffers: Mapping[str, RemoteValue]) -> None:
        """Set persistent buffers of a device; all of them before the first run that reads them."""
        held = self._devices[device]
        self.settle(self._values_of(device))
        turns = tuple(held.turns.items())
        self.ask(device, Write(tuple(buffers), turns), tuple(buffers.values()))
        before = (
            {}
            if held.saved is None
            else dict(zip(held.saved.names, held.saved.values, strict=True))
        )
        if held.saved is not None and held.since_saved:
            before = self._read_back(device)
        before |= buffers
        held.saved = _Saved(tuple(before), tuple(before.values()), dict(held.turns))
        held.saving, held.since_saved, held.failure = None, 0, None
        self._forget_done()

    def _read_back(self, device: str) -> dict[str, RemoteValue]:
        held = self._devices[device]
        assert held.saved is not None, "written before"
        names = held.saved.names
        arrays = self.ask(device, Read(names), (), len(names))
        arrays = [arrays] if len(names) == 1 else arrays
        return {name: self.put(array) for name, array in zip(names, arrays, strict=True)}

    def read(self, device: str, buffers: Sequence[str]) -> list[Array]:
        """Return persistent buffers of a device, as they travel, after the runs that were sent."""
        self.settle(self._values_of(device))
        arrays = self.ask(device, Read(tuple(buffers)), (), len(buffers))
        return [arrays] if len(buffers) == 1 else list(arrays)

    def finish(self, device: str) -> None:
        """Wait for all runs that were sent to a device.

        Raises the error of one that could not write persistent buffers. `write`, also of none,
        lets the device go on.
        """
        self.settle(self._values_of(device))
        failure = self._devices[device].failure
        if failure is not None:
            raise failure.error()

    def _values_of(self, device: str) -> list[RemoteValue]:
        return [entry.record for entry in self._log if entry.piece.device == device]

    # -- waiting and recovery ----------------------------------------------------------------------

    def settle(self, values: Sequence[RemoteValue]) -> None:
        """Wait until values are there; start servers again that ended meanwhile.

        Raises `TaskError` if a server ended `MAX_RETRIES` times without a run that ended between.
        """
        while True:
            self.carrier.wait([value.reference for value in values])
            if all(self._is_there(value) for value in values):
                self._forget_done()
                return
            self.recover()

    def wait(self) -> None:
        """Wait until all runs that were sent have ended."""
        self.settle([entry.record for entry in self._log])

    def _is_there(self, value: RemoteValue) -> bool:
        return self.carrier.outcome(value.reference) is Outcome.READY

    def value(self, value: RemoteValue) -> Array:
        """Return an array as it travelled; raise the error of the task that failed."""
        self.settle([value])
        found = self.carrier.value(value.reference)
        if isinstance(found, Failure):
            raise found.error()
        return found  # type: ignore[no-any-return]  # what `Run` answers

    def end_run(self, run: int) -> None:
        """Note that all answers of a run are there, or that nobody asks for them."""
        self._open_runs.pop(run, None)

    def _look(self, entry: _Entry) -> bool:
        """Return whether a run has ended; note it."""
        if not entry.is_done and self._is_there(entry.record):
            record = self.carrier.value(entry.record.reference)
            entry.is_done = True
            self._retries = 0
            if isinstance(record, RunRecord):
                self.records.append(record)
            elif entry.turn:
                self._devices[entry.piece.device].failure = record
        return entry.is_done

    def _forget_done(self) -> None:
        """Drop the runs that will not be sent again."""
        for held in self._devices.values():
            saving = held.saving
            if saving is not None and all(
                self.carrier.outcome(value.reference) is Outcome.READY for value in saving.values
            ) and all(
                self._look(entry) for entry in self._log
                if entry.piece.device == held.name and entry.turn
                and entry.turn <= saving.turns.get(entry.piece.sequence, 0)
            ):  # fmt: skip
                held.saved, held.saving = saving, None
        self._log = [entry for entry in self._log if self._is_needed(entry)]

    def _is_needed(self, entry: _Entry) -> bool:
        if not self._look(entry) or entry.run in self._open_runs:
            return True
        saved = self._devices[entry.piece.device].saved
        turns = {} if saved is None else saved.turns
        return entry.turn > turns.get(entry.piece.sequence, 0)

    def recover(self) -> None:
        """Start servers again that ended, and send again what was lost."""
        carrier = self.carrier
        carrier.wait([entry.record.reference for entry in self._log])
        ended = [d for d in self._devices.values() if d.is_started and carrier.has_ended(d.name)]
        if ended:
            self._retries += 1
            if self._retries > MAX_RETRIES:
                raise self._lost(ended[0].name, f"{len(self._log)} runs of pieces")
        for held in ended:
            self._restart(held)
        names = {held.name for held in ended}
        for entry in self._log:
            again = entry.piece.device in names and (entry.turn or entry.piece.keeps)
            if not self._look(entry) or again:
                # Answers that are there stay: the same run gives the same bits.
                outputs = entry.outputs if not entry.is_done else ()
                entry.is_done = False
                self._send(entry, outputs)

    def _restart(self, held: _Device) -> None:
        """Start the server of a device and send what it held; runs follow."""
        carrier = self.carrier
        self.restarts[held.name] += 1
        carrier.start(held.name)
        sent = [
            *[self._carry(held.name, Load(key, data)) for key, data in held.files.items()],
            *[self._carry(held.name, piece.message) for piece in held.pieces.values()],
        ]  # fmt: skip
        held.saving, held.since_saved = None, 0
        if held.saved is not None:
            message = Write(held.saved.names, tuple(held.saved.turns.items()))
            sent.append(self._carry(held.name, message, held.saved.values))
        for (reference,) in sent:
            carrier.wait([reference])
            if carrier.outcome(reference) is Outcome.READY:
                answer = carrier.value(reference)
                if isinstance(answer, Failure):
                    raise answer.error()

    def _lost(self, device: str, what: str) -> TaskError:
        return TaskError(
            f"the server of device {device!r} ended {MAX_RETRIES + 1} times",
            where=self.carrier.whereabouts(device), got=f"lost: {what}",
            remedy="look at the memory and the log of that machine; what was saved is unchanged",
        )  # fmt: skip

    def close(self) -> None:
        """End all servers. Closing twice is allowed."""
        self._log.clear()
        self.carrier.close()


def sha256_of(data: bytes) -> str:
    """Return the SHA-256 of a file's bytes, hexadecimal."""
    return hashlib.sha256(data).hexdigest()
