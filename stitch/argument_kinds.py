"""Check arguments of public functions: a wrong type raises an error that names the parameter.

Used by set-up calls (compile, load, open, save), not by calls of each pass.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import wraps
from numbers import Integral, Real
from types import MappingProxyType
from typing import Any, ParamSpec, TypeVar

from stitch.errors import UsageError, closest, unknown

_P = ParamSpec("_P")
_R = TypeVar("_R")


@dataclass(frozen=True, slots=True)
class ArgumentKind:
    """A kind of argument: its description, a predicate, and what to do for what it refuses."""

    text: str
    accepts: Callable[[Any], bool]
    remedy: str | None = None

    def check(self, call: str, parameter: str, value: object) -> None:
        """Raise `UsageError` for an argument of another kind."""
        if not self.accepts(value):
            shape = getattr(value, "shape", None)
            shown = " ".join(repr(value).split())[:60] if shape is None else str(list(shape))
            raise UsageError(
                f"{call} takes {self.text} as {parameter}",
                got=f"{type(value).__name__}: {shown}", remedy=self.remedy,
            )  # fmt: skip


def instance_of(text: str, *types: type) -> ArgumentKind:
    return ArgumentKind(text, lambda value: isinstance(value, types))


def member_of(kind: type[Enum], text: str) -> ArgumentKind:
    """Return the kind of an enumeration's members and their values."""
    words = [member.value for member in kind]
    return ArgumentKind(
        f"{text} ({', '.join(words)})",
        lambda value: isinstance(value, kind) or (isinstance(value, str) and value in words),
    )


def with_method(text: str, name: str) -> ArgumentKind:
    return ArgumentKind(text, lambda value: callable(getattr(value, name, None)))


def optional(kind: ArgumentKind) -> ArgumentKind:
    return ArgumentKind(f"{kind.text}, or None", lambda value: value is None or kind.accepts(value))


def either(*kinds: ArgumentKind) -> ArgumentKind:
    return ArgumentKind(
        " or ".join(kind.text for kind in kinds),
        lambda value: any(kind.accepts(value) for kind in kinds),
    )


def several(text: str, element: ArgumentKind) -> ArgumentKind:
    """Return the kind of collections with elements of one kind; iterators are not checked."""

    def accepts(value: Any) -> bool:
        whole = isinstance(value, Iterable) and not isinstance(value, str | bytes | Mapping)
        return whole and (iter(value) is value or all(map(element.accepts, value)))

    return ArgumentKind(text, accepts)


TEXT = instance_of("a text", str)
BOOL = instance_of("True or False", bool)
#: Not the empty text, which would be the current folder.
PATH = ArgumentKind("a path", lambda value: isinstance(value, str | os.PathLike) and value != "")
NUMBER = ArgumentKind(
    "a number", lambda value: isinstance(value, Real) and not isinstance(value, bool)
)
WHOLE = ArgumentKind(
    "a whole number", lambda value: isinstance(value, Integral) and not isinstance(value, bool)
)
INDEX_OR_NAME = either(
    ArgumentKind("an index", WHOLE.accepts), ArgumentKind("a name", TEXT.accepts)
)
MAPPING = instance_of("a mapping", Mapping)
WORDS = several("a list of names", TEXT)
LIST = ArgumentKind(
    "a list or tuple",
    lambda value: isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray),
)
EXAMPLES = ArgumentKind(
    "a list or tuple or a mapping",
    lambda value: isinstance(value, Mapping) or LIST.accepts(value),
    "write one argument as a tuple: (x,)",
)
CALLABLE = ArgumentKind("a function", callable)
WRITABLE = with_method("an open text file", "write")
READABLE = with_method("an open text file", "read")


def takes(**kinds: ArgumentKind) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Decorate a function whose arguments are checked by kind, and its keywords by name.

    >>> @takes(name=TEXT)
    ... def greet(name: str) -> str:
    ...     return f"hello {name}"
    >>> greet(3)
    Traceback (most recent call last):
    ...
    stitch.errors.UsageError: greet takes a text as name
      got: int: 3
    """

    def decorated(function: Callable[_P, _R]) -> Callable[_P, _R]:
        code = function.__code__
        # Positional parameters; arguments of `*rest` have no names.
        names = code.co_varnames[: code.co_argcount]
        parameters = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        assert kinds.keys() <= set(parameters), f"{function.__qualname__} has no such parameters"
        is_open = bool(code.co_flags & inspect.CO_VARKEYWORDS)
        # Users know `RuntimeDevice` and `RuntimePipeline` by their subclasses without the prefix.
        call = function.__qualname__.removesuffix(".__init__").removeprefix("Runtime")

        @wraps(function)
        def checked(*arguments: _P.args, **named: _P.kwargs) -> _R:
            for name, value in (*zip(names, arguments, strict=False), *named.items()):
                kind = kinds.get(name)
                if kind is not None:
                    kind.check(call, name, value)
                elif name not in parameters and not is_open:
                    known = [word for word in parameters if word not in ("self", "cls")]
                    raise unknown(f"{call} takes no {name}", name, known)
            return function(*arguments, **named)

        return checked

    return decorated


def check_fields(checked: object, **kinds: ArgumentKind) -> None:
    """Raise `UsageError` for fields of a dataclass that have another kind."""
    for name, kind in kinds.items():
        kind.check(type(checked).__name__, name, getattr(checked, name))


def arranged(
    what: str,
    types: Sequence[tuple[str, str]],
    arguments: Sequence[Any],
    named: Mapping[str, Any],
    defaults: Mapping[str, Any] = MappingProxyType({}),
    states: Sequence[str] = (),
) -> tuple[Any, ...]:
    """Return the inputs of `what`, passed by position and name, in the order of `types`.

    Args:
        types: Name and type of each input.
        defaults: Values of inputs that may be omitted.
        states: Inputs for which the error names `initial_state()`.

    Raises:
        UsageError: Inputs are missing, unknown, or passed twice.
    """
    names = [name for name, _ in types]
    by_position = dict(zip(names, arguments, strict=False))
    twice = sorted(by_position.keys() & named.keys())
    unknown = sorted(named.keys() - set(names))
    surplus = [*unknown, *(f"argument {i}" for i in range(len(names), len(arguments)))]
    values = {**defaults, **by_position, **named}
    missing = [name for name in names if name not in values]
    if missing or surplus or twice:
        near = closest(unknown[0], names) if unknown else ""
        parts = (("missing", missing), ("surplus", surplus), ("given twice", twice))
        remedy = None
        if {*missing} & {*states}:
            remedy = ("initial_state() of the program gives the states to begin with: "
                      "program(..., **state)")  # fmt: skip
        elif missing and any(isinstance(one, Mapping) for one in arguments):
            remedy = ("pass the arrays of a mapping by the names of the inputs: "
                      + ", ".join(f"{name}=..." for name in names))  # fmt: skip
        elif surplus:
            remedy = "inputs are the arguments that had examples when the module was compiled"
        raise UsageError(
            f"wrong inputs for {what}: "
            + "; ".join(f"{word}: {', '.join(inputs)}" for word, inputs in parts if inputs)
            + (f" ({near})" if near else ""),
            expected=", ".join(f"{name}: {kind}" for name, kind in types),
            got=f"{len(arguments)} by position, {len(named)} by name",
            remedy=remedy,
        )  # fmt: skip
    return tuple([values[name] for name in names])
