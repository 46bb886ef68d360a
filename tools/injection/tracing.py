"""A call before every instruction, on every version of Python.

CPython 3.11 has `sys.settrace`, later versions `sys.monitoring`.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from types import CodeType, FrameType, FunctionType, MethodType
from typing import Any

#: Called with a frame before one of its instructions; what it raises, the frame raises.
Step = Callable[[FrameType], None]
#: Called with a frame, the name of what it calls, and that one's code if it is one of Python.
Called = Callable[[FrameType, str, CodeType | None], None]
Wants = Callable[[CodeType], bool]


class Tracing(ABC):
    """Instructions of the code that `wants` takes, of frames that begin after `start`."""

    def __init__(self, wants: Wants, step: Step, called: Called | None = None) -> None:
        self._wants = wants
        self._step = step
        self._called = called

    @abstractmethod
    def start(self) -> None:
        """From now on."""

    @abstractmethod
    def stop(self) -> None:
        """No longer."""


class TracedFrames(Tracing):
    """By `sys.settrace`."""

    def start(self) -> None:
        if self._called is not None:
            sys.setprofile(self._profiled)
        sys.settrace(self._begins)

    def stop(self) -> None:
        sys.settrace(None)
        sys.setprofile(None)

    def _begins(self, frame: FrameType, event: str, argument: Any) -> Any:
        code = frame.f_code
        if self._called is not None and frame.f_back is not None:
            self._called(frame.f_back, code.co_name, code)
        if not self._wants(code):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self._traced

    def _traced(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "opcode":
            self._step(frame)
        return self._traced

    def _profiled(self, frame: FrameType, event: str, argument: Any) -> None:
        if event == "c_call" and self._called is not None:
            self._called(frame, getattr(argument, "__name__", ""), None)


class MonitoredCode(Tracing):
    """By `sys.monitoring`."""

    _TOOL = 4

    def start(self) -> None:
        monitoring: Any = sys.monitoring  # type: ignore[attr-defined]  # Since Python 3.12.
        events = monitoring.events
        if monitoring.get_tool(self._TOOL) is None:
            monitoring.use_tool_id(self._TOOL, "injection")
        monitoring.register_callback(self._TOOL, events.INSTRUCTION, self._instruction)
        monitoring.register_callback(self._TOOL, events.CALL, self._call)
        watched = events.INSTRUCTION | (0 if self._called is None else events.CALL)
        monitoring.set_events(self._TOOL, watched)

    def stop(self) -> None:
        monitoring: Any = sys.monitoring  # type: ignore[attr-defined]
        monitoring.set_events(self._TOOL, 0)

    def _instruction(self, code: CodeType, offset: int) -> None:
        if self._wants(code):
            self._step(sys._getframe(1))

    def _call(self, code: CodeType, offset: int, callee: Any, first: Any) -> None:
        if self._called is None or not self._wants(code):
            return
        function = callee.__func__ if isinstance(callee, MethodType) else callee
        inner = function.__code__ if isinstance(function, FunctionType) else None
        self._called(sys._getframe(1), getattr(function, "__name__", ""), inner)


def tracing(wants: Wants, step: Step, called: Called | None = None) -> Tracing:
    """The tracing of this version of Python."""
    kind = TracedFrames if sys.version_info < (3, 12) else MonitoredCode
    return kind(wants, step, called)


#: All functions of this file that run while an act does.
FUNCTIONS = (
    TracedFrames._begins, TracedFrames._traced, TracedFrames._profiled, TracedFrames.stop,
    MonitoredCode._instruction, MonitoredCode._call, MonitoredCode.stop,
)  # fmt: skip
