"""`MeshClient`: sends pieces to device servers, and runs again what a server that ended had lost.

Its log holds every run until its answers are there, and every turn of a device with persistent
buffers since a snapshot of them was read. When a server ends, another one is started, is sent the
same files and pieces and the snapshot, and the runs of the log in their first order: the results
have the same bits. What a device has done follows from its snapshot and the log alone, and a call
enters the log in one step, so that an interrupt leaves nothing between two states.
"""

from __future__ import annotations

import hashlib
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple
from weakref import finalize

from stitch.errors import TaskError
from stitch.mesh.carrier import Carrier, Outcome, Reference, Sending
from stitch.mesh.messages import (
    Drop,
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

#: Recoveries without a run that ended in between, at most.
MAX_RETRIES = 3
#: Turns of a device after which a snapshot of its persistent buffers is read.
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


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class PreparedPiece:
    """A piece on its device: what it is sent, and what it answers.

    The device drops it when neither its users nor the log of the client refer to it any more.

    `returns`: the number of values of an answer, with the record. `is_stateful`: whether it reads
    or writes persistent buffers; its runs are turns of the device. `keeps` and `drops`: the values
    that it leaves on the device for other pieces of its run, and those that it reads last.
    """

    number: int
    device: str
    message: Prepare
    returns: int
    is_stateful: bool
    keeps: frozenset[str]
    drops: frozenset[str]


@dataclass(slots=True, eq=False)
class Entry:
    """A run of a piece in the log, by `number`; `turn`: of the device, 0 for stateless pieces."""

    piece: PreparedPiece
    run: int
    inputs: tuple[RemoteValue, ...]
    outputs: tuple[RemoteValue, ...]
    record: RemoteValue
    number: int = 0
    turn: int = 0
    is_done: bool = False


@dataclass(frozen=True, slots=True)
class _Snapshot:
    """The persistent buffers of a device after a turn, before the entry `number` of the log."""

    buffers: dict[str, RemoteValue]
    turn: int
    number: int


@dataclass(frozen=True, slots=True)
class _Reading:
    """A snapshot that was asked for: the names, and the references to the answers."""

    names: tuple[str, ...]
    answers: tuple[Reference, ...]
    turn: int
    number: int


@dataclass(slots=True, eq=False)
class _Device:
    """What a server is sent when it is started."""

    name: str
    files: dict[str, bytes] = field(default_factory=dict)
    #: By number the messages of its pieces, and the files of each.
    pieces: dict[int, tuple[Prepare, frozenset[str]]] = field(default_factory=dict)
    snapshot: _Snapshot = field(default_factory=lambda: _Snapshot({}, 0, 0))
    reading: _Reading | None = None
    is_started: bool = False

    @property
    def buffers(self) -> tuple[str, ...]:
        """The names of the persistent buffers of its pieces."""
        named: dict[str, None] = {}
        for message, _ in self.pieces.values():
            named |= dict.fromkeys(s.name for s in message.sources if s.kind == "buffer")
            named |= dict.fromkeys(t.buffer for t in message.targets if t.buffer)
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
        self._log: list[Entry] = []
        self._entries = 0
        self._pieces = 0
        #: Devices and numbers of pieces that nothing refers to any more; any thread adds to it.
        self._unused: deque[tuple[str, int]] = deque()
        self.runs = 1
        #: Runs of the log of which no more pieces will be sent, and the number below which no run
        #: needs anything of a server.
        self._ended: set[int] = set()
        self._settled = 1
        #: Whether the log holds nothing that could be noted or dropped by looking at it again.
        self._is_noted = True
        #: Whether all that the log holds was sent, and the devices whose servers must be replaced.
        self._is_sent = True
        self._lost: set[str] = set()
        self.records: deque[RunRecord] = deque(maxlen=max_records)
        #: Errors of tasks without results, which were not raised yet.
        self._untold: deque[Failure] = deque(maxlen=MAX_RECORDS)
        self.crossings: deque[Crossing] = deque(maxlen=max_records)
        self.crossed = 0
        self.messages: Counter[str] = Counter()
        self.restarts = dict.fromkeys(self._devices, 0)
        self._retries = 0

    # -- before a run ------------------------------------------------------------------------------

    def prepare(
        self, device: str, graph: str, files: Mapping[str, bytes],
        functions: Sequence[tuple[str, str]], sources: Sequence[Source], targets: Sequence[Target],
    ) -> PreparedPiece:  # fmt: skip
        """Send a piece to its device; `files`: bytes by SHA-256. Raises what the server answers.

        Runs of pieces that read or write persistent buffers take turns on their device, in the
        order in which they are sent.
        """
        self._drop_unused()
        number = self._pieces
        self._pieces += 1
        message = Prepare(number, graph, tuple(functions), tuple(sources), tuple(targets))
        piece = PreparedPiece(
            number, device, message, sum(t.is_sent for t in targets) + 1,
            any(s.kind == "buffer" for s in sources) or any(t.buffer for t in targets),
            frozenset([t.kept for t in targets if t.kept])
            | {s.name for s in sources if s.kind == "sent" and s.name},
            frozenset([s.name for s in sources if s.kind == "kept" and s.is_last]),
        )  # fmt: skip
        finalize(piece, self._unused.append, (device, number)).atexit = False
        held = self._devices[device]
        for sha256, data in files.items():
            if sha256 not in held.files:
                self.ask(device, Load(sha256, data))
                held.files[sha256] = data
        self.ask(device, message)
        held.pieces[number] = message, frozenset(files)
        return piece

    def _drop_unused(self) -> None:
        """Drop pieces that nothing refers to any more, and what only they need."""
        numbers: dict[str, list[int]] = {}
        while self._unused:
            device, number = self._unused.popleft()
            numbers.setdefault(device, []).append(number)
        for device, unused in numbers.items():
            held = self._devices[device]
            for number in unused:
                held.pieces.pop(number, None)
            needed = {sha256 for _, files in held.pieces.values() for sha256 in files}
            files = tuple([sha256 for sha256 in held.files if sha256 not in needed])
            for sha256 in files:
                del held.files[sha256]
            # A snapshot on its way would bring back buffers.
            held.reading, before = None, held.snapshot.buffers
            remaining = {name: before[name] for name in held.buffers if name in before}
            held.snapshot = replace(held.snapshot, buffers=remaining)
            self._carry(device, Drop(tuple(unused), files))

    def ask(self, device: str, message: Message) -> Any:
        """Send a message that may be sent twice, and return its answer; raise what it answers."""
        (found,) = self.carrier.values(self._exchange(device, message))
        if isinstance(found, Failure):
            raise found.error()
        return found

    def _exchange(
        self, device: str, message: Message, values: Sequence[RemoteValue] = (), returns: int = 1
    ) -> tuple[Reference, ...]:
        """Send a message that may be sent twice; return the references of its answers, ready."""
        held = self._devices[device]
        if not self._is_sent:
            self.recover()
        if not held.is_started:
            self.carrier.start(device)
            held.is_started = True
        for _ in range(MAX_RETRIES + 1):
            sent = self._carry(device, message, values, returns)
            self.carrier.wait(sent)
            outcomes = {self.carrier.outcome(reference) for reference in sent}
            if outcomes == {Outcome.READY}:
                return sent
            if Outcome.LOST in outcomes:
                self.recover()
        raise self._gave_up(device, f"message {type(message).__name__}")

    def _carry(
        self, device: str, message: Message, values: Sequence[RemoteValue] = (), returns: int = 1
    ) -> tuple[Reference, ...]:
        """Send a message and count it."""
        self.messages[type(message).__name__] += 1
        references = [value.reference for value in values]
        (answers,) = self.carrier.send(device, Sending(message, references, returns))
        return answers

    def put(self, array: Array) -> RemoteValue:
        """Return an array of the client as a value."""
        return RemoteValue(self.carrier.put(array))

    # -- runs --------------------------------------------------------------------------------------

    def begin_run(self) -> int:
        """Return the number of a new run: kept values of a device belong to one."""
        number = self.runs
        self.runs += 1
        return number

    def entry(self, piece: PreparedPiece, run: int, inputs: Sequence[RemoteValue]) -> Entry:
        """Return a run of a piece to be sent; its outputs may be inputs of others. A piece runs
        once in a run."""
        maker = (piece.device, piece.number, run)
        outputs = tuple([RemoteValue(None, maker) for _ in range(piece.returns - 1)])
        return Entry(piece, run, tuple(inputs), outputs, RemoteValue(None))

    def send(
        self, piece: PreparedPiece, run: int, inputs: Sequence[RemoteValue], *, saves: bool = True
    ) -> tuple[RemoteValue, ...]:
        """Send a run of a piece; return the values that it answers, pending.

        `saves`: whether the persistent buffers may be read back behind this run; otherwise the
        caller calls `save` from time to time.
        """
        entry = self.entry(piece, run, inputs)
        self.submit([entry], saves=saves)
        return entry.outputs

    def submit(self, entries: Sequence[Entry], *, saves: bool = True) -> None:
        """Send runs of pieces, see `send`: all of them enter the log, or none does."""
        if not self._is_sent:
            self.recover()
        if self._unused:
            self._drop_unused()
        turns: dict[str, int] = {}
        for entry in entries:
            device = entry.piece.device
            entry.number = self._entries
            self._entries += 1
            if entry.piece.is_stateful:
                if device not in turns:
                    turns[device] = self._turn(self._devices[device])
                entry.turn = turns[device] = turns[device] + 1
        self._is_sent = self._is_noted = False
        self._log.extend(entries)
        for group in _together(entries):
            self._send(group)
        self._is_sent = True
        for device, turn in turns.items() if saves else ():
            if turn - self._devices[device].snapshot.turn >= KEEP_EVERY:
                self.save(device)

    def _send(self, entries: Sequence[Entry]) -> None:
        """Send runs of a device together; take the references of their answers unless they are done
        already."""
        device = entries[0].piece.device
        sendings = [
            Sending(
                Run(entry.piece.number, entry.run, entry.turn, self._settled),
                [value.reference for value in entry.inputs], entry.piece.returns,
            )
            for entry in entries
        ]  # fmt: skip
        self.messages["Run"] += len(sendings)
        answers = self.carrier.send(device, *sendings)
        for entry, (*sent, record) in zip(entries, answers, strict=True):
            for value in entry.inputs:
                maker = value.maker
                if maker is not None and maker[0] != device and device not in value.sent_to:
                    value.sent_to += (device,)
                    self.crossed += 1
                    self.crossings.append(Crossing(maker[1:], (entry.piece.number, entry.run)))
            if not entry.is_done:
                for value, reference in zip(entry.outputs, sent, strict=True):
                    value.reference = reference
                entry.record.reference = record

    def has_sent(self, entry: Entry) -> bool:
        """Return whether an entry is in the log, or was until it was done."""
        return entry.record.reference is not None or entry in self._log

    def end_run(self, run: int) -> None:
        """Note that no more pieces of a run will be sent."""
        self._ended.add(run)
        self._is_noted = False

    def finish_run(self, run: int) -> None:
        """Wait until all pieces of a run have ended; no more of them will be sent.

        Raises the error of a task without results, once, as `wait` and `value` do.
        """
        self.end_run(run)
        self.settle([entry.record for entry in self._log if entry.run == run])
        self._raise_untold()

    # -- persistent buffers ------------------------------------------------------------------------

    def write(self, device: str, buffers: dict[str, RemoteValue]) -> None:
        """Set persistent buffers of a device, all of them before the first run that reads them.

        No run may be under way on the device.
        """
        held = self._devices[device]
        for value in buffers.values():
            self.value(value)
        before = self._snapshot_now(held)
        message = Write(tuple(buffers), before.turn)
        (found,) = self.carrier.values(self._exchange(device, message, tuple(buffers.values())))
        if isinstance(found, Failure):
            raise found.error()
        held.reading = None
        held.snapshot = _Snapshot(before.buffers | buffers, before.turn, self._entries)
        self._forget_done()

    def read(self, device: str, buffers: Sequence[str]) -> list[Array]:
        """Return persistent buffers of a device, as they travel, after the runs that were sent."""
        self._settle_device(device)
        answers = self._exchange(device, Read(tuple(buffers)), (), len(buffers) + 1)
        *arrays, _ = self.carrier.values(answers)
        for array in arrays:
            if isinstance(array, Failure):
                raise array.error()
        return arrays

    def _settle_device(self, device: str) -> None:
        self.settle([entry.record for entry in self._log if entry.piece.device == device])

    def finish(self, entries: Sequence[Entry]) -> None:
        """Wait for runs that were sent; raise the error of one that could not write a persistent
        buffer, which runs that read the buffer fail with, too."""
        records = [entry.record for entry in entries]
        self.settle(records)
        for found in self.carrier.values(_references(records)):
            if isinstance(found, Failure):
                raise found.error()

    def _turn(self, held: _Device) -> int:
        """Return the last turn of a device that was sent."""
        turns = (e.turn for e in reversed(self._log) if e.turn and e.piece.device == held.name)
        return next(turns, held.snapshot.turn)

    def save(self, device: str) -> None:
        """Ask for the persistent buffers of a device, behind the runs that were sent: what a server
        that is started again begins with.

        Does nothing while a run has kept values on the device: it would not be enough.
        """
        held = self._devices[device]
        if held.reading is not None:
            return
        kept: set[tuple[int, str]] = set()
        for entry in self._log:
            if entry.piece.device == held.name and entry.run not in self._ended:
                kept.update([(entry.run, name) for name in entry.piece.keeps])
                kept.difference_update([(entry.run, name) for name in entry.piece.drops])
        if not kept:
            turn, names = self._turn(held), held.buffers
            answers = self._carry(held.name, Read(names), (), len(names) + 1)
            held.reading = _Reading(names, answers, turn, self._entries)
            self._is_noted = False

    def _take_snapshot(self, held: _Device, reading: _Reading) -> None:
        """Replace the snapshot of a device by one that was read, unless it was read too early."""
        if any(
            not entry.is_done and entry.number < reading.number
            for entry in self._log if entry.piece.device == held.name
        ):  # fmt: skip
            return
        outcomes = {self.carrier.outcome(answer) for answer in reading.answers}
        if Outcome.PENDING in outcomes:
            return
        held.reading = None
        if outcomes != {Outcome.READY}:
            return
        *buffers, turn = reading.answers
        # Behind a turn that came too early the buffers are older.
        if self.carrier.values([turn]) == [reading.turn]:
            held.snapshot = _Snapshot(
                dict(zip(reading.names, map(RemoteValue, buffers), strict=True)), reading.turn,
                reading.number,
            )  # fmt: skip

    def _snapshot_now(self, held: _Device) -> _Snapshot:
        """Return a snapshot after all turns that were sent."""
        self._settle_device(held.name)
        turn, names = self._turn(held), held.buffers
        if turn != held.snapshot.turn:
            answers = self._exchange(held.name, Read(names), (), len(names) + 1)
            self._take_snapshot(held, _Reading(names, answers, turn, self._entries))
        if turn != held.snapshot.turn:
            raise self._gave_up(held.name, "its persistent buffers")
        return held.snapshot

    # -- waiting and recovery ----------------------------------------------------------------------

    def settle(self, values: Sequence[RemoteValue]) -> None:
        """Wait until values are there; start servers again that ended meanwhile.

        Raises `TaskError` after `MAX_RETRIES` recoveries without a run that ended between.
        """
        while True:
            self.carrier.wait(_references(values))
            if all(self._is_there(value) for value in values):
                if not self._is_noted:
                    self._forget_done()
                return
            self.recover()

    def wait(self) -> None:
        """Wait until all runs that were sent have ended."""
        self.settle([entry.record for entry in self._log])
        self._raise_untold()

    def _raise_untold(self) -> None:
        if self._untold:
            raise self._untold.popleft().error()

    def _is_there(self, value: RemoteValue) -> bool:
        reference = value.reference
        return reference is not None and self.carrier.outcome(reference) is Outcome.READY

    def value(self, value: RemoteValue, name: str = "a value") -> Array:
        """Return an array as it travelled; raise the error of the task that failed, or `TaskError`
        if it was lost. `name`: of the value, for errors."""
        return self.values([value], name)[0]

    def values(self, values: Sequence[RemoteValue], name: str = "a value") -> list[Array]:
        """Return arrays as `value` does; raise the first error."""
        self.settle(values)
        arrays = self.carrier.values(_references(values))
        for value, array in zip(values, arrays, strict=True):
            if array is Outcome.LOST:
                raise _lost(value, name).error()
            if isinstance(array, Failure):
                raise array.error()
        self._raise_untold()
        return arrays

    def _look(self, entry: Entry) -> bool:
        """Return whether a run has ended; note it."""
        if not entry.is_done and self._is_there(entry.record):
            (record,) = self.carrier.values([entry.record.reference])
            entry.is_done = True
            self._retries = 0
            if isinstance(record, RunRecord):
                self.records.append(record)
                if record.untold is not None:
                    self._untold.append(record.untold)
        return entry.is_done

    def _forget_done(self) -> None:
        """Drop the runs that will not be sent again."""
        closed = self._ended.difference([e.run for e in self._log if not self._look(e)])
        for held in self._devices.values():
            if held.reading is not None:
                self._take_snapshot(held, held.reading)
        #: Runs on a device with a turn that a restart repeats, with what that turn needs there.
        read = {name: held.snapshot.number for name, held in self._devices.items()}
        repeated = {
            (e.run, e.piece.device) for e in self._log
            if e.turn and e.number >= read[e.piece.device]
        }  # fmt: skip
        self._log = [
            entry for entry in self._log
            if not entry.is_done
            or (entry.turn and entry.number >= read[entry.piece.device])
            or (entry.piece.keeps and (
                entry.run not in closed or (entry.run, entry.piece.device) in repeated
            ))
        ]  # fmt: skip
        runs = {entry.run for entry in self._log}
        self._ended &= runs
        self._settled = min(runs - closed, default=self.runs)
        self._is_noted = all(entry.is_done for entry in self._log) and not any(
            held.reading for held in self._devices.values()
        )

    def recover(self) -> None:
        """Start servers again that ended, and send again what was lost."""
        carrier = self.carrier
        carrier.wait(_references([entry.record for entry in self._log]))
        for entry in self._log:
            self._look(entry)
        self._is_sent = False
        for held in self._devices.values():
            if held.is_started and carrier.has_ended(held.name):
                self._lost.add(held.name)
        self._retries += 1
        if self._retries > MAX_RETRIES:
            self._retries = 0
            lost = f"{sum(not entry.is_done for entry in self._log)} runs of pieces"
            if self._lost:
                raise self._gave_up(min(self._lost), lost)
            raise TaskError(
                f"values between devices were lost {MAX_RETRIES + 1} times, and no server ended",
                got=f"lost: {lost}", remedy="the store of the cluster has no room for them: fewer "
                "calls in flight, or free results",
            )  # fmt: skip
        if self._retries > 1:
            self._fail_lost_inputs()
        for name in sorted(self._lost):
            self._restart(self._devices[name])
        for entry in self._log:
            is_lost = entry.piece.device in self._lost and (entry.turn or entry.piece.keeps)
            # Answers that are there stay: the same run gives the same bits.
            number = self._devices[entry.piece.device].snapshot.number
            if not entry.is_done or (is_lost and entry.number >= number):
                self._send([entry])
        self._lost.clear()
        self._is_sent = True

    def _fail_lost_inputs(self) -> None:
        """Replace values that are lost by failures, of which runs that read them are told."""
        for entry in self._log:
            for value in () if entry.is_done else filter(self._is_there, entry.inputs):
                (found,) = self.carrier.values([value.reference])
                if found is Outcome.LOST:
                    value.reference = self.carrier.put(_lost(value, "a value"))

    def _restart(self, held: _Device) -> None:
        """Start the server of a device and send what it held; runs follow."""
        carrier, snapshot = self.carrier, held.snapshot
        self.restarts[held.name] += 1
        carrier.start(held.name)
        held.reading = None
        sent = [
            *[self._carry(held.name, Load(key, data)) for key, data in held.files.items()],
            *[self._carry(held.name, message) for message, _ in held.pieces.values()],
        ]  # fmt: skip
        if snapshot.turn or snapshot.buffers:
            message = Write(tuple(snapshot.buffers), snapshot.turn)
            sent.append(self._carry(held.name, message, tuple(snapshot.buffers.values())))
        for (reference,) in sent:
            carrier.wait([reference])
            if carrier.outcome(reference) is Outcome.READY:
                (answer,) = carrier.values([reference])
                if isinstance(answer, Failure):
                    raise answer.error()

    def _gave_up(self, device: str, what: str) -> TaskError:
        return TaskError(
            f"the server of device {device!r} ended {MAX_RETRIES + 1} times",
            where=self.carrier.whereabouts(device), got=f"lost: {what}",
            remedy="look at the memory and the log of that machine; what was saved is unchanged",
        )  # fmt: skip

    def close(self) -> None:
        """End all servers. Closing twice is allowed."""
        self._log.clear()
        self.carrier.close()


def _lost(value: RemoteValue, name: str) -> Failure:
    """Return the error of a value that no server and no store holds any more."""
    device, piece, run = value.maker or ("of the client", 0, 0)
    return Failure(
        "TaskError", f"{name} of device {device!r} is lost", f"run {run} of piece {piece}",
        got="the node that held it ended", remedy="call again",
    )  # fmt: skip


def _together(entries: Iterable[Entry]) -> list[list[Entry]]:
    """Return runs in the order in which they are sent, those that share a message together.

    A run is sent with the one before it on its device if no other run reads what that one answers,
    and it reads no answers itself: neither has to wait for the other more than in two messages.
    """
    entries = tuple(entries)
    read = {value for entry in entries for value in entry.inputs}
    groups: list[list[Entry]] = []
    last: dict[str, list[Entry]] = {}
    for entry in entries:
        device = entry.piece.device
        group = last.get(device)
        if (
            group is None
            or not read.isdisjoint(group[-1].outputs)
            or any(value.maker is not None for value in entry.inputs)
        ):
            group = last[device] = []
            groups.append(group)
        group.append(entry)
    return groups


def _references(values: Sequence[RemoteValue]) -> list[Reference]:
    """Return the references of the values that were sent."""
    return [value.reference for value in values if value.reference is not None]


def sha256_of(data: bytes) -> str:
    """Return the SHA-256 of a file's bytes, hexadecimal."""
    return hashlib.sha256(data).hexdigest()
