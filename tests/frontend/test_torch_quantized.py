"""PyTorch's quantization, as exports and training have it, against eager PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

# It defines the operators `quantized_decomposed`.
import torch.ao.quantization.fx._decomposed
from torch.nn import functional

import stitch
from stitch.errors import CompileError
from tests.support.grids import every, in_turn, rows

quantized = torch.ops.quantized_decomposed
EXECUTORS = ("numpy", "onnxruntime", "auto")
SCALES = torch.tensor([0.037, 0.125, 0.0101, 0.2])
ZEROS = torch.tensor([0, 3, -5, 2])


class Module(torch.nn.Module):  # type: ignore[misc]  # torch has no types here
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *arguments: Any) -> Any:
        return self.function(*arguments)


def numbers(shape: Sequence[int] = (3, 4, 32), step: float = 0.037) -> torch.Tensor:
    """Normal numbers, and many that lie between two steps or outside of all ranges."""
    drawn = torch.randn(tuple(shape), generator=torch.Generator().manual_seed(0)) * 3
    ties = torch.arange(drawn.numel()).reshape(drawn.shape).sub(200) * step / 2
    return torch.where(torch.arange(shape[-1]) % 2 == 0, drawn, ties)


def assert_equal(function: Callable[..., Any], *given: torch.Tensor,
                 executors: Sequence[str] = EXECUTORS) -> None:  # fmt: skip
    """Every bit is eager's."""
    wanted = function(*given)
    wanted = wanted if isinstance(wanted, tuple) else (wanted,)
    compiled = stitch.compile(Module(function), given)
    for executor in executors:
        with stitch.open_device("wormhole_n150", executor=executor) as device:
            made = device.load(compiled)(*given)
            made = made if isinstance(made, tuple) else (made,)
            for mine, eager in zip(made, wanted, strict=True):
                np.testing.assert_array_equal(mine.numpy(), eager.numpy(), err_msg=executor)


@pytest.mark.parametrize(
    ("scale", "dtype", "least", "most", "zero"),
    in_turn(
        [0.037, 0.25],
        rows(
            [
                (torch.uint8, 0, 255, 128),
                (torch.int8, -128, 127, 0),
                (torch.int8, -127, 127, 5),
                (torch.uint8, 0, 127, 60),
                (torch.uint8, 0, 15, 7),
                (torch.int16, -100, 100, 3),
                (torch.int32, -1000, 1000, 7),
            ]
        ),
    ),
)
def test_tensors_are_quantized_as_by_eager_torch(
    dtype: torch.dtype, least: int, most: int, zero: int, scale: float
) -> None:
    how = (scale, zero, least, most, dtype)

    def both(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        made = quantized.quantize_per_tensor(x, *how)
        return made, quantized.dequantize_per_tensor(made, *how)

    assert_equal(both, numbers(step=scale))


@pytest.mark.parametrize("scales", [SCALES, SCALES.double()], ids=["float32", "float64"])
@pytest.mark.parametrize(
    ("dtype", "least", "most"),
    [(torch.int8, -128, 127), (torch.int8, -7, 7), (torch.int32, -99, 99)],
)
def test_channels_are_quantized_as_by_eager_torch(
    dtype: torch.dtype, least: int, most: int, scales: torch.Tensor
) -> None:
    def both(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        made = quantized.quantize_per_channel(x, scales, ZEROS, 1, least, most, dtype)
        return (
            made,
            quantized.dequantize_per_channel(made, scales, ZEROS, 1, least, most, dtype),
            quantized.dequantize_per_channel(made, scales, None, 1, least, most, dtype),
        )

    assert_equal(both, numbers())


@pytest.mark.parametrize("choose", ["choose_qparams", "choose_qparams_symmetric"])
def test_parameters_that_are_chosen_while_it_runs_are_those_of_eager_torch(choose: str) -> None:
    def dynamic(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        scale, zero = getattr(quantized, choose)(x, -127, 127, 1e-6, torch.int8)
        made = quantized.quantize_per_tensor(x, scale, zero, -127, 127, torch.int8)
        return (
            scale,
            zero,
            made,
            quantized.dequantize_per_tensor(made, scale, zero, -127, 127, torch.int8),
        )

    assert_equal(dynamic, numbers())


def test_fake_quantization_gives_what_eager_torch_gives() -> None:
    assert_equal(
        lambda x: (
            torch.fake_quantize_per_tensor_affine(x, 0.037, 3, 0, 255),
            torch.fake_quantize_per_tensor_affine(
                x, torch.tensor(0.037), torch.tensor(3, dtype=torch.int32), 0, 15
            ),
            torch.fake_quantize_per_channel_affine(x, SCALES, ZEROS.int(), 1, -128, 127),
        ),
        numbers(),
    )


def test_gradients_of_fake_quantization_are_those_of_eager_torch() -> None:
    """As torch.compile takes a step of quantization-aware training."""

    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.fake_quantize_per_tensor_affine(x * 2, 0.037, 3, 0, 15).square().sum()

    x, y = (numbers().requires_grad_() for _ in range(2))
    function(x).backward()
    torch.compile(function, backend="stitch")(y).backward()
    assert x.grad is not None
    assert y.grad is not None
    np.testing.assert_allclose(y.grad.numpy(), x.grad.numpy(), rtol=1e-6)


class Converted(torch.nn.Module):  # type: ignore[misc]  # torch has no types here
    """A network as PT2E converts it: int8 weights by channel, int8 activations by tensor."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.register_buffer("kernel", torch.randint(-127, 128, (4, 3, 3, 3), dtype=torch.int8))
        self.register_buffer("weight", torch.randint(-127, 128, (5, 4), dtype=torch.int8))
        self.register_buffer("scales", torch.rand(4) * 0.01 + 0.001)
        self.register_buffer("zeros", torch.zeros(4, dtype=torch.int64))

    def between(self, x: torch.Tensor, scale: float, zero: int) -> torch.Tensor:
        made = quantized.quantize_per_tensor(x, scale, zero, -128, 127, torch.int8)
        return quantized.dequantize_per_tensor(made, scale, zero, -128, 127, torch.int8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kernel = quantized.dequantize_per_channel(
            self.kernel, self.scales, self.zeros, 0, -127, 127, torch.int8
        )
        weight = quantized.dequantize_per_tensor(self.weight, 0.01, 0, -127, 127, torch.int8)
        x = self.between(x, 0.03, 3)
        x = self.between(functional.relu(functional.conv2d(x, kernel, padding=1)), 0.05, -128)
        x = self.between(functional.max_pool2d(x, 2), 0.05, -128)
        return self.between(functional.linear(x.mean((2, 3)), weight), 0.02, 0)


@pytest.mark.parametrize("executor", every(2, [*EXECUTORS, "torch"]))
def test_a_converted_network_gives_what_eager_torch_gives(executor: str) -> None:
    """Within one step: sums of a convolution are taken in another order."""
    module = Converted().eval()
    x = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    with stitch.open_device("wormhole_n150", executor=executor) as device:
        made = device.load(stitch.compile(module, (x,)))(x)
        assert isinstance(made, stitch.Tensor)
        np.testing.assert_allclose(made.numpy(), module(x).numpy(), atol=0.02 * 1.001)


def test_zero_points_of_real_numbers_are_refused() -> None:
    def function(x: torch.Tensor) -> Any:
        return quantized.quantize_per_channel(x, SCALES, ZEROS.float(), 1, 0, 255, torch.uint8)

    with pytest.raises(CompileError, match="floating-point zero points"):
        stitch.compile(Module(function), (numbers(),))
