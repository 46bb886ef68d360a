"""Results never depend on the window: random work over few bytes, against plain NumPy."""

from __future__ import annotations

import numpy as np
import pytest

import stitch
from stitch.program import TILE_SHAPE, Array, DataType, InputKind, Layout, Space
from stitch.report import copy_lines
from stitch.runtime import LoadedProgram
from tests.support.grids import in_turn
from tests.support.machines import without_path
from tests.support.run_seed import SEED
from tests.support.stitched_models import binary_op, consuming, one, scaled, tiny

F32 = DataType.FLOAT32
SHAPE = (8, 64)
#: Room for about five tensors in L1, and for twenty in DRAM.
MACHINE = tiny(l1_nbytes=2560, dram_nbytes=24_576)
LAYOUTS = (
    Layout(F32, Space.L1),
    Layout(F32, Space.DRAM),
    Layout(F32, Space.HOST),
    Layout(F32, Space.DRAM, TILE_SHAPE),
)
MODELS = (
    scaled("in_l1", 2.0, SHAPE, target=MACHINE,
           placement=("input.x.space=l1", "output.y.space=l1")),
    scaled("l1_to_dram", 1.0, SHAPE, target=MACHINE,
           placement=("input.x.space=l1", "output.y.space=dram")),
    scaled("fixed", 0.5, SHAPE, target=MACHINE,
           placement=("input.x.space=l1", "input.x.address=0x600", "output.y.space=l1")),
    scaled("fixed_out", -1.0, SHAPE, target=MACHINE,
           placement=("input.x.space=l1", "output.y.space=l1", "output.y.address=0xa00")),
    binary_op("sub", "Sub", SHAPE, target=MACHINE, kind=InputKind.ACTIVATION,
              placement=("input.x.space=l1", "input.w.space=l1", "output.y.space=l1")),
    consuming("eat", 0.25, SHAPE, target=MACHINE, placement=("input.x.space=l1",)),
)  # fmt: skip
BYTES = tuple(compiled.encode() for compiled in MODELS)


def reference(name: str, x: Array, w: Array) -> Array:
    if name == "sub":
        return x - w
    if name == "eat":
        return x * np.float32(0.25)
    factors = {"in_l1": 2, "l1_to_dram": 1, "fixed": 0.5, "fixed_out": -1}
    return x * np.float32(factors[name]) + np.float32(1)


class Walk:
    """Random calls, conversions, views, drops and reads; the truth is kept beside every tensor."""

    def __init__(self, device: stitch.Device, seed: int) -> None:
        self.device = device
        self.rng = np.random.default_rng(seed)
        self.programs: list[LoadedProgram] = [device.load(data) for data in BYTES]
        self.alive: list[tuple[stitch.Tensor, Array]] = []
        self.read: list[Array] = []
        self.viewed: list[stitch.Tensor] = []

    def choose(self) -> tuple[stitch.Tensor | Array, Array]:
        whole = [pair for pair in self.alive if pair[0].shape == SHAPE]
        if not whole or self.rng.random() < 0.2:
            array = self.rng.integers(-8, 8, SHAPE).astype(np.float32)
            return array, array
        return whole[self.rng.integers(len(whole))]

    def step(self) -> None:
        kind = self.rng.random()
        if kind < 0.55:
            self.call()
        elif kind < 0.68:
            tensor, truth = self.choose()
            if isinstance(tensor, stitch.Tensor):
                layout = LAYOUTS[self.rng.integers(len(LAYOUTS))]
                self.alive.append((tensor.to_layout(layout, copy=True), truth))
        elif kind < 0.75 and self.alive:
            self.view(*self.alive[self.rng.integers(len(self.alive))])
        elif kind < 0.88 and self.alive:
            self.look(*self.alive[self.rng.integers(len(self.alive))])
        elif self.alive:
            tensor, _ = self.alive.pop(self.rng.integers(len(self.alive)))
            if self.rng.random() < 0.3:
                tensor.deallocate()
        while len(self.alive) > 9:
            self.alive.pop(self.rng.integers(len(self.alive)))
        held = {id(tensor) for tensor, _ in self.alive}
        self.viewed = [tensor for tensor in self.viewed if id(tensor) in held]

    def call(self) -> None:
        program = self.programs[self.rng.integers(len(self.programs))]
        (x, a), (w, b) = self.choose(), self.choose()
        if program.name == "eat" and any(tensor is x for tensor in self.viewed):
            return
        arguments = (x, w) if program.name == "sub" else (x,)
        result = one(program(*arguments))
        if program.name == "eat":
            self.alive = [pair for pair in self.alive if pair[0] is not x]
        self.alive.append((result, reference(program.name, a, b)))

    def view(self, tensor: stitch.Tensor, truth: Array) -> None:
        start = int(self.rng.integers(len(tensor)))
        try:
            view = tensor[start:]
        except stitch.LayoutError:  # Tiles, in which this row begins no page.
            view = self.device.tensor(truth[start:])
        self.alive.append((view, truth[start:]))
        self.viewed += [tensor, view]

    def look(self, tensor: stitch.Tensor, truth: Array) -> None:
        found = tensor.numpy()
        np.testing.assert_array_equal(found, truth)
        self.read.append(found)

    def run(self, steps: int) -> list[Array]:
        for _ in range(steps):
            self.step()
        for tensor, truth in self.alive:
            self.look(tensor, truth)
        return self.read


def walk(seed: int, window: int, steps: int, *, debug: bool, bounces: bool) -> list[Array]:
    machine = without_path(MACHINE, Space.L1, Space.L1) if bounces else MACHINE
    with stitch.open_device(machine, window=window, debug=debug) as device:
        found = Walk(device, seed).run(steps)
        kinds = {line.kind for line in copy_lines(device.history.plans)}
        assert {"copy", "evict", "bounce" if bounces else "move"} <= kinds
    return found


@pytest.mark.parametrize(("seed", "bounces"), in_turn(range(5), [False, True]))
def test_random_work_gives_the_same_bits_with_every_window(seed: int, bounces: bool) -> None:
    results = [
        walk(seed, window, 150, debug=window != 64, bounces=bounces) for window in (1, 7, 64)
    ]
    for other in results[1:]:
        assert [a.tobytes() for a in other] == [a.tobytes() for a in results[0]]


@pytest.mark.campaign("random_work")
@pytest.mark.parametrize("part", range(25))
def test_long_random_work_gives_the_same_bits_with_every_window(part: int) -> None:
    seed = 100 + SEED + part
    results = [
        walk(seed, window, 600, debug=window != 64, bounces=part % 3 == 0) for window in (1, 3, 64)
    ]
    for other in results[1:]:
        assert [a.tobytes() for a in other] == [a.tobytes() for a in results[0]]
