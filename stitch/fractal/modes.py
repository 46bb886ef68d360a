"""How functions over nests run, and on which device.

Comes in: the name of a mode, a device, or none. Goes out: the way that functions within run in.
Must not know nests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Lock

from stitch.argument_kinds import instance_of, optional, takes
from stitch.errors import UsageError, closest
from stitch.fractal.current import Way, using, way_set
from stitch.fractal.eager import EagerBuilder
from stitch.fractal.parallel import Parallel
from stitch.fractal.sequential import Sequential
from stitch.runtime import RuntimeDevice


def _sequential(device: RuntimeDevice) -> Sequential:
    return Sequential(EagerBuilder(device))


def _parallel(device: RuntimeDevice) -> Parallel:
    return Parallel(device, _sequential(device))


#: How to make the way of each mode.
_MODES: dict[str, Callable[[RuntimeDevice], Way]] = {
    "sequential": _sequential, "parallel": _parallel,
}  # fmt: skip
MODES = tuple(_MODES)
#: The device that is used where none is told, and its ways, once they are needed.
_devices: list[RuntimeDevice] = []
_ways: dict[str, Way] = {}
_lock = Lock()


@contextmanager
@takes(device=optional(instance_of("an open device", RuntimeDevice)))
def mode(name: str, device: RuntimeDevice | None = None) -> Iterator[None]:
    """Functions over nests run in this mode within, on this device (default: one of the machine
    `host`).

    `sequential`: element by element, each operation computed as it is written, so that a debugger
    sees numbers and errors name the line. `parallel`: traced and run as one program, cells that do
    not wait for one another at the same time; the same results, to rounding where products change
    their shape. Raises `UsageError` for another mode.
    """
    if name not in MODES:
        raise UsageError(
            f"there is no mode {name!r}", expected=", ".join(MODES), remedy=closest(name, MODES)
        )
    with using(_default(name) if device is None else _MODES[name](device)):
        yield


def way_in_use() -> Way:
    """How functions run now: in the mode chosen, else one after the other."""
    return way_set() or _default("sequential")


def _default(name: str) -> Way:
    with _lock:
        if name not in _ways:
            if not _devices:
                _devices.append(RuntimeDevice("host"))
            _ways[name] = _MODES[name](_devices[0])
        return _ways[name]
