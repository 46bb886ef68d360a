"""Buffers of dropped results are reused by the next run of the same plan, or freed."""

from __future__ import annotations

import numpy as np
import pytest

import stitch
from stitch.graph import ComputationGraphBuilder
from stitch.program import DataType, Layout, Space, TensorDesc
from stitch.report import memory_views
from tests.support.stitched_models import (
    binary_op,
    consuming,
    integers,
    model,
    one,
    parameters_only,
    scaled,
    tiny,
)

F32 = DataType.FLOAT32


def used(device: stitch.Device) -> dict[Space, int]:
    return {space: use.used_nbytes for space, use in device.memory_use().items()}


def leased(device: stitch.Device) -> int:
    return sum(use.leased_nbytes for use in device.memory_use().values())


@pytest.mark.parametrize("handle_goes_first", [True, False])
def test_an_exported_result_is_held_until_its_array_is_dropped(handle_goes_first: bool) -> None:
    with stitch.open_device("tiny") as device:
        pipeline = stitch.Pipeline(
            [device.load(scaled("a", 2.0, placement=("output.0.space=dram",)))]
        )
        empty, addresses = used(device), set()
        for start in range(12):
            y = one(pipeline(integers(start=start)))
            addresses.add(y.address)
            shared = np.from_dlpack(y)
            if handle_goes_first:
                del y
            # Whoever holds the bytes sees no other result in them.
            one(pipeline(integers(start=50))).numpy()
            np.testing.assert_array_equal(shared, integers(start=start) * 2 + 1)
            del shared
            if not handle_goes_first:
                del y
            if start == 4:
                before = device.statistics()
        assert len(addresses) <= 2
        after = device.statistics()
        assert (after.plans_made, after.bindings_made) == (before.plans_made, before.bindings_made)
        device.flush()
        assert used(device) == empty


def test_a_large_tensor_gets_the_memory_of_dropped_results() -> None:
    with stitch.open_device("tiny") as device:
        program = device.load(scaled("a", 2.0))
        for _ in range(3):
            one(program(integers())).numpy()
        device.flush()
        free = device.machine.shape.space(Space.L1)
        rows = free.capacity // 64
        tensor = device.empty(TensorDesc((rows * free.banks, 16), Layout(F32, Space.L1)))
        assert device.memory_use()[Space.L1].free_nbytes < 64
        del tensor
        np.testing.assert_array_equal(one(program(integers())).numpy(), integers() * 2 + 1)


@pytest.mark.parametrize("machine", ["host", "tiny"])
def test_a_plan_for_two_buffers_does_not_serve_one(machine: str) -> None:
    x, z = integers(), integers(start=7) * 3
    with stitch.open_device(machine) as device:
        program = device.load(binary_op("less", "Sub", (4, 64), target=machine))
        left, right = (
            device.tensor(a).to_layout(program.input_layout(i)) for i, a in enumerate((x, z))
        )
        for _ in range(4):
            whole = left[0:4]
            np.testing.assert_array_equal(one(program(left, whole)).numpy(), x - x)
            np.testing.assert_array_equal(one(program(left, right)).numpy(), x - z)
            np.testing.assert_array_equal(one(program(right, left)).numpy(), z - x)


def test_a_reused_buffer_keeps_neither_retain_nor_cached_results() -> None:
    with stitch.open_device("tiny") as device:
        pipeline = stitch.Pipeline([device.load(scaled("a", 2.0))])
        weights = device.load(parameters_only("weights", 3.0))
        for start in range(12):
            y = one(pipeline(integers(start=start)))
            assert not y.retain
            expected = integers(start=start) * 2 + 1
            if start % 2:
                y.retain = True
            else:
                np.testing.assert_array_equal(one(weights(y)).numpy(), expected * 3)
            np.testing.assert_array_equal(y.numpy(), expected)
            del y


def test_a_view_outlives_its_tensor_in_work_that_freed_the_tensor_before() -> None:
    with stitch.open_device("tiny") as device:
        program = device.load(binary_op("less", "Sub", (4, 64)))
        for start in range(6):
            x = device.tensor(integers(start=start)).to_layout(Layout(F32, Space.L1))
            z = device.tensor(integers(start=7)).to_layout(Layout(F32, Space.L1))
            device.flush()
            view = x[0:2] if start > 2 else None
            y = one(program(x, z))
            del x
            device.flush()
            others = [device.empty(TensorDesc((4, 64), Layout(F32, Space.L1))) for _ in range(3)]
            for other in others:
                device.write(other, -integers())
            np.testing.assert_array_equal(y.numpy(), integers(start=start) - integers(start=7))
            if view is not None:
                np.testing.assert_array_equal(view.numpy(), integers(start=start)[:2])
            del view, y, z, others, other


def test_a_dropped_output_keeps_its_buffer_beside_a_held_one() -> None:
    def two(b: ComputationGraphBuilder) -> None:
        x = b.input("x", (4, 64), "float32")
        b.output("held", x * 2)
        b.output("dropped", x * 3)

    with stitch.open_device("wormhole_n150") as device:
        program = device.load(model("two", two, target=device.machine))
        last, places, x = None, set(), integers()
        for step in range(12):
            if step == 6:
                settled = device.statistics()
            result = program(x + np.float32(step))
            assert isinstance(result, tuple)
            held, dropped = result
            np.testing.assert_array_equal(dropped.numpy(), (x + np.float32(step)) * 3)
            places.add(dropped.address)
            del dropped, result
            if last is not None:
                np.testing.assert_array_equal(last.numpy(), (x + np.float32(step - 1)) * 2)
            last = held
        assert len(places) == 1
        after = device.statistics()
        assert after.plans_made == settled.plans_made
        assert after.bindings_made == settled.bindings_made


