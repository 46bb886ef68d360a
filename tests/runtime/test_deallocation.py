"""Deallocation: retain, submit, to_layout, and every misuse of a freed tensor."""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Callable

import numpy as np
import pytest

import stitch
from stitch.program import DataType, InputKind, Layout, Space
from stitch.program import host_layout as host
from tests.support.stitched_models import binary_op, consuming, integers, one, scaled, used

F32 = DataType.FLOAT32
STORAGES = {"host": host(F32), "dram": Layout(F32, Space.DRAM), "l1": Layout(F32, Space.L1)}


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("flag", [False, True], ids=["free", "retained"])
@pytest.mark.parametrize("argument", [None, False], ids=["default", "retain=False"])
def test_to_layout_frees_its_source_only_when_told_and_not_retained(
    storage: str, flag: bool, argument: bool | None
) -> None:
    with stitch.open_device("tiny", debug=True) as device:
        source = device.tensor(integers()).to_layout(STORAGES[storage])
        stitch.wait(source)
        source.retain = flag
        target = stitch.to_layout(source, Layout(F32, Space.DRAM), retain=argument, copy=True)
        assert source.is_allocated is (flag or argument is None)
        assert target.retain is flag
        stitch.wait(target)
        assert source.is_allocated is (flag or argument is None)
        np.testing.assert_array_equal(target.numpy(), integers())
        if source.is_allocated:
            np.testing.assert_array_equal(source.numpy(), integers())
        else:
            with pytest.raises(stitch.TaskError, match=r"(?s)freed.*to_layout"):
                source.numpy()


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("x_retained", [False, True])
@pytest.mark.parametrize("w_retained", [False, True])
def test_submit_frees_exactly_what_is_not_retained(
    storage: str, x_retained: bool, w_retained: bool
) -> None:
    compiled = binary_op("add", "Add", (4, 64), kind=InputKind.ACTIVATION)
    with stitch.open_device("tiny", debug=True) as device:
        x, w = (device.tensor(integers()).to_layout(STORAGES[storage]) for _ in range(2))
        stitch.wait((x, w))
        x.retain, w.retain = x_retained, w_retained
        (y,) = stitch.submit(device, compiled, 0, (x, w))
        stitch.wait(y)
        assert x.is_allocated is x_retained
        assert w.is_allocated is w_retained
        np.testing.assert_array_equal(y.numpy(), integers() * 2)


def test_dropping_the_last_handle_frees_and_dropping_a_pending_one_never_allocates() -> None:
    with stitch.open_device("tiny", debug=True) as device:
        a = device.load(scaled("a", 2.0))
        stitch.wait(device.tensor(integers()))
        base = used(device)
        y = one(a(integers()))
        stitch.wait(y)
        assert used(device) != base
        again = y[...]
        del y
        assert used(device) != base
        del again
        assert used(device) == base
        one(a(integers()))
        assert used(device) == base


@pytest.mark.parametrize("pending", [True, False], ids=["pending", "ready"])
def test_using_a_deallocated_tensor_names_who_freed_it(pending: bool) -> None:
    with stitch.open_device("tiny", debug=True) as device:
        a = device.load(scaled("a", 2.0))
        y = one(a(integers()))
        if not pending:
            stitch.wait(y)
        y.deallocate()
        assert not y.is_allocated
        uses: dict[str, Callable[[], object]] = {
            "numpy": y.numpy,
            "address": lambda: y.address,
            "call": lambda: a(y),
            "to_layout": lambda: y.to_layout(host(F32)),
            "view": lambda: y[0],
            "dlpack": lambda: np.from_dlpack(y),
            "wait": lambda: stitch.wait(y),
            "write": lambda: device.write(y, integers()),
            "double deallocate": y.deallocate,
        }
        for name, use in uses.items():
            with pytest.raises(stitch.TaskError, match=r"(?s)freed.*deallocate\(\)"):
                use()
            assert name


def test_donation_takes_effect_at_the_call() -> None:
    with stitch.open_device("tiny", debug=True) as device:
        a, eat = device.load(scaled("a", 2.0)), device.load(consuming("eat", 3.0))
        x = one(a(integers()))
        y = one(eat(x))
        assert y.is_pending
        assert not x.is_allocated
        for use in (x.numpy, lambda: a(x), lambda: eat(x), x.deallocate):
            with pytest.raises(stitch.TaskError, match=r"(?s)given away.*donated to 'eat'"):
                use()
        np.testing.assert_array_equal(y.numpy(), (integers() * 2 + 1) * 3)
        with pytest.raises(stitch.TaskError, match="donated to 'eat'"):
            x.numpy()


