"""A device under random use through the public API, and the NumPy model of it.

Each handle that is held has its expected array. Steps take whole numbers, and do nothing where
nothing fits, so that any subsequence of a script is a script.
"""

from __future__ import annotations

import copy
import gc
import re
from collections import deque
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import pairwise
from random import Random
from typing import Any

import numpy as np

import stitch
from stitch.errors import LayoutError, OutOfMemoryError, StitchError, TaskError
from stitch.machine import Machine
from stitch.program import Array, Layout, TensorDesc
from tests.support.random_work import (
    ALL_MACHINES,
    F32,
    HOST,
    L1,
    PROGRAMS,
    SHAPES,
    Work,
    layouts,
    mirrored,
    numbers,
    work,
)

#: The most handles that are held, and programs, pipelines and graphs that are loaded.
MOST_HELD, MOST_LOADED = 10, 4
#: Later results beyond which some results are held.
MANY_LATER = 2_100


class Planted(Exception):
    """What host functions and hooks raise."""


@dataclass(eq=False)
class Held:
    """A handle, the elements that it must have, and which handles share its bytes."""

    tensor: stitch.Tensor
    expected: Array
    root: int
    exports: list[Array] = field(default_factory=list)

    @property
    def is_ready(self) -> bool:
        return self.tensor.is_allocated and not self.tensor.is_pending


@dataclass(frozen=True, eq=False)
class Chain:
    """Something that one call runs, and what it computes from the arrays of its inputs."""

    run: Callable[..., Any]
    inputs: tuple[tuple[int, ...], ...]
    results: Callable[[Sequence[Array]], list[Array]]
    #: The positions of inputs that a run takes over.
    takes: frozenset[int] = frozenset()


