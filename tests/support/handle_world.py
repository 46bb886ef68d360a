"""A device under random use, and the model beside it: each handle that is held has its array.

Steps take whole numbers, so that whoever draws them, Hypothesis or a seed, draws nothing else.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from random import Random

import numpy as np

import stitch
from stitch.errors import LayoutError, OutOfMemoryError, TaskError
from stitch.program import Array, Layout, TensorDesc
from stitch.runtime import RuntimeDevice
from tests.support.random_work import (
    ALL_MACHINES,
    F32,
    L1,
    PROGRAMS,
    SHAPES,
    Work,
    layouts,
    numbers,
    work,
)

#: The most handles that are held, and the most programs that are loaded.
MOST_HELD, MOST_LOADED = 10, 4


@dataclass(eq=False)
class Held:
    """A handle, the elements that it must have, and which handles lie in the same bytes."""

    tensor: stitch.Tensor
    expected: Array
    root: int
    exports: list[Array] = field(default_factory=list)

    @property
    def is_ready(self) -> bool:
        return self.tensor.is_allocated and not self.tensor.is_pending


class World:
    """One device, its programs, its handles. Steps raise `AssertionError` where a promise breaks;
    a refusal for want of room or for a clash of addresses is none, and is counted."""

    def __init__(
        self, machine: int, *, window: int = 8, executor: str = "numpy", debug: bool = False,
        inter_op_threads: int = 1, device: RuntimeDevice | None = None,
    ) -> None:  # fmt: skip
        self.machine = machine
        self.held: list[Held] = []
        self.loaded: list[tuple[Work, stitch.LoadedProgram]] = []
        self.roots = self.refused = self.count = 0
        self.device: RuntimeDevice = device or stitch.open_device(
            ALL_MACHINES[machine], window=window, executor=executor, debug=debug,
            inter_op_threads=inter_op_threads,
        )  # fmt: skip

    # -- the model -------------------------------------------------------------------------------

    @contextmanager
    def attempt(self, *given: Held) -> Iterator[None]:
        """What was ready before is ready afterwards, be the step refused or not; `given`: what it
        may take."""
        ready = [h for h in self.held if h.is_ready and h not in given]
        try:
            yield
        except (OutOfMemoryError, LayoutError) as error:
            self.refused += 1
            del error
        finally:
            lost = [h for h in ready if not h.is_ready]
            assert not lost, f"{lost[0].tensor} is gone: {fate(lost[0].tensor)}"
            self.held = [h for h in self.held if h.tensor.is_allocated]
            del ready, lost

    def hold(self, tensor: stitch.Tensor, expected: Array, root: int | None = None) -> None:
        self.roots += 1
        self.held.append(Held(tensor, expected, self.roots if root is None else root))
        del self.held[:-MOST_HELD]

    def pick(self, number: int) -> Held | None:
        return self.held[number % len(self.held)] if self.held else None

    def is_shared(self, held: Held) -> bool:
        return bool(held.exports) or sum(h.root == held.root for h in self.held) > 1

    def array(self, shape: tuple[int, ...]) -> Array:
        self.count += 7
        return numbers(shape, self.count)

    # -- steps -----------------------------------------------------------------------------------

    def load(self, number: int) -> None:
        """A program, perhaps again."""
        found = work(self.machine, number % PROGRAMS)
        if found is not None:
            with self.attempt():
                self.loaded.append((found, self.device.load(found.compiled)))
                del self.loaded[:-MOST_LOADED]

    def call(self, which: int, *picks: int) -> None:
        """A program on handles that are held, or on arrays."""
        if not self.loaded:
            self.load(which)
        if not self.loaded:
            return
        what, program = self.loaded[which % len(self.loaded)]
        arguments: list[object] = []
        arrays: list[Array] = []
        given: list[Held] = []
        for i, shape in enumerate(what.inputs):
            able = [h for h in self.held if h.expected.shape == shape and h not in given]
            gives = what.donates and i == 0
            able = [h for h in able if not (gives and self.is_shared(h))]
            pick = picks[i % len(picks)] % (len(able) + 1)
            if pick:
                arguments.append(able[pick - 1].tensor)
                arrays.append(np.array(able[pick - 1].expected))
                if gives:
                    given.append(able[pick - 1])
            else:
                array = self.array(shape)
                arguments.append(array)
                arrays.append(array)
        with self.attempt(*given):
            made = program(*arguments)
            del arguments
            self.held = [h for h in self.held if h not in given]
            results = made if isinstance(made, tuple) else (made,)
            for tensor, expected in zip(results, what.results(arrays), strict=True):
                self.hold(tensor, expected)

    def bring(self, shape: int, borrow: int) -> None:
        """An array becomes a tensor."""
        array, is_lent = self.array(SHAPES[shape % len(SHAPES)]), borrow % 2 == 1
        tensor = self.device.tensor(array, borrow=is_lent)
        self.hold(tensor, array if is_lent else np.array(array))

    def convert(self, number: int, which: int) -> None:
        held = self.pick(number)
        wanted = layouts(ALL_MACHINES[self.machine])
        if held is not None:
            layout = wanted[which % len(wanted)]
            with self.attempt():
                made = held.tensor.to_layout(layout, copy=True)
                self.hold(made, np.array(held.expected))

    def view(self, number: int, start: int, rows: int) -> None:
        held = self.pick(number)
        if held is None:
            return
        length = held.expected.shape[0]
        first = start % (length + 1)
        last = first + rows % (length - first + 1)
        with self.attempt():
            was_pending, expected = held.tensor.is_pending, held.expected[first:last]
            part = held.tensor[first:last]
            if was_pending and (part.is_pending or not _in_one_buffer(part, held.tensor)):
                # It is the result of a task, with bytes of its own.
                self.hold(part, np.array(expected))
            else:
                self.hold(part, expected, held.root)

    def views(self, number: int, count: int) -> None:
        """Many of one block, which go again."""
        held = self.pick(number)
        if held is not None and held.expected.shape[0]:
            with self.attempt():
                many = [held.tensor[i % held.expected.shape[0] :] for i in range(count)]
                self.flush()
                del many

    def drop(self, number: int) -> None:
        held = self.pick(number)
        if held is not None:
            self.held.remove(held)

    def export(self, number: int) -> None:
        """Somebody holds the bytes, by DLPack: they are pinned."""
        held = self.pick(number)
        if held is not None and self.device.computes and held.expected.size:
            with self.attempt():
                try:
                    held.exports.append(np.from_dlpack(held.tensor))
                except (BufferError, RuntimeError):
                    return

    def release(self, number: int) -> None:
        """Nobody else holds the bytes of a handle any more."""
        held = self.pick(number)
        if held is not None:
            held.exports.clear()

    def pin(self, count: int) -> None:
        """Pins at every second granule of what is free in L1."""
        if L1 not in ALL_MACHINES[self.machine].shape.spaces or not self.device.computes:
            return
        with self.attempt():
            granule = TensorDesc((4, 4), Layout(F32, L1))
            made = deque[stitch.Tensor]()
            try:
                made.extend(self.device.empty(granule) for _ in range(2 + 2 * (count % 6)))
            finally:
                for tensor in [*made][::2]:
                    array = self.array((4, 4))
                    self.device.write(tensor, array)
                    self.hold(tensor, array)
                    self.held[-1].exports.append(np.from_dlpack(tensor))
                made.clear()

    def write(self, number: int) -> None:
        held = self.pick(number)
        if held is None or held.tensor.is_pending:
            return
        with self.attempt():
            self.device.flush()
            if held in self.held:
                array = self.array(held.expected.shape)
                self.device.write(held.tensor, array)
                held.expected[...] = array

    def poke(self, number: int) -> None:
        """The bytes in the space themselves are written, where they lie nowhere else."""
        held = self.pick(number)
        if held is None or not self.device.computes:
            return
        with self.attempt():
            self.device.flush()
            if held not in self.held or not held.expected.size:
                return
            layout = held.tensor.layout
            if not layout.is_dense or layout.data_type is not F32 or held.tensor.address is None:
                return
            # Its copies elsewhere are dropped.
            self.device.write(held.tensor, held.expected)
            region = self.device.memory(held.tensor.space)[self.device.footprint_of(held.tensor)]
            array = self.array(held.expected.shape)
            region.view(np.float32)[: array.size] = array.ravel()
            held.expected[...] = array

    def flush(self) -> None:
        with self.attempt():
            self.device.flush()

    def close(self) -> None:
        """All ends: what was exported stays readable, handles say that their device is closed."""
        with self.attempt():
            self.device.flush()
        self.check()
        kept = [(h, [(a, np.array(h.expected)) for a in h.exports]) for h in self.held]
        tensors = [h.tensor for h in self.held]
        self.device.close()
        for held, exports in kept:
            for array, expected in exports:
                np.testing.assert_array_equal(array, expected)
            held.exports.clear()
        for tensor in tensors:
            try:
                tensor.numpy()
            except TaskError:
                continue
            raise AssertionError(f"{tensor} is read though its device is closed")
        self.held.clear()
        self.loaded.clear()

    def step(self, draw: Random) -> None:
        """Some step, drawn."""
        name, takes = draw.choice(STEPS)
        getattr(self, name)(*(draw.randrange(64) for _ in range(takes)))

    # -- what must hold --------------------------------------------------------------------------

    def check(self) -> None:
        """What is ready has its elements; the buffers of a space fill what is not free."""
        for use in self.device.memory_use().values():
            blocks = sorted((*((at, size) for at, size, _ in use.buffers), *use.holes))
            assert sum(size for _, size, _ in use.buffers) == use.used_nbytes
            assert sum(size for _, size in use.holes) == use.free_nbytes
            assert all(a + size <= b for (a, size), (b, _) in itertools.pairwise(blocks))
        for held in self.held:
            if not held.is_ready or not self.device.computes:
                continue
            found = held.tensor.numpy()
            assert found.shape == held.expected.shape
            np.testing.assert_array_equal(found.astype(np.float32), held.expected)
            for array in held.exports:
                np.testing.assert_array_equal(array.astype(np.float32), held.expected)


def fate(tensor: stitch.Tensor) -> str:
    """Whether a tensor is pending, ready, or what became of it."""
    if tensor.is_pending:
        return "pending"
    try:
        tensor.settle()
    except TaskError as error:
        return str(error)
    return "ready"


def _in_one_buffer(part: stitch.Tensor, whole: stitch.Tensor) -> bool:
    """Whether a view has the bytes of its tensor."""
    if part.address is None or whole.address is None:
        return bool(np.shares_memory(np.from_dlpack(part), np.from_dlpack(whole)))
    inner, outer = (part.device.footprint_of(tensor) for tensor in (part, whole))
    return part.space is whole.space and bool(outer.start <= inner.start < outer.stop)


#: What `World.step` draws from, the more often the more often it stands here: name, whole numbers.
STEPS = (
    *[("call", 4)] * 6, *[("convert", 2)] * 2, *[("view", 3)] * 2, ("load", 1), ("bring", 2),
    ("views", 2), ("drop", 1), ("export", 1), ("release", 1), ("pin", 1), ("write", 1),
    ("poke", 1), ("flush", 0),
)  # fmt: skip
