"""Programs with fixed addresses: a held result there is moved once per run, and planning stops."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import stitch
from stitch.planner import Relocate
from stitch.program import Array
from stitch.report import explain
from stitch.report.run_record import Recorder
from tests.support.grids import in_pairs
from tests.support.stitched_models import integers, one, scaled, writes_seen

MACHINE = "wormhole_n150"
FIRST, SECOND = 0x40000, 0x48000
IN_L1 = ("input.x.space=l1", "output.y.space=l1")
#: What a program names.
NAMES: dict[str, tuple[str, ...]] = {
    "output": (*IN_L1, f"output.y.address={FIRST:#x}"),
    "input": (*IN_L1, f"input.x.address={FIRST:#x}"),
    "both": (*IN_L1, f"input.x.address={FIRST:#x}", f"output.y.address={SECOND:#x}"),
    "output in dram": ("input.x.space=dram", "output.y.space=dram", "output.y.address=0x400000"),
}
#: How many results are held at a time; "fed back": each is the next input.
HELD = {"unheld": 0, "y =": 1, "ring": 3, "fed back": 1}
#: In a Pipeline windows make no difference.
FORMS = [(window, form) for form in ("call", "two calls") for window in (1, 8, 64)]
FORMS += [(8, form) for form in ("pipeline", "pipeline of two")]
#: Passes before and while nothing may be planned, and windows.
PASSES, WINDOWS = (48, 40), (4, 1)

Call = Callable[[Any], stitch.Tensor]


def call_of(device: stitch.Device, names: str, form: str) -> Call:
    """y = x / 2 + 1, by a program that names addresses, perhaps after one that names none."""
    fixed = device.load(scaled("fixed", 0.5, target=MACHINE, placement=NAMES[names]))
    loose = device.load(scaled("loose", 0.5, target=MACHINE, placement=NAMES[names][:2]))
    if "pipeline" in form:
        pipe = stitch.Pipeline([loose, fixed] if "two" in form else [fixed])
        return lambda x: one(pipe(x))
    return lambda x: one(fixed(x) if form == "call" else fixed(loose(x)))


def by_hand(x: Array, form: str) -> Array:
    for _ in range(2 if "two" in form else 1):
        x = x * np.float32(0.5) + 1
    return x


@pytest.mark.parametrize(("how", "names", "held"), in_pairs(FORMS, NAMES, HELD), ids=str)
def test_what_is_held_at_a_fixed_address_settles(
    how: tuple[int, str], names: str, held: str
) -> None:
    window, form = how
    with stitch.open_device(MACHINE, window=window) as device:
        call, ring = (
            call_of(device, names, form),
            deque[tuple[Array, stitch.Tensor]]([], HELD[held]),
        )
        state: Any = integers()
        numbers = state
        before = device.statistics()
        size = window if "call" in form else 1
        warm, more = (max(a, b * size) // size * size for a, b in zip(PASSES, WINDOWS, strict=True))
        for number in range(warm + more):
            if number == warm:
                device.flush()
                before = device.statistics()
            if held == "fed back":
                state, numbers = call(state), by_hand(numbers, form)
            else:
                x = integers(start=number % 7)
                ring.append((by_hand(x, form), call(x)))
        device.flush()
        after = device.statistics()
        assert (after.plans_made, after.code_written) == (before.plans_made, before.code_written)
        if held == "fed back":
            ring.append((numbers, state))
        elif held == "unheld":
            ring = deque([(by_hand(state, form), call(state))])
        for expected, result in ring:
            np.testing.assert_array_equal(result.numpy(), expected)


@pytest.mark.parametrize("names", ["output", "both"])
def test_a_held_result_is_moved_by_the_next_run_as_one_counted_copy(names: str) -> None:
    with stitch.open_device(MACHINE) as device:
        recorder = Recorder(device)
        call = call_of(device, names, "pipeline")
        held = [call(integers(start=number)) for number in range(12)]
        address = FIRST if names == "output" else SECOND
        lying = [result.address for result in held]
        assert lying[-1] == address and len(set(lying)) == len(lying)
        # The first has nobody to move; each comes in by one copy.
        assert device.account().writes_seen == 12 + 11
        text = explain(device)
        assert text.startswith(f"{MACHINE}: 12 program runs, 23 copies, ")
        assert "move   x11 1024 B" in text
        totals = json.loads(recorder.text())["totals"]
        assert (totals["copies"], totals["nbytes"]) == writes_seen(device)
        moved = [
            step
            for made, _ in device.account().plans
            for step in made.steps
            if isinstance(step, Relocate)
        ]
        assert moved and all(step.count == 1 and step.nbytes == 1024 for step in moved)
        for number, result in enumerate(held):
            expected = by_hand(integers(start=number), "pipeline")
            np.testing.assert_array_equal(result.numpy(), expected)
