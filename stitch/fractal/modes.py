"""How functions over nests run: element by element, each operation at once, on some device.

Comes in: a device, or none. Goes out: the builder whose tensors a function is given. Must not know
nests.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from threading import Lock

from stitch.argument_kinds import instance_of, optional, takes
from stitch.errors import UsageError, closest
from stitch.fractal.eager import EagerBuilder
from stitch.runtime import RuntimeDevice

MODES = ("sequential",)
#: The builder of the device that is used where none is told, once it is needed.
_made: list[EagerBuilder] = []
_lock = Lock()
_current: ContextVar[EagerBuilder | None] = ContextVar("fractal mode", default=None)


@contextmanager
@takes(device=optional(instance_of("an open device", RuntimeDevice)))
def mode(name: str, device: RuntimeDevice | None = None) -> Iterator[None]:
    """Functions over nests run in this mode within, on this device (default: one of the machine
    `host`).

    `sequential`: element by element, each operation computed as it is written, so that a debugger
    sees numbers and errors name the line. Raises `UsageError` for another mode.
    """
    if name not in MODES:
        raise UsageError(
            f"there is no mode {name!r}", expected=", ".join(MODES), remedy=closest(name, MODES)
        )
    token = _current.set(_default() if device is None else EagerBuilder(device))
    try:
        yield
    finally:
        _current.reset(token)


def builder_in_use() -> EagerBuilder:
    """What makes tensors in the mode of now."""
    return _current.get() or _default()


def _default() -> EagerBuilder:
    with _lock:
        if not _made:
            _made.append(EagerBuilder(RuntimeDevice("host")))
        return _made[0]
