"""Linked programs compute what they compute apart, to the last bit, by NumPy's kernels; for ONNX
Runtime's see `test_joined_programs`."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import numpy as np
import pytest

import stitch
from stitch.graph import ComputationGraphBuilder
from stitch.graph.symbolic import SymbolicTensor
from stitch.program import Array
from tests.support.grids import every
from tests.support.stitched_models import one

#: Elementwise operators that stay within what every storage type holds.
PLAIN = ("Relu", "Tanh", "Sigmoid", "Neg", "Abs", "Erf", "Gelu")
STORED = ("float32", "float32", "bfloat16", "float16")


def part(name: str, draw: Random, shape: tuple[int, int], of: str) -> stitch.CompiledModel:
    """A program of one to five operators; its slots are stored in types of their own."""
    rng, columns = np.random.default_rng(draw.randrange(1 << 30)), shape[1]
    b = ComputationGraphBuilder(name)

    def table(*sizes: int) -> SymbolicTensor:
        return b.constant((rng.standard_normal(sizes) * sizes[0] ** -0.5).astype(np.float32))

    y = b.input("x", shape, "float32")
    for kind in [of, *draw.choices(["plain", "scale", "sum"], k=draw.randrange(4))]:
        if kind == "plain":
            y = b.op(draw.choice(PLAIN), y)
        elif kind == "scale":
            y = y * table(columns) + 0.5
        elif kind == "sum":
            y = y + b.op("Tanh", y)
        elif kind == "gemm":
            y = b.op("Gemm", y, table(columns, columns), table(columns))
        elif kind == "matmul":
            y = y @ table(columns, columns)
        elif kind == "softmax":
            y = b.op("Softmax", y, axis=-1)
        elif kind == "norm":
            y = b.op("LayerNormalization", y, table(columns), table(columns))
        elif kind == "turn":
            y = b.op("Transpose", b.op("Relu", b.op("Transpose", y, perm=(1, 0))), perm=(1, 0))
        else:
            y = y - b.op("ReduceMean", y, b.constant(np.array([1], np.int64)), keepdims=1)
    b.output("y", y)
    placement = [f"{slot}.data_type={draw.choice(STORED)}" for slot in ("input.x", "output.y")]
    return stitch.compile(b.build(), target="wormhole_n150", placement=placement)


KINDS = ("gemm", "matmul", "softmax", "norm", "turn", "mean", "plain", "sum")


def chain(seed: int, count: int) -> tuple[list[stitch.CompiledModel], Array]:
    draw = Random(seed)
    shape = draw.choice([(4, 16), (16, 64), (33, 40)])
    kinds = [KINDS[i % len(KINDS)] for i in range(count)]
    draw.shuffle(kinds)
    models = [part(f"p{i}", draw, shape, kind) for i, kind in enumerate(kinds)]
    return models, np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def apart_and_linked(
    models: Sequence[stitch.CompiledModel], x: Array, executor: str
) -> tuple[Array, Array]:
    with stitch.open_device("wormhole_n150", executor=executor) as device:
        made = device.tensor(x)
        for program in [device.load(each) for each in models]:
            made = one(program(made))
        return made.numpy(), one(device.load(stitch.link(models))(x)).numpy()


@pytest.mark.parametrize("seed", every(4, range(12)))
def test_sixteen_programs_are_equal_to_the_bit_by_numpys_kernels(seed: int) -> None:
    apart, linked = apart_and_linked(*chain(seed, 16), "numpy")
    assert np.isfinite(apart).all()
    assert linked.dtype == apart.dtype and linked.tobytes() == apart.tobytes()


@pytest.mark.parametrize("seed", range(4))
def test_a_link_of_links_is_the_same_as_one_link(seed: int) -> None:
    models, x = chain(seed, 9)
    whole = stitch.link(models, name="whole")
    halves = stitch.link([stitch.link(models[:4]), stitch.link(models[4:])], name="whole")
    assert [o.op for o in halves.program.operations] == [o.op for o in whole.program.operations]
    with stitch.open_device("wormhole_n150") as device:
        found = [one(device.load(linked)(x)).numpy() for linked in (whole, halves)]
    assert found[0].tobytes() == found[1].tobytes()
