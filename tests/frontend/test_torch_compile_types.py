"""Training through torch.compile in narrow and double precision, and under autocast."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from stitch.errors import InternalError
from stitch.frontend.torch.aten_call import Call
from stitch.frontend.torch.compile import without_onednn
from stitch.frontend.torch.lowering import LOWERINGS
from stitch.frontend.torch.tensor_bytes import tensor_on
from stitch.graph import SymbolicTensor
from stitch.program import DataType
from tests.support.grids import every, in_turn
from tests.support.torch.agreement import tensors_of
from tests.support.torch.architectures import ARCHITECTURES, made
from tests.support.torch.compiled import compiled, without_dropout


@dataclass(frozen=True, slots=True)
class Precision:
    """A type of a module's parameters and examples, or one that autocast computes in.

    `tolerance`: how far results and gradients may be from eager torch's, as a part of the largest.
    Sixteen roundings of narrow types.
    """

    dtype: Any
    tolerance: float
    is_autocast: bool = False

    def autocast(self) -> AbstractContextManager[Any]:
        """What forward passes run under."""
        return torch.autocast("cpu", dtype=self.dtype) if self.is_autocast else nullcontext()

    def converted(self, value: Any) -> Any:
        """A module or examples in this type."""
        if self.is_autocast:
            return value
        if isinstance(value, nn.Module):
            return value.to(self.dtype)
        return pytree.tree_map(
            lambda t: (
                t.to(self.dtype) if isinstance(t, torch.Tensor) and t.is_floating_point() else t
            ),
            value,
        )


PRECISIONS = {
    "bfloat16": Precision(torch.bfloat16, 2.0**-5),
    "float16": Precision(torch.float16, 2.0**-8),
    "float64": Precision(torch.float64, 1e-12),
    "autocast bfloat16": Precision(torch.bfloat16, 2.0**-5, True),
    "autocast float16": Precision(torch.float16, 2.0**-8, True),
}


class Attention(nn.Module):  # type: ignore[misc]  # torch has no types here
    """Scaled dot product attention alone, of queries, keys and values that are parameters."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.parts = nn.Parameter(torch.randn(3, 2, 2, 6, 8))
        self.options = options

    def forward(self, factor: Any) -> Any:
        query, key, value = self.parts * factor
        return F.scaled_dot_product_attention(query, key, value, **self.options)


def _encoder_layer() -> nn.Module:
    return nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)


ONE = torch.ones(())
ALONE: dict[str, Callable[[], tuple[nn.Module, Any]]] = {
    "LayerNorm": lambda: (nn.LayerNorm(6), (torch.randn(4, 3, 6),)),
    "attention": lambda: (Attention(), (ONE,)),
    "causal attention": lambda: (Attention(is_causal=True), (ONE,)),
    "encoder layer": lambda: (_encoder_layer(), (torch.randn(2, 5, 8),)),
}


#: They compute some of their parts in float32, whatever type they have, and what that leaves.
WIDE_INSIDE = {
    "Llama": 1e-6, "Mistral": 1e-6, "Qwen2": 1e-6, "T5": 1e-6,
    # ONNX Runtime has the epsilon of a normalization by batches in float32.
    "CNN": 1e-9, "ResNet": 1e-9,
}  # fmt: skip


def _matrix() -> list[Any]:
    """Each architecture in each type; the quick suite has every eighth in one, which goes round."""
    quick = {name: place % len(PRECISIONS) for place, name in enumerate(list(ARCHITECTURES)[::8])}
    return [
        pytest.param(
            name, kind, marks=() if turn == quick.get(name) else pytest.mark.campaign("networks")
        )
        for name in ARCHITECTURES
        for turn, kind in enumerate(PRECISIONS)
    ]


def _smooth(module: nn.Module) -> None:
    """Without kinks and maxima: there a rounding more or less turns whole gradients."""
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.ReLU):
                setattr(parent, name, nn.SiLU())
            if isinstance(child, nn.MaxPool2d):
                sizes = child.kernel_size, child.stride, child.padding
                setattr(parent, name, nn.AvgPool2d(*sizes))
        if isinstance(parent, nn.TransformerEncoderLayer | nn.TransformerDecoderLayer):
            parent.activation = F.silu


@dataclass(frozen=True, slots=True)
class Step:
    """What one step of training gave: a loss, results, gradients (None where there is none)."""

    results: list[Any]
    gradients: list[Any]


def _step(module: nn.Module, run: Any, examples: Any, precision: Precision) -> Step:
    inputs = pytree.tree_map(
        lambda t: t.detach().clone().requires_grad_(t.is_floating_point()), examples
    )
    with precision.autocast():
        made = tensors_of(run(**inputs) if isinstance(inputs, dict) else run(*inputs))
    results = [r for r in made if r.requires_grad]
    # In a type that adds nothing to their error.
    loss = sum(
        (r.double() * torch.linspace(0.5, 1.5, r.numel()).view(r.shape)).mean() for r in results
    )
    loss.backward()
    owners = [*module.parameters(), *tensors_of(inputs)]
    return Step([loss.detach(), *(r.detach() for r in results)], [o.grad for o in owners])


def _assert_near(found: list[Any], wanted: list[Any], tolerance: float) -> None:
    """The same types and shapes, and numbers that differ by a part of the largest at most."""
    largest = max(float(w.double().abs().max()) for w in wanted if w is not None)
    for got, want in zip(found, wanted, strict=True):
        assert (got is None) == (want is None)
        if want is not None:
            assert (got.dtype, got.shape) == (want.dtype, want.shape)
            assert (got.double() - want.double()).abs().max() <= tolerance * largest