def test_a_held_value_at_a_fixed_address_is_there_in_the_next_run() -> None:
    machine = tiny(l1_nbytes=4096)
    here = ("input.x.space=l1", "output.y.space=l1")
    assert machine.shape.l1 is not None
    base = machine.shape.l1.base
    spot = base + 0x200
    with stitch.open_device(machine) as device:
        # The only other gap that is as large as a value: the first result lies there unasked.
        walls = [
            device.empty(TensorDesc((4, 64), Layout(F32, Space.L1, address=base + at)))
            for at in (0x100, 0x300)
        ]
        first = device.load(scaled("first", 2.0, target=machine, placement=here))
        placement = (*here, f"input.x.address={spot:#x}")
        then = device.load(scaled("then", 3.0, target=machine, placement=placement))
        held: list[stitch.Tensor] = []
        for start in range(4):
            h = one(first(integers(start=start)))
            y = one(then(h))
            np.testing.assert_array_equal(y.numpy(), (integers(start=start) * 2 + 1) * 3 + 1)
            held = [*held[-1:], h]
            del h, y
        del walls, held


@pytest.mark.parametrize("makes", ["program", "to_layout"])
def test_the_overwriter_of_a_fixed_address_is_there_in_the_next_run(makes: str) -> None:
    with stitch.open_device("wormhole_n150") as device:
        machine = device.machine
        assert machine.shape.l1 is not None
        spot = machine.shape.l1.base + 0x600
        placement = ("input.x.space=l1", "output.y.space=l1", f"output.y.address={spot:#x}")
        first = device.load(scaled("first", 2.0, target=machine, placement=placement))
        eat = device.load(consuming("eat", 3.0, target=machine, placement=("input.x.space=l1",)))
        for hold in (1, 2):
            held: list[tuple[stitch.Tensor, int]] = []
            for start in range(6):
                x = integers(start=start)
                if makes == "program":
                    z = one(eat(first(x)))
                else:
                    lying = Layout(F32, Space.L1, address=spot)
                    z = one(eat(device.tensor(x * 2 + 1).to_layout(lying)))
                device.flush()
                held = [*held, (z, start)][-hold:]
                for tensor, number in held:
                    expected = (integers(start=number) * 2 + 1) * 3
                    np.testing.assert_array_equal(tensor.numpy(), expected)
                del z, tensor


def test_a_host_tensor_of_which_no_copy_can_stay_is_copied_in_each_time() -> None:
    machine = tiny(l1_nbytes=1024, dram_nbytes=1024)
    here = ("input.x.space=l1", "output.y.space=l1")
    with stitch.open_device(machine) as device:
        programs = [
            device.load(scaled(name, factor, target=machine, placement=here))
            for name, factor in (("a", 2.0), ("b", 3.0))
        ]
        pipeline = stitch.Pipeline(programs)
        walls: list[stitch.Tensor] = []
        for space, left in ((Space.L1, 768), (Space.DRAM, 0)):
            while device.memory_use()[space].free_nbytes > left:
                try:
                    walls.append(device.empty(TensorDesc((4, 16), Layout(F32, space))))
                except stitch.OutOfMemoryError:
                    break
        # What others hold stays where it is.
        shared = [np.from_dlpack(wall) for wall in walls if wall.space is Space.DRAM]
        tensor = device.tensor(integers())
        for _ in range(6):
            y = one(pipeline(tensor))
            np.testing.assert_array_equal(y.numpy(), (integers() * 2 + 1) * 3 + 1)
            del y
        del shared, walls


def test_buffers_for_kept_results_are_allocated_in_batches() -> None:
    with stitch.open_device("wormhole_n150") as device:
        pipeline = stitch.Pipeline([device.load(scaled("a", 2.0, target=device.machine))])
        held, changes = list[stitch.Tensor](), 0
        for start in range(300):
            before = leased(device)
            held.append(one(pipeline(integers(start=start))))
            changes += leased(device) > before
        # 1, 2, 4, ..., and then as many each time as may be taken at once.
        assert changes < 30
        assert len({tensor.address for tensor in held}) == 300
        for start, tensor in enumerate(held):
            np.testing.assert_array_equal(tensor.numpy(), integers(start=start) * 2 + 1)
        statistics = device.statistics()
        assert statistics.plans_made <= 2
        assert statistics.revocations == 0


def test_unused_output_slots_are_free_memory() -> None:
    with stitch.open_device("wormhole_n150") as device:
        pipeline = stitch.Pipeline([device.load(scaled("a", 2.0, target=device.machine))])
        empty = used(device)
        held = [one(pipeline(integers(start=start))) for start in range(40)]
        space = held[0].space
        ((size,),) = {(size,) for _, size, _ in device.memory_use()[space].buffers}
        assert leased(device) > 0
        assert used(device) == {**empty, space: empty[space] + 40 * size}
        view = memory_views(device)[space.value]
        assert view["total_bytes_allocated_per_bank"] == used(device)[space]
        assert view["total_bytes_leased_per_bank"] == leased(device)
        held.clear()
        device.flush()
        assert used(device) == empty
