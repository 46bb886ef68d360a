"""What users of other runtimes reported of their memory, rebuilt as chips and chains of programs.

What a thread says (banks, sizes, addresses, what was free) is rebuilt to the byte; what it does not
say is chosen, and said here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import stitch
from stitch.graph import ComputationGraphBuilder
from stitch.program import Scratch, Space

L1, DRAM, HOST = Space.L1, Space.DRAM, Space.HOST


@dataclass(frozen=True)
class Chip:
    """Banks of L1 (a grid of cores, from a base to a limit) and of DRAM, in bytes."""

    grid: tuple[int, int] = (8, 8)
    l1: tuple[int, int] = (103_712, 1_466_368)
    dram: tuple[int, int] = (12, 1_071_181_792)
    dram_alignment: int = 32

    def banks(self, space: Space) -> int:
        return self.grid[0] * self.grid[1] if space is L1 else self.dram[0]

    def region(self, space: Space) -> tuple[int, int]:
        return self.l1 if space is L1 else (0, self.dram[1])

    def alignment(self, space: Space) -> int:
        return 16 if space is L1 else self.dram_alignment

    def text(self) -> str:
        base, limit = self.l1
        rows = [
            "name: reported", f"core_grid: [{self.grid[0]}, {self.grid[1]}]",
            "host: {banks: 1, bank_nbytes: 274_877_906_944, alignment: 64}",
            f"l1: {{banks: {self.banks(L1)}, bank_nbytes: {limit}, base: {base}, "
            "reserved_top_nbytes: 0, alignment: 16}",
            f"dram: {{banks: {self.dram[0]}, bank_nbytes: {self.dram[1]}, "
            f"alignment: {self.dram_alignment}}}",
            "noc: {clock_hz: 1_000_000_000, bytes_per_cycle: {128: 5.5, 512: 18, 2048: 30}, "
            "latency_cycles: 40, latency_cycles_per_hop: 10}",
        ]  # fmt: skip
        rows.append("paths:")
        spaces = ("host", "dram", "l1")
        for source in spaces:
            for target in spaces:
                how = "bytes_per_second: 3.9e+9, latency_seconds: 2.0e-6"
                if "host" not in (source, target):
                    how = "noc_links: 64, hops: 10"
                    if "dram" in (source, target):
                        how += ", limit_bytes_per_second: 267.0e+9"
                rows.append(f"  - {{from: {source}, to: {target}, {how}}}")
        return "\n".join(rows) + "\n"


N150 = Chip()


@dataclass(frozen=True)
class Report:
    """One thread: what lies where (address, bytes per bank), and what the next program asks for.

    `wanted`: bytes per bank of its result; `scratch`: of its circular buffers, from the base up.
    `over`: bytes per bank by which all that is asked for exceeds the space, 0 where moving is
    enough; then so many bytes per bank may move.
    """

    thread: str
    chip: Chip
    held: tuple[tuple[int, int], ...]
    wanted: int = 0
    scratch: int = 0
    space: Space = L1
    over: int = 0
    moved: int = 0

    @property
    def name(self) -> str:
        return self.thread.replace("/", "_").replace("#", "_")


def clash(thread: str, lies_at: int, buffers_end: int, *, nbytes: int | None = None,
          chip: Chip = N150) -> Report:  # fmt: skip
    """Circular buffers that grow from the base into a tensor; one up to the limit if not said."""
    base, limit = chip.l1
    size = limit - lies_at if nbytes is None else nbytes
    over = buffers_end - lies_at if nbytes is None else 0
    return Report(thread, chip, ((lies_at, size),), scratch=buffers_end - base, over=over,
                  moved=0 if over else size)  # fmt: skip


def scattered(thread: str, wanted: int, free: int, largest: int, *, chip: Chip, space: Space = L1,
              moved: int | None = None) -> Report:  # fmt: skip
    """So many bytes are free, in holes no larger than that; the rest is held in equal blocks."""
    (base, limit), step = chip.region(space), chip.alignment(space)
    holes = [largest] * (free // largest) + ([free % largest] if free % largest else [])
    taken, parts = limit - base - free, max(1, len(holes) - 1)
    block = taken // parts // step * step
    held, at = [], base
    for i, hole in enumerate(holes[:parts]):
        # The first block takes what does not divide.
        size = block if i else taken - block * (parts - 1)
        held.append((at + hole, size))
        at += hole + size
    over = max(0, wanted - free)
    return Report(thread, chip, tuple(held), wanted, space=space, over=over,
                  moved=0 if over else block if moved is None else moved)  # fmt: skip


def wormhole_dram(nbytes: int) -> Chip:
    return Chip(dram=(12, nbytes))


def l1_of(nbytes: int, grid: tuple[int, int] = (8, 8)) -> Chip:
    return Chip(grid, (103_712, 103_712 + nbytes))


def arena(nbytes: int, alignment: int) -> Chip:
    return Chip(dram=(1, nbytes), dram_alignment=alignment)


REPORTS = (
    # Circular buffers against a tensor. Only the first says how large the tensor is.
    clash("tenstorrent/tt-mlir#7899", 665_600, 890_144, nbytes=262_144),
    clash("tenstorrent/tt-xla#5206", 104_448, 107_936),
    clash("tenstorrent/tt-metal#8065", 267_584, 435_136,
          chip=Chip((8, 12), (103_712, 1_048_576), dram=(8, 1_073_741_824))),
    clash("tenstorrent/tt-mlir#7153", 997_376, 1_192_448,
          chip=Chip((8, 13), (103_712, 1_572_864), dram=(8, 4_273_390_016))),
    clash("tenstorrent/tt-metal#54876", 1_563_072, 1_563_264,
          chip=Chip((10, 11), (103_712, 1_572_864), dram=(8, 4_273_390_016))),
    # Enough is free, and no hole is large enough.
    scattered("tenstorrent/tt-mlir#8044", 552_960, 912_096, 522_240, chip=l1_of(1_329_888, (6, 8))),
    scattered("tenstorrent/tt-mlir#8110", 608_256, 1_005_952, 591_872, chip=l1_of(1_329_888)),
    scattered("tenstorrent/tt-xla#4130", 4_894_720, 183_397_344, 3_382_944,
              chip=wormhole_dram(1_071_821_792), space=DRAM),
    scattered("tenstorrent/tt-xla#5355", 11_796_480, 12_661_504, 6_266_880,
              chip=wormhole_dram(1_070_773_184), space=DRAM),
    # Not enough is free.
    scattered("tenstorrent/tt-xla#5535", 89_479_168, 67_144_640, 67_140_352,
              chip=wormhole_dram(1_070_773_184), space=DRAM),
    # Arenas, of which small chips have one. The second size is chosen.
    scattered("tensorflow/tflite-micro#1458", 2_088, 1_552, 1_552, chip=arena(4_096, 8),
              space=DRAM),
    scattered("tensorflow/tensorflow#39673", 400, 264, 264, chip=arena(2_048, 8), space=DRAM),
    scattered("pytorch/executorch#9491", 48, 44, 44, chip=arena(4_096, 4), space=DRAM),
)  # fmt: skip

#: Bytes per bank that are asked for, and the chip, which has less in all.
TOO_LARGE = {
    "tenstorrent/tt-metal#35431": (1_350_784, l1_of(1_330_944), L1),
    "tenstorrent/tt-xla#4040": (5_561_647_104, Chip(dram=(8, 4_273_390_016)), DRAM),
}  # fmt: skip


def compiled(name: str, chip: Chip, results: Mapping[str, tuple[Space, int, int | None]], *,
             scratch: int = 0) -> None:  # fmt: skip
    """A program with results (space, bytes per bank, address), each of an array on the host."""
    builder, placement = ComputationGraphBuilder(name), []
    for result, (space, nbytes, address) in results.items():
        source = builder.input(f"of_{result}", (chip.banks(space), nbytes), "int8")
        builder.output(result, builder.neg(source))
        placement += [f"output.{result}.space={space.value}", f"input.of_{result}.space=host"]
        if address is not None:
            placement.append(f"output.{result}.address={address:#x}")
    model = stitch.compile(builder.build(), target="chip.yaml", placement=placement)
    (program,) = model.binary.programs
    with_scratch = replace(program, scratch=Scratch(L1, scratch))
    replace(model, binary=replace(model.binary, programs=(with_scratch,))).save(f"{name}.ttb")


def pipeline(report: Report) -> None:
    """Files of a chain: tensors that are held to the end, and the program that has no room."""
    chip = report.chip
    Path("chip.yaml").write_text(chip.text())
    held = {f"t{i}": (report.space, size, at) for i, (at, size) in enumerate(report.held)}
    asked = {"y": (report.space, report.wanted, None)} if report.wanted else {"y": (HOST, 1, None)}
    compiled("next", chip, asked, scratch=report.scratch)
    modules, inputs, steps = {"next": "next.ttb"}, {}, []
    if held:
        compiled("holder", chip, held)
        modules["holder"] = "holder.ttb"
        steps.append({"run": "holder", "inputs": {f"of_{t}": f"of_{t}" for t in held},
                      "outputs": {t: t for t in held}})  # fmt: skip
    steps.append({"run": "next", "inputs": {"of_y": "of_y"}, "outputs": {"y": "y"}})
    for name, (space, nbytes, _) in {**held, **asked}.items():
        inputs[f"of_{name}"] = {"shape": [chip.banks(space), nbytes], "type": "int8"}
    body = {"device": "chip.yaml", "modules": modules, "inputs": inputs, "steps": steps,
            "outputs": [*held, "y"]}  # fmt: skip
    Path("p.yaml").write_text(json.dumps(body))
