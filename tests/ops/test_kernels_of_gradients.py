"""Stitch's own operators of backward passes, and what gradients need of the others' kernels."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from stitch.errors import CompileError
from stitch.ops import bind, convolution, evaluate, lookup, resolve_attributes
from stitch.ops.windows import Windows, pool_windows
from stitch.program import Array
from tests.support.grids import in_turn, named


def drawn(*shape: int, seed: int = 0) -> Array:
    return np.asarray(np.random.default_rng(seed).normal(0, 1, shape)).astype(np.float32)


def run_twice_into(op: str, inputs: list[Array], outs: list[Array], **attributes: Any) -> None:
    """The second run of one binding, over spoiled outputs."""
    steps = bind(op, inputs, outs, domain="stitch", attributes=attributes)
    for _ in range(2):
        for out in outs:
            out[...] = np.nan
        with np.errstate(all="ignore"):
            for step in steps:
                step()


def run_twice(op: str, inputs: list[Array], out: Array, **attributes: Any) -> Array:
    """The only result of the second run of one binding."""
    run_twice_into(op, inputs, [out], **attributes)
    return out


@pytest.mark.parametrize("size", [6, 24], ids=["few places", "many places"])
def test_the_weights_gradient_is_that_of_torch_in_every_run(size: int) -> None:
    x, gradient = drawn(9, 4, size, size), drawn(9, 6, size, size, seed=1)
    made = run_twice(
        "ConvWeightGradient", [x, gradient], np.empty((6, 2, 3, 3), np.float32),
        kernel_shape=(3, 3), pads=(1, 1, 1, 1), group=2,
    )  # fmt: skip
    expected = torch.nn.grad.conv2d_weight(
        torch.from_numpy(x), (6, 2, 3, 3), torch.from_numpy(gradient), padding=1, groups=2
    )
    np.testing.assert_allclose(made, expected.numpy(), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("columns", [1, 1 << 19])
@pytest.mark.parametrize("short", [0, 1 << 20])
@pytest.mark.parametrize(("samples", "channels", "filters", "size", "group"), [
    (1, 32, 64, 3, 1), (7, 32, 64, 3, 1), (3, 8, 4, 5, 2), (5, 2, 3, 6, 1),
    # As many filters as elements of a filter: both ways that sums lie have one shape.
    (4, 4, 36, 3, 1), (3, 4, 36, 17, 1), (3, 4, 36, 5, 2)
])  # fmt: skip
def test_the_weights_gradient_is_the_same_however_its_product_lies(
    samples: int, channels: int, filters: int, size: int, group: int, short: int, columns: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(convolution, "SHORT_PRODUCT", short)
    monkeypatch.setattr(convolution, "GRADIENT_COLUMNS_NBYTES", columns)
    x, gradient = drawn(samples, channels, size, size), drawn(samples, filters, size, size, seed=1)
    shape = (filters, channels // group, 3, 3)
    made = run_twice(
        "ConvWeightGradient", [x, gradient], np.empty(shape, np.float32),
        kernel_shape=(3, 3), pads=(1, 1, 1, 1), group=group,
    )  # fmt: skip
    expected = torch.nn.grad.conv2d_weight(
        torch.from_numpy(x), shape, torch.from_numpy(gradient), padding=1, groups=group
    )
    np.testing.assert_allclose(made, expected.numpy(), rtol=1e-4, atol=1e-4)


def test_a_weights_gradient_over_no_samples_is_zero() -> None:
    made = run_twice(
        "ConvWeightGradient",
        [drawn(0, 2, 4, 4), drawn(0, 3, 3, 3)],
        np.empty((3, 2, 2, 2), np.float32),
        kernel_shape=(2, 2),
    )
    assert not made.any()


def test_a_gradient_that_does_not_fit_its_convolution_is_refused() -> None:
    with pytest.raises(CompileError, match="does not match the input"):
        evaluate(
            "ConvWeightGradient", [drawn(2, 2, 4, 4), drawn(2, 3, 4, 4)],
            domain="stitch", attributes={"kernel_shape": (2, 2)},
        )  # fmt: skip


@pytest.mark.parametrize("stride", [1, 2, 3])
def test_a_pools_gradient_is_that_of_torch_in_every_run(stride: int) -> None:
    x = drawn(5, 3, 9, 8)
    given = torch.from_numpy(x).requires_grad_()
    pooled = F.max_pool2d(given, 3, stride, 1)
    gradient = drawn(*pooled.shape, seed=1)
    (expected,) = torch.autograd.grad(pooled, given, torch.from_numpy(gradient))
    made = run_twice(
        "MaxPoolGradient", [gradient, x, pooled.detach().numpy()], np.empty_like(x),
        kernel_shape=(3, 3), strides=(stride, stride), pads=(1, 1, 1, 1),
    )  # fmt: skip
    np.testing.assert_allclose(made, expected.numpy(), rtol=1e-5, atol=1e-6)


def first_maxima(x: Array, windows: Windows) -> Array:
    """How often each place is the first of a window's maxima, by looking at every place; windows
    with a NaN have none."""
    counts = np.zeros(x.shape, np.float64)
    for plane in np.ndindex(*x.shape[:2]):
        for window in np.ndindex(*windows.output):
            seen = []
            for tap in np.ndindex(*windows.kernel):
                place = tuple(
                    w * s - b + t * d
                    for w, s, b, t, d in zip(
                        window, windows.strides, windows.begin, tap, windows.dilations, strict=True
                    )
                )
                is_there = all(0 <= p < n for p, n in zip(place, windows.size, strict=True))
                seen.append(plane + place if is_there else None)
            # Padding is -inf: what is no larger comes behind it.
            values = np.array([-np.inf if p is None else x[p] for p in seen])
            first = seen[int(values.argmax())]
            if first is not None and not np.isnan(values).any():
                counts[first] += 1
    return counts


@pytest.mark.parametrize(
    ("dtype", "attributes"),
    in_turn(
        [np.float32, np.float64],
        named(
            lambda attributes: "".join(f"{k[0]}{v}" for k, v in attributes.items()),
            [
                {"kernel_shape": (2, 2), "strides": (2, 2)},
                {"kernel_shape": (2, 3), "strides": (3, 3), "dilations": (2, 1)},
                {"kernel_shape": (3, 3), "pads": (1, 1, 1, 1)},
                {"kernel_shape": (3, 2), "strides": (2, 1), "pads": (1, 0, 0, 1), "ceil_mode": 1},
                {"kernel_shape": (2, 2), "strides": (3, 2), "ceil_mode": 1},
                {"kernel_shape": (1, 1), "strides": (2, 2)},
                {"kernel_shape": (3, 3), "auto_pad": "SAME_LOWER", "strides": (2, 2)},
            ],
        ),
    ),
)
def test_each_gradient_goes_to_the_first_of_the_maxima(
    attributes: dict[str, Any], dtype: Any
) -> None:
    # Few numbers, so that many are equal; infinities; NaN in some windows.
    x = np.random.default_rng(1).integers(-2, 2, (6, 3, 9, 300)).astype(dtype)
    x[0, 0, 3, 3] = x[5, 2, 8, 7] = np.nan
    x[1, 1, :4, :4], x[2, 2, 5] = -np.inf, np.inf
    windows = pool_windows(resolve_attributes(lookup("MaxPool"), attributes), x.shape[2:])
    (y,) = evaluate("MaxPool", [x], attributes=attributes)
    # Ones are added exactly, and a NaN's gradient goes nowhere, whatever it is.
    gradient = np.where(np.isnan(y), np.inf, 1).astype(dtype)
    made = run_twice("MaxPoolGradient", [gradient, x, y], np.empty_like(x), **attributes)
    np.testing.assert_array_equal(made, first_maxima(x, windows))


def test_a_pools_gradient_needs_the_shapes_of_its_pool() -> None:
    with pytest.raises(CompileError, match="wrong shape"):
        evaluate(
            "MaxPoolGradient", [drawn(1, 1, 3), drawn(1, 1, 4), drawn(1, 1, 2)],
            domain="stitch", attributes={"kernel_shape": (2,), "strides": (2,)},
        )  # fmt: skip


@pytest.mark.parametrize("approximate", ["none", "tanh"])
@pytest.mark.parametrize("size", [7, 40_000])
def test_a_gelus_gradient_is_that_of_torch(approximate: str, size: int) -> None:
    x, gradient = drawn(size), drawn(size, seed=1)
    given = torch.from_numpy(x).requires_grad_()
    made = F.gelu(given, approximate=approximate)
    (expected,) = torch.autograd.grad(made, given, torch.from_numpy(gradient))
    out = run_twice("GeluGradient", [gradient, x], np.empty_like(x), approximate=approximate)
    np.testing.assert_allclose(out, expected.numpy(), rtol=1e-4, atol=2e-6)


@pytest.mark.parametrize("shape", [(3, 5), (40, 7, 300), (2, 40_000)])
def test_a_layers_gradient_is_that_of_torch_though_its_mean_is_far_from_zero(
    shape: tuple[int, ...],
) -> None:
    x, gradient, scale = drawn(*shape) + 50, drawn(*shape, seed=1), drawn(shape[-1], seed=2)
    given = [torch.from_numpy(a).double().requires_grad_() for a in (x, scale, 0 * scale)]
    y = F.layer_norm(given[0], shape[-1:], given[1], given[2])
    expected = torch.autograd.grad(y, given, torch.from_numpy(gradient).double())
    wide = x.astype(np.float64)
    mean = wide.mean(-1, keepdims=True)
    inverse = 1 / np.sqrt(wide.var(-1, keepdims=True) + 1e-5)
    operands = [gradient, x, mean.astype(np.float32), inverse.astype(np.float32), scale]
    outs = [np.empty(a.shape, np.float32) for a in (x, scale, scale)]
    run_twice_into("LayerNormalizationGradient", operands, outs)
    for out, right in zip(outs, expected, strict=True):
        np.testing.assert_allclose(out, right.numpy(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "shape", [(4, 3), (50, 1), (300,), (3, 5, 6, 7), (9, 40, 30, 31), (2, 3, 40_000)]
)
def test_a_batchs_gradient_is_that_of_torch_though_its_means_are_far_from_zero(
    shape: tuple[int, ...],
) -> None:
    channels = shape[1] if len(shape) > 1 else 1
    x, gradient, scale = drawn(*shape) + 50, drawn(*shape, seed=1), drawn(channels, seed=2)
    given = [torch.from_numpy(a).double().requires_grad_() for a in (x, scale, 0 * scale)]
    planes = given[0].reshape(shape[0], channels, -1)
    y = F.batch_norm(planes, None, None, given[1], given[2], training=True).reshape(shape)
    expected = torch.autograd.grad(y, given, torch.from_numpy(gradient).double())
    outs = [np.empty(a.shape, np.float32) for a in (x, scale, scale)]
    run_twice_into("BatchNormalizationGradient", [gradient, x, scale], outs)
    for out, right in zip(outs, expected, strict=True):
        np.testing.assert_allclose(out, right.numpy(), rtol=1e-4, atol=2e-4)


def test_a_batchs_gradient_over_no_samples_is_zero() -> None:
    nothing = drawn(0, 4, 2)
    found = evaluate(
        "BatchNormalizationGradient", [nothing, nothing, drawn(4)], domain="stitch", outputs=3
    )
    assert [f.tolist() for f in found] == [[], [0.0] * 4, [0.0] * 4]


def test_a_batchs_gradient_needs_a_scale_for_each_channel() -> None:
    x = drawn(3, 4, 5)
    with pytest.raises(CompileError, match="wrong shape"):
        evaluate("BatchNormalizationGradient", [x, x, drawn(3)], domain="stitch")


def test_a_layers_gradient_over_no_rows_is_zero() -> None:
    nothing, row, scale = drawn(0, 4), drawn(0, 1), drawn(4)
    found = evaluate(
        "LayerNormalizationGradient", [nothing, nothing, row, row, scale],
        domain="stitch", outputs=3,
    )  # fmt: skip
    assert [f.tolist() for f in found] == [[], [0.0] * 4, [0.0] * 4]


def test_a_layers_gradient_needs_the_shapes_of_its_layer() -> None:
    x, row = drawn(3, 4), drawn(3, 1)
    with pytest.raises(CompileError, match="wrong shape"):
        evaluate("LayerNormalizationGradient", [x, x, row, row, drawn(3)], domain="stitch")


ODD = np.array([np.nan, np.inf, -np.inf, -0.0, 0.0, 1e-45, 3.5], np.float32)


@pytest.mark.parametrize("data_type", [np.float32, np.float64, np.int8, np.int64, np.bool_])
def test_where_keeps_every_bit(data_type: Any) -> None:
    with np.errstate(all="ignore"):
        x = ODD.astype(data_type)
    y, condition = x[::-1].copy(), np.arange(x.size) % 2 == 0
    made = evaluate("Where", [condition, x, y])[0]
    assert made.tobytes() == np.where(condition, x, y).tobytes()


def test_where_drops_what_is_infinite_beside_a_zero() -> None:
    condition = np.array([False, False, True])
    x, zero = np.array([np.inf, np.nan, 2], np.float32), np.zeros((), np.float32)
    assert evaluate("Where", [condition, x, zero])[0].tolist() == [0, 0, 2]
    assert evaluate("Where", [~condition, zero, x])[0].tolist() == [0, 0, 2]


def test_a_zero_that_may_change_is_read_in_every_run() -> None:
    condition, x = np.array([True, False]), np.array([1, 2], np.float32)
    y, out = np.zeros(1, np.float32), np.empty(2, np.float32)
    steps = bind("Where", [condition, x, y], [out])
    for number in (0.0, 7.0):
        y[...] = number
        for step in steps:
            step()
        assert out.tolist() == [1, number]


@pytest.mark.parametrize("reduction", ["add", "mul", "max", "min"])
@pytest.mark.parametrize("width", [3, 40])
def test_rows_that_meet_are_reduced_in_order(reduction: str, width: int) -> None:
    data, updates = drawn(4, width), drawn(5, width, seed=1)
    places = np.array([[2], [0], [2], [2], [-1]])
    made = evaluate("ScatterND", [data, places, updates], attributes={"reduction": reduction})[0]
    expected = data.copy()
    function = {"add": np.add, "mul": np.multiply, "max": np.maximum, "min": np.minimum}[reduction]
    for place, update in zip(places[:, 0], updates, strict=True):
        expected[place] = function(expected[place], update)
    assert made.tobytes() == expected.tobytes()
