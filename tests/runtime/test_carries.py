"""Carries: a result that lies where a donated entry lay; its plan serves entries at any places."""

from __future__ import annotations

import numpy as np
import pytest

import stitch
from tests.support.stitched_models import consuming

SHAPE = (4, 64)


def one(result: stitch.Tensor | tuple[stitch.Tensor, ...]) -> stitch.Tensor:
    assert isinstance(result, stitch.Tensor)
    return result


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
        assert after.plans_made == after.recordings_made == 2


def test_an_overwritten_result_leaves_its_lease_and_gives_it_back_when_dropped() -> None:
    with stitch.open_device("wormhole_n150") as device:
        eat = device.load(consuming("eat", 2.0, SHAPE, target=device.machine))
        x = np.ones(SHAPE, np.float32)
        for step in range(12):
            if step == 6:
                settled = device.statistics()
            first = one(eat(x))
            first.numpy()
            second = one(eat(first))
            np.testing.assert_array_equal(second.numpy(), x * 4)
            del first, second
        after = device.statistics()
        assert after.plans_made == settled.plans_made
        assert after.bindings_made == settled.bindings_made


def test_a_pipeline_overwrites_what_it_is_given_to_keep() -> None:
    with stitch.open_device("wormhole_n150") as device:
        eat = device.load(consuming("eat", 2.0, SHAPE, target=device.machine))
        pipe = stitch.Pipeline([eat, eat])
        state = one(pipe(np.ones(SHAPE, np.float32)))
        for step in range(12):
            before, spot = state, state.address
            state = one(pipe(before))
            assert state.address == spot
            np.testing.assert_array_equal(state.numpy(), np.full(SHAPE, 4.0 ** (step + 2)))
            with pytest.raises(stitch.TaskError, match="donated to 'eat'"):
                before.numpy()
