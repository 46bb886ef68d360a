"""Layout conversion beside memcpy: tilize and untilize, interleaved in one process.

Prints, for each shape and type, the speed of a prepared `to_layout` copy as a ratio of the speed
of `memcpy` on the dense bytes (1.0: as fast as memcpy), and beside it those of plain NumPy and of
torch (`copyto` and `copy_` over strided views of padded rows) where no type changes; `-`: not
measured. All run one after the other, each first in turn; the ratio is that of least times, which
other work on the machine disturbs least. Tiles lie as in a device's memory, at a whole page.
`--check` exits 1 where float32 or bfloat16 at 2048x2048 is below 0.75, or any shape below plain
NumPy or torch.
"""

from __future__ import annotations

import importlib.util
import json
import math
import mmap
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np
from command_line import bench_parser, exit_code_for, extents, from_one

from stitch.machine.shape import MachineShape, SpaceShape
from stitch.memory import prepare_copy
from stitch.program import TILE_SHAPE, DataType, Layout, Space, TensorDesc, host_layout

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Call = Callable[[], object]
GOAL = 0.75
SHAPES = ((2048, 2048), (2000, 1000), (8, 16, 60, 100))
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
    """Ratios of one shape and pair of types, and the milliseconds of memcpy and both ways. None:
    not measured, as a type changes or torch is not installed."""

    shape: str
    host: str
    device: str
    tilize: float
    untilize: float
    numpy_tilize: float | None
    numpy_untilize: float | None
    torch_tilize: float | None
    torch_untilize: float | None
    memcpy_ms: float
    tilize_ms: float
    untilize_ms: float
    staging_nbytes: int


def misses(row: Row) -> list[str]:
    """The goals that a row misses."""
    if row.host != row.device:
        return []
    found = []
    for way, ours, numpy, torch in (
        ("tilize", row.tilize, row.numpy_tilize, row.torch_tilize),
        ("untilize", row.untilize, row.numpy_untilize, row.torch_untilize),
    ):
        goal = GOAL if row.shape == "2048x2048" else 0.0
        for name, wanted in (("the goal", goal), ("NumPy", numpy), ("torch", torch)):
            if wanted is not None and ours < wanted:
                found.append(
                    f"{row.shape}, {row.host} to {row.device}: {way} {ours:.2f}, "
                    f"{name} {wanted:.2f}"
                )
    return found


def measure(shape: tuple[int, ...], host: DataType, device: DataType, rounds: int) -> Row:
    """Compares tilize with memcpy, then untilize with memcpy."""
    dense = TensorDesc(shape, host_layout(host))
    tiled = TensorDesc(shape, Layout(device, Space.DRAM, TILE_SHAPE))
    there, back = prepare_copy(dense, tiled, MACHINE), prepare_copy(tiled, dense, MACHINE)
    random = np.random.default_rng(0)
    given = random.standard_normal(shape, dtype=np.float32).astype(host.dtype)
    raw = given.reshape(-1).view(np.uint8)
    region = np.frombuffer(mmap.mmap(-1, there.target_footprint.nbytes), np.uint8)
    result = np.zeros_like(raw)
    # The same buffers for memcpy, so that both see the same pages in the same caches.
    plain = region[: raw.size] if region.size >= raw.size else np.zeros_like(raw)
    to_tiles: dict[str, Call] = {
        "memcpy": partial(np.copyto, plain, raw),
        "stitch": there.bind(raw, region),
    }
    to_rows: dict[str, Call] = {
        "memcpy": partial(np.copyto, result, plain),
        "stitch": back.bind(region, result),
    }
    if host is device:
        for name, ways in plain_ways(raw, region, result, dense.shape, host).items():
            to_tiles[name], to_rows[name] = ways
    tilize = least_times(to_tiles, rounds)
    to_tiles["stitch"]()
    untilize = least_times(to_rows, rounds)
    ratios = [{way: least["memcpy"] / least[way] for way in least} for least in (tilize, untilize)]
    return Row(
        "x".join(map(str, shape)), host.short, device.short,
        ratios[0]["stitch"], ratios[1]["stitch"],
        ratios[0].get("numpy"), ratios[1].get("numpy"),
        ratios[0].get("torch"), ratios[1].get("torch"),
        tilize["memcpy"] * 1e3, tilize["stitch"] * 1e3, untilize["stitch"] * 1e3,
        max(there.staging_nbytes, back.staging_nbytes),
    )  # fmt: skip


