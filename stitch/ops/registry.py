"""The registry of operators: each family adds its tuple `OPERATORS`; names are unique by domain."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import chain

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
    training,
    types,
    unfolding,
    window_of_rows,
)
from stitch.ops.definition import KernelArguments, OpDef, Thunk, resolve_attributes
from stitch.ops.inference import Attributes, InferenceContext
from stitch.program import ABSENT, Operation, ValueType

_FAMILIES = (
    arithmetic, reshaping, rearranging, reduction, indexing, window_of_rows, matmul,
    quantized_products, fourier, convolution, pooling, unfolding, batch_normalization,
    layer_normalization, activation, recurrent, resampling, grid_sampling, types, training, scan,
)  # fmt: skip
_OPERATORS: tuple[OpDef, ...] = tuple(chain.from_iterable(family.OPERATORS for family in _FAMILIES))
_BY_NAME = {(definition.domain, definition.name): definition for definition in _OPERATORS}

assert len(_BY_NAME) == len(_OPERATORS), [
    key for key, times in Counter((d.domain, d.name) for d in _OPERATORS).items() if times > 1
]


def operators() -> tuple[OpDef, ...]:
    """Return all operators."""
    return _OPERATORS


def lookup(op: str, domain: str = "") -> OpDef:
    """Return the definition of an operator; raise `CompileError` with close matches.

    >>> lookup("Relu").elementwise
    True
    """
    domain = "" if domain == "ai.onnx" else domain
    definition = _BY_NAME.get((domain, op))
    if definition is None:
        names = [name for space, name in _BY_NAME if space == domain]
        near = nearest(op, names, most=3)
        shown = f"{domain}.{op}" if domain else op
        raise CompileError(
            f"unknown operator {shown!r}",
            expected=f"one of {len(names)} operators of this domain (ONNX opset 26 names)"
            if names
            else f"a known domain, not {domain!r}",
            remedy=f"did you mean {' or '.join(near)}?" if near else None,
        )
    return definition


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
