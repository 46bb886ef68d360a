"""Constant folding: what can be computed now is computed now.

An operation is folded where all of its operands are constants, or where it asks only for the shape
of a value (shapes are static here). Results are those of the NumPy kernels, bit for bit. A budget
keeps folding from blowing up the file: a result counts, less the constants that only this operation
reads. Shapes, axes and indices are free: operators need them to be constants. Other budgets bound
the work and what kernels take for themselves, in proportion to the constants that were given. All
are asked before anything is computed or allocated: types say it all. Operators that draw random
numbers are never folded.

Orders of axes: what a transpose does, and which transposes exchange rows and columns.

Redundancy: operations whose results are there already are bypassed.

Identities hand their operand on unchanged: `Identity`, `Cast` to the type that the operand has,
`Dropout` at inference, and shape operators whose result has the operand's shape. Casts that round
are never touched. A transpose of a transpose is one, or none.

Common subexpressions are computed once; constants with the same type, shape and bits become one as
well. The first of two equals stays, so the result depends on the order of operations alone.

Activations of what a pool gives, in place of pools of what an activation gives.

A training keeps both, reads both again, and goes through the activation's slope: behind the pool
there is but a part of all that. Relu never turns an order round, so the largest of a window stays
the largest, to the last bit, and the first of several; where Relu makes equals of what differs, at
zero, its slope is none.

This is no pass of `optimize`: who runs a graph forward alone may join the activation to what makes
its operand.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import replace

import numpy as np

from stitch import ops
from stitch.budget import SMALL_NBYTES, claim, claim_for
from stitch.errors import StitchError
from stitch.graph import MAX_KNOWN_ELEMENTS, ComputationGraph
from stitch.ops import attributes_of, sees_everywhere
from stitch.program import ABSENT, Array, Constant, Operation, Value, ValueType

# --------------------------------------------------------------------------------------------------
# Constant folding.

#: Elementary steps that all folding of a graph may take: so many, and so many for each element of
#: the constants that the graph was given (which a front end read from a file).
FREE_STEPS, STEPS_PER_ELEMENT = 1 << 26, 16
#: What the kernel of one operation may take for itself: so much, and so many times the constants.
FREE_WORKSPACE_NBYTES, WORKSPACE_TIMES = 1 << 26, 4

#: Operators with hidden state: two applications to the same operands may differ.
UNREPEATABLE = frozenset(
    {
        "Bernoulli", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform",
        "RandomUniformLike",
    }
)  # fmt: skip


def is_repeatable(operation: Operation) -> bool:
    """Whether the operation gives the same result for the same operands, always."""
    if operation.body != ABSENT:
        return False  # opaque
    if operation.domain:
        return True
    if operation.op == "Dropout":
        return len(operation.inputs) < 3
    return operation.op not in UNREPEATABLE


def fold_constants(graph: ComputationGraph, growth_nbytes: int) -> ComputationGraph:
    """The graph with constant operations replaced by their results, constants grown by at most
    `growth_nbytes` in total."""
    known: dict[int, Array] = dict(graph.constant_data())
    steps_left = FREE_STEPS + STEPS_PER_ELEMENT * sum(data.size for data in known.values())
    workspace = sum(data.nbytes for data in known.values()) * WORKSPACE_TIMES
    workspace += FREE_WORKSPACE_NBYTES
    readers = Counter(v for operation in graph.operations for v in operation.inputs)
    outputs = {slot.value for slot in graph.outputs}
    kept: list[Operation] = []
    for operation in graph.operations:
        dying = {
            v
            for v in operation.inputs
            if v in known and v not in outputs and readers[v] == operation.inputs.count(v)
        }
        operands = [None if v == ABSENT else graph.values[v].type for v in operation.inputs]
        types = [graph.values[v].type for v in operation.outputs if v != ABSENT]
        growth = sum(kind.nbytes for kind in types if not _is_index(kind))
        growth -= sum(known[v].nbytes for v in dying)
        shape = ops.known_by_type(operation, operands[0]) if operands else None
        results = None if shape is None else dict.fromkeys(operation.outputs, shape)
        steps = 0 if shape is not None else ops.estimated_steps(operation, operands, types)
        if results is None and growth <= max(growth_nbytes, 0) and steps <= steps_left:
            results = _fold(operation, operands, types, known, workspace)
        if results is None:
            kept.append(operation)
            continue
        growth_nbytes -= growth
        steps_left -= steps
        known.update(results)
    computed = {v for operation in kept for v in operation.outputs}
    constants = tuple(Constant(v, data) for v, data in known.items() if v not in computed)
    return replace(graph, operations=tuple(kept), constants=constants)


def _is_index(kind: ValueType) -> bool:
    """Whether the data may be a shape, axes or indices: small, and integers."""
    return kind.data_type.dtype.kind in "iub" and math.prod(kind.shape) <= MAX_KNOWN_ELEMENTS


def _fold(
    operation: Operation,
    operands: Sequence[ValueType | None],
    types: Sequence[ValueType],
    known: dict[int, Array],
    workspace_nbytes: int,
) -> dict[int, Array] | None:
    """The results of an operation by value, or None where it has to stay."""
    if not is_repeatable(operation) or not all(v == ABSENT or v in known for v in operation.inputs):
        return None
    arrays = [None if v == ABSENT else known[v] for v in operation.inputs]
    try:
        taken = ops.kernel_workspace(
            operation.op,
            operands,
            types,
            domain=operation.domain,
            constants=arrays,
            attributes=operation.attributes,
        )
        if taken > workspace_nbytes:
            return None
        claimed = claim(taken + 2 * sum(kind.nbytes for kind in types), f"folding {operation.op}")
        with np.errstate(all="ignore"):
            results = ops.evaluate_operation(operation, arrays)
    except (StitchError, MemoryError):
        return None  # what fails must fail where it runs, with its own words
    folded = {
        v: np.array(data, order="C")
        for v, data in zip(operation.outputs, results, strict=True)
        if v != ABSENT
    }
    claimed.dispose()
    for data in folded.values():
        if data.nbytes >= SMALL_NBYTES:
            claim_for(data, data.nbytes, f"for the result of {operation.op}, computed beforehand")
    return folded


# --------------------------------------------------------------------------------------------------
# Axis orders of transposes.


def axis_order(operation: Operation, values: Sequence[Value]) -> tuple[int, ...] | None:
    """The operand's axes in the order of the result's; None for what is no transpose."""
    if operation.op != "Transpose" or operation.domain:
        return None
    order = operation.attributes.get("perm")
    if isinstance(order, tuple):
        return tuple(map(int, order))
    return tuple(range(len(values[operation.inputs[0]].type.shape)))[::-1]


def exchange(rank: int) -> tuple[int, ...]:
    """The order that makes rows of the columns of each matrix.

    >>> exchange(3)
    (0, 2, 1)
    """
    return (*range(rank - 2), rank - 1, rank - 2)


# --------------------------------------------------------------------------------------------------
# Redundancy: common subexpressions and identities.

#: Operators that never change the elements or their order, only the shape.
_SHAPE_OPERATORS = frozenset({"Expand", "Flatten", "Reshape", "Squeeze", "Unsqueeze"})


def remove_identities(graph: ComputationGraph) -> ComputationGraph:
    """The graph in which readers of an identity read its operand; dead code is left behind."""
    read = {v for operation in graph.operations for v in operation.inputs}
    read |= {slot.value for slot in graph.outputs}
    now: dict[int, int] = {}
    #: By what a transpose makes: what it reads, and in which order of axes.
    turned: dict[int, tuple[int, tuple[int, ...]]] = {}
    kept: list[Operation] = []
    for operation in graph.operations:
        inputs = tuple(now.get(v, v) for v in operation.inputs)
        operation = replace(operation, inputs=inputs)
        order = axis_order(operation, graph.values)
        if order is not None:
            if inputs[0] in turned:
                source, before = turned[inputs[0]]
                order = tuple(before[axis] for axis in order)
                operation = replace(operation, inputs=(source,), attributes={"perm": order})
            turned[operation.outputs[0]] = operation.inputs[0], order
        if _is_identity(operation, graph.values, read):
            now[operation.outputs[0]] = operation.inputs[0]
        else:
            kept.append(operation)
    outputs = tuple(replace(s, value=now.get(s.value, s.value)) for s in graph.outputs)
    return replace(graph, operations=tuple(kept), outputs=outputs)


def _is_identity(operation: Operation, values: tuple[Value, ...], read: set[int]) -> bool:
    if operation.domain or not operation.inputs or operation.inputs[0] == ABSENT:
        return False
    written = [v for v in operation.outputs if v != ABSENT and v in read]
    if not operation.outputs or set(written) - {operation.outputs[0]}:
        return False
    if values[operation.inputs[0]].type != values[operation.outputs[0]].type:
        return False
    if operation.op == "Dropout":
        return len(operation.inputs) < 3 or operation.inputs[2] == ABSENT
    if operation.op == "Transpose":
        rank = len(values[operation.inputs[0]].type.shape)
        return axis_order(operation, values) == tuple(range(rank))
    return operation.op in ("Identity", "Cast") or operation.op in _SHAPE_OPERATORS


def merge_common_subexpressions(graph: ComputationGraph) -> ComputationGraph:
    """The graph in which equal operations and equal constants are merged into the first."""
    now: dict[int, int] = {}
    seen: dict[Hashable, tuple[int, ...]] = {}
    constants: list[Constant] = []
    samples = Counter(_sample(constant) for constant in graph.constants)
    for constant in graph.constants:
        alone = samples[_sample(constant)] == 1
        key = constant.value if alone else _constant_key(constant)
        first = seen.setdefault(key, (constant.value,))
        if first == (constant.value,):
            constants.append(constant)
        else:
            now[constant.value] = first[0]
    kept: list[Operation] = []
    for operation in graph.operations:
        operation = replace(operation, inputs=tuple(now.get(v, v) for v in operation.inputs))
        if is_repeatable(operation):
            first = seen.setdefault(_operation_key(operation, graph.values), operation.outputs)
            if first != operation.outputs:
                now.update(zip(operation.outputs, first, strict=True))
                now.pop(ABSENT, None)
                continue
        kept.append(operation)
    outputs = tuple(replace(s, value=now.get(s.value, s.value)) for s in graph.outputs)
    return replace(graph, operations=tuple(kept), constants=tuple(constants), outputs=outputs)


def _sample(constant: Constant) -> Hashable:
    """Type, shape and the first and last elements: what differs here need not be hashed."""
    ends = constant.data.reshape(-1)
    ends = ends if ends.size <= 16 else np.concatenate([ends[:8], ends[-8:]])
    return (constant.data.dtype.name, constant.data.shape, ends.tobytes())


def _constant_key(constant: Constant) -> Hashable:
    import hashlib  # It loads OpenSSL: only for graphs that have constants.

    data = constant.data
    content = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
    return (data.dtype.name, data.shape, hashlib.blake2b(content.data).digest())


def _operation_key(operation: Operation, values: tuple[Value, ...]) -> Hashable:
    types = tuple(None if v == ABSENT else values[v].type for v in operation.outputs)
    # repr tells 1 from 1.0 and 0.0 from -0.0, which `==` does not.
    attributes = tuple(
        (name, repr(operation.attributes[name])) for name in sorted(operation.attributes)
    )
    return (operation.domain, operation.op, operation.opset, operation.inputs, types, attributes)


# --------------------------------------------------------------------------------------------------
# Sinking activations below max pools.


def sink_relu_below_max_pool(graph: ComputationGraph) -> ComputationGraph:
    """The graph with each Relu behind the pool that alone reads it."""
    readers = Counter(v for o in graph.operations for v in o.inputs)
    readers.update(slot.value for slot in graph.outputs)
    values, operations = list(graph.values), list(graph.operations)
    #: Where the Relu is that makes a value which is read once.
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
        # The names stay with what they name: a pool's result, and that of an activation.
        between = relu.outputs[0]
        values[between] = Value(values[result].name, values[result].type)
        values[result] = Value(graph.values[between].name, values[result].type)
        operations[first] = replace(pool, inputs=relu.inputs, outputs=(between,))
        operations[index] = replace(relu, inputs=(between,), outputs=(result,))
        moved.add(first)
    return replace(graph, values=tuple(values), operations=tuple(operations)) if moved else graph


def _gives_maxima(pool: Operation, values: tuple[Value, ...], readers: Counter[int]) -> bool:
    """Whether an operation is a pool of which nothing but the maxima is read, each an element's."""
    if (
        pool.op != "MaxPool"
        or pool.domain
        or any(v != ABSENT and readers[v] for v in pool.outputs[1:])
    ):
        return False
    return sees_everywhere(attributes_of(pool), values[pool.inputs[0]].type.shape[2:])
