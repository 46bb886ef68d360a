"""Which NumPy functions and layers keep the first axis of their argument free, and that each of
them, at every size that its guards allow, equals compiling at that size."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import stitch
from stitch.errors import CompileError


def ones(*shape: int) -> Any:
    return np.ones(shape, np.float32)


#: Functions of a tensor [batch, 8] whose batch stays free.
FREE: dict[str, Callable[[Any], Any]] = {
    "x[1:]": lambda x: x[1:],
    "x[:-1]": lambda x: x[:-1],
    "x[::-1]": lambda x: x[::-1],
    "flip of all axes": lambda x: np.flip(x),
    "x[:, 2:5]": lambda x: x[:, 2:5],
    "x[-1]": lambda x: x[-1],
    "x[n - 1]": lambda x: x[x.shape[0] - 1],
    "x[: n // 2]": lambda x: x[: x.shape[0] // 2],
    "x[n // 2 :]": lambda x: x[x.shape[0] // 2 :],
    "x[:, [0, 2]]": lambda x: x[:, [0, 2]],
    "x[[0, 1]]": lambda x: x[[0, 1]],
    "concatenate": lambda x: np.concatenate([x, x]),
    "stack": lambda x: np.stack([x, x]),
    "sum": lambda x: np.sum(x, 0),
    "mean": lambda x: x.mean(),
    "std": lambda x: x.std(0),
    "zeros_like": lambda x: np.zeros_like(x) + x,
    "tile": lambda x: np.tile(x, (2, 1)),
    "pad": lambda x: np.pad(x, ((0, 0), (1, 1))),
    "flip": lambda x: np.flip(x, 1),
    "split": lambda x: np.split(x, 2, 1)[0],
    "where": lambda x: np.where(x > 0, x, 0),
    "broadcast_to": lambda x: np.broadcast_to(x[:, None], (x.shape[0], 3, 8)),
    "einsum": lambda x: np.einsum("ij,kj->ik", x, ones(3, 8)),
    "x.T @ x": lambda x: x.T @ x,
    "tensordot": lambda x: np.tensordot(x, ones(8, 3), 1),
    "outer": lambda x: np.outer(x[:, 0], x[0]),
    "sort": lambda x: np.sort(x, 1),
    "cumsum": lambda x: np.cumsum(x, 1),
    "argmax": lambda x: np.argmax(x, 0),
    "clip": lambda x: np.clip(x, 0, 1),
    "ravel": lambda x: x.ravel(),
    "reshape(-1, 4)": lambda x: x.reshape(-1, 4),
    "reshape(2 * n, 4)": lambda x: x.reshape(x.shape[0] * 2, 4),
    "repeat": lambda x: np.repeat(x, 2, axis=1),
    "roll": lambda x: np.roll(x, 1, 1),
    "take": lambda x: np.take(x, [0, 2], 1),
    "take rows": lambda x: np.take(x, [[0, 2]], 0),
    "topk": lambda x: x.builder.topk(x, 2, 1)[0],
    "linear": lambda x: x.builder.linear(x, ones(5, 8), ones(5)),
    "softmax": lambda x: x.builder.softmax(x),
    "layer_norm": lambda x: x.builder.layer_norm(x),
    "embedding": lambda x: x.builder.embedding(ones(9, 4), x.astype(np.int64)),
    "attention": lambda x: x.builder.scaled_dot_product_attention(x[None], x[None], x[None]),
}
#: Those that need the number; a later version may free them.
SPECIALISED: dict[str, Callable[[Any], Any]] = {
    "x[::2]": lambda x: x[::2],
    "x.sum(0) / n": lambda x: x.sum(0) / x.shape[0],
    "triu": lambda x: np.triu(x),
    "diagonal": lambda x: np.diagonal(x),
    "roll along the axis": lambda x: np.roll(x, 1, 0),
    "hstack": lambda x: np.hstack([x, x]),
    "arange": lambda x: x + np.arange(x.shape[0], dtype=np.float32)[:, None],
    "causal attention": lambda x: x.builder.scaled_dot_product_attention(
        x[None], x[None], x[None], causal=True
    ),
}
SIZES = (4, 5, 9, 17, 64)


def compiled(function: Callable[[Any], Any]) -> stitch.DynamicModel:
    dims = {"x": {0: stitch.Dim("batch", min(SIZES), max(SIZES))}}
    model: stitch.DynamicModel = stitch.compile(function, (ones(9, 8),), dynamic_shapes=dims)
    return model


@pytest.mark.campaign("dynamic_sizes")
@pytest.mark.parametrize("name", FREE)
def test_the_batch_stays_free(name: str) -> None:
    model = compiled(FREE[name])
    assert not any(guard.is_specialised for guard in model.program.guards)
    for size in SIZES:
        expected = stitch.compile(FREE[name], (ones(size, 8),))
        assert model.at(batch=size).encode() == expected.encode()


@pytest.mark.campaign("dynamic_sizes")
@pytest.mark.parametrize("name", SPECIALISED)
def test_the_batch_is_specialised(name: str) -> None:
    model = compiled(SPECIALISED[name])
    assert model.at(batch=9).encode() == stitch.compile(SPECIALISED[name], (ones(9, 8),)).encode()
    with pytest.raises(CompileError, match=r"batch == "):
        model.at(batch=17)
