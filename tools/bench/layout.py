"""Layout conversion beside memcpy: tilize and untilize, interleaved in one process.

Prints, for each shape and type, the speed of a prepared `to_layout` copy as a ratio of the speed
of `memcpy` on the dense bytes (1.0: as fast as memcpy). Both run one after
the other on the same buffers, each first in turn; the ratio is that of their least times, which
other work on the machine disturbs least. `--check` exits 1 where float32 or bfloat16 at
2048x2048 is below 0.7.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import numpy as np

from stitch.machine.shape import MachineShape, SpaceShape
from stitch.memory import prepare_copy
from stitch.program import TILE_SHAPE, DataType, Layout, Space, TensorDesc, host_layout

GOAL = 0.7
SHAPES = ("2048x2048", "2000x1000", "8x16x60x100")
#: (host type, device type): with equal types nothing but the order of bytes changes.
PAIRS = (
    (DataType.FLOAT32, DataType.FLOAT32),
    (DataType.BFLOAT16, DataType.BFLOAT16),
    (DataType.FLOAT32, DataType.BFLOAT16),
    (DataType.FLOAT32, DataType.BFP8),
    (DataType.FLOAT32, DataType.BFP4),
)
MACHINE = MachineShape(
    "bench", (8, 8), SpaceShape(1, 0, 1 << 32, 64), dram=SpaceShape(12, 0, 1 << 30, 32)
)


@dataclass(frozen=True, slots=True)
class Row:
    """Ratios of one shape and pair of types, and the milliseconds of memcpy and both ways."""

    shape: str
    host: str
    device: str
    tilize: float
    untilize: float
    memcpy_ms: float
    tilize_ms: float
    untilize_ms: float
    staging_nbytes: int

    @property
    def misses_goal(self) -> bool:
        counts = self.shape == "2048x2048" and self.host == self.device
        return counts and min(self.tilize, self.untilize) < GOAL


def measure(shape: tuple[int, ...], host: DataType, device: DataType, rounds: int) -> Row:
    """Compares tilize with memcpy, then untilize with memcpy."""
    dense = TensorDesc(shape, host_layout(host))
    tiled = TensorDesc(shape, Layout(device, Space.DRAM, TILE_SHAPE))
    there, back = prepare_copy(dense, tiled, MACHINE), prepare_copy(tiled, dense, MACHINE)
    random = np.random.default_rng(0)
    given = random.standard_normal(shape, dtype=np.float32).astype(host.dtype)
    raw = given.reshape(-1).view(np.uint8)
    region = np.zeros(there.target_footprint.nbytes, np.uint8)
    result = np.zeros_like(raw)
    # The same buffers for memcpy, so that both see the same pages in the same caches.
    plain = region[: raw.size] if region.size >= raw.size else np.zeros_like(raw)
    tilize, memcpy_ms, tilize_ms = compare(
        lambda: np.copyto(plain, raw), there.bind(raw, region), rounds
    )
    there.bind(raw, region)()
    untilize, _, untilize_ms = compare(
        lambda: np.copyto(result, plain), back.bind(region, result), rounds
    )
    return Row(
        "x".join(map(str, shape)), host.short, device.short, tilize, untilize,
        memcpy_ms, tilize_ms, untilize_ms, max(there.staging_nbytes, back.staging_nbytes),
    )  # fmt: skip


def compare(
    memcpy: Callable[[], object], convert: Callable[[], object], rounds: int
) -> tuple[float, float, float]:
    """Memcpy's least time over the conversion's least time, and both in milliseconds."""
    times: tuple[list[float], list[float]] = ([], [])
    for i in range(rounds + 2):
        order = ((memcpy, times[0]), (convert, times[1]))
        for call, found in order if i % 2 else reversed(order):
            started = time.perf_counter()
            call()
            found.append(time.perf_counter() - started)
    least = min(times[0]), min(times[1])
    return least[0] / least[1], least[0] * 1e3, least[1] * 1e3


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shapes", nargs="*", default=SHAPES, help="such as 2048x2048")
    parser.add_argument("--rounds", type=int, default=101)
    parser.add_argument("--json", action="store_true", help="print rows as JSON")
    parser.add_argument("--check", action="store_true", help=f"exit 1 below {GOAL} at 2048x2048")
    options = parser.parse_args(arguments)
    rows = [
        measure(tuple(int(size) for size in shape.split("x")), host, device, options.rounds)
        for shape in options.shapes
        for host, device in PAIRS
    ]
    if options.json:
        print(json.dumps([asdict(row) for row in rows], indent=2))
    else:
        print(f"{'shape':>14} {'host':>5} {'device':>6} {'tilize':>7} {'untilize':>8}  memcpy ms")
        for row in rows:
            print(
                f"{row.shape:>14} {row.host:>5} {row.device:>6} {row.tilize:7.2f} "
                f"{row.untilize:8.2f}  {row.memcpy_ms:.3f}{'  < goal' if row.misses_goal else ''}"
            )
    return 1 if options.check and any(row.misses_goal for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
