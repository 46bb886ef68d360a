"""A view of a pending tensor is pending: nothing runs until somebody looks; then it is a view."""

from __future__ import annotations

import copy
import gc
import threading
from collections.abc import Iterator

import numpy as np
import pytest

import stitch
from stitch.program import TILE_SHAPE, Array, DataType, Layout, Space
from tests.support.stitched_models import consuming, integers, one, scaled, tiny, used

F32 = DataType.FLOAT32
SHAPE = integers().shape


@pytest.fixture(params=[("tiny", "numpy"), ("host", "numpy"), ("host", "onnxruntime")], ids=str)
def device(request: pytest.FixtureRequest) -> Iterator[stitch.Device]:
    machine, executor = request.param
    with stitch.open_device(machine, debug=True, executor=executor) as opened:
        yield opened


def doubled(device: stitch.Device) -> stitch.LoadedProgram:
    return device.load(scaled("a", 2.0, target=device.machine))


def row(device: stitch.Device) -> stitch.LoadedProgram:
    return device.load(scaled("row", 3.0, SHAPE[1:], target=device.machine))


def windows(device: stitch.Device) -> int:
    return device.statistics().windows


def expected(x: Array) -> Array:
    return x * 2 + 1


def test_a_view_of_what_is_pending_runs_nothing(device: stitch.Device) -> None:
    whole = one(doubled(device)(integers()))
    view, rest = whole[1], whole[2:]
    inner, none, back = rest[1], rest[1:1], whole[-1]
    assert windows(device) == 0
    assert all(t.is_pending and t.is_allocated for t in (whole, view, rest, inner, none, back))
    assert view.shape == SHAPE[1:] and rest.shape == (2, *SHAPE[1:]) and none.shape[0] == 0
    assert len(rest) == 2 and inner.volume == SHAPE[1] and inner.stride == (1,)
    assert inner.device is device and inner.data_type is F32 and inner.dtype == np.float32
    assert inner.space is whole.space and inner.layout.address is None
    assert inner.desc == view.desc and "pending" in repr(inner)
    assert isinstance(inner, stitch.Tensor) and inner == inner and inner != view
    np.testing.assert_array_equal(inner.numpy(), expected(integers())[3])
    assert windows(device) == 1
    for tensor, wanted in ((view, 1), (rest, slice(2, None)), (none, slice(3, 3)), (back, -1)):
        assert type(tensor) is stitch.Tensor and not tensor.is_pending
        np.testing.assert_array_equal(tensor.numpy(), expected(integers())[wanted])
    assert windows(device) == 1


def test_programs_on_views_of_what_is_pending_run_in_its_window(device: stitch.Device) -> None:
    a, b = doubled(device), row(device)
    for turn in range(5):
        x, before = integers() + turn, windows(device)
        whole = one(a(x))
        results = [one(b(whole[i])) for i in range(4)]
        results.append(one(b(whole[1:][2])))
        assert windows(device) == before
        assert all(t.is_pending for t in (whole, *results))
        for result, i in zip(results, (0, 1, 2, 3, 3), strict=True):
            np.testing.assert_array_equal(result.numpy(), expected(x)[i] * 3 + 1)
        np.testing.assert_array_equal(whole.numpy(), expected(x))
        assert windows(device) == before + 1
    # Where a row lies is an operand of what reads it: the same work is one plan.
    assert device.statistics().plans_made == 1


def test_a_view_that_was_read_in_its_window_is_still_a_view(device: stitch.Device) -> None:
    whole = one(doubled(device)(integers()))
    view = whole[1]
    result = one(row(device)(view))
    device.flush()
    device.write(view, np.full(SHAPE[1:], 7, np.float32))
    np.testing.assert_array_equal(whole.numpy()[1], np.full(SHAPE[1:], 7))
    np.testing.assert_array_equal(result.numpy(), expected(integers())[1] * 3 + 1)
    if whole.address is not None:
        assert view.address is not None


def test_writing_to_the_whole_changes_a_view_that_waited(device: stitch.Device) -> None:
    whole = one(doubled(device)(integers()))
    view = whole[2:]
    device.write(whole, integers())
    np.testing.assert_array_equal(view.numpy(), integers()[2:])


def test_a_host_function_is_given_a_view_that_waits(device: stitch.Device) -> None:
    seen = stitch.task(lambda x: float(x.sum()))
    whole = one(doubled(device)(integers()))
    found = device.call(seen, whole[3]).result()
    assert found == float(expected(integers())[3].sum())


def test_a_view_that_waits_keeps_its_tensor_and_the_last_one_frees_it() -> None:
    with stitch.open_device("tiny", debug=True) as device:
        program = device.load(scaled("a", 2.0, wishes=("output.y.space=l1",)))
        whole = one(program(integers()))
        view, other = whole[1], whole[2:]
        del whole
        np.testing.assert_array_equal(view.numpy(), expected(integers())[1])
        del view
        assert used(device)["l1"] > 0
        np.testing.assert_array_equal(other.numpy(), expected(integers())[2:])
        del other
        gc.collect()
        assert used(device)["l1"] == 0
        dropped = one(program(integers()))[1:]
        del dropped
        device.flush()
        assert used(device)["l1"] == 0 and not device.waiting


