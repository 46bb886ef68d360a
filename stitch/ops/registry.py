"""The one list of operators: each family adds its tuple, and a name may come only once.

A new operator is one `OpDef` in the tuple `OPERATORS` of a file of its family, and one row in
the table of cases of a test file: `test_every_operator_has_a_case` asks for it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import chain

from stitch.errors import CompileError, nearest
from stitch.ops import (
    activation,
    arithmetic,
    batch_normalization,
    grid_sampling,
    indexing,
    layer_normalization,
    product,
    recurrent,
    reduction,
    resampling,
    scan,
    shape,
    training,
    types,
    window,
)
from stitch.ops.definition import KernelArguments, OpDef, Thunk, resolve_attributes
from stitch.ops.inference import Attributes, InferenceContext
from stitch.program import ABSENT, Operation, ValueType

_FAMILIES = (
    arithmetic, shape, reduction, indexing, product, window, batch_normalization,
    layer_normalization, activation, recurrent, resampling, grid_sampling, types, training, scan,
)  # fmt: skip
_OPERATORS: tuple[OpDef, ...] = tuple(chain.from_iterable(family.OPERATORS for family in _FAMILIES))
_BY_NAME = {(definition.domain, definition.name): definition for definition in _OPERATORS}

assert len(_BY_NAME) == len(_OPERATORS), [
    key for key, times in Counter((d.domain, d.name) for d in _OPERATORS).items() if times > 1
]


def operators() -> tuple[OpDef, ...]:
    """Every operator that Stitch knows."""
    return _OPERATORS


def lookup(op: str, domain: str = "") -> OpDef:
    """The definition of an operator; raises `CompileError` that names close matches.

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
    """The definition of an operation's operator; of a foreign one, a definition that has neither
    inference, kernel nor rules. Raises `CompileError` as `lookup` does."""
    if operation.is_foreign:
        return OpDef(
            operation.op, (0, -1), _infer_foreign, _bind_foreign, (0, -1), domain=operation.domain
        )
    return lookup(operation.op, operation.domain)


def _infer_foreign(context: InferenceContext) -> tuple[ValueType, ...]:
    raise context.fail(f"{context.op} is a foreign operator: Stitch does not infer its types")


def _bind_foreign(_: KernelArguments) -> Sequence[Thunk]:
    raise CompileError("a foreign operator has no NumPy kernel")


def attributes_of(operation: Operation) -> Attributes:
    """An operation's attributes with its definition's defaults filled in; those of a foreign
    operator as they are. Raises `CompileError` as `lookup` and `resolve_attributes` do.

    >>> attributes_of(Operation("Softmax", (0,), (1,)))["axis"]
    -1
    """
    if operation.is_foreign:
        return operation.attributes
    definition = lookup(operation.op, operation.domain)
    return resolve_attributes(definition, operation.attributes, operation.location)


def is_elementwise(operation: Operation) -> bool:
    """Whether each element of the result depends on the operands' elements at its place alone."""
    # What a body does with its operands, nobody asks.
    return operation.body == ABSENT and definition_of(operation).elementwise
