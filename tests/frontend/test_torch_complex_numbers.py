"""Complex numbers are pairs of parts in programs: Fourier transforms and what is computed between
them run there, and results and gradients are those of eager torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import fft, nn

import stitch
from stitch.errors import CompileError
from stitch.torch import explain
from tests.support.grids import every, in_turn
from tests.support.stitched_models import one
from tests.support.torch.compiled import assert_same, compiled, gradients

ALL_PARTS = {"min_operations": 1}
EXECUTORS = ("numpy", "auto", "torch")


def _spectral_layer(x: Any) -> Any:
    waves, low = fft.rfft2(x), torch.linspace(0, 1, 16).view(4, 4)
    kept = torch.zeros_like(waves)
    kept[:, :4, :3] = torch.einsum("bxy,xz->bzy", waves[:, :4, :3], torch.complex(low, 1 - low))
    return fft.irfft2(kept, s=x.shape[-2:])


def _rotary(x: Any) -> Any:
    turns = torch.polar(torch.ones(4, 4), torch.arange(16.0).view(4, 4) / 7)
    pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * turns).flatten(-2)


#: torch 2.11 does not decompose windows.
WINDOW = torch.hann_window(16)


def _frames(x: Any) -> Any:
    return torch.stft(x, 16, 4, window=WINDOW, return_complex=True)


def _out_of_frames(x: Any) -> Any:
    return torch.istft(_frames(x) * 0.5, 16, 4, window=WINDOW)


def _moved(x: Any) -> Any:
    both = torch.cat([torch.complex(x, x * 2), torch.stack([x[1], x[0]]).to(torch.complex64)], -1)
    turned = both.flip(-1).permute(1, 0).contiguous().roll(1, -1)
    wide = turned.unsqueeze(-1).expand(-1, -1, 2).reshape(16, -1)
    return torch.view_as_real(nn.functional.pad(wide[[0, 3]].t(), (1, 2)))


def _written(x: Any) -> Any:
    made = torch.complex(x, x * 2)
    made = made.masked_fill(x > 0, 3 - 1j).index_put((torch.tensor([1, 0]),), made[:2] * 2)
    return torch.where(x < 0.5, made, 1 - 2j).imag


def _of_functions(x: Any) -> Any:
    z = torch.complex(x, x * 2)
    quotient = (z.exp() - 1j) / (2 + z * z.conj()) + z**2 - z.reciprocal()
    return torch.view_as_real(quotient), z.angle(), z.sgn().real, z.sum(-1).abs(), z.mean().imag


def _products(x: Any) -> Any:
    z = torch.complex(x, x.sin())
    return torch.view_as_real(torch.addmm(z, z @ z.mH, z, beta=2, alpha=0.5 + 1j))


def _of_one(x: Any) -> Any:
    z = torch.complex(x, x * 2)
    first, *_ = z.unbind()
    scaled = torch.add(z, z.conj(), alpha=2) - torch.sub(z, z * z, alpha=0.5j)
    product = torch.addmm(z, z, scaled, beta=0)
    return torch.view_as_real(product), first[0].sum().real, z[0, 0].mean().imag


def _normalised(x: Any) -> Any:
    there = fft.fft2(x, norm="ortho") + fft.fft2(x, norm="forward") + fft.fftn(x)
    back = fft.ifft2(there, norm="ortho") + fft.ifft2(there, norm="forward") + fft.ifftn(there)
    return torch.view_as_real(back)


CASES: dict[str, tuple[Callable[..., Any], tuple[int, ...]]] = {
    "a spectrum": (lambda x: fft.rfft(x).abs(), (3, 8)),
    "of odd length and back": (lambda x: fft.irfft(fft.rfft(x) * (2 + 1j), n=7), (3, 7)),
    "padded to a length": (lambda x: fft.irfft(fft.rfft(x, n=16) ** 2, n=16)[..., :8] * 1, (2, 8)),
    "along two axes": (lambda x: fft.fft(fft.fft(x, dim=-1), dim=-2).real * 1, (2, 6, 5)),
    "every normalization": (_normalised, (2, 4, 6)),
    "a hermitian signal": (lambda x: fft.hfft(torch.complex(x, x / 2), n=9), (3, 5)),
    "a spectral layer": (_spectral_layer, (2, 6, 8)),
    "a convolution": (lambda x: fft.irfft(fft.rfft(x) * fft.rfft(x.flip(-1)).conj(), n=8), (3, 8)),
    "frames": (lambda x: _frames(x).abs().pow(2), (2, 64)),
    "out of frames": (_out_of_frames, (2, 64)),
    "rotary positions": (_rotary, (2, 4, 8)),
    "moved": (_moved, (2, 4)),
    "written": (_written, (3, 4)),
    "functions": (_of_functions, (3, 4)),
    "products of matrices": (_products, (4, 4)),
    "one of them, and sums of multiples": (_of_one, (3, 3)),
    "in double": (lambda x: fft.rfft(x.double()).abs(), (3, 8)),
    "compared": (lambda x: x * (torch.complex(x, x) == torch.complex(x, x.abs())), (3, 4)),
}


def _fallbacks(function: Any, *operands: Any) -> dict[str, int]:
    return explain(function, options=ALL_PARTS)(*operands).by_torch


@pytest.mark.parametrize(("name", "executor"), in_turn(CASES, EXECUTORS))
def test_results_and_gradients_are_those_of_eager_torch(name: str, executor: str) -> None:
    function, shape = CASES[name]
    torch.manual_seed(1)
    x = torch.randn(shape)
    run = compiled(function, executor=executor)
    for _ in range(2):
        assert_same(gradients(run, [x]), gradients(function, [x]), strides=False)


@pytest.mark.parametrize("name", every(3, CASES))
def test_programs_run_all_of_it(name: str) -> None:
    function, shape = CASES[name]
    assert _fallbacks(function, torch.randn(shape).requires_grad_()) == {}


@pytest.mark.parametrize("other", [torch.float32, torch.float64, torch.complex128])
def test_numbers_are_compared_in_the_wider_of_their_types(other: Any) -> None:
    def same(x: Any, y: Any) -> Any:
        z = torch.complex(x, x * 0)
        return z == y, y == z, z != y, x == 1 + 1j, x != 1 + 0j

    x = torch.ones(3)
    y = x.to(other) + 1e-12
    assert_same(compiled(same)(x, y), same(x, y))


def test_a_power_of_e_that_leaves_the_range_has_no_imaginary_part_where_there_was_none() -> None:
    z = torch.tensor([100 + 0j, 100 + 1j, -200 + 0j, 1 + 0j])
    assert_same(compiled(torch.exp)(z), z.exp())


def test_bfloat16_is_transformed_in_float32() -> None:
    def mixed(x: Any) -> Any:
        return fft.rfft(x.float()).abs().to(x.dtype) * 2

    x = torch.randn(3, 8, dtype=torch.bfloat16)
    found, wanted = gradients(compiled(mixed), [x]), gradients(mixed, [x])
    for got, want in zip(found, wanted, strict=True):
        torch.testing.assert_close(got, want)


def test_complex_results_and_arguments_are_torchs_tensors() -> None:
    def doubled(z: Any) -> Any:
        return (z * 2).t(), z.conj() + 1

    z = torch.randn(3, 4, dtype=torch.complex64)
    run = compiled(doubled)
    for given in (z, z, z.t(), z.conj(), run(z)[0], run(z)[1]):
        assert_same(run(given), doubled(given), strides=False)
    assert run(z)[0].stride() == doubled(z)[0].stride()


def test_parts_of_a_graph_pass_complex_numbers_through_torch() -> None:
    def through(x: Any) -> Any:
        waves = fft.fft(x) * 2
        return (torch.special.i0(waves.abs()) * waves.cumsum(-1) * 2).real

    x = torch.randn(3, 4)
    assert_same(
        gradients(compiled(through, fallback="torch", min_operations=1), [x]),
        gradients(through, [x]), strides=False,
    )  # fmt: skip
    found = explain(through, options=ALL_PARTS)(x)
    reasons = {row.operator: row.reason for row in found.fallbacks}
    assert reasons["aten.cumsum.default"] == "no lowering for complex numbers"
    assert "aten._fft_c2c.default" not in reasons and "aten._fft_r2c.default" not in reasons


def test_modules_with_complex_buffers_compile_whole() -> None:
    class Rotary(nn.Module):  # type: ignore[misc]  # torch has no types here
        turns: Any

        def __init__(self) -> None:
            super().__init__()
            angles = torch.arange(16.0).view(4, 4) / 7
            self.register_buffer("turns", torch.polar(torch.ones(4, 4), angles))

        def forward(self, x: Any) -> Any:
            pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
            return torch.view_as_real(pairs * self.turns).flatten(-2)

    module, x = Rotary(), torch.randn(2, 4, 8)
    with stitch.open_device("host") as device:
        run = device.load(stitch.compile(module, (x,), target="host"))
        np.testing.assert_allclose(one(run(x.numpy())).numpy(), module(x).numpy(), atol=1e-6)


def test_a_module_that_returns_complex_numbers_is_refused_by_name() -> None:
    class Waves(nn.Module):  # type: ignore[misc]  # torch has no types here
        def forward(self, x: Any) -> Any:
            return fft.fft(x)

    with pytest.raises(CompileError, match="returns a complex tensor") as error:
        stitch.compile(Waves(), (torch.randn(4),))
    assert "view_as_real" in str(error.value)


@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (0, 3)])
def test_numbers_without_axes_and_no_numbers_at_all_are_tensors_too(shape: tuple[int, ...]) -> None:
    z = torch.randn(shape, dtype=torch.complex64)
    assert_same(compiled(lambda z: (z * 2j, z.abs() + 1))(z), (z * 2j, z.abs() + 1))
