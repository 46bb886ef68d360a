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
from contextlib import suppress
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np
from onnx import GraphProto, TensorProto

from stitch.errors import CompileError
from stitch.frontend.onnx.calls import NodeCall
from stitch.frontend.onnx.node_refusals import Unsupported, is_refused_by_name
from stitch.frontend.onnx.protos import NEWEST_OPSET, tensor_array
from stitch.graph import ComputationGraphBuilder, SymbolicTensor
from stitch.program import Array, Operation, ValueType

#: Larger constants are not given to ONNX Runtime for inference: they are no sizes, but weights.
MAX_KNOWN_NBYTES = 1 << 26
#: Dimensions of a value, None for one that is not known.
Dimensions = tuple[int | None, ...]


class DeclaredValues:
    """The shapes that a model says of its values, its symbols replaced by the sizes that its inputs
    have."""

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

    def shape_of(self, name: str) -> Dimensions | None:
        """The shape of a value, None where the model does not say it."""
        kind = self._infos.get(name)
        if kind is None or not kind.tensor_type.HasField("shape"):
            return None
        return tuple(
            int(dim.dim_value) if dim.HasField("dim_value") else self._sizes.get(dim.dim_param)
            for dim in kind.tensor_type.shape.dim
        )


def lower_foreign(
    builder: ComputationGraphBuilder, call: NodeCall, declared: DeclaredValues,
    want: Callable[[SymbolicTensor], None],
) -> Sequence[SymbolicTensor | None]:  # fmt: skip
    """Write a node as a foreign operation.

    Args:
        builder: Where to.
        call: The node.
        declared: What the model says of its values.
        want: Is called with operands whose data may decide a shape that is not known.

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
        call.op, (), (), _attributes(call, title, onnx_runtime.tensor_text), call.domain,
        call.where, opset=version,
    )  # fmt: skip
    known = [None if t is None else builder.known_data(t) for t in call.inputs]
    if any(data is not None and not data.size for data in known):
        # Some kernels of ONNX Runtime end the process: they read a first element unchecked.
        raise call.refused(
            f"operator {title} is not supported with a constant operand that has no elements"
        )
    known = [None if a is None or a.nbytes > MAX_KNOWN_NBYTES else a for a in known]
    wanted = [bool(name) for name in call.outputs]
    operands = [None if t is None else t.type for t in call.inputs]

    def infer(data: Sequence[Array | None]) -> Sequence[Any]:
        """ONNX Runtime's word for each result."""
        found: Sequence[Any] = onnx_runtime.inferred_results(operation, operands, data, wanted)
        return found

    try:
        found = infer(known)
    except CompileError as error:
        raise call.refused(f"ONNX Runtime refuses operator {title}: {error.what}") from error
    rule = _SHAPES.get((call.domain, call.op))
    shapes = None if rule is None else rule(operands, operation.attributes)
    types: dict[str, ValueType] = {}
    for index, (name, one) in enumerate(zip(call.outputs, found, strict=True)):
        if one is None:
            continue
        kind, data_type = one.kind, one.data_type
        dims = _filled(one.shape, None if shapes is None else shapes[index])
        if data_type is None:
            raise call.refused(
                f"operator {title} is not supported: its result {name!r} is of type {kind}",
                expected="a tensor of numbers",
            )
        shape = _merged(dims, declared.shape_of(name))
        if shape is None:
            for asked in _deciding_operands(infer, operands, known):
                decides = call.inputs[asked]
                assert decides is not None
                want(decides)
            raise call.refused(
                f"operator {title} is not supported here: the shape of its result {name!r} depends "
                "on data, or ONNX Runtime does not infer it",
                got=_spelled(dims),
                remedy="declare its shape in the model (value_info), if it is always the same",
            )
        types[name] = ValueType(shape, data_type)
    return builder.apply_foreign(
        operation, call.inputs, call.outputs, [types.get(name) for name in call.outputs]
    )


def may_be_foreign(op: str, domain: str, opset: int) -> bool:
    """Whether ONNX Runtime defines an operator that is not refused by its name."""
    title = f"{domain}.{op}" if domain else op
    if is_refused_by_name(title) or find_spec("onnxruntime") is None:
        return False
    onnx_runtime: Any = import_module("stitch.runtime.executors.onnx")
    return bool(onnx_runtime.defining_version(op, domain, opset))


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


def _attributes(
    call: NodeCall, title: str, tensor_text: Callable[[Array], str]
) -> Mapping[str, Any]:
    """The attributes as operations hold them: a tensor is a text (`tensor_text`); an empty list is
    left out, as it means the same."""
    held: dict[str, Any] = {}
    for name, value in call.attributes.items():
        if isinstance(value, TensorProto):
            held[name] = tensor_text(tensor_array(value, None, f"{call.where}, attribute {name!r}"))
        elif not isinstance(value, int | float | str | tuple):
            kind = type(value).__name__.removesuffix("Proto").lower()
            raise call.refused(
                f"operator {title} is not supported with a {kind} as attribute {name!r}",
                expected="numbers, strings, a tensor of numbers, or lists of numbers or strings",
            )
        elif value != ():
            held[name] = value
    return held


