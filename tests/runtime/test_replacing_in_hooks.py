"""`context.replace` in hooks: what an operation has made is something else for all that follows."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import stitch
from stitch.errors import UsageError
from stitch.runtime import HookContext
from tests.support.stitched_models import integers, one, scaled

SHAPE = (32, 32)


def replacing(op: str, array: Any) -> Any:
    """A hook that puts an array in the place of the first output of an operator."""

    def hook(context: HookContext) -> None:
        if context.operation is not None and context.operation.op == op:
            context.replace(0, array)

    return hook


@pytest.mark.parametrize("executor", ["numpy", "onnxruntime", "auto"])
@pytest.mark.parametrize("layout", ["row_major", "tile"])
def test_what_follows_reads_the_replacement(executor: str, layout: str) -> None:
    placement = (f"input.x.layout={layout}", f"output.y.layout={layout}")
    sevens = np.full(SHAPE, 7, np.float32)
    with stitch.open_device("tiny", executor=executor) as device:
        a = device.load(scaled("a", 2.0, SHAPE, placement=placement))
        undo = device.hooks.register(after_operation=replacing("Mul", sevens))
        np.testing.assert_array_equal(one(a(integers(SHAPE))).numpy(), sevens + 1)
        undo()
        np.testing.assert_array_equal(one(a(integers(SHAPE))).numpy(), integers(SHAPE) * 2 + 1)


@pytest.mark.parametrize("stored", ["row_major", "tile"])
def test_a_replaced_output_is_what_the_device_holds(stored: str) -> None:
    nines = np.full(SHAPE, 9, np.float32)
    with stitch.open_device("tiny", debug=True) as device:
        a = device.load(scaled("a", 2.0, SHAPE, placement=(f"output.y.layout={stored}",)))
        b = device.load(scaled("b", 3.0, SHAPE))
        device.hooks.register(after_operation=replacing("Add", nines))
        y = one(a(integers(SHAPE)))
        np.testing.assert_array_equal(y.numpy(), nines)
        np.testing.assert_array_equal(one(b(y)).numpy(), nines)


@pytest.mark.parametrize("output", ["y", 0.0, None, True, -1, 1])
def test_a_replaced_output_is_named_by_its_number(output: Any) -> None:
    with stitch.open_device("tiny") as device:
        a = device.load(scaled("a", 2.0, SHAPE))

        def hook(context: HookContext) -> None:
            context.replace(output, np.zeros(SHAPE, np.float32))

        undo = device.hooks.register(after_operation=hook)
        with pytest.raises(UsageError, match=f"the operation has no output {output!r}"):
            one(a(integers(SHAPE))).numpy()
        undo()
        np.testing.assert_array_equal(one(a(integers(SHAPE))).numpy(), integers(SHAPE) * 2 + 1)


def test_a_replacement_is_rounded_to_the_type_of_its_value() -> None:
    thirds = np.full(SHAPE, 1 / 3, np.float32)
    with stitch.open_device("tiny") as device:
        a = device.load(scaled("a", 2.0, SHAPE, placement=("output.y.data_type=bf16",)))
        device.hooks.register(after_operation=replacing("Add", thirds))
        got = one(a(integers(SHAPE))).numpy().astype(np.float32)
    assert set(np.unique(got)) == {np.float32(0.333984375)}


@pytest.mark.parametrize(
    "wrong",
    [np.zeros((32, 31), np.float32), np.zeros(SHAPE, np.int32), np.zeros(SHAPE), [1.0]],
    ids=["shape", "integers", "float64", "list"],
)
def test_another_shape_or_type_is_refused_and_nothing_has_changed(wrong: Any) -> None:
    with stitch.open_device("tiny", debug=True) as device:
        a = device.load(scaled("a", 2.0, SHAPE))
        undo = device.hooks.register(after_operation=replacing("Mul", wrong))
        with pytest.raises(UsageError, match="must have its shape and type") as refused:
            one(a(integers(SHAPE))).numpy()
        assert refused.value.expected == "float32[32, 32]"
        undo()
        np.testing.assert_array_equal(one(a(integers(SHAPE))).numpy(), integers(SHAPE) * 2 + 1)


@pytest.mark.parametrize("moment", ["before_operation", "before_program", "after_program"])
def test_only_what_was_just_made_can_be_replaced(moment: str) -> None:
    def hook(context: HookContext) -> None:
        context.replace(0, np.zeros(SHAPE, np.float32))

    with stitch.open_device("tiny") as device:
        a = device.load(scaled("a", 2.0, SHAPE))
        device.hooks.register(**{moment: hook})
        with pytest.raises(UsageError, match="outside the after_operation hook"):
            one(a(integers(SHAPE))).numpy()


def test_a_context_that_was_kept_replaces_nothing_later() -> None:
    kept: list[HookContext] = []
    with stitch.open_device("tiny") as device:
        a = device.load(scaled("a", 2.0, SHAPE))
        device.hooks.register(after_operation=kept.append)
        held = one(a(integers(SHAPE)))
        held.numpy()
        with pytest.raises(UsageError, match="outside the after_operation hook"):
            kept[-1].replace(0, np.full(SHAPE, 7, np.float32))
        np.testing.assert_array_equal(held.numpy(), integers(SHAPE) * 2 + 1)


def largest(results: Any) -> list[float]:
    """The largest element of each result."""
    return [float(result.numpy().max()) for result in results]


def tangled(x: Any) -> Any:
    """A value and a view of it, both read afterwards."""
    twice = x + x
    row = twice.reshape((1024,))
    return row * row, twice * twice


def test_a_value_in_the_bytes_of_another_that_is_still_read_is_refused() -> None:
    x, zeros = np.ones(SHAPE, np.float32), np.zeros(1024, np.float32)
    with stitch.open_device("tiny") as device:
        f = device.load(stitch.compile(tangled, [x], target="tiny"))
        undo = device.hooks.register(after_operation=replacing("Reshape", zeros))
        with pytest.raises(UsageError, match="'reshape' cannot be replaced: it lies in the bytes"):
            largest(f(x))
        undo()
        assert largest(f(x)) == [4, 4]


def test_a_value_with_a_view_of_it_is_replaced_for_both() -> None:
    x, zeros = np.ones(SHAPE, np.float32), np.zeros(SHAPE, np.float32)
    with stitch.open_device("tiny") as device:
        f = device.load(stitch.compile(tangled, [x], target="tiny"))
        device.hooks.register(after_operation=replacing("Add", zeros))
        assert largest(f(x)) == [0, 0]


def test_another_thread_replaces_nothing() -> None:
    def hook(context: HookContext) -> None:
        with ThreadPoolExecutor(1) as threads:
            threads.submit(context.replace, 0, np.zeros(SHAPE, np.float32)).result()

    with stitch.open_device("tiny") as device:
        a = device.load(scaled("a", 2.0, SHAPE))
        device.hooks.register(after_operation=hook)
        with pytest.raises(UsageError, match="outside the after_operation hook"):
            one(a(integers(SHAPE))).numpy()
