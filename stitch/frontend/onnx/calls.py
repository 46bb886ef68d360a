"""One node as a call of an operator of opset 26."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, defs, helper
from onnx.reference import ReferenceEvaluator

from stitch import ops
from stitch.errors import FormatError, LayoutError
from stitch.frontend.onnx.node_refusals import Refusing
from stitch.frontend.onnx.protos import (
    NEWEST_IR,
    NEWEST_OPSET,
    attribute_value,
    dense_array,
    plain_domain,
    tensor_array,
)
from stitch.graph import ComputationGraphBuilder, SymbolicTensor
from stitch.program import Array, DataType, ValueType


class AttributedNode(Refusing):
    """Accessors of a node's attributes by type, for every kind of call."""

    __slots__ = ()
    op: str
    attributes: Mapping[str, Any]

    def whole(self, name: str, default: int = 0) -> int:
        """An attribute that is one whole number."""
        value = self.attributes.get(name, default)
        if not isinstance(value, int):
            raise self.unfit(name, "one whole number", value)
        return value

    def wholes(self, name: str, count: int | None = None) -> tuple[int, ...]:
        """An attribute that is a list of whole numbers, empty where it is absent."""
        return self.listed(name, count, (int,), "a list of whole numbers")

    def listed(
        self, name: str, count: int | None, kinds: tuple[type, ...], expected: str
    ) -> tuple[Any, ...]:
        """An attribute that is a list of one kind, empty where it is absent."""
        values = self.attributes.get(name, ())
        if not isinstance(values, tuple) or not all(isinstance(one, kinds) for one in values):
            raise self.unfit(name, expected, values)
        if count is not None and len(values) != count:
            raise self.unfit(name, f"{count} elements", len(values))
        return values

    def unfit(self, name: str, expected: str, got: object) -> FormatError:
        """What is said about an attribute that does not fit."""
        return self.malformed(
            f"attribute {name!r} of {self.op} does not fit", expected=expected, got=str(got)[:80]
        )


@dataclass(frozen=True, slots=True)
class NodeCall(AttributedNode):
    """A node with its operands looked up: None for an operand that is absent.

    `outputs` are names, empty where a result is not wanted. `version` is the opset it stands in.
    """

    op: str
    domain: str
    version: int
    inputs: tuple[SymbolicTensor | None, ...]
    outputs: tuple[str, ...]
    attributes: dict[str, Any]
    where: str

    def operand(self, index: int) -> SymbolicTensor | None:
        """An operand, None where it is absent."""
        return self.inputs[index] if index < len(self.inputs) else None

    def required(self, index: int) -> SymbolicTensor:
        """An operand that must be there."""
        tensor = self.operand(index)
        if tensor is None:
            raise self.malformed(f"{self.op} needs its operand {index}")
        return tensor

    def real(self, name: str, default: float = 0.0) -> float:
        """An attribute that is one number."""
        value = self.attributes.get(name, default)
        if not isinstance(value, int | float):
            raise self.unfit(name, "one number", value)
        return float(value)

    def word(self, name: str, default: str, allowed: Collection[str]) -> str:
        """An attribute that is one of some words."""
        value = self.attributes.get(name, default)
        if value not in allowed:
            raise self.unfit(name, f"one of {', '.join(allowed)}", value)
        return str(value)

    def words(self, name: str, count: int | None = None) -> tuple[str, ...]:
        """An attribute that is a list of words, empty where it is absent."""
        return self.listed(name, count, (str,), "a list of words")

    def reals(self, name: str) -> Array:
        """An attribute that is a list of float32 numbers, empty where it is absent."""
        return np.array(self.listed(name, None, (int, float), "a list of numbers"), np.float32)


#: None stands for a result that is not wanted.
Results = Sequence[SymbolicTensor | None]
_Make = Callable[[ComputationGraphBuilder, NodeCall], Results]
_MakeOne = Callable[[ComputationGraphBuilder, NodeCall], SymbolicTensor]


