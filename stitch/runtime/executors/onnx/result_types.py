"""The types of an operator's results by ONNX Runtime: for operators that Stitch does not define.

A model of one node, with operands of the shapes that they have and the data that is known of them,
is loaded: ONNX Runtime infers types and shapes while it loads, and refuses what it has no kernel
for. Nothing is run to find a shape, so a shape that comes out does not depend on data.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
from onnx import TensorProto, helper, numpy_helper

from stitch.errors import CompileError
from stitch.ops import data_type_of_code, onnx_code
from stitch.program import Array, DataType, Operation, ValueType
from stitch.runtime.executors.onnx.form_writer import IR_VERSION, OPSET, attribute_protos
from stitch.runtime.executors.onnx.session import (
    SESSION_ERRORS,
    declared_outputs,
    first_line,
    tried,
)


@dataclass(frozen=True, slots=True)
class InferredType:
    """What ONNX Runtime says of one result; None where it does not say it: the type of its
    elements, its dimensions, each of them. `kind` is its own word (`tensor(float)`)."""

    kind: str
    data_type: DataType | None
    shape: tuple[int | None, ...] | None


def inferred_results(
    operation: Operation,
    operands: Sequence[ValueType | None],
    known: Sequence[Array | None],
    wanted: Sequence[bool],
) -> list[InferredType | None]:
    """The types of an operation's results, None for those that are not wanted.

    Args:
        operation: Its operator, attributes and version count.
        operands: Their types, None where one is absent.
        known: The data of each operand that is known.
        wanted: Which results to ask for.

    Raises:
        CompileError: ONNX Runtime refuses the operation, and why.
    """
    model = _model(operation, operands, known, wanted, with_ranks=True)
    try:
        found = iter(declared_outputs(model))
    except SESSION_ERRORS as error:
        raise CompileError(first_line(error)) from error
    return [_inferred(next(found), next(found)) if each else None for each in wanted]


def computed_results(
    operation: Operation, operands: Sequence[Array | None], wanted: Sequence[bool]
) -> list[Array | None] | None:
    """The results of an operation on known data; None where ONNX Runtime does not give arrays."""
    types = [
        None if a is None else ValueType(a.shape, DataType.from_dtype(a.dtype)) for a in operands
    ]
    if any(kind is not None and kind.data_type.is_narrow for kind in types):
        return None
    try:
        results = iter(tried(_model(operation, types, operands, wanted)))
    except SESSION_ERRORS:
        return None
    arrays = [next(results) if each else None for each in wanted]
    plain = all(a is None or (isinstance(a, np.ndarray) and a.dtype.kind in "biuf") for a in arrays)
    return arrays if plain else None


def _model(
    operation: Operation,
    operands: Sequence[ValueType | None],
    known: Sequence[Array | None],
    wanted: Sequence[bool],
    *,
    with_ranks: bool = False,
) -> bytes:
    """A model of the operation alone, its known operands initializers; results have no types.

    `with_ranks`: behind each result its shape is an output too, whose one dimension is the rank: a
    session says `[]` of a number and of what it knows no rank of.
    """
    names = ["" if kind is None else f"x{i}" for i, kind in enumerate(operands)]
    results = [f"y{i}" if each else "" for i, each in enumerate(wanted)]
    node = helper.make_node(operation.op, names, results, domain=operation.domain)
    node.attribute.extend(attribute_protos(operation))
    inputs, initializers = [], []
    for name, kind, data in zip(names, operands, known, strict=True):
        if data is not None and name:
            initializers.append(numpy_helper.from_array(np.array(data, order="C"), name))
        elif kind is not None:
            code = onnx_code(kind.data_type)
            inputs.append(helper.make_tensor_value_info(name, code, kind.shape))
    nodes, given = [node], [name for name in results if name]
    if with_ranks:
        nodes += [helper.make_node("Shape", [name], [f"{name}.shape"]) for name in given]
        given = [each for name in given for each in (name, f"{name}.shape")]
    outputs = [helper.make_empty_tensor_value_info(name) for name in given]
    versions: Mapping[str, int] = {"": OPSET} | (
        {operation.domain: operation.opset} if operation.domain else {}
    )
    opsets = [helper.make_opsetid(domain, version) for domain, version in versions.items()]
    graph = helper.make_graph(nodes, "one_operation", inputs, outputs, initializers)
    model = helper.make_model(graph, opset_imports=opsets, ir_version=IR_VERSION)
    data_of_model: bytes = model.SerializeToString()
    return data_of_model


def _inferred(
    result: tuple[str, Sequence[object]], rank: tuple[str, Sequence[object]]
) -> InferredType:
    """What the words of a session for a result and for its shape say."""
    kind, dims = result
    name = kind.removeprefix("tensor(").removesuffix(")").upper()
    data_type = None
    if kind.startswith("tensor("):
        with suppress(CompileError, ValueError):  # strings, types that onnx does not know
            data_type = data_type_of_code(TensorProto.DataType.Value(name))
    has_rank = [isinstance(length, int) for length in rank[1]] == [True]
    shape = tuple([d if isinstance(d, int) else None for d in dims]) if has_rank else None
    return InferredType(kind, data_type, shape)
