"""Observed runs have the plans, copies and bits of unobserved ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from typing import Any

import numpy as np
import pytest

import stitch
from stitch.planner import Execute, Plan
from stitch.program import Array
from stitch.report import ChromeTrace
from stitch.runtime import HookContext, PlanStopped
from stitch.runtime.executors.host.numpy_executor import PreparedKernels
from tests.support.grids import in_turn
from tests.support.stitched_models import integers, one, scaled, tiny, writes_seen

MOMENTS = ("before_program", "after_program", "before_operation", "after_operation")
OBSERVERS = ("listener", "trace", *MOMENTS, "all moments", "listener and all moments")
#: What results are made by: one call, calls in a row, a pipeline.
WAYS = ("call", "calls", "pipeline")
SHAPE = (256, 512)
MACHINE = tiny(dram_nbytes=8 << 20)


@contextmanager
def observed(device: stitch.Device, how: str) -> Iterator[list[object]]:
    """With observers; gives what they saw."""
    seen: list[object] = []
    with ExitStack() as stack:
        if "listener" in how:
            stack.callback(device.events.subscribe(seen.append))
        if how == "trace":
            stack.callback(ChromeTrace(device).close)
        moments = MOMENTS if how.endswith("all moments") else {how} & set(MOMENTS)
        for moment in moments:
            stack.callback(device.hooks.register(**{moment: seen.append}))
        yield seen


def way(device: stitch.Device, name: str) -> Callable[[Array], stitch.Tensor]:
    """Two programs with a conversion between them; their operations are computed by chunks."""
    a = device.load(scaled("a", 2.0, SHAPE, target=MACHINE, placement=("output.y.layout=tile",)))
    b = device.load(scaled("b", 3.0, SHAPE, target=MACHINE))
    prepared = b.prepared()
    assert isinstance(prepared, PreparedKernels)
    assert not prepared.is_plain
    if name == "pipeline":
        pipe = stitch.Pipeline([a, b])
        return lambda x: one(pipe(x))
    if name == "call":
        return lambda x: one(a(x))
    return lambda x: one(b(one(a(x))))


def arrays() -> Iterator[Array]:
    yield from (integers(SHAPE, start) / np.float32(7) for start in range(8))


@pytest.mark.parametrize(("name", "how"), in_turn(WAYS, OBSERVERS))
def test_plans_copies_and_bits_are_those_of_the_bare_runs(how: str, name: str) -> None:
    results, accounts, counts = [], [], []
    for who in ("nobody", how):
        with stitch.open_device(MACHINE) as device:
            run = way(device, name)
            with observed(device, who):
                results.append([run(x).numpy().tobytes() for x in arrays()])
            accounts.append(device.account())
            counts.append(device.statistics())
    assert results[0] == results[1]
    bare, seen = accounts
    assert [(plan.steps, times) for plan, times in bare.plans] == [
        (plan.steps, times) for plan, times in seen.plans
    ]
    assert (bare.total, bare.writes_seen) == (seen.total, seen.writes_seen)
    assert counts[0].plans_made == counts[1].plans_made
    assert counts[0].bindings_made == counts[1].bindings_made


@pytest.mark.parametrize("name", WAYS)
def test_nothing_is_made_or_written_anew_while_observers_come_and_go(name: str) -> None:
    with stitch.open_device(MACHINE) as device:
        run = way(device, name)

        def round_trip() -> None:
            for how in ("nobody", *OBSERVERS):
                with observed(device, how) as seen:
                    for x in arrays():
                        run(x).numpy()
                assert seen or how in ("nobody", "trace")

        round_trip()
        before = device.statistics()
        round_trip()
        after = device.statistics()
    for what in ("plans_made", "executables_made", "bindings_made", "code_written"):
        assert getattr(after, what) == getattr(before, what), what


def test_hooks_that_go_in_a_run_are_called_no_more_and_those_that_come_in_the_next() -> None:
    seen: list[str] = []
    undo: dict[str, Callable[[], None]] = {}

    def brief(context: HookContext) -> None:
        seen.append(f"brief {context.program.name}")
        undo.pop("brief")()
        undo["late"] = device.hooks.register(after_program=late)

    def late(context: HookContext) -> None:
        seen.append(f"late {context.program.name}")

    with stitch.open_device("tiny") as device:
        pipe = stitch.Pipeline([device.load(scaled(n, 2.0)) for n in "ab"])
        for _ in range(4):
            pipe(integers())
        undo["brief"] = device.hooks.register(before_program=brief)
        for _ in range(2):
            pipe(integers())
        undo.pop("late")()
        assert not device.hooks.active
    assert seen == ["brief a", "late a", "late b"]


def broken_at(moment: str, program: str, error: type[BaseException]) -> dict[str, Any]:
    """A hook that raises where this program's operations begin or end."""

    def hook(context: HookContext) -> None:
        if context.program.name == program:
            raise error("told to")

    return {moment: hook}


@pytest.mark.parametrize(
    ("error", "settled", "moment", "program"),
    in_turn([ValueError, KeyboardInterrupt], [0, 5], MOMENTS, ["a", "b", "c"]),
)
def test_a_run_that_a_hook_ends_has_done_the_steps_before_it(
    program: str, moment: str, settled: int, error: type[BaseException]
) -> None:
    events: list[object] = []
    with stitch.open_device("tiny") as device:
        pipe = stitch.Pipeline(
            [device.load(scaled(n, 2.0, placement=("input.x.space=l1",))) for n in "abc"]
        )
        for _ in range(settled):
            pipe(integers())
        device.events.subscribe(events.append)
        undo = device.hooks.register(**broken_at(moment, program, error))
        with pytest.raises(error, match="told to"):
            pipe(integers())
        undo()
        stopped = [event for event in events if isinstance(event, PlanStopped)]
        events.clear()
        np.testing.assert_array_equal(one(pipe(integers())).numpy(), integers() * 8 + 7)
        total = device.account().total
        assert (total.copies, total.nbytes) == writes_seen(device)
    (plan,) = {id(e.plan): e.plan for e in stopped}.values()
    assert [event.steps_done for event in stopped] == [steps_before(plan, program)]


def steps_before(plan: Plan, program: str) -> int:
    """How many steps a plan makes before it runs a program."""
    tasks = plan.request.tasks
    return next(
        number
        for number, step in enumerate(plan.steps)
        if isinstance(step, Execute) and tasks[step.task].transformation.name == program
    )


CALLER: ContextVar[str] = ContextVar("caller", default="nobody")


def test_hooks_run_in_the_context_of_the_caller_and_leave_nothing_in_it() -> None:
    seen: list[tuple[str, object]] = []

    def hook(context: HookContext) -> None:
        seen.append((CALLER.get(), np.geterr()))
        CALLER.set("a hook")

    with stitch.open_device("tiny") as device, np.errstate(all="raise"):
        before = np.geterr()
        pipe = stitch.Pipeline([device.load(scaled("a", 2.0))])
        device.hooks.register(before_program=hook)
        for name in ("first", "second", "third"):
            token = CALLER.set(name)
            pipe(integers())
            assert (CALLER.get(), np.geterr()) == (name, before)
            CALLER.reset(token)
    quiet = dict.fromkeys(before, "ignore")
    assert seen == [(name, quiet) for name in ("first", "second", "third")]