@dataclass(frozen=True, slots=True)
class Lowering:
    """How an operator is lowered, and all that it may be given; `results` are their indices.
    `decides` are the operands whose data decide the result's shape or what it is.

    What a lowering does not know (an attribute, an operand, a result) is refused, never passed
    over.
    """

    make: _Make
    operands: int
    attributes: frozenset[str]
    results: Sequence[int]
    decides: tuple[int, ...] = ()

    def of(self, builder: ComputationGraphBuilder, call: NodeCall) -> Results:
        """The results of a node; raises `CompileError`, `FormatError`."""
        strange = sorted(call.attributes.keys() - self.attributes)
        given = [i for i, one in enumerate(call.inputs) if one is not None]
        strange += [f"operand {i}" for i in given if i >= self.operands]
        wanted = [i for i, name in enumerate(call.outputs) if name]
        strange += [f"result {i}" for i in wanted if i not in self.results]
        if strange:
            domain = f"{call.domain}." if call.domain else ""
            raise call.refused(
                f"operator {domain}{call.op} is not supported with {', '.join(strange)}"
            )
        return self.make(builder, call)


def to_one(make: _MakeOne, operands: int, attributes: str = "") -> Lowering:
    """A lowering to one result."""
    return to_several(lambda builder, call: [make(builder, call)], operands, attributes, (0,))


def to_several(
    make: _Make, operands: int, attributes: str = "", results: Sequence[int] = (0, 1)
) -> Lowering:
    """A lowering to several results."""
    return Lowering(make, operands, frozenset(attributes.split()), results)


# --------------------------------------------------------------------------------------------------
# Constant nodes

#: How a Constant holds numbers: the attribute, and how it is read.
_FORMS: Mapping[str, Callable[[NodeCall, str], Array]] = {
    "value_int": lambda call, form: np.asarray(call.whole(form), np.int64),
    "value_ints": lambda call, form: np.asarray(call.wholes(form), np.int64),
    "value_float": lambda call, form: np.asarray(call.real(form), np.float32),
    "value_floats": lambda call, form: call.reals(form),
}
#: Their results are not decided by their operands.
_UNDECIDED = frozenset(
    {"RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike", "Multinomial",
     "Bernoulli", "Loop", "Scan", "If", "ImageDecoder"}
)  # fmt: skip


def constant_array(call: NodeCall, folder: Path | None) -> Array:
    """What a Constant node holds; raises `FormatError`, or `CompileError` for strings."""
    if len(call.attributes) != 1:
        raise call.malformed(
            "a Constant has exactly one attribute",
            expected=f"value, sparse_value, {', '.join(_FORMS)}",
            got=", ".join(call.attributes) or "none",
        )  # fmt: skip
    ((form, value),) = call.attributes.items()
    if form == "value" and isinstance(value, onnx.TensorProto):
        return tensor_array(value, folder, f"{call.where}, attribute 'value'")
    if form == "sparse_value" and isinstance(value, onnx.SparseTensorProto):
        return dense_array(value, folder, f"{call.where}, attribute 'sparse_value'")
    if form in _FORMS:
        return _FORMS[form](call, form)
    raise call.refused(
        f"a Constant with the attribute {form!r} is not supported",
        expected=f"value, sparse_value, {', '.join(_FORMS)}",
    )  # fmt: skip


def reference_results(
    node: Any, call: NodeCall, operands: Sequence[Array | None]
) -> Sequence[Array] | None:
    """The results of ONNX's reference implementation; None where it gives no plain arrays."""
    if call.domain or call.op in _UNDECIDED or not any(node.output):
        return None
    names = ["" if data is None else f"x{i}" for i, data in enumerate(operands)]
    wanted = [f"y{i}" if name else "" for i, name in enumerate(node.output)]
    try:
        single = helper.make_node(call.op, names, wanted, **call.attributes)
        model = helper.make_model(
            helper.make_graph(
                [single],
                "one_node",
                [helper.make_empty_tensor_value_info(name) for name in names if name],
                [helper.make_empty_tensor_value_info(name) for name in wanted if name],
            ),
            opset_imports=[helper.make_opsetid("", call.version)],
            ir_version=NEWEST_IR,
        )
        feeds = {f"x{i}": np.array(data) for i, data in enumerate(operands) if data is not None}
        with np.errstate(all="ignore"):
            results = iter(ReferenceEvaluator(model).run(None, feeds))
    except Exception:
        # The reference raises what it likes for nodes that it cannot compute.
        return None
    arrays = [next(results) if name else np.zeros(0, np.float32) for name in wanted]
    return arrays if all(_is_plain(array) for array in arrays) else None


def _is_plain(result: object) -> bool:
    if not isinstance(result, np.ndarray | np.generic):
        return False
    try:
        DataType.from_dtype(result.dtype)
    except LayoutError:
        return False
    return True