class World:
    """One device, its programs, its handles. Steps raise `AssertionError` where a promise breaks;
    a refusal for want of room or for a clash of addresses is none, and is counted.

    Attributes:
        may_fail: Whether work may fail because of hooks or threads that fail.
        is_alone: Whether no other world uses the device.
        passes: Calls of programs, pipelines, graphs and training steps so far.
    """

    def __init__(
        self, machine: int, *, window: int = 8, executor: str = "numpy", debug: bool = False,
        inter_op_threads: int = 1, device: stitch.Device | None = None, may_fail: bool = False,
    ) -> None:  # fmt: skip
        self.machine, self.may_fail, self.is_alone = machine, may_fail, device is None
        self.held: list[Held] = []
        self.loaded: list[tuple[Work, stitch.LoadedProgram]] = []
        self.chains: list[Chain] = []
        self.observers: list[Callable[[], object]] = []
        self.training: Training | None = None
        self.roots = self.refused = self.count = self.passes = 0
        #: Program runs until a hook raises, and what.
        self.fuse: int | None = None
        self.error: type[BaseException] = Planted
        more: dict[str, Any] = {}
        if inter_op_threads > 1:
            more["inter_op_threads"] = inter_op_threads
        self.device = device or stitch.open_device(
            ALL_MACHINES[machine], window=window, executor=executor, debug=debug, **more
        )
        if may_fail:
            self.observers.append(self.device.hooks.register(before_program=self.burn))

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

    def hold_all(self, made: Any, arrays: Sequence[Array]) -> None:
        results = made if isinstance(made, tuple) else (made,)
        for tensor, expected in zip(results, arrays, strict=True):
            self.hold(tensor, expected)

    def pick(self, number: int) -> Held | None:
        return self.held[number % len(self.held)] if self.held else None

    def is_shared(self, held: Held) -> bool:
        return bool(held.exports) or sum(h.root == held.root for h in self.held) > 1

    def array(self, shape: tuple[int, ...]) -> Array:
        self.count += 7
        return numbers(shape, self.count)

    def arguments(
        self, shapes: Sequence[tuple[int, ...]], takes: Container[int], picks: Sequence[int]
    ) -> tuple[list[Any], list[Array], list[Held]]:
        """Arguments of some shapes, handles that are held or arrays; their elements; those handles
        that are taken over, whose positions are `takes`."""
        arguments: list[Any] = []
        arrays: list[Array] = []
        given: list[Held] = []
        # Those that are taken first, so that they are passed once.
        for i, shape in sorted(enumerate(shapes), key=lambda pair: pair[0] not in takes):
            able = [h for h in self.held if h.expected.shape == shape and h not in given
                    and not (i in takes and self.is_shared(h))]  # fmt: skip
            pick = picks[i % len(picks)] % (len(able) + 1)
            if pick:
                arguments.append(able[pick - 1].tensor)
                arrays.append(np.array(able[pick - 1].expected))
                given += able[pick - 1 : pick] if i in takes else []
            else:
                arguments.append(self.array(shape))
                arrays.append(arguments[-1])
        order = sorted(range(len(shapes)), key=lambda i: i not in takes)
        return ([arguments[order.index(i)] for i in range(len(shapes))],
                [arrays[order.index(i)] for i in range(len(shapes))], given)  # fmt: skip

    def single(self, which: int, *, donates: bool) -> tuple[Work, stitch.LoadedProgram] | None:
        """A loaded program of one input and one output."""
        able = [(w, p) for w, p in self.loaded
                if w.donates is donates and len(w.inputs) == len(w.reads) == 1]  # fmt: skip
        return able[which % len(able)] if able else None

    def burn(self, context: object) -> None:
        """Called before each program when failures are planted."""
        if self.fuse is not None:
            self.fuse -= 1
            if self.fuse < 0:
                self.fuse = None
                raise self.error("planted")

    def take(self, name: str, numbers: Sequence[int]) -> None:
        """Take a step of a script and check what must hold afterwards."""
        try:
            getattr(self, name)(*numbers)
        except (OutOfMemoryError, LayoutError):
            self.refused += 1
        except (Planted, KeyboardInterrupt, StitchError) as error:
            # Queued work of this world or of another thread that failed, or that had no room.
            if re.search("OutOfMemoryError|LayoutError", str(error)):
                self.refused += 1
            elif not self.may_fail or self.device.is_closed:
                raise
        self.check()

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
        takes = {0} if what.donates else {*()}
        arguments, arrays, given = self.arguments(what.inputs, takes, picks)
        with self.attempt(*given):
            self.passes += 1
            made = program(*arguments)
            del arguments
            self.held = [h for h in self.held if h not in given]
            self.hold_all(made, what.results(arrays))

    def submit(self, which: int, pick: int) -> None:
        """A program by `stitch.submit`, which frees what is not retained."""
        found = self.single(which, donates=False)
        if found is None:
            return
        what, program = found
        given = [h for h in self.held
                 if h.expected.shape == what.inputs[0] and not self.is_shared(h)]  # fmt: skip
        given = given[pick % (len(given) + 1) :][:1]
        x = given[0].tensor if given else self.array(what.inputs[0])
        results = what.results([np.array(given[0].expected if given else x)])
        with self.attempt(*given):
            self.passes += 1
            made = stitch.submit(self.device, program, 0, [x])
            if isinstance(x, stitch.Tensor) and not x.retain:
                must_fail(x.numpy, self.freed)
            self.held = [h for h in self.held if h.tensor.is_allocated]
            self.hold_all(made, results)

    def bring(self, shape: int, borrow: int) -> None:
        """An array becomes a tensor."""
        array, is_lent = self.array(SHAPES[shape % len(SHAPES)]), borrow % 2 == 1
        tensor = self.device.tensor(array, borrow=is_lent)
        self.hold(tensor, array if is_lent else np.array(array))

    def convert(self, number: int, which: int) -> None:
        held = self.pick(number)
        wanted = layouts(ALL_MACHINES[self.machine])
        if held is not None:
            with self.attempt():
                made = held.tensor.to_layout(wanted[which % len(wanted)])
                if made is held.tensor:
                    self.hold(made, held.expected, held.root)
                else:
                    self.hold(made, np.array(held.expected))

    def view(self, number: int, start: int, rows: int) -> None:
        """A view; of a pending tensor it may have bytes of its own."""
        held = self.pick(number)
        if held is None:
            return
        length = held.expected.shape[0]
        first = start % (length + 1)
        last = first + rows % (length - first + 1)
        with self.attempt():
            part = held.tensor[first:last]
            self.hold(part, held.expected[first:last], held.root)

    def views(self, number: int, count: int) -> None:
        """Many of one block, which go again."""
        held = self.pick(number)
        if held is not None and held.expected.shape[0]:
            with self.attempt():
                many = [held.tensor[i % held.expected.shape[0] :] for i in range(count % 64)]
                self.flush()
                del many

    def look(self, number: int) -> None:
        """A handle is read."""
        held = self.pick(number)
        if held is not None and self.device.computes:
            with self.attempt():
                self.read(held.tensor, held.expected)

    def read(self, tensor: stitch.Tensor, expected: Array) -> None:
        np.testing.assert_array_equal(tensor.numpy().astype(np.float32), expected)

    def drop(self, number: int) -> None:
        held = self.pick(number)
        if held is not None:
            self.held.remove(held)

    def duplicate(self, number: int) -> None:
        held = self.pick(number)
        if held is not None:
            self.hold(copy.copy(held.tensor), held.expected, held.root)

    def deallocate(self, number: int) -> None:
        held = self.pick(number)
        if held is not None and not self.is_shared(held):
            self.held.remove(held)
            held.tensor.deallocate()
            must_fail(held.tensor.numpy, self.freed)

    def retain(self, number: int) -> None:
        held = self.pick(number)
        if held is not None:
            held.tensor.retain = not held.tensor.retain

    def export(self, number: int) -> None:
        """The bytes are shared by DLPack, which pins them."""
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

    def poke(self, number: int) -> None:
        """The bytes in the space themselves are written."""
        self.write(number, pokes=self.is_alone and self.device.computes)

    def write(self, number: int, *, pokes: bool = False) -> None:
        """The elements of a handle that shares no bytes are written."""
        held = self.pick(number)
        if held is None or sum(h.root == held.root for h in self.held) > 1:
            return
        with self.attempt():
            self.flush()
            if held not in self.held:
                return
            array = self.array(held.expected.shape)
            self.device.write(held.tensor, array)
            held.expected[...] = array
            layout = held.tensor.layout
            is_plain = layout.data_type is F32 and layout.tile_shape == (1, 1)
            if pokes and is_plain and array.size and held.tensor.address is not None:
                # `write` leaves no other copy, so these bytes are the elements.
                region = self.device.memory(held.tensor.space)
                region = region[self.device.footprint_of(held.tensor)].view(np.float32)
                if np.array_equal(region[: array.size], array.ravel()):
                    array = self.array(held.expected.shape)
                    region[: array.size] = array.ravel()
                    held.expected[...] = array

    def chain(self, which: int, count: int, times: int, keep: int) -> None:
        """A pipeline of loaded programs that fit, called several times."""
        found = self.single(which, donates=False)
        if found is None:
            return
        fitting = [(w, p) for w, p in self.loaded if w.inputs == found[0].inputs
                   and len(w.reads) == 1 and not w.donates]  # fmt: skip
        stages = [fitting[(which + i) % len(fitting)] for i in range(1 + count % 4)]

        def results(arrays: Sequence[Array]) -> list[Array]:
            for what, _ in stages:
                arrays = what.results(arrays)
            return [*arrays]

        pipeline = stitch.Pipeline([program for _, program in stages])
        self._add(Chain(pipeline, found[0].inputs, results), times, keep)

    def graph(self, seed: int, tasks: int, times: int, keep: int) -> None:
        """A random task graph, prepared and called several times."""
        nodes = Nodes(Random(seed), self.loaded, 1 + tasks % 6)
        if nodes.outputs:
            prepared = self.device.prepare(nodes.graph)
            self._add(Chain(prepared, nodes.inputs, nodes.results, nodes.takes), times, keep)

    def _add(self, chain: Chain, times: int, keep: int) -> None:
        self.chains.append(chain)
        del self.chains[:-MOST_LOADED]
        self._run(chain, 1 + times % 3, keep)

    def again(self, which: int, times: int, keep: int) -> None:
        """Earlier pipelines and graphs several times, so that the steady state is reached."""
        if self.chains:
            self._run(self.chains[which % len(self.chains)], 4 + times % 8, keep)

    def _run(self, chain: Chain, times: int, keep: int) -> None:
        """Calls, of which some results are read at once, and some are held: a ring of them."""
        for _ in range(times):
            arguments, arrays, given = self.arguments(chain.inputs, chain.takes, [keep // 3])
            with self.attempt(*given):
                self.passes += 1
                made = chain.run(*arguments)
                del arguments
                self.held = [h for h in self.held if h not in given]
                expected = chain.results(arrays)
                if keep % 2:
                    first = made[0] if isinstance(made, tuple) else made
                    self.read(first, expected[0])
                if keep % 3:
                    self.hold_all(made, expected)
                del made
            if len(self.held) > keep % 5:
                del self.held[keep % len(self.held)]

    def hold_long(self, which: int) -> None:
        """A result is held beyond many later ones."""
        found = self.single(which, donates=False)
        if found is None or not self.device.computes:
            return
        what, program = found
        x = self.array(what.inputs[0])
        (expected,) = what.results([x])
        with self.attempt():
            first = program(x)
            for _ in range(MANY_LATER):
                program(x)
            self.passes += 1 + MANY_LATER
            self.hold(first, expected)
            self.read(first, expected)

    def feed_back(self, which: int, times: int, looks: int, how: int) -> None:
        """A state that a program, a pipeline or a host function overwrites, read or not, with
        handles left behind."""
        self.load(which | 3)
        found = self.single(which, donates=True)
        if found is None or not self.device.computes:
            return
        what, program = found
        run: Callable[..., Any] = (program, stitch.Pipeline([program]), program)[how % 3]
        update = bump(what.inputs[0])
        expected = self.array(what.inputs[0])
        with self.attempt():
            value = run(expected)
            for turn in range(times % 8):
                self.passes += 1
                (expected,) = what.results([expected])
                if looks % 2:
                    self.read(value, expected)
                before = value
                if how % 3 == 2 and turn % 2:
                    value = self.device.call(update, before)
                    self.must_be_given(partial(self.read, before, expected), value)
                    expected = mirrored(expected, 1)
                    before = value
                value = run(before)
                self.must_be_given(partial(self.read, before, expected), value)
            (expected,) = what.results([expected])
            self.hold(value, expected)
            del value

    @property
    def freed(self) -> str:
        """What is said of a value that was freed; it may not have been made, if work may fail."""
        return "freed" + ("|failed|cancelled|never made" if self.may_fail else "")

    @property
    def given_away(self) -> str:
        """What is said of a value that was overwritten."""
        return "donated|" + self.freed

    def must_be_given(self, use: Callable[[], object], made: stitch.Tensor) -> None:
        """`use` of what a task took for `made` is refused; but after a failure of another thread,
        which cancels the task, it is usable again."""
        if not is_refused(use, self.given_away):
            assert not self.is_alone, "no error was raised"
            must_fail(made.numpy, "never made|failed|cancelled")

    def donate_twice(self, which: int, pick: int) -> None:
        """One tensor for two inputs of which one is donated, or for two calls."""
        able = [(w, p) for w, p in self.loaded if w.donates]
        if not able:
            return
        what, program = able[which % len(able)]
        rest = [self.array(shape) for shape in what.inputs[1:]]
        with self.attempt():
            array = self.array(what.inputs[0])
            tensor = self.device.tensor(array)
            same = [i for i, shape in enumerate(what.inputs[1:]) if shape == array.shape]
            if same and pick % 2:
                both: list[Any] = [*rest]
                both[same[0]] = tensor
                must_fail(lambda: program(tensor, *both), "twice")
                self.read(tensor, array)
            self.passes += 1
            made = program(tensor, *rest)
            first = made[0] if isinstance(made, tuple) else made
            self.must_be_given(lambda: program(tensor, *rest), first)
            self.hold_all(made, what.results([array, *rest]))

    def host(self, number: int, how: int) -> None:
        """A host function on a handle, or on an array."""
        held = self.pick(number)
        if held is None or HOST not in ALL_MACHINES[self.machine].shape.spaces:
            return
        with self.attempt(*([] if how % 3 else [held])):
            self.passes += 1
            if how % 3:
                given = held.tensor if how % 3 == 1 else np.array(held.expected)
                made = self.device.call(turn(held.expected.shape), given)
                self.hold(made, mirrored(held.expected, 0))
            elif not self.is_shared(held):
                self.held.remove(held)
                made = self.device.call(bump(held.expected.shape), held.tensor)
                self.hold(made, mirrored(held.expected, 1))

    def fail(self, number: int, which: int) -> None:
        """A host function that raises: what depends on it says so, the rest is computed."""
        held = self.pick(number)
        if held is None or not self.device.computes:
            return
        made: list[stitch.Tensor] = []
        self.flush()
        before = self.refused
        beside = self.single(which, donates=False)
        with self.attempt():
            try:
                made.append(self.device.call(raising(held.expected.shape), held.tensor))
                made.append(self.device.call(turn(held.expected.shape), made[0]))
                if beside is not None:
                    arguments, arrays, _ = self.arguments(beside[0].inputs, (), [which])
                    self.hold_all(beside[1](*arguments), beside[0].results(arrays))
                self.device.wait()
                assert self.may_fail or self.refused > before, "no error was raised"
            except Planted:
                pass
        for tensor in made:
            must_fail(tensor.numpy, "never made|failed|cancelled")

    def hog(self, times: int) -> None:
        """More than there is: refused, and nothing is lost."""
        space = (L1, HOST)[times % 2]
        if space not in ALL_MACHINES[self.machine].shape.spaces:
            return
        use = self.device.memory_use()[space]
        rows = (use.used_nbytes + use.free_nbytes) // 4
        try:
            self.device.empty(TensorDesc((rows, 1024), Layout(F32, space)))
        except OutOfMemoryError:
            return
        raise AssertionError("a tensor larger than its space was allocated")

    def plant(self, runs: int) -> None:
        """The next run of a program but so many fails, where failures are planted."""
        if self.may_fail:
            self.fuse = runs % 4
            self.error = (Planted, KeyboardInterrupt)[runs // 4 % 2]

    def watch(self, how: int) -> None:
        """A listener or a hook comes; the oldest goes."""
        hooks, events = self.device.hooks, self.device.events
        come: tuple[Callable[[], Callable[[], object]], ...] = (
            lambda: events.subscribe(lambda event: None),
            lambda: hooks.register(before_program=lambda context: None),
            lambda: hooks.register(after_operation=lambda context: None),
        )
        if how % 4 < 3:
            self.observers.append(come[how % 4]())
        if len(self.observers) > 1 + self.may_fail:
            self.observers.pop(int(self.may_fail))()

    def train(self, steps: int, looks: int) -> None:
        """Steps of a training whose numbers are exact."""
        if not self.device.computes:
            return
        with self.attempt():
            if self.training is None:
                self.training = Training(self.device, ALL_MACHINES[self.machine])
            for _ in range(1 + steps % 4):
                self.passes += 1
                self.count += 7
                try:
                    self.training.step(self.count, reads_loss=bool(looks % 2))
                except (Planted, KeyboardInterrupt, StitchError):
                    # What a failed step has done of its gradients is not modelled.
                    self.training.close()
                    self.training = None
                    raise
            if looks % 3 == 0:
                self.training.check()

    def forget(self) -> None:
        """The device drops its plans."""
        with self.attempt():
            self.device.make_room()

    def collect(self, generation: int) -> None:
        gc.collect(generation % 2)

    def flush(self) -> None:
        with self.attempt():
            self.device.wait()

    def end(self) -> None:
        """Drop all: nothing is left of what was held."""
        self.fuse = None
        for forget in self.observers:
            forget()
        if self.training is not None:
            self.training.close()
            self.training = None
        self.held.clear()
        self.chains.clear()
        self.loaded.clear()
        self.observers.clear()

    def close(self) -> None:
        """All ends: what was exported stays readable, handles say that their device is closed."""
        self.flush()
        self.check()
        kept = [(h, [(a, np.array(h.expected)) for a in h.exports]) for h in self.held]
        tensors = [h.tensor for h in self.held]
        self.device.close()
        for held, exports in kept:
            for array, expected in exports:
                np.testing.assert_array_equal(array, expected)
            held.exports.clear()
        for tensor in tensors:
            must_fail(tensor.numpy, "closed")
        self.held.clear()
        self.loaded.clear()

    def step(self, draw: Random) -> None:
        """A step of `USES`, drawn."""
        name, takes = draw.choice(USES)
        getattr(self, name)(*(draw.randrange(64) for _ in range(takes)))

    # -- what must hold --------------------------------------------------------------------------

    def check(self) -> None:
        """What is ready has its elements, and the parts of each space add up."""
        self.held = [h for h in self.held if h.tensor.is_allocated]
        if self.is_alone:
            check_spaces(self.device)
        for held in self.held:
            if held.is_ready and self.device.computes:
                self.read(held.tensor, held.expected)
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


def must_fail(call: Callable[[], object], says: str) -> None:
    """Call what must raise a `TaskError` with such a text."""
    assert is_refused(call, says), f"no error was raised that says {says!r}"


def is_refused(call: Callable[[], object], says: str) -> bool:
    """Whether a call raises a `TaskError`, which must have such a text."""
    try:
        call()
    except TaskError as error:
        assert re.search(says, str(error)), str(error)
        return True
    return False


def check_spaces(device: stitch.Device) -> None:
    """Buffers and holes of each space are disjoint and add up to the whole."""
    for space, use in device.memory_use().items():
        blocks = [(address, size) for address, size, _ in use.buffers if size]
        assert sum(size for _, size in blocks) == use.used_nbytes, space
        assert sum(size for _, size in use.holes) == use.free_nbytes, space
        assert max((size for _, size in use.holes), default=0) == use.largest_hole, space
        blocks = sorted([*blocks, *use.holes])
        for (start, size), (after, _) in pairwise(blocks):
            assert start + size <= after, f"blocks of {space.value} overlap at {after:#x}"


@cache
def turn(shape: tuple[int, ...]) -> Any:
    """The host function of `mirrored(x, 0)`."""

    @stitch.task(returns=TensorDesc(shape, Layout(F32, HOST)))
    def turned(x: Array) -> Array:
        return mirrored(x, 0)

    return turned


@cache
def bump(shape: tuple[int, ...]) -> Any:
    """The host function of `mirrored(x, 1)` over x."""

    @stitch.task(updates="x")
    def bumped(x: Array) -> None:
        x[...] = mirrored(x, 1)

    return bumped


@cache
def raising(shape: tuple[int, ...]) -> Any:
    """A host function that raises."""

    @stitch.task(returns=TensorDesc(shape, Layout(F32, HOST)))
    def raised(x: Array) -> Array:
        raise Planted("planted")

    return raised


Rule = Callable[[Sequence[Array]], list[Array]]


class Nodes:
    """A random task graph of loaded programs, copies and host functions, and what it computes."""

    def __init__(
        self, draw: Random, loaded: Sequence[tuple[Work, stitch.LoadedProgram]], tasks: int
    ) -> None:
        self.graph = stitch.TaskGraph()
        self.futures: list[Any] = []
        self.shapes: list[tuple[int, ...]] = []
        #: Of each value: its rule (None for an input), which result it is, what the rule reads.
        self.origins: list[tuple[Rule | None, int, list[int]]] = []
        #: The numbers of values that nothing has taken.
        self.alive: list[int] = []
        for _ in range(tasks):
            kind = draw.randrange(6)
            if loaded and kind < 4:
                what, program = draw.choice(loaded)
                read = [self._some(draw, shape) for shape in what.inputs]
                if what.donates and read[0] not in read[1:]:
                    self.alive.remove(read[0])
                elif what.donates:
                    continue
                made = self.graph.call(program, *[self.futures[number] for number in read])
                self._add(made, [what.inputs[i] for i in what.reads], what.results, read)
            elif self.alive:
                number = draw.choice(self.alive)
                future, shape = self.futures[number], self.shapes[number]
                if kind == 4:
                    made = self.graph.copy(future, Layout(F32, HOST))
                    self._add(made, [shape], lambda arrays: [arrays[0]], [number])
                else:
                    made = self.graph.host(turn(shape), future)
                    self._add(made, [shape], lambda arrays: [mirrored(arrays[0], 0)], [number])
        sources = [n for n, (rule, *_) in enumerate(self.origins) if rule is None]
        #: The positions of inputs that programs overwrite.
        self.takes = frozenset(i for i, n in enumerate(sources) if n not in self.alive)
        read_at_all = {number for _, _, read in self.origins for number in read}
        for number in sources:
            if number not in read_at_all:
                made = self.graph.copy(self.futures[number], Layout(F32, HOST))
                self._add(made, [self.shapes[number]], lambda arrays: [arrays[0]], [number])
        able = [number for number in self.alive if self.origins[number][0] is not None]
        self.outputs = draw.sample(able, min(len(able), 1 + draw.randrange(2)))
        for number in self.outputs:
            self.graph.output(self.futures[number])

    @property
    def inputs(self) -> tuple[tuple[int, ...], ...]:
        """The shapes of the inputs."""
        return tuple(
            shape for shape, (rule, *_) in zip(self.shapes, self.origins, strict=True)
            if rule is None
        )  # fmt: skip

    def results(self, arrays: Sequence[Array]) -> list[Array]:
        """What the graph computes, by plain NumPy."""
        given, values = iter(arrays), list[Array]()
        for rule, index, read in self.origins:
            values.append(next(given) if rule is None else rule([values[n] for n in read])[index])
        return [np.array(values[number]) for number in self.outputs]

    def _some(self, draw: Random, shape: tuple[int, ...]) -> int:
        """A value of a shape, perhaps a new input."""
        able = [number for number in self.alive if self.shapes[number] == shape]
        if not able or draw.randrange(4) == 0:
            made = self.graph.input(TensorDesc(shape, Layout(F32, HOST)))
            self._add(made, [shape], None, [])
            able = self.alive[-1:]
        return draw.choice(able)

    def _add(self, made: Any, shapes: list[Any], rule: Rule | None, read: list[int]) -> None:
        results = made if isinstance(made, tuple) else (made,)
        for index, (future, shape) in enumerate(zip(results, shapes, strict=True)):
            self.alive.append(len(self.futures))
            self.futures.append(future)
            self.shapes.append(shape)
            self.origins.append((rule, index, read))


class Training:
    """A training of `y = x w + b`. With small whole numbers, the mean of absolute differences of
    16 rows and a rate of 1/4 each number is exact, in every order of sums."""

    ROWS, WIDTH, RATE = 16, 4, 0.25

    def __init__(self, device: stitch.Device, machine: Machine) -> None:
        self.w = numbers((self.WIDTH, 1), 3) % 5
        self.b = np.zeros(1, np.float32)
        builder = stitch.ComputationGraphBuilder("line")
        x = builder.input("x", (self.ROWS, self.WIDTH), "float32")
        w, b = builder.parameter("w", self.w), builder.parameter("b", self.b)
        builder.output("y", builder.op("Gemm", x, w, b))
        self.loss = stitch.losses.L1Loss()
        self.optimizer = stitch.SGD(lr=self.RATE)
        self.model = stitch.compile(
            builder.build(), target=machine, optimizer=self.optimizer, loss=self.loss
        )
        self.instance = self.model.start(device=device)

    def batch(self, start: int) -> tuple[Array, Array]:
        """Inputs and labels of a step."""
        return numbers((self.ROWS, self.WIDTH), start) % 4, numbers((self.ROWS, 1), start) % 8

    def after(self, start: int) -> tuple[Array, Array, np.float32]:
        """Weights after a step, and its loss, by plain NumPy."""
        x, y = self.batch(start)
        difference = x @ self.w + self.b - y
        slope = np.sign(difference) / np.float32(self.ROWS)
        rate = np.float32(self.RATE)
        return (
            self.w - rate * (x.T @ slope),
            self.b - rate * slope.sum(0),
            np.abs(difference).mean(),
        )

    def step(self, start: int, *, reads_loss: bool = True) -> None:
        """Train on a batch."""
        x, y = self.batch(start)
        w, b, expected = self.after(start)
        loss = self.loss(self.model(x), y)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.w, self.b = w, b
        if reads_loss:
            assert loss.item() == expected

    def weights(self) -> list[Array]:
        """The weights on the device."""
        return [self.instance.get_tensor(name) for name in "wb"]

    def check(self) -> None:
        for found, expected in zip(self.weights(), (self.w, self.b), strict=True):
            np.testing.assert_array_equal(found, expected)

    def close(self) -> None:
        self.instance.close()


#: What `World.step` draws from, the more often the more often it stands here: name, whole numbers.
USES = (
    *[("call", 4)] * 6, *[("convert", 2)] * 2, *[("view", 3)] * 2, ("load", 1), ("bring", 2),
    ("views", 2), ("drop", 1), ("export", 1), ("release", 1), ("pin", 1), ("write", 1),
    ("poke", 1), ("flush", 0),
)  # fmt: skip
#: What scripts draw from: these, and more, which repeat work, feed results back, and fail.
STEPS = (
    *USES, *[("chain", 4)] * 3, *[("graph", 4)] * 3, *[("again", 3)] * 4, *[("feed_back", 4)] * 2,
    *[("drop", 1)] * 3, ("duplicate", 1), ("deallocate", 1), ("retain", 1), ("collect", 1),
    ("look", 1), ("submit", 2), ("donate_twice", 2), ("host", 2), ("host", 2), ("fail", 2),
    ("hog", 1), ("watch", 1), ("plant", 1), ("train", 2),
)  # fmt: skip