def plain_ways(
    raw: Bytes, region: Bytes, result: Bytes, shape: tuple[int, ...], kind: DataType
) -> dict[str, tuple[Call, Call]]:
    """Tilize and untilize with strided copies of NumPy, and of torch where it is installed."""
    item = np.dtype(f"u{kind.itemsize}")
    height, width = shape[-2:]
    tiles_high, tiles_wide = -(-height // 32), -(-width // 32)
    padded = np.zeros((raw.size // (height * width * item.itemsize), tiles_high * 32,
                       tiles_wide * 32), item)  # fmt: skip
    inner = padded[:, :height, :width]
    given, back = (bytes_.view(item).reshape(inner.shape) for bytes_ in (raw, result))
    cut = (-1, tiles_high, 2, 16, tiles_wide, 2, 16)
    is_whole = inner.shape == padded.shape
    rows, rows_back = ((given if is_whole else padded).reshape(cut),
                       (back if is_whole else padded).reshape(cut))  # fmt: skip
    order = (0, 1, 4, 2, 5, 3, 6)
    rows, rows_back = rows.transpose(order), rows_back.transpose(order)
    tiles = region.view(item)[: padded.size].reshape(rows.shape)

    def ways(copy: Callable[[Any, Any], object], wrap: Callable[[Any], Any]) -> tuple[Call, Call]:
        there = [partial(copy, wrap(tiles), wrap(rows))]
        back_again = [partial(copy, wrap(rows_back), wrap(tiles))]
        if not is_whole:
            there.insert(0, partial(copy, wrap(inner), wrap(given)))
            back_again.append(partial(copy, wrap(back), wrap(inner)))
        return partial(call_all, there), partial(call_all, back_again)

    found = {"numpy": ways(np.copyto, lambda array: array)}
    if importlib.util.find_spec("torch") is not None:
        import torch

        torch.set_num_threads(1)
        signed = np.dtype(f"i{kind.itemsize}")
        found["torch"] = ways(
            torch.Tensor.copy_, lambda array: torch.from_numpy(array.view(signed))
        )
    return found


def call_all(calls: Sequence[Call]) -> None:
    for call in calls:
        call()


def least_times(ways: dict[str, Call], rounds: int) -> dict[str, float]:
    """The least seconds of each way, run in turns; each is first as often as the others."""
    found = dict.fromkeys(ways, math.inf)
    names = list(ways)
    for i in range(rounds + 2):
        first = i % len(names)
        for name in names[first:] + names[:first]:
            started = time.perf_counter()
            ways[name]()
            found[name] = min(found[name], time.perf_counter() - started)
    return found


def main(arguments: list[str] | None = None) -> int:
    parser = bench_parser(__doc__)
    parser.add_argument("shapes", nargs="*", type=extents, default=SHAPES, help="2048x2048")
    parser.add_argument("--rounds", type=from_one, default=101)
    options = parser.parse_args(arguments)
    rows = [
        measure(shape, host, device, options.rounds)
        for shape in options.shapes
        for host, device in PAIRS
    ]
    if options.json:
        print(json.dumps([asdict(row) for row in rows], indent=2))
    else:
        print(
            f"{'shape':>14} {'host':>5} {'device':>6}{'tilize: ours':>13} {'NumPy':>6} {'torch':>6}"
            f"{'untilize: ours':>15} {'NumPy':>6} {'torch':>6}  memcpy ms"
        )
        for row in rows:
            there, back = (
                " ".join("     -" if ratio is None else f"{ratio:6.2f}" for ratio in ratios)
                for ratios in ((row.numpy_tilize, row.torch_tilize),
                               (row.numpy_untilize, row.torch_untilize))
            )  # fmt: skip
            print(
                f"{row.shape:>14} {row.host:>5} {row.device:>6}{row.tilize:13.2f} {there}"
                f"{row.untilize:15.2f} {back}  {row.memcpy_ms:.3f}"
            )
    return exit_code_for((text for row in rows for text in misses(row)), check=options.check)


if __name__ == "__main__":
    sys.exit(main())
