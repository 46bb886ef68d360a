"""What a scenario gives, and what must hold of it after a fault.

Asks the public face only.
"""

from __future__ import annotations

import gc
import itertools
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from stitch.errors import TaskError

Array = np.ndarray[Any, Any]
#: What a device says that was interrupted in the middle of an update: it can be closed only.
INCONSISTENT = "interrupted while updating its records"
#: By name: what reads a handle, and the bytes that it must give.
Held = Mapping[str, tuple[Callable[[], Array], Array]]


@dataclass(frozen=True)
class Case:
    """One run of a scenario, prepared up to the moment of the fault.

    `calls` is what is stopped, each of them a whole of its own. `probe` uses the device in an
    ordinary way and raises where the result is wrong. `state` is what the calls change; it must be
    as before or as after one of them. `close` gives everything back. A case that is `reusable` is
    expensive, and is used again and again. `visits` makes what a signal handler might try, ready to
    be called: each raises where its result is wrong.
    """

    calls: tuple[Callable[[], object], ...]
    probe: Callable[[], object]
    close: Callable[[], object]
    held: Held = field(default_factory=dict)
    state: Callable[[], tuple[Array, ...]] | None = None
    views: Callable[[], dict[str, dict[str, Any]]] | None = None
    reusable: bool = False
    visits: Callable[[], tuple[Callable[[], object], ...]] = tuple

    def act(self) -> None:
        """Make all the calls."""
        for call in self.calls:
            call()

    def all_visits(self, reference: Reference) -> tuple[Callable[[], object], ...]:
        """Those, and a look at the state."""

        def look() -> None:
            if _state(self) not in reference.states:
                raise AssertionError("the state is as before or after none of the calls")

        return (*self.visits(), look)


@dataclass(frozen=True)
class Reference:
    """What runs without a fault leave: states between calls, and the most that spaces hold."""

    states: tuple[tuple[bytes, ...], ...]
    most_allocated: dict[str, int]


def reference_of(scenario: Callable[[], Case], *, visits: bool = False) -> Reference:
    """The reference of a scenario: one case that is not acted on, and one that is; `visits`: these
    are made as well."""
    states, most = [], dict[str, int]()
    for acted in (False, True):
        case = scenario()
        states.append(_state(case))
        for call in case.calls if acted else ():
            call()
            states.append(_state(case))
        case.probe()
        case.probe()
        for visited in (False, True) if visits else (False,):
            # They are kept: what they hold is there in other runs too.
            visitors = case.visits() if visited else ()
            # What they lead to is there from the third time on.
            for _ in range(3 if visited else 1):
                for visit in visitors:
                    visit()
                case.act()
                for space, allocated in _allocated(case).items():
                    most[space] = max(allocated, most.get(space, 0))
        case.close()
    return Reference(tuple(states), most)


def what_is_broken(case: Case, reference: Reference, seconds: float) -> str | None:
    """The first promise that a case breaks after a fault; None if it keeps all. Leaves it open."""
    checks: tuple[Callable[[], str | None], ...] = (
        lambda: _other_threads(case, seconds),
        lambda: _held_bytes(case),
        lambda: _kept_state(case, reference),
        lambda: _tried("the device fails afterwards", case.probe),
        lambda: _tried("the same again fails", case.act, lost=case.state is not None),
        lambda: _sums(case),
        lambda: _leaks(case, reference),
    )
    for check in checks:
        broken = check()
        if broken is not None:
            return broken
    return None


def what_closing_breaks(case: Case) -> str | None:
    """What `close()` raises."""
    return _tried("close() fails", case.close)


def is_inconsistent(broken: str | None) -> bool:
    """Whether what is broken is a device that says that it must be opened again."""
    return broken is not None and INCONSISTENT in broken


def says_lost(case: Case) -> bool:
    """Whether something that was held, or the state, says that it was lost."""
    for read in (*(read for read, _ in case.held.values()), case.state or (lambda: ())):
        try:
            read()
        except TaskError:
            return True
    return False


def _tried(what: str, step: Callable[[], object], *, lost: bool = False) -> str | None:
    """What a step raises; with `lost`, it may say that what it needs was lost."""
    try:
        step()
    except BaseException as error:
        return None if lost and _says_lost(error) else f"{what}: {_text(error)}"
    return None


def _says_lost(error: BaseException) -> bool:
    return isinstance(error, TaskError) and ("lost" in str(error) or "donated" in str(error))


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"


def _other_threads(case: Case, seconds: float) -> str | None:
    """Another thread uses the device, and comes back in time."""
    ended: list[str | None] = []
    thread = threading.Thread(
        target=lambda: ended.append(_tried("another thread fails", case.probe)), daemon=True
    )
    thread.start()
    thread.join(seconds)
    return ended[0] if ended else "another thread hangs"


def _held_bytes(case: Case) -> str | None:
    """Handles that were held read what they held, or say that they lost it."""
    for name, (read, expected) in case.held.items():
        try:
            found = read()
        except BaseException as error:
            if _says_lost(error):
                continue
            return f"a held handle fails ({name}): {_text(error)}"
        if found.dtype != expected.dtype or found.tobytes() != expected.tobytes():
            return f"a held handle reads other bytes ({name})"
    return None


def _state(case: Case) -> tuple[bytes, ...]:
    return () if case.state is None else tuple(array.tobytes() for array in case.state())


def _kept_state(case: Case, reference: Reference) -> str | None:
    if case.state is None:
        return None
    try:
        state = _state(case)
    except BaseException as error:
        return None if _says_lost(error) else f"the state cannot be read: {_text(error)}"
    return (
        None if state in reference.states else "the state is as before or after none of the calls"
    )


def _sums(case: Case) -> str | None:
    """In the memory report of each space, what is allocated and what is free make the whole."""
    for space, view in ({} if case.views is None else case.views()).items():
        allocated, free = (
            sum(e["size"] for e in view["block_table"] if e["allocated"] is kind)
            for kind in (True, False)
        )
        told = view["total_bytes_allocated_per_bank"], view["total_bytes_free_per_bank"]
        if (allocated, free) != told or sum(told) != view["total_bytes_per_bank"]:
            return f"the memory report does not sum up ({space})"
        ends = [(e["address"], e["address"] + e["size"]) for e in view["block_table"]]
        if any(end > start for (_, end), (start, _) in itertools.pairwise(ends)):
            return f"buffers overlap ({space})"
    return None


def _allocated(case: Case) -> dict[str, int]:
    gc.collect()
    views = {} if case.views is None else case.views()
    return {space: view["total_bytes_allocated_per_bank"] for space, view in views.items()}


def _leaks(case: Case, reference: Reference) -> str | None:
    for space, allocated in _allocated(case).items():
        more = allocated - reference.most_allocated[space]
        if more > 0:
            return f"memory leaks ({space})"
    return None
