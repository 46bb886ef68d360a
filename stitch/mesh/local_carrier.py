"""`LocalCarrier`: all device servers in this process, in order or in any legal order drawn from a
seed, with faults at chosen messages.

It is a deterministic simulation: one message is handled at a time, and the same seed and faults
give the same order.
"""

from __future__ import annotations

import os
import random
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from stitch.errors import UsageError
from stitch.mesh.carrier import Outcome, Sending, unchanging
from stitch.mesh.messages import Close, Failure, Message, NotDone
from stitch.mesh.server import DeviceServer
from stitch.program import Array

#: What may happen at a message. The server is killed before it reads it, while it computes (the
#: result is dropped with it), or before its answer leaves; the answer is lost; the message is
#: handled twice; it is handled after everything else that can be.
FAULTS: Final = ("kill before", "kill during", "kill after", "lose answer", "double", "delay")


@dataclass(slots=True, eq=False)
class _Cell:
    """A value: where it is made, what became of it, and the devices that it was brought to."""

    device: str
    outcome: Outcome = Outcome.PENDING
    value: Any = None
    readers: set[str] = field(default_factory=set)


@dataclass(slots=True, eq=False)
class _Call:
    number: int
    message: Message
    values: tuple[_Cell, ...]
    answers: tuple[_Cell, ...]
    is_delayed: bool = False


class LocalCarrier:
    """Device servers in this process.

    Args:
        open_server: Opens the server of a device by name.
        seed: Draws the order in which servers handle their next messages; None: as sent.
        faults: What happens at a message, by its number among all that were sent.

    Attributes:
        sent: The number of messages by type.
        crossings: The number of times that a value was brought from one device to another.
    """

    def __init__(
        self, open_server: Callable[[str], DeviceServer], seed: int | None = None,
        faults: Mapping[int, str] | None = None,
    ) -> None:  # fmt: skip
        unknown = sorted({*(faults or {}).values()}.difference(FAULTS))
        if unknown:
            raise UsageError(f"there is no fault {unknown[0]!r}", expected=", ".join(FAULTS))
        self.capacity: int | None = None
        self._open_server, self._faults = open_server, dict(faults or {})
        self._draw = None if seed is None else random.Random(seed)
        self._servers: dict[str, DeviceServer] = {}
        self._queues: dict[str, deque[_Call]] = {}
        self.sent: Counter[str] = Counter()
        self.crossings = 0
        self.messages = 0

    # -- the carrier -------------------------------------------------------------------------------

    def start(self, device: str) -> None:
        """Open the server of a device; a server that was there before is killed."""
        self._kill(device)
        self._queues[device] = deque()
        self._servers[device] = self._open_server(device)

    def send(self, device: str, *sendings: Sending) -> list[tuple[_Cell, ...]]:
        """Queue messages; without a seed they are handled at once."""
        return [self._queue(device, sending) for sending in sendings]

    def _queue(self, device: str, sending: Sending) -> tuple[_Cell, ...]:
        message, values, returns = sending
        call = _Call(
            self.messages, message, tuple(values), tuple([_Cell(device) for _ in range(returns)])
        )
        self.messages += 1
        self.sent[type(message).__name__] += 1
        if device not in self._servers:
            _end(call, Outcome.LOST)
            return call.answers
        call.is_delayed = self._faults.get(call.number) == "delay"
        self._queues[device].append(call)
        if self._draw is None and not call.is_delayed:
            while self._step():
                pass
        return call.answers

    def put(self, value: Array | Failure) -> _Cell:
        """Return a reference to a value of the client."""
        return _Cell("", Outcome.READY, unchanging(value))

    def wait(self, references: Sequence[_Cell]) -> None:
        """Handle messages until no reference is pending."""
        while any(cell.outcome is Outcome.PENDING for cell in references) and self._step():
            pass

    def outcome(self, reference: _Cell) -> Outcome:
        """Return what became of a value by now."""
        return reference.outcome

    def values(self, references: Sequence[_Cell]) -> list[Any]:
        """Return values that are ready."""
        return [reference.value for reference in references]

    def has_ended(self, device: str) -> bool:
        """Return whether the server of a device was killed."""
        return device not in self._servers

    def whereabouts(self, device: str) -> str:
        """Return the process of a device's server."""
        return f"pid {os.getpid()} (this process)"

    def close(self) -> None:
        """Close all devices."""
        for device in list(self._servers):
            self._kill(device)

    # -- the simulation ----------------------------------------------------------------------------

    def _step(self) -> bool:
        """Handle one message whose values are there; return whether there was one."""
        ready = [
            name for name, queue in self._queues.items()
            if queue and all(c.outcome is not Outcome.PENDING for c in queue[0].values)
        ]  # fmt: skip
        now = [name for name in ready if not self._queues[name][0].is_delayed]
        if not ready:
            return False
        names = now or ready
        device = names[0] if self._draw is None else self._draw.choice(names)
        # It leaves the queue when it was handled: after an interrupt it is handled again.
        self._handle(device, self._queues[device][0])
        return True

    def _handle(self, device: str, call: _Call) -> None:
        server, fault = self._servers[device], self._faults.get(call.number)
        if any(cell.outcome is not Outcome.READY for cell in call.values):
            _end(call, Outcome.LOST)
            self._queues[device].popleft()
            return
        if fault == "kill before":
            self._faults.pop(call.number)
            self._kill(device)
            return
        answer = server.handle(call.message, *[cell.value for cell in call.values])
        if fault == "double":
            answer = server.handle(call.message, *[cell.value for cell in call.values])
        for cell in call.values:
            if cell.device and cell.device != device and device not in cell.readers:
                cell.readers.add(device)
                self.crossings += 1
        self._faults.pop(call.number, None)
        if fault in ("kill during", "kill after"):
            self._kill(device)
            return
        # The server does not know how many values a message of an unknown piece has.
        answers = answer if isinstance(answer, tuple) else (answer,) * len(call.answers)
        if fault == "lose answer" or type(answers[-1]) is NotDone:
            _end(call, Outcome.SILENT)
        else:
            for cell, value in zip(call.answers, answers, strict=True):
                cell.value, cell.outcome = value, Outcome.READY
        self._queues[device].popleft()

    def _kill(self, device: str) -> None:
        """End a server: what it was sent, and what it holds, is lost."""
        server = self._servers.pop(device, None)
        for call in self._queues.pop(device, ()):
            _end(call, Outcome.LOST)
        if server is not None:
            server.handle(Close())


def _end(call: _Call, outcome: Outcome) -> None:
    for cell in call.answers:
        cell.outcome = outcome
