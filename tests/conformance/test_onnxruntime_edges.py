"""Where ONNX Runtime's kernels are wrong or stop at the edges of a type, and programs are right."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import stitch
from stitch import ComputationGraphBuilder
from stitch.errors import CompileError
from stitch.program import Array
from stitch.runtime.executors import make_executor
from tests.support.grids import in_turn, rows
from tests.support.operators.one_operation import MACHINE, Binding, Row, one_operation
from tests.support.stitched_models import integers, model, one, several

WIDE = np.array([2**31, -(2**31) - 1, 2**40, 5, -7, 2**63 - 1, -(2**63), 2**32 + 3] * 3)
OTHER = np.array([5, 3, -2, 2**32, 2**50, 1, 0, 3] * 3)


def computed(row: Row, *operands: Array) -> list[Array]:
    """The outputs of ONNX Runtime's executor."""
    program = one_operation(row).program
    return Binding(make_executor("onnxruntime").prepare(program, MACHINE), program).run(operands)


def of_numpy(row: Row, *operands: Array) -> list[Array]:
    """The outputs of NumPy's executor."""
    program = one_operation(row).program
    return Binding(make_executor("numpy").prepare(program, MACHINE), program).run(operands)


@pytest.mark.parametrize(("op", "function"), [("Max", np.maximum), ("Min", np.minimum)])
def test_extremes_of_whole_numbers_beyond_32_bits(op: str, function: Any) -> None:
    (made,) = computed(Row(op, ["i64[24]", "i64[24]", "i64[]"]), WIDE, OTHER, np.array(-3))
    np.testing.assert_array_equal(made, function(function(WIDE, OTHER), -3))


@pytest.mark.parametrize("bounds", [(-3, 2**40), (2**33, None), (None, -(2**33)), (5, 3)])
def test_clipping_whole_numbers_beyond_32_bits(bounds: tuple[int | None, int | None]) -> None:
    specs = [None if bound is None else "i64[]" for bound in bounds]
    given = [np.array(bound) for bound in bounds if bound is not None]
    (made,) = computed(Row("Clip", ["i64[24]", *specs]), WIDE, *given)
    limits = np.iinfo(np.int64)
    least = limits.min if bounds[0] is None else bounds[0]
    most = limits.max if bounds[1] is None else bounds[1]
    np.testing.assert_array_equal(made, np.minimum(np.maximum(WIDE, least), most))


@pytest.mark.parametrize("kind", ["i8", "i16", "i32", "i64"])
def test_relu_of_whole_numbers(kind: str) -> None:
    """ONNX Runtime has no kernel for some of these types."""
    x = np.array([-128, -1, 0, 1, 127], f"int{kind[1:]}")
    np.testing.assert_array_equal(computed(Row("Relu", [f"{kind}[5]"]), x)[0], [0, 0, 0, 1, 127])


def test_signs_of_whole_numbers_beyond_32_bits() -> None:
    np.testing.assert_array_equal(computed(Row("Sign", ["i64[24]"]), WIDE)[0], np.sign(WIDE))


@pytest.mark.parametrize(
    ("op", "function", "axes", "keepdims"),
    in_turn(
        rows([("ReduceMax", np.max), ("ReduceMin", np.min)]),
        [None, [0], [1, 2], [2, 0], [0, 1, 2]],
        [0, 1],
    ),
)
def test_extremes_along_axes_of_whole_numbers_beyond_32_bits(
    op: str, function: Any, axes: list[int] | None, keepdims: int
) -> None:
    x = WIDE.reshape(3, 4, 2)
    specs = ["i64[3,4,2]", *([] if axes is None else [axes])]
    (made,) = computed(Row(op, specs, {"keepdims": keepdims}), x)
    wanted = function(x, axis=None if axes is None else tuple(axes), keepdims=bool(keepdims))
    np.testing.assert_array_equal(made, wanted)


def test_a_dropout_that_drops_nothing_takes_any_ratio() -> None:
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    y, mask = computed(Row("Dropout", ["f32[2,3]", "f32[]"], {}, 2), x, np.array(7, np.float32))
    np.testing.assert_array_equal(y, x)
    assert mask.all()


