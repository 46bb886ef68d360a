"""Small models and machines that the suites share."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from stitch import api
from stitch.graph import ComputationGraphBuilder
from stitch.machine import Machine, SpaceShape, load_machine
from stitch.program import Array
from stitch.runtime import Tensor


def tiny(
    *,
    l1_nbytes: int | None = None,
    dram_nbytes: int | None = None,
    core_grid: tuple[int, int] = (2, 2),
    name: str = "tiny",
) -> Machine:
    """Return the tiny machine with other sizes per bank, or another grid of cores."""
    machine = load_machine("tiny")
    shape = machine.shape
    l1, dram = shape.l1, shape.dram
    assert l1 is not None
    assert dram is not None
    limit = l1.limit if l1_nbytes is None else l1.base + l1_nbytes
    l1 = SpaceShape(core_grid[0] * core_grid[1], l1.base, limit, l1.alignment)
    if dram_nbytes is not None:
        dram = SpaceShape(dram.banks, dram.base, dram.base + dram_nbytes, dram.alignment)
    shape = dataclasses.replace(shape, name=name, core_grid=core_grid, l1=l1, dram=dram)
    return dataclasses.replace(machine, shape=shape)


def model(
    name: str,
    build: Callable[[ComputationGraphBuilder], None],
    *,
    target: str | Machine = "tiny",
    placement: Sequence[str] = (),
) -> api.CompiledModel:
    """Return the compiled model of a graph that a function writes."""
    builder = ComputationGraphBuilder(name)
    build(builder)
    return api.compile(builder.build(), target=target, placement=placement)


def integers(shape: tuple[int, ...] = (4, 64), start: int = 0) -> Array:
    """Return small whole numbers: exact in every floating type that is wide enough."""
    count = int(np.prod(shape))
    return (np.arange(start, start + count) % 61).reshape(shape).astype(np.float32)


def one(result: object) -> Tensor:
    """Return the only output of a call."""
    assert isinstance(result, Tensor)
    return result


def several(result: object) -> tuple[Tensor, ...]:
    """Return the outputs of a call that has more than one."""
    assert isinstance(result, tuple)
    return result
