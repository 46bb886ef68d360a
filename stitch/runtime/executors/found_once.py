"""`found_once`: a property that is computed when first asked for, and kept.

`functools.cached_property` of Python 3.11 holds one lock for all objects while it computes; in the
child of a fork, if another thread held it, it would never be given back.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar, overload

Owner = TypeVar("Owner")
Value = TypeVar("Value")


class found_once(Generic[Owner, Value]):
    """The first result is kept as an attribute of the object, where it is found from then on."""

    def __init__(self, find: Callable[[Owner], Value]) -> None:
        self._find = find
        self.__doc__ = find.__doc__

    def __set_name__(self, owner: type[Any], name: str) -> None:
        self._name = name

    @overload
    def __get__(self, owner: None, kind: type[Any]) -> found_once[Owner, Value]: ...
    @overload
    def __get__(self, owner: Owner, kind: type[Any]) -> Value: ...
    def __get__(self, owner: Any, kind: type[Any]) -> Any:
        if owner is None:
            return self
        value = self._find(owner)
        # Not by `owner.__dict__`: once it was asked for, CPython looks every attribute of the
        # object up in it, and calls of programs take 4 % longer. Frozen classes allow this too.
        object.__setattr__(owner, self._name, value)
        return value
