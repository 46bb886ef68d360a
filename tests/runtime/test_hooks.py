"""Hooks before and after programs and operations (tt-mlir's hook tests)."""

from __future__ import annotations

import numpy as np
import pytest

import stitch
from stitch.errors import UsageError
from stitch.runtime import HookContext
from tests.support.stitched_models import integers, one, scaled

MOMENTS = ("before_program", "after_program", "before_operation", "after_operation")


def test_all_four_hooks_fire_in_order_and_the_numbers_stay() -> None:
    seen: list[str] = []

    def note(moment: str) -> stitch.runtime.hooks.Hook:
        return lambda c: seen.append(f"{moment} {c.operation.op if c.operation else ''}".strip())

    with stitch.open_device("tiny", debug=True) as device:
        a = device.load(scaled("a", 2.0))
        device.hooks.register(**{moment: note(moment) for moment in MOMENTS})
        np.testing.assert_array_equal(one(a(integers())).numpy(), integers() * 2 + 1)
    assert seen == [
        "before_program",
        "before_operation Mul", "after_operation Mul",
        "before_operation Add", "after_operation Add",
        "after_program",
    ]  # fmt: skip


@pytest.mark.parametrize("layout", ["row_major", "tile"])
def test_operation_hooks_see_the_numbers_and_cannot_change_them(layout: str) -> None:
    found: list[np.ndarray] = []

    def look(context: HookContext) -> None:
        assert context.operation is not None
        found.append(context.outputs[0].copy())
        with pytest.raises(ValueError, match="read-only"):
            context.outputs[0][...] = 0
        with pytest.raises(ValueError, match="WRITEABLE"):
            context.outputs[0].flags.writeable = True

    placement = (f"input.x.layout={layout}", f"output.y.layout={layout}")
    with stitch.open_device("tiny", debug=True) as device:
        a = device.load(scaled("a", 2.0, (32, 32), placement=placement))
        device.hooks.register(after_operation=look)
        one(a(integers((32, 32)))).numpy()
    np.testing.assert_array_equal(found[0], integers((32, 32)) * 2)
    np.testing.assert_array_equal(found[1], integers((32, 32)) * 2 + 1)


def test_a_hook_before_the_first_operation_sees_operands_that_are_staged() -> None:
    found: list[np.ndarray] = []

    def look(context: HookContext) -> None:
        if context.index == 0 and context.inputs[0] is not None:
            found.append(context.inputs[0].copy())

    with stitch.open_device("tiny") as device:
        a = device.load(scaled("a", 2.0, (32, 32), placement=("input.x.layout=tile",)))
        device.hooks.register(before_operation=look)
        one(a(integers((32, 32)))).numpy()
    np.testing.assert_array_equal(found[0], integers((32, 32)))


def test_unregistering_ends_one_registration_and_twice_is_harmless() -> None:
    seen: list[str] = []
    with stitch.open_device("tiny") as device:
        a = device.load(scaled("a", 2.0))
        first = device.hooks.register(before_program=lambda c: seen.append("first"))
        second = device.hooks.register(before_program=lambda c: seen.append("second"))
        stitch.wait(one(a(integers())))
        first()
        first()
        stitch.wait(one(a(integers())))
        second()
        assert not device.hooks.active
        stitch.wait(one(a(integers())))
    assert seen == ["first", "second", "second"]


def test_registering_nothing_is_an_error_that_lists_the_hooks() -> None:
    with stitch.open_device("tiny") as device, pytest.raises(UsageError) as refused:
        device.hooks.register()
    assert all(moment in str(refused.value) for moment in MOMENTS)


@pytest.mark.parametrize("moment", MOMENTS)
def test_an_exception_propagates_and_the_device_stays_usable(moment: str) -> None:
    class Stop(Exception):
        pass

    def stop(_: HookContext) -> None:
        raise Stop

    with stitch.open_device("tiny", debug=True) as device:
        a = device.load(scaled("a", 2.0))
        undo = device.hooks.register(**{moment: stop})
        y = one(a(integers()))
        with pytest.raises(Stop):
            y.numpy()
        undo()
        np.testing.assert_array_equal(one(a(integers())).numpy(), integers() * 2 + 1)


def test_hooks_see_every_program_of_a_chain_and_of_a_pipeline() -> None:
    seen: list[str] = []
    with stitch.open_device("tiny", debug=True) as device:
        a, b = device.load(scaled("a", 2.0)), device.load(scaled("b", 3.0))
        pipeline = stitch.Pipeline([a, b])
        expected = (integers() * 2 + 1) * 3 + 1
        for _ in range(2):
            np.testing.assert_array_equal(one(pipeline(integers())).numpy(), expected)
        undo = device.hooks.register(before_program=lambda c: seen.append(c.program.name))
        for _ in range(2):
            np.testing.assert_array_equal(one(pipeline(integers())).numpy(), expected)
        np.testing.assert_array_equal(one(b(one(a(integers())))).numpy(), expected)
        undo()
        np.testing.assert_array_equal(one(pipeline(integers())).numpy(), expected)
    assert seen == ["a", "b"] * 3


def test_a_hook_that_uses_the_device_is_refused() -> None:
    said: list[str] = []
    with stitch.open_device("tiny", debug=True) as device:
        a, b = device.load(scaled("a", 2.0)), device.load(scaled("b", 3.0))
        ready = one(b(integers()))
        stitch.wait(ready)

        def hook(_: HookContext) -> None:
            for use in (
                lambda: b(integers()), ready.numpy, ready.deallocate, lambda: ready[0],
                lambda: device.write(ready, integers()), device.memory_report, device.explain,
                lambda: stitch.to_layout(ready, ready.layout), device.flush, device.close,
                lambda: stitch.Pipeline([b])(integers()), lambda: np.from_dlpack(ready),
            ):  # fmt: skip
                with pytest.raises(stitch.TaskError, match="cannot be used by a hook") as refused:
                    use()
                said.append(str(refused.value))

        undo = device.hooks.register(before_program=hook)
        np.testing.assert_array_equal(one(a(integers())).numpy(), integers() * 2 + 1)
        undo()
        np.testing.assert_array_equal(ready.numpy(), integers() * 3 + 1)
    assert len(said) == 12


def test_unregistering_twice_removes_one_hook() -> None:
    seen: list[HookContext] = []
    told: list[object] = []
    with stitch.open_device("tiny", debug=True) as device:
        a = device.load(scaled("a", 2.0))
        undo = device.hooks.register(before_program=seen.append)
        end = device.events.subscribe(told.append)
        device.hooks.register(before_program=seen.append)
        device.events.subscribe(told.append)
        for _ in range(2):
            undo()
            end()
        one(a(integers())).numpy()
    assert len(seen) == 1
    assert told
