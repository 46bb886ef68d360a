"""Nodes of operators that Stitch does not define: foreign operators, which ONNX Runtime computes.

A foreign operation keeps domain, attributes and the version that defines its operator. The types of
its results must be known when the model is compiled, and must not depend on data. In this order
they come from

1. ONNX Runtime, which infers them from the operands' types and from the data of constants;
2. a rule of this file, for the few operators for which ONNX Runtime infers no shape;
3. what the model says of the value (`value_info`, outputs), for dimensions that are left.

A shape is never taken from a trial run. ONNX Runtime compares the shapes of a program's outputs at
each run and raises where one is not what was compiled.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from onnx import GraphProto

from stitch.errors import CompileError
from stitch.frontend.onnx.calls import NodeCall
from stitch.frontend.onnx.node_refusals import Unsupported, is_refused_by_name
from stitch.frontend.onnx.protos import NEWEST_OPSET
from stitch.graph import ComputationGraphBuilder, SymbolicTensor
from stitch.ops import data_type_of_code
from stitch.program import Array, DataType, Operation, ValueType

#: Larger constants are not given to ONNX Runtime for inference: they are no sizes, but weights.
MAX_KNOWN_NBYTES = 1 << 26
#: Dimensions of a value, None for one that is not known.
Dimensions = tuple[int | None, ...]


class DeclaredValues:
    """What a model says of its values: element types and shapes, its symbols replaced by the sizes
    that the inputs have."""

    def __init__(self, graph: GraphProto) -> None:
        self._infos = {info.name: info.type for info in (*graph.value_info, *graph.output)}
        self._inputs = {info.name: info.type for info in graph.input}
        self._sizes: dict[str, int] = {}

    def bind(self, name: str, shape: Sequence[int]) -> None:
        """Take the sizes of symbols from the shape of an input."""
        kind = self._inputs.get(name)
        dims = () if kind is None else kind.tensor_type.shape.dim
        for dim, size in zip(dims, shape, strict=False):
            if dim.dim_param:
                self._sizes.setdefault(dim.dim_param, size)

    def type_of(self, name: str) -> tuple[DataType | None, Dimensions | None]:
        """The type of a value's elements and its shape, None for what the model does not say."""
        kind = self._infos.get(name)
        if kind is None or not kind.HasField("tensor_type"):
            return None, None
        try:
            data_type = data_type_of_code(kind.tensor_type.elem_type)
        except CompileError:
            data_type = None
        if not kind.tensor_type.HasField("shape"):
            return data_type, None
        return data_type, tuple(
            int(dim.dim_value) if dim.HasField("dim_value") else self._sizes.get(dim.dim_param)
            for dim in kind.tensor_type.shape.dim
        )


def lower_foreign(
    builder: ComputationGraphBuilder, call: NodeCall, declared: DeclaredValues,
    want: Callable[[SymbolicTensor], None],
) -> Sequence[SymbolicTensor | None]:  # fmt: skip
    """Write a node as a foreign operation, or as constants where all its operands are known.

    Args:
        builder: Where to.
        call: The node.
        declared: What the model says of its values.
        want: Is called with operands whose data would decide a shape that is not known.

    Raises:
        Unsupported: ONNX Runtime does not define the operator, or it is refused by its name.
        CompileError: a result has a type that Stitch lacks or a shape that is not known, or ONNX
            Runtime refuses the node.
    """
    title = f"{call.domain}.{call.op}" if call.domain else call.op
    if is_refused_by_name(title):
        raise Unsupported(title)
    if find_spec("onnxruntime") is None:
        raise call.refused(
            f"operator {title} is not one that Stitch defines, and ONNX Runtime, which may compute "
            "it, is not installed",
            remedy="pip install onnxruntime",
        )
    onnx_runtime: Any = import_module("stitch.runtime.executors.onnx")
    version = _version(onnx_runtime.defining_version, call)
    if not version:
        raise Unsupported(title)
    if onnx_runtime.draws_random_numbers(call.op, call.domain):
        raise call.refused(
            f"operator {title} is not supported: its result differs from run to run, and random "
            "operators take an explicit key in Stitch"
        )
    operation = Operation(
        call.op, (), (), _attributes(call, title), call.domain, call.where, opset=version
    )
    known = [None if t is None else builder.known_data(t) for t in call.inputs]
    known = [None if a is None or a.nbytes > MAX_KNOWN_NBYTES else a for a in known]
    wanted = [bool(name) for name in call.outputs]
    if all(t is None or data is not None for t, data in zip(call.inputs, known, strict=True)):
        results = onnx_runtime.computed_results(operation, known, wanted)
        if results is not None:
            return [None if array is None else builder.constant(array) for array in results]
    operands = [None if t is None else t.type for t in call.inputs]
    try:
        inferred = onnx_runtime.inferred_results(operation, operands, known, wanted)
    except CompileError as error:
        raise call.refused(f"ONNX Runtime refuses operator {title}: {error.what}") from error
    rule = _SHAPES.get((call.domain, call.op))
    by_rule = None if rule is None else rule([() if k is None else k.shape for k in operands],
                                             operation.attributes)  # fmt: skip
    types: list[ValueType | None] = []
    for index, (name, found) in enumerate(zip(call.outputs, inferred, strict=True)):
        if found is None:
            types.append(None)
            continue
        data_type, dims = declared.type_of(name)
        data_type = found.data_type or (data_type if found.kind == "" else None)
        if data_type is None:
            raise call.refused(
                f"operator {title} is not supported: its result {name!r} is of type "
                f"{found.kind or 'unknown'}",
                expected="a tensor of numbers",
            )
        if by_rule is not None and found.shape is None and index < len(by_rule):
            found_shape: Dimensions | None = by_rule[index]
        else:
            found_shape = found.shape
        shape = _merged(found_shape, dims)
        if shape is None:
            _want_integers(call.inputs, known, want)
            raise call.refused(
                f"operator {title} is not supported here: the shape of its result {name!r} depends "
                "on data, or ONNX Runtime does not infer it",
                got=_spelled(found_shape),
                remedy="declare its shape in the model (value_info), if it is always the same",
            )
        types.append(ValueType(shape, data_type))
    return builder.apply_foreign(operation, call.inputs, call.outputs, types)