def test_deallocating_what_a_view_waits_for_leaves_the_view(device: stitch.Device) -> None:
    whole = one(doubled(device)(integers()))
    view = whole[1:][1]
    whole.deallocate()
    np.testing.assert_array_equal(view.numpy(), expected(integers())[2])
    with pytest.raises(stitch.TaskError, match="freed"):
        whole.numpy()
    whole = one(doubled(device)(integers()))
    view = whole[1]
    moved = whole.to_layout(Layout(F32, Space.HOST), retain=False)
    np.testing.assert_array_equal(moved.numpy(), expected(integers()))
    np.testing.assert_array_equal(view.numpy(), expected(integers())[1])


def test_deallocating_a_view_that_waits_leaves_the_whole(device: stitch.Device) -> None:
    whole = one(doubled(device)(integers()))
    view = whole[1]
    view.deallocate()
    with pytest.raises(stitch.TaskError, match="freed"):
        view.numpy()
    np.testing.assert_array_equal(whole.numpy(), expected(integers()))


def test_what_a_view_waits_for_is_not_donated(device: stitch.Device) -> None:
    eat = device.load(consuming("eat", 2.0, SHAPE, target=device.machine))
    whole = one(doubled(device)(integers()))
    view = whole[1]
    with pytest.raises(stitch.TaskError, match="views share it"):
        eat(whole)
    np.testing.assert_array_equal(view.numpy(), expected(integers())[1])
    whole = one(doubled(device)(integers()))
    view = whole[1]
    del view
    np.testing.assert_array_equal(
        one(eat(whole)).numpy(), one(eat(device.tensor(expected(integers())))).numpy()
    )
    with pytest.raises(stitch.TaskError, match="donated to 'eat'"):
        whole.numpy()


def test_a_view_of_what_was_never_made_says_so(device: stitch.Device) -> None:
    def stop(x: Array) -> Array:
        raise RuntimeError("stopped here")

    failing = stitch.task(returns=stitch.TensorDesc(SHAPE, Layout(F32, Space.HOST)))(stop)
    whole = device.call(failing, integers())
    view = whole[1]
    result = one(row(device)(view))
    with pytest.raises(RuntimeError, match="stopped here"):
        device.flush()
    for tensor in (whole, view, view[:3], result):
        with pytest.raises(stitch.TaskError, match="was never made"):
            tensor.numpy()
    assert not view.is_allocated


def test_what_is_no_view_is_refused_and_nothing_runs() -> None:
    with stitch.open_device("tiny") as device:
        whole = one(device.load(scaled("a", 2.0))(integers()))
        with pytest.raises(stitch.LayoutError, match="consecutive"):
            whole[::2]
        with pytest.raises(IndexError, match="out of range"):
            whole[4]
        with pytest.raises(IndexError, match="out of range"):
            whole[1:][3]
        assert windows(device) == 0
        tiled = device.tensor(integers((96, 40))).to_layout(Layout(F32, Space.DRAM, TILE_SHAPE))
        assert tiled.is_pending
        with pytest.raises(stitch.LayoutError, match="starts and ends on a tile"):
            tiled[16:48]
        view = tiled[32:64]
        assert view.is_pending and windows(device) == 0
        np.testing.assert_array_equal(view.numpy(), integers((96, 40))[32:64])


def test_a_copy_of_a_view_is_another_handle_on_it(device: stitch.Device) -> None:
    view = one(doubled(device)(integers()))[1]
    other = copy.copy(view)
    other.deallocate()
    with pytest.raises(stitch.TaskError, match="freed"):
        view.numpy()


def test_where_copies_are_forbidden_a_program_reads_the_view_where_it_lies() -> None:
    wishes = ("input.x.space=l1", "output.y.space=l1")
    with stitch.open_device("tiny", debug=True) as device:
        a = device.load(scaled("a", 2.0, wishes=("output.y.space=l1",)))
        b = device.load(scaled("row", 3.0, SHAPE[1:], wishes=wishes))
        x = device.tensor(integers()).to_layout(a.input_layout(0))
        with stitch.forbid_copies(device):
            result = one(b(one(a(x))[2]))
            np.testing.assert_array_equal(result.numpy(), expected(integers())[2] * 3 + 1)


@pytest.mark.parametrize("rows", [1, 2, 3, 7])
def test_where_no_copy_fits_a_program_reads_the_view_where_it_lies(rows: int) -> None:
    machine = tiny(l1_nbytes=2560, core_grid=(1, 1))
    x, wishes = integers((8, 64)), ("input.x.space=l1", "output.y.space=dram")
    with stitch.open_device(machine, debug=True) as device:
        a = device.load(scaled("a", 2.0, x.shape, target=machine, wishes=("output.y.space=l1",)))
        b = device.load(scaled("rows", 3.0, (rows, 64), target=machine, wishes=wishes))
        result = one(b(one(a(x))[8 - rows :]))
        np.testing.assert_array_equal(result.numpy(), expected(x)[8 - rows :] * 3 + 1)


def test_threads_may_ask_for_one_view_at_once(device: stitch.Device) -> None:
    program = doubled(device)
    for _ in range(20):
        view = one(program(integers()))[1:][1]
        found: list[Array] = []
        together = threading.Barrier(4)

        def look(
            view: stitch.Tensor = view,
            found: list[Array] = found,
            together: threading.Barrier = together,
        ) -> None:
            together.wait()
            found.append(view.numpy())

        threads = [threading.Thread(target=look) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for array in found:
            np.testing.assert_array_equal(array, expected(integers())[2])
        assert len(found) == 4


def test_a_closed_device_has_no_view_that_waits() -> None:
    with stitch.open_device("tiny") as device:
        view = one(doubled(device)(integers()))[1]
    with pytest.raises(stitch.TaskError, match="closed"):
        view.numpy()
