"""Host functions: Python functions that queue like programs, and what they may do with arrays.

A function gives, in this order: what it writes (the arrays of `writes=`, in the order in which they
are named there; their descriptors are the first of `returns=`), what it returns, and what it
updates in place (`updates=`; the value before is gone).
"""

from __future__ import annotations

import enum
import inspect
import math
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias, overload

from stitch.argument_kinds import (
    CALLABLE,
    TEXT,
    ArgumentKind,
    either,
    instance_of,
    optional,
    several,
    takes,
)
from stitch.errors import UsageError, unknown
from stitch.program import TensorDesc

# --------------------------------------------------------------------------------------------------
# Permissions of a task on an array.


class Permission(enum.Enum):
    """None < read-only, write-only < read-write.

    >>> Permission.READ_ONLY.join(Permission.WRITE_ONLY)
    <Permission.READ_WRITE: 'read_write'>
    """

    NONE = "none"
    READ_ONLY = "read_only"
    WRITE_ONLY = "write_only"
    READ_WRITE = "read_write"

    @property
    def reads(self) -> bool:
        """Whether it lets the bytes be seen."""
        return self in (Permission.READ_ONLY, Permission.READ_WRITE)

    @property
    def writes(self) -> bool:
        """Whether it lets the bytes be changed."""
        return self in (Permission.WRITE_ONLY, Permission.READ_WRITE)

    def join(self, other: Permission) -> Permission:
        """The least permission that allows what either allows."""
        return _OF[self.reads or other.reads, self.writes or other.writes]

    def meet(self, other: Permission) -> Permission:
        """The greatest permission that allows only what both allow."""
        return _OF[self.reads and other.reads, self.writes and other.writes]

    def allows(self, other: Permission) -> bool:
        """Whether it is at least the other one."""
        return self.meet(other) is other


_OF = {(kind.reads, kind.writes): kind for kind in Permission}


Returns: TypeAlias = "TensorDesc | Sequence[TensorDesc] | None"
Names: TypeAlias = "str | Sequence[str] | None"
_DESC = instance_of("a TensorDesc", TensorDesc)
RETURNS = optional(either(_DESC, several("a tuple of them", _DESC)))
_NAMES = optional(either(ArgumentKind("a parameter's name", TEXT.accepts),
                         several("a tuple of them", TEXT)))  # fmt: skip
_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
#: What is known of a function that does not say what it takes, such as NumPy's ufuncs.
_ANY_ARGUMENTS = inspect.signature(lambda *arguments, **named: None)


class Handle:
    """Base class of references to values that may be pending: tensors, results, futures."""

    __slots__ = ()

    @property
    @abstractmethod
    def function_queue(self) -> Any:
        """The device or graph whose `call` queues a function that is called with it."""


@dataclass(frozen=True, slots=True)
class HostParameter:
    """A parameter of a host function, and what the function may do with an array there."""

    name: str
    permission: Permission


@dataclass(frozen=True, slots=True, weakref_slot=True)
class HostFunction:
    """A Python function whose results have descriptors, so that it queues like a program.

    Called with futures it becomes a task of their graph; called with tensors, one of their device.
    """

    function: Callable[..., Any]
    name: str
    parameters: tuple[HostParameter, ...]
    returns: tuple[TensorDesc, ...] = ()
    #: The parameters that receive an output's array; theirs are the first of `returns`.
    writes: tuple[str, ...] = ()
    #: The parameters whose bytes change in place.
    updates: tuple[str, ...] = ()
    signature: inspect.Signature = field(default=_ANY_ARGUMENTS, compare=False, repr=False)
    #: How many arguments it takes by position, at least and at most.
    least: float = field(default=0, compare=False, repr=False)
    most: float = field(default=math.inf, compare=False, repr=False)

    def __hash__(self) -> int:
        try:
            return hash(self.function)
        except TypeError:  # An object that is called, and may change.
            return hash(self.name)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """Queue one call where the first tensor or future among the arguments is at home.

        Raises `UsageError` where there is none.
        """
        for value in (*arguments, *named.values()):
            if isinstance(value, Handle):
                return value.function_queue.call(self, *arguments, **named)
        raise UsageError(
            f"none of the arguments of task {self.name!r} is a future or a tensor, so nothing says "
            "where it is to run",
            remedy="graph.call(task, ...) or device.call(task, ...); task.function(...) calls the "
            "Python function itself",
        )

    def permission(self, parameter: str) -> Permission:
        """What it may do with an array that is given as this parameter."""
        return next(p.permission for p in self.parameters if p.name == parameter)


@takes(function=CALLABLE, returns=RETURNS, reads=_NAMES, writes=_NAMES, updates=_NAMES,
       name=optional(TEXT))  # fmt: skip
