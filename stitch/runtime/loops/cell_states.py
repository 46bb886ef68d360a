"""PersistentBuffers: the values of a loop by number, and what comes after each of their states.

A cell holds a value as a handle does.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from stitch.runtime.device import RuntimeDevice
from stitch.runtime.tensor import Tensor, handle_on
from stitch.runtime.values import Status, ValueRecord

#: Called when it is certain that the cells change; perhaps twice.
Then = Callable[[], object] | None
#: States of cells that are remembered, with what comes after each.
MAX_STATES = 64


@dataclass(frozen=True, slots=True, eq=False)
class State:
    """What cells hold at one moment. A loop comes to the same states again: then one comparison
    tells that all values are the same, and one assignment hands all results over.

    `resting`: values of leases that no cell holds any more, and whose handles are not given back
    yet: the stage that made them runs into them again, or `RuntimeDevice.drain` gives them back.
    """

    values: tuple[ValueRecord | None, ...]
    resting: frozenset[ValueRecord]
    #: What comes next: where cells are emptied, and where a stage runs.
    drops: dict[tuple[int, ...], State] = field(default_factory=dict)
    runs: dict[object, Any] = field(default_factory=dict)


class _Held:
    """The state of cells, which outlives them for as long as their end has not been seen to."""

    __slots__ = ("known", "state")

    def __init__(self) -> None:
        self.known: dict[tuple[object, ...], State] = {}
        self.state = self.found((), frozenset())

    def found(
        self, values: tuple[ValueRecord | None, ...], resting: frozenset[ValueRecord]
    ) -> State:
        """The state in which these are held; the same as before, if there was one."""
        key = (values, resting)
        state = self.known.get(key)
        if state is None:
            if len(self.known) >= MAX_STATES:
                self.forget()
            state = self.known[key] = State(values, resting)
        return state

    def forget(self) -> None:
        """Nothing is known of what comes next, and no state refers to another."""
        for state in self.known.values():
            state.drops.clear()
            state.runs.clear()
        self.known.clear()

    def release_buffer(self, dropped: deque[ValueRecord], lender: object = None) -> bool:
        """Leave the notes of what rests, where it is of one `lender` only what came from that, or
        from nobody; whether there was any."""
        state = self.state
        gone = [*state.resting]
        if lender is not None:
            gone = [v for v in gone if v.lease is None or v.lease.holder is lender]
        if not gone:
            return False
        after = self.found(state.values, state.resting.difference(gone))
        # Atomic under the GIL: no call in between.
        self.state = after
        dropped += gone
        return True

    def end(self, device: RuntimeDevice) -> None:
        """Nobody refers to the cells any more; twice does no harm."""
        state = self.state
        gone = [*[value for value in state.values if value is not None], *state.resting]
        self.forget()
        empty = State((None,) * len(state.values), frozenset())
        # Atomic under the GIL: no call in between.
        self.state = empty
        device.deaths.dropped += gone
        device.deaths.resting = [held for held in device.deaths.resting if held is not self]


class PersistentBuffers:
    """Values by number; each counts as a handle on its value. A cell may be empty."""

    def __init__(self, device: RuntimeDevice) -> None:
        self.device, self.held = device, _Held()
        device.deaths.resting.append(self.held)
        device.deaths.notes.await_end(self, partial(self.held.end, device))

    @property
    def values(self) -> tuple[ValueRecord | None, ...]:
        """What they hold."""
        return self.held.state.values

    def grow(self, count: int) -> None:
        """So many more, empty."""
        state = self.held.state
        self.held.state = self.held.found((*state.values, *[None] * count), state.resting)

    def tensor(self, number: int) -> Tensor | None:
        """A handle on what a cell holds, None where it is empty."""
        with self.device.lock:
            self.device.check_consistent()
            value = self.values[number]
            return None if value is None else handle_on(value)

    def is_alone(self, number: int) -> bool:
        """Whether a cell's value may be written to: it is there, and nobody else holds it, nor its
        bytes."""
        with self.device.lock:
            self.device.check_consistent()
            self.device.drain()
            value = self.values[number]
            if value is None or value.handles > 1 or value.status is not Status.READY:
                return False
            buffers = [instance.buffer for instance in value.instances]
            return all(len(buffer.users) <= 1 and buffer.is_open for buffer in buffers)

    def hold(self, number: int, tensor: Tensor | None) -> None:
        """A cell holds what a handle refers to, or nothing."""
        with self.device.lock:
            self.device.check_consistent()
            value = None if tensor is None else tensor._record
            after, gone = self.changed({number: value}, rests=False)
            held, dropped = self.held, self.device.deaths.dropped
            # Atomic under the GIL: no call in between.
            held.state = after
            if value is not None:
                value.handles += 1
            dropped += gone
            self.device.drain()

    def drop(self, numbers: tuple[int, ...]) -> None:
        """Empty cells: their values are freed once nobody else holds them."""
        device, held = self.device, self.held
        with device.lock:
            device.check_consistent()
            state = held.state
            after = state.drops.get(numbers)
            if after is not None:
                held.state = after
                return
            after, gone = self.changed(dict.fromkeys(numbers))
            if not gone:
                state.drops[numbers] = after
            dropped = device.deaths.dropped
            # Atomic under the GIL: no call in between.
            held.state = after
            dropped += gone
            device.drain(resting=False)

    def close(self) -> None:
        """Empty all cells, and give back what they held."""
        with self.device.lock:
            self.device.check_consistent()
            self.held.end(self.device)
            self.device.drain()

    def changed(
        self, changes: Mapping[int, ValueRecord | None], *, rests: bool = True
    ) -> tuple[State, list[ValueRecord]]:
        """The state after some cells hold others, and what it has no place for.

        `rests`: what came from a lease rests, else nothing that is replaced does.
        """
        state, gone = self.held.state, []
        values, resting = [*state.values], {*state.resting}
        for number, value in changes.items():
            before, values[number] = values[number], value
            if before is None:
                continue
            if rests and before.lease is not None:
                resting.add(before)
            else:
                gone.append(before)
        held_again = resting.intersection(changes.values())
        resting -= held_again
        if not rests:
            gone += held_again
        return self.held.found(tuple(values), frozenset(resting)), gone

    def become(
        self, after: State, fresh: Sequence[ValueRecord], gone: Sequence[ValueRecord], then: Then
    ) -> None:
        """Come to a state, with values that nobody else knows; the device's lock is held.

        `then` belongs to it: it comes before, may come twice, and does no harm.
        """
        device = self.device
        finish = partial(self._finish, after, fresh, gone, then)
        # From here on it will happen: `DeviceLocking.rebuild_bookkeeping` ends what is interrupted.
        device.records.is_consistent = False
        device.records.pending_recovery = finish
        finish()
        device.records.is_consistent = True

    def _finish(
        self, after: State, fresh: Sequence[ValueRecord], gone: Sequence[ValueRecord], then: Then
    ) -> None:
        if then is not None:
            then()
        for value in fresh:
            value.handles = 1
        device, held, dropped = self.device, self.held, self.device.deaths.dropped
        # Atomic under the GIL: no call in between.
        held.state = after
        dropped += gone
        device.records.pending_recovery = None
