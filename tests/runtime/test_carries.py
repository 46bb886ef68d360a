"""Results in the buffer of a donated input: one plan serves inputs at any address."""

from __future__ import annotations

import numpy as np
import pytest

import stitch
from stitch.graph import ComputationGraphBuilder
from stitch.machine import Machine
from stitch.program import Space
from tests.support.grids import in_turn
from tests.support.stitched_models import Placement, consuming, model, one

SHAPE = (4, 64)


def doubled(
    name: str, factor: float, shape: tuple[int, ...], *, target: Machine, placement: Placement
) -> stitch.CompiledModel:
    """y = factor * x, beside x."""

    def build(b: ComputationGraphBuilder) -> None:
        b.output("y", b.input("x", shape, "float32") * factor)

    return model(name, build, target=target, placement=placement)


def test_a_state_that_is_overwritten_again_and_again_needs_one_plan() -> None:
    with stitch.open_device("wormhole_n150") as device:
        eat = device.load(consuming("eat", 2.0, SHAPE, target=device.machine))
        states = [device.tensor(np.full(SHAPE, i, np.float32)) for i in range(4)]
        # Onto the device first: a host array is copied, not overwritten.
        states = [one(eat(state)) for state in states]
        device.flush()
        spots = [state.address for state in states]
        for step in range(20):
            if step == 8:
                settled = device.statistics()
            for i, state in enumerate(states):
                states[i] = one(eat(state))
                assert states[i].numpy()[0, 0] == i * 2.0 ** (step + 2)
                with pytest.raises(stitch.TaskError, match="donated to 'eat'"):
                    state.numpy()
        assert [state.address for state in states] == spots
        after = device.statistics()
        assert (after.plans_made, after.bindings_made) == (
            settled.plans_made, settled.bindings_made,
        )  # fmt: skip
        # One for arrays, one for states, wherever they lie.
        assert after.plans_made == after.executables_made == 2


#: Placement options of a program whose result is fed back, and whether it takes its input over.
WAYS: dict[str, tuple[tuple[str, ...], bool]] = {
    "donated": ((), True),
    "donated, converted": (("input.x.layout=tile",), True),
    "input at an address": (("input.x.address={0}",), False),
    "output at an address": (("output.y.address={0}",), False),
    "both at addresses": (("input.x.address={0}", "output.y.address={1}"), False),
    "input at an address, donated": (("input.x.address={0}",), True),
    "both at addresses, donated": (("input.x.address={0}", "output.y.address={1}"), True),
}


@pytest.mark.parametrize(("window", "count", "way"), in_turn([1, 8, 64], [1, 2, 8, 65], WAYS))
def test_feeding_back_settles(way: str, count: int, window: int) -> None:
    placement, donates = WAYS[way]
    make = consuming if donates else doubled
    with stitch.open_device("wormhole_n150", window=window) as device:
        base = device.machine.shape.space(Space.L1).base
        spots = [f"{base + at:#x}" for at in (0x600, 0xA00)]
        lying = ("input.x.space=l1", "output.y.space=l1", *[w.format(*spots) for w in placement])
        model = make("step", 2.0, SHAPE, target=device.machine, placement=lying)
        pipe = stitch.Pipeline([device.load(model)] * count)
        state = device.tensor(np.ones(SHAPE, np.float32))
        settled = device.statistics()
        for step in range(120):
            if step == 20:
                settled = device.statistics()
            before = state
            state = one(pipe(before))
            if donates:
                with pytest.raises(stitch.TaskError, match="donated to 'step'"):
                    before.numpy()
        factor = np.float32(2.0)
        with np.errstate(over="ignore"):
            expected = factor ** np.float32(120 * count)
        np.testing.assert_array_equal(state.numpy(), np.full(SHAPE, expected))
        after = device.statistics()
        assert (after.plans_made, after.executables_made, after.bindings_made) == (
            settled.plans_made, settled.executables_made, settled.bindings_made,
        )  # fmt: skip
        assert after.code_written == settled.code_written


def test_what_is_donated_to_a_settled_pipeline_is_looked_at_each_time() -> None:
    with stitch.open_device("wormhole_n150") as device:
        pipe = stitch.Pipeline([device.load(consuming("eat", 2.0, SHAPE, target=device.machine))])
        state = one(pipe(np.ones(SHAPE, np.float32)))
        for _ in range(5):
            state = one(pipe(state))
        part = state[1:2]
        with pytest.raises(stitch.TaskError, match="is donated, but views share it"):
            pipe(state)
        del part
        held = one(pipe(state))
        np.testing.assert_array_equal(held.numpy(), np.full(SHAPE, 128.0))
