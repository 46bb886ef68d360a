"""Stages between cells, beside plain NumPy: what a loop overwrites stays in its cell, what somebody
holds does not change, and an interrupted run takes only what it was overwriting.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import stitch
from stitch.errors import TaskError
from stitch.program import Array, Ownership
from stitch.runtime import Cells, Conversion, HookContext, LoopStage, ProgramCall
from tests.support.stitched_models import held_by, model

SHAPE = (4, 64)
STATE, BATCH, SEEN, SUM = range(4)


def programs(machine: Any) -> tuple[stitch.CompiledModel, stitch.CompiledModel]:
    """seen = x + state, and state = state / 2 over itself with the sum of what was seen."""

    def look(b: stitch.ComputationGraphBuilder) -> None:
        x, state = b.input("x", SHAPE, "float32"), b.input("state", SHAPE, "float32")
        b.output("seen", x + state)

    def step(b: stitch.ComputationGraphBuilder) -> None:
        state = b.input("state", SHAPE, "float32", ownership=Ownership.DONATE)
        seen = b.input("seen", SHAPE, "float32")
        b.output("state", state * 0.5)
        b.output("sum", seen * 2.0)

    return model("look", look, target=machine), model("step", step, target=machine)


class Loop:
    """A loop of two stages, and what NumPy says of it."""

    def __init__(self, device: stitch.Device) -> None:
        look, step = (device.load(compiled) for compiled in programs(device.machine))
        self.device, self.cells = device, Cells(device)
        self.cells.grow(4)
        descs = [port.desc for port in look.ports]
        self.look = LoopStage(
            self.cells, [Conversion(look.ports[0], BATCH, descs[0])],
            [ProgramCall(look, (BATCH, STATE), (SEEN,))],
        )  # fmt: skip
        self.step = LoopStage(self.cells, [], [ProgramCall(step, (STATE, SEEN), (STATE, SUM))])
        self.desc = descs[1]
        self.begin(np.full(SHAPE, 64.0, np.float32))

    def begin(self, state: Array) -> None:
        tensor = self.device.empty(self.desc)
        self.device.write(tensor, state)
        self.cells.hold(STATE, tensor)
        self.state = state

    def tensor(self, cell: int) -> stitch.Tensor:
        found = self.cells.tensor(cell)
        assert found is not None
        return found

    def turn(self, x: Array) -> None:
        self.cells.drop((BATCH, SEEN, SUM))
        self.look([x])
        self.step()
        self.seen, self.state = x + self.state, self.state * np.float32(0.5)

    def check(self) -> None:
        np.testing.assert_array_equal(self.tensor(STATE).numpy(), self.state)
        np.testing.assert_array_equal(self.tensor(SUM).numpy(), self.seen * 2)


def array(choice: random.Random) -> Array:
    return np.full(SHAPE, choice.randrange(100), np.float32)


def check_held(held: list[tuple[Any, Array]]) -> None:
    for tensor, expected in held:
        np.testing.assert_array_equal(np.asarray(tensor), expected)


@pytest.mark.parametrize("debug", [False, True])
@pytest.mark.parametrize("machine", ["tiny", "host", "wormhole_n150"])
def test_a_settled_loop_makes_nothing(machine: str, debug: bool) -> None:
    with stitch.open_device(machine, debug=debug) as device:
        loop, choice, done = Loop(device), random.Random(0), []
        address = loop.tensor(STATE).address
        for _ in range(12):
            loop.turn(array(choice))
            loop.check()
            done.append((replace(device.statistics(), replays=0), device.records.generation))
        assert done[6:] == done[6:7] * 6
        assert loop.tensor(STATE).address == address


@pytest.mark.parametrize("seed", range(24))
def test_random_loops_are_those_of_numpy(seed: int) -> None:
    choice = random.Random(seed)
    machine, window = choice.choice(["tiny", "host", "wormhole_n150"]), choice.choice([1, 4, 64])
    with stitch.open_device(machine, window=window, debug=seed % 5 == 4) as device:
        loop = Loop(device)
        held: list[tuple[stitch.Tensor, Array]] = []
        exported: list[tuple[Array, Array]] = []
        for _ in range(40):
            what = choice.randrange(9)
            if what == 0:
                held.append((loop.tensor(STATE), loop.state))
            elif what == 1:
                exported.append((np.from_dlpack(loop.tensor(STATE)), loop.state))
            elif what == 2 and held:
                del held[choice.randrange(len(held))]
            elif what == 3:
                exported.clear()
            elif what == 4:
                loop.begin(array(choice))
            elif what == 5:
                device.to_layout(loop.tensor(STATE), loop.desc)  # Left in the queue.
            # What overwrites takes it from whoever else held it; bytes that others hold it may not.
            held = [(t, e) for t, e in held if t._record is not loop.cells.values[STATE]]
            try:
                loop.turn(array(choice))
            except TaskError as error:
                assert exported, error
                exported.clear()
                loop = Loop(device)
                continue
            if choice.random() < 0.7:
                loop.check()
            if choice.random() < 0.4:
                held.append((loop.tensor(SUM), loop.seen * 2))
            check_held([*held, *exported])
        held.clear()
        exported.clear()
        del loop
        device.flush()
        assert held_by(device) == []


@pytest.mark.parametrize("turns", [0, 1, 8])
def test_an_interrupted_turn_takes_what_it_was_overwriting(turns: int) -> None:
    with stitch.open_device("wormhole_n150") as device:
        loop, x = Loop(device), np.ones(SHAPE, np.float32)
        for _ in range(turns):
            loop.turn(x)

        def interrupt(context: HookContext) -> None:
            if context.program.name == "step":
                raise KeyboardInterrupt

        remove = device.hooks.register(before_program=interrupt)
        with pytest.raises(KeyboardInterrupt):
            loop.turn(x)
            device.flush()
        remove()
        with pytest.raises(TaskError):
            loop.tensor(STATE).numpy()
        loop.begin(x)
        loop.turn(x)
        loop.check()
