"""Stages over persistent buffers, compared with NumPy."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import stitch
from stitch.errors import TaskError
from stitch.program import Array, Ownership
from stitch.runtime import HookContext, PersistentBuffers, StatefulExecutable, lend, share
from tests.support.grids import every
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
        self.device, self.cells = device, PersistentBuffers(device)
        x, state = (port.desc for port in look.ports)
        seeing, stepping = stitch.TaskGraph("look"), stitch.TaskGraph("step")
        batch = seeing.copy(seeing.input(x, "x"), x)
        seeing.output(batch)
        seeing.output(seeing.call(look, batch, seeing.input(state, "state")))
        states = [stepping.input(port.desc, port.name) for port in step.ports]
        for made in stepping.call(step, *states):
            stepping.output(made)
        cells = self.cells
        self.look = StatefulExecutable(cells, seeing.table(), (None, STATE), (BATCH, SEEN))
        self.step = StatefulExecutable(cells, stepping.table(), (STATE, SEEN), (STATE, SUM))
        self.desc = state
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
            done.append(replace(device.statistics(), replays=0))
        assert done[6:] == done[6:7] * 6
        assert loop.tensor(STATE).address == address


@pytest.mark.parametrize("seed", every(4, range(24)))
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
            try:
                loop.turn(array(choice))
            except TaskError as error:
                assert exported, error
                exported.clear()
                loop = Loop(device)
                continue
            # What overwrites takes it from whoever else held it.
            held = [(tensor, expected) for tensor, expected in held if tensor.is_allocated]
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
def test_an_interrupted_turn_leaves_states_before_or_after_it(turns: int) -> None:
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
        if turns == 0 and (loop.tensor(STATE).numpy() == loop.state).all():
            loop.begin(x)
        else:
            np.testing.assert_array_equal(loop.tensor(STATE).numpy(), loop.state * 0.5)
            loop.state = loop.state * np.float32(0.5)
        loop.turn(x)
        loop.check()


@pytest.mark.parametrize("window", [1, 64])
def test_a_stage_of_several_tasks_is_a_task_graph(window: int) -> None:
    seen: list[float] = []

    def note(x: Array) -> None:
        seen.append(float(x[0, 0]))

    with stitch.open_device("wormhole_n150", window=window) as device:
        look, step = (device.load(compiled) for compiled in programs(device.machine))
        for with_host in (False, True):
            cells, graph = PersistentBuffers(device), stitch.TaskGraph("turn")
            x, state = (graph.input(port.desc, port.name) for port in look.ports)
            read = graph.copy(graph.call(look, x, state), look.ports[0].desc)
            after, total = graph.call(step, state, read)
            graph.output(after)
            graph.output(total)
            if with_host:
                graph.host(note, total)
            turn = StatefulExecutable(cells, graph.table(), (None, 0), (0, 1))
            expected = np.full(SHAPE, 8.0, np.float32)
            tensor = device.empty(look.ports[1].desc)
            device.write(tensor, expected)
            cells.hold(0, tensor)
            del tensor
            for k in range(8):
                given = np.full(SHAPE, float(k), np.float32)
                turn([given])
                found, summed = cells.tensor(0), cells.tensor(1)
                assert found is not None
                assert summed is not None
                np.testing.assert_array_equal(summed.numpy(), (given + expected) * 2)
                expected = expected * np.float32(0.5)
                np.testing.assert_array_equal(found.numpy(), expected)
                del found, summed
            cells.close()
        assert seen == [2 * (k + 8.0 / 2**k) for k in range(8)]
        del look, step, graph, turn, cells, x, state, read, after, total
        device.flush()
        assert held_by(device) == []


@pytest.mark.parametrize("machine", ["host", "tiny"])
def test_what_others_share_is_overwritten_in_its_place(machine: str) -> None:
    with stitch.open_device(machine) as device:
        loop = Loop(device)
        array = share(loop.tensor(STATE))
        place = loop.tensor(STATE).address
        for number in range(6):
            loop.turn(np.full(SHAPE, number, np.float32))
            loop.check()
            np.testing.assert_array_equal(array, loop.state)
            assert loop.tensor(STATE).address == place
        assert loop.cells.is_alone(STATE)
        runs = device.account().total.copies
        array += 3
        loop.state = loop.state + 3
        loop.turn(np.full(SHAPE, 1.0, np.float32))
        loop.check()
        np.testing.assert_array_equal(array, loop.state)
        assert device.account().total.copies == runs + 1


def test_what_is_lent_and_shared_is_overwritten_where_its_owner_has_it() -> None:
    with stitch.open_device("host") as device:
        loop = Loop(device)
        theirs = np.full(SHAPE, 8.0, np.float32)
        loop.cells.hold(STATE, lend(device, theirs, "theirs", shared_by=loop))
        loop.state = theirs.copy()
        for number in range(4):
            loop.turn(np.full(SHAPE, number, np.float32))
            loop.check()
            np.testing.assert_array_equal(theirs, loop.state)


def test_a_shared_value_that_is_also_exported_is_not_overwritten() -> None:
    with stitch.open_device("tiny") as device:
        loop = Loop(device)
        shared = share(loop.tensor(STATE))
        loop.turn(np.full(SHAPE, 1.0, np.float32))
        np.testing.assert_array_equal(shared, loop.state)
        theirs = np.from_dlpack(loop.tensor(STATE))
        before = theirs.copy()
        with pytest.raises(TaskError, match="exported"):
            loop.turn(np.full(SHAPE, 2.0, np.float32))
        np.testing.assert_array_equal(theirs, before)
        del theirs
        loop.turn(np.full(SHAPE, 2.0, np.float32))
        np.testing.assert_array_equal(shared, loop.state)
        del shared
        loop.turn(np.full(SHAPE, 3.0, np.float32))
        loop.check()


def test_a_cell_without_a_value_is_named_and_nothing_is_queued() -> None:
    with stitch.open_device("wormhole_n150") as device:
        loop = Loop(device)
        loop.cells.drop((STATE,))
        device.flush()
        before = device.statistics()
        with pytest.raises(TaskError, match="input 'state' of 'look' has no value yet"):
            loop.look([np.ones(SHAPE, np.float32)])
        device.flush()
        assert device.statistics() == before
        loop.begin(np.ones(SHAPE, np.float32))
        loop.turn(np.ones(SHAPE, np.float32))
        loop.check()
