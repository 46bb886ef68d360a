"""Sequences and optional values of ONNX, which exist only while a model is read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from stitch.errors import FormatError
from stitch.frontend.onnx.node_refusals import Refusing
from stitch.frontend.onnx.values.scope import NOTHING, Dependencies, Given, Nothing, TensorList
from stitch.graph import ComputationGraphBuilder, SymbolicTensor
from stitch.program import Array


@dataclass(frozen=True, slots=True)
class ListCall(Refusing):
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

    def number(self, name: str, default: int) -> int:
        """An integer attribute."""
        value = self.attributes.get(name, default)
        if not isinstance(value, int):
            raise self.malformed(f"attribute {name!r} of {self.op} is one integer")
        return value


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
    rank, axis = len(data.shape), call.number("axis", 0)
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
    if call.operand(1) is None and not call.number("keepdims", 1):
        parts = [builder.op("Squeeze", part, [axis]) for part in parts]
    return _list_of(call, parts)


def _concat(call: ListCall) -> list[Given]:
    items, axis = call.items(0), call.number("axis", 0)
    if not items:
        raise call.refused("ConcatFromSequence of an empty sequence")
    if call.number("new_axis", 0):
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