def test_zeros_around_an_image_are_pooled_with_numbers_below_zero() -> None:
    def build(b: ComputationGraphBuilder) -> None:
        x = b.input("x", (1, 1, 2, 2), "float32")
        padded = b.op("Pad", x, [0, 0, 1, 0, 0, 0, 0, 0])
        b.output("y", b.op("MaxPool", padded, kernel_shape=(2, 2)))

    x = np.array([[[[-1, -2], [-3, -4]]]], np.float32)
    with stitch.open_device("host", executor="onnxruntime") as device:
        y = one(device.load(model("padded", build, target="host"))(x))
        assert y.numpy().ravel().tolist() == [0, -1]


@pytest.mark.parametrize("executor", ["numpy", "onnxruntime", "auto"])
def test_indices_of_a_floating_type_are_cut_to_whole_numbers(executor: str) -> None:
    """As ONNX says of OneHot; its reference, and ONNX Runtime below 1.32, compare as they are."""

    def build(b: ComputationGraphBuilder) -> None:
        indices = b.input("x", (6,), "float32")
        b.output("y", b.op("OneHot", indices, np.array(3), np.array([0, 1]), axis=-1))

    with stitch.open_device("tiny", executor=executor) as device:
        program = device.load(model("hot", build))
        given = np.array([0.6, 2.9, -0.5, -1.2, np.nan, 3.4e38], np.float32)
        hot = one(program(given)).numpy().argmax(1) - (one(program(given)).numpy().sum(1) == 0)
    np.testing.assert_array_equal(hot, [0, 2, 0, 2, -1, -1])


def test_a_batch_without_momentum_is_free_of_what_ran_before_in_every_run() -> None:
    # The kernel writes over the statistics that it is given.
    rng = np.random.default_rng(3)
    row = Row(
        "BatchNormalization", ["f32[4,3,5]", *["f32[3]"] * 4],
        {"training_mode": 1, "momentum": 0.0}, 3,
    )  # fmt: skip
    program = one_operation(row).program
    binding = Binding(make_executor("onnxruntime").prepare(program, MACHINE), program)
    one, wild = np.ones(3, np.float32), np.array([np.inf, np.nan, -1e38], np.float32)
    for spoiled in (True, False, True):
        x = rng.normal(2, 1, (4, 3, 5)).astype(np.float32)
        x[0, 0, 0] = np.nan if spoiled else 0
        before = [array.copy() for array in (x, one, one, wild, wild)]
        _, mean, variance = binding.run(before)
        for given, kept in zip(before, (x, one, one, wild, wild), strict=True):
            np.testing.assert_array_equal(given, kept)
        assert np.isnan(mean[0]) == spoiled
        np.testing.assert_allclose(mean[1:], x.mean((0, 2))[1:], rtol=1e-5)
        np.testing.assert_allclose(variance[1:], x.var((0, 2))[1:], rtol=1e-5)


@pytest.mark.parametrize("op", ["AveragePool", "LpPool", "MaxPool"])
@pytest.mark.parametrize("padding", ["SAME_LOWER", "SAME_UPPER"])
def test_pools_that_are_dilated_are_padded_for_it(op: str, padding: str) -> None:
    """ONNX Runtime (1.32) counts a window's pads as if it were not dilated."""
    attributes = {"kernel_shape": (2, 3), "dilations": (2, 2), "auto_pad": padding}
    row = Row(op, ["f32[2,3,5,6]"], attributes)
    x = np.arange(180, dtype=np.float32).reshape(2, 3, 5, 6) % 7
    np.testing.assert_allclose(computed(row, x)[0], of_numpy(row, x)[0], rtol=1e-6)


@pytest.mark.parametrize("op", ["AveragePool", "LpPool", "MaxPool"])
def test_pools_without_results_give_none(op: str) -> None:
    """ONNX Runtime (1.32) divides by their number, which ends the process."""
    row = Row(op, ["f32[1,16,1,1]"], {"kernel_shape": (2, 1), "ceil_mode": 1})
    (made,) = computed(row, np.ones((1, 16, 1, 1), np.float32))
    assert made.shape == (1, 16, 0, 1)


@pytest.mark.parametrize("op", ["AveragePool", "LpPool", "MaxPool"])
def test_pools_with_steps_longer_than_their_windows_begin_at_the_first_element(op: str) -> None:
    """ONNX Runtime (1.32) crops for `auto_pad`, or refuses pads below 0 when it runs."""
    attributes = {"kernel_shape": (1,), "strides": (4,), "auto_pad": "SAME_UPPER"}
    (made,) = computed(
        Row(op, ["f32[1,1,8]"], attributes), np.arange(8, dtype=np.float32).reshape(1, 1, 8)
    )
    assert made.ravel().tolist() == [0, 4]


