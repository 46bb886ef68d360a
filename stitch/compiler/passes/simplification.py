"""Passes that preserve results bit for bit: constant folding, and removal of redundant operations.

Folding computes an operation whose operands are constants, or that only needs shapes, with the
NumPy kernels. Budgets limit the growth of the constants, the work and the workspace; they are
checked from types, before anything is computed. Random operators are never folded.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from operator import is_
from typing import NamedTuple

import numpy as np

from stitch import ops
from stitch.budget import SMALL_NBYTES, claim, claim_for
from stitch.errors import StitchError
from stitch.graph import MAX_KNOWN_ELEMENTS, ComputationGraph
from stitch.ops import attributes_of, sees_everywhere
from stitch.program import (
    ABSENT,
    Array,
    Constant,
    Operation,
    SizeNeeded,
    Value,
    ValueType,
    has_symbols,
    integers_of,
    is_deferred,
    is_symbolic,
    names_in,
    same_integers,
    same_shape,
)

# Constant folding -------------------------------------------------------------------------------

#: Limit on the growth of the constants.
FOLD_GROWTH_NBYTES = 1 << 20
#: Limit on elementary steps of all folding: a constant, plus so many per element of the constants
#: that the graph has (which a front end read from a file).
FREE_STEPS, STEPS_PER_ELEMENT = 1 << 26, 16
#: Limit on the workspace of one kernel: a constant, plus so many times the bytes of the constants.
FREE_WORKSPACE_NBYTES, WORKSPACE_TIMES = 1 << 26, 4

#: Operators with hidden state: applied twice to the same operands, results may differ.
UNREPEATABLE = frozenset({
    "Bernoulli", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform",
    "RandomUniformLike",
})  # fmt: skip


def is_repeatable(operation: Operation) -> bool:
    """Whether the operation always returns the same result for the same operands."""
    if operation.body != ABSENT:
        return False  # Not analysed.
    if operation.domain:
        return True
    if operation.op == "Dropout":
        return len(operation.inputs) < 3
    return operation.op not in UNREPEATABLE


def fold_constants(graph: ComputationGraph, growth_nbytes: int) -> ComputationGraph:
    """Replace operations on constants by their results, and drop the constants that nothing reads.

    `growth_nbytes` limits the growth of the constants in total. A result counts, minus constants
    that only its operation reads; small integers (shapes, indices) are free.
    """
    known, folded = ConstantFolder(graph, growth_nbytes).fold(graph, {})
    kept = tuple([o for i, o in enumerate(graph.operations) if i not in folded])
    computed = {v for operation in kept for v in operation.outputs}
    left = {v for operation in kept for v in operation.inputs} - computed
    left |= {slot.value for slot in graph.outputs} - computed
    constants = tuple([Constant(v, data) for v, data in known.items() if v in left])
    if not folded and len(constants) == len(graph.constants):
        return graph
    return replace(graph, operations=kept, constants=constants)


class _Candidate(NamedTuple):
    """An operation that may be folded.

    Attributes:
        number: Its index.
        operation: The operation.
        reads: The operands that must be known; None for Shape and Size.
        alone: The operands that it alone reads.
        names: The named sizes that its results depend on.
        known: Growth, steps and results, by these sizes.
        twin: The first candidate with equal results, None if it is this one.
    """

    number: int
    operation: Operation
    reads: frozenset[int] | None
    alone: list[int]
    names: tuple[str, ...]
    known: dict[tuple[int, ...], tuple[int, int, dict[int, Array]]]
    twin: int | None


#: Sizes for which the results of an operation are kept, and bytes of a result that is kept.
MOST_KEPT, KEPT_NBYTES = 64, 1 << 16


class ConstantFolder:
    """Computes the operations of a graph whose operands are constants, also at other sizes.

    Args:
        graph: The graph; sizes may be symbolic.
        growth_nbytes: As for `fold_constants`.
    """

    __slots__ = ("_candidates", "_growth_nbytes", "_steps", "_workspace_nbytes")

    def __init__(self, graph: ComputationGraph, growth_nbytes: int) -> None:
        self._growth_nbytes = growth_nbytes
        held = [constant.data for constant in graph.constants]
        self._steps = FREE_STEPS + STEPS_PER_ELEMENT * sum(data.size for data in held)
        nbytes = sum(data.nbytes for data in held)
        self._workspace_nbytes = nbytes * WORKSPACE_TIMES + FREE_WORKSPACE_NBYTES
        readers = Counter(v for operation in graph.operations for v in operation.inputs)
        outputs = {slot.value for slot in graph.outputs}
        self._candidates: list[_Candidate] = []
        numbers, seen = _numbers_of(graph), dict[Hashable, tuple[int, Operation]]()
        #: By value that may be a constant, the sizes that it depends on.
        names: dict[int, frozenset[str]] = {ABSENT: frozenset()}
        for constant in graph.constants:
            data = constant.data
            names[constant.value] = names_in(integers_of(data) if has_symbols(data) else ())
        for index, operation in enumerate(graph.operations):
            inputs = operation.inputs
            is_shape = operation.op in ("Shape", "Size") and not operation.domain
            if not is_shape and not names.keys() >= {*inputs}:
                continue
            typed = inputs if is_shape else operation.outputs
            on = names_in([n for v in typed if v != ABSENT for n in graph.values[v].type.shape])
            on = on.union(*([] if is_shape else [names[v] for v in inputs]))
            alone = [v for v in {*inputs} - outputs if readers[v] == inputs.count(v)]
            reads = None if is_shape else frozenset(inputs) - {ABSENT}
            twin = None
            if is_repeatable(operation) and not (operation.is_foreign or operation.is_opaque):
                same = replace(operation, inputs=tuple([numbers.get(v, v) for v in inputs]))
                first, other = seen.setdefault(_operation_key(same, graph.values), (index, same))
                twin = first if first != index else None
                numbers.update(zip(operation.outputs, other.outputs, strict=True))
            candidate = _Candidate(index, operation, reads, alone, tuple(sorted(on)), {}, twin)
            self._candidates.append(candidate)
            names |= dict.fromkeys(operation.outputs, on)

    def fold(
        self, graph: ComputationGraph, sizes: Mapping[str, int]
    ) -> tuple[dict[int, Array], frozenset[int]]:
        """Return the constants with the results by value, and the indices of folded operations.

        Operations that need a guard stay where none may be recorded (`without_guards`).

        Args:
            graph: The graph at these sizes.
            sizes: The named sizes, none if `graph` is the one with symbolic sizes.
        """
        known: dict[int, Array] = graph.constant_data()
        growth_left, steps_left, folded = self._growth_nbytes, self._steps, []
        keys: dict[tuple[str, ...], tuple[int, ...]] = {}
        #: Growth, steps and results of what is folded at these sizes.
        done: dict[int | None, tuple[int, int, dict[int, Array]]] = {}
        for number, operation, reads, alone, names, kept, twin in self._candidates:
            if reads is not None and not known.keys() >= reads:
                continue
            key = keys.get(names)
            if key is None:
                key = keys[names] = tuple([sizes[name] for name in names]) if sizes else ()
            found = kept.get(key)
            if found is None and twin in done:
                growth, steps, made = done[twin]
                written = [v for v in operation.outputs if v != ABSENT]
                found = growth, steps, dict(zip(written, made.values(), strict=True))
            try:
                if found is None:
                    types = _types_of(operation, graph.values)
                    growth, steps, results = _growth_of(operation, reads is None, *types)
                else:
                    growth, steps, results = found
                grown = growth
                for v in alone:
                    if v in known:
                        grown -= known[v].nbytes
                if reads is not None:
                    if grown > max(growth_left, 0) or steps > steps_left:
                        continue
                    if found is None:
                        arrays = [None if v == ABSENT else known[v] for v in operation.inputs]
                        results = _fold(operation, arrays, *types, self._workspace_nbytes)
            except SizeNeeded:
                continue
            if results is None:
                continue  # Also for want of memory, which may be free next time.
            # Those of all sizes are those of one model, which is kept.
            if found is None and sizes and len(names) < len(sizes):
                if len(kept) >= MOST_KEPT:
                    kept.pop(next(iter(kept)))
                if not names or growth <= KEPT_NBYTES:
                    kept[key] = growth, steps, results
            growth_left -= grown
            steps_left -= steps
            known.update(results)
            folded.append(number)
            done[number] = growth, steps, results
        return known, frozenset(folded)


def _numbers_of(graph: ComputationGraph) -> dict[int, int]:
    """Return for each constant the first with its array, of few integers the first equal one."""
    firsts: dict[Hashable, int] = {}
    numbers: dict[int, int] = {}
    for constant in graph.constants:
        data = constant.data
        key: Hashable = id(data)
        if has_symbols(data):
            # A hash of a size would specialise it.
            elements = [getattr(n, "expression", n) for n in integers_of(data)]
            key = (data.dtype, data.shape, tuple(elements))
        elif data.dtype.kind == "i" and data.size <= SAMPLE:
            key = constant_sample(data)
        numbers[constant.value] = firsts.setdefault(key, constant.value)
    return numbers


def _growth_of(
    operation: Operation, is_shape: bool, operands: list[ValueType | None], types: list[ValueType]
) -> tuple[int, int, dict[int, Array] | None]:
    """Return bytes and steps of the results of an operation; the results of Shape and Size."""
    for kind in types:
        for size in kind.shape:
            if is_symbolic(size):
                int(size)  # The growth is known at one size only.
    growth = sum([kind.nbytes for kind in types if not _is_index(kind)])
    if is_shape:
        shape = ops.known_by_type(operation, operands[0])
        return growth, 0, None if shape is None else dict.fromkeys(operation.outputs, shape)
    return growth, ops.estimated_steps(operation, operands, types), None


def _types_of(
    operation: Operation, values: Sequence[Value]
) -> tuple[list[ValueType | None], list[ValueType]]:
    """Return the types of the operands, and of the results that are there."""
    operands = [None if v == ABSENT else values[v].type for v in operation.inputs]
    return operands, [values[v].type for v in operation.outputs if v != ABSENT]


def _is_index(kind: ValueType) -> bool:
    """Whether a value may be a shape, axes or indices: small, and of integers."""
    return kind.data_type.dtype.kind in "iub" and math.prod(kind.shape) <= MAX_KNOWN_ELEMENTS


def _fold(
    operation: Operation,
    arrays: Sequence[Array | None],
    operands: list[ValueType | None],
    types: list[ValueType],
    workspace_nbytes: int,
) -> dict[int, Array] | None:
    """Return the results of an operation by value, or None if it must stay."""
    if not is_repeatable(operation):
        return None
    try:
        symbolic = ops.symbolic_results(operation, arrays, types)
        if symbolic is not None:
            return dict(zip(operation.outputs, symbolic, strict=True))
        view = _reshaped(operation, arrays, operands, types)
        if view is not None:
            return {operation.outputs[0]: view}
        arrays = [None if data is None else np.asarray(data) for data in arrays]
        given = [data for data in arrays if data is not None]
        taken = ops.kernel_workspace(
            operation.op, operands, types, domain=operation.domain, attributes=operation.attributes
        )
        if taken > workspace_nbytes:
            return None
        nbytes = sum([kind.nbytes for kind in types])
        claimed = None
        if nbytes + sum([data.nbytes for data in given]) >= SMALL_NBYTES:
            claimed = claim(taken + 2 * nbytes, f"folding {operation.op}")
        is_whole = len(types) == len(operation.outputs)
        results = ops.evaluate_operation(operation, arrays, types if is_whole else None)
    except (StitchError, MemoryError):
        return None  # It will raise its own error at run time.
    folded = {v: data for v, data in zip(operation.outputs, results, strict=True) if v != ABSENT}
    if claimed is not None:
        claimed.dispose()
    for data in folded.values():
        if data.nbytes >= SMALL_NBYTES:
            claim_for(data, data.nbytes, f"for the result of {operation.op}, computed beforehand")
    return folded


def _reshaped(
    operation: Operation, arrays: Sequence[Array | None], operands: Sequence[ValueType | None],
    types: Sequence[ValueType],
) -> Array | None:  # fmt: skip
    """Return the first operand in the shape of the result if that is all that an operation does."""
    if not keeps_order(operation):
        return None
    data, before, after = arrays[0], operands[0], types[0]
    if data is None or before is None or before.data_type is not after.data_type:
        return None
    return data.reshape(after.shape) if data.size == math.prod(after.shape) else None


def axis_order(operation: Operation, values: Sequence[Value]) -> tuple[int, ...] | None:
    """Return the operand's axes in the order of the result's; None if it is not a Transpose."""
    if operation.op != "Transpose" or operation.domain:
        return None
    order = operation.attributes.get("perm")
    if isinstance(order, tuple):
        return tuple(map(int, order))
    return tuple(range(len(values[operation.inputs[0]].type.shape)))[::-1]


def exchange(rank: int) -> tuple[int, ...]:
    """Return the axis order that transposes the last two axes.

    >>> exchange(3)
    (0, 2, 1)
    """
    return (*range(rank - 2), rank - 1, rank - 2)


# Redundancy -------------------------------------------------------------------------------------

#: Operators that do nothing if their result has the type of their operand; Slice without steps.
_SAME_ORDER = frozenset({
    "Cast", "Dropout", "Expand", "Flatten", "Identity", "Reshape", "Slice", "Squeeze", "Unsqueeze",
})  # fmt: skip
#: The most operands of a Slice without steps.
_WITHOUT_STEPS = 4


def remove_identities(graph: ComputationGraph) -> ComputationGraph:
    """Bypass operations that return an operand: `Identity`, `Cast` to the same type, `Dropout` at
    inference, shape operators that keep the shape, `Where` with a condition that is the same
    everywhere; merge transposes of transposes.

    Rounding casts stay. Dead code remains.
    """
    read = {v for operation in graph.operations for v in operation.inputs}
    read |= {slot.value for slot in graph.outputs}
    now: dict[int, int] = {}
    conditions = graph.constant_data() if any(o.op == "Where" for o in graph.operations) else {}
    #: For results of transposes: the operand and its axis order.
    turned: dict[int, tuple[int, tuple[int, ...]]] = {}
    kept: list[Operation] = []
    for operation in graph.operations:
        operation = _reading(operation, now)
        order = axis_order(operation, graph.values)
        if order is not None:
            if operation.inputs[0] in turned:
                source, before = turned[operation.inputs[0]]
                order = tuple(before[axis] for axis in order)
                operation = replace(operation, inputs=(source,), attributes={"perm": order})
            turned[operation.outputs[0]] = operation.inputs[0], order
        if _is_identity(operation, graph.values, read):
            now[operation.outputs[0]] = operation.inputs[0]
            continue
        chosen = chosen_operand(operation, conditions)
        if chosen != ABSENT and _have_one_type(graph.values, chosen, operation.outputs[0]):
            now[operation.outputs[0]] = chosen
        else:
            kept.append(operation)
    return _rewritten(graph, kept, graph.constants, now)


def _reading(operation: Operation, now: Mapping[int, int]) -> Operation:
    """Return an operation that reads what values are now."""
    if now.keys().isdisjoint(operation.inputs):
        return operation
    return replace(operation, inputs=tuple([now.get(v, v) for v in operation.inputs]))


def _rewritten(
    graph: ComputationGraph, operations: Sequence[Operation], constants: Sequence[Constant],
    now: Mapping[int, int],
) -> ComputationGraph:  # fmt: skip
    """Return the graph with these operations and constants; itself, if they are its own."""
    is_same = len(operations) == len(graph.operations) and len(constants) == len(graph.constants)
    if is_same and all(map(is_, operations, graph.operations)):
        return graph
    outputs = tuple([replace(s, value=now.get(s.value, s.value)) for s in graph.outputs])
    return replace(graph, operations=tuple(operations), constants=tuple(constants), outputs=outputs)


def keeps_order(operation: Operation) -> bool:
    """Whether the operation does nothing if its result has the type of its operand."""
    has_both = (*operation.inputs[:1], ABSENT)[0] != ABSENT != (*operation.outputs[:1], ABSENT)[0]
    is_forward = operation.op != "Slice" or len(operation.inputs) <= _WITHOUT_STEPS
    return has_both and is_forward and operation.op in _SAME_ORDER and not operation.domain


def _is_identity(operation: Operation, values: tuple[Value, ...], read: set[int]) -> bool:
    if operation.domain or not operation.inputs or operation.inputs[0] == ABSENT:
        return False
    written = [v for v in operation.outputs if v != ABSENT and v in read]
    if not operation.outputs or set(written) - {operation.outputs[0]}:
        return False
    if operation.op == "Transpose":
        rank = len(values[operation.inputs[0]].type.shape)
        return axis_order(operation, values) == tuple(range(rank))
    if operation.op == "Dropout" and len(operation.inputs) > 2:
        if operation.inputs[2] != ABSENT:
            return False
    elif not keeps_order(operation):
        return False
    return _have_one_type(values, operation.inputs[0], operation.outputs[0])


def _have_one_type(values: Sequence[Value], one: int, other: int) -> bool:
    before, after = values[one].type, values[other].type
    return before.data_type is after.data_type and same_shape(before.shape, after.shape)


def chosen_operand(operation: Operation, known: Mapping[int, Array]) -> int:
    """Return the operand that a Where takes everywhere; `ABSENT` if it takes both, or unknown."""
    if operation.op != "Where" or operation.domain or operation.outputs[0] == ABSENT:
        return ABSENT
    condition = known.get(operation.inputs[0])
    if condition is None or has_symbols(condition) or is_deferred(condition):
        return ABSENT
    if condition.all():
        return operation.inputs[1]
    return ABSENT if condition.any() else operation.inputs[2]


def merge_common_subexpressions(graph: ComputationGraph) -> ComputationGraph:
    """Merge equal operations and equal constants into the first of them."""
    now: dict[int, int] = {}
    seen: dict[Hashable, tuple[int, ...]] = {}
    constants: list[Constant] = []
    #: Those of `constants` with symbolic sizes.
    symbolic: list[Constant] = []
    samples = Counter(constant_sample(c.data) for c in graph.constants if not has_symbols(c.data))
    for constant in graph.constants:
        if has_symbols(constant.data) or (symbolic and constant.data.dtype.kind == "i"):
            others = constants if has_symbols(constant.data) else symbolic
            same = (c.value for c in others if same_integers(c.data, constant.data))
            known = next(same, None)
            if known is not None:
                now[constant.value] = known
                continue
            if has_symbols(constant.data):
                symbolic.append(constant)
                constants.append(constant)
                continue
        alone = samples[constant_sample(constant.data)] == 1
        key = constant.value if alone else constant_digest(constant.data)
        first = seen.setdefault(key, (constant.value,))
        if first == (constant.value,):
            constants.append(constant)
        else:
            now[constant.value] = first[0]
    kept: list[Operation] = []
    for operation in graph.operations:
        operation = _reading(operation, now)
        if is_repeatable(operation):
            first = seen.setdefault(_operation_key(operation, graph.values), operation.outputs)
            if first != operation.outputs:
                now.update(zip(operation.outputs, first, strict=True))
                now.pop(ABSENT, None)
                continue
        kept.append(operation)
    return _rewritten(graph, kept, constants, now)


#: Elements of a sample: above it, equal samples need digests.
SAMPLE = 16


def constant_sample(data: Array) -> bytes:
    """Return type, shape, first and last elements; all of at most `SAMPLE` elements."""
    ends = data
    if data.size > SAMPLE:
        flat = data.reshape(-1)
        ends = np.concatenate([flat[: SAMPLE // 2], flat[-SAMPLE // 2 :]])
    # Bytes keep their hash.
    return b"%d%r" % (data.dtype.num, data.shape) + ends.tobytes()


def constant_digest(data: Array) -> Hashable:
    """Return type, shape and a digest of the elements."""
    import hashlib  # Loads OpenSSL: only for graphs with constants.

    content = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
    return (data.dtype, data.shape, hashlib.blake2b(content.data).digest())


def _operation_key(operation: Operation, values: tuple[Value, ...]) -> Hashable:
    # Operators of Stitch's own infer the types of their results from the rest of the key.
    declares = operation.is_foreign or operation.is_opaque
    types = tuple(
        None if v == ABSENT else values[v].type if declares else True for v in operation.outputs
    )
    # repr distinguishes 1 from 1.0 and 0.0 from -0.0; `==` does not.
    attributes = tuple(
        (name, repr(operation.attributes[name])) for name in sorted(operation.attributes)
    )
    return (operation.domain, operation.op, operation.opset, operation.inputs, types, attributes)


def sink_relu_below_max_pool(graph: ComputationGraph) -> ComputationGraph:
    """Move each Relu below the max pool that is its only reader.

    Results stay bit-equal, as Relu is monotonic. Training saves and reads less: the tensor below
    the pool is smaller. Not part of `optimize`: in inference, Relu fuses with the operation above.
    """
    readers = Counter(v for o in graph.operations for v in o.inputs)
    readers.update(slot.value for slot in graph.outputs)
    values, operations = list(graph.values), list(graph.operations)
    #: Indices of Relus by their result, if it is read once.
    made = {
        o.outputs[0]: i for i, o in enumerate(operations)
        if o.op == "Relu" and not o.domain and readers[o.outputs[0]] == 1
    }  # fmt: skip
    moved: set[int] = set()
    for index, pool in enumerate(graph.operations):
        first = made.get(pool.inputs[0]) if pool.inputs else None
        if first is None or not _gives_maxima(pool, graph.values, readers):
            continue
        relu, (result, *_) = operations[first], pool.outputs
        # Keep the names with their meaning: the pool's result, and the activation's.
        between = relu.outputs[0]
        values[between] = values[result]
        values[result] = replace(graph.values[between], type=values[result].type)
        operations[first] = replace(pool, inputs=relu.inputs, outputs=(between,))
        operations[index] = replace(relu, inputs=(between,), outputs=(result,))
        moved.add(first)
    return replace(graph, values=tuple(values), operations=tuple(operations)) if moved else graph


def _gives_maxima(pool: Operation, values: tuple[Value, ...], readers: Counter[int]) -> bool:
    """Whether only the maxima of a max pool are read, and each window covers an element."""
    if (
        pool.op != "MaxPool"
        or pool.domain
        or any(v != ABSENT and readers[v] for v in pool.outputs[1:])
    ):
        return False
    return sees_everywhere(attributes_of(pool), values[pool.inputs[0]].type.shape[2:])
