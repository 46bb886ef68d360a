"""tt-mlir's stitching test, `eltwise_binary_op_chain`: add, multiply, subtract over 64x128."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import stitch
from stitch.program import Array
from tests.support.stitched_models import binary_op, one, together

SHAPE = (64, 128)
OPS = ("Add", "Mul", "Sub")
TARGET = "wormhole_n150"
PLACEMENTS = {
    "as the compiler likes": (),
    "all in L1": ("input.x.space=l1", "input.w.space=l1", "output.y.space=l1"),
    "tiles in DRAM": ("input.x.layout=tile", "output.y.layout=tile", "output.y.space=dram"),
    "shards": ("input.x.memory_layout=height_sharded", "output.y.memory_layout=block_sharded"),
}


def pcc(a: Array, b: Array) -> float:
    return float(np.corrcoef(a.ravel(), b.ravel())[0, 1])


def expected(x: Array, weights: list[Array]) -> Array:
    return (x + weights[0]) * weights[1] - weights[2]


@pytest.mark.parametrize("placement", PLACEMENTS.values(), ids=PLACEMENTS.keys())
@pytest.mark.parametrize("files", [1, 3])
def test_the_chain_over_one_or_three_files_keeps_weights_and_numbers(
    files: int, placement: tuple[str, ...], tmp_path: Path
) -> None:
    models = [binary_op(op.lower(), op, SHAPE, target=TARGET, placement=placement) for op in OPS]
    rng = np.random.default_rng(7)
    x, *arrays = (rng.standard_normal(SHAPE, dtype=np.float32) for _ in range(4))
    if files == 1:
        (tmp_path / "all.ttb").write_bytes(stitch.ttb.encode(together(*models)))
        sources = [(tmp_path / "all.ttb", op.lower()) for op in OPS]
    else:
        sources = []
        for op, compiled in zip(OPS, models, strict=True):
            compiled.save(tmp_path / f"{op}.ttb")
            sources.append((tmp_path / f"{op}.ttb", 0))  # type: ignore[arg-type]
    with stitch.open_device(TARGET, debug=True) as device:
        weights = [device.tensor(array) for array in arrays]
        for weight in weights:
            weight.retain = True
        value = device.tensor(x)
        for (path, name), weight in zip(sources, weights, strict=True):
            program = device.load(path, name)
            before = value
            (value,) = stitch.submit(device, program, name, (before, weight))
            assert not before.is_allocated, "activations that are not retained are freed"
        stitch.wait(value)
        found = value.numpy()
        assert all(weight.is_allocated for weight in weights)
        assert pcc(found, expected(x, arrays)) >= 0.99
        np.testing.assert_array_equal(found, expected(x, arrays))


def test_an_output_that_its_reader_finds_in_place_is_not_copied() -> None:
    placement = ("input.x.space=l1", "output.y.space=l1", "input.w.space=l1")
    models = [binary_op(op.lower(), op, SHAPE, target=TARGET, placement=placement) for op in OPS]
    x = np.ones(SHAPE, np.float32)
    with stitch.open_device(TARGET) as device:
        programs = [device.load(m) for m in models]
        weight = device.tensor(x).to_layout(stitch.get_layout(models[0], 0, "w"))
        start = device.tensor(x).to_layout(stitch.get_layout(models[0], 0, "x"))
        stitch.wait((weight, start))
        with stitch.forbid_copies(device):
            value = start
            for program in programs:
                value = one(program(value, weight))
            stitch.wait(value)
        np.testing.assert_array_equal(value.numpy(), np.ones(SHAPE, np.float32))