def _version(defining_version: Callable[[str, str, int], int], call: NodeCall) -> int:
    """The version that defines an operator; raises `CompileError` for one of ONNX's own that is
    another as of the opset of programs, and `Unsupported` for one that there is none of then."""
    version = defining_version(call.op, call.domain, call.version)
    if call.domain or not version:
        return version
    newest = defining_version(call.op, "", NEWEST_OPSET)
    if newest != version:
        raise call.refused(
            f"operator {call.op} of opset {call.version} is not supported: it is another one since "
            f"opset {newest}",
            remedy=f"export with opset_version={NEWEST_OPSET}",
        )
    return version


def _attributes(call: NodeCall, title: str) -> Mapping[str, Any]:
    """The attributes as operations hold them; an empty list is left out, as it means the same."""
    for name, value in call.attributes.items():
        if not isinstance(value, int | float | str | tuple):
            kind = type(value).__name__.removesuffix("Proto").lower()
            raise call.refused(
                f"operator {title} is not supported with a {kind} as attribute {name!r}",
                expected="numbers, strings, or lists of either",
            )
    return {name: value for name, value in call.attributes.items() if value != ()}


def _merged(found: Dimensions | None, declared: Dimensions | None) -> tuple[int, ...] | None:
    """The dimensions of the first, what it lacks from the second; None where some are lacking."""
    dims = declared if found is None else found
    if dims is None:
        return None
    if declared is not None and len(declared) == len(dims):
        dims = tuple(d if d is not None else other for d, other in zip(dims, declared, strict=True))
    sizes = [d for d in dims if d is not None and d >= 0]
    return tuple(sizes) if len(sizes) == len(dims) else None


def _want_integers(
    operands: Sequence[SymbolicTensor | None], known: Sequence[Array | None],
    want: Callable[[SymbolicTensor], None],
) -> None:  # fmt: skip
    """Ask for the data of operands that may be sizes: vectors of whole numbers, not known yet."""
    for tensor, data in zip(operands, known, strict=True):
        is_size = tensor is not None and tensor.dtype.kind in "iu" and tensor.ndim <= 1
        if tensor is not None and is_size and data is None:
            want(tensor)


def _spelled(shape: Dimensions | None) -> str:
    if shape is None:
        return "no shape"
    return "[" + ", ".join("?" if d is None else str(d) for d in shape) + "]"


_Shapes = Sequence[tuple[int, ...]]
_Rule = Callable[[_Shapes, Mapping[str, Any]], Sequence[tuple[int, ...]]]


def _same(given: _Shapes, _: Mapping[str, Any]) -> Sequence[tuple[int, ...]]:
    return [given[0]]


def _features(given: _Shapes, _: Mapping[str, Any]) -> Sequence[tuple[int, ...]]:
    """One row for each of the operands' first dimension, all their elements side by side."""
    rows = given[0][0] if given and len(given[0]) > 1 else 1
    return [(rows, sum(math.prod(shape[1:] if len(shape) > 1 else shape) for shape in given))]


def _distances(given: _Shapes, _: Mapping[str, Any]) -> Sequence[tuple[int, ...]]:
    return [(given[0][0], given[1][0])]


def _attended(given: _Shapes, attributes: Mapping[str, Any]) -> Sequence[tuple[int, ...]]:
    """As of an LSTM: all steps, the last hidden and the last cell states."""
    steps, batch = given[0][:2]
    sides, hidden = given[1][0], int(attributes["hidden_size"])
    return [(steps, sides, batch, hidden), (sides, batch, hidden), (sides, batch, hidden)]


#: Shapes of results by operators for which ONNX Runtime has no function that infers them, as their
#: documentation says.
_SHAPES: Mapping[tuple[str, str], _Rule] = {
    ("com.microsoft", "CDist"): _distances,
    ("com.microsoft", "AttnLSTM"): _attended,
    ("ai.onnx.ml", "FeatureVectorizer"): _features,
    ("ai.onnx.ml", "Imputer"): _same,
    ("ai.onnx.ml", "Normalizer"): _same,
    ("ai.onnx.ml", "Scaler"): _same,
}
