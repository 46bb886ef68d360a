"""What the names of a model stand for: tensors, lists of tensors, nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np

from stitch import ops
from stitch.errors import CompileError, FormatError, unknown
from stitch.frontend.onnx.calls import AttributedNode, NodeCall
from stitch.graph import ComputationGraphBuilder, SymbolicTensor
from stitch.program import Array

# --------------------------------------------------------------------------------------------------
# Scopes


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
        what = f"there is no value {name!r}, or it is made later"
        raise unknown(what, name, self._values, FormatError, where=where, expected=None)


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


# --------------------------------------------------------------------------------------------------
# Sequences and optionals


@dataclass(frozen=True, slots=True)
class ListCall(AttributedNode):
    """A node whose operands may be lists; None stands for one that is not written."""

    op: str
    operands: tuple[Given, ...]
    attributes: Mapping[str, Any]
    where: str
    builder: ComputationGraphBuilder
    dependencies: Dependencies

    def operand(self, index: int) -> Given:
        """An operand of any kind."""
        return self.operands[index] if index < len(self.operands) else None

    def items(self, index: int) -> tuple[SymbolicTensor, ...]:
        """The tensors of a list."""
        value = self.operand(index)
        if not isinstance(value, TensorList):
            raise self.wrong(index, "a sequence")
        return value.items

    def tensor(self, index: int) -> SymbolicTensor:
        """A plain tensor."""
        value = self.operand(index)
        if not isinstance(value, SymbolicTensor):
            raise self.wrong(index, "a tensor")
        return value

    def wrong(self, index: int, wanted: str) -> FormatError:
        """What to raise for an operand of another kind."""
        return self.malformed(
            f"operand {index} of {self.op} is {wanted}", got=kind_of(self.operand(index))
        )

    def known(self, index: int, name: str) -> Array:
        """The data of a tensor that decides how long lists are."""
        tensor = self.tensor(index)
        data = self.builder.known_data(tensor)
        if data is None:
            self.dependencies.want(tensor, integers_only=True)
            raise self.refused(
                f"operand {index} ({name}) of {self.op} must be known at compile time: "
                "it decides what a sequence holds",
                expected=f"a constant for {name}", got=f"{tensor.type.text()}",
            )  # fmt: skip
        return data

    def position(self, index: int, count: int, *, behind: bool = False) -> int:
        """A place in a list of `count`, or just behind it; negative ones count from its end."""
        data = self.known(index, "position")
        most = count if behind else count - 1
        place = int(data.reshape(-1)[0]) if data.size == 1 else most + 1
        if not -count <= place <= most:
            raise self.malformed(
                f"{self.op} names a position out of range",
                expected=f"{-count} to {most}" if most >= 0 else "none: the sequence is empty",
                got=str(data.reshape(-1).tolist()[:4]),
            )  # fmt: skip
        return place + count if place < 0 else place


def kind_of(value: Given) -> str:
    """How messages call a value."""
    if isinstance(value, SymbolicTensor):
        return value.type.text()
    if isinstance(value, TensorList):
        return f"a sequence of {len(value.items)} tensors"
    return "an empty optional value" if isinstance(value, Nothing) else "nothing"


def _list_of(call: ListCall, items: Sequence[SymbolicTensor]) -> list[Given]:
    kinds = {item.data_type for item in items}
    if len(kinds) > 1:
        raise call.malformed(
            f"the tensors of a sequence ({call.op}) have one type",
            got=", ".join(sorted(kind.value for kind in kinds)),
        )  # fmt: skip
    return [TensorList(tuple(items))]


def _at(call: ListCall) -> list[Given]:
    items = call.items(0)
    return [items[call.position(1, len(items))]]


def _insert(call: ListCall) -> list[Given]:
    items, tensor = list(call.items(0)), call.tensor(1)
    if call.operand(2) is None:
        return _list_of(call, [*items, tensor])
    # A new tensor may also stand behind the last; negative places count from there.
    place = call.position(2, len(items), behind=True)
    items.insert(place, tensor)
    return _list_of(call, items)


def _erase(call: ListCall) -> list[Given]:
    items = list(call.items(0))
    if not items:
        raise call.malformed("SequenceErase of an empty sequence")
    del items[-1 if call.operand(1) is None else call.position(1, len(items))]
    return _list_of(call, items)


def _sizes(call: ListCall, length: int) -> list[int]:
    """How many elements of the axis each part takes."""
    if call.operand(1) is None:
        return [1] * length
    data = call.known(1, "split")
    if data.ndim:
        sizes = [int(size) for size in data.reshape(-1)]
        if min(sizes, default=0) < 0 or sum(sizes) != length:
            raise call.malformed(
                "the parts of SplitToSequence do not make up the axis",
                expected=f"a sum of {length}", got=str(sizes),
            )  # fmt: skip
        return sizes
    step = int(data.item())
    if step < 1:
        raise call.malformed("SplitToSequence needs parts of at least 1", got=str(step))
    return [min(step, length - start) for start in range(0, length, step)]


def _split(call: ListCall) -> list[Given]:
    data, builder = call.tensor(0), call.builder
    rank, axis = len(data.shape), call.whole("axis")
    if not -rank <= axis < rank:
        raise call.malformed(
            f"SplitToSequence has no axis {axis}", expected=f"{-rank} to {rank - 1}", got=str(axis)
        )
    sizes = _sizes(call, data.shape[axis])
    if not sizes:
        return [TensorList(())]
    parts: Sequence[SymbolicTensor] = builder.apply(
        "Split", [data, np.array(sizes, np.int64)], len(sizes), {"axis": axis}
    )
    if call.operand(1) is None and not call.whole("keepdims", 1):
        parts = [builder.op("Squeeze", part, [axis]) for part in parts]
    return _list_of(call, parts)


def _concat(call: ListCall) -> list[Given]:
    items, axis = call.items(0), call.whole("axis")
    if not items:
        raise call.refused("ConcatFromSequence of an empty sequence")
    if call.whole("new_axis"):
        items = tuple(call.builder.op("Unsqueeze", item, [axis]) for item in items)
    return [call.builder.op("Concat", *items, axis=axis)]


def _has_element(call: ListCall) -> list[Given]:
    given = call.operand(0)
    has = given is not None and not isinstance(given, Nothing)
    return [call.builder.constant(np.asarray(has))]


def _get_element(call: ListCall) -> list[Given]:
    given = call.operand(0)
    if given is None or isinstance(given, Nothing):
        raise call.refused("OptionalGetElement of an empty optional value")
    return [given]


_HANDLERS: dict[str, Callable[[ListCall], list[Given]]] = {
    "SequenceConstruct": lambda call: _list_of(
        call, [*map(call.tensor, range(len(call.operands)))]
    ),
    "SequenceEmpty": lambda call: [TensorList(())],
    "SequenceAt": _at,
    "SequenceInsert": _insert,
    "SequenceErase": _erase,
    "SequenceLength": lambda call: [call.builder.constant(np.asarray(len(call.items(0))))],
    "SplitToSequence": _split,
    "ConcatFromSequence": _concat,
    "Optional": lambda call: [NOTHING if call.operand(0) is None else call.operand(0)],
    "OptionalHasElement": _has_element,
    "OptionalGetElement": _get_element,
    "Identity": lambda call: [call.operand(0)],
}
#: Identity is one of them only where it is given a list.
LIST_OPERATORS = frozenset(_HANDLERS) - {"Identity"}


def is_listed(op: str, operands: Sequence[Given]) -> bool:
    """Whether a node of ONNX's own domain is one of lists."""
    given = any(isinstance(value, TensorList | Nothing) for value in operands)
    return op in LIST_OPERATORS or (op == "Identity" and given)


def lower_list(call: ListCall) -> list[Given]:
    """What a node makes; raises `CompileError` for what must be known, `FormatError`."""
    return _HANDLERS[call.op](call)
