"""The generated code of a plan: one Python function for all steps, and one per thread of a fork.

All names in the source are generated; objects are passed as arguments, so bindings to different
addresses share the code. The lines of the steps tell which were completed when one raised.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from itertools import pairwise
from types import CodeType
from typing import Any, TypeAlias

import numpy as np

from stitch.memory import Arrivals
from stitch.planner import Buffer, Fork, Free, Plan, Region, touched_by
from stitch.runtime.backends import ThreadFunction, ThreadPool, ThreadRun, Thunk, stage
from stitch.runtime.execution.bound_parts import PlacedObjects
from stitch.runtime.executors import prepared_context_run, with_fp_errors_ignored
from stitch.runtime.history import Tally
from stitch.runtime.hooks import call_hooks

#: Finds a free address for a buffer outside the given regions.
FindPlace: TypeAlias = Callable[[Buffer, Sequence[Region]], int | None]


@dataclass(slots=True, eq=False)
class WrittenFork:
    """A fork in generated code: for each thread its steps, and their last lines relative to its
    function."""

    threads: ThreadPool
    steps: list[tuple[int, ...]] = field(default_factory=list)
    ends: list[tuple[int, ...]] = field(default_factory=list)

    def __call__(self, functions: Sequence[ThreadFunction], arrays: Sequence[Any]) -> list[Any]:
        """Run the thread functions in parallel and return their results.

        If some fail, wait for all, and raise the error of the earliest step.
        """
        runs = self.threads.beside(functions, arrays)
        for run in runs:
            if run.error is not None:
                self._fail(runs)
        return [run.result for run in runs]

    def _fail(self, runs: Sequence[ThreadRun]) -> None:
        done: list[int] = []
        failures: list[ThreadFailure] = []
        for run, steps, ends in zip(runs, self.steps, self.ends, strict=True):
            error, run.error = run.error, None
            count = len(steps)
            if not run.is_done:
                code: CodeType = run.function.__code__
                count = 0 if error is None else steps_before(error, code, ends)
            done += steps[:count]
            if error is not None:
                failures.append(ThreadFailure(steps[count:] or steps[-1:], error))
        # Interrupts come before failures.
        failures.sort(key=lambda each: (isinstance(each.error, Exception), each.steps[0]))
        try:
            error = failures[0].error
            error.__dict__["stitch_beside"] = tuple(done), tuple(failures)
            raise error
        finally:
            # Break the cycle: the traceback references this frame.
            del error, failures, run, runs


@dataclass(frozen=True, slots=True, eq=False)
class ThreadFailure:
    """The exception of a thread, and its steps from the failed one on."""

    steps: tuple[int, ...]
    error: BaseException


@dataclass(frozen=True, slots=True, eq=False)
class Stopped:
    """An incomplete run: the completed steps in plan order, and the thread failures, the raised one
    first."""

    steps: Sequence[int] = ()
    failures: tuple[ThreadFailure, ...] = ()

    @classmethod
    def at(cls, count: int, error: BaseException) -> Stopped:
        """Create from `count` steps outside forks, and those that the error recorded inside
        forks."""
        beside = error.__dict__.pop("stitch_beside", None)
        if beside is None:
            return cls(range(count))
        done, failures = beside
        return cls(sorted([*range(count), *done]), failures)

    def plan(self, plan: Plan) -> tuple[Plan, int]:
        """Return the plan reordered so that the completed steps come first, and their number.

        The order is valid: steps of one thread keep their order, and threads are independent.
        Buffers that remaining steps read are not freed yet.
        """
        if isinstance(self.steps, range):
            return plan, len(self.steps)
        done = set(self.steps)
        left = [i for i in range(len(plan.steps)) if i not in done]
        needed = {b for i in left for side in touched_by(plan.steps[i]) for b in side}
        early = {i for i in done if isinstance(s := plan.steps[i], Free) and s.buffer in needed}
        order = [*[i for i in self.steps if i not in early], *sorted([*left, *early])]
        steps = tuple([plan.steps[i] for i in order])
        return replace(plan, steps=steps), len(done) - len(early)


def steps_before(error: BaseException, code: CodeType, ends: Sequence[int]) -> int:
    """Return the number of completed steps of a generated function when it raised; 0 if another
    function raised `error`.

    `ends`: the last line of each step, relative to the function.
    """
    traceback = error.__traceback__
    while traceback is not None:
        if traceback.tb_frame.f_code is code:
            return bisect_left(ends, traceback.tb_lineno - code.co_firstlineno)
        traceback = traceback.tb_next
    return 0


#: NumPy deprecates a positional `out` here.
_BY_KEYWORD = (np.maximum, np.minimum)
#: Number of positional arguments: target, source, casting.
COPYTO_CASTING = 3
#: File name of the code in tracebacks.
PLAN_FILE = "<stitched plan>"


def is_plain_copy(thunk: partial[object]) -> bool:
    """Return whether a thunk is `copyto` without a mask, which assignment replaces in a third of
    the time."""
    return (
        thunk.func is np.copyto
        and len(thunk.args) <= COPYTO_CASTING
        and thunk.keywords.keys() <= {"casting"}
    )


def shortest(thunk: partial[object]) -> tuple[Any, tuple[object, ...], Mapping[str, object]]:
    """Return the fastest equivalent call: positional instead of keyword `out` (30 ns per ufunc), a
    method instead of a function with dispatch (100 ns per `dot`)."""
    func, arguments, keywords = thunk.func, thunk.args, thunk.keywords
    if keywords.keys() == {"out"}:
        if isinstance(func, np.ufunc) and func not in _BY_KEYWORD and len(arguments) == func.nin:
            return func, (*arguments, keywords["out"]), {}
        if func is np.dot:
            return arguments[0].dot, (arguments[1], keywords["out"]), {}
    return func, arguments, keywords


@lru_cache(maxsize=256)
def _compiled(text: str) -> CodeType:
    """Compile a text; bindings to different addresses share the result."""
    return compile(text, PLAN_FILE, "exec")


class _Names:
    """Objects and their names in the text."""

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        self.objects: list[object] = []
        self._names: dict[int, str] = {}

    def name(self, thing: object) -> str:
        name = self._names.get(id(thing))
        if name is None:
            name = self._names[id(thing)] = f"{self.prefix}{len(self.objects)}"
            self.objects.append(thing)
        return name

    def all(self) -> str:
        return ", ".join(f"{self.prefix}{i}" for i in range(len(self.objects)))


class _Function:
    """The lines of one function: of the whole run, or of a thread of a fork."""

    def __init__(self, head: str) -> None:
        self._head = head
        self.lines = [""]
        #: Tuples of outputs, created once: 20 ns faster than an array for NumPy.
        self.outs: dict[str, None] = {}
        #: The last line of each step.
        self.ends: list[int] = []
        #: The names of its time variables, in order.
        self.moments: list[str] = []

    def line(self, text: str) -> None:
        self.lines.append("    " + text)

    def text(self) -> str:
        """Return the complete function."""
        self.lines[0] = f"def {self._head}{''.join(self.outs)}):"
        return "\n        ".join(self.lines)


class _Fork:
    """A fork under construction: one function per thread."""

    def __init__(self, fork: Fork, written: WrittenFork, functions: list[_Function]) -> None:
        self.written, self.functions = written, functions
        self.thread_of = {i: thread for thread, steps in enumerate(fork.threads) for i in steps}


class Source:
    """The generated lines so far, and their objects: shared by all bindings, or of one."""

    def __init__(self, order: Sequence[int]) -> None:
        self._order = tuple(order)
        self._main = self._now_in = _Function("run(arrays, sure=False")
        self._threads: list[_Function] = []
        self.shared, self.own = _Names("v"), _Names("w")
        self.name = self.shared.name
        #: The lines of the varying steps.
        self.own_lines: list[str] = []
        self._now = ""
        #: Time variables: of step ends, of forks, and their number.
        self._ended: list[str] = []
        self._of_forks: list[str] = []
        self._moments = 0
        self._arrays = ""
        self._fork: _Fork | None = None

    def take_arrays(self, count: int) -> None:
        if count:
            self._arrays = "".join(f"a{i}, " for i in range(count)) + "= arrays"
            self._line(self._arrays)

    def _line(self, text: str) -> None:
        self._now_in.line(text)

    def check(self, index: int, dtype: np.dtype[Any], shape: tuple[int, ...]) -> None:
        """Check an array's type: built-in dtypes are singletons; others take the slow path."""
        array = f"a{index}"
        self._line(
            f"if (type({array}) is not {self.name(np.ndarray)}"
            f" or {array}.dtype is not {self.name(dtype)}"
            f" or {array}.shape != {self.name(shape)}) and not sure: return False"
        )

    def begin(self, clock: Callable[[], float] | None) -> None:
        if clock is not None:
            self._now = f"{self.name(clock)}()"
            self._moment()

    def fork(self, fork: Fork, threads: ThreadPool) -> None:
        """Begin a fork; the following steps belong to its threads."""
        functions = []
        for _ in fork.threads:
            self._now_in = _Function(f"thread{len(self._threads)}(arrays")
            self._threads.append(self._now_in)
            functions.append(self._now_in)
            if self._arrays:
                self._line(self._arrays)
            if self._now:
                self._moment()
        self._fork = _Fork(fork, WrittenFork(threads, list(fork.threads)), functions)
        # Placeholder for the call, whose results are known at `join`.
        self._main.line("")

    def enter(self, index: int) -> None:
        """Continue in the function of the thread that runs a step."""
        assert self._fork is not None
        self._now_in = self._fork.functions[self._fork.thread_of[index]]

    def join(self) -> None:
        """End the fork."""
        assert self._fork is not None
        fork, self._fork, main = self._fork, None, self._main
        called = self.name(fork.written)
        names = []
        for function in fork.functions:
            names.append(f"thread{self._threads.index(function)}")
            function.line(f"return ({', '.join(function.moments)},)" if self._now else "return")
            fork.written.ends.append(tuple(function.ends))
        given = ", ".join(f"({', '.join(each.moments)},)" for each in fork.functions)
        call = f"{called}(({', '.join(names)}), arrays)"
        main.lines[-1] = f"    {given} = {call}" if self._now else f"    {call}"
        main.ends += [len(main.lines) - 1] * len(fork.thread_of)
        self._now_in = main
        if self._now:
            self._moment()
            self._of_forks += [main.moments[-1], *[each.moments[0] for each in fork.functions]]

    def step_ended(self, *, has_run: bool) -> None:
        """End a step; one without thunks ends together with the previous one."""
        function = self._now_in
        function.ends.append(len(function.lines) - 1)
        if self._now:
            if has_run:
                self._moment()
            self._ended.append(function.moments[-1])

    def _moment(self) -> None:
        name = f"t{self._moments}"
        self._moments += 1
        self._line(f"{name} = {self._now}")
        self._now_in.moments.append(name)

    def step(self, thunk: Thunk, *, is_own: bool) -> None:
        self.name = self.own.name if is_own else self.shared.name
        self._call(thunk)
        if is_own:
            self.own_lines.append(self._now_in.lines[-1].lstrip())
        self.name = self.shared.name

    def _call(self, thunk: Thunk) -> None:
        if type(thunk) is Arrivals:
            self._line(f"{self.name(thunk)}.times += 1")
        elif type(thunk) is not partial:
            self._line(f"{self.name(thunk)}()")
        elif thunk.func is stage:
            into, _, position = thunk.args
            self._line(f"{self.name(into)}[...] = a{self._order[position]}")
        elif thunk.func is call_hooks:
            moment, context = thunk.args
            self._line(f"for hook in {self.name(moment)}.hooks: hook({self.name(context)})")
        elif is_plain_copy(thunk):
            into, source = thunk.args[:2]
            self._line(f"{self.name(into)}[...] = {self.name(source)}")
        else:
            func, arguments, keywords = shortest(thunk)
            given = [self.name(argument) for argument in arguments]
            given += [f"{key}={self.name(value)}" for key, value in keywords.items()]
            if func in _BY_KEYWORD and keywords.keys() == {"out"}:
                out = self.name(keywords["out"])
                self._now_in.outs[f", o{out}=({out},)"] = None
                given[-1] = f"out=o{out}"
            self._line(f"{self.name(func)}({', '.join(given)})")

    def count(self, tally: Tally) -> None:
        """Count a run in the binding's tally."""
        self._line(f"{self.own.name(tally)}.runs += 1")

    def end(self, tally: Tally) -> None:
        self.count(tally)
        moments = [*self._main.moments[:1], *self._ended, *self._of_forks]
        self._line(f"return ({', '.join(moments)},)" if self._now else "return True")

    def function(self) -> tuple[Callable[..., Callable[..., Any]], tuple[int, ...]]:
        """Return the factory of the function, which takes a binding's objects, and the last line of
        each step relative to the function."""
        functions = "\n        ".join([each.text() for each in (*self._threads, self._main)])
        text = (
            f"def make({self.shared.all()}):\n    def bind({self.own.all()}):\n"
            f"        {functions}\n        return run\n    return bind"
        )
        space: dict[str, Any] = {}
        exec(_compiled(text), space)
        return space["make"](*self.shared.objects), tuple(self._main.ends)