def test_a_donated_tensor_gives_its_buffer_to_the_output() -> None:
    placement = ("input.x.space=l1",)
    with stitch.open_device("tiny", debug=True) as device:
        eat = device.load(consuming("eat", 3.0, placement=placement))
        x = device.tensor(integers()).to_layout(Layout(F32, Space.L1))
        where = x.address
        held = used(device)
        y = one(eat(x))
        assert y.address == where
        assert used(device) == held


@pytest.mark.parametrize("window", [1, 64])
def test_what_only_a_queued_task_still_reads_shares_nothing_with_what_is_donated(
    window: int,
) -> None:
    with stitch.open_device("tiny", window=window) as device:
        scale, eat = device.load(scaled("scale", 2.0)), device.load(consuming("eat", 3.0))
        y = one(scale(integers()))
        view, copied = y[0:4], y.to_layout(Layout(F32, Space.L1), copy=True)
        expected = y.numpy()
        later = copied.to_layout(Layout(F32, Space.DRAM))
        del copied
        once_more = y.to_layout(Layout(F32, Space.L1), copy=True)
        del y
        assert np.array_equal(one(eat(view)).numpy(), 3.0 * expected)
        assert np.array_equal(once_more.numpy(), expected)
        assert np.array_equal(later.numpy(), expected) and not view.is_allocated


def test_donation_needs_sole_ownership() -> None:
    def build(b: stitch.ComputationGraphBuilder) -> None:
        x = b.input("x", (4, 64), "float32", ownership=stitch.program.Ownership.DONATE)
        y = b.input("y", (4, 64), "float32")
        b.output("z", x + y)

    from_two = stitch.compile(build_graph(build), target="tiny")
    with stitch.open_device("tiny", debug=True) as device:
        eat, two = device.load(consuming("eat", 3.0)), device.load(from_two)
        x = device.tensor(integers()).to_layout(Layout(F32, Space.L1))
        x.settle()
        view = x[0]
        with pytest.raises(stitch.TaskError, match="'x' of 'eat' is donated, but views share it"):
            eat(x)
        del view
        outside = np.from_dlpack(x)
        with pytest.raises(stitch.TaskError, match="it is exported"):
            eat(x)
        del outside
        gc.collect()
        with pytest.raises(stitch.TaskError, match="passed twice"):
            two(x, x)
        assert x.is_allocated
        np.testing.assert_array_equal(one(eat(x)).numpy(), integers() * 3)


def build_graph(build: object) -> stitch.graph.ComputationGraph:
    builder = stitch.ComputationGraphBuilder("two")
    assert callable(build)
    build(builder)
    return builder.build()


def test_a_closed_device_says_so_and_stays_closed() -> None:
    device = stitch.open_device("tiny")
    a = device.load(scaled("a", 2.0))
    x = device.tensor(integers())
    y = one(a(x))
    device.close()
    device.close()
    assert device.is_closed
    for use in (
        y.numpy, lambda: a(x), lambda: device.tensor(integers()), x.numpy, lambda: x[0],
        lambda: x.to_layout(host(F32)), lambda: device.load(scaled("b", 2.0)),
        lambda: device.memory("l1"), lambda: np.from_dlpack(x),
    ):  # fmt: skip
        with pytest.raises(stitch.TaskError, match=r"device 'tiny' is closed"):
            use()


def test_closing_runs_what_is_queued_and_an_error_in_the_buffer_does_not() -> None:
    seen: list[str] = []
    with stitch.open_device("tiny") as device:
        device.hooks.register(after_program=lambda c: seen.append(c.program.name))
        kept = device.load(scaled("a", 2.0))(integers())
    assert seen == ["a"]
    assert one(kept).is_allocated
    with pytest.raises(ZeroDivisionError), stitch.open_device("tiny") as device:
        device.hooks.register(after_program=lambda c: seen.append(c.program.name))
        lost = one(device.load(scaled("a", 2.0))(integers()))
        raise ZeroDivisionError
    assert seen == ["a"]
    assert not lost.is_allocated


def test_a_copied_handle_counts_and_a_deep_copy_has_a_buffer_of_its_own() -> None:
    with stitch.open_device("tiny", debug=True) as device:
        tensor = device.tensor(integers()).to_layout(Layout(F32, Space.L1))
        handle, deep = copy.copy(tensor), copy.deepcopy(tensor)
        stitch.wait(deep)
        del handle
        device.flush()
        np.testing.assert_array_equal(tensor.numpy(), integers())
        assert deep.address != tensor.address
        device.write(tensor, integers() + 1)
        np.testing.assert_array_equal(deep.numpy(), integers())
        with pytest.raises(TypeError, match="cannot pickle"):
            pickle.dumps(tensor)
