"""Straight-line code: the steps of a bound plan as one function, written out call by call.

A loop over prepared calls pays for the loop and for every `partial`; written out, a step costs what
a programmer's own line would. There is a bare form and one for each kind of observers: the same
steps with calls around them. Comes in: thunks. Goes out: a function of the host arrays. Must not
know records or handles. All names in the source are generated; objects reach it as arguments.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextvars import Context
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import pairwise
from time import perf_counter
from types import CodeType
from typing import Any, TypeAlias

import numpy as np

from stitch.memory import Arrivals
from stitch.runtime.backends import Thunk, stage
from stitch.runtime.executors import ignore_errors, quietly
from stitch.runtime.history import Tally
from stitch.runtime.hooks import call_hooks
from stitch.runtime.recording.placed_objects import PlacedObjects

#: The type and shape that an array must have.
Kind = tuple[np.dtype[Any], tuple[int, ...]]
#: What a run gives: when it began and when each step had ended where somebody wants the times,
#: else True.
Ran: TypeAlias = "tuple[float, ...] | bool"
#: Where NumPy deprecates a third position, as it looks like a third operand.
_BY_KEYWORD = (np.maximum, np.minimum)
#: Target, source, casting.
COPYTO_CASTING = 3


#: The name of the file in which tracebacks show the code.
PLAN_FILE = "<stitched plan>"


@dataclass(frozen=True, slots=True, eq=False)
class Straight:
    """`run(arrays)` is False, with nothing done, where one of the arrays is of another kind;
    `run(arrays, True)` does not look. It runs in a context in which NumPy ignores errors: its own,
    where there are only kernels in it, else a copy of the caller's.

    `observers`: for whom it was written. `ends`: the last line of each step of the plan.
    """

    run: Callable[..., Ran]
    observers: int
    code: CodeType
    ends: tuple[int, ...]

    def steps_done(self, error: BaseException) -> int:
        """How many steps were finished when one of them raised; 0 if the error is another's."""
        traceback = error.__traceback__
        while traceback is not None:
            if traceback.tb_frame.f_code is self.code:
                return bisect_left(self.ends, traceback.tb_lineno)
            traceback = traceback.tb_next
        return 0


@dataclass(frozen=True, slots=True, eq=False)
class Code:
    """The steps of a recording written out, for all its bindings: steps at other places are the
    same text with other objects."""

    #: Gives the function; takes the objects of the steps that differ from binding to binding.
    bind: Callable[..., Callable[..., Ran]]
    #: The lines of these steps.
    own_lines: tuple[str, ...]
    order: tuple[int, ...]
    observers: int
    ends: tuple[int, ...]
    #: Where it runs; None: in a copy of the caller's context.
    context: Context | None
    #: What it is given for any binding, where that can be told without binding a kernel.
    placed: PlacedObjects | None = None

    def objects(self, own: Iterable[Sequence[Thunk]]) -> list[list[object]] | None:
        """What the function is given for a binding, by steps: `own` are the thunks of those that
        differ, in order. None where they have another text."""
        source = _Source(self.order)
        named = [0]
        for thunks in own:
            for thunk in thunks:
                source.step(thunk, is_own=True)
            named.append(len(source.own.objects))
        if tuple(source.own_lines) != self.own_lines:
            return None
        return [source.own.objects[start:end] for start, end in pairwise(named)]

    def straight(self, objects: Iterable[object], tally: Tally) -> Straight:
        """The function for a binding with these objects; `tally` counts its runs."""
        run = self.bind(*objects, tally)
        code = run.__code__
        in_context = quietly if self.context is None else self.context.run
        return Straight(partial(in_context, run), self.observers, code, self.ends)


def written(
    steps: Iterable[tuple[Sequence[Thunk], bool]], kinds: Sequence[Kind],
    order: Sequence[int], tally: Tally, observers: int = 0, *,
    is_timed: bool = False, calls_others: bool = False,
) -> Code:  # fmt: skip
    """Code that checks its arrays' kinds and calls all steps.

    `steps`: the thunks of each step of the plan, and whether they differ from binding to binding.
    `order[p]` tells which array takes position p among the arguments of `stage`; `tally` stands for
    those that count. `is_timed`: it gives when it began, and when each step had ended.
    `calls_others`: there are hooks or another's kernels in it.
    """
    source = _Source(order)
    source.take_arrays(len(kinds))
    for i, kind in enumerate(kinds):
        source.check(i, *kind)
    source.begin(is_timed)
    ends = []
    for thunks, is_own in steps:
        for thunk in thunks:
            source.step(thunk, is_own=is_own)
        ends.append(source.next_line - 1)
        source.step_ended(has_run=bool(thunks))
    source.end(tally)
    # A third of the time that a copy takes. Runs of a device come one after another.
    context = None if observers or calls_others else Context()
    if context is not None:
        context.run(ignore_errors)
    return source.code(observers, tuple(ends), context)


