"""Operators that ONNX defines by functions, on axes of 1 and 0, beside ONNX Runtime and PyTorch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import Random
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import helper, numpy_helper

import stitch
from stitch.program import Array
from tests.support.grids import in_turn
from tests.support.run_seed import SEED

#: Operands, those that are constants, attributes, number of results, opset.
Case = tuple[list[Array | None], list[Array], dict[str, Any], int, int]


def function_model(op: str, case: Case) -> tuple[Any, dict[str, Array]]:
    """The model of one node, and what it is fed."""
    operands, constants, attributes, outputs, opset = case
    names = [f"x{i}" if a is not None else "" for i, a in enumerate(operands)]
    fixed = [f"c{i}" for i in range(len(constants))]
    feeds = {n: a for n, a in zip(names, operands, strict=True) if a is not None}
    graph = helper.make_graph(
        [helper.make_node(op, names + fixed, [f"y{i}" for i in range(outputs)], **attributes)],
        "function",
        [
            helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(a.dtype), a.shape)
            for n, a in feeds.items()
        ],
        [helper.make_empty_tensor_value_info(f"y{i}") for i in range(outputs)],
        [numpy_helper.from_array(a, n) for a, n in zip(constants, fixed, strict=True)],
    )
    opsets = [helper.make_opsetid("", opset)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    return onnx.shape_inference.infer_shapes(model), feeds


def results(model: Any, feeds: Mapping[str, Array]) -> list[Array]:
    made = stitch.compile(model)(*feeds.values())
    return [tensor.numpy() for tensor in (made if isinstance(made, tuple) else (made,))]


class Functions:
    """Random nodes of operators that are functions; lengths are often 1, and 0 with `zeros`."""

    def __init__(self, seed: str, zeros: float) -> None:
        self.random, self.zeros = Random(seed), zeros
        self.numbers = np.random.default_rng(self.random.randrange(1 << 30))

    def length(self, most: int = 4, least: int = 0) -> int:
        if not least and self.random.random() < self.zeros:
            return 0
        return 1 if self.random.random() < 0.35 else self.random.randint(1, most)

    def real(self, *shape: int) -> Array:
        return self.numbers.normal(size=shape).astype(np.float32)

    def shape(self, low: int, high: int) -> list[int]:
        return [self.length() for _ in range(self.random.randint(low, high))]

    def window(self) -> Case:
        flags = {"periodic": self.random.choice((0, 1)), "output_datatype": 1}
        return [], [np.array(self.random.choice((1, 2, 3, 8)))], flags, 1, 17

    def loss(self) -> Case:
        n, c, rest = self.length(least=1), self.length(least=1), [self.length(least=1)]
        labels = self.numbers.integers(0, c, (n, *rest))
        operands = [self.real(n, c, *rest), labels]
        if self.random.random() < 0.5:
            operands.append(abs(self.real(c)) + 0.1)
        word = self.random.choice(("none", "mean", "sum"))
        return list(operands), [], {"reduction": word}, 1, 13

    def crop(self) -> Case:
        shape = self.shape(1, 3)
        axes = sorted(self.random.sample(range(len(shape)), self.random.randint(1, len(shape))))
        wanted = np.array([self.length(7) for _ in axes])
        return [self.real(*shape)], [wanted], {"axes": axes}, 1, 18

    def shrink(self) -> Case:
        return [self.real(*self.shape(0, 3))], [], {"bias": 0.25, "lambd": 0.5}, 1, 9

    def rotary(self) -> Case:
        b, s = self.length(3), self.length(3)
        heads, half, still = self.length(3, least=1), *self.random.choices(range(1, 4), k=2)
        attributes = {"interleaved": self.random.choice((0, 1)), "num_heads": heads}
        if self.random.random() < 0.5:
            attributes["rotary_embedding_dim"] = 2 * half
        else:
            still = 0
        width = heads * (2 * half + still)
        x, angles = self.real(b, s, width), (self.real(b, s, half) for _ in range(2))
        return [x, *angles], [], attributes, 1, 23

    def attention(self) -> Case:
        b, q, k = (self.length(most, least=1) for most in (2, 4, 4))
        heads, group, d = (self.random.randint(1, 2) for _ in range(3))
        operands = [self.real(b, heads * group, q, d)]
        operands += [self.real(b, heads, k, d) for _ in range(2)]
        if self.random.random() < 0.5:
            operands.append(self.real(*self.random.choice(((q, k), (1, 1, q, k), (b, 1, q, k)))))
        return list(operands), [], {"is_causal": self.random.choice((0, 1))}, 1, 23

    def of(self, op: str) -> Case:
        makers = {
            "Attention": self.attention, "CenterCropPad": self.crop, "Shrink": self.shrink,
            "RotaryEmbedding": self.rotary, "NegativeLogLikelihoodLoss": self.loss,
            "SoftmaxCrossEntropyLoss": self.loss,
        }  # fmt: skip
        return makers.get(op, self.window)()


OPERATORS = (
    "Attention", "BlackmanWindow", "CenterCropPad", "HammingWindow", "HannWindow",
    "NegativeLogLikelihoodLoss", "RotaryEmbedding", "Shrink", "SoftmaxCrossEntropyLoss",
)  # fmt: skip


def check(op: str, seeds: Sequence[int]) -> None:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    for seed in seeds:
        case = Functions(f"{op}/{seed}", 0.15).of(op)
        model, feeds = function_model(op, case)
        session = onnxruntime.InferenceSession(model.SerializeToString(), options)
        for ours, theirs in zip(results(model, feeds), session.run(None, feeds), strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=1e-4, err_msg=f"{op} {seed}")


@pytest.mark.parametrize("op", OPERATORS)
def test_a_function_agrees_with_onnx_runtime_on_short_axes(op: str) -> None:
    check(op, range(6))


@pytest.mark.campaign("onnx")
@pytest.mark.parametrize("op", OPERATORS)
def test_a_function_agrees_with_onnx_runtime_on_many_short_axes(op: str) -> None:
    check(op, range(1_000 + 10_000 * SEED, 1_100 + 10_000 * SEED))


@pytest.mark.parametrize("shape", [(0, 4, 16), (2, 0, 16)])
@pytest.mark.parametrize("turned", [0, 4])
def test_a_rotary_embedding_of_nothing_has_its_shape(shape: tuple[int, ...], turned: int) -> None:
    flags = {"num_heads": 2} | ({"rotary_embedding_dim": turned} if turned else {})
    angles = [np.ones((10, turned // 2 or 4), np.float32)] * 2
    places = np.zeros(shape[:2], np.int64)
    case: Case = ([np.zeros(shape, np.float32), *angles, places], [], flags, 1, 23)
    (found,) = results(*function_model("RotaryEmbedding", case))
    assert found.shape == shape


@pytest.mark.parametrize("shape", [(0, 3), (2, 3)])
def test_zeros_and_nothing_are_quantized_to_the_numbers_of_onnx_runtime(
    shape: tuple[int, ...],
) -> None:
    """By ONNX's function the scale is 0 then, by ONNX Runtime 1: each times 0 is 0."""
    case: Case = ([np.zeros(shape, np.float32)], [], {}, 3, 11)
    model, feeds = function_model("DynamicQuantizeLinear", case)
    y, scale, zero = results(model, feeds)
    theirs = onnxruntime.InferenceSession(model.SerializeToString()).run(None, feeds)
    assert y.tolist() == theirs[0].tolist() and zero == theirs[2] == 0
    assert (float(scale), float(theirs[1])) == (0.0, 1.0)


