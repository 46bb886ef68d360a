"""Faults: where they can occur in a run, and making one occur.

`Interrupts` makes a signal pending and lets the interpreter deliver it, so the places are the
interpreter's own: CPython looks at its eval breaker in RESUME (the begin of a function, after a
yield), behind calls of what is not Python, and in jumps backward, nowhere else. Between the
`__enter__` of a lock and the body of its `with`, or between that body and the `__exit__`, it does
not look, and so nothing is delivered there; between a bare `acquire()` and its `try` it does.

The signal is made pending without a call (see `_Pending`), as the interpreter would otherwise
deliver it to the tracing function. A place is the number of the instruction before it.

`Visits` runs what a case names at such a place, as a signal handler would, instead of raising.

`Shortages` raises MemoryError instead of a call that allocates, or of the making of a container, in
a frame of the package itself. Calls that take no memory (`release`, `pop`), and calls of functions
of the package, whose own allocations are places, are none.
"""

from __future__ import annotations

import _thread
import dis
import signal
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from types import CodeType, FrameType

from injection.model import Case, Reference
from injection.tracing import FUNCTIONS, tracing
from stitch.errors import StitchError, TaskError

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
    #: Whether runs without it make the visits of a case as well.
    visits = False
    #: Whether the last strike has closed the case; what else it saw that must not be.
    has_closed = False
    broken: str | None = None

    def prepare(self, case: Case, reference: Reference) -> None:
        """The next strike is of this case, new or not."""
        self.has_closed, self.broken = False, None

    @abstractmethod
    def places(self, act: Act) -> list[Place]:
        """Every place of a run, in order."""

    @abstractmethod
    def strike(self, act: Act, place: Place) -> BaseException | None:
        """Run an act, stopped at a place; what came out of it, None for no exception."""

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


class Overdue(Exception):
    """What the handler of a timer raises, as those of test runners do."""


class Interrupts(Fault):
    """KeyboardInterrupt wherever the interpreter delivers a signal; `is_timer`: an exception out of
    the handler of SIGALRM instead, which nothing defers."""

    def __init__(self, *, is_timer: bool = False) -> None:
        self.name = "timer" if is_timer else "interrupt"
        self._signal = _Pending(signal.SIGALRM if is_timer else signal.SIGINT)
        self._raised: type[BaseException] = Overdue if is_timer else KeyboardInterrupt
        self._count = 0
        self._target: int | None = None
        self._delivered: list[tuple[int, CodeType, int]] = []
        self._runs = False
        self._tracing = tracing(self._wants, self._step)

    def places(self, act: Act) -> list[Place]:
        self._target = None
        error = self._run(act)
        if error is not None:
            raise error
        return [_place(*seen) for seen in self._delivered]

    def strike(self, act: Act, place: Place) -> BaseException | None:
        self._target, self.hit = place.number, ()
        return self._run(act)

    def is_expected(self, error: BaseException) -> bool:
        return isinstance(error, self._raised)

    def _run(self, act: Act) -> BaseException | None:
        self._count, self._delivered = 0, []
        before = signal.signal(int(self._signal), self._deliver)
        try:
            self._runs = True
            self._tracing.start()
            act()
        except BaseException as error:
            return error
        finally:
            self._runs = False
            self._tracing.stop()
            signal.signal(int(self._signal), before)
        return None

    def _wants(self, code: CodeType) -> bool:
        return code not in _OWN

    def _step(self, frame: FrameType) -> None:
        self._count += 1
        if self._target is None or self._count == self._target:
            self._signal.soon  # noqa: B018  # Nothing but returns stand behind it.

    def _deliver(self, number: int, frame: FrameType | None) -> None:
        assert frame is not None
        if not self._runs or frame.f_code is _RUN:
            return  # The act has not begun, or is over.
        if frame.f_code in _OWN:
            self._signal.soon  # noqa: B018  # It arrived while tracing: let the traced frame have it.
        elif self._target is None:
            self._delivered.append((self._count, frame.f_code, frame.f_lineno or 0))
        else:
            self._tracing.stop()
            self.hit = _stack(self._count, frame)
            self._struck()

    def _struck(self) -> None:
        raise self._raised


_RUN = Interrupts._run.__code__


