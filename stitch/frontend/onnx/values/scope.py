"""Names of values in one ONNX graph or function body, and what they stand for.

Comes in: definitions, initializers, an outer scope. Goes out: values by name (tensors, lists), or
a `FormatError` for a name that is not (yet) defined. Must not know: operators.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

from stitch.errors import CompileError, FormatError, closest
from stitch.graph import SymbolicTensor


@final
class Failed:
    """Stands for the result of a node that was refused already."""


@final
class Nothing:
    """An optional value that holds nothing."""


@dataclass(frozen=True, slots=True)
class TensorList:
    """A sequence: tensors of one data type, perhaps of different shapes."""

    items: tuple[SymbolicTensor, ...]


FAILED = Failed()
NOTHING = Nothing()
#: What a node may be given: None is an operand that is not written.
Given = SymbolicTensor | TensorList | Nothing | None
Bound = Given | Failed
MakeParameter = Callable[[Any], SymbolicTensor]


class Scope:
    """One namespace. `called_with` holds the attributes of the call, inside a function.

    `titles` are the names that results of a function have outside it; `place` is the location of
    everything inside, where it has one. Initializers become parameters when they are first used.
    """

    def __init__(
        self,
        opsets: Mapping[str, int],
        *,
        outer: Scope | None = None,
        called_with: Mapping[str, Any] | None = None,
        titles: Mapping[str, str] | None = None,
        place: str = "",
    ) -> None:
        self.opsets = opsets
        self.called_with = called_with
        self.titles = titles or {}
        self.place = place
        self._outer = outer
        self._values: dict[str, Bound] = {}
        self._initializers: dict[str, Any] = {}
        self._sparse: set[str] = set()

    def add_initializers(self, dense: Sequence[Any], sparse: Sequence[Any]) -> None:
        """Declares the initializers of a graph; raises `FormatError` for one given twice."""
        for tensor in dense:
            if tensor.name in self._initializers:
                raise FormatError(f"two initializers are called {tensor.name!r}", where=self.place)
            self._initializers[tensor.name] = tensor
        self._sparse |= {tensor.values.name for tensor in sparse}

    def define(self, name: str, bound: Bound, where: str) -> None:
        """Gives a name its value; raises `FormatError` for one that has a value already."""
        if name in self._values:
            raise FormatError(f"the value {name!r} is made twice", where=where)
        self._values[name] = bound

    def look_up(self, name: str, where: str, make: MakeParameter) -> Bound:
        """What a name stands for; the empty name is an absent operand."""
        if not name:
            return None
        if name in self._values:
            return self._values[name]
        if name in self._sparse:
            raise CompileError(f"the initializer {name!r} is sparse", where=where,
                               remedy="store it as a dense tensor")  # fmt: skip
        tensor = self._initializers.get(name)
        if tensor is not None:
            self._values[name] = FAILED
            self._values[name] = parameter = make(tensor)
            return parameter
        if self._outer is not None:
            return self._outer.look_up(name, where, make)
        near = closest(name, self._values)
        raise FormatError(
            f"there is no value {name!r}, or it is made later", where=where, remedy=near or None
        )
