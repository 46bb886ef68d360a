"""What a torch module computes with, to see whether it is still what it was.

An object of another kind is itself, and changes inside it are not seen, nor is what `forward` reads
from outside the module. Nothing large is kept alive.
"""

from __future__ import annotations

from collections.abc import Hashable
from types import MethodType
from typing import Any
from weakref import ref

import numpy as np

#: What Python has in each class, or fills at its first use.
_OF_PYTHON = frozenset({
    "__annotations__", "__annotate__", "__annotate_func__", "__annotations_cache__", "__dict__",
    "__doc__", "__module__", "__weakref__",
})  # fmt: skip


def state_of(module: Any) -> tuple[Hashable, list[Any]]:
    """What a module computes with, and its tensors. An exported program does not change."""
    if not hasattr(module, "modules"):
        return None, []
    seen = _Seeing()
    return seen.state(module), seen.tensors


class SameObject:
    """Equal to what stands for the same living object, which is not kept alive.

    >>> def f(): pass
    >>> SameObject(f) == SameObject(f), SameObject(f) == SameObject(print)
    (True, False)
    """

    __slots__ = ("_at", "_ref")

    def __init__(self, held: Any) -> None:
        self._at = id(held)
        self._ref: Any = None
        try:
            self._ref = ref(held)
        except TypeError:  # Small ones, such as torch's types; no other may come to lie there.
            self._ref = _Held(held)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, SameObject) or self._at != other._at:
            return False
        held = self._ref()
        return held is not None and held is other._ref()

    def __hash__(self) -> int:
        return hash(self._at)


class _Held:
    """Gives what it holds, as a weak reference does."""

    __slots__ = ("_what",)

    def __init__(self, what: Any) -> None:
        self._what = what

    def __call__(self) -> Any:
        return self._what


class _Seeing:
    """One walk through a module; what is met again is called by its number."""

    def __init__(self) -> None:
        self.tensors: list[Any] = []
        self._met: dict[int, int] = {}

    def state(self, value: Any) -> Hashable:
        """What a value is."""
        if value is None or isinstance(value, bool | int | float | complex | str | bytes):
            return type(value).__name__, repr(value)
        if isinstance(value, MethodType):  # It is made anew whenever it is asked for.
            return "method", SameObject(value.__func__), self.state(value.__self__)
        if id(value) in self._met:
            return "again", self._met[id(value)]
        self._met[id(value)] = len(self._met)
        if isinstance(value, np.ndarray) and not value.dtype.hasobject:
            return "array", value.dtype.str, value.shape, value.tobytes()
        if _is_tensor(value):
            self.tensors.append(value)
            return ("tensor",)
        if isinstance(value, dict):
            return "dict", *[(self.state(k), self.state(v)) for k, v in value.items()]
        if isinstance(value, tuple | list | set | frozenset):
            return SameObject(type(value)), *map(self.state, value)
        if hasattr(value, "modules") and hasattr(value, "parameters"):
            kind = type(value)
            classes = tuple([self._class(each) for each in kind.__mro__])
            return SameObject(kind), SameObject(kind.forward), classes, self.state(vars(value))
        return (SameObject(value),)

    def _class(self, kind: type) -> Hashable:
        """What a class of modules has; those of libraries stay."""
        if kind.__module__.partition(".")[0] in ("torch", "builtins"):
            return SameObject(kind)
        if id(kind) in self._met:
            return "again", self._met[id(kind)]
        self._met[id(kind)] = len(self._met)
        own = [(name, each) for name, each in vars(kind).items() if name not in _OF_PYTHON]
        return SameObject(kind), *[(name, self.state(each)) for name, each in own]


def same_bits(before: Any, now: Any) -> bool:
    """Whether two tensors of torch are alike to the sign of a zero; never, where there is what is
    no number."""
    if before.shape != now.shape or before.dtype != now.dtype or not now.equal(before):
        return False
    return not now.is_floating_point() or bool(now.signbit().equal(before.signbit()))


def _is_tensor(value: Any) -> bool:
    """Whether it is a torch tensor, without loading torch to ask."""
    return any((k.__module__, k.__name__) == ("torch", "Tensor") for k in type(value).__mro__)
