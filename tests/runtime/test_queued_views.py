"""A view of a pending tensor is a task of the queue: pending, recorded, cancelled as any."""

from __future__ import annotations

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
KINDS = [("tiny", "numpy"), ("host", "numpy"), ("host", "torch"), ("host", "onnxruntime")]


@pytest.fixture(params=KINDS, ids="-".join)
def device(request: pytest.FixtureRequest) -> Iterator[stitch.Device]:
    machine, executor = request.param
    with stitch.open_device(machine, debug=True, executor=executor) as opened:
        yield opened


def doubled(device: stitch.Device) -> stitch.LoadedProgram:
    return device.load(scaled("a", 2.0, target=device.machine))


def row(device: stitch.Device) -> stitch.LoadedProgram:
    return device.load(scaled("row", 3.0, SHAPE[1:], target=device.machine))


def windows(device: stitch.Device) -> int:
    return device.statistics().batches


def expected(x: Array) -> Array:
    return x * 2 + 1


def test_a_view_of_what_is_pending_runs_nothing(device: stitch.Device) -> None:
    whole = one(doubled(device)(integers()))
    view, rest = whole[1], whole[2:]
    inner, none, back = rest[1], rest[2:2], whole[-1]
    assert windows(device) == 0
    assert all(t.is_pending and t.is_allocated for t in (whole, view, rest, inner, none, back))
    assert view.shape == SHAPE[1:] and rest.shape == (2, *SHAPE[1:]) and none.shape[0] == 0
    assert view.layout == whole.layout
    np.testing.assert_array_equal(inner.numpy(), expected(integers())[3])
    for tensor, wanted in ((view, 1), (rest, slice(2, None)), (none, slice(3, 3)), (back, -1)):
        np.testing.assert_array_equal(tensor.numpy(), expected(integers())[wanted])
    assert windows(device) == 1


def test_views_of_any_rows_are_runs_of_one_recording(device: stitch.Device) -> None:
    a, b = doubled(device), row(device)
    for turn in range(8):
        x = integers() + turn
        whole = one(a(x))
        results = [one(b(whole[(turn + i) % 4])) for i in range(3)]
        parts = whole[turn % 3 : turn % 3 + 2]
        for i, result in enumerate(results):
            np.testing.assert_array_equal(result.numpy(), expected(x)[(turn + i) % 4] * 3 + 1)
        np.testing.assert_array_equal(parts.numpy(), expected(x)[turn % 3 : turn % 3 + 2])
        if turn == 3:
            settled = device.statistics()
    now = device.statistics()
    assert (now.plans_made, now.bindings_made) == (settled.plans_made, settled.bindings_made)
    assert now.batches == 8


def test_a_view_that_was_queued_has_bytes_of_its_own() -> None:
    with stitch.open_device("tiny", debug=True) as device:
        program = device.load(scaled("a", 2.0, placement=("output.y.space=l1",)))
        whole = one(program(integers()))
        queued = whole[1]
        whole.settle()
        shared = whole[1]
        device.write(whole, integers())
        np.testing.assert_array_equal(queued.numpy(), expected(integers())[1])
        np.testing.assert_array_equal(shared.numpy(), integers()[1])
        del whole, shared
        gc.collect()
        assert used(device)["l1"] < integers().nbytes
        np.testing.assert_array_equal(queued.numpy(), expected(integers())[1])
        del queued
        gc.collect()
        assert used(device)["l1"] == 0


def test_what_a_view_reads_may_be_donated_or_freed_after_it(device: stitch.Device) -> None:
    eat = device.load(consuming("eat", 2.0, SHAPE, target=device.machine))
    whole = one(doubled(device)(integers()))
    view = whole[1]
    eaten = one(eat(whole))
    with pytest.raises(stitch.TaskError, match="donated to 'eat'"):
        whole[2]
    np.testing.assert_array_equal(view.numpy(), expected(integers())[1])
    np.testing.assert_array_equal(
        eaten.numpy(), one(eat(device.tensor(expected(integers())))).numpy()
    )
    whole = one(doubled(device)(integers()))
    view = whole[1:][1]
    whole.deallocate()
    with pytest.raises(stitch.TaskError, match="freed"):
        whole[0]
    np.testing.assert_array_equal(view.numpy(), expected(integers())[2])


def test_a_view_may_be_donated_itself(device: stitch.Device) -> None:
    eat = device.load(consuming("eat", 2.0, SHAPE[1:], target=device.machine))
    whole = one(doubled(device)(integers()))
    eaten = one(eat(whole[1]))
    wanted = one(eat(device.tensor(expected(integers())[1]))).numpy()
    np.testing.assert_array_equal(eaten.numpy(), wanted)
    np.testing.assert_array_equal(whole.numpy(), expected(integers()))


def test_a_view_of_what_was_never_made_says_so(device: stitch.Device) -> None:
    def stop(x: Array) -> Array:
        raise RuntimeError("stopped here")

    failing = stitch.task(returns=stitch.TensorDesc(SHAPE, Layout(F32, Space.HOST)))(stop)
    whole = device.call(failing, integers())
    view = whole[1]
    result = one(row(device)(view))
    with pytest.raises(RuntimeError, match="stopped here"):
        device.flush()
    for tensor in (whole, view, result):
        with pytest.raises(stitch.TaskError, match="was never made"):
            tensor.numpy()
    with pytest.raises(stitch.TaskError, match="was never made"):
        whole[1]


