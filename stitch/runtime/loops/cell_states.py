"""`PersistentBuffers`: the values of a loop by cell number, and the transitions between their
states.

A cell references a value as a handle does.
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

#: Called when the change of the cells is certain; must be idempotent.
Then = Callable[[], object] | None
#: Limit for cached states.
MAX_STATES = 64


@dataclass(frozen=True, slots=True, eq=False)
class State:
    """The values of all cells at one moment.

    A loop returns to the same states, so one comparison checks all values and one assignment stores
    all results. `resting`: values in output slots that no cell references, but that are not
    released yet: the executable that made them reuses them, or `RuntimeDevice.drain` releases them.
    """

    values: tuple[ValueRecord | None, ...]
    resting: frozenset[ValueRecord]
    #: Successors: after emptying cells, and after runs.
    drops: dict[tuple[int, ...], State] = field(default_factory=dict)
    runs: dict[object, Any] = field(default_factory=dict)


class _Held:
    """The state of the cells; outlives them until their finalizer note is processed."""

    __slots__ = ("known", "state")

    def __init__(self) -> None:
        self.known: dict[tuple[object, ...], State] = {}
        self.state = self.found((), frozenset())

    def found(
        self, values: tuple[ValueRecord | None, ...], resting: frozenset[ValueRecord]
    ) -> State:
        """Return the cached or a new state with these values."""
        key = (values, resting)
        state = self.known.get(key)
        if state is None:
            if len(self.known) >= MAX_STATES:
                self.forget()
            state = self.known[key] = State(values, resting)
        return state

    def forget(self) -> None:
        """Drop all cached states and their transitions."""
        for state in self.known.values():
            state.drops.clear()
            state.runs.clear()
        self.known.clear()

    def release_buffer(self, dropped: deque[ValueRecord], lender: object = None) -> bool:
        """Queue resting values for release; returns whether there were any.

        With `lender`, only values in its output slots or in none.
        """
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
        """Release all values after the cells were dropped. Idempotent."""
        state = self.state
        gone = [*[value for value in state.values if value is not None], *state.resting]
        self.forget()
        empty = State((None,) * len(state.values), frozenset())
        # Atomic under the GIL: no call in between.
        self.state = empty
        device.deaths.dropped += gone
        mine = self.release_buffer
        device.deaths.resting = [other for other in device.deaths.resting if other != mine]


class PersistentBuffers:
    """Values by cell number; each cell counts as a handle. A cell may be empty."""

    def __init__(self, device: RuntimeDevice) -> None:
        self.device, self.held = device, _Held()
        device.deaths.resting.append(self.held.release_buffer)
        device.deaths.await_end(self, partial(self.held.end, device))

    @property
    def values(self) -> tuple[ValueRecord | None, ...]:
        """The values of the cells."""
        return self.held.state.values

    def grow(self, count: int) -> None:
        """Append `count` empty cells."""
        state = self.held.state
        self.held.state = self.held.found((*state.values, *[None] * count), state.resting)

    def tensor(self, number: int) -> Tensor | None:
        """Return a handle on a cell's value, or None if it is empty."""
        with self.device.lock:
            self.device.check_consistent()
            value = self.values[number]
            return None if value is None else handle_on(value)

    def is_alone(self, number: int) -> bool:
        """Return whether a cell's value may be overwritten: ready, and neither it nor its buffer is
        used elsewhere."""
        with self.device.lock:
            self.device.check_consistent()
            self.device.drain()
            value = self.values[number]
            if value is None or value.handles > 1 or value.status is not Status.READY:
                return False
            buffers = [instance.buffer for instance in value.instances]
            return all(len(buffer.users) <= 1 and buffer.is_open for buffer in buffers)

    def hold(self, number: int, tensor: Tensor | None) -> None:
        """Store a tensor's value in a cell, or empty it."""
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
        """Empty cells; their values are freed once unreferenced."""
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
        """Empty all cells and release their values."""
        with self.device.lock:
            self.device.check_consistent()
            self.held.end(self.device)
            self.device.drain()

    def changed(
        self, changes: Mapping[int, ValueRecord | None], *, rests: bool = True
    ) -> tuple[State, list[ValueRecord]]:
        """Return the state after changing some cells, and the values to release.

        `rests`: values in output slots rest for reuse; otherwise all replaced values are released.
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
        """Change to a state; the run lock is held.

        Args:
            after: The new state.
            fresh: New values, which get their first handle.
            gone: Values to release.
            then: Called first, atomically with the change; may be called twice.
        """
        device = self.device
        finish = partial(self._finish, after, fresh, gone, then)
        # From here on the change is completed, by `check_consistent` if
        # interrupted.
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