class Visits(Interrupts):
    """What a case names, or its `close`, wherever a signal handler could call it: that gives right
    results or `TaskError`, and what it came into goes on."""

    visits = True

    def __init__(self, *, closes: bool = False) -> None:
        super().__init__()
        self.name = "closing" if closes else "visit"
        self._closes = closes
        self._case: Case | None = None
        self._visits: tuple[Callable[[], object], ...] = ()

    def prepare(self, case: Case, reference: Reference) -> None:
        if self._case is not case:
            self._case = case
            self._visits = (case.close,) if self._closes else case.all_visits(reference)
        super().prepare(case, reference)

    def is_expected(self, error: BaseException) -> bool:
        return self.has_closed and isinstance(error, StitchError)

    def _struck(self) -> None:
        for visit in self._visits:
            try:
                visit()
                self.has_closed = self._closes
            except TaskError:
                continue
            except BaseException as error:
                self.broken = self.broken or f"who comes in gets {type(error).__name__}: {error}"


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
        self._target: Place | None = None
        self._places: list[Place] = []
        #: The call that was begun last, as long as it is not known what it calls.
        self._call: tuple[FrameType, Place] | None = None

    def places(self, act: Act) -> list[Place]:
        self._target = None
        error = self._run(act)
        if error is not None:
            raise error
        return self._places

    def strike(self, act: Act, place: Place) -> BaseException | None:
        self._target, self.hit = place, ()
        return self._run(act)

    def is_expected(self, error: BaseException) -> bool:
        return isinstance(error, Exception)

    def _run(self, act: Act) -> BaseException | None:
        self._count, self._places, self._call = 0, [], None
        called = self._called if self._target is None else None
        self._tracing = tracing(self._wants, self._step, called)
        try:
            self._tracing.start()
            act()
        except BaseException as error:
            return error
        finally:
            self._tracing.stop()
        self._close_call()
        return None

    def _wants(self, code: CodeType) -> bool:
        file = code.co_filename
        return (file.startswith(self._package) or file in self._generated) and code not in _OWN

    def _called(self, frame: FrameType, name: str, code: CodeType | None) -> None:
        """What the call is that a frame has begun: what takes no memory of its own is no place."""
        if self._call is None or frame is not self._call[0]:
            return
        is_frugal = code is None and name in _FRUGAL
        # The allocations of a function of the package are places of their own.
        is_own = code is not None and self._wants(code) and name not in _MAKERS
        if is_frugal or is_own:
            self._call = None
        else:
            self._close_call()

    def _close_call(self) -> None:
        """The call that was begun last allocates."""
        if self._call is not None:
            self._places.append(self._call[1])
            self._call = None

    def _step(self, frame: FrameType) -> None:
        self._count += 1
        if self._target is not None:
            if self._count >= self._target.number and self._is_there(frame, self._target):
                self._tracing.stop()
                self.hit = _stack(self._count, frame)
                raise MemoryError("injected")
            return
        self._close_call()
        instruction = self._instruction(frame)
        if instruction in _CALLS:
            self._call = (frame, _place(self._count, frame.f_code, frame.f_lineno or 0))
        elif instruction in _CONTAINERS:
            self._places.append(_place(self._count, frame.f_code, frame.f_lineno or 0))

    def _instruction(self, frame: FrameType) -> int:
        code = self._codes.get(frame.f_code)
        if code is None:
            code = self._codes[frame.f_code] = frame.f_code.co_code
        return code[frame.f_lasti]

    def _is_there(self, frame: FrameType, place: Place) -> bool:
        """Whether a frame is about to allocate where that is meant. What others do in between may
        take some instructions more or less than it took before."""
        if frame.f_lineno != place.line or frame.f_code.co_qualname != place.function:
            return False
        instruction = self._instruction(frame)
        return instruction in _CALLS or instruction in _CONTAINERS


#: The functions that run in between those of an act.
TRACING = (
    *FUNCTIONS, Interrupts._wants, Interrupts._step, Interrupts._deliver, Interrupts._run,
    Shortages._wants, Shortages._step, Shortages._run, Shortages._called, Shortages._close_call,
    Shortages._instruction, Shortages._is_there,
    _place, _stack,
    Place.__init__,
)  # fmt: skip
_OWN = frozenset(function.__code__ for function in TRACING)
