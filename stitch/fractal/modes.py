"""How functions over nests run, and on which device.

Comes in: the name of a mode, a device, or none. Goes out: the way that functions within run in.
Must not know nests.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock
from typing import Any

from stitch.argument_kinds import TEXT, instance_of, optional, takes
from stitch.compiler import check_schedule
from stitch.errors import UsageError, closest
from stitch.fractal.current import CallReport, Way, reporting, using, way_set
from stitch.fractal.eager import EagerBuilder
from stitch.fractal.fractal_tensor import FractalTensor
from stitch.fractal.parallel import Parallel
from stitch.fractal.sequential import Sequential
from stitch.fractal.tracing import Traced
from stitch.fractal.zipped import Zipped
from stitch.graph import SymbolicTensor
from stitch.runtime import RuntimeDevice

MODES = ("sequential", "parallel")
#: Under which name a device keeps its ways, with the programs that they have compiled.
_KEPT = "functions over nests"
#: The device that is used where none is told, once it is needed.
_devices: list[RuntimeDevice] = []
_lock = Lock()


@contextmanager
@takes(device=optional(instance_of("an open device", RuntimeDevice)), schedule=optional(TEXT))
def mode(
    name: str, device: RuntimeDevice | None = None, *, schedule: str | None = None
) -> Iterator[CallReport]:
    """Functions over nests run in this mode within, on this device (default: one of the machine
    `host`).

    `sequential`: element by element, each operation computed as it is written, so that a debugger
    sees numbers and errors name the line. `parallel`: traced and run as one program, cells that do
    not wait for one another at the same time; the same results, to rounding where products change
    their shape. There a function runs once for all elements of one form, and what it does beside
    its result, as drawing numbers of `np.random`, it does as often. `schedule`: how loops run in
    parallel wherever they can, in place of what costs least. What `with` gives explains how the
    calls within ran. Raises `UsageError` for another mode or schedule, or one where nothing is
    scheduled.
    """
    if name not in MODES:
        raise UsageError(
            f"there is no mode {name!r}", expected=", ".join(MODES), remedy=closest(name, MODES)
        )
    check_schedule(schedule)
    if schedule is not None and name != "parallel":
        raise UsageError(f"mode {name} has no schedules", got=f"schedule={schedule!r}",
                         remedy='leave it out, or take the mode "parallel"')  # fmt: skip
    way = _way_on(device or _default_device(), name)
    if isinstance(way, Parallel) and schedule is not None:
        way = way.scheduled(schedule)
    report = CallReport()
    with using(way), reporting(report):
        yield report


def way_in_use(*values: Any) -> Way:
    """How functions run now: in the mode chosen, else one after the other; on values of a graph
    that is being written, in that graph."""
    way = way_set()
    if not isinstance(way, Traced):
        traced = list(traced_in(values))
        if traced:
            builder: Any = traced[0].builder
            return Traced(builder.innermost(traced))
    return way or _way_on(_default_device(), "sequential")


def traced_in(value: Any) -> Iterator[SymbolicTensor]:
    """The values of a graph in a nest, or in several."""
    if isinstance(value, tuple | list):
        for each in value:
            yield from traced_in(each)
    elif isinstance(value, Zipped):
        yield from traced_in(value.parts)
    elif isinstance(value, FractalTensor):
        yield from traced_in(value.data)
    elif isinstance(value, SymbolicTensor) and value.written is None:
        yield value


def _way_on(device: RuntimeDevice, name: str) -> Way:
    """The way of a mode on a device: the same one each time, as it keeps programs."""
    with _lock:
        found = device.kept.get(_KEPT)
        if not isinstance(found, Parallel):
            found = Parallel(device, Sequential(EagerBuilder(device)))
            if not device.is_closed:
                device.kept[_KEPT] = found
    return found if name == "parallel" else found.sequential


def _default_device() -> RuntimeDevice:
    """One of the machine `host`; another one in a process forked off, where the first is closed."""
    with _lock:
        if not _devices or _devices[0].is_closed:
            _devices[:] = [RuntimeDevice("host")]
        return _devices[0]
