"""Linked programs give what they give apart: by NumPy's kernels to the last bit."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import numpy as np
import pytest

import stitch
from stitch.graph import ComputationGraphBuilder
from stitch.linker import chain_wires, link_programs
from stitch.machine import load_machine
from stitch.program import Array, Program
from stitch.ttb import Binary
from tests.support.executors.drawn_chains import TARGET, DrawnChain, drawn_chain
from tests.support.grids import every

pytest.importorskip("onnxruntime")

MACHINE = load_machine(TARGET).shape


def tensors(results: stitch.Tensor | tuple[stitch.Tensor, ...]) -> tuple[stitch.Tensor, ...]:
    return results if isinstance(results, tuple) else (results,)


def model_of(program: Program) -> stitch.LinkedModel:
    return stitch.LinkedModel(Binary((program,), MACHINE, "test"), TARGET)


def chained(models: Sequence[stitch.CompiledModel], x: Array) -> DrawnChain:
    programs = [model.program for model in models]
    last = [(len(models) - 1, o) for o in range(len(programs[-1].outputs))]
    return DrawnChain(list(models), list(chain_wires(programs)), last, {(0, 0): x})


def apart(chain: DrawnChain, device: stitch.Device) -> list[Array]:
    """The outputs that stay, one program after the other."""
    sources = {(w.consumer, w.input): (w.producer, w.output) for w in chain.wires}
    made: dict[tuple[int, int], stitch.Tensor] = {}
    for p, model in enumerate(chain.models):
        given = [
            made[sources[p, i]] if (p, i) in sources else device.tensor(chain.data[p, i])
            for i in range(len(model.program.inputs))
        ]
        made |= {(p, o): tensor for o, tensor in enumerate(tensors(device.load(model)(*given)))}
    return [made[port].numpy() for port in chain.kept]


def linked(chain: DrawnChain, device: stitch.Device, halves: bool = False) -> list[Array]:
    """The same outputs of the one program that they are linked into."""
    programs = [model.program for model in chain.models]
    if halves:
        middle = len(programs) // 2
        programs = [
            link_programs(some, chain_wires(some), machine=MACHINE, name=name)
            for name, some in (("one", programs[:middle]), ("two", programs[middle:]))
        ]
        wires, kept = list(chain_wires(programs)), [(1, o) for _, o in chain.kept]
    else:
        wires, kept = chain.wires, chain.kept
    whole = link_programs(programs, wires, machine=MACHINE, name="whole", keep=kept)
    given = [chain.data[port] for port in sorted(chain.data)]
    return [tensor.numpy() for tensor in tensors(device.load(model_of(whole))(*given))]


def assert_equal(chain: DrawnChain, executor: str, halves: bool = False) -> None:
    with stitch.open_device(TARGET, executor=executor) as device:
        wanted, found = apart(chain, device), linked(chain, device, halves)
    for port, one_way, other in zip(chain.kept, wanted, found, strict=True):
        assert np.isfinite(one_way.astype(np.float32)).all(), port
        assert one_way.dtype == other.dtype, port
        if executor == "numpy":
            assert one_way.tobytes() == other.tobytes(), port
        else:
            a, b = one_way.astype(np.float64), other.astype(np.float64)
            np.testing.assert_allclose(b, a, rtol=0, atol=0.05 * abs(a).max() + 1e-6)


@pytest.mark.parametrize("seed", every(4, range(40)))
def test_drawn_programs_that_feed_each_other(seed: int) -> None:
    chain = drawn_chain(Random(seed))
    for executor in ("numpy", "onnxruntime"):
        assert_equal(chain, executor)


@pytest.mark.campaign("executors")
@pytest.mark.parametrize("seed", range(1000, 1300))
def test_many_drawn_programs_that_feed_each_other(seed: int) -> None:
    chain = drawn_chain(Random(seed), most=12)
    for executor in ("numpy", "onnxruntime"):
        assert_equal(chain, executor)


def layer(n: int, weights: Array) -> stitch.CompiledModel:
    b = ComputationGraphBuilder(f"layer{n}")
    x = b.input("x", (16, 64), "float32")
    b.output("y", b.op("Relu", b.op("Gemm", x, b.constant(weights), b.constant(weights[0]))))
    return stitch.compile(b.build(), target=TARGET)


@pytest.mark.parametrize("halves", every(2, [False, True]), ids=["at once", "linked again"])
def test_sixty_four_small_programs(halves: bool) -> None:
    rng = np.random.default_rng(0)
    tables = [(rng.standard_normal((64, 64)) * 0.15).astype(np.float32) for _ in range(4)]
    models = [layer(n, tables[n % 4]) for n in range(64)]
    chain = chained(models, rng.standard_normal((16, 64)).astype(np.float32))
    for executor in ("numpy", "onnxruntime"):
        assert_equal(chain, executor, halves)
