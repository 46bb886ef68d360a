"""Small models, machines and checks that the tests of the runtime share."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

import stitch
from stitch.graph import ComputationGraphBuilder
from stitch.graph.symbolic import SymbolicTensor
from stitch.machine import Machine
from stitch.program import InputKind, Ownership
from stitch.runtime import RuntimeDevice
from stitch.testing import integers as integers
from stitch.testing import model as model
from stitch.testing import one as one
from stitch.testing import several as several
from stitch.testing import tiny as tiny
from stitch.ttb import Binary
from tests.support import garbage

Placement = Sequence[str]


def scaled(
    name: str,
    factor: float,
    shape: tuple[int, ...] = (4, 64),
    *,
    target: str | Machine = "tiny",
    placement: Placement = (),
    data_type: str = "float32",
) -> stitch.CompiledModel:
    """y = factor * x + 1: every element tells which programs it went through, in which order."""

    def build(b: ComputationGraphBuilder) -> None:
        x = b.input("x", shape, data_type)
        b.output("y", x * factor + 1)

    return model(name, build, target=target, placement=placement)


def binary_op(
    name: str,
    op: str,
    shape: tuple[int, ...],
    *,
    target: str | Machine = "tiny",
    placement: Placement = (),
    kind: InputKind = InputKind.PARAMETER,
) -> stitch.CompiledModel:
    """y = op(x, w) with the weight `w` as an input."""

    def build(b: ComputationGraphBuilder) -> None:
        x = b.input("x", shape, "float32")
        w = b.input("w", shape, "float32", kind)
        b.output("y", b.op(op, x, w))

    return model(name, build, target=target, placement=placement)


def consuming(
    name: str,
    factor: float,
    shape: tuple[int, ...] = (4, 64),
    *,
    target: str | Machine = "tiny",
    placement: Placement = (),
) -> stitch.CompiledModel:
    """y = factor * x over the buffer of x, which is donated."""

    def build(b: ComputationGraphBuilder) -> None:
        x = b.input("x", shape, "float32", ownership=Ownership.DONATE)
        b.output("y", x * factor)

    return model(name, build, target=target, placement=placement)


def parameters_only(
    name: str, factor: float, shape: tuple[int, ...] = (4, 64), *, target: str | Machine = "tiny"
) -> stitch.CompiledModel:
    """y = factor * w with nothing but a parameter: its results can be remembered."""

    def build(b: ComputationGraphBuilder) -> None:
        w: SymbolicTensor = b.input("w", shape, "float32", InputKind.PARAMETER)
        b.output("y", w * factor)

    return model(name, build, target=target)


def together(*models: stitch.CompiledModel) -> Binary:
    """One binary with the programs of several models."""
    programs = tuple(m.binary.programs[0] for m in models)
    return Binary(programs, models[0].binary.machine, "test")


def used(device: RuntimeDevice) -> dict[str, int]:
    """Bytes per bank that are allocated, by space; runs the queue."""
    device.flush()
    return {space.value: use.used_nbytes for space, use in device.memory_use().items()}


def writes_seen(device: RuntimeDevice) -> tuple[int, int]:
    """Writes that the memory spaces have counted in this period, and their bytes."""
    account = device.account()
    return account.writes_seen, account.nbytes_seen


@pytest.fixture(autouse=True)
def memory_comes_back(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """After every test: with all handles gone, every device holds nothing at all."""
    opened: list[RuntimeDevice] = []
    begin = RuntimeDevice.__init__

    def remember(self: RuntimeDevice, *arguments: Any, **options: Any) -> None:
        begin(self, *arguments, **options)
        opened.append(self)

    monkeypatch.setattr(RuntimeDevice, "__init__", remember)
    with garbage.only_of_here():
        yield
        for generation in (1, 2):
            if any(held_by(device) for device in opened):
                gc.collect(generation)
    for device in opened:
        assert not (held := held_by(device)), f"memory was not given back: {held}"


def held_by(device: RuntimeDevice) -> list[str]:
    """What a device still holds once it has read the notes of the finalizers."""
    device.drain()
    device.drain()
    return [
        f"{space.value} {at:#x}: {size} B of {origin}"
        for space, use in device.memory_use().items()
        for at, size, origin in use.buffers
    ]
