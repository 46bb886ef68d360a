"""Chains: layers as programs of their own that take their weights as inputs, run round by round."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from random import Random
from typing import Any
from weakref import ref

import numpy as np

import stitch
from stitch.machine import Machine, Path, load_machine
from stitch.program import DataType, Layout, Space

WIDTH = 32


def small_machine(l1_nbytes: int) -> Machine:
    """The tiny machine with so many bytes of L1 in each bank."""
    machine = load_machine("tiny")
    l1 = machine.shape.l1
    assert l1 is not None
    return replace(machine, shape=replace(machine.shape, l1=replace(l1, limit=l1.base + l1_nbytes)))


def priced_by_bytes(machine: Machine) -> Machine:
    """The machine with all copies at one rate, none waiting to start, and moves inside L1 free:
    there seconds are bytes through DRAM."""
    rates = {(Space.L1, Space.L1): 1e21}
    return replace(
        machine,
        paths=tuple((a, b, Path(0.0, ((1, rates.get((a, b), 1e9)),))) for a, b, _ in machine.paths),
    )


class Work:
    """A device, programs by what they compute, and the tensors of a chain: they lie in `home`.

    `held`: for each task that was queued, the last one that was while anybody held its result.
    """

    def __init__(self, device: Any, home: Space) -> None:
        self.device = device
        self.held: list[int] = []
        self._results: list[ref[Any]] = []
        self._home = Layout(DataType.FLOAT32, home)
        self._programs: dict[str, Any] = {}

    def weight(self, *shape: int) -> Any:
        there = self.device.tensor(np.ones(shape, np.float32))
        return there if there.layout == self._home else self._made(there.to_layout(self._home))

    def run(self, what: str, *inputs: Any, **attributes: Any) -> Any:
        """One operator as a program of its own, then Relu but for what a loss sends back."""
        shapes = [tuple(x.shape) for x in inputs]
        key = f"{what}{shapes}"
        if key not in self._programs:
            builder = stitch.ComputationGraphBuilder(f"{what.lower()}{len(self._programs)}")
            names = [builder.input(f"x{i}", s, "float32") for i, s in enumerate(shapes)]
            builder.output("y", builder.op("Relu", builder.op(what, *names, **attributes)))
            binary = stitch.compile(builder.build(), target=self.device.machine)
            self._programs[key] = self.device.load(binary)
        return self._made(self._programs[key](*inputs))

    def _made(self, result: Any) -> Any:
        """The result of a task that was just queued; what else is held now is noted."""
        now = len(self.held)
        self._results.append(ref(result))
        self.held.append(now)
        for task, made in enumerate(self._results):
            if made() is not None:
                self.held[task] = now
        return result


#: What runs, round by round; what is not wanted any more is not held.
Chain = Callable[[Work, int], Iterator[Any]]


def transformer(work: Work, rounds: int) -> Iterator[Any]:
    """Three blocks: query, key, value, scores, output, a residual, two layers."""
    blocks = [[work.weight(WIDTH, WIDTH) for _ in range(6)] for _ in range(3)]
    x = work.weight(WIDTH, WIDTH)
    for _ in range(rounds):
        for weights in blocks:
            heads = [work.run("MatMul", x, w) for w in weights[:3]]
            mixed = work.run("MatMul", heads.pop(0), heads.pop(0))
            mixed = work.run("MatMul", mixed, heads.pop())
            mixed = work.run("MatMul", mixed, weights[3])
            x = work.run("Add", x, mixed)
            mixed = work.run("MatMul", x, weights[4])
            mixed = work.run("MatMul", mixed, weights[5])
            x = work.run("Add", x, mixed)
            del mixed
        yield x


def cnn(work: Work, rounds: int) -> Iterator[Any]:
    """Eight convolutions with residuals, over an image."""
    kernels = [work.weight(8, 8, 3, 3) for _ in range(8)]
    outs = []
    for _ in range(rounds):
        x = before = work.weight(1, 8, 8, 8)
        for i, kernel in enumerate(kernels):
            x = work.run("Conv", x, kernel, pads=[1, 1, 1, 1])
            if i % 2:
                x, before = work.run("Add", x, before), x
        outs.append(x)
        yield outs


def unet(work: Work, rounds: int) -> Iterator[Any]:
    """Five layers down and five up, each beside the result of its depth."""
    weights = [work.weight(WIDTH, WIDTH) for _ in range(10)]
    x = work.weight(WIDTH, WIDTH)
    for _ in range(rounds):
        skips = []
        for w in weights[:5]:
            x = work.run("MatMul", x, w)
            skips.append(x)
        for w in weights[5:]:
            x = work.run("MatMul", x, w)
            x = work.run("Add", x, skips.pop())
        yield x


def training(work: Work, rounds: int) -> Iterator[Any]:
    """A step of five layers: forward, gradients of inputs and weights, new weights."""
    weights = [work.weight(WIDTH, WIDTH) for _ in range(5)]
    for _ in range(rounds):
        made = [work.weight(WIDTH, WIDTH)]
        for w in weights:
            made.append(work.run("MatMul", made[-1], w))
        grad = made.pop()
        for i in reversed(range(5)):
            slope = work.run("MatMul", made.pop(), grad)
            grad = work.run("MatMul", grad, weights[i])
            weights[i] = work.run("Sub", weights[i], slope)
            del slope
        del grad, w
        yield weights


def loop(work: Work, rounds: int) -> Iterator[Any]:
    """Nine weights in turn."""
    weights = [work.weight(WIDTH, WIDTH) for _ in range(9)]
    x = work.weight(1, WIDTH)
    for _ in range(rounds):
        for w in weights:
            x = work.run("MatMul", x, w)
        yield x


def in_any_order(seed: int, length: int) -> Chain:
    """Ten weights of three sizes, in an order drawn by seed, the same in each round."""

    def run(work: Work, rounds: int) -> Iterator[Any]:
        random = Random(seed)
        weights = [work.weight(WIDTH, random.choice((8, 16, 32))) for _ in range(10)]
        order = [random.choice(weights) for _ in range(length)]
        x = work.weight(1, WIDTH)
        out: list[Any] = []
        for _ in range(rounds):
            for w in order:
                out = [*out[-3:], work.run("MatMul", x, w)]
            yield out

    return run
