"""How operators may be divided: which shards of operands give which shards of results.

An operator has a name for each axis of its operands and results, as in an einsum: along an axis
that has a name, it computes each index from the same index of the operands. So it may run on parts
of all operands that have the name. Parts along an axis that it sums over give addends of the
result, and addends of operands in which it is linear too. Anything else is refused: elementwise
operators have the names of broadcasting, others those of their entry in `_RULES`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Final, NamedTuple, TypeAlias

from stitch.ops.definition import OpDef
from stitch.ops.inference import Shape, WithAttributes, string_of
from stitch.program import ABSENT, Array, AttributeValue, Operation, ValueType

#: Shards of a value that are equal, and shards whose sum it is.
COPIES: Final = "copies"
SUMS: Final = "sums"
#: How a value is divided: along an axis, or into `COPIES` or `SUMS`.
Part: TypeAlias = int | str

_Names: TypeAlias = tuple[Hashable | None, ...]


@dataclass(frozen=True, slots=True)
class DividedOperation(WithAttributes):
    """An operation on one shard of each operand.

    Attributes:
        operation: The operation.
        definition: Its operator.
        attributes: Resolved attributes.
        inputs: The type of a shard of each operand, None if it is absent.
        outputs: The type of a shard of each result, None if it is not wanted.
        constants: The data of each operand that is known at compile time.
        parts: How each operand is divided.
        wholes: The type of the whole of each result, () if unknown: of a Reshape it decides which
            of several axes of one part is divided.
    """

    operation: Operation
    definition: OpDef
    attributes: Mapping[str, AttributeValue]
    inputs: tuple[ValueType | None, ...]
    outputs: tuple[ValueType | None, ...]
    constants: tuple[Array | None, ...]
    parts: tuple[Part, ...]
    wholes: tuple[ValueType | None, ...] = ()

    def shape(self, index: int = 0) -> Shape:
        """Return the shape of a shard of an operand, () if it is absent."""
        kind = self.inputs[index] if index < len(self.inputs) else None
        return () if kind is None else kind.shape

    def result(self, index: int = 0) -> Shape:
        """Return the shape of a shard of a result, () if it is not wanted."""
        kind = self.outputs[index]
        return () if kind is None else kind.shape

    def integers(self, index: int) -> tuple[int, ...] | None:
        """Return the integers of an operand that is known at compile time, else None."""
        data = self.constants[index] if index < len(self.constants) else None
        return None if data is None else tuple(int(value) for value in data.ravel())

    def axis(self, rank: int) -> int:
        """Return the attribute `axis` of values of a rank."""
        return self.int_of("axis") % max(rank, 1)

    def divided_results(self) -> tuple[Part, ...] | None:
        """Return how each result is divided, None if the operator does not permit how its operands
        are."""
        if all(part == COPIES for part in self.parts):
            return (COPIES,) * len(self.outputs)
        rule = _RULES.get((self.definition.domain, self.definition.name))
        if rule is None and self.definition.elementwise:
            rule = _broadcast
        axes = None if rule is None or self.operation.body != ABSENT else rule(self)
        return None if axes is None else self._along_an_axis(axes) or self._addends(axes)

    def _along_an_axis(self, axes: _Axes) -> tuple[Part, ...] | None:
        """Return the axis of each result, if operands are divided along axes of one name that all
        results have."""
        name = self._name(axes)
        if name is None or SUMS in self.parts:
            return None
        for names, kind, part in zip(axes.inputs, self.inputs, self.parts, strict=True):
            if kind is not None and part == COPIES and name in names:
                return None
        if not all(name in names for names in axes.outputs):
            return None
        return tuple([names.index(name) for names in axes.outputs])

    def _name(self, axes: _Axes) -> Hashable | None:
        """Return the one name of all axes along which operands are divided."""
        found = {
            names[part] if part < len(names) else None
            for names, part in zip(axes.inputs, self.parts, strict=True) if isinstance(part, int)
        }  # fmt: skip
        return found.pop() if len(found) == 1 else None

    def _addends(self, axes: _Axes) -> tuple[Part, ...] | None:
        """Return partial sums, if each term of the results is divided into addends."""
        if any(kind and not kind.data_type.is_floating for kind in self.outputs):
            return None  # Division of integers is not linear, and there is no Reduction of them.
        divided = [part != COPIES for part in self.parts]
        name = self._name(axes)
        for term in axes.terms:
            of = [i for i in term if i < len(self.inputs) and self.inputs[i] is not None]
            if not of:
                continue
            sums = [i for i in of if self.parts[i] == SUMS]
            named = [i for i in of if name is not None and name in axes.inputs[i]]
            if sums:
                is_divided = len(sums) == 1 and sum(divided[i] for i in of) == 1
            else:
                is_divided = (
                    bool(named)
                    and name in axes.summed
                    and all((self.parts[i] != COPIES) == (i in named) for i in of)
                )
            if not is_divided:
                return None
            for i in of:
                divided[i] = False
        return None if any(divided) or not axes.terms else (SUMS,) * len(self.outputs)


class _Axes(NamedTuple):
    """The names of the axes of operands and results; None: must not be divided.

    `summed`: names that the operator sums over. `terms`: a result is the sum of these terms, each
    linear in each of its operands.
    """

    inputs: tuple[_Names, ...]
    outputs: tuple[_Names, ...]
    terms: tuple[tuple[int, ...], ...] = ()
    summed: frozenset[Hashable] = frozenset()


_Rule: TypeAlias = Callable[[DividedOperation], "_Axes | None"]


def _broadcast_names(op: DividedOperation, index: int, batch: Sequence[int]) -> _Names:
    """Return the names of an operand whose first axes broadcast to axes `batch` of the result.

    An axis of size 1 has none, unless it is a part of a longer one.
    """
    shape, part, result = op.shape(index), op.parts[index], op.result()
    pairs = zip(shape, batch[max(0, len(batch) - len(shape)) :], strict=False)
    return tuple(
        [
            name if size == result[name] and (size != 1 or axis == part) else None
            for axis, (size, name) in enumerate(pairs)
        ]
    )


def _broadcast(op: DividedOperation, terms: tuple[tuple[int, ...], ...] = ()) -> _Axes | None:
    names = range(len(op.result()))
    if any(op.result(i) != op.result() for i in range(1, len(op.outputs))):
        return None
    operands = tuple([_broadcast_names(op, i, names) for i in range(len(op.inputs))])
    return _Axes(operands, (tuple(names),) * len(op.outputs), terms)


def _each_a_term(op: DividedOperation) -> _Axes | None:
    return _broadcast(op, tuple([(i,) for i in range(len(op.inputs))]))


def _shaped(op: DividedOperation) -> _Axes | None:
    """`Expand`: the first operand broadcasts to the result."""
    axes = _broadcast(op, ((0,),))
    return None if axes is None else axes._replace(inputs=(axes.inputs[0], (None,)))


def _matmul(op: DividedOperation) -> _Axes:
    ranks = len(op.shape(0)), len(op.shape(1))
    batch = range(max(ranks) - 2)

    def names(index: int, *last: Hashable) -> _Names:
        if ranks[index] == 1:
            return ("inner",)
        behind = batch[max(0, len(batch) - ranks[index] + 2) :]
        return (*_broadcast_names(op, index, behind), *last)

    result = (*batch, *["rows"] * (ranks[0] > 1), *["columns"] * (ranks[1] > 1))
    inputs = names(0, "rows", "inner"), names(1, "inner", "columns")
    return _Axes(inputs, (result,), ((0, 1),), frozenset({"inner"}))


def _gemm(op: DividedOperation) -> _Axes:
    a: _Names = ("inner", 0) if op.int_of("transA") else (0, "inner")
    b: _Names = (1, "inner") if op.int_of("transB") else ("inner", 1)
    third = [_broadcast_names(op, i, (0, 1)) for i in range(2, len(op.inputs))]
    return _Axes((a, b, *third), ((0, 1),), ((0, 1), (2,)), frozenset({"inner"}))


def _einsum(op: DividedOperation) -> _Axes | None:
    equation = string_of(op.attributes, "equation").replace(" ", "")
    if "." in equation or "->" not in equation:
        return None
    left, right = equation.split("->")
    inputs = tuple(
        [
            tuple([letter if names.count(letter) == 1 else None for letter in names])
            for names in left.split(",")
        ]
    )
    repeated = {a for names in left.split(",") for a in names if names.count(a) > 1}
    outputs = tuple([None if letter in repeated else letter for letter in right])
    summed = frozenset(left) - frozenset(right) - repeated
    return _Axes(inputs, (outputs,), (tuple(range(len(inputs))),), summed)


def _convolution(weights: tuple[str, str], op: DividedOperation) -> _Axes:
    space: _Names = (None,) * (len(op.shape()) - 2)
    is_whole = op.int_of("group") == 1
    x: _Names = ("batch", "channels") if is_whole else ("batch", None)
    w: _Names = weights if is_whole else (None, None)
    out = "features" if is_whole else None
    inputs = ((*x, *space), (*w, *space), (out,))[: len(op.inputs)]
    return _Axes(inputs, (("batch", out, *space),), ((0, 1), (2,)), frozenset({"channels"}))


def _samples(
    axes: int, op: DividedOperation, *, terms: tuple[tuple[int, ...], ...] = ()
) -> _Axes | None:
    """Of operators that map over the first axes of the first operand."""
    if len(op.outputs) > 1:
        return None
    names = tuple([i if i < axes else None for i in range(len(op.shape()))])
    # Scales and the like belong to the channels, axis 1.
    others = tuple(
        [(1 if axes > 1 else None,) * len(op.shape(i)) for i in range(1, len(op.inputs))]
    )
    return _Axes((names, *others), (names,), terms)


def _batch_normalization(op: DividedOperation) -> _Axes | None:
    if op.int_of("training_mode") or len(op.shape()) < 2:
        return None
    names = tuple(range(len(op.shape())))
    return _Axes((names, *[(1,)] * 4), (names,))


def _all_but_axis(op: DividedOperation, terms: tuple[tuple[int, ...], ...] = ()) -> _Axes:
    """Of operators along the attribute `axis`, whose operands and results have one rank."""

    def names(shape: Shape) -> _Names:
        at = op.axis(len(op.shape()))
        return tuple([None if i == at else i for i in range(len(shape))])

    inputs = tuple([names(op.shape(i)) for i in range(len(op.inputs))])
    return _Axes(inputs, tuple([names(op.result(i)) for i in range(len(op.outputs))]), terms)


def _concat(op: DividedOperation) -> _Axes:
    return _all_but_axis(op, tuple([(i,) for i in range(len(op.inputs))]))


def _first_along_axis(op: DividedOperation, terms: tuple[tuple[int, ...], ...] = ()) -> _Axes:
    """As `_all_but_axis`; operands but the first are read whole."""
    axes = _all_but_axis(op, terms)
    others = tuple([(None,) * len(op.shape(i)) for i in range(1, len(op.inputs))])
    return axes._replace(inputs=(axes.inputs[0], *others))


def _layer(op: DividedOperation) -> _Axes:
    rank = len(op.shape())
    names = tuple([i if i < op.axis(rank) else None for i in range(rank)])
    others = tuple([(None,) * len(op.shape(i)) for i in range(1, len(op.inputs))])
    return _Axes((names, *others), (names,) * len(op.outputs))


def _reduced(op: DividedOperation, *, is_linear: bool = False, adds: bool = False) -> _Axes | None:
    rank, listed = len(op.shape()), op.integers(1)
    if len(op.inputs) > 1 and op.inputs[1] is not None and listed is None:
        return None
    if not listed:
        if op.int_of("noop_with_empty_axes"):
            return None
        listed = tuple(range(rank))
    return _over(op, {axis % max(rank, 1) for axis in listed}, is_linear=is_linear, adds=adds)


def _over(op: DividedOperation, axes: set[int], *, is_linear: bool, adds: bool) -> _Axes:
    """Of operators that reduce axes."""
    rank = len(op.shape())
    names = tuple([i if adds or i not in axes else None for i in range(rank)])
    kept = [i for i in range(rank) if i not in axes or op.int_of("keepdims")]
    result = tuple([None if i in axes else i for i in kept])
    others: tuple[_Names, ...] = ((None,),) * (len(op.inputs) - 1)
    summed = frozenset(axes) if adds else frozenset[Hashable]()
    return _Axes((names, *others), (result,), ((0,),) if is_linear else (), summed)


def _argument(op: DividedOperation) -> _Axes:
    return _over(op, {op.axis(len(op.shape()))}, is_linear=False, adds=False)


def _transpose(op: DividedOperation) -> _Axes:
    rank = len(op.shape())
    order = op.ints_of("perm") or tuple(reversed(range(rank)))
    return _Axes((tuple(range(rank)),), (tuple(order),), ((0,),))


def _slice(op: DividedOperation) -> _Axes | None:
    rank, starts, axes = len(op.shape()), op.integers(1), op.integers(3)
    has_axes = len(op.inputs) > 3 and op.inputs[3] is not None
    if has_axes:
        sliced = None if axes is None else {axis % rank for axis in axes}
    else:
        sliced = None if starts is None else set(range(len(starts)))
    if sliced is None:
        return None
    names = tuple([None if i in sliced else i for i in range(rank)])
    return _Axes((names, *[(None,)] * (len(op.inputs) - 1)), (names,), ((0,),))


def _gather(op: DividedOperation) -> _Axes:
    at, rank = op.axis(len(op.shape())), len(op.shape())
    data = tuple([None if i == at else i for i in range(rank)])
    indices = tuple([("index", i) for i in range(len(op.shape(1)))])
    return _Axes((data, indices), ((*data[:at], *indices, *data[at + 1 :]),), ((0,),))


def _gather_elements(op: DividedOperation) -> _Axes:
    at = op.axis(len(op.shape()))
    pairs = list(zip(op.shape(0), op.shape(1), strict=True))
    names = tuple([i if i != at and a == b else None for i, (a, b) in enumerate(pairs)])
    indices = (*names[:at], at, *names[at + 1 :])
    return _Axes((names, indices), (indices,), ((0,),))


def _reshape(op: DividedOperation) -> _Axes:
    """An axis is that of the result with equally many elements in the axes before it."""
    shape, result = op.shape(), op.result()
    whole = op.wholes[0].shape if op.wholes and op.wholes[0] is not None else result
    places: dict[int, int] = {}
    for axis, size in enumerate(result):
        before = prod(result[:axis])
        known = places.get(before)
        is_divided = known is not None and whole[known] != result[known]
        if known is None or whole[axis] != size or (size != 1 and not is_divided):
            places[before] = axis
    is_empty = 0 in shape
    names = tuple([None if is_empty else places.get(prod(shape[:i])) for i in range(len(shape))])
    others: tuple[_Names, ...] = ((None,),) * (len(op.inputs) - 1)
    return _Axes((names, *others), (tuple(range(len(result))),), ((0,),))


def _flatten(op: DividedOperation) -> _Axes:
    rank, at = len(op.shape()), op.int_of("axis")
    at += rank if at < 0 else 0
    names: list[Hashable | None] = [None] * rank
    if at < rank:
        names[at] = 1
    if at > 0 and rank:
        names[0] = 0
    return _Axes((tuple(names),), ((0, 1),), ((0,),))


def _squeeze(op: DividedOperation, *, wider: bool) -> _Axes | None:
    """`Squeeze`, or `Unsqueeze`, whose result is the wider one."""
    narrow, wide = (op.shape(), op.result()) if wider else (op.result(), op.shape())
    listed, rank = op.integers(1), len(wide)
    if listed is None:
        return None
    without = {axis % max(rank, 1) for axis in listed}
    kept = iter(range(len(narrow)))
    names = tuple([None if i in without else next(kept) for i in range(rank)])
    own: _Names = tuple(range(len(narrow)))
    first, result = (own, names) if wider else (names, own)
    return _Axes((first, (None,)), (result,), ((0,),))


_LINEAR = ((0,),)
_Key: TypeAlias = tuple[str, str]


def _named(rule: _Rule, *names: str) -> dict[_Key, _Rule]:
    return {("", name): rule for name in names}


#: The rules of operators, but of elementwise ones that are linear in nothing.
_RULES: Mapping[_Key, _Rule] = {
    **_named(_each_a_term, "Add", "Sub", "Sum", "Mean"),
    **_named(partial(_broadcast, terms=((0, 1),)), "Mul"),
    **_named(partial(_broadcast, terms=_LINEAR), "Div", "Neg", "Identity"),
    **_named(partial(_broadcast, terms=((1,), (2,))), "Where"),
    **_named(_shaped, "Expand"),
    **_named(_matmul, "MatMul"),
    **_named(_gemm, "Gemm"),
    **_named(_einsum, "Einsum"),
    **_named(partial(_convolution, ("features", "channels")), "Conv"),
    **_named(partial(_convolution, ("channels", "features")), "ConvTranspose"),
    **_named(partial(_samples, 2), "MaxPool", "LpPool", "GlobalMaxPool", "InstanceNormalization"),
    **_named(partial(_samples, 2, terms=_LINEAR), "AveragePool", "GlobalAveragePool"),
    **_named(partial(_samples, 1), "GroupNormalization", "LRN"),
    **_named(_batch_normalization, "BatchNormalization"),
    **_named(_layer, "LayerNormalization", "RMSNormalization"),
    **_named(_all_but_axis, "Softmax", "LogSoftmax", "Hardmax"),
    **_named(_first_along_axis, "TopK"),
    **_named(partial(_first_along_axis, terms=_LINEAR), "Split"),
    **_named(_concat, "Concat"),
    **_named(partial(_reduced, is_linear=True, adds=True), "ReduceSum"),
    **_named(partial(_reduced, is_linear=True), "ReduceMean"),
    **_named(_reduced, "ReduceMax", "ReduceMin", "ReduceProd", "ReduceL1", "ReduceL2",
             "ReduceLogSum", "ReduceLogSumExp", "ReduceSumSquare"),
    **_named(_argument, "ArgMax", "ArgMin"),
    **_named(_transpose, "Transpose"),
    **_named(_slice, "Slice"),
    **_named(_gather, "Gather"),
    **_named(_gather_elements, "GatherElements"),
    **_named(_reshape, "Reshape"),
    **_named(_flatten, "Flatten"),
    **_named(partial(_squeeze, wider=False), "Squeeze"),
    **_named(partial(_squeeze, wider=True), "Unsqueeze"),
}  # fmt: skip
