"""ONNX models with named sizes: at every size equal to compiling there, in text, bytes and results,
and to ONNX Runtime; sizes that cannot stay symbolic are named with their node."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from onnxruntime import InferenceSession

import stitch
from stitch.budget import allowing
from stitch.errors import CompileError, StitchError, UsageError
from tests.support.onnx.models import FLOAT, INT64, drawn, info, model

node = helper.make_node
BATCH, LENGTH = stitch.Dim("batch", 1, 40), stitch.Dim("length", 1, 24)


def whole(*numbers: int) -> Any:
    return np.array(numbers, np.int64)


def scalar(number: int) -> Any:
    return np.array(number, np.int64)


def filled(number: float, kind: int = FLOAT) -> Any:
    return helper.make_tensor("value", kind, [1], [number])


def branch(op: str) -> Any:
    return helper.make_graph([node(op, ["x"], ["a"])], op, [], [info("a", None)])


#: Inputs with their shapes, nodes that write "y", and initializers.
Case = tuple[dict[str, list[Any]], list[Any], dict[str, Any]]
X = {"x": ["batch", 5]}
IMAGE = {"x": ["batch", 2, 4, 6]}
PLANE = {"x": [1, 2, "batch", "length"]}
SHAPE = node("Shape", ["x"], ["s"])
FIRST = node("Gather", ["s", "zero"], ["n"])
CASES: dict[str, Case] = {
    "reshape to an entry of the shape": (
        {"x": ["batch", 3, 4]},
        [SHAPE, FIRST, node("Unsqueeze", ["n", "axis"], ["rows"]),
         node("Concat", ["rows", "rest"], ["t"], axis=0), node("Reshape", ["x", "t"], ["y"])],
        {"zero": scalar(0), "axis": whole(0), "rest": whole(-1)},
    ),
    "expand a constant": (
        X, [SHAPE, node("Expand", ["c", "s"], ["e"]), node("Add", ["x", "e"], ["y"])],
        {"c": drawn(5)},
    ),
    "fill": (
        X, [SHAPE, node("ConstantOfShape", ["s"], ["e"], value=filled(2.5)),
            node("Add", ["x", "e"], ["y"])], {},
    ),
    "positions": (
        X, [SHAPE, FIRST, node("Range", ["zero", "n", "one"], ["r"]),
            node("Gather", ["table", "r"], ["p"]), node("Add", ["x", "p"], ["y"])],
        {"zero": scalar(0), "one": scalar(1), "table": drawn(40, 5)},
    ),
    "where of shapes": (
        X, [SHAPE, node("Shape", ["s"], ["rank"]),
            node("ConstantOfShape", ["rank"], ["ones"], value=filled(1, INT64)),
            node("Mul", ["ones", "minus"], ["m"]), node("Equal", ["s", "m"], ["q"]),
            node("Where", ["q", "ones", "s"], ["t"]), node("Expand", ["c", "t"], ["e"]),
            node("Add", ["x", "e"], ["y"])],
        {"minus": scalar(-1), "c": drawn(5)},
    ),
    "resize to sizes": (
        IMAGE, [SHAPE, node("Slice", ["s", "zeros", "two"], ["nc"]),
                node("Concat", ["nc", "hw"], ["t"], axis=0),
                node("Resize", ["x", "", "", "t"], ["y"], mode="linear")],
        {"zeros": whole(0), "two": whole(2), "hw": whole(8, 9)},
    ),
    "resize by scales": (
        IMAGE, [node("Resize", ["x", "", "scales"], ["y"], mode="nearest")],
        {"scales": np.array([1, 1, 2, 2], np.float32)},
    ),
    "resize named axes by whole scales": (
        PLANE, [node("Resize", ["x", "", "scales"], ["y"], mode="nearest")],
        {"scales": np.array([1, 1, 3, 2], np.float32)},
    ),
    "resize named axes to sizes of others": (
        PLANE, [SHAPE, node("Mul", ["s", "times"], ["t"]),
                node("Resize", ["x", "", "", "t"], ["y"], mode="linear")],
        {"times": whole(1, 1, 2, 3)},
    ),
    "resize named axes to one size": (
        PLANE, [node("Resize", ["x", "", "", "t"], ["y"], mode="linear")],
        {"t": whole(1, 2, 7, 9)},
    ),
    "a size as a number": (
        X, [SHAPE, FIRST, node("Cast", ["n"], ["f"], to=FLOAT), node("Div", ["x", "f"], ["y"])],
        {"zero": scalar(0)},
    ),
    "a product in int32": (
        X, [SHAPE, node("Cast", ["s"], ["i"], to=TensorProto.INT32),
            node("ReduceProd", ["i"], ["p"]), node("Cast", ["p"], ["l"], to=INT64),
            node("Reshape", ["l", "one"], ["t"]), node("Reshape", ["x", "t"], ["y"])],
        {"one": whole(1)},
    ),
    "the number of elements": (
        X, [node("Size", ["x"], ["n"]), node("Reshape", ["n", "one"], ["t"]),
            node("Reshape", ["x", "t"], ["y"])], {"one": whole(1)},
    ),
    "two inputs and a causal mask": (
        {"x": ["batch", "length", 4], "w": ["batch", "length"]},
        [node("Shape", ["x"], ["l"], start=1, end=2), node("Concat", ["l", "l"], ["ll"], axis=0),
         node("ConstantOfShape", ["ll"], ["ones"], value=filled(1.0)),
         node("Trilu", ["ones"], ["low"], upper=0), node("MatMul", ["low", "x"], ["h"]),
         node("Unsqueeze", ["w", "last"], ["w1"]), node("Mul", ["h", "w1"], ["y"])],
        {"last": whole(2)},
    ),
    "a branch that the shape decides": (
        X, [SHAPE, FIRST, node("Less", ["n", "many"], ["q"]),
            node("If", ["q"], ["y"],
                 then_branch=branch("Neg"), else_branch=branch("Abs"))],
        {"zero": scalar(0), "many": scalar(41)},
    ),
}  # fmt: skip


def made(case: Case) -> Any:
    inputs, nodes, constants = case
    return model(nodes, [info(name, shape) for name, shape in inputs.items()], ["y"], constants)


def check(proto: Any, dynamic: stitch.DynamicModel, inputs: Mapping[str, Sequence[Any]],
          session: InferenceSession, sizes: Mapping[str, int]) -> None:  # fmt: skip
    """At these sizes: text and bytes of compiling there, and the results of ONNX Runtime."""
    shapes: dict[str, Any] = {
        name: tuple(sizes.get(n, n) if isinstance(n, str) else n for n in shape)
        for name, shape in inputs.items()
    }
    sizes = {name: size for name, size in sizes.items() if name in dynamic.program.sizes.dims}
    stored = stitch.load(dynamic.encode())
    static, expected = dynamic.at(**sizes), stitch.compile(proto, input_shapes=shapes)
    assert static.text() == expected.text()
    assert static.encode() == expected.encode()
    assert stored.at(**sizes).encode() == expected.encode()
    feeds = {name: drawn(*shape) for name, shape in shapes.items()}
    (theirs,) = session.run(None, feeds)
    np.testing.assert_allclose(np.asarray(dynamic(**feeds)), theirs, rtol=1e-5, atol=1e-5)


def session_of(proto: Any) -> InferenceSession:
    return InferenceSession(proto.SerializeToString())


DIMS: Any = {"batch": BATCH, "length": LENGTH}


def dims_of(case: Case) -> dict[str, stitch.Dim]:
    return {name: DIMS[name] for shape in case[0].values() for name in shape if name in DIMS}


@pytest.mark.parametrize("name", CASES)
def test_arithmetic_of_shapes_stays_free(name: str) -> None:
    case = CASES[name]
    proto = made(case)
    dynamic = stitch.compile(proto, dynamic_shapes=dims_of(case))
    assert not dynamic.program.guards
    session = session_of(proto)
    for batch, length in ((1, 1), (40, 24)):
        check(proto, dynamic, case[0], session, {"batch": batch, "length": length})


def test_large_constants_that_are_equal_at_one_size_are_told_apart_at_others() -> None:
    # Of 20 flags those in the middle differ, unless batch is 10 or 12. Their copies are folded
    # while they are small; beyond that operations read the flags.
    case: Case = (
        {"x": ["batch"], "w": ["length"]},
        [
            SHAPE, FIRST, node("Shape", ["w"], ["times"]), node("Less", ["range", "n"], ["a"]),
            *[node("Cast", [name], [f"{name}_f"], to=FLOAT) for name in "acb"],
            *[node("Tile", [f"{name}_f", "times"], [f"{name}_t"]) for name in "acb"],
            node("Sub", ["a_t", "b_t"], ["d"]), node("Mul", ["d", "c_t"], ["e"]),
            *[node("ReduceMax", [name], [f"{name}_top"], keepdims=0) for name in "xw"],
            node("Sum", ["e", "x_top", "w_top"], ["y"]),
        ],
        {"zero": scalar(0), "range": np.arange(20), "b": np.arange(20) < 10,
         "c": np.arange(20) < 12},
    )  # fmt: skip
    proto, axes = made(case), {"batch": BATCH, "length": stitch.Dim("length", 1, 20_000)}
    dynamic, session = stitch.compile(proto, dynamic_shapes=axes), session_of(proto)
    for batch, length in ((9, 3), (10, 3), (11, 3), (10, 20_000), (11, 20_000)):
        check(proto, dynamic, case[0], session, {"batch": batch, "length": length})


def test_axes_may_be_named_by_input_and_reach_all_axes_of_their_dimension(tmp_path: Path) -> None:
    case = CASES["two inputs and a causal mask"]
    proto = made(case)
    onnx.save(proto, tmp_path / "m.onnx")
    axes = {"x": {0: stitch.Dim("n", 1, 9), -2: LENGTH}}
    dynamic = stitch.compile(tmp_path / "m.onnx", dynamic_shapes=axes)
    assert dynamic.text().splitlines()[1:5] == [
        "  size n: 1 to 9", "  size length: 1 to 24", "  input x: nxlengthx4xf32",
        "  input w: nxlengthxf32",
    ]  # fmt: skip
    assert np.asarray(dynamic(drawn(3, 2, 4), drawn(3, 2))).shape == (3, 2, 4)
    with pytest.raises(UsageError, match="disagree about size 'n'"):
        dynamic(drawn(3, 2, 4), drawn(4, 2))


def test_examples_give_the_other_dimensions_and_the_size_that_is_traced() -> None:
    case = CASES["two inputs and a causal mask"]
    proto = made(case)
    examples = (drawn(9, 6, 4), drawn(9, 6))
    dynamic = stitch.compile(proto, examples, dynamic_shapes={"batch": BATCH})
    assert dynamic.program.sizes.hints == {"batch": 9}
    check(proto, dynamic, case[0], session_of(proto), {"batch": 4, "length": 6})


def test_a_number_that_an_operator_needs_names_its_node() -> None:
    proto = made((
        IMAGE,
        [SHAPE, node("Cast", ["s"], ["f"], to=FLOAT), node("Mul", ["f", "half"], ["g"]),
         node("Floor", ["g"], ["h"]), node("Cast", ["h"], ["t"], to=INT64, name="sizes"),
         node("Resize", ["x", "", "", "t"], ["y"], name="shrink")],
        {"half": np.array([1, 1, 0.5, 0.5], np.float32)},
    ))  # fmt: skip
    dynamic = stitch.compile(proto, dynamic_shapes={"batch": BATCH})
    (guard,) = dynamic.program.guards
    assert str(guard.left) == "batch"
    assert guard.is_specialised
    assert guard.line.endswith(":shrink")
    assert dynamic.at(batch=7).program
    with pytest.raises(CompileError, match=r"batch == 7\n.*:shrink"):
        dynamic.at(batch=8)


def test_what_is_not_folded_for_want_of_memory_is_folded_when_there_is_some() -> None:
    case: Case = (
        {"x": ["batch", 500], "z": ["length"]},
        [SHAPE, FIRST, node("Range", ["zero", "n", "one"], ["r"]),
         node("Cast", ["r"], ["f"], to=FLOAT), node("Unsqueeze", ["f", "axis"], ["c"]),
         node("Mul", ["c", "row"], ["t"]), node("Cos", ["t"], ["e"]),
         node("Add", ["x", "e"], ["a"]),
         node("ReduceMax", ["z"], ["m"]), node("Shape", ["z"], ["l"]),
         node("Expand", ["m", "l"], ["w"]),  # An identity where length is 1.
         node("ReduceSum", ["w"], ["k"]), node("Add", ["a", "k"], ["y"])],
        {"zero": scalar(0), "one": scalar(1), "axis": whole(1), "row": drawn(500)},
    )  # fmt: skip
    proto = made(case)
    dynamic = stitch.compile(proto, dynamic_shapes=dims_of(case))
    with allowing(1):
        assert "Cos" in dynamic.at(batch=30, length=3).text()
    check(proto, dynamic, case[0], session_of(proto), {"batch": 30, "length": 2})
    with allowing(1):
        assert "Cos" in dynamic.at(batch=30, length=1).text()
    check(proto, dynamic, case[0], session_of(proto), {"batch": 31, "length": 1})


BAD: list[tuple[Any, str]] = [
    ({"bach": BATCH}, "'bach', which is no input or free dimension.*\n(.*\n)*.*batch"),
    ({"x": BATCH}, "mapping of axes to Dims"), ({"x": {1: BATCH}}, "fixed size"),
    ({"x": {4: BATCH}}, "axis 4 of input 'x', which has 2 axes"),
    ({"x": {0: BATCH, -2: BATCH}}, "twice"), ({"x": {"0": BATCH}}, "mapping of axes to Dims"),
    ({"batch": BATCH, "x": {0: LENGTH}}, "dimension 'batch' of the model has two Dims"),
    ({"batch": (1, 40)}, r"dimension 'batch'.*\n.*stitch.Dim\(\"batch\".*\n.*tuple: \(1, 40\)"),
    ({}, "dynamic dimension left unbound: batch\n(.*\n)*.*dynamic_shapes="),
]  # fmt: skip


@pytest.mark.parametrize(("shapes", "message"), BAD)
def test_dynamic_shapes_that_do_not_fit_the_model_are_refused(shapes: Any, message: str) -> None:
    with pytest.raises(StitchError, match=message):
        stitch.compile(made(CASES["fill"]), dynamic_shapes=shapes)


def test_an_error_lists_the_dimensions_without_bounds_and_no_others() -> None:
    proto = model([node("Neg", ["x"], ["y"])], [info("x", ["batch", "rows", 3])], ["y"])
    with pytest.raises(CompileError, match="left unbound: rows") as caught:
        stitch.compile(proto, dynamic_shapes={"batch": BATCH})
    assert "unbound: batch" not in str(caught.value)
    with pytest.raises(CompileError, match="the shape does not fit") as caught:
        stitch.compile(proto, input_shapes={"x": (2, 2, 4)})
    assert "unbound" not in str(caught.value)
    shape: Any = (2, None, 3)
    with pytest.raises(CompileError, match=r"dynamic_shapes= names .*got \[2, None, 3\]"):
        stitch.compile(proto, input_shapes={"x": shape})


def test_the_remedies_for_sizes_of_a_model_work() -> None:
    unnamed = model([node("Neg", ["x"], ["y"])], [info("x", [2, "?"])], ["y"])
    with pytest.raises(UsageError, match=r'by input and axis: \{"x": \{1: stitch.Dim'):
        stitch.compile(unnamed, dynamic_shapes={"?": BATCH})
    stitch.compile(unnamed, dynamic_shapes={"x": {1: BATCH}})
    two = model([node("Add", ["x", "d"], ["y"])], [info("x", ["batch", 3])], ["y"],
                {"d": drawn(2, 3)})  # fmt: skip
    with pytest.raises(CompileError, match="batch=7 was assumed: pass example inputs"):
        stitch.compile(two, dynamic_shapes={"batch": BATCH})
    dynamic = stitch.compile(two, (drawn(2, 3),), dynamic_shapes={"batch": BATCH})
    assert dynamic(drawn(2, 3)).shape == (2, 3)
    data = model([node("NonZero", ["x"], ["y"])], [info("x", ["batch", 3])], ["y"])
    with pytest.raises(CompileError, match="NonZero is not supported") as caught:
        stitch.compile(data, dynamic_shapes={"batch": BATCH})
    assert caught.value.remedy is None


@pytest.mark.parametrize("examples", [{}, {"x": drawn(3, 2), "d": drawn(3, 2)}])
def test_an_input_with_an_initializer_has_named_sizes_where_it_is_named(examples: Any) -> None:
    proto = model([node("Add", ["x", "d"], ["y"])], [info("x", ["n", 2]), info("d", ["n", 2])],
                  ["y"], {"d": drawn(4, 2)})  # fmt: skip
    axes = {0: stitch.Dim("n", 1, 9)}
    dynamic = stitch.compile(proto, examples, dynamic_shapes={"x": axes, "d": axes})
    assert not dynamic.program.guards
    x = drawn(5, 2)
    assert np.array_equal(dynamic(x, x + 1), x + (x + 1))


def test_an_example_out_of_bounds_is_refused() -> None:
    with pytest.raises(UsageError, match="out of bounds"):
        stitch.compile(made(CASES["fill"]), (drawn(41, 5),), dynamic_shapes={"batch": BATCH})


def arithmetic(draw: random.Random) -> Case:
    """Random integers from the shape of x, and a constant expanded to some of them."""
    nodes: list[Any] = [SHAPE]
    constants: dict[str, Any] = {"last": scalar(1), "axis": whole(0), "c": drawn(1)}
    known = []
    for axis in range(3):
        constants[f"axis{axis}"] = scalar(axis)
        nodes.append(node("Gather", ["s", f"axis{axis}"], [f"n{axis}"]))
        known.append(f"n{axis}")
    for step in range(draw.randint(1, 12)):
        op = draw.choice(
            ["Add", "Sub", "Mul", "Div", "Mod", "Max", "Min", "Neg", "Abs", "Where", "Cast"]
        )
        a, b, result = draw.choice(known), draw.choice(known), f"v{step}"
        if draw.random() < 0.4 or op in ("Div", "Mod"):
            b = f"k{step}"
            constants[b] = scalar(draw.choice([2, 3, 5, 7]))
        if op in ("Neg", "Abs"):
            nodes.append(node(op, [a], [result]))
        elif op == "Cast":
            nodes += [node(op, [a], [f"i{step}"], to=TensorProto.INT32),
                      node(op, [f"i{step}"], [result], to=INT64)]  # fmt: skip
        elif op == "Where":
            compared = draw.choice(["Less", "Equal", "Greater"])
            nodes += [node(compared, [a, b], [f"q{step}"]), node(op, [f"q{step}", a, b], [result])]
        else:
            nodes.append(node(op, [a, b], [result]))
        known.append(result)
    parts = []
    for index, name in enumerate(known[-2:]):
        constants["five"], constants["one"] = scalar(5), scalar(1)
        nodes += [node("Mod", [name, "five"], [f"m{index}"]),
                  node("Add", [f"m{index}", "one"], [f"p{index}"]),
                  node("Unsqueeze", [f"p{index}", "axis"], [f"d{index}"])]  # fmt: skip
        parts.append(f"d{index}")
    nodes += [node("Concat", parts, ["t"], axis=0), node("Expand", ["c", "t"], ["e"]),
              node("ReduceMean", ["x"], ["r"], keepdims=0),
              node("Add", ["e", "r"], ["y"])]  # fmt: skip
    return {"x": ["batch", "length", 3]}, nodes, constants


@pytest.mark.campaign("dynamic_sizes")
@pytest.mark.parametrize("seed", range(60))
def test_random_arithmetic_of_shapes_is_that_of_onnx_runtime(seed: int) -> None:
    draw = random.Random(seed)
    case = arithmetic(draw)
    proto = made(case)
    dynamic = stitch.compile(proto, dynamic_shapes=DIMS)
    session, hints = session_of(proto), dynamic.program.sizes.hints
    drawn_sizes = [{d.name: draw.randint(d.least, d.most) for d in DIMS.values()} for _ in range(8)]
    served = 0
    for sizes in (hints, *drawn_sizes):
        if all(guard.holds(sizes) for guard in dynamic.program.guards):
            check(proto, dynamic, case[0], session, sizes)
            served += 1
    assert served


@pytest.mark.campaign("dynamic_sizes")
@pytest.mark.parametrize("name", CASES)
def test_every_size_equals_compiling_there(name: str) -> None:
    case = CASES[name]
    proto = made(case)
    dynamic, session = stitch.compile(proto, dynamic_shapes=dims_of(case)), session_of(proto)
    for batch in range(1, 41, 3):
        check(proto, dynamic, case[0], session, {"batch": batch, "length": batch % 24 + 1})