def _filled(found: Dimensions | None, other: Dimensions | None) -> Dimensions | None:
    """The dimensions of the first, what it lacks from the second."""
    if found is None or other is None or len(found) != len(other):
        return other if found is None else found
    return tuple(b if a is None else a for a, b in zip(found, other, strict=True))


def _merged(found: Dimensions | None, declared: Dimensions | None) -> tuple[int, ...] | None:
    """The dimensions of the first, what it lacks from the second; None where some are lacking."""
    dims = _filled(found, declared)
    if dims is None:
        return None
    sizes = [d for d in dims if d is not None and d >= 0]
    return tuple(sizes) if len(sizes) == len(dims) else None


def _deciding_operands(
    infer: Callable[[Sequence[Array | None]], Sequence[Any]], operands: Sequence[ValueType | None],
    known: Sequence[Array | None],
) -> Sequence[int]:  # fmt: skip
    """The operands whose data decides shapes: one with which, were it known, every shape would be
    inferred, else all together. Others hold data, which differs from run to run."""
    may_decide = [
        index for index, (kind, data) in enumerate(zip(operands, known, strict=True))
        if kind is not None and data is None and len(kind.shape) <= 1
        and kind.data_type.dtype.kind in "iu" and not kind.data_type.is_narrow
    ]  # fmt: skip
    for chosen in (*([index] for index in may_decide), may_decide):
        supposed = list(known)
        for index in chosen:
            kind = operands[index]
            assert kind is not None
            supposed[index] = np.ones(kind.shape, kind.data_type.dtype)
        with suppress(CompileError):
            if all(one is None or _merged(one.shape, None) is not None for one in infer(supposed)):
                return chosen
    return ()


def _spelled(shape: Dimensions | None) -> str:
    if shape is None:
        return "no shape"
    return "[" + ", ".join("?" if d is None else str(d) for d in shape) + "]"


_Types = Sequence[ValueType | None]
#: From the operands' types and attributes: the results' shapes; None where they do not follow.
_Rule = Callable[[_Types, Mapping[str, Any]], Sequence[Dimensions] | None]


def _shapes(operands: _Types) -> list[tuple[int, ...]]:
    return [() if kind is None else kind.shape for kind in operands]


def _same(operands: _Types, _: Mapping[str, Any]) -> Sequence[Dimensions]:
    return _shapes(operands)[:1]


def _features(operands: _Types, _: Mapping[str, Any]) -> Sequence[Dimensions]:
    """A row for each of the operands' rows, all their elements side by side."""
    shapes = _shapes(operands)
    rows = shapes[0][0] if shapes and len(shapes[0]) > 1 else 1
    return [(rows, sum(math.prod(s[1:] if len(s) > 1 else s) for s in shapes))]


def _chosen(operands: _Types, _: Mapping[str, Any]) -> Sequence[Dimensions]:
    """The elements of each row at these places; of a vector as one row."""
    x, places = _shapes(operands)[:2]
    return [(*(x[:-1] or (1,)), math.prod(places))]


def _distances(operands: _Types, _: Mapping[str, Any]) -> Sequence[Dimensions] | None:
    a, b = _shapes(operands)[:2]
    return [(a[0], b[0])] if len(a) == len(b) == 2 else None


def _rows(operands: _Types) -> int:
    """How many rows a model of `ai.onnx.ml` sees; a vector is one."""
    shape = _shapes(operands)[0]
    return shape[0] if len(shape) > 1 else 1


def _scored(count: str, operands: _Types, attributes: Mapping[str, Any]) -> Sequence[Dimensions]:
    """A row of scores for each row; the attribute `count` says how many, one if it is absent."""
    return [(_rows(operands), int(attributes.get(count, 1)))]


def _classified(operands: _Types, attributes: Mapping[str, Any]) -> Sequence[Dimensions]:
    """The label of each row, and its scores: one a class; of support vectors without probabilities
    one for each pair of three classes or more."""
    words = ("classlabels_int64s", "classlabels_ints", "classlabels_strings")
    count = max(len(attributes.get(name, ())) for name in words)
    if attributes.get("vectors_per_class") and not attributes.get("prob_a") and count > 2:
        count = count * (count - 1) // 2
    rows = _rows(operands)
    return [(rows,), (rows, count)]


#: Shapes of results by operators for which ONNX Runtime has no function that infers them, as their
#: documentation says.
_SHAPES: Mapping[tuple[str, str], _Rule] = {
    ("com.microsoft", "CDist"): _distances,
    ("ai.onnx.ml", "ArrayFeatureExtractor"): _chosen,
    ("ai.onnx.ml", "FeatureVectorizer"): _features,
    ("ai.onnx.ml", "Imputer"): _same,
    ("ai.onnx.ml", "LinearRegressor"): partial(_scored, "targets"),
    ("ai.onnx.ml", "Normalizer"): _same,
    ("ai.onnx.ml", "SVMClassifier"): _classified,
    ("ai.onnx.ml", "SVMRegressor"): lambda types, _: [(_rows(types), 1)],
    ("ai.onnx.ml", "Scaler"): _same,
    ("ai.onnx.ml", "TreeEnsembleClassifier"): _classified,
    ("ai.onnx.ml", "TreeEnsembleRegressor"): partial(_scored, "n_targets"),
}
