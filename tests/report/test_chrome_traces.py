"""Chrome traces keep what comes last, and add up all of it."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest

import stitch
from stitch.report import chrome_trace
from tests.support.stitched_models import integers, one, scaled


def worked(device: stitch.Device) -> None:
    """Runs of several plans, one that stops half-way, reads and writes."""
    programs = [device.load(scaled(n, 2.0, wishes=("input.x.space=l1",))) for n in "ab"]
    pipe = stitch.Pipeline(programs)

    def fail(context: Any) -> None:
        raise ValueError("told to")

    for start in range(20):
        made = one(pipe(integers(start=start)))
        if start % 3 == 0:
            made = one(programs[0](made))
        if start % 4 == 0:
            made.numpy()
        if start % 5 == 0:
            device.write(made, integers())
        if start % 6 == 0:
            end = device.hooks.register(after_program=fail)
            with pytest.raises(ValueError, match="told to"):
                pipe(integers())
            end()


@pytest.mark.parametrize("limit", [1, 7, 40, 10_000])
def test_a_trace_that_is_full_has_the_last_lines_and_counts_the_others(
    limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with stitch.open_device("tiny") as device:
        whole = chrome_trace.ChromeTrace(device)
        with monkeypatch.context() as patch:
            patch.setattr(chrome_trace, "MAX_EVENTS", limit)
            patch.setattr(chrome_trace, "_LOOK_AFTER", 3)
            last = chrome_trace.ChromeTrace(device)
        worked(device)
        last.close()
        whole.close()
    assert len(last._seen) <= limit + 3, "what makes no line any more is let go of"
    kept, again = last.as_json(), last.as_json()
    assert kept == again, "asking changes nothing"
    titles, lines = whole.as_json()["traceEvents"][:2], whole.as_json()["traceEvents"][2:]
    assert len(lines) > 100
    assert kept["traceEvents"] == titles + lines[-limit:]
    totals = whole.as_json()["otherData"] | {"older_events_left_out": max(0, len(lines) - limit)}
    assert kept["otherData"] == totals


def test_the_lines_of_a_run_are_those_of_its_plan_on_both_clocks() -> None:
    with stitch.open_device("tiny") as device:
        trace = chrome_trace.ChromeTrace(device)
        pipe = stitch.Pipeline([device.load(scaled("a", 2.0, wishes=("input.x.space=l1",)))])
        for start in range(6):
            np.testing.assert_array_equal(
                one(pipe(integers(start=start))).numpy(), integers(start=start) * 2 + 1
            )
        body = trace.as_json()
        trace.close()
    runs = [e for e in body["traceEvents"] if e.get("cat") == "run"]
    assert len(runs) == 6
    assert [e["args"]["tasks"] for e in runs] == [["a"]] * 6
    assert all(a["ts"] + a["dur"] <= b["ts"] for a, b in pairwise(runs))
    simulated = [e for e in body["traceEvents"] if e.get("cat") in ("copy", "program")]
    assert [e["cat"] for e in simulated] == ["copy", "program"] * 6
    assert all(e["dur"] > 0 for e in simulated)
    assert [e["ts"] for e in simulated] == pytest.approx(
        [sum(e["dur"] for e in simulated[:i]) for i in range(12)]
    )