# --------------------------------------------------------------------------------------------------
# Function nodes

Key = tuple[str, str, str]


@dataclass(frozen=True, slots=True)
class Expansion:
    """A function body, and the values of its attributes for one call."""

    body: Any
    attributes: Mapping[str, Any]
    is_local: bool


class Functions:
    """The functions of one model, and those of ONNX's own schemas."""

    def __init__(self, model: Any, title: str) -> None:
        self._local: dict[Key, Any] = {}
        for function in model.functions:
            key = (plain_domain(function.domain), function.name, function.overload)
            if key in self._local:
                raise FormatError(f"the function {function.name!r} is defined twice", where=title)
            self._local[key] = function

    def local(self, node: Any, attributes: Mapping[str, Any], where: str) -> Expansion | None:
        """The function of the model that a node calls."""
        key = (plain_domain(node.domain), node.op_type, node.overload)
        body = self._local.get(key)
        if body is None:
            return None
        defaults = {a.name: attribute_value(a, where) for a in body.attribute_proto}
        return Expansion(body, defaults | dict(attributes), True)

    def has_schema(self, op: str, domain: str, version: int) -> bool:
        """Whether ONNX defines the operator through others."""
        schema = _schema(op, domain, version)
        return schema is not None and (schema.has_function or schema.has_context_dependent_function)

    def of_schema(
        self,
        node: Any,
        version: int,
        attributes: Mapping[str, Any],
        operands: Sequence[ValueType | None],
        where: str,
    ) -> Expansion | None:
        """The definition of an operator through others, for operands of these types."""
        schema = _schema(node.op_type, node.domain, version)
        if schema is None:
            return None
        try:
            data = _body(schema, version, node, attributes, operands)
        except Exception:
            # The builders of bodies are C++, and look at types that a bad node does not have.
            return None
        if not data:
            return None
        body = onnx.FunctionProto()
        body.ParseFromString(data)
        defaults = {
            name: attribute_value(a.default_value, where)
            for name, a in schema.attributes.items()
            if a.default_value.type != onnx.AttributeProto.UNDEFINED
        }
        return Expansion(body, defaults | dict(attributes), False)


def _schema(op: str, domain: str, version: int) -> Any:
    try:
        return defs.get_schema(op, version, plain_domain(domain))
    except defs.SchemaError:
        return None


def _body(
    schema: Any,
    version: int,
    node: Any,
    attributes: Mapping[str, Any],
    operands: Sequence[ValueType | None],
) -> bytes:
    """The serialized body; empty if there is none for this call."""
    plain, contextual = (
        schema.function_opset_versions,
        schema.context_dependent_function_opset_versions,
    )
    if plain:
        usable = [v for v in plain if v <= version] or [v for v in plain if v <= NEWEST_OPSET]
        if usable:
            return bytes(schema.get_function_with_opset_version(max(version, min(usable))))
    usable = [v for v in contextual if v <= version] or list(contextual[:1])
    if not usable:
        return b""
    call = onnx.NodeProto()
    call.CopyFrom(node)
    del call.attribute[:]
    call.attribute.extend(helper.make_attribute(name, value) for name, value in attributes.items())
    types = [_type(operand).SerializeToString() for operand in operands]
    return bytes(
        schema.get_context_dependent_function_with_opset_version(
            max(usable), call.SerializeToString(), types
        )
    )


def _type(operand: ValueType | None) -> Any:
    if operand is None:
        return onnx.TypeProto()
    return helper.make_tensor_type_proto(ops.onnx_code(operand.data_type), operand.shape)


# --------------------------------------------------------------------------------------------------
# Upgrades of old operator versions

#: An upgrade that needs operations after the node returns the node's results.
Upgraded = NodeCall | Results
Upgrade = Callable[[ComputationGraphBuilder, NodeCall], Upgraded]


def upgraded(builder: ComputationGraphBuilder, call: NodeCall) -> Upgraded:
    """The call in the words of opset 26, or its results; raises `CompileError`, `FormatError`."""
    if call.domain:
        return call
    if call.version < 6 and "consumed_inputs" in call.attributes:
        call = _without("consumed_inputs")(builder, call)  # a hint where to write results
    for before, upgrade in _UPGRADES.get(call.op, ()):
        if call.version < before:
            made = upgrade(builder, call)
            if not isinstance(made, NodeCall):
                return made
            call = made
    return call


