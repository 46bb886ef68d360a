"""ONNX models of older opsets: every change of an operator's meaning, as ONNX Runtime reads it.

The table (`operator_nodes`) has a node of every operator whose schema changed; what it lacks is
found by asking `onnx.defs`.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import defs, helper

import stitch
from stitch import ops
from stitch.errors import CompileError, FormatError
from stitch.frontend.onnx import from_onnx
from stitch.frontend.onnx.calls import is_upgraded
from stitch.program import Array
from tests.support.grids import in_turn
from tests.support.onnx.models import BOOL, INT64, info, model, ours, runtime
from tests.support.onnx.operator_nodes import RUNS, Case, Fixed, built, drawn, schemas

node = helper.make_node
#: Schemas without a row, and why.
ELSEWHERE = {("RoiAlign", 22): "ONNX Runtime 1.32 lacks it; opset 16 says the same"}


def is_quick(run: tuple[Case, int]) -> bool:
    """A fixed part of the table, the same on every run."""
    return run[1] < 13 and zlib.crc32(run[0].name(run[1]).encode()) % 3 == 0


def rows(runs: Iterable[tuple[Case, int]]) -> pytest.MarkDecorator:
    named = [pytest.param(*run, id=run[0].name(run[1])) for run in runs]
    return pytest.mark.parametrize(("one", "opset"), named)


def check(one: Case, opset: int, *, behind_a_convolution: bool = False) -> None:
    assert_as_runtime(*built(one, opset, behind_a_convolution=behind_a_convolution))


def assert_as_runtime(
    proto: onnx.ModelProto, arrays: Sequence[Array], wide_tolerance: float = 2e-5
) -> None:
    """Stitch and ONNX Runtime agree, narrow types within a step or two."""
    for mine, other in zip(ours(proto, arrays), runtime(proto, arrays), strict=True):
        assert (mine.shape, mine.dtype) == (other.shape, other.dtype)
        tolerance = 2e-3 if other.dtype.itemsize == 2 else wide_tolerance
        np.testing.assert_allclose(
            mine.astype(np.float64), other.astype(np.float64), rtol=tolerance, atol=tolerance
        )


@rows(filter(is_quick, RUNS))
def test_a_node_of_an_old_opset_is_what_onnx_runtime_makes_of_it(one: Case, opset: int) -> None:
    check(one, opset)


@pytest.mark.campaign("old_onnx")
@rows(itertools.filterfalse(is_quick, RUNS))
def test_every_node_of_an_old_opset_is_what_onnx_runtime_makes_of_it(one: Case, opset: int) -> None:
    check(one, opset)


def takes_what_a_convolution_gives(one: Case) -> bool:
    first = one.operands[0]
    return isinstance(first, np.ndarray) and first.ndim == 4 and first.dtype == np.float32


CONVOLVED = [run for run in RUNS if run[1] < 13 and takes_what_a_convolution_gives(run[0])]


@rows(run for run in CONVOLVED if run[0].op in ("Upsample", "Resize") and is_quick(run))
def test_what_comes_behind_a_convolution_is_right_too(one: Case, opset: int) -> None:
    check(one, opset, behind_a_convolution=True)


@pytest.mark.campaign("old_onnx")
@rows(CONVOLVED)
def test_all_that_comes_behind_a_convolution_is_right_too(one: Case, opset: int) -> None:
    check(one, opset, behind_a_convolution=True)


def test_the_table_has_every_schema_of_every_operator_that_stitch_has() -> None:
    """Derived from `onnx.defs`: what newly changes in ONNX fails here until it has a row."""
    covered = {(one.op, schemas(one.op)[opset]) for one, opset in RUNS}
    wanted = set()
    for op in sorted({schema.name for schema in defs.get_all_schemas() if not schema.domain}):
        if op in {d.name for d in ops.operators() if not d.domain} or is_upgraded(op):
            versions = set(schemas(op).values())
            wanted |= {(op, version) for version in versions if len(versions) > 1}
    assert sorted(wanted - covered - ELSEWHERE.keys()) == []
    assert sorted(ELSEWHERE.keys() & covered) == [], "these have rows now"


A, B = drawn(2, 3, 4), drawn(2, 3, 4, low=0.5)
#: Nodes that ONNX Runtime is too young for: operator, opset, operands, attributes, result.
ANCIENT: list[tuple[str, int, list[Any], dict[str, Any], Any]] = [
    ("Add", 6, [A, B[0, :, 0]], {"broadcast": 1, "axis": 1}, A + B[0, :, 0][:, None]),
    ("Sub", 6, [A, B[:, 0, 0]], {"broadcast": 1, "axis": 0}, A - B[:, 0, 0][:, None, None]),
    ("Mul", 6, [A, B[0]], {"broadcast": 1}, A * B[0]),
    ("Div", 6, [A, B[0, :, 0]], {"broadcast": 1, "axis": -2}, A / B[0, :, 0][:, None]),
    ("Pow", 6, [B, A[0, 0, 0]], {"broadcast": 1}, B ** A[0, 0, 0]),
    ("Add", 1, [A, B], {"consumed_inputs": [0, 0]}, A + B),
    ("Greater", 6, [A, B[0, :2, 0]], {"broadcast": 1, "axis": 0}, B[0, :2, 0][:, None, None] < A),
    ("And", 6, [A > 0, B[0] > 1], {"broadcast": 1, "axis": 1}, (A > 0) & (B[0] > 1)),
    ("Relu", 5, [A], {"consumed_inputs": [0]}, np.maximum(A, 0)),
    ("Clip", 5, [A], {"min": -1.0}, np.maximum(A, -1)),
    ("Concat", 3, [A, B], {}, np.concatenate([A, B], 1)),
    ("Cast", 5, [A], {"to": "INT32"}, A.astype(np.int32)),
    ("Reshape", 4, [A], {"shape": [4, 6]}, A.reshape(4, 6)),
    ("Pad", 1, [A[0]], {"paddings": [1, 0, 0, 2], "value": 0.5},
     np.pad(A[0], ((1, 0), (0, 2)), constant_values=0.5)),
    ("Upsample", 6, [A[None]], {"height_scale": 2.0, "width_scale": 3.0},
     A[None].repeat(2, 2).repeat(3, 3)),
    ("Selu", 5, [A], {}, 1.0507 * np.where(A > 0, A, 1.6732 * np.expm1(A))),
    ("Dropout", 6, [A], {"is_test": 1, "ratio": 0.9}, A),
    ("PRelu", 6, [A, B[0, :, 0]], {}, np.where(A > 0, A, A * B[0, :, 0][:, None])),
    ("BatchNormalization", 6, [A, *B[:, :, 0], B[0, :, 1], B[1, :, 1]], {"is_test": 1},
     (A - B[0, :, 1][:, None]) / np.sqrt(B[1, :, 1] + 1e-5)[:, None] * B[0, :, 0][:, None]
     + B[1, :, 0][:, None]),
    ("BatchNormalization", 8, [A, *B, A[0], B[0]], {"spatial": 0},
     (A - A[0]) / np.sqrt(B[0] + 1e-5) * B[0] + B[1]),
    ("LpPool", 1, [A[:1]], {"p": 2.0, "kernel_shape": [4]},
     np.sqrt((A[:1] ** 2).sum(2)[..., None])),
    ("Gemm", 6, [A[0], B[0].T, B[1, :, 0]], {"broadcast": 1}, A[0] @ B[0].T + B[1, :, 0]),
    ("Sum", 6, [A, B], {}, A + B),
]  # fmt: skip


@pytest.mark.parametrize(
    ("op", "opset", "operands", "attributes", "wanted"), ANCIENT,
    ids=[f"{op}-{opset}-{i}" for i, (op, opset, *_) in enumerate(ANCIENT)],
)  # fmt: skip
def test_operators_before_opset_7_do_what_their_text_says(
    op: str, opset: int, operands: list[Any], attributes: dict[str, Any], wanted: Array
) -> None:
    (found,) = ours(*built(Case(op, tuple(operands), 1, 6, 1, attributes), opset))
    assert found.shape == wanted.shape
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)


REFUSED: list[tuple[str, int, list[Any], int, dict[str, Any], str]] = [
    ("Tile", 5, [A, Fixed(2), Fixed(1)], 1, {}, "Tile is not supported as of opset 5"),
    ("GRU", 2, [A, A, A], 2, {"hidden_size": 1}, "GRU is not supported as of opset 2"),
    ("Split", 1, [A], 2, {"axis": 0}, "Split is not supported as of opset 1"),
    ("Dropout", 6, [A], 1, {}, "Dropout in training mode"),
    ("BatchNormalization", 6, [A, *[B[0, :, 0]] * 4], 1, {}, "in training mode"),
    ("BatchNormalization", 9, [A, *[B[0, :, 0]] * 4], 5, {}, "in training mode"),
    ("BatchNormalization", 8, [A, *[B[0, :, 0]] * 4], 1, {"spatial": 0}, "spatial of 0"),
    ("LpPool", 1, [A], 1, {"p": 1.5, "kernel_shape": [2]}, "power that is not whole"),
    ("GroupNormalization", 18, [A[0], B[0, :1, 0], B[0, :1, 0]], 1, {"num_groups": 0},
     "operand 1 of GroupNormalization"),
    ("GroupNormalization", 18, [A, B[0, :, 0], B[0, :, 0]], 1, {"num_groups": 2}, "num_groups"),
    ("LSTM", 6, [A, A, A], 3, {"hidden_size": 1}, "first result of LSTM is not supported"),
    ("Add", 6, [A, B[0]], 1, {}, "differ in shape, and its attribute 'broadcast' is 0"),
    ("Add", 6, [B[0], A], 1, {"broadcast": 1, "axis": 0}, "'axis' of Add does not fit"),
    ("Add", 6, [A, B], 1, {"broadcast": 1, "axis": "no"}, "'axis' of Add does not fit"),
    ("Cast", 5, [A], 1, {"to": "WORD"}, "'to' of Cast does not fit"),
    ("Softmax", 12, [A], 1, {"axis": 3}, "'axis' of Softmax does not fit"),
    ("Upsample", 8, [A], 1, {"scales": [1.0, 0.5, 1.0]}, "scales of Upsample are at least 1"),
    ("Upsample", 8, [A], 1, {"scales": [1.0, 2.0, 1.0], "mode": "cubic"}, "'mode' of Upsample"),
    ("Upsample", 8, [A], 1, {}, "Resize"),
    ("Slice", 9, [A], 1, {"starts": "x", "ends": [1]}, "'starts' of Slice does not fit"),
    ("TopK", 9, [A], 2, {"k": 0.5}, "'k' of TopK does not fit"),
    ("Resize", 17, [A, None, Fixed(1, 2, 2, dtype=np.float32)], 1,
     {"mode": "linear", "coordinate_transformation_mode": "tf_half_pixel_for_nn"}, "but for mode"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("op", "opset", "operands", "results", "attributes", "words"), REFUSED,
    ids=[f"{op}-{opset}-{i}" for i, (op, opset, *_) in enumerate(REFUSED)],
)  # fmt: skip
def test_what_has_no_proved_equivalent_is_refused_by_name(
    op: str, opset: int, operands: list[Any], results: int, attributes: dict[str, Any], words: str
) -> None:
    proto, arrays = built(Case(op, tuple(operands), 1, 26, results, attributes), opset)
    with pytest.raises((CompileError, FormatError), match=words):
        from_onnx(proto, arrays)


def test_a_scan_with_a_batch_axis_is_refused() -> None:
    body = helper.make_graph(
        [node("Add", ["s", "e"], ["t"]), node("Identity", ["t"], ["o"])], "round",
        [info("s", [2]), info("e", [2])], [info("t", [2]), info("o", [2])],
    )  # fmt: skip
    scan = node("Scan", ["", "x", "x"], ["y", "z"], body=body, num_scan_inputs=1)
    with pytest.raises(CompileError, match="Scan is not supported before opset 9"):
        from_onnx(model([scan], [info("x", [1, 3, 2])], ["y", "z"], opset=8))


def old_body(opset: int) -> list[Any]:
    """Nodes whose meaning changed after their opset, from `a` to `b`."""
    axes = {"axes": [0]}
    return [
        node("Unsqueeze", ["a"], ["u"], **axes),
        node("Softmax", ["u"], ["s"]),
        node("Squeeze", ["s"], ["t"], **axes),
        node("Clip", ["t"], ["b"], max=0.1) if opset < 11 else node("Neg", ["t"], ["b"]),
    ]


@pytest.mark.parametrize("opset", [7, 9, 10, 11, 12])
def test_old_operators_in_functions_are_read_as_of_what_the_function_imports(opset: int) -> None:
    old = helper.make_function(
        "mine", "Old", ["a"], ["b"], old_body(opset), [helper.make_opsetid("", opset)]
    )
    nodes = [node("Old", ["x"], ["o"], domain="mine"), node("Softmax", ["o"], ["y"])]
    proto = model(nodes, [info("x", [3, 4])], ["y"], opset=17, functions=[old],
                  domains={"mine": 1})  # fmt: skip
    x = drawn(3, 4)
    (inner,) = runtime(model(old_body(opset), [info("a", [3, 4])], ["b"], opset=opset), [x])
    raised = np.exp(inner - inner.max(-1, keepdims=True))
    (found,) = ours(proto, [x])
    np.testing.assert_allclose(found, raised / raised.sum(-1, keepdims=True), rtol=1e-5)


@pytest.mark.parametrize("opset", [7, 9, 10, 11, 12])
def test_old_operators_in_bodies_are_read_as_of_the_model(opset: int) -> None:
    scan_body = helper.make_graph(
        [*old_body(opset), node("Identity", ["b"], ["o"])], "round", [info("a", [3, 4])],
        [info("b", [3, 4]), info("o", [3, 4])],
    )  # fmt: skip
    loop_inputs = [info("i", [], INT64), info("c", [], BOOL), info("a", [3, 4])]
    loop_body = helper.make_graph(
        [*old_body(opset), node("Identity", ["c"], ["d"])], "rounds", loop_inputs,
        [info("d", [], BOOL), info("b", [3, 4])],
    )  # fmt: skip
    branch = helper.make_graph(
        [node("Identity", ["l"], ["a"]), *old_body(opset)], "branch", [], [info("b", [3, 4])]
    )
    nodes = [
        node("Loop", ["m", "", "x"], ["l"], body=loop_body),
        node("If", ["yes"], ["f"], then_branch=branch, else_branch=branch),
    ]
    results = ["f"]
    if opset >= 9:
        scan_body.input.append(info("e", [1]))
        nodes.append(node("Scan", ["x", "e"], ["y", "z"], body=scan_body, num_scan_inputs=1))
        results += ["y", "z"]
    inputs = [info("x", [3, 4]), info("e", [2, 1]), info("yes", [], BOOL)]
    proto = model(nodes, inputs, results, {"m": np.array(2)}, opset=opset)
    assert_as_runtime(proto, [drawn(3, 4), drawn(2, 1), np.array(True)])


def test_an_old_opset_beside_other_domains_is_read_by_itself() -> None:
    nodes = [
        node("Softmax", ["x"], ["s"]),
        node("Gelu", ["s"], ["g"], domain="com.microsoft"),
        node("Binarizer", ["g"], ["y"], domain="ai.onnx.ml", threshold=0.1),
    ]
    others = {"com.microsoft": 1, "ai.onnx.ml": 1}
    proto = model(nodes, [info("x", [2, 3, 2])], ["y"], opset=9, domains=others)
    assert_as_runtime(proto, [drawn(2, 3, 2)])


def test_a_model_that_imports_no_opset_is_of_the_first() -> None:
    proto = model([node("Add", ["x", "w"], ["y"], broadcast=1, axis=0)],
                  [info("x", [2, 3]), info("w", [2])], ["y"])  # fmt: skip
    del proto.opset_import[:]
    proto.ir_version = 2
    x, w = drawn(2, 3), drawn(2)
    np.testing.assert_allclose(ours(proto, [x, w])[0], x + w[:, None], rtol=1e-6)


def test_settings_that_are_inputs_decide_shapes_as_before() -> None:
    nodes = [
        node("Unsqueeze", ["n"], ["u"], axes=[0]),
        node("Concat", ["u", "two"], ["shape"], axis=0),
        node("Reshape", ["x", "shape"], ["y"]),
    ]
    inputs = [info("x", [6]), info("n", [], INT64)]
    proto = model(nodes, inputs, ["y"], {"two": np.array([2])}, opset=9)
    assert_as_runtime(proto, [drawn(6), np.array(3)])


def test_scales_that_are_an_input_are_fixed_by_their_example() -> None:
    inputs = [info("x", [1, 1, 4, 4]), info("s", [4])]
    scales = np.array([1, 1, 0.6, 2], np.float32)
    for op, opset, given in (("Resize", 10, scales), ("Upsample", 9, np.ceil(scales))):
        proto = model([node(op, ["x", "s"], ["y"])], inputs, ["y"], opset=opset)
        assert_as_runtime(proto, [drawn(1, 1, 4, 4), given])


#: Networks of opset 9 in the onnx package, as their exporters wrote them: masks that nothing reads,
#: inputs for weights.
NETWORKS = sorted((Path(onnx.__file__).parent / "backend/test/data/light").glob("*.onnx"))
QUICK_NETWORK = "light_squeezenet"


def check_network(path: Path) -> None:
    proto = onnx.load(path)
    known = {tensor.name for tensor in proto.graph.initializer}
    (slot,) = [one for one in proto.graph.input if one.name not in known]
    shape = [dim.dim_value for dim in slot.type.tensor_type.shape.dim]
    last = proto.graph.node[-1]
    if last.op_type == "Softmax":
        # All weights are equal and scores are of 1e9: their last digits would decide.
        proto.graph.output[0].name = last.input[0]
        proto.graph.node.remove(last)
    # Sums of 25,088 terms, layer after layer: their orders differ.
    assert_as_runtime(proto, [drawn(*shape).astype(np.float32)], wide_tolerance=1e-3)


def test_a_network_of_opset_9_is_what_onnx_runtime_makes_of_it() -> None:
    (path,) = [path for path in NETWORKS if path.stem == QUICK_NETWORK]
    check_network(path)


@pytest.mark.campaign("old_onnx")
@pytest.mark.parametrize("path", NETWORKS, ids=lambda path: path.stem)
def test_every_network_of_opset_9_is_what_onnx_runtime_makes_of_it(path: Path) -> None:
    check_network(path)


@pytest.mark.parametrize(("opset", "length"), in_turn([9, 10, 19], [5, 7, 10]))
def test_scales_that_no_float32_is_give_the_lengths_and_places_of_onnx_runtime(
    length: int, opset: int
) -> None:
    """5 elements by 1.4 are 7, the 11th by 2.2 is the 5th, and 5 by 1.1 stay what they are."""
    ways = {"coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}
    inputs = ["x", "scales"] if opset < 11 else ["x", "", "scales"]
    one = node("Resize" if opset > 9 else "Upsample", inputs, ["y"], mode="nearest",
               **(ways if opset > 10 else {}))  # fmt: skip
    x = np.arange(length, dtype=np.float32).reshape(1, 1, 1, length)
    for scale in np.arange(11, 33, dtype=np.float32) / 10:
        scales = np.array([1, 1, 1, scale], np.float32)
        proto = model([one], [info("x", x.shape)], ["y"], {"scales": scales}, opset=opset)
        (wanted,) = runtime(proto, [x])
        for executor in ("numpy", "onnxruntime"):
            with stitch.open_device("host", executor=executor) as device:
                made = device.load(stitch.compile(proto, (x,), target="host"))(x)
                assert isinstance(made, stitch.Tensor)
                np.testing.assert_array_equal(made.numpy(), wanted, err_msg=f"{executor} {scale}")