@pytest.mark.parametrize("op", ["Conv", "ConvTranspose"])
def test_convolutions_that_are_dilated_are_padded_for_it(op: str) -> None:
    """ONNX Runtime (1.32) stops when it runs: dilation with `auto_pad`."""
    attributes = {"dilations": (2, 2), "auto_pad": "SAME_UPPER"}
    row = Row(op, ["f32[1,2,6,5]", "f32[2,2,3,3]"], attributes)
    operands = one_operation(row).operands
    np.testing.assert_allclose(
        computed(row, *operands)[0], of_numpy(row, *operands)[0], rtol=1e-4, atol=1e-5
    )


def test_output_padding_of_a_stride_or_more_is_refused_at_load() -> None:
    """ONNX Runtime (1.32) stops when it runs; torch takes what is below a stride or a dilation."""
    attributes = {"dilations": (2, 2), "output_padding": (0, 1)}
    row = Row("ConvTranspose", ["f32[1,4,6,6]", "f32[4,2,3,3]"], attributes)
    x, weight = one_operation(row).operands
    with pytest.raises(CompileError, match="takes output_padding below the strides"):
        computed(row, x, weight)
    wanted = torch.nn.functional.conv_transpose2d(
        torch.from_numpy(x), torch.from_numpy(weight), output_padding=(0, 1), dilation=2
    )
    np.testing.assert_allclose(of_numpy(row, x, weight)[0], wanted, rtol=1e-4, atol=1e-5)


def test_a_clip_bounds_what_the_cell_of_an_lstm_is_given_to() -> None:
    """ONNX Runtime bounds the gates only (onnxruntime#27224)."""
    specs = ["f32[4,1,1]", np.full((1, 4, 1), 9, np.float32), np.zeros((1, 4, 1), np.float32)]
    x = np.ones((4, 1, 1), np.float32)
    row = Row("LSTM", specs, {"clip": 1.0}, 3)
    _, h, c = of_numpy(row, x)
    # The cell grows beyond 1; its tanh is that of 1.
    gate, cell = 1 / (1 + np.exp(-1)), 0.0
    for _ in range(4):
        cell = gate * cell + gate * np.tanh(1)
    np.testing.assert_allclose(c.ravel(), [cell], rtol=1e-5)
    assert cell > 1
    np.testing.assert_allclose(h.ravel(), [gate * np.tanh(1)], rtol=1e-5)
    with pytest.raises(CompileError, match="LSTM differs with 'clip'"):
        computed(row, x)


@pytest.mark.parametrize(
    ("executor", "op", "gates", "states", "steps", "batch"),
    in_turn(
        ["auto", "torch", "numpy"],
        rows([("RNN", 1, 1), ("GRU", 3, 1), ("LSTM", 4, 2)]),
        rows([(3, 0), (0, 2), (0, 0)]),
    ),
)
def test_recurrent_layers_over_nothing_give_their_states(
    executor: str, op: str, gates: int, states: int, steps: int, batch: int
) -> None:
    """ONNX Runtime (1.32) ends the process: `terminate called without an active exception`."""

    def build(b: ComputationGraphBuilder) -> None:
        x = b.input("x", (steps, batch, 3), "float32")
        w, r = (b.parameter(n, integers((1, gates * 2, k))) for n, k in (("w", 3), ("r", 2)))
        given = [b.input(f"s{i}", (1, batch, 2), "float32") for i in range(states)]
        results = b.op(op, x, w, r, None, None, *given, outputs=states + 1)
        for index, result in enumerate(results):
            b.output(f"y{index}", result)

    with stitch.open_device("host", executor=executor) as device:
        program = device.load(model("nothing", build, target="host"))
        given = [np.full((1, batch, 2), 3 + i, np.float32) for i in range(states)]
        y, *last = several(program(np.zeros((steps, batch, 3), np.float32), *given))
        assert y.numpy().shape == (steps, 1, batch, 2)
        for before, after in zip(given, last, strict=True):
            np.testing.assert_array_equal(after.numpy(), before)


@pytest.mark.parametrize("rank", [1, 2])
def test_skips_longer_than_a_row_are_counted_without_an_end(rank: int) -> None:
    """ONNX Runtime looks for every skip that it is asked for."""
    attributes = {
        "ngram_counts": (0, 1), "ngram_indexes": (0, 1), "pool_int64s": (2, 2, 3), "mode": "TF",
        "min_gram_length": 1, "max_gram_length": 2, "max_skip_count": 2**40,
    }  # fmt: skip
    shape = (2, 3)[2 - rank :]
    x = np.resize(np.array([2, 1, 3]), shape)
    (made,) = computed(
        Row("TfIdfVectorizer", [f"i64{list(shape)}".replace(" ", "")], attributes), x
    )
    np.testing.assert_array_equal(made, np.broadcast_to([1, 1], made.shape))


