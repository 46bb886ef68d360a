"""Buffers of dropped results: kept for the next run of the same plan, given back for anything else.

In debug mode nothing is kept, so a device in debug mode says what the other one has to say.
"""

from __future__ import annotations

import random

import numpy as np
import pytest

import stitch
from stitch.graph import ComputationGraphBuilder
from stitch.planner import Buffer
from stitch.program import DataType, Layout, Space, TensorDesc
from stitch.report import memory_views
from stitch.runtime import LoadedProgram
from stitch.runtime.recording.recording import Executable
from tests.support.grids import every
from tests.support.lines_run import lines_run
from tests.support.stitched_models import (
    binary_op,
    consuming,
    integers,
    model,
    one,
    parameters_only,
    scaled,
    several,
    tiny,
)

F32 = DataType.FLOAT32


def used(device: stitch.Device) -> dict[Space, int]:
    return {s: a.used_nbytes for s, a in device.records.allocators.items()}


def leased(device: stitch.Device) -> int:
    return sum(len(lease.buffers) for lease in device.records.spare_leases())


def test_a_dropped_result_counts_as_free_for_whoever_looks() -> None:
    with stitch.open_device("tiny") as device:
        program = device.load(scaled("a", 2.0))
        empty = used(device)
        y = one(program(integers()))
        y.numpy()
        assert used(device) != empty
        del y
        device.flush()
        assert leased(device) == 1
        assert used(device) == empty
        assert leased(device) == 1, "looking changes nothing"


def test_work_that_repeats_takes_the_place_of_its_last_run() -> None:
    with stitch.open_device("tiny") as device:
        program = device.load(scaled("a", 2.0))
        addresses = set()
        for start in range(6):
            y = one(program(integers(start=start)))
            np.testing.assert_array_equal(y.numpy(), integers(start=start) * 2 + 1)
            addresses.add(y.address)
            generation = device.records.generation
        assert len(addresses) <= 2
        y = one(program(integers()))
        y.numpy()
        assert device.records.generation == generation
        assert device.statistics().plans_made <= 2


@pytest.mark.parametrize("handle_goes_first", [True, False])
def test_an_exported_result_is_held_until_it_is_let_go_of(handle_goes_first: bool) -> None:
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
        assert device.records.allocators[Space.L1].free_nbytes < 64
        del tensor
        np.testing.assert_array_equal(one(program(integers())).numpy(), integers() * 2 + 1)


def test_what_a_pipeline_ran_lately_gives_its_memory_up_late() -> None:
    """Runs past the queue count too: for leases, and for results that may be evicted."""
    with stitch.open_device("tiny") as device:
        pipeline = stitch.Pipeline([device.load(scaled("hot", 2.0))])
        for _ in range(6):
            one(pipeline(integers())).numpy()
        other, later = device.load(scaled("other", 3.0)), device.load(scaled("later", 4.0))
        one(other(integers())).numpy()
        one(later(integers())).numpy()
        windows = device.statistics().windows
        y = one(pipeline(integers()))
        assert device.statistics().windows == windows, "it ran past the queue"
        assert y._record.last_used == device.tasks.queued.number
        del y
        device.flush()
        origins = [lease.buffers[0].origin for lease in device.records.spare_leases()]
        assert origins.index("output 'y' of 'other'") < origins.index("output 'y' of 'hot'")


def test_the_spare_memory_of_the_only_lease_is_taken_before_anything_is_evicted() -> None:
    with stitch.open_device("tiny") as device:
        tiles = device.load(scaled("a", 2.0, (8, 8), placement=["output.y.layout=tile"]))
        x = integers((8, 8))
        first = one(tiles(x))
        spare = one(tiles(x))
        third = one(tiles(first))
        third.numpy()
        # Three tiles fill the memory of a bank, and each window asks for one more.
        fourth = one(tiles(first))
        del spare
        np.testing.assert_array_equal(fourth.numpy(), third.numpy())
        assert "evict" not in device.explain()


@pytest.mark.parametrize("machine", ["host", "tiny"])
def test_a_recording_tells_one_buffer_from_two(machine: str) -> None:
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


def test_a_place_is_handed_out_again_without_what_was_requested_or_remembered_of_its_value() -> (
    None
):
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


def step(
    device: stitch.Device,
    programs: list[LoadedProgram],
    held: list[stitch.Tensor],
    choice: random.Random,
) -> list[float]:
    """One random thing that users do; gives what could be seen."""
    what = choice.randrange(7)
    if what < 3:
        value: object = integers(start=choice.randrange(9))
        for _ in range(choice.randrange(1, 3)):
            value = choice.choice(programs)(value)
        if choice.random() < 0.4:
            held.append(one(value))
        return [float(one(value).numpy().sum())]
    if what == 3 and held:
        del held[choice.randrange(len(held))]
    elif what == 4 and len(held) < 4:
        rows = choice.randrange(1, 8)
        held.append(device.empty(TensorDesc((rows, 16), Layout(F32, Space.L1))))
        device.write(held[-1], np.full((rows, 16), rows, np.float32))
    elif what == 5 and held:
        target = Layout(F32, choice.choice([Space.L1, Space.DRAM]))
        held.append(held[choice.randrange(len(held))].to_layout(target))
    elif what == 6:
        device.flush()
        return [float(n) for n in used(device).values()]
    del held[6:]
    return [float(tensor.numpy().sum()) for tensor in held]