def host_function(
    function: Callable[..., Any],
    *,
    returns: Returns = None,
    reads: Names = None,
    writes: Names = None,
    updates: Names = None,
    name: str | None = None,
) -> HostFunction:
    """A host function, with its parameters read from its signature.

    `reads`: the parameters that arrays may be given as (default: all); `writes`: those that receive
    an output's array to fill; `updates`: those whose bytes change in place. `returns`: the
    descriptors of what it writes, then of what it returns. Raises `UsageError` for names that are
    no parameters, or stand in two of the sets.

    >>> host_function(len, name="count").parameters
    (HostParameter(name='obj', permission=<Permission.READ_ONLY: 'read_only'>),)
    """
    if isinstance(function, HostFunction):
        raise UsageError(f"task {function.name!r} is a host function already")
    called = name or str(getattr(function, "__name__", type(function).__name__))
    if inspect.iscoroutinefunction(function) or inspect.isgeneratorfunction(function):
        raise UsageError(f"task {called!r} is a coroutine or a generator, not a function",
                         remedy="return the results")  # fmt: skip
    try:
        signature = inspect.signature(function)
    except ValueError:
        signature = _ANY_ARGUMENTS
    sets = {"reads": _names(reads), "writes": _names(writes), "updates": _names(updates)}
    _check_names(called, signature, sets)
    rest = Permission.READ_ONLY if reads is None else Permission.NONE
    of = dict.fromkeys(sets["reads"], Permission.READ_ONLY)
    of |= dict.fromkeys(sets["writes"], Permission.WRITE_ONLY)
    of |= dict.fromkeys(sets["updates"], Permission.READ_WRITE)
    descs = () if returns is None else returns
    descs = (descs,) if isinstance(descs, TensorDesc) else tuple(descs)
    if len(descs) < len(sets["writes"]):
        raise UsageError(
            f"task {called!r} writes {', '.join(sets['writes'])}, and returns= describes "
            f"{len(descs)} arrays",
            remedy="give returns= their descriptors first, in the order of writes=",
        )
    parameters = tuple([HostParameter(p, of.get(p, rest)) for p in signature.parameters])
    return HostFunction(
        function, called, parameters, descs, sets["writes"], sets["updates"], signature,
        *_counts(signature),
    )  # fmt: skip


def _counts(signature: inspect.Signature) -> tuple[float, float]:
    """How many arguments are taken by position; none do where some may be named only."""
    least: float = 0
    most: float = 0
    for parameter in signature.parameters.values():
        is_needed = parameter.default is inspect.Parameter.empty
        if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
            most = math.inf
        elif parameter.kind in (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD):
            return math.inf, 0
        else:
            least, most = least + is_needed, most + 1
    return least, most


def _names(names: Names) -> tuple[str, ...]:
    return () if names is None else (names,) if isinstance(names, str) else tuple(names)


def _check_names(
    task: str, signature: inspect.Signature, sets: Mapping[str, Iterable[str]]
) -> None:
    seen: dict[str, str] = {}
    for word, names in sets.items():
        for name in names:
            parameter = signature.parameters.get(name)
            if parameter is None:
                what = f"task {task!r} has no parameter {name!r}, which {word}= names"
                raise unknown(what, name, signature.parameters, none="a function with parameters")
            if name in seen:
                remedy = "updates= is for arrays that are read and written"
                both = "twice" if seen[name] == word else f"in {seen[name]}="
                raise UsageError(
                    f"parameter {name!r} of task {task!r} stands in {word}= and {both}",
                    remedy=remedy,
                )
            if parameter.kind in _VARIADIC and word != "reads":
                raise UsageError(
                    f"task {task!r} cannot name *{name} in {word}=: it stands for any number of "
                    "arguments",
                    remedy="give the array a parameter of its own",
                )
            seen[name] = word


@overload
def task(function: Callable[..., Any], /) -> HostFunction: ...


@overload
def task(
    *,
    returns: Returns = None,
    reads: Names = None,
    writes: Names = None,
    updates: Names = None,
    name: str | None = None,
) -> Callable[[Callable[..., Any]], HostFunction]: ...


@takes(function=optional(CALLABLE), returns=RETURNS, reads=_NAMES, writes=_NAMES,
       updates=_NAMES, name=optional(TEXT))  # fmt: skip
def task(
    function: Callable[..., Any] | None = None,
    *,
    returns: Returns = None,
    reads: Names = None,
    writes: Names = None,
    updates: Names = None,
    name: str | None = None,
) -> HostFunction | Callable[[Callable[..., Any]], HostFunction]:
    """The decorator of host functions, which queue like programs; arguments as `host_function`.

    >>> from stitch.program import DataType, host_layout
    >>> @task(returns=TensorDesc((2,), host_layout(DataType.FLOAT32)))
    ... def double(x):
    ...     return x * 2
    >>> double.name
    'double'
    """

    def decorated(function: Callable[..., Any]) -> HostFunction:
        CALLABLE.check("stitch.task", "function", function)
        return host_function(
            function, returns=returns, reads=reads, writes=writes, updates=updates, name=name
        )

    return decorated if function is None else decorated(function)
