"""How an operator is checked against ONNX: one table row in, every claim of its definition tested.

A row is (operator, operands, attributes, outputs). Operands are texts such as `f32[2,3]`, whose
data is drawn with a fixed seed; a suffix narrows it: `+` positive, `1` inside (-1, 1), `<5` an
index in -5..4. A list is a constant int64 operand, None an absent one, an array stands for itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from stitch.ops import bind, evaluate, infer_types, lookup, onnx_code
from stitch.program import Array, DataType, ValueType
from tests.support.operators.drawn_operands import in_compute_type, operands_of

Row = tuple[Any, ...]
_NARROW = (DataType.FLOAT16, DataType.BFLOAT16)


def onnx_model(
    op: str,
    operands: Sequence[Array | None],
    constants: Sequence[bool],
    attributes: Mapping[str, Any],
    outputs: int,
) -> onnx.ModelProto:
    written = {k: list(v) if isinstance(v, tuple) else v for k, v in attributes.items()}
    if op == "ConstantOfShape":
        code = written.pop("dtype", 1)
        value = written.pop("value_float", 0.0) or written.pop("value_int", 0)
        written = {"value": helper.make_tensor("value", code, [1], [value])}
    names = ["" if a is None else f"x{i}" for i, a in enumerate(operands)]
    results = [f"y{i}" for i in range(outputs)]
    inputs, initializers = [], []
    for name, array, known in zip(names, operands, constants, strict=True):
        if array is not None and known:
            initializers.append(numpy_helper.from_array(array, name))
        elif array is not None:
            code = onnx_code(DataType.from_dtype(array.dtype))
            inputs.append(helper.make_tensor_value_info(name, code, array.shape))
    graph = helper.make_graph(
        [helper.make_node(op, names, results, **written)],
        "case",
        inputs,
        [helper.make_empty_tensor_value_info(name) for name in results],
        initializers,
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 26)], ir_version=13)


def reference(
    op: str, operands: Sequence[Array | None], attributes: Mapping[str, Any], outputs: int
) -> list[Array]:
    model = onnx_model(op, operands, [False] * len(operands), attributes, outputs)
    feeds = {f"x{i}": a for i, a in enumerate(operands) if a is not None}
    with np.errstate(all="ignore"):
        return [np.asarray(a) for a in ReferenceEvaluator(model).run(None, feeds)]


def onnx_types(
    op: str,
    operands: Sequence[Array | None],
    constants: Sequence[bool],
    attributes: Mapping[str, Any],
    outputs: int,
) -> list[tuple[int, tuple[int | None, ...] | None]]:
    model = onnx_model(op, operands, constants, attributes, outputs)
    inferred = onnx.shape_inference.infer_shapes(model, check_type=True, data_prop=True)
    found = []
    for output in inferred.graph.output:
        kind = output.type.tensor_type
        dims = [d.dim_value if d.HasField("dim_value") else None for d in kind.shape.dim]
        found.append((kind.elem_type, tuple(dims) if kind.HasField("shape") else None))
    return found


def tolerance(data_type: DataType) -> tuple[float, float]:
    if data_type is DataType.FLOAT64:
        return 1e-10, 1e-12
    if data_type is DataType.BFLOAT16:
        return 1e-2, 1e-3
    if data_type is DataType.FLOAT16:
        return 2e-3, 1e-4
    return 2e-5, 2e-6


def assert_close(ours: Array, theirs: Array) -> None:
    data_type = DataType.from_dtype(ours.dtype)
    assert ours.shape == theirs.shape
    if data_type.is_floating:
        mine, other = ours.astype(np.float64), theirs.astype(np.float64)
        rtol, atol = tolerance(data_type)
        np.testing.assert_allclose(mine, other, rtol=rtol, atol=atol, equal_nan=True)
    else:
        np.testing.assert_array_equal(ours, theirs)


def run_bound(
    op: str,
    operands: Sequence[Array | None],
    attributes: Mapping[str, Any],
    types: Sequence[ValueType],
    constant: bool,
    alias: int | None = None,
) -> list[Array]:
    """Bind once and run twice over spoiled outputs; `alias` is the input that output 0 takes."""
    inputs = [in_compute_type(a) for a in operands]
    outputs = [np.empty(t.shape, t.data_type.compute_dtype) for t in types]
    taken = inputs[alias] if alias is not None else None
    if taken is not None:
        outputs[0] = taken.reshape(types[0].shape)
    steps = bind(op, inputs, outputs, attributes=attributes, constant=[constant] * len(inputs))
    with np.errstate(all="ignore"):
        for _ in range(1 if alias is not None else 2):
            if alias is None:
                for output in outputs:
                    output.view(np.uint8 if output.ndim else output.dtype)[...] = 1
            for step in steps:
                step()
    return [o.astype(t.data_type.dtype) for o, t in zip(outputs, types, strict=True)]


def check(
    op: str,
    specs: Sequence[Any],
    attributes: Mapping[str, Any],
    outputs: int = 1,
    seed: int = 7,
    expected: Sequence[Array] | None = None,
) -> None:
    """Results, types, repeated runs and runs in place of one case, against ONNX's reference."""
    operands = operands_of(specs, seed)
    known = [isinstance(spec, list | np.ndarray) for spec in specs]
    ours = evaluate(op, operands, attributes=attributes, outputs=outputs)
    narrow = [a is not None and DataType.from_dtype(a.dtype) in _NARROW for a in operands]
    wide = [
        a.astype(np.float32) if a is not None and small else a
        for a, small in zip(operands, narrow, strict=True)
    ]
    theirs = expected or reference(op, wide, attributes, outputs)
    for mine, other in zip(ours, theirs, strict=True):
        if not any(narrow):
            assert mine.dtype == other.dtype
        assert_close(mine, other.astype(mine.dtype))
    kinds = [
        None if a is None else ValueType(a.shape, DataType.from_dtype(a.dtype)) for a in operands
    ]
    types = infer_types(op, kinds, constants=operands, attributes=attributes, outputs=outputs)
    for kind, (code, shape) in zip(
        types, onnx_types(op, operands, known, attributes, outputs), strict=True
    ):
        assert code in (0, onnx_code(kind.data_type))
        if shape is not None:
            assert len(shape) == len(kind.shape)
            assert all(d in (None, s) for d, s in zip(shape, kind.shape, strict=True))
    for constant in (True, False):
        for mine, again in zip(
            ours, run_bound(op, operands, attributes, types, constant), strict=True
        ):
            assert_close(again, mine)
    if lookup(op).elementwise:
        check_in_place(op, operands, attributes, types, ours)


def check_in_place(
    op: str,
    operands: Sequence[Array | None],
    attributes: Mapping[str, Any],
    types: Sequence[ValueType],
    ours: Sequence[Array],
) -> None:
    result = types[0].data_type.compute_dtype
    for index, array in enumerate(map(in_compute_type, operands)):
        if array is not None and array.dtype == result and array.size == ours[0].size:
            again = run_bound(op, operands, attributes, types, False, alias=index)
            assert_close(again[0], ours[0])
