"""Calls that are interrupted before a line of what they run."""

from __future__ import annotations

import linecache
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

from stitch.planner import Plan
from stitch.runtime import RuntimeDevice


def interrupted(
    call: Callable[[], object], at: int, files: tuple[str, ...], *, but: str = ""
) -> bool:
    """Call, with an interrupt before the line that runs as the `at`th of these files; whether it
    came. Lines that begin with `but` are passed over: nothing interrupts where a lock is given
    back."""
    left = at

    def local(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal left
        if event == "line" and not (but and _line_of(frame).startswith(but)):
            left -= 1
            if not left:
                raise KeyboardInterrupt
        return local

    def entered(frame: FrameType, event: str, argument: object) -> Any:
        return local if frame.f_code.co_filename.endswith(files) else None

    before = sys.gettrace()
    sys.settrace(entered)
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


def _line_of(frame: FrameType) -> str:
    return linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()


def interrupt_next_plan(device: RuntimeDevice) -> None:
    """The next plan that a device binds is interrupted before any of it runs."""
    left = [KeyboardInterrupt]

    def interrupt(plan: Plan) -> None:
        if left:
            raise left.pop()

    device.on_plan(interrupt)
