"""How often work is planned: once where nothing would be different."""

from __future__ import annotations

import numpy as np
import pytest

import stitch
from stitch.planner import Plan, PlanRequest, plan
from stitch.runtime.recording import recording_maker
from tests.support.stitched_models import one, scaled, tiny

SHAPE = (8, 64)
IN_L1 = ("input.x.space=l1", "output.y.space=l1")


def test_work_under_pressure_that_lends_nothing_is_planned_in_one_picture(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machine = tiny(l1_nbytes=2560, dram_nbytes=24_576)
    asked: list[PlanRequest] = []

    def counted(request: PlanRequest, *, spills: bool) -> Plan:
        asked.append(request)
        return plan(request, spills=spills)

    monkeypatch.setattr(recording_maker, "plan", counted)
    with stitch.open_device(machine) as device:
        program = device.load(scaled("s", 2.0, SHAPE, target=machine, wishes=IN_L1))
        results = [device.tensor(np.ones(SHAPE, np.float32))]
        for _ in range(8):
            results.append(one(program(results[-1])))
        device.run_queue()
        ((made, _),) = device.history.plans
        assert not made.moves_nothing, "something had to leave"
        assert asked == [made.request]