@pytest.mark.parametrize("seed", every(4, range(12)))
def test_a_device_in_debug_mode_says_the_same(seed: int) -> None:
    seen = []
    for debug in (False, True):
        with stitch.open_device("tiny", debug=debug) as device:
            programs = [device.load(scaled(name, f)) for name, f in (("a", 2.0), ("b", 3.0))]
            choice, held = random.Random(seed), list[stitch.Tensor]()
            seen.append([step(device, programs, held, choice) for _ in range(60)])
            held.clear()
    assert seen[0] == seen[1]


def test_what_is_dropped_keeps_its_place_though_another_result_of_its_run_is_held() -> None:
    def large(b: ComputationGraphBuilder) -> None:
        x = b.input("x", (12, 64), "float32")
        b.output("y", b.op("Slice", x, np.array([0]), np.array([4]), np.array([0])))

    def two(b: ComputationGraphBuilder) -> None:
        x = b.input("x", (4, 64), "float32")
        b.output("held", x * 2)
        b.output("dropped", x * 3)

    with stitch.open_device("wormhole_n150") as device:
        program = device.load(model("two", two, target=device.machine))
        last, places, x = None, set(), integers()
        for step in range(12):
            if step == 6:
                settled, generation = device.statistics(), device.records.generation
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
        assert device.records.generation == generation
        after = device.statistics()
        assert after.plans_made == settled.plans_made
        assert after.bindings_made == settled.bindings_made


def test_a_held_value_that_a_program_finds_at_an_address_is_there_in_the_next_run() -> None:
    """Each plan that ran is looked at by the checker (`plans_are_sound`)."""
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
def test_what_overwrites_a_result_at_an_address_lies_there_in_the_next_run(makes: str) -> None:
    """As above; the value at the address is gone when its window has run, its place is not."""
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
    """A pipeline's tensors and arrays, where the memory has room for nothing but the run itself."""
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
            while device.records.allocators[space].free_nbytes > left:
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


def test_what_was_requested_of_an_exported_result_is_not_requested_of_the_next() -> None:
    with stitch.open_device("host") as device:
        pipeline = stitch.Pipeline([device.load(scaled("a", 2.0, target="host"))])
        for _ in range(5):
            y = one(pipeline(integers()))
            shared = np.from_dlpack(y)
            y.retain = True
            del shared
            device.flush()
            del y
            assert not one(pipeline(integers())).retain


def test_places_for_results_that_are_kept_are_found_several_at_a_time() -> None:
    with stitch.open_device("wormhole_n150") as device:
        pipeline = stitch.Pipeline([device.load(scaled("a", 2.0, target=device.machine))])
        held, changes = list[stitch.Tensor](), 0
        for start in range(300):
            generation = device.records.generation
            held.append(one(pipeline(integers(start=start))))
            changes += device.records.generation != generation
        # 1, 2, 4, ..., and then as many each time as may be taken at once.
        assert changes < 30
        assert len({tensor.address for tensor in held}) == 300
        for start, tensor in enumerate(held):
            np.testing.assert_array_equal(tensor.numpy(), integers(start=start) * 2 + 1)
        statistics = device.statistics()
        assert statistics.plans_made <= 2
        assert statistics.revocations == 0


def test_places_that_no_result_has_taken_yet_are_free_memory() -> None:
    with stitch.open_device("wormhole_n150") as device:
        pipeline = stitch.Pipeline([device.load(scaled("a", 2.0, target=device.machine))])
        empty = used(device)
        held = [one(pipeline(integers(start=start))) for start in range(40)]
        space, size = held[0].space, held[0]._record.instances[0].buffer.size_per_bank
        assert leased(device) > 0
        assert used(device) == {**empty, space: empty[space] + 40 * size}
        view = memory_views(device)[space.value]
        assert view["total_bytes_allocated_per_bank"] == used(device)[space]
        assert view["total_bytes_leased_per_bank"] == leased(device) * size
        held.clear()
        device.flush()
        assert used(device) == empty