def _assert_trains_as_eager(
    module: nn.Module, examples: Any, name: str, least: float = 0.0, **options: Any
) -> None:
    precision = PRECISIONS[name]
    tolerance = max(precision.tolerance, least)
    module, examples = precision.converted(module.train()), precision.converted(examples)
    without_dropout(module)
    _smooth(module)
    twin = copy.deepcopy(module)
    wanted = _step(twin, twin, examples, precision)
    found = _step(module, compiled(module, **options), examples, precision)
    _assert_near(found.results, wanted.results, tolerance)
    _assert_near(found.gradients, wanted.gradients, tolerance)


@pytest.mark.parametrize(("name", "precision"), in_turn(ALONE, PRECISIONS))
def test_a_layer_alone_trains_as_in_eager_torch(name: str, precision: str) -> None:
    torch.manual_seed(0)
    _assert_trains_as_eager(*ALONE[name](), precision)


@pytest.mark.parametrize(("name", "precision"), _matrix())
def test_an_architecture_trains_as_in_eager_torch(name: str, precision: str) -> None:
    # Its LSTM of float16 is not on every processor.
    with without_onednn():
        _assert_trains_as_eager(*made(name), precision, WIDE_INSIDE.get(name, 0.0))


def test_a_lowering_that_breaks_torchs_promise_is_an_internal_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def narrowed(call: Call, x: SymbolicTensor) -> SymbolicTensor:
        return call.builder.cast(x, DataType.BFLOAT16)

    monkeypatch.setitem(LOWERINGS, torch.ops.aten.tanh.default, narrowed)
    with pytest.raises(BackendCompilerFailed, match=r"operator aten\.tanh\.default") as caught:
        compiled(lambda x: torch.tanh(x))(torch.ones(2, 3))
    found = caught.value.inner_exception
    assert isinstance(found, InternalError)
    assert str(found.where).startswith("test_torch_compile_types.py:")
    assert (found.expected, found.got) == ("2x3xf32", "2x3xbf16")


def test_bits_of_one_type_are_never_read_as_another() -> None:
    with pytest.raises(InternalError, match="another type than its tensor in torch"):
        tensor_on(np.ones(4, np.float32), torch.bfloat16)
    with pytest.raises(InternalError, match="another type than its tensor in torch"):
        tensor_on(np.ones(4, np.float32), torch.int32)
    half = np.ones(4, DataType.BFLOAT16.dtype)
    assert torch.equal(tensor_on(half, torch.bfloat16), torch.ones(4, dtype=torch.bfloat16))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_a_logarithm_near_one_keeps_its_digits(dtype: Any) -> None:
    x = torch.tensor([1e-12, -1e-7, 1e-3, 0.5, 3e20, 0.0, -1.0, torch.inf, -2.0], dtype=dtype)
    near = {"atol": 0.0, "rtol": 4 * torch.finfo(dtype).eps, "equal_nan": True}
    torch.testing.assert_close(compiled(torch.log1p)(x), torch.log1p(x), **near)


def test_the_wide_statistics_of_batches_train_under_autocast_as_in_eager_torch() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(2, 6, 3), nn.BatchNorm2d(6), nn.GroupNorm(2, 6), nn.SiLU())
    _assert_trains_as_eager(net, (torch.randn(3, 2, 7, 7),), "autocast bfloat16")


@pytest.mark.parametrize("narrow", every(2, [False, True]))
def test_steps_that_a_scaler_skips_are_those_that_it_skips_in_eager_torch(narrow: bool) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 3))
    twin, labels = copy.deepcopy(module), torch.tensor([0, 2, 1, 0, 1, 2])

    def scales(network: nn.Module, run: Any) -> list[float]:
        scaler, found = torch.amp.GradScaler("cpu", init_scale=2.0**30, growth_interval=3), []
        optimizer = torch.optim.SGD(network.parameters(), 0.1, momentum=0.9)
        generator = torch.Generator().manual_seed(1)
        for number in range(12):
            x = torch.randn(6, 8, generator=generator)
            with torch.autocast("cpu", torch.bfloat16, enabled=narrow):
                # Of some steps the scaled gradients overflow, and by far.
                loss = F.cross_entropy(run(x), labels) * (1e38 if number in (1, 7) else 1)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(network.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            found.append(scaler.get_scale())
        return found

    wanted = scales(twin, twin)
    assert wanted[1] < wanted[0] and wanted[4] > wanted[3], "some are skipped, others taken"
    assert scales(module, compiled(module)) == wanted
    found, expected = ([p.detach() for p in m.parameters()] for m in (module, twin))
    _assert_near(found, expected, 2.0**-5 if narrow else 1e-6)


@pytest.mark.parametrize("precision", every(2, ["bfloat16", "float64"]))
def test_an_encoder_layer_on_a_device_with_dram_trains_as_in_eager_torch(precision: str) -> None:
    torch.manual_seed(0)
    module, examples = ALONE["encoder layer"]()
    _assert_trains_as_eager(module, examples, precision, target="wormhole_n150")


@pytest.mark.parametrize("executor", every(2, ["numpy", "onnxruntime"]))
def test_a_layer_in_double_precision_keeps_its_digits_in_every_executor(executor: str) -> None:
    torch.manual_seed(0)
    _assert_trains_as_eager(*ALONE["LayerNorm"](), "float64", executor=executor)