def test_a_window_of_padding_alone_is_refused_at_load() -> None:
    # ONNX Runtime gives the least number of the type there, PyTorch and NumPy's kernel -inf.
    how = {"kernel_shape": (2,), "strides": (2,), "dilations": (2,), "pads": (1, 1)}
    row, x = Row("MaxPool", ["f32[2,3,1]"], how), np.ones((2, 3, 1), np.float32)
    with pytest.raises(CompileError, match="of padding alone is the lowest"):
        computed(row, x)
    np.testing.assert_array_equal(of_numpy(row, x)[0], np.full((2, 3, 1), -np.inf))


@pytest.mark.parametrize("kind", ["i16", "ui16", "ui64", "i1"])
def test_a_choice_among_types_without_a_kernel(kind: str) -> None:
    row = Row("Where", ["i1[4]", f"{kind}[4]", f"{kind}[4]"])
    flags = np.array([True, False, False, True])
    dtype = {"i16": np.int16, "ui16": np.uint16, "ui64": np.uint64, "i1": np.bool_}[kind]
    limits = [0, 1] if kind == "i1" else [np.iinfo(dtype).min, np.iinfo(dtype).max]
    first: Array = np.array([limits[0], limits[1], 1, limits[1]], dtype)
    (made,) = computed(row, flags, first, first[::-1].copy())
    np.testing.assert_array_equal(made, np.where(flags, first, first[::-1]))


@pytest.mark.parametrize("code", [2, 4, 12, 13])
def test_numbers_below_zero_are_cast_to_the_least_unsigned_integer(code: int) -> None:
    """ONNX leaves them open: ONNX Runtime by itself, and C, wrap around or saturate."""
    x = np.array([-1, -2.5, -300, -7e4, -np.inf, np.nan, 3.7, 1e30], np.float32)
    row = Row("Cast", ["f32[8]"], {"to": code})
    (made,), (wanted,) = computed(row, x), of_numpy(row, x)
    assert made.tolist() == wanted.tolist() == [0] * 6 + [3, np.iinfo(made.dtype).max]


def test_a_convolution_of_no_channels_is_its_bias() -> None:
    row = Row("Conv", ["f32[2,0,4,4]", "f32[3,0,2,2]", "f32[3]"])
    nothing = np.zeros((2, 0, 4, 4), np.float32), np.zeros((3, 0, 2, 2), np.float32)
    bias = np.array([1, -2, 3], np.float32)
    (made,) = computed(row, *nothing, bias)
    np.testing.assert_array_equal(made, np.broadcast_to(bias[:, None, None], (2, 3, 3, 3)))


@pytest.mark.parametrize(
    ("row", "said"),
    [
        # It looks at each element of a window: few bytes of a file would keep it for hours.
        (Row("LpPool", ["f32[1,1,4,4]"], {"kernel_shape": (2**31 - 1, 1),
             "auto_pad": "SAME_LOWER", "dilations": (2, 2)}), "a window of 2147483647 elements"),
        (Row("ConvWeightGradient", ["f32[1,1,5]", "f32[1,1,5]"], {"kernel_shape": (65537,),
             "auto_pad": "SAME_UPPER"}, 1, "stitch"), "more than 1024 elements"),
        (Row("LRN", ["f32[2,3,4]"], {"size": 3, "alpha": 0.5}), "windows of at most 7 channels"),
        (Row("LRN", ["f32[2,3,4,4]"], {"size": 2**31 - 1}), "windows of at most 7 channels"),
        (Row("LRN", ["f64[1,2,3,3]"], {"size": 1}), ""), (Row("Det", ["f64[2,2]"]), ""),
        (Row("ReduceProd", ["i64[2,3]"]), ""),
    ],
    ids=lambda each: each.op if isinstance(each, Row) else "",
)  # fmt: skip
def test_what_onnx_runtime_cannot_run_is_refused_at_load(row: Row, said: str) -> None:
    with pytest.raises(CompileError, match=rf"onnxruntime executor cannot run \S*{row.op}.*{said}"):
        make_executor("onnxruntime").check(one_operation(row).program, MACHINE)
