"""Tracing and building: names, constants, placement options, and every way of going wrong."""

from __future__ import annotations

import operator
import re
from collections import namedtuple
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from stitch.errors import CompileError, UsageError
from stitch.graph import ComputationGraphBuilder, SymbolicTensor, parse_placement, trace
from stitch.program import (
    TILE_SHAPE,
    Array,
    DataType,
    InputKind,
    Layout,
    MemoryLayout,
    ShardSpec,
    Space,
    TensorDesc,
    ValueType,
)

Run = Callable[..., dict[str, Array]]
X = ValueType((2, 3), DataType.FLOAT32)


class WithoutData:
    """What will be an array once somebody has computed it."""

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        raise RuntimeError("there is none yet")


def test_parameters_with_defaults_may_be_left_out(run: Run) -> None:
    def f(x: Any, factor: float = 3.0) -> Any:
        return x * factor

    x = np.ones((2, 3), np.float32)
    assert run(trace(f, X), x)["output"].tolist() == (x * 3).tolist()


def test_outputs_take_the_names_that_the_function_gives() -> None:
    Pair = namedtuple("Pair", ["low", "high"])
    by_name = trace(lambda x: {"double": x + x, "same": x}, X)
    by_field = trace(lambda x: Pair(x - 1, x + 1), X)
    by_place = trace(lambda x: (x + 1, x * 2), X)
    assert [slot.name for slot in by_name.outputs] == ["double", "same"]
    assert [slot.name for slot in by_field.outputs] == ["low", "high"]
    assert [slot.name for slot in by_place.outputs] == ["output_0", "output_1"]


def test_every_output_is_a_value_of_its_own(run: Run) -> None:
    def f(x: Any) -> Any:
        y = x * 2
        return x, y, y, np.float32(7)

    graph = trace(f, X)
    x = np.full((2, 3), 4, np.float32)
    results = list(run(graph, x).values())
    made = {v for operation in graph.operations for v in operation.outputs}
    assert len({slot.value for slot in graph.outputs} & made) == 4
    assert [r.flat[0] for r in results] == [4, 8, 8, 7]


def test_a_closed_over_array_is_one_constant_that_later_writes_do_not_reach(run: Run) -> None:
    weight = np.ones((3, 1000), np.float32)
    graph = trace(lambda x: x @ weight + x @ weight, X)
    weight[:] = 5
    x = np.ones((2, 3), np.float32)
    assert len(graph.constants) == 1
    assert run(graph, x)["output"].max() == 6


def test_equal_small_constants_are_shared_and_unequal_bits_are_not() -> None:
    graph = trace(lambda x: (x + 1.0) * 1.0 + (x * 0.0) / -0.0, X)
    assert sorted(str(c.data) for c in graph.constants) == ["-0.0", "0.0", "1.0"]


def test_kinds_of_inputs_are_given_by_name() -> None:
    graph = trace(lambda x, w: x @ w.T, X, X, kinds={"w": InputKind.PARAMETER})
    assert [slot.kind for slot in graph.inputs] == [InputKind.ACTIVATION, InputKind.PARAMETER]
    with pytest.raises(CompileError, match=r"has no argument 'v'"):
        trace(lambda x: x, X, kinds={"v": InputKind.STATE})


def test_operations_remember_the_users_file_and_line_without_the_folder() -> None:
    def f(x: Any) -> Any:
        y = np.exp(x)
        return y @ x.T

    graph = trace(f, X)
    first = f.__code__.co_firstlineno
    assert [operation.location for operation in graph.operations] == [
        f"test_tracing_errors.py:{first + line}" for line in (1, 2, 2)
    ]


NO_DATA: dict[str, Callable[[Any], object]] = {
    "if": lambda x: x if x.sum() > 0 else -x,
    "and": lambda x: x and x,
    "float": lambda x: float(x.sum()),
    "int": lambda x: int(x.sum()),
    "index": lambda x: list(range(5))[x.argmax()],
    "item": lambda x: x.sum().item(),
    "array": lambda x: np.asarray(x),
    "in": lambda x: 3.0 in x,
}