def test_a_host_function_is_given_a_view_and_may_queue_one(device: stitch.Device) -> None:
    whole = one(doubled(device)(integers()))
    found = device.call(stitch.task(lambda x: float(x.sum())), whole[3]).result()
    assert found == float(expected(integers())[3].sum())
    program, later = doubled(device), list[stitch.Tensor]()

    def queue_more() -> None:
        later.append(one(program(integers()))[1:3])

    device.call(stitch.task(queue_more)).result()
    np.testing.assert_array_equal(later[0].numpy(), expected(integers())[1:3])


def test_views_of_pending_tiles_lie_in_tiles() -> None:
    tiles = Layout(F32, Space.DRAM, TILE_SHAPE)
    matrix, cube = integers((96, 40)), integers((3, 40, 40))
    with stitch.open_device("tiny", debug=True) as device:
        pending = device.tensor(matrix).to_layout(tiles)
        middle, last = pending[32:64], pending[64:]
        batched = device.tensor(cube).to_layout(tiles)
        inner, some = batched[1:][0][32:], batched[1:]
        assert windows(device) == 0
        assert all(view.layout == tiles for view in (middle, last, inner, some))
        np.testing.assert_array_equal(middle.numpy(), matrix[32:64])
        np.testing.assert_array_equal(last.numpy(), matrix[64:])
        np.testing.assert_array_equal(inner.numpy(), cube[1, 32:])
        np.testing.assert_array_equal(some.numpy(), cube[1:])
        assert windows(device) == 1


@pytest.mark.parametrize("kind", [DataType.BFP8, DataType.BFP4])
def test_views_of_pending_blocks_keep_their_bits(kind: DataType) -> None:
    layout, draw = Layout(kind, Space.DRAM, TILE_SHAPE), np.random.default_rng(0)
    bits = draw.integers(0, 1 << 32, (3, 32, 64), np.uint32).view(np.float32)
    with stitch.open_device("tiny", debug=True) as device:
        pending = device.tensor(bits).to_layout(layout)
        queued = pending[1]
        assert queued.is_pending and queued.layout == layout
        pending.settle()
        shared, memory = pending[1], device.memory(Space.DRAM)
        assert (
            memory[device.footprint_of(queued)].tobytes()
            == memory[device.footprint_of(shared)].tobytes()
        )


def test_views_of_what_no_program_copies_run_the_queue_and_share() -> None:
    kind = DataType.INT4
    numbers = np.arange(-8, 8).reshape(4, 4).astype(kind.dtype)
    with stitch.open_device("tiny", debug=True) as device:
        pending = device.tensor(numbers).to_layout(Layout(kind, Space.DRAM))
        view = pending[1]
        assert not view.is_pending and not pending.is_pending
        inner, outer = device.footprint_of(view), device.footprint_of(pending)
        assert outer.start < inner.start < outer.stop
        np.testing.assert_array_equal(view.numpy(), numbers[1])


def test_where_copies_are_forbidden_the_queue_runs_and_the_view_shares() -> None:
    placement = ("input.x.space=l1", "output.y.space=l1")
    with stitch.open_device("tiny", debug=True) as device:
        a = device.load(scaled("a", 2.0, placement=("output.y.space=l1",)))
        b = device.load(scaled("row", 3.0, SHAPE[1:], placement=placement))
        x = device.tensor(integers()).to_layout(a.input_layout(0))
        with stitch.forbid_copies(device):
            view = one(a(x))[2]
            assert not view.is_pending
            result = one(b(view))
        np.testing.assert_array_equal(result.numpy(), expected(integers())[2] * 3 + 1)


@pytest.mark.parametrize("rows", [1, 2, 3, 7])
def test_where_no_copy_fits_the_queue_runs_and_the_view_shares(rows: int) -> None:
    machine = tiny(l1_nbytes=2560, core_grid=(1, 1))
    x, placement = integers((8, 64)), ("input.x.space=l1", "output.y.space=dram")
    with stitch.open_device(machine, debug=True) as device:
        a = device.load(scaled("a", 2.0, x.shape, target=machine, placement=("output.y.space=l1",)))
        b = device.load(scaled("rows", 3.0, (rows, 64), target=machine, placement=placement))
        result = one(b(one(a(x))[8 - rows :]))
        np.testing.assert_array_equal(result.numpy(), expected(x)[8 - rows :] * 3 + 1)


def test_threads_may_ask_for_views_of_one_pending_tensor_at_once(device: stitch.Device) -> None:
    program = doubled(device)
    for _ in range(20):
        whole = one(program(integers()))
        found: list[Array] = []
        together = threading.Barrier(4)

        def look(
            whole: stitch.Tensor = whole,
            found: list[Array] = found,
            together: threading.Barrier = together,
        ) -> None:
            together.wait()
            found.append(whole[1:][1].numpy())

        threads = [threading.Thread(target=look) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for array in found:
            np.testing.assert_array_equal(array, expected(integers())[2])
        assert len(found) == 4
