"""Ours: one `stitch.Pipeline` per machine, executor and form of the values between programs.

Comes in: a case. Goes out: ways whose result lies on the device, ready, when `run` returns. The
devices stay open until the given stack is left.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import stitch
from peer_ways.cases import FLOAT32_TOLERANCE, Case, Way
from stitch.program import Array

#: Wishes for every program, by the name of the form; the goals are about the first.
FORMS: dict[str, tuple[str, ...]] = {
    "float32": (),
    "tiled": ("input.0.layout=tile", "output.0.layout=tile"),
    "bfloat16": ("input.0.data_type=bfloat16", "output.0.data_type=bfloat16"),
}
#: bfloat16 keeps eight bits, and errors add up from layer to layer.
BFLOAT16_TOLERANCE = 3e-2


def make_ways(case: Case, stack: ExitStack, machine: str, executor: str, form: str) -> list[Way]:
    """One pipeline; raises `UsageError` where the executor's package is not installed."""
    device = stack.enter_context(stitch.open_device(machine, executor=executor))
    loaded = []
    for i, program in enumerate(case.programs):
        module, examples = program.stitch_source(f"program{i}")
        loaded.append(
            device.load(
                stitch.compile(
                    module, examples, target=machine, wishes=FORMS[form], name=f"program{i}"
                )
            )
        )
    # Arrays are float32 in every form: that is the type the programs declare.
    run = finished(stitch.Pipeline(loaded), case.x)
    tolerance = BFLOAT16_TOLERANCE if form == "bfloat16" else FLOAT32_TOLERANCE
    name = f"stitch {executor}, {form}, {machine}"
    return [Way(name, run, case.x, as_array, tolerance)]


def finished(pipeline: stitch.Pipeline, given: Array) -> Callable[[Any], Any]:
    """A call whose result is ready when it returns.

    A pipeline that goes by way of the queue gives pending results, and what nobody reads is never
    computed: such a call waits.
    """
    for _ in range(2):
        found = pipeline(given)
    outputs = found if isinstance(found, tuple) else (found,)
    if not any(tensor.is_pending for tensor in outputs):
        return pipeline

    def run(x: Array) -> Any:
        result = pipeline(x)
        stitch.wait(result)
        return result

    return run


def as_array(found: Any) -> Array:
    """The result of a pipeline, copied out."""
    array: Array = found.numpy()
    return array
