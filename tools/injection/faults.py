"""The two faults: where they can occur in a run, and making one occur.

`Interrupts` makes a signal pending and lets the interpreter deliver it, so the places are the
interpreter's own: CPython 3.11 looks at its eval breaker in RESUME (the begin of a function, after
a yield), behind calls of what is not Python, and in jumps backward, nowhere else. Between the
`__enter__` of a lock and the body of its `with`, or between that body and the `__exit__`, it does
not look, and so nothing is delivered there; between a bare `acquire()` and its `try` it does.

The signal is made pending without a call (see `_Pending`), as the interpreter would otherwise
deliver it to the tracing function. A place is the number of the instruction before it.

`Shortages` raises MemoryError instead of a call that allocates, or of the making of a container, in
a frame of the package itself. Calls that take no memory (`release`, `pop`), and calls of functions
of the package, whose own allocations are places, are none.
"""

from __future__ import annotations

import _thread
import dis
import signal
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any

Act = Callable[[], object]


@dataclass(frozen=True)
class Place:
    """Where a fault occurs: the number of the traced instruction, and the line."""

    number: int
    file: str
    line: int
    function: str


class Fault(ABC):
    """One kind of fault: `places` runs an act unharmed, `strike` stops it at one of them."""

    name: str
    #: Where the last strike hit, callers behind it; empty where the act was over before.
    hit: tuple[Place, ...] = ()

    @abstractmethod
    def places(self, act: Act) -> list[Place]:
        """Every place of a run, in order."""

    @abstractmethod
    def strike(self, act: Act, number: int) -> BaseException | None:
        """Run an act, stopped behind an instruction; what came out of it, None for no exception."""

    @abstractmethod
    def is_expected(self, error: BaseException) -> bool:
        """Whether an act that was stopped may end like this."""


def _place(number: int, code: CodeType, line: int) -> Place:
    return Place(number, code.co_filename, line, code.co_qualname)


def _stack(number: int, frame: FrameType | None) -> tuple[Place, ...]:
    stack = []
    while frame is not None and frame.f_code.co_filename != __file__:
        stack.append(_place(number, frame.f_code, frame.f_lineno or 0))
        frame = frame.f_back
    return tuple(stack)


# Interrupts ---------------------------------------------------------------------------------------


class _Pending(int):
    """A signal's number. Reading `soon` makes it pending; no instruction of a call is needed."""

    soon = property(_thread.interrupt_main)


_SIGNAL = _Pending(signal.SIGINT)


