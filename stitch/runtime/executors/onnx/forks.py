"""What ONNX Runtime leaves in the child of a fork: threads that are not there to be waited for.

A session with several threads joins them when it is destroyed, which ends a forked child by a
fault; since version 1.29 the library itself waits at exit for a thread of its own, for ever. So in
a child the sessions that it inherited live until the end, and its exit skips what the parent had
registered with the C library, as that of multiprocessing's children does. Sessions made in the
child are as anywhere.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from typing import Any

_sessions: weakref.WeakSet[Any] = weakref.WeakSet()
_c_library = ctypes.CDLL(None)


def keep_in_children(session: Any) -> None:
    """Never destroy this session in a process that inherited it."""
    _sessions.add(session)


def _in_child() -> None:
    for session in tuple(_sessions):
        # One reference that nobody gives back.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(session))
    # Called first of all that the child inherits, with the exit code. Only glibc has it.
    on_exit = getattr(_c_library, "on_exit", None)
    if on_exit is not None:
        on_exit(_c_library._exit, None)


os.register_at_fork(after_in_child=_in_child)
