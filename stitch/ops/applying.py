"""Look an operator up, infer an operation's types, bind or evaluate it, bound its kernel's memory.

Each family of operators adds its tuple `OPERATORS` to the registry; names are unique by domain.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np

from stitch import plugins
from stitch.errors import CompileError, nearest
from stitch.ops import (
    activation,
    arithmetic,
    batch_normalization,
    convolution,
    fourier,
    grid_sampling,
    indexing,
    layer_normalization,
    matmul,
    pooling,
    quantized_products,
    rearranging,
    recurrent,
    reduction,
    resampling,
    reshaping,
    scan,
    sharding,
    types,
    unfolding,
    window_of_rows,
)
from stitch.ops.definition import KernelArguments, OpDef, Thunk, resolve_attributes
from stitch.ops.inference import Attributes, InferenceContext
from stitch.ops.workspaces import computed_nbytes, workspace_rule
from stitch.program import (
    ABSENT,
    MAX_RANK,
    NO_ATTRIBUTES,
    Array,
    Body,
    DataType,
    Operation,
    OperationList,
    ValueType,
    is_symbolic,
    result_types,
)

# Registry -----------------------------------------------------------------------------------------

_FAMILIES = (
    arithmetic, reshaping, rearranging, reduction, indexing, window_of_rows, sharding, matmul,
    quantized_products, fourier, convolution, pooling, unfolding, batch_normalization,
    layer_normalization, activation, recurrent, resampling, grid_sampling, types, scan,
)  # fmt: skip
_OPERATORS: tuple[OpDef, ...] = tuple(chain.from_iterable(family.OPERATORS for family in _FAMILIES))
_BY_NAME = {(definition.domain, definition.name): definition for definition in _OPERATORS}

assert len(_BY_NAME) == len(_OPERATORS), [
    key for key, times in Counter((d.domain, d.name) for d in _OPERATORS).items() if times > 1
]


#: The domains of Stitch's own operators.
DOMAINS = tuple({definition.domain: None for definition in _OPERATORS})
#: By domain: what a plugin gave, and its operators by name.
_plugin_operators: dict[str, tuple[object, Mapping[str, OpDef]]] = {}


def operators() -> tuple[OpDef, ...]:
    """Return all operators."""
    return _OPERATORS


def lookup(op: str, domain: str = "", location: str = "") -> OpDef:
    """Return the definition of an operator of Stitch or of a plugin; raise `CompileError` with
    the location and close matches.

    >>> lookup("Relu").elementwise
    True
    """
    domain = "" if domain == "ai.onnx" else domain
    definition = _BY_NAME.get((domain, op))
    if definition is None and domain not in DOMAINS:
        definition = plugin_operators(domain).get(op)
    if definition is None:
        names = [name for space, name in _BY_NAME if space == domain]
        names += [] if names else plugin_operators(domain)
        near = nearest(op, names, most=3)
        shown = f"{domain}.{op}" if domain else op
        raise CompileError(
            f"unknown operator {shown!r}",
            where=location or None,
            expected=f"one of {len(names)} operators of this domain (ONNX opset 26 names)"
            if names
            else f"a known domain, not {domain!r}",
            remedy=f"did you mean {' or '.join(near)}?" if near else None,
        )
    return definition


def is_defined(op: str, domain: str) -> bool:
    """Return whether Stitch or a plugin defines an operator."""
    return (domain, op) in _BY_NAME or (domain not in DOMAINS and op in plugin_operators(domain))


def plugin_operators(domain: str) -> Mapping[str, OpDef]:
    """Return a plugin's operators by name; none if no plugin has the domain.

    Raises:
        UsageError: The plugin fails, or has something else than operators of its domain.
    """
    given = plugins.find("operators", domain)
    if given is None:
        return {}
    known = _plugin_operators.get(domain)
    if known is None or known[0] is not given:
        made = plugins.called("operators", domain, given) if callable(given) else given
        if not isinstance(made, tuple | list) or not all(
            isinstance(definition, OpDef) and definition.domain == domain for definition in made
        ):
            raise plugins.wrong("operators", domain, made)
        known = _plugin_operators[domain] = given, {one.name: one for one in made}
        if len(known[1]) < len(made):
            raise plugins.wrong("operators", domain, [one.name for one in made])
    return known[1]


def definition_of(operation: Operation) -> OpDef:
    """Return the definition of an operation's operator; a foreign operator gets one whose inference
    and kernel raise. Raises `CompileError` as `lookup` does."""
    if operation.is_foreign:
        return OpDef(
            operation.op, (0, -1), _infer_foreign, _bind_foreign, (0, -1), domain=operation.domain
        )
    return lookup(operation.op, operation.domain)


def _infer_foreign(context: InferenceContext) -> tuple[ValueType, ...]:
    raise context.fail(f"types of the foreign operator {context.op} cannot be inferred")


def _bind_foreign(_: KernelArguments) -> Sequence[Thunk]:
    raise CompileError("a foreign operator has no NumPy kernel")


def attributes_of(operation: Operation) -> Attributes:
    """Return an operation's attributes with defaults filled in, those of a foreign operator
    unchanged. Raises `CompileError` as `lookup` and `resolve_attributes` do.

    >>> attributes_of(Operation("Softmax", (0,), (1,)))["axis"]
    -1
    """
    if operation.is_foreign:
        return operation.attributes
    definition = lookup(operation.op, operation.domain)
    return resolve_attributes(definition, operation.attributes, operation.location)


def is_elementwise(operation: Operation) -> bool:
    """Return whether each result element depends only on operand elements at the same index."""
    # A body counts as not elementwise, whatever its operations are.
    return operation.body == ABSENT and definition_of(operation).elementwise


# Inference and evaluation -------------------------------------------------------------------------

#: Limit of a result's bytes, so that sums of padded sizes fit in int64.
MAX_NBYTES = 1 << 46


def infer_types(
    op: str,
    inputs: Sequence[ValueType | None],
    *,
    domain: str = "",
    constants: Sequence[Array | None] | None = None,
    attributes: Mapping[str, Any] = NO_ATTRIBUTES,
    outputs: int = 1,
    location: str = "",
) -> tuple[ValueType, ...]:
    """Infer the types of an operation's outputs.

    Args:
        inputs: Operand types, None for absent operands.
        constants: Data of operands that are known at compile time, else None.
        outputs: How many outputs the operation has.
        location: Source location for messages.

    Raises:
        CompileError: The operator is unknown, or operands or attributes do not fit it.

    >>> a = ValueType((2, 1), DataType.FLOAT32)
    >>> infer_types("Add", [a, ValueType((3,), DataType.FLOAT32)])[0].text()
    '2x3xf32'
    """
    definition = lookup(op, domain, location)
    operand_data = tuple(constants) if constants is not None else (None,) * len(inputs)
    context = InferenceContext(
        op,
        tuple(inputs),
        operand_data,
        resolve_attributes(definition, attributes, location),
        outputs,
        location,
    )
    _check_arity(definition, context)
    # Shape arithmetic on operand data may overflow.
    with np.errstate(all="ignore"):
        kinds = definition.infer(context)
    assert len(kinds) == outputs, f"{op} inferred {len(kinds)} outputs of {outputs}"
    for kind in kinds:
        _check_size(context, kind)
    return kinds


def infer_operation(
    operation: Operation,
    inputs: Sequence[ValueType | None],
    constants: Sequence[Array | None],
    location: str | None = None,
    bodies: Sequence[Body] = (),
) -> tuple[ValueType, ...]:
    """Infer the output types of an `Operation`, from its body among `bodies` if it has one."""
    if operation.body != ABSENT:
        try:
            kinds = result_types(operation, bodies)
        except ValueError as error:
            raise CompileError(f"{operation.op}: {error}", where=operation.location) from None
        for kind in kinds:
            _check_size(
                InferenceContext(operation.op, tuple(inputs), (), {}, 0, location or ""), kind
            )
        return kinds
    return infer_types(
        operation.op, inputs, domain=operation.domain, constants=constants,
        attributes=operation.attributes, outputs=len(operation.outputs),
        location=operation.location if location is None else location,
    )  # fmt: skip


def evaluate_operation(
    operation: Operation, inputs: Sequence[Array | None], types: Sequence[ValueType] | None = None
) -> tuple[Array, ...]:
    """Evaluate an `Operation`; see `evaluate`."""
    return evaluate(
        operation.op, inputs, domain=operation.domain, attributes=operation.attributes,
        outputs=len(operation.outputs), types=types,
    )  # fmt: skip


def _check_size(context: InferenceContext, kind: ValueType) -> None:
    if len(kind.shape) > MAX_RANK:
        raise context.fail(
            f"result of {context.op} has rank {len(kind.shape)}",
            expected=f"rank {MAX_RANK} at most", got=kind.text(),
        )  # fmt: skip
    # Dimensions beside an empty one count too, as strides are computed from them.
    elements = math.prod(d if is_symbolic(d) else max(d, 1) for d in kind.shape)
    if elements * kind.data_type.dtype.itemsize > MAX_NBYTES:
        raise context.fail(
            f"result of {context.op} is too large", expected=f"at most {MAX_NBYTES} bytes",
            got=kind.text(),
        )  # fmt: skip


def _check_arity(definition: OpDef, context: InferenceContext) -> None:
    sides = (
        ("operands", len(context.inputs), definition.inputs),
        ("outputs", context.outputs, definition.outputs),
    )
    for side, count, (least, most) in sides:
        if count < least or (most >= 0 and count > most):
            upper = "or more" if most < 0 else f"to {most}"
            raise context.fail(
                f"{definition.name} has the wrong number of {side}",
                expected=least if least == most else f"{least} {upper}",
                got=count,
            )
    required = (
        context.inputs if definition.inputs[1] < 0 else context.inputs[: definition.inputs[0]]
    )
    if None in required:
        raise context.fail(f"operand {required.index(None)} of {definition.name} is missing")


def kernel_workspace(
    op: str,
    inputs: Sequence[ValueType | None],
    outputs: Sequence[ValueType],
    *,
    domain: str = "",
    attributes: Mapping[str, Any] = NO_ATTRIBUTES,
) -> int:
    """Return an upper bound of the bytes that an operation's NumPy kernel holds at once beside
    operands and results.

    >>> a = ValueType((1000, 1000), DataType.BFLOAT16)
    >>> kernel_workspace("Add", [a, a], [a]) < a.shape[0] * a.shape[1] * 4
    True
    """
    resolved = resolve_attributes(lookup(op, domain), attributes)
    return workspace_rule(op, inputs).nbytes(inputs, outputs, resolved)


def bind(
    op: str,
    inputs: Sequence[Array | None],
    outputs: Sequence[Array],
    *,
    domain: str = "",
    attributes: Mapping[str, Any] = NO_ATTRIBUTES,
    constant: Sequence[bool] | None = None,
    types: Sequence[DataType] = (),
) -> tuple[Thunk, ...]:
    """Return the steps that compute an operation; run them under `np.errstate(all="ignore")`.

    Args:
        inputs: Dense arrays in the compute types, None for absent operands.
        outputs: Dense arrays in the compute types, to be written.
        constant: Whether each input never changes; by default none is constant.
        types: Data types that outputs are rounded to afterwards; by default those of `outputs`.
    """
    definition = lookup(op, domain)
    fixed = tuple(constant) if constant is not None else (False,) * len(inputs)
    resolved = resolve_attributes(definition, attributes)
    rounded = tuple(types) or tuple(DataType.from_dtype(array.dtype) for array in outputs)
    with np.errstate(all="ignore"):
        return tuple(
            definition.steps(
                KernelArguments(tuple(inputs), tuple(outputs), resolved, fixed, types=rounded)
            )
        )


def in_compute_type(array: Array) -> Array:
    """Return the array in its compute type, dense."""
    return np.asarray(array, DataType.from_dtype(array.dtype).compute_dtype, order="C")


def evaluate(
    op: str,
    inputs: Sequence[Array | None],
    *,
    domain: str = "",
    attributes: Mapping[str, Any] = NO_ATTRIBUTES,
    outputs: int = 1,
    types: Sequence[ValueType] | None = None,
) -> tuple[Array, ...]:
    """Compute an operation; float16 and bfloat16 are computed in float32 and rounded once.

    Types that were inferred before need not be inferred again.

    Raises:
        CompileError: Operands or attributes do not fit the operator.
        TaskError: An index is out of range.

    >>> evaluate("Div", [np.array([-7, 7]), np.array([2, 2])])[0].tolist()
    [-3, 3]
    """
    arrays = [None if a is None else np.asarray(a) for a in inputs]
    kinds = types
    if kinds is None:
        given = [
            None if a is None else ValueType(a.shape, DataType.from_dtype(a.dtype)) for a in arrays
        ]
        kinds = infer_types(
            op, given, domain=domain, constants=arrays, attributes=attributes, outputs=outputs
        )
    results = tuple([np.empty(t.shape, t.data_type.compute_dtype) for t in kinds])
    definition = lookup(op, domain)
    resolved = resolve_attributes(definition, attributes)
    with np.errstate(all="ignore"):
        operands = tuple([None if a is None else in_compute_type(a) for a in arrays])
        rounded = tuple([t.data_type for t in kinds])
        fixed = (True,) * len(operands)
        for step in definition.steps(
            KernelArguments(operands, results, resolved, fixed, types=rounded)
        ):
            step()
        return tuple(
            [r.astype(t.data_type.dtype, copy=False) for r, t in zip(results, kinds, strict=True)]
        )


def numpy_bytes(
    program: OperationList, operation: Operation, constants: dict[int, Array]
) -> tuple[int, int]:
    """Return the bytes of an operation's NumPy kernel as `kernel_workspace` does, with those of
    absent results; the operation must have no body."""
    if operation.is_foreign:
        return 0, 0
    values = program.values
    inputs = [None if v == ABSENT else values[v].type for v in operation.inputs]
    words: dict[str, Any] = {"domain": operation.domain, "attributes": operation.attributes}
    wanted = [v for v in operation.outputs if v != ABSENT]
    outputs, unwanted = tuple(values[v].type for v in wanted), 0
    if len(wanted) < len(operation.outputs):
        # Kernels write absent results too.
        data = [constants.get(v) for v in operation.inputs]
        count = len(operation.outputs)
        outputs = infer_types(operation.op, inputs, outputs=count, constants=data, **words)
        unwanted = sum(
            computed_nbytes(t) for t, v in zip(outputs, operation.outputs, strict=True) if v < 0
        )
    nbytes = kernel_workspace(operation.op, inputs, outputs, **words) + unwanted
    return nbytes, nbytes if workspace_rule(operation.op, inputs).is_kept or unwanted else 0


def operand_nbytes(program: OperationList, operation: Operation) -> int:
    """Return the bytes of an operation's operands and results in their compute types."""
    touched = (v for v in (*operation.inputs, *operation.outputs) if v != ABSENT)
    return sum(computed_nbytes(program.values[v].type) for v in touched)