@pytest.mark.parametrize("name", NO_DATA)
def test_control_flow_on_data_is_an_error_that_names_the_line(name: str) -> None:
    with pytest.raises(CompileError, match="has no data while the graph is built") as caught:
        trace(NO_DATA[name], X)
    assert "test_tracing_errors.py:" in str(caught.value)
    assert caught.value.remedy


def test_a_symbolic_tensor_cannot_be_written_into() -> None:
    def f(x: Any) -> Any:
        x[0] = 1.0
        return x

    with pytest.raises(CompileError, match="cannot be written to"):
        trace(f, X)


def test_a_tensor_that_escaped_from_another_trace_is_refused() -> None:
    kept: list[SymbolicTensor] = []

    def leak(x: SymbolicTensor) -> SymbolicTensor:
        kept.append(x)
        return x + 1

    trace(leak, X, name="first")
    with pytest.raises(CompileError, match="belongs to another graph \\('first'\\)"):
        trace(lambda x: x + kept[0], X)
    with pytest.raises(CompileError, match="'first' is already built"):
        operator.add(kept[0], 1)


REFUSED: dict[str, tuple[Callable[..., object], str]] = {
    "number out of range": (lambda x: x.cast("uint8") + 300, "does not fit"),
    "shapes": (lambda x: x @ x, "MatMul"),
    "reshape": (lambda x: x.reshape(4, 2), "number of elements"),
    "axis": (lambda x: x.sum(2), "no axis 2"),
    "axis twice": (lambda x: x.sum((0, -2)), "is repeated"),
    "index": (lambda x: x[2], "outside axis 0"),
    "index list": (lambda x: x[[0, 2]], "outside axis 0"),
    "too many indices": (lambda x: x[0, 0, 0], "does not fit the tensor"),
    "index with a mask": (lambda x: x[x > 0], "depends on data"),
    "index with text": (lambda x: x["a"], "cannot be used to index"),
    "broadcast": (lambda x: np.broadcast_to(x, (2, 4)), "axes of length 1"),
    "split": (lambda x: x.builder.split(x, [1, 1], 1), "add up to the length"),
    "unknown function": (lambda x: np.linalg.svd(x), "numpy.linalg.svd is not supported"),
    "unknown ufunc": (lambda x: np.gcd(x.astype(int), 2), "numpy.gcd is not supported"),
    "unknown method": (lambda x: x.partition(1), "not support numpy.ndarray.partition"),
    "out": (lambda x: np.add(x, x, out=x), "numpy.add .* does not support .*'out'"),
    "out of a reduction": (lambda x: np.sum(x, out=x), "numpy.sum .* out="),
    "shape by data": (lambda x: np.repeat(x, x.argmax(0), 0), "numpy.repeat .* depends on the"),
    "number of a format": (lambda x: f"{x.sum():.2f}", "its value is unknown"),
    "unknown operator": (lambda x: x.builder.op("Rleu", x), "did you mean"),
    "number beyond float32": (lambda x: x * 1e39, "does not fit"),
    "number beyond float16": (lambda x: x.cast("float16") - 70000, "does not fit"),
    "number beyond all": (lambda x: x * 10**400, "does not fit"),
    "list beyond int64": (lambda x: x.builder.op("Reshape", x, [2**63]), "64 bits"),
    "attribute of lists": (lambda x: x.builder.op("Transpose", x, perm=[[1], [0]]), "a list of"),
    "attribute of both": (lambda x: x.builder.op("Transpose", x, perm=["a", 0]), "a list of"),
    "unknown attribute": (lambda x: x.builder.op("Elu", x, alhpa=2), "did you mean"),
    "complex": (lambda x: x * 2j, "numpy.multiply.*complex"),
    "array that is none": (lambda x: x + WithoutData(), "to an array: there is none yet"),
    "string": (lambda x: x + "a", "expected a tensor"),
    "nothing returned": (lambda x: None, "returned a NoneType"),
    "empty tuple": (lambda x: (), "returned no tensor"),
    "length of a number": (lambda x: len(x.sum()), "no len"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_meaning_is_a_compile_error_that_says_why(name: str) -> None:
    f, message = REFUSED[name]
    with pytest.raises(CompileError) as caught:
        trace(f, X)

    assert re.search(message, str(caught.value)), str(caught.value)


def test_a_wrong_number_of_descs_names_the_parameters() -> None:
    with pytest.raises(CompileError, match="left, right"):
        trace(lambda left, right: left + right, X)
    with pytest.raises(CompileError, match="described by a str"):
        trace(lambda left: left, "f32")  # type: ignore[arg-type]


def test_builders_refuse_double_names_block_types_and_work_after_build() -> None:
    builder = ComputationGraphBuilder("g")
    x = builder.input("x", (2, 3), "float32")
    with pytest.raises(CompileError, match="two inputs are called 'x'"):
        builder.input("x", (2, 3), "float32")
    with pytest.raises(CompileError, match="a storage format"):
        builder.input("y", (32, 32), "bfp8")
    builder.output("y", x + 1)
    with pytest.raises(CompileError, match="two outputs are called 'y'"):
        builder.output("y", x)
    builder.place(parse_placement("output.y.space=l1"))
    graph = builder.build()
    assert builder.build() is graph
    with pytest.raises(CompileError, match="already built"):
        builder.relu(x)


@pytest.mark.parametrize("word", [
    {"ownership": "donate"}, {"ownership": "lend"}, {"kind": "state"}, {"kind": None},
], ids=repr)  # fmt: skip
def test_what_an_input_is_for_and_whose_it_is_are_no_texts(word: dict[str, Any]) -> None:
    builder = ComputationGraphBuilder("g")
    (name,) = word
    with pytest.raises(UsageError, match=rf"\.input takes one of .* as {name}"):
        builder.input("x", (2, 3), "float32", **word)
    x = builder.input("x", (2, 3), "float32", InputKind.STATE)
    builder.output("y", x + x)
    assert [slot.name for slot in builder.build().inputs] == ["x"]


def test_an_output_takes_its_name_as_a_text_and_what_it_aliases_as_a_number() -> None:
    builder = ComputationGraphBuilder("g")
    x = builder.input("x", (2, 3), "float32")
    wrong: Any
    for wrong in ("0", True, 0.0):
        with pytest.raises(
            UsageError, match=r"\.output takes a whole number, or None as aliases_i"
        ):
            builder.output("y", x + x, aliases_input=wrong)
    wrong = 3
    with pytest.raises(UsageError, match=r"\.output takes a text as name"):
        builder.output(wrong, x + x)
    with pytest.raises(UsageError, match=r"\.input takes one of InputKind"):
        trace(lambda x: x, X, kinds={"x": wrong})


def test_inputs_are_called_like_the_functions_parameters() -> None:
    graph = trace(lambda left, *rest: left + rest[0] + rest[1], X, X, X)
    assert [slot.name for slot in graph.inputs] == ["left", "rest_0", "rest_1"]


def test_a_desc_that_is_not_a_plain_host_layout_becomes_placement() -> None:
    spec = ShardSpec((2, 1), (32, 64))
    sharded = Layout(
        DataType.BFP8, Space.L1, TILE_SHAPE, MemoryLayout.HEIGHT_SHARDED, spec, 0x20000
    )
    graph = trace(lambda x: x + 1, TensorDesc((64, 64), sharded))
    assert graph.input_type(0).data_type is DataType.FLOAT32
    assert [option.text() for option in graph.placement] == [
        "input.x.space=l1",
        "input.x.data_type=bfp8",
        "input.x.layout=tile",
        "input.x.memory_layout=height_sharded",
        "input.x.shard_spec=2x1,32x64",
        "input.x.address=0x20000",
    ]