def _is_plain_copy(thunk: partial[object]) -> bool:
    """Whether it is `copyto` without a mask: assigning takes a third of the time."""
    return (
        thunk.func is np.copyto
        and len(thunk.args) <= COPYTO_CASTING
        and thunk.keywords.keys() <= {"casting"}
    )


def _shortest(thunk: partial[object]) -> tuple[Any, tuple[object, ...], Mapping[str, object]]:
    """The same call in the form that NumPy takes least time for: no keyword where a position does
    (30 ns a ufunc), a method where a function looks for overriding types first (100 ns a `dot`)."""
    func, arguments, keywords = thunk.func, thunk.args, thunk.keywords
    if keywords.keys() == {"out"}:
        if isinstance(func, np.ufunc) and func not in _BY_KEYWORD and len(arguments) == func.nin:
            return func, (*arguments, keywords["out"]), {}
        if func is np.dot:
            return arguments[0].dot, (arguments[1], keywords["out"]), {}
    return func, arguments, keywords


@lru_cache(maxsize=256)
def _compiled(text: str) -> CodeType:
    """The same steps at other places are the same text: only the objects are others."""
    return compile(text, PLAN_FILE, "exec")


class _Names:
    """Objects, and the names that they have in the text."""

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


class _Source:
    """The lines so far, and the names of the objects in them: those of all bindings, and of one."""

    def __init__(self, order: Sequence[int]) -> None:
        self._order = tuple(order)
        self._lines = [""]
        #: Tuples of outputs, made once: NumPy takes one in 20 ns less than an array by itself.
        self._outs: dict[str, None] = {}
        self.shared, self.own = _Names("v"), _Names("w")
        self.name = self.shared.name
        #: The lines of steps that differ from binding to binding.
        self.own_lines: list[str] = []
        self._now = ""
        #: The names of the times that it gives.
        self._moments: list[str] = []

    @property
    def next_line(self) -> int:
        """The number of the next line; the functions around it have the first two."""
        return len(self._lines) + 3

    def take_arrays(self, count: int) -> None:
        if count:
            self._line("".join(f"a{i}, " for i in range(count)) + "= arrays")

    def _line(self, text: str) -> None:
        self._lines.append("    " + text)

    def check(self, index: int, dtype: np.dtype[Any], shape: tuple[int, ...]) -> None:
        """Types of built-in dtypes are singletons; anything else takes the careful way."""
        array = f"a{index}"
        self._line(
            f"if (type({array}) is not {self.name(np.ndarray)}"
            f" or {array}.dtype is not {self.name(dtype)}"
            f" or {array}.shape != {self.name(shape)}) and not sure: return False"
        )

    def begin(self, is_timed: bool) -> None:
        if is_timed:
            self._now = f"{self.name(perf_counter)}()"
            self._moment()

    def step_ended(self, *, has_run: bool) -> None:
        """A step of the plan ends here; those that run nothing end with the one before."""
        if self._now and has_run:
            self._moment()
        elif self._now:
            self._moments.append(self._moments[-1])

    def _moment(self) -> None:
        name = f"t{len(self._moments)}"
        self._line(f"{name} = {self._now}")
        self._moments.append(name)

    def step(self, thunk: Thunk, *, is_own: bool) -> None:
        self.name = self.own.name if is_own else self.shared.name
        self._call(thunk)
        if is_own:
            self.own_lines.append(self._lines[-1].lstrip())
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
        elif _is_plain_copy(thunk):
            into, source = thunk.args[:2]
            self._line(f"{self.name(into)}[...] = {self.name(source)}")
        else:
            func, arguments, keywords = _shortest(thunk)
            given = [self.name(argument) for argument in arguments]
            given += [f"{key}={self.name(value)}" for key, value in keywords.items()]
            if func in _BY_KEYWORD and keywords.keys() == {"out"}:
                out = self.name(keywords["out"])
                self._outs[f", o{out}=({out},)"] = None
                given[-1] = f"out=o{out}"
            self._line(f"{self.name(func)}({', '.join(given)})")

    def count(self, tally: Tally) -> None:
        """What counts is a binding's own."""
        self._line(f"{self.own.name(tally)}.runs += 1")

    def end(self, tally: Tally) -> None:
        self.count(tally)
        self._line(f"return ({', '.join(self._moments)},)" if self._now else "return True")

    def code(self, observers: int, ends: tuple[int, ...], context: Context | None) -> Code:
        self._lines[0] = f"def run(arrays, sure=False{''.join(self._outs)}):"
        body = "\n        ".join(self._lines)
        text = (
            f"def make({self.shared.all()}):\n    def bind({self.own.all()}):\n"
            f"        {body}\n        return run\n    return bind"
        )
        space: dict[str, Any] = {}
        exec(_compiled(text), space)
        bind = space["make"](*self.shared.objects)
        return Code(bind, tuple(self.own_lines), self._order, observers, ends, context)