def is_upgraded(op: str) -> bool:
    """Whether an operator of ONNX's own has become another one."""
    return op in _RENAMED


def _refused(reason: str) -> Upgrade:
    """Refuses the operator in opsets where no equivalent is known."""

    def refuse(_: ComputationGraphBuilder, call: NodeCall) -> NodeCall:
        raise call.refused(
            f"operator {call.op} is not supported as of opset {call.version}: {reason}",
            remedy="export the model with a newer opset",
        )

    return refuse


def _without(*names: str) -> Callable[[ComputationGraphBuilder, NodeCall], NodeCall]:
    """Drops attributes that say nothing any more."""

    def drop(_: ComputationGraphBuilder, call: NodeCall) -> NodeCall:
        kept = {name: value for name, value in call.attributes.items() if name not in names}
        return replace(call, attributes=kept)

    return drop


def _default(**values: Any) -> Upgrade:
    """Writes out attributes whose default changed, or that have to be given now."""
    return lambda _, call: replace(call, attributes=values | call.attributes)


def _renamed(op: str) -> Upgrade:
    return lambda _, call: replace(call, op=op)


def _as_operands(*names: str) -> Upgrade:
    """Attributes that are lists of whole numbers became the operands after the first."""

    def move(builder: ComputationGraphBuilder, call: NodeCall) -> NodeCall:
        if not any(name in call.attributes for name in names):
            return call
        lists = [
            builder.constant(np.array(call.wholes(name), np.int64))
            if name in call.attributes
            else None
            for name in names
        ]
        moved = _without(*names)(builder, call)
        return replace(moved, inputs=(call.operand(0), *lists))

    return move


def _number(builder: ComputationGraphBuilder, call: NodeCall, name: str) -> SymbolicTensor | None:
    """A number that is an attribute as a scalar of the first operand's type, if it is given."""
    if name not in call.attributes:
        return None
    dtype = call.required(0).dtype
    return builder.constant(np.array(call.real(name), np.float32).astype(dtype))


def _aligned(builder: ComputationGraphBuilder, call: NodeCall) -> NodeCall:
    """Operands were broadcast where `broadcast` said so, from an `axis` on (before opset 7)."""
    a, b = call.required(0), call.required(1)
    plain = _without("broadcast", "axis")(builder, call)
    if not call.whole("broadcast"):
        if a.shape != b.shape:
            raise call.malformed(
                f"operands of {call.op} differ in shape, and its attribute 'broadcast' is 0",
                got=f"{list(a.shape)} and {list(b.shape)}",
            )
        return plain
    if "axis" not in call.attributes:
        return plain
    axis = call.whole("axis")
    trailing = len(a.shape) - len(b.shape) - (axis + len(a.shape) if axis < 0 else axis)
    if trailing < 0:
        raise call.unfit("axis", f"room for {len(b.shape)} axes of {len(a.shape)}", axis)
    spread = builder.op("Reshape", b, [*b.shape, *[1] * trailing])
    return replace(plain, inputs=(a, spread))


def _over_rows(builder: ComputationGraphBuilder, call: NodeCall) -> Upgraded:
    """All axes from `axis` on, 1 where none is given, were one row (before opset 13)."""
    data, axis = call.required(0), call.whole("axis", 1)
    rank = len(data.shape)
    if not -rank <= axis < rank:
        raise call.unfit("axis", f"{-rank} to {rank - 1}", axis)
    if axis % rank == rank - 1:
        return replace(call, attributes={"axis": -1})
    head, row = data.shape[: axis % rank], data.shape[axis % rank :]
    rows = builder.op("Reshape", data, [math.prod(head), math.prod(row)], allowzero=1)
    return [builder.op("Reshape", builder.op(call.op, rows, axis=-1), data.shape, allowzero=1)]


def _clip(builder: ComputationGraphBuilder, call: NodeCall) -> NodeCall:
    """Bounds became operands (opset 11); from opset 6 on they were those of float32 by default."""
    if call.version >= 6:
        widest = float(np.finfo(np.float32).max)
        call = replace(call, attributes={"min": -widest, "max": widest} | call.attributes)
    with np.errstate(over="ignore"):
        bounds = [_number(builder, call, name) for name in ("min", "max")]
    plain = _without("min", "max")(builder, call)
    return replace(plain, inputs=(call.operand(0), *bounds))


