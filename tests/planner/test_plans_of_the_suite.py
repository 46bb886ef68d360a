"""Each plan that runs in a test is seen, once, by the fixture that asks the checker about it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import stitch
from stitch.planner import Copy
from tests.support import plans_that_ran
from tests.support.stitched_models import integers, one, scaled


@pytest.mark.parametrize("programs", [1, 2])
def test_a_plan_is_taken_after_its_first_run_and_not_again(programs: int) -> None:
    with stitch.open_device("tiny") as device:
        pipe = stitch.Pipeline([device.load(scaled("double", 2.0))] * programs)
        one(pipe(integers())).numpy()
        (plan,) = plans_that_ran.taken()
        assert len(plan.request.tasks) == programs
        assert plans_that_ran.defects([plan]) == []
        for _ in range(8):
            plans_that_ran.taken()
            one(pipe(integers())).numpy()
        assert plans_that_ran.taken() == []


def test_a_plan_that_lacks_a_step_is_not_taken_for_sound() -> None:
    with stitch.open_device("tiny") as device:
        np.testing.assert_array_equal(
            one(device.load(scaled("double", 2.0))(integers())).numpy(), integers() * 2 + 1
        )
    (plan,) = plans_that_ran.taken()
    left = tuple(step for step in plan.steps if not isinstance(step, Copy))
    assert left != plan.steps
    (defect,) = plans_that_ran.defects([replace(plan, steps=left)])
    assert "content" in defect