@pytest.mark.filterwarnings("ignore:.*affine_grid behavior has changed.*")
@pytest.mark.parametrize(
    ("align_corners", "size", "known"),
    in_turn(
        [0, 1],
        [(1, 2, 3, 4), (1, 2, 1, 4), (3, 1, 2, 1), (1, 1, 1, 1), (1, 1, 2, 3, 4), (2, 1, 1, 1, 2)],
        [True, False],
    ),
)
def test_an_affine_grid_is_the_one_of_pytorch(
    size: tuple[int, ...], align_corners: int, known: bool
) -> None:
    """ONNX's body drops a batch of 1; of an axis of 1 its reference has -1 and ONNX Runtime 1."""
    rank = len(size) - 2
    theta = np.random.default_rng(1).normal(size=(size[0], rank, rank + 1)).astype(np.float32)
    case: Case = ([theta], [np.array(size)], {"align_corners": align_corners}, 1, 20)
    wanted = torch.nn.functional.affine_grid(
        torch.from_numpy(theta), list(size), bool(align_corners)
    )
    if known:
        (found,) = results(*function_model("AffineGrid", case))
    else:
        case = ([theta, np.array(size)], [], *case[2:])
        model, feeds = function_model("AffineGrid", case)
        made: Any = stitch.compile(model, tuple(feeds.values()))(*feeds.values())
        found = made.numpy()
    np.testing.assert_allclose(found, wanted.numpy(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("size", [(0, 2, 3, 4), (2, 2, 0, 4)])
def test_an_affine_grid_of_nothing_has_its_shape(size: tuple[int, ...]) -> None:
    theta = np.ones((size[0], 2, 3), np.float32)
    case: Case = ([theta], [np.array(size)], {}, 1, 20)
    (found,) = results(*function_model("AffineGrid", case))
    assert found.shape == (size[0], *size[2:], 2)
