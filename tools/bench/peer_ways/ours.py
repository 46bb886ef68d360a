"""Ours: one `stitch.Pipeline` per machine, executor and form of the values between programs; and
the same pipeline linked into one program, and the same programs called one by one.

The devices stay open until the given stack is left.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack, suppress
from typing import Any

import stitch
from peer_ways.cases import FLOAT32_TOLERANCE, Case, Program, Way
from peer_ways.results import Side
from stitch.errors import LinkError
from stitch.program import Array

#: Placement options for every program, by the name of the form; the goals are about the first.
FORMS: dict[str, tuple[str, ...]] = {
    "float32": (),
    "tiled": ("input.0.layout=tile", "output.0.layout=tile"),
    "bfloat16": ("input.0.data_type=bfloat16", "output.0.data_type=bfloat16"),
}
#: bfloat16 keeps eight bits, and errors add up from layer to layer.
BFLOAT16_TOLERANCE = 3e-2


def make_ways(
    case: Case, stack: ExitStack, machine: str, executor: str, form: str, more: Collection[str] = ()
) -> list[tuple[Side, Way]]:
    """One pipeline; in float32 also linked and fused, and as calls, if these sides are among
    `more`; raises `UsageError` where the executor's package is not installed."""
    models = [compiled(program, i, machine, form) for i, program in enumerate(case.programs)]

    def opened() -> Any:
        """A device of its own for each way: what lies on a shared one would be in the caches."""
        return stack.enter_context(stitch.open_device(machine, executor=executor))

    device = opened()
    # Arrays are float32 in every form: that is the type the programs declare.
    run = finished(stitch.Pipeline([device.load(model) for model in models]), case.x)
    tolerance = BFLOAT16_TOLERANCE if form == "bfloat16" else FLOAT32_TOLERANCE
    apart = Way(f"stitch {executor}, {form}, {machine}", run, case.x, as_array, tolerance)
    if form != "float32":
        return [("other form", apart)]
    ways: list[tuple[Side, Way]] = [("ours", apart)]
    if "linked" in more:
        device = opened()
        loaded = [device.load(model) for model in models]
        for how, option in (("linked", "link"), ("fused", "fuse")):
            # Not every executor promises the bits of the separate programs.
            with suppress(LinkError):
                run = finished(stitch.Pipeline(loaded, **{option: True}), case.x)
                name = f"stitch {executor}, {how}, {machine}"
                ways.append(("linked", Way(name, run, case.x, as_array, stitched=False)))
    if "calls" in more:
        device = opened()
        name = f"stitch {executor}, calls, {machine}"
        ways.append(("calls", Way(name, called([device.load(m) for m in models]), case.x)))
    return ways


def compiled(program: Program, number: int, machine: str, form: str) -> stitch.CompiledModel:
    """A program of a case, compiled alone."""
    module, examples = program.stitch_source(f"program{number}")
    return stitch.compile(
        module, examples, target=machine, placement=FORMS[form], name=f"program{number}"
    )


def called(programs: Sequence[Any]) -> Callable[[Any], Any]:
    """`c(b(a(x))).numpy()`."""

    def run(x: Any) -> Array:
        for program in programs:
            x = program(x)
        array: Array = x.numpy()
        return array

    return run


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
