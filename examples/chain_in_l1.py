"""Three programs, compiled apart, hand a tensor on in L1; a fourth wants it tiled in DRAM.

Where the descriptors agree nothing is copied. Where they differ the runtime makes the one copy that
is missing, and says why.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import numpy as np

import stitch
from stitch import ComputationGraphBuilder, DataType
from stitch.program import Array

MACHINE = "wormhole_n150"
ROWS, WIDTH = 32, 64
RANDOM = np.random.default_rng(0)
IN_L1 = ("input.x.space=l1", "output.y.space=l1")
IN_DRAM = ("input.x.space=dram", "input.x.layout=tile")


def weights() -> tuple[Array, Array]:
    """A matrix and a bias."""
    matrix = RANDOM.standard_normal((WIDTH, WIDTH), dtype=np.float32) * np.float32(0.15)
    return matrix, RANDOM.standard_normal(WIDTH, dtype=np.float32)


def compile_layer(name: str, layer: tuple[Array, Array], placement: tuple[str, ...]) -> bytes:
    """A file that holds `y = Relu(x w + b)`; the placement options say where x and y lie."""
    builder = ComputationGraphBuilder(name)
    x = builder.input("x", (ROWS, WIDTH), DataType.FLOAT32)
    w, b = builder.parameter("w", layer[0]), builder.parameter("b", layer[1])
    builder.output("y", builder.op("Relu", builder.op("Gemm", x, w, b)))
    return stitch.compile(builder.build(), target=MACHINE, placement=placement).encode()


def run(placement: Sequence[tuple[str, ...]]) -> str:
    """Compile one layer for each set of placement options, run them stitched; the device's
    explanation.
    """
    layers = [weights() for _ in placement]
    files = [
        compile_layer(f"layer{i}", layer, requested)
        for i, (layer, requested) in enumerate(zip(layers, placement, strict=True))
    ]
    x = RANDOM.standard_normal((ROWS, WIDTH), dtype=np.float32)
    with stitch.open_device(MACHINE) as device:
        value: stitch.Tensor | tuple[stitch.Tensor, ...] | Array = x
        for file in files:
            value = device.load(file)(value)
        result = np.asarray(value)
        explained = device.explain()
    expected = x
    for w, b in layers:
        expected = np.maximum(expected @ w + b, 0)
    np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-5)
    return explained


def main() -> int:
    """Run both chains and print every copy."""
    print("Three programs, all in L1: the only copy is the array's way in.\n")
    print(run([IN_L1] * 3))
    print("\nA fourth that wants its input tiled in DRAM: one more copy, for that reason.\n")
    print(run([IN_L1] * 3 + [IN_DRAM]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