def _pad(builder: ComputationGraphBuilder, call: NodeCall) -> NodeCall:
    """Pads, which had another name at first, and the value became operands (opset 11)."""
    name = "paddings" if call.version < 2 else "pads"
    pads = builder.constant(np.array(call.wholes(name), np.int64))
    plain = _without(name, "value")(builder, call)
    return replace(plain, inputs=(call.operand(0), pads, _number(builder, call, "value")))


def _top_k(builder: ComputationGraphBuilder, call: NodeCall) -> NodeCall:
    """The number of elements became an operand (opset 10)."""
    count = builder.constant([call.whole("k")])
    return replace(_without("k")(builder, call), inputs=(call.operand(0), count))


def _cast(_: ComputationGraphBuilder, call: NodeCall) -> NodeCall:
    """The type was a word (before opset 6)."""
    known = TensorProto.DataType.keys()
    word = call.word("to", "", known)
    return replace(call, attributes={"to": TensorProto.DataType.Value(word)})


def _whole_power(_: ComputationGraphBuilder, call: NodeCall) -> NodeCall:
    """The power was a real number (before opset 2)."""
    power = call.real("p", 2.0)
    if not power.is_integer():
        raise call.refused(f"{call.op} is not supported with a power that is not whole",
                           got=str(power))  # fmt: skip
    return replace(call, attributes=call.attributes | {"p": int(power)})


def _split(_: ComputationGraphBuilder, call: NodeCall) -> NodeCall:
    """The number of equal parts became an attribute (opset 18)."""
    if call.operand(1) is not None:
        return call
    return replace(call, attributes=call.attributes | {"num_outputs": len(call.outputs)})