#: Required type and shape of an array.
Kind = tuple[np.dtype[Any], tuple[int, ...]]
#: Result of a run: the start and the end of each step if timed, else True.
Ran: TypeAlias = "tuple[float, ...] | bool"


@dataclass(frozen=True, slots=True, eq=False)
class GeneratedRunner:
    """Generated code for one binding.

    `run(arrays)` returns False without running if an array has the wrong type or shape;
    `run(arrays, True)` skips the check. It runs in a context in which NumPy ignores errors: a
    private one if it only calls kernels, else a copy of the caller's. `observers`: the observers
    for which it was generated. `ends`: the last line of each step, relative to the function.
    """

    run: Callable[..., Ran]
    observers: int
    code: CodeType
    ends: tuple[int, ...]

    def stopped(self, error: BaseException) -> Stopped:
        """Return the steps completed before `error`; none if another function raised it."""
        return Stopped.at(steps_before(error, self.code, self.ends), error)


@dataclass(frozen=True, slots=True, eq=False)
class Code:
    """The generated code of an executable, for all bindings: they differ only in the objects."""

    #: Returns the function, given the objects of the varying steps.
    bind: Callable[..., Callable[..., Ran]]
    #: The lines of the varying steps.
    own_lines: tuple[str, ...]
    order: tuple[int, ...]
    observers: int
    ends: tuple[int, ...]
    #: Calls the function in a context in which NumPy ignores errors.
    in_context: Callable[..., Any]
    #: The objects for other addresses, if they can be recreated without binding kernels.
    placed: PlacedObjects | None = None

    def objects(self, own: Iterable[Sequence[Thunk]]) -> list[list[object]] | None:
        """Return the objects of a binding by varying step, or None if its text differs.

        `own`: the thunks of the varying steps.
        """
        source = Source(self.order)
        named = [0]
        for thunks in own:
            for thunk in thunks:
                source.step(thunk, is_own=True)
            named.append(len(source.own.objects))
        if tuple(source.own_lines) != self.own_lines:
            return None
        return [source.own.objects[start:end] for start, end in pairwise(named)]

    def straight(self, objects: Iterable[object], tally: Tally) -> GeneratedRunner:
        """Return the function for a binding with these objects; `tally` counts its runs."""
        run = self.bind(*objects, tally)
        code = run.__code__
        return GeneratedRunner(partial(self.in_context, run), self.observers, code, self.ends)