class Interrupts(Fault):
    """KeyboardInterrupt wherever the interpreter delivers a signal."""

    name = "interrupt"

    def __init__(self) -> None:
        self._count = 0
        self._target: int | None = None
        self._delivered: list[tuple[int, CodeType, int]] = []

    def places(self, act: Act) -> list[Place]:
        self._target = None
        error = self._run(act)
        if error is not None:
            raise error
        return [_place(*seen) for seen in self._delivered]

    def strike(self, act: Act, number: int) -> BaseException | None:
        self._target, self.hit = number, ()
        return self._run(act)

    def is_expected(self, error: BaseException) -> bool:
        return isinstance(error, KeyboardInterrupt)

    def _run(self, act: Act) -> BaseException | None:
        self._count, self._delivered = 0, []
        before = signal.signal(signal.SIGINT, self._deliver)
        # What is bound here is no call of a method later, behind which a signal could arrive.
        settrace, begin = sys.settrace, self._begin
        try:
            settrace(begin)
            act()
            settrace(None)
        except BaseException as error:
            settrace(None)
            return error
        finally:
            signal.signal(signal.SIGINT, before)
        return None

    def _begin(self, frame: FrameType, event: str, argument: Any) -> Any:
        if frame.f_code in _OWN:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self._step

    def _step(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "opcode":
            self._count += 1
            if self._target is None or self._count == self._target:
                _SIGNAL.soon  # noqa: B018  # Nothing but the return stands behind it.
        return self._step

    def _deliver(self, number: int, frame: FrameType | None) -> None:
        assert frame is not None
        if frame.f_code in _OWN:
            _SIGNAL.soon  # noqa: B018  # It arrived while tracing: let the traced frame have it.
        elif frame.f_code is _RUN:
            pass  # The act is over.
        elif self._target is None:
            # No function of Python may be called here: it would be traced.
            self._delivered.append((self._count, frame.f_code, frame.f_lineno or 0))
        else:
            sys.settrace(None)
            self.hit = _stack(self._count, frame)
            raise KeyboardInterrupt


_OWN = {f.__code__ for f in (Interrupts._begin, Interrupts._step, Interrupts._deliver)}
_RUN = Interrupts._run.__code__


# Shortages ----------------------------------------------------------------------------------------

#: By name, as a version of Python may lack some.
_CALLS = {dis.opmap.get(name) for name in ("CALL", "CALL_FUNCTION_EX", "CALL_KW")}
_CONTAINERS = {
    dis.opmap.get(name)
    for name in ("BUILD_LIST", "BUILD_MAP", "BUILD_SET", "BUILD_STRING", "BUILD_TUPLE",
                 "LIST_APPEND", "LIST_EXTEND", "MAP_ADD", "SET_ADD", "SET_UPDATE", "DICT_UPDATE",
                 "DICT_MERGE", "MAKE_FUNCTION")
}  # fmt: skip
#: Functions of C that take no memory, or only pass their arguments on.
_FRUGAL = frozenset({
    "__enter__", "__exit__", "acquire", "callable", "clear", "discard", "endswith", "get",
    "get_ident", "getattr", "getpid", "getrefcount", "hasattr", "id", "isinstance", "issubclass",
    "len", "perf_counter", "pop", "popleft", "release", "remove", "reset", "setattr", "startswith",
})  # fmt: skip
_MAKERS = frozenset({"__init__", "__new__", "__post_init__"})


class Shortages(Fault):
    """MemoryError at every allocation that code of one package makes."""

    name = "memory"

    def __init__(self, package: str, generated: frozenset[str] = frozenset()) -> None:
        self._package = package.rstrip("/") + "/"
        self._generated = generated  # names of files that the package's generated code bears
        self._codes: dict[CodeType, bytes] = {}
        self._count = 0
        self._target: int | None = None
        self._places: list[Place] = []
        #: The call that was begun last, as long as it is not known what it calls.
        self._call: tuple[FrameType, Place] | None = None

    def places(self, act: Act) -> list[Place]:
        self._target = None
        error = self._run(act)
        if error is not None:
            raise error
        return self._places

    def strike(self, act: Act, number: int) -> BaseException | None:
        self._target, self.hit = number, ()
        return self._run(act)

    def is_expected(self, error: BaseException) -> bool:
        return isinstance(error, Exception)

    def _run(self, act: Act) -> BaseException | None:
        self._count, self._places, self._call = 0, [], None
        try:
            if self._target is None:
                sys.setprofile(self._called)
            sys.settrace(self._begin)
            act()
        except BaseException as error:
            return error
        finally:
            sys.settrace(None)
            sys.setprofile(None)
        self._close_call()
        return None

    def _is_own(self, code: CodeType) -> bool:
        return code.co_filename.startswith(self._package) or code.co_filename in self._generated

    def _begin(self, frame: FrameType, event: str, argument: Any) -> Any:
        code = frame.f_code
        if self._call is not None and frame.f_back is self._call[0]:
            if self._is_own(code) and code.co_name not in _MAKERS:
                self._call = None  # A function of the package: its own allocations are places.
            else:
                self._close_call()
        if not self._is_own(code):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self._step

    def _called(self, frame: FrameType, event: str, argument: Any) -> None:
        if event == "c_call" and self._call is not None and frame is self._call[0]:
            if getattr(argument, "__name__", "") in _FRUGAL:
                self._call = None
            else:
                self._close_call()

    def _close_call(self) -> None:
        """The call that was begun last allocates."""
        if self._call is not None:
            self._places.append(self._call[1])
            self._call = None

    def _step(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event != "opcode":
            return self._step
        self._count += 1
        if self._target is not None:
            if self._count == self._target:
                sys.settrace(None)
                self.hit = _stack(self._count, frame)
                raise MemoryError("injected")
            return self._step
        self._close_call()
        code = self._codes.get(frame.f_code)
        if code is None:
            code = self._codes[frame.f_code] = frame.f_code.co_code
        instruction = code[frame.f_lasti]
        if instruction in _CALLS:
            self._call = (frame, _place(self._count, frame.f_code, frame.f_lineno or 0))
        elif instruction in _CONTAINERS:
            self._places.append(_place(self._count, frame.f_code, frame.f_lineno or 0))
        return self._step


#: The functions that run in between those of an act.
TRACING = (
    Interrupts._begin, Interrupts._step, Interrupts._deliver, Shortages._begin, Shortages._step,
    Shortages._called, Shortages._close_call, Shortages._is_own, _place, _stack, Place.__init__,
)  # fmt: skip