def test_places_that_no_result_has_taken_yet_are_the_first_to_be_given_up() -> None:
    with stitch.open_device("wormhole_n150") as device:
        pipeline = stitch.Pipeline([device.load(scaled("a", 2.0, target=device.machine))])
        held = [one(pipeline(integers(start=start))) for start in range(40)]
        idle = held.pop().address
        device.flush()
        fresh = leased(device) - 1
        assert fresh > 0
        order = [lease.buffers[0].address for lease in device.records.spare_leases()]
        assert order[-1] == idle
        # All of the space but what is held: nothing is moved, and what is held stays what it is.
        space = held[0].space
        banks = device.machine.shape.space(space).banks
        rows = device.records.allocators[space].largest_hole // 64
        wall = device.empty(TensorDesc((rows * banks, 16), Layout(F32, space)))
        assert device.statistics().revocations >= fresh
        assert "evict" not in device.explain()
        for start, tensor in enumerate(held):
            np.testing.assert_array_equal(tensor.numpy(), integers(start=start) * 2 + 1)
        del wall


@pytest.mark.parametrize("machine", ["tiny", "wormhole_n150"])
def test_little_memory_is_taken_before_there_is_a_use_for_it(machine: str) -> None:
    """In a small space places are taken one at a time: what nobody used yet would bar the way."""
    with stitch.open_device(machine) as device:
        pipeline = stitch.Pipeline([device.load(scaled("a", 2.0, target=device.machine))])
        held, most = list[stitch.Tensor](), 0
        for start in range(16):
            held.append(one(pipeline(integers(start=start))))
            space, records = held[-1].space, device.records
            spare = records.spare_bytes(space)
            assert spare <= records.allocators[space].free_nbytes // 256
            most = max(most, spare)
        assert (most > 0) == (machine == "wormhole_n150")
        for start, tensor in enumerate(held):
            np.testing.assert_array_equal(tensor.numpy(), integers(start=start) * 2 + 1)


def test_places_for_one_set_are_found_where_several_do_not_fit() -> None:
    """A gap for four buffers is no gap for four sets of two, but for one it is."""
    with stitch.open_device("tiny") as device:
        desc = TensorDesc((64,), Layout(F32, Space.L1))
        held, allocator = device.empty(desc), device.records.allocators[Space.L1]
        buffer, end = held._record.instances[0].buffer, allocator.limit
        size = buffer.size_per_bank
        wanted = [Buffer(n, Space.L1, None, size, desc, "a result") for n in range(2)]
        (top,) = allocator.fit(4 * size)
        gap = {Space.L1: [(0, top), (top + 4 * size, end)]}
        places = device.records.outside_of(gap, wanted, 4)
        assert places and {at for at in places[0] if top <= at < top + 4 * size} == set(places[0])
        assert len(set(places[0])) == 2


def test_finding_places_takes_as_long_for_each_result_however_many_there_are() -> None:
    with stitch.open_device("tiny") as device:
        desc = TensorDesc((4,), Layout(F32, Space.L1))

        def lines(count: int) -> int:
            wanted = [Buffer(n, Space.L1, None, 16, desc, "a result") for n in range(count)]
            return lines_run(lambda: device.records.outside_of({}, wanted, 1))

        # All that lay apart was looked through again for each.
        assert lines(400) < 5 * lines(100)


def test_a_result_that_lies_where_its_recording_works_is_not_run_over() -> None:
    """It was moved out once, and came back when no other memory was left for both results."""
    small, placement = tiny(l1_nbytes=8192), ("input.x.space=l1", "output.y.space=l1")

    def large(b: ComputationGraphBuilder) -> None:
        x = b.input("x", (12, 64), "float32")
        b.output("y", b.op("Slice", x, np.array([0]), np.array([4]), np.array([0])))

    def two(b: ComputationGraphBuilder) -> None:
        x = b.input("x", (4, 64), "float32")
        b.output("y", x * 3.0)
        b.output("z", x - 1.0)

    with stitch.open_device(small, window=1) as device:
        first = device.load(model("large", large, target=small, placement=placement))
        last = device.load(
            model("two", two, target=small, placement=(*placement, "output.z.space=l1"))
        )
        pipeline, records = stitch.Pipeline([first, last]), device.records
        several(pipeline(integers((12, 64))))
        device.flush()
        (recording,) = {lease.holder for lease in records.spare_leases()}
        assert isinstance(recording, Executable) and recording.has_one_lease
        records.revoke(records.spare_leases())
        recording.makes_way = True
        several(pipeline(integers((12, 64))))
        device.flush()
        assert not recording.has_one_lease, "its results lie elsewhere now"
        records.revoke(records.spare_leases())
        filling = []
        for at in range(1024, 9216, 256):
            if not any(a < at + 256 and at < a + n for _, a, n in recording.works_in):
                desc = TensorDesc((4, 64), Layout(F32, Space.L1, address=at))
                filling.append(device.empty(desc))
        # Room for one of them: the other is shared by all sets of places.
        del filling[3]
        held = [several(pipeline(integers((12, 64), start)))[0] for start in range(3)]
        for start, result in enumerate(held):
            np.testing.assert_array_equal(result.numpy(), integers(start=start) * 3)