def written(
    steps: Iterable[tuple[Sequence[Thunk], bool]], kinds: Sequence[Kind],
    order: Sequence[int], tally: Tally, observers: int = 0, *,
    clock: Callable[[], float] | None = None, calls_others: bool = False,
    forks: Sequence[Fork] = (), threads: ThreadPool | None = None,
) -> Code:  # fmt: skip
    """Generate code that checks its arrays and calls all steps.

    Args:
        steps: The thunks of each step, and whether they vary between bindings.
        kinds: Required type and shape per array.
        order: `order[p]` is the array at argument position p of `stage`.
        tally: Counts the runs.
        observers: Bits of the observers.
        clock: Return its time at the start and the end of each step; then for each fork when all
            threads had ended and when each began.
        calls_others: Whether it calls hooks, host functions or user kernels.
        forks: Sections that run in parallel; each of their threads becomes a function.
        threads: The thread pool for the forks.
    """
    source = Source(order)
    source.take_arrays(len(kinds))
    for i, kind in enumerate(kinds):
        source.check(i, *kind)
    source.begin(clock)
    starts = {fork.start: fork for fork in forks}
    fork: Fork | None = None
    for index, (thunks, is_own) in enumerate(steps):
        if index in starts:
            fork = starts[index]
            assert threads is not None, "forks have threads"
            source.fork(fork, threads)
        if fork is not None:
            source.enter(index)
        for thunk in thunks:
            source.step(thunk, is_own=is_own)
        source.step_ended(has_run=bool(thunks))
        if fork is not None and index + 1 == fork.stop:
            source.join()
            fork = None
    source.end(tally)
    # Runs of a device come one after another.
    is_alone = not (observers or calls_others)
    in_context = prepared_context_run() if is_alone else with_fp_errors_ignored
    bind, ends = source.function()
    return Code(bind, tuple(source.own_lines), tuple(order), observers, ends, in_context)
