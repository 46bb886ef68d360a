"""Tensors as inputs: a pipeline on one beside an array, and `h = a(h)` beside NumPy by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import stitch
from steady_ways.measuring import Effort, Pass, Row, interleaved, passes_of, ratio
from steady_ways.subjects import MACHINE, by_hand, check, expected, inputs, load

GOAL_TENSOR = 1.2
#: `h = a(h)` over the same by hand, by how many steps lie between two looks at it.
GOALS_FEEDBACK = {1: 2.0, 64: 1.5}
LENGTH = 2


def rows(effort: Effort) -> Iterator[Row]:
    """Both."""
    yield tensor_over_array(effort)
    for steps, goal in GOALS_FEEDBACK.items():
        yield feedback_over_hand(steps, goal, effort)


def tensor_over_array(effort: Effort) -> Row:
    """A result of the device as the input, beside the array that it was made of."""
    with stitch.open_device(MACHINE) as device:
        first, *programs = load(device, LENGTH + 1)
        result = first(inputs()[0])
        array = result.numpy()
        by_tensor, by_array = stitch.Pipeline(programs), stitch.Pipeline(programs)
        check(by_tensor(result), expected(LENGTH + 1, 0))
        check(by_array(array), expected(LENGTH + 1, 0))

        def on_tensor() -> None:
            stitch.wait(by_tensor(result))

        def on_array() -> None:
            stitch.wait(by_array(array))

        ways: dict[str, Pass] = {"tensor": on_tensor, "array": on_array}
        times = interleaved(ways, passes_of(LENGTH, effort), effort)
    return ratio(
        f"pipe(tensor) ÷ pipe(array), {LENGTH} programs", times["tensor"], times["array"],
        GOAL_TENSOR,
    )  # fmt: skip


def feedback_over_hand(steps: int, goal: float, effort: Effort) -> Row:
    """So many steps `h = a(h)` and a look at the result, beside the same by hand."""
    with stitch.open_device(MACHINE) as device:
        (program,) = load(device, 1)
        ways: dict[str, Pass] = {
            "ours": stepping(program, inputs()[0], steps, lambda h: h.numpy()),
            "hand": stepping(by_hand(1), inputs()[0], steps, lambda h: h.copy()),
        }
        for _ in range(3):
            check(ways["ours"](), ways["hand"]())  # type: ignore[arg-type]
        times = interleaved(ways, passes_of(steps, effort), effort)
    mine, other = (tuple(t / steps for t in times[name]) for name in ("ours", "hand"))
    when = "each step" if steps == 1 else f"{steps} steps"
    return ratio(f"h = a(h) ÷ by hand, looked at after {when}", mine, other, goal)


def stepping(
    call: Callable[[Any], Any], h: Any, steps: int, look: Callable[[Any], object]
) -> Callable[[], object]:
    """So many steps from where the last ones ended, and a look."""

    def run() -> object:
        nonlocal h
        for _ in range(steps):
            h = call(h)
        return look(h)

    return run