def _group_normalization(builder: ComputationGraphBuilder, call: NodeCall) -> NodeCall:
    """Scale and bias became per channel (opset 21)."""
    data, groups = call.operand(0), call.attributes.get("num_groups")
    if data is None or len(data.shape) < 2 or not isinstance(groups, int) or groups < 1:
        return call  # refused where it is typed
    channels = data.shape[1]

    def spread(per_group: SymbolicTensor | None) -> SymbolicTensor | None:
        if per_group is None or per_group.shape != (groups,) or channels % groups:
            return per_group
        columns = builder.op("Reshape", per_group, [groups, 1])
        return builder.op("Reshape", builder.op("Expand", columns, [groups, channels // groups]),
                          [channels])  # fmt: skip

    return replace(call, inputs=(data, *map(spread, call.inputs[1:])))


def _test_mode(builder: ComputationGraphBuilder, call: NodeCall) -> NodeCall:
    """`is_test` said whether a model was trained (before opset 7), as it does where it is 0."""
    if not call.whole("is_test"):
        raise call.refused(
            f"{call.op} in training mode is not supported before opset 7",
            expected="is_test of 1", remedy="export the model for inference",
        )  # fmt: skip
    return _without("is_test")(builder, call)


def _per_activation(builder: ComputationGraphBuilder, call: NodeCall) -> Upgraded:
    """With `spatial` of 0 every element of a sample is a channel (before opset 9)."""
    plain = _without("spatial")(builder, call)
    if call.whole("spatial", 1):
        return plain
    data = call.required(0)
    given = [call.required(index) for index in range(1, 5)]
    wanted = data.shape[1:]
    if len(data.shape) < 2 or any(tensor.shape != wanted for tensor in given):
        raise call.malformed(
            "operands of BatchNormalization do not fit, with spatial of 0",
            expected=f"four of shape {list(wanted)}",
            got=", ".join(str(list(tensor.shape)) for tensor in given),
        )  # fmt: skip
    if any(call.outputs[1:]):
        return plain  # refused as training
    flat = [builder.op("Reshape", data, [data.shape[0], math.prod(wanted)], allowzero=1)]
    flat += [builder.op("Reshape", tensor, [math.prod(wanted)]) for tensor in given]
    made = builder.op("BatchNormalization", *flat, epsilon=call.real("epsilon", 1e-5))
    return [builder.op("Reshape", made, data.shape, allowzero=1)]


def _batch_normalization(_: ComputationGraphBuilder, call: NodeCall) -> NodeCall:
    """Training got a mode of its own, with other outputs (opset 14)."""
    if any(call.outputs[1:]):
        raise call.refused(
            "BatchNormalization in training mode is not supported before opset 14",
            remedy="export the model for inference, or with opset 14 or newer",
        )  # fmt: skip
    return replace(call, outputs=call.outputs[:1])


def _dropout(builder: ComputationGraphBuilder, call: NodeCall) -> Upgraded:
    """The ratio, which says nothing without training, became an operand (opset 12). The mask, which
    many old models list and none reads, is zeros as in ONNX Runtime: numbers of the operand's type
    before opset 10, then booleans. Since opset 12 it is true where an element is kept."""
    plain = replace(_without("ratio")(builder, call), inputs=call.inputs[:1])
    if not any(call.outputs[1:]):
        return plain
    data = call.required(0)
    kind = data.data_type.dtype if call.version < 10 else np.dtype(np.bool_)
    mask = builder.op("Expand", builder.constant(np.zeros((), kind)), [*data.shape])
    return [builder.op("Dropout", data), mask]


def _recurrent(builder: ComputationGraphBuilder, call: NodeCall) -> NodeCall:
    """`output_sequence` said whether there is a first result (before opset 7)."""
    if any(call.outputs[:1]) and not call.whole("output_sequence"):
        raise call.refused(
            f"the first result of {call.op} is not supported before opset 7 without "
            "output_sequence of 1"
        )
    return _without("output_sequence")(builder, call)


def _prelu(builder: ComputationGraphBuilder, call: NodeCall) -> NodeCall:
    """A vector of slopes was one per channel (before opset 7)."""
    data, slope = call.operand(0), call.operand(1)
    if data is None or slope is None or len(slope.shape) != 1 or slope.size == 1:
        return call
    spread = builder.op("Reshape", slope, [slope.size, *[1] * (len(data.shape) - 2)])
    return replace(call, inputs=(data, spread))


def _upsample(builder: ComputationGraphBuilder, call: NodeCall) -> NodeCall:
    """Upsample became Resize (opset 10), its scales first an operand (opset 9)."""
    scales = call.operand(1)
    if call.version < 9:
        names = ("height_scale", "width_scale") if call.version < 7 else ("scales",)
        if call.version < 7:
            factors = np.array([1, 1, *(call.real(name) for name in names)], np.float32)
        else:
            factors = call.reals("scales")
        scales = builder.constant(factors)
        call = _without(*names)(builder, call)
    known = None if scales is None else builder.known_data(scales)
    if known is not None and (known < 1).any():
        raise call.malformed("the scales of Upsample are at least 1", got=str(known.tolist()))
    mode = call.word("mode", "nearest", ("nearest", "linear", "bilinear"))
    return replace(
        call, op="Resize", inputs=(call.operand(0), scales),
        attributes={"mode": mode.removeprefix("bi")},
    )  # fmt: skip


def _resize(builder: ComputationGraphBuilder, call: NodeCall) -> NodeCall:
    """Element i was taken at i / scale, by `nearest` rounded up where an axis shrinks, else down
    (before opset 11)."""
    data: Any = call.required(0)
    scales = call.required(1)
    mode = call.word("mode", "nearest", ("nearest", "linear"))
    attributes = {"mode": mode, "coordinate_transformation_mode": "asymmetric"}
    known = builder.known_data(scales)
    rounding = "floor"
    if mode == "nearest" and known is not None and (known < 1).any():
        rounding = "ceil"
        if (known > 1).any():
            growing = np.maximum(known, np.float32(1))
            data = builder.op("Resize", data, None, growing, nearest_mode="floor", **attributes)
            scales = builder.constant(np.minimum(known, np.float32(1)))
    if mode == "nearest":
        attributes["nearest_mode"] = rounding
    return replace(call, inputs=(data, None, scales), attributes=attributes)


def _resize_modes(_: ComputationGraphBuilder, call: NodeCall) -> NodeCall:
    """A way of TensorFlow's for `nearest` (before opset 18): (i + 0.5) / scale."""
    if call.attributes.get("coordinate_transformation_mode") != "tf_half_pixel_for_nn":
        return call
    asked = (call.attributes.get("mode", "nearest"), call.attributes.get("nearest_mode"))
    if asked != ("nearest", "floor"):
        raise call.refused(
            "coordinate_transformation_mode tf_half_pixel_for_nn of Resize is not supported "
            "but for mode nearest and nearest_mode floor"
        )
    # floor(x + 0.5), of the x that half_pixel gives.
    ways = {"coordinate_transformation_mode": "half_pixel", "nearest_mode": "round_prefer_ceil"}
    return replace(call, attributes=call.attributes | ways)


def _grid_sample(_: ComputationGraphBuilder, call: NodeCall) -> NodeCall:
    """Modes were renamed (opset 20)."""
    mode = str(call.attributes.get("mode", "bilinear"))
    return replace(
        call, attributes=call.attributes | {"mode": mode.removeprefix("bi") if mode in
                                            ("bilinear", "bicubic") else mode}
    )  # fmt: skip


def _dft(builder: ComputationGraphBuilder, call: NodeCall) -> NodeCall:
    """The axis became an operand (opset 20)."""
    axis = builder.constant(np.array(call.whole("axis", 1), np.int64))
    plain = _without("axis")(builder, call)
    return replace(plain, inputs=(call.operand(0), call.operand(1), axis))


def _constant_of_shape(_: ComputationGraphBuilder, call: NodeCall) -> NodeCall:
    """Graphs hold no tensors in attributes: the value is spelt as its type and a number."""
    attributes = dict(call.attributes)
    tensor = attributes.pop("value", None)
    if not isinstance(tensor, TensorProto):
        return call
    value = tensor_array(tensor, None, f"{call.where}, attribute 'value'")
    if value.size != 1:
        raise call.refused(
            "the value of ConstantOfShape is one element", got=f"{value.size} elements"
        )
    number = value.reshape(()).astype(value.dtype)
    attributes["dtype"] = int(tensor.data_type)
    if ops.data_type_of_code(tensor.data_type).is_floating:
        attributes["value_float"] = float(number)
    else:
        attributes["value_int"] = int(number)
    return replace(call, attributes=attributes)


Rows = Sequence[tuple[int, Upgrade]]


def _for_each(operators: str, *rows: tuple[int, Upgrade]) -> dict[str, Rows]:
    return dict.fromkeys(operators.split(), rows)


_AXES = _as_operands("axes")
#: By operator: for nodes of opsets before this one, what to do, the oldest change first.
_UPGRADES: dict[str, Rows] = {
    **_for_each("Add Sub Mul Div And Or Xor Equal Greater Less Pow", (7, _aligned)),
    **_for_each("Softmax LogSoftmax Hardmax", (13, _over_rows)),
    **_for_each("Squeeze Unsqueeze ReduceSum", (13, _AXES)),
    **_for_each(
        "ReduceL1 ReduceL2 ReduceLogSum ReduceLogSumExp ReduceMax ReduceMean ReduceMin ReduceProd "
        "ReduceSumSquare", (18, _AXES),
    ),
    **_for_each("RNN LSTM", (7, _recurrent)),
    "GRU": ((3, _refused("its equations were others")), (7, _recurrent)),
    "BatchNormalization": (
        (7, _test_mode), (9, _per_activation), (14, _batch_normalization)),
    "Cast": ((6, _cast),),
    "Clip": ((11, _clip),),
    "Concat": ((4, _default(axis=1)),),
    "ConstantOfShape": ((99, _constant_of_shape),),
    "DFT": ((20, _dft),),
    "Dropout": ((7, _test_mode), (12, _dropout)),
    "Gemm": ((7, _without("broadcast")),),
    "GridSample": ((20, _grid_sample),),
    "GroupNormalization": ((21, _group_normalization),),
    "LpPool": ((2, _whole_power),),
    "Pad": ((11, _pad),),
    "PRelu": ((7, _prelu),),
    "Reshape": ((5, _as_operands("shape")),),
    "Resize": ((11, _resize), (18, _resize_modes)),
    "RoiAlign": ((16, _default(coordinate_transformation_mode="output_half_pixel")),),
    "Scatter": ((99, _renamed("ScatterElements")),),
    "Selu": ((6, _default(alpha=1.6732, gamma=1.0507)),),
    "Slice": ((10, _as_operands("starts", "ends", "axes")),),
    "Split": (
        (2, _refused("its sizes could be data")), (13, _as_operands("split")), (18, _split)),
    "Tile": ((6, _refused("it repeated along one axis")),),
    "TopK": ((10, _top_k),),
    "Upsample": ((99, _upsample), (11, _resize)),
}  # fmt: skip
#: Operators that live on under other names.
_RENAMED = frozenset({"Scatter", "Upsample"})
