"""Random work for devices whose results are known to the bit: machines, programs, their rule.

Every element is a small whole number and stays one, so no executor, type or order rounds it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from random import Random

import numpy as np

import stitch
from stitch.errors import StitchError
from stitch.graph import ComputationGraphBuilder
from stitch.machine import Machine, Policy, load_machine
from stitch.program import Array, DataType, Layout, Ownership, Space
from tests.support.machines import without_path
from tests.support.planner.small_requests import machine_with

L1, DRAM, HOST = Space.L1, Space.DRAM, Space.HOST
F32, BF16 = DataType.FLOAT32, DataType.BFLOAT16
#: Elements lie between this and its negative: whole in bfloat16, too.
MOST = 100
SHAPES = ((16, 4), (4, 4), (48, 4), (80, 4), (32, 32), (0, 4), (2, 33))


def _without_dram(machine: Machine) -> Machine:
    paths = tuple(p for p in machine.paths if DRAM not in p[:2])
    return replace(machine, shape=replace(machine.shape, dram=None), paths=paths)


def _by_granules(granule: int, policy: Policy, upwards: Policy) -> Machine:
    machine = machine_with(l1_nbytes=8192)
    l1, dram = machine.shape.l1, machine.shape.dram
    assert l1 is not None and dram is not None
    l1 = replace(l1, granule=granule, policy=policy)
    dram = replace(dram, granule=2 * granule, policy=upwards)
    return replace(machine, shape=replace(machine.shape, l1=l1, dram=dram))


_SMALL = machine_with(l1_nbytes=2048)
MACHINES: tuple[Machine, ...] = (
    machine_with(l1_nbytes=4096),
    _SMALL,
    machine_with(l1_nbytes=1024, dram_nbytes=4096),
    machine_with(l1_nbytes=2048, dram_nbytes=2048, base=0),
    without_path(_SMALL, L1, L1),
    without_path(machine_with(l1_nbytes=2048, dram_nbytes=4096), L1, L1),
    without_path(without_path(_SMALL, L1, L1), DRAM, DRAM),
    without_path(machine_with(l1_nbytes=2048, dram_nbytes=4096), L1, DRAM),
    _without_dram(_SMALL),
    machine_with(l1_nbytes=16),
)
#: These, one in which there is always room, known ones, and two whose tensors are smaller than a
#: granule, or which place them as devices do.
ALL_MACHINES = (
    *MACHINES, machine_with(l1_nbytes=1 << 16),
    *map(load_machine, ("tiny", "host", "wormhole_n150")),
    _by_granules(512, Policy.BEST_FIT, Policy.BEST_FIT),
    _by_granules(64, Policy.FIRST_FIT, Policy.FIRST_FIT_UPWARDS),
)  # fmt: skip
WITH_ROOM = len(MACHINES)
NAMED = range(WITH_ROOM + 1, WITH_ROOM + 4)
BY_GRANULES = range(WITH_ROOM + 4, WITH_ROOM + 6)


@dataclass(frozen=True, eq=False)
class Work:
    """A compiled program; output i is `rule(i, input read by it)`."""

    compiled: stitch.CompiledModel
    inputs: tuple[tuple[int, ...], ...]
    reads: tuple[int, ...]
    donates: bool

    def results(self, arrays: Sequence[Array]) -> list[Array]:
        """What it computes, plainly."""
        return [mirrored(arrays[at], i) for i, at in enumerate(self.reads)]


def mirrored(x: Array, i: int) -> Array:
    """The rule of an output: a whole number less `x`, kept within bounds."""
    return np.clip(np.float32(3 - 5 * i) - x, -MOST, MOST).astype(np.float32)


#: Programs of a machine that are told apart; the first are the simplest.
PROGRAMS = 32


@cache
def work(machine_number: int, number: int) -> Work | None:
    """A program of a machine, the same each time; None where it cannot be compiled."""
    machine, draw = ALL_MACHINES[machine_number], Random(number)
    builder = ComputationGraphBuilder(f"p{number}")
    placement: list[str] = []
    donates = number % 4 == 3
    shapes = [
        draw.choice(SHAPES[: 3 + number // 2])
        for _ in range(1 + draw.randrange(1 + (number > 7) * 2))
    ]
    names = []
    for i, shape in enumerate(shapes):
        ownership = Ownership.DONATE if donates and i == 0 else Ownership.BORROW
        names.append(builder.input(f"x{i}", shape, "float32", ownership=ownership))
        placement += _placement(draw, machine, f"input.x{i}", number)
    reads = [0] if donates else [draw.randrange(len(shapes))]
    reads += [draw.randrange(len(shapes)) for _ in range(draw.randrange(2) * (number > 3))]
    for i, at in enumerate(reads):
        low, high = (builder.constant(np.float32(sign * MOST)) for sign in (-1, 1))
        turned = builder.op("Sub", builder.constant(np.float32(3 - 5 * i)), names[at])
        builder.output(f"y{i}", builder.op("Max", builder.op("Min", turned, high), low))
        if not (donates and i == 0):
            placement += _placement(draw, machine, f"output.y{i}", number)
    try:
        compiled = stitch.compile(builder.build(), target=machine, placement=placement)
    except StitchError:
        return None
    return Work(compiled, tuple(shapes), tuple(reads), donates)


def _placement(draw: Random, machine: Machine, slot: str, number: int) -> list[str]:
    spaces = [s for s in (L1, L1, L1, DRAM, HOST) if s in machine.shape.spaces]
    space = draw.choice(spaces)
    placement = [f"{slot}.space={space.value}"]
    if not draw.randrange(8):
        placement.append(f"{slot}.layout=tile")
    if space is L1 and number > 5 and not draw.randrange(4):
        shape = machine.shape.space(L1)
        steps = max(1, shape.capacity // 2 // shape.granule)
        address = shape.base + draw.randrange(steps) * shape.granule
        placement.append(f"{slot}.address={address:#x}")
    return placement


def layouts(machine: Machine) -> tuple[Layout, ...]:
    """Where tensors of a machine are brought by hand."""
    made = []
    for space in (L1, DRAM, HOST):
        if space in machine.shape.spaces:
            made += [Layout(F32, space), Layout(F32, space, (32, 32)), Layout(BF16, space)]
    return tuple(made)


def numbers(shape: tuple[int, ...], start: int) -> Array:
    """An array of small whole numbers; which ones, `start` says."""
    count = int(np.prod(shape))
    return (np.arange(start, start + count) % 61 - 30).reshape(shape).astype(np.float32)
