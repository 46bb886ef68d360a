"""Random histories of allocation, moves and copies: invariants hold, contents survive.

Every granule of a tensor is tagged with the tensor's number and its own index.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    rule,
    run_state_machine_as_test,
)
from numpy.typing import NDArray

from stitch.errors import OutOfMemoryError, TaskError
from stitch.machine.shape import MachineShape, SpaceShape, footprint
from stitch.memory import SpaceMemory, prepare_copy
from stitch.program import (
    TILE_SHAPE,
    DataType,
    Layout,
    MemoryLayout,
    Orientation,
    ShardSpec,
    Space,
    TensorDesc,
)
from tests.support.dense_arrays import read_array, write_array

MACHINE = MachineShape(
    "tiny",
    (2, 2),
    SpaceShape(1, 0, 1 << 20, 64),
    SpaceShape(4, 96, 96 + 24 * 1024, 16),
    SpaceShape(3, 0, 48 * 1024, 32),
)
SPACES = (Space.L1, Space.DRAM, Space.HOST)


@dataclass(eq=False)
class Live:
    """A tensor of the model: where it lies, and what it has to hold."""

    desc: TensorDesc
    address: int
    data: NDArray[Any]

    @property
    def space(self) -> Space:
        return self.desc.layout.space

    @property
    def size_per_bank(self) -> int:
        return footprint(self.desc, MACHINE).size_per_bank


def layouts(rows: int, columns: int) -> st.SearchStrategy[Layout]:
    tiles = st.sampled_from([None, TILE_SHAPE])
    interleaved = st.builds(Layout, st.just(DataType.INT32), st.sampled_from(SPACES), tiles)
    wide = -(-columns // 32) * 32
    high = -(-rows // 32) * 32
    orientation = st.sampled_from(Orientation)

    def sharded(
        memory_layout: MemoryLayout, plain: tuple[int, int], tiled: tuple[int, int]
    ) -> st.SearchStrategy[Layout]:
        return st.builds(
            lambda tile, order: Layout(
                DataType.INT32, Space.L1, tile, memory_layout,
                ShardSpec((2, 2), tiled if tile else plain, order),
            ),
            tiles, orientation,
        )  # fmt: skip

    return interleaved | st.one_of(
        sharded(MemoryLayout.HEIGHT_SHARDED, (-(-rows // 3), columns), (high, wide)),
        sharded(MemoryLayout.WIDTH_SHARDED, (rows, -(-columns // 4)), (high, 32)),
        sharded(MemoryLayout.BLOCK_SHARDED, (-(-rows // 2), -(-columns // 2)), (high, wide)),
    )


@st.composite
def tensors(draw: st.DrawFn) -> TensorDesc:
    rows, columns = draw(st.integers(1, 40)), draw(st.integers(1, 70))
    return TensorDesc((rows, columns), draw(layouts(rows, columns)))


class MemoryHistory(RuleBasedStateMachine):
    live = Bundle("live")

    @initialize(debug=st.booleans())
    def open_spaces(self, debug: bool) -> None:
        self.spaces = {
            space: SpaceMemory(space, MACHINE.space(space), debug=debug) for space in SPACES
        }
        self.tensors: list[Live] = []
        self.freed: list[tuple[Space, int]] = []
        self.count = 0

    def place(self, desc: TensorDesc, low: bool) -> int | None:
        memory = self.spaces[desc.layout.space]
        size = footprint(desc, MACHINE).size_per_bank
        before = self.picture(memory)
        try:
            address = memory.allocator.alloc(size, low=low)
        except OutOfMemoryError:
            # The certificate: no hole is as large as what was asked for.
            assert memory.allocator.largest_hole < size
            assert self.picture(memory) == before
            return None
        memory.fill_padding(desc, address, MACHINE)
        return address

    @staticmethod
    def picture(memory: SpaceMemory) -> tuple[object, ...]:
        allocator = memory.allocator
        return allocator.buffers(), allocator.holes(), allocator.used_nbytes

    def remember(self, desc: TensorDesc, address: int, data: NDArray[Any]) -> Live:
        tensor = Live(desc, address, data)
        self.tensors.append(tensor)
        self.freed = [f for f in self.freed if f != (tensor.space, address)]
        return tensor

    def forget(self, tensor: Live) -> None:
        memory = self.spaces[tensor.space]
        memory.check_padding(tensor.desc, tensor.address, MACHINE, name="model tensor")
        assert memory.allocator.free(tensor.address) == tensor.size_per_bank
        memory.release(tensor.address, tensor.size_per_bank)
        self.tensors.remove(tensor)
        self.freed.append((tensor.space, tensor.address))

    @rule(target=live, desc=tensors(), low=st.booleans())
    def alloc(self, desc: TensorDesc, low: bool) -> Any:
        address = self.place(desc, low)
        if address is None:
            return multiple()
        self.count += 1
        data = (np.arange(desc.elements, dtype=np.int32) + self.count * 100_000).reshape(desc.shape)
        region = self.spaces[desc.layout.space].region(
            address, footprint(desc, MACHINE).size_per_bank
        )
        write_array(data, desc, region, MACHINE)
        return self.remember(desc, address, data)

    @rule(tensor=consumes(live))
    def free(self, tensor: Live) -> None:
        self.forget(tensor)

    @rule(tensor=consumes(live), target=live, data=st.data())
    def move(self, tensor: Live, data: st.DataObject) -> Live:
        """To anywhere that is free once the tensor itself has left: overlaps happen."""
        memory = self.spaces[tensor.space]
        allocator = memory.allocator
        allocator.free(tensor.address)
        places = [
            a
            for start, size in allocator.holes()
            if size >= tensor.size_per_bank
            for a in (start, start + size - tensor.size_per_bank)
        ]
        near = [tensor.address + d * allocator.alignment for d in (-3, -1, 1, 2)]
        places += [a for a in near if allocator.is_free(a, tensor.size_per_bank)]
        goal = data.draw(st.sampled_from(places))
        allocator.alloc_at(goal, tensor.size_per_bank)
        nbytes = tensor.size_per_bank * memory.shape.banks
        memory.mover(tensor.address, memory, goal, nbytes)()
        tensor.address = goal
        self.freed = [f for f in self.freed if f != (tensor.space, goal)]
        return tensor

    @rule(tensor=live, target=live, data=st.data(), low=st.booleans())
    def to_layout(self, tensor: Live, data: st.DataObject, low: bool) -> Any:
        """A copy in another layout, perhaps in another space (as an eviction makes)."""
        rows, columns = tensor.desc.shape
        desc = TensorDesc(tensor.desc.shape, data.draw(layouts(rows, columns)))
        address = self.place(desc, low)
        if address is None:
            return multiple()
        there = self.spaces[desc.layout.space]
        kernel = prepare_copy(tensor.desc, desc, MACHINE)
        before = there.counter.writes, there.counter.nbytes
        source = self.spaces[tensor.space].region(tensor.address, tensor.size_per_bank)
        goal = there.region(address, kernel.target_footprint.size_per_bank)
        kernel.bind(source, goal, there.counter)()
        grown = there.counter.writes - before[0], there.counter.nbytes - before[1]
        place = kernel.target_footprint
        assert grown == (1, place.pages * place.page_nbytes)
        return self.remember(desc, address, tensor.data)

    @rule(data=st.data())
    def free_again_raises(self, data: st.DataObject) -> None:
        gone = [
            (space, address)
            for space, address in self.freed
            if self.spaces[space].allocator.size_of(address) is None
        ]
        if not gone:
            return
        space, address = data.draw(st.sampled_from(gone))
        before = self.picture(self.spaces[space])
        with pytest.raises(TaskError):
            self.spaces[space].allocator.free(address)
        assert self.picture(self.spaces[space]) == before

    @rule(tensor=live, shift=st.integers(-2, 0))
    def alloc_at_taken_place_raises(self, tensor: Live, shift: int) -> None:
        allocator = self.spaces[tensor.space].allocator
        address = tensor.address + shift * allocator.alignment
        size = tensor.size_per_bank + 2 * allocator.alignment
        if address < allocator.base or address + size > allocator.limit:
            return
        before = self.picture(self.spaces[tensor.space])
        with pytest.raises(OutOfMemoryError, match="taken"):
            allocator.alloc_at(address, size)
        assert self.picture(self.spaces[tensor.space]) == before

    @invariant()
    def allocators_are_sound(self) -> None:
        for memory in self.spaces.values():
            memory.allocator.check()
            mine = sorted(
                (t.address, t.size_per_bank) for t in self.tensors if t.space is memory.space
            )
            assert list(memory.allocator.buffers()) == mine
            assert memory.allocator.used_nbytes == sum(size for _, size in mine)

    @invariant()
    def contents_are_preserved(self) -> None:
        for tensor in self.tensors:
            memory = self.spaces[tensor.space]
            memory.check_padding(tensor.desc, tensor.address, MACHINE, name="model tensor")
            region = memory.region(tensor.address, tensor.size_per_bank)
            np.testing.assert_array_equal(read_array(tensor.desc, region, MACHINE), tensor.data)

    def teardown(self) -> None:
        for tensor in list(getattr(self, "tensors", ())):
            self.forget(tensor)
        for memory in getattr(self, "spaces", {}).values():
            assert memory.allocator.used_nbytes == 0
            assert len(memory.allocator.holes()) == 1


slow_is_fine = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]


def test_short_histories_keep_every_invariant() -> None:
    run_state_machine_as_test(
        MemoryHistory,
        settings=settings(
            max_examples=50,
            stateful_step_count=30,
            deadline=None,
            suppress_health_check=slow_is_fine,
        ),
    )


@pytest.mark.campaign("memory")
def test_long_histories_keep_every_invariant() -> None:
    run_state_machine_as_test(
        MemoryHistory,
        settings=settings(
            max_examples=200,
            stateful_step_count=80,
            deadline=None,
            suppress_health_check=slow_is_fine,
        ),
    )
