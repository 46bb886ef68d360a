"""Names of values in one ONNX graph or function body, and what they stand for; and which inputs of
a model decide shapes: found where typing asks for data that is not known.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

from stitch import ops
from stitch.errors import CompileError, FormatError, closest
from stitch.frontend.onnx.calls import NodeCall
from stitch.graph import SymbolicTensor
from stitch.program import Array


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

    def inner(self) -> Scope:
        """A namespace within this one."""
        return Scope(self.opsets, outer=self, called_with=self.called_with, place=self.place)

    def add_initializers(self, dense: Sequence[Any], sparse: Sequence[Any]) -> None:
        """Declares the initializers of a graph; raises `FormatError` for one given twice."""
        named = [(tensor.name, tensor) for tensor in dense]
        named += [(tensor.values.name, tensor) for tensor in sparse]
        for name, tensor in named:
            if name in self._initializers:
                raise FormatError(f"two initializers are called {name!r}", where=self.place)
            self._initializers[name] = tensor

    def define(self, name: str, bound: Bound, where: str) -> None:
        """Gives a name its value; raises `FormatError` for one that has a value already."""
        if name in self._values:
            raise FormatError(f"the value {name!r} is made twice", where=where)
        self._values[name] = bound

    def has(self, name: str) -> bool:
        """Whether a name stands for something here."""
        known = name in self._values or name in self._initializers
        return known or (self._outer is not None and self._outer.has(name))

    def look_up(self, name: str, where: str, make: MakeParameter) -> Bound:
        """What a name stands for; the empty name is an absent operand."""
        if not name:
            return None
        if name in self._values:
            return self._values[name]
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


#: Operators that look at the shape of their operand only.
_SHAPE_ONLY = frozenset({"Shape", "Size", "ConstantOfShape", "EyeLike"})


class _Known(tuple[Any, ...]):
    """Known data by operand; `missing` lists the operands that were asked for and not known."""

    missing: list[int]

    def __getitem__(self, index: Any) -> Any:
        operand = super().__getitem__(index)
        if operand is None:
            self.missing.append(index)
        return operand


def asked_operand(call: NodeCall, known: Sequence[Array | None], outputs: int) -> int | None:
    """The operand whose data inference asked for last before it failed; None if for none."""
    asked = _Known(known)
    asked.missing = []
    try:
        definition = ops.lookup(call.op, call.domain)
        context = ops.InferenceContext(
            call.op,
            tuple(None if t is None else t.type for t in call.inputs),
            asked,
            ops.resolve_attributes(definition, call.attributes),
            outputs,
        )
        definition.infer(context)
    except CompileError:
        return asked.missing[-1] if asked.missing else None
    return None


#: A value: the graph or body that it is in, and its index there.
_Key = tuple[Any, int]


def _key(tensor: SymbolicTensor) -> _Key:
    return tensor.builder, tensor.index


class Dependencies:
    """What values are computed from, and which inputs some operator wants to know."""

    def __init__(self) -> None:
        self._sources: dict[_Key, tuple[_Key, ...]] = {}
        self._inputs: dict[_Key, tuple[str, SymbolicTensor]] = {}
        #: Inputs that decide a shape, in the order in which they were found.
        self.wanted: dict[str, None] = {}

    def add_input(self, name: str, tensor: SymbolicTensor) -> None:
        """Declares an input of the graph."""
        self._inputs[_key(tensor)] = (name, tensor)

    def note(
        self, op: str, operands: Sequence[SymbolicTensor | None], results: Sequence[SymbolicTensor]
    ) -> None:
        """Remembers what the results of an operation are computed from."""
        read = () if op in _SHAPE_ONLY else tuple(_key(t) for t in operands if t is not None)
        for tensor in results:
            self._sources[_key(tensor)] = read

    def want(self, tensor: SymbolicTensor, *, integers_only: bool = False) -> None:
        """Notes the inputs that a value is computed from as wanted.

        With `integers_only`, does nothing where one of them is of real numbers.
        """
        slots: dict[str, SymbolicTensor] = {}
        pending, seen = [_key(tensor)], {_key(tensor)}
        while pending:
            key = pending.pop()
            if key in self._inputs:
                name, slot = self._inputs[key]
                slots[name] = slot
            for source in self._sources.get(key, ()):
                if source not in seen:
                    seen.add(source)
                    pending.append(source)
        if not integers_only or all(slot.dtype.kind in "iub" for slot in slots.values()):
            self.wanted.update(dict.fromkeys(slots))
