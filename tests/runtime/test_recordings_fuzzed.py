"""Recordings and leases under random use: what plain NumPy says, nothing held ever changes.

A drill draws steps that users do on one device: calls, pipelines, conversions, views, copies of
handles, exports, writes, frees, failures and interrupts, watched or not. The model is a list of the
handles that are held, each with the array that it must have.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import pytest

import stitch
from stitch.errors import StitchError
from stitch.graph import ComputationGraphBuilder
from stitch.machine import Machine, Policy, load_machine
from stitch.program import Array, DataType, Layout, Space, TensorDesc
from stitch.report import ChromeTrace, Recorder
from stitch.runtime import RuntimeDevice
from stitch.runtime.recording import recording, recording_maker, recordings
from stitch.runtime.values import Status
from tests.support.grids import every, in_turn
from tests.support.stitched_models import binary_op, consuming, held_by, model, tiny

F32 = DataType.FLOAT32
SHAPE = (4, 64)
MACHINES = ("tiny", "small", "host", "wormhole_n150")
#: Machines whose tensors are smaller than a granule, or which place them as devices do.
GRANULES = {
    "coarse": (512, Policy.BEST_FIT, Policy.BEST_FIT),
    "first_fit": (64, Policy.FIRST_FIT, Policy.FIRST_FIT_UPWARDS),
}
IN_L1 = ("input.x.space=l1", "output.y.space=l1")


class Planted(Exception):
    """What a hook raises."""


@dataclass(frozen=True, eq=False)
class Kind:
    """A program and what it computes; `donates`: its first input is given away."""

    compiled: stitch.CompiledModel
    rule: Callable[..., tuple[Array, ...]]
    takes: int = 1
    donates: bool = False
    remembered: bool = False


@dataclass(eq=False)
class Held:
    """A handle and the elements that it must have."""

    tensor: stitch.Tensor
    expected: Array
    #: Handles with one number lie in the same bytes.
    bytes_of: int
    is_view: bool = False
    #: Arrays over its bytes, exported.
    exports: tuple[Array, ...] = ()


@cache
def machine_of(name: str) -> Machine:
    if name in GRANULES:
        granule, policy, upwards = GRANULES[name]
        machine = tiny(l1_nbytes=8192, name=name)
        l1, dram = machine.shape.l1, machine.shape.dram
        assert l1 is not None and dram is not None
        shape = replace(
            machine.shape,
            l1=replace(l1, granule=granule, policy=policy),
            dram=replace(dram, granule=2 * granule, policy=upwards),
        )
        return replace(machine, shape=shape)
    return tiny(l1_nbytes=4096, name="small") if name == "small" else load_machine(name)


def halved(a: float, b: float) -> Callable[..., tuple[Array, ...]]:
    return lambda x: (x * np.float32(a) + np.float32(b),)


@cache
def kinds(name: str) -> tuple[Kind, ...]:
    """Small programs; every one keeps bounded elements bounded."""
    machine = machine_of(name)
    shape = machine.shape
    base = shape.l1.base if shape.l1 is not None else 0
    spread: list[tuple[str, tuple[str, ...]]] = [("", ())]
    if shape.l1 is not None:
        spread += [
            ("l1", IN_L1),
            ("dram", ("input.x.space=dram", "output.y.space=dram")),
            ("across", ("input.x.space=dram", "input.x.layout=tile", "output.y.space=l1")),
            ("fixed_in", (*IN_L1, f"input.x.address={base + 0x200:#x}")),
            ("fixed_out", (*IN_L1, f"output.y.address={base + 0x600:#x}")),
        ]
    made = []
    for number, (word, placement) in enumerate(spread):
        a, b = 0.5, number + 1.0
        made.append(Kind(_affine(f"affine_{word}", a, b, machine, placement), halved(a, b)))
    kinds_of_input = (stitch.program.InputKind.ACTIVATION, stitch.program.InputKind.PARAMETER)
    for kind in kinds_of_input:
        compiled = binary_op(f"mean_{kind.value}", "Min", SHAPE, target=machine, kind=kind)
        made.append(Kind(compiled, lambda x, w: (np.minimum(x, w),), 2))

    def two(b: ComputationGraphBuilder) -> None:
        x = b.input("x", SHAPE, "float32")
        b.output("y", x * 0.5)
        b.output("z", x * -0.5 + 3)

    made.append(Kind(model("two", two, target=machine),
                     lambda x: (*halved(0.5, 0)(x), *halved(-0.5, 3)(x))))  # fmt: skip

    def turned(b: ComputationGraphBuilder) -> None:
        x = b.input("x", SHAPE, "float32")
        h = b.matmul(x, b.constant(np.roll(np.eye(SHAPE[1], dtype=np.float32), 3, 1)))
        b.output("y", b.matmul(h, b.constant(np.roll(np.eye(SHAPE[1], dtype=np.float32), 2, 1))))

    made.append(Kind(model("turned", turned, target=machine), lambda x: (np.roll(x, 5, 1),)))
    eaten = ("input.x.space=l1",) if shape.l1 is not None else ()
    made.append(Kind(consuming("eat", -0.5, SHAPE, target=machine, placement=eaten),
                     lambda x: (x * np.float32(-0.5),), donates=True))  # fmt: skip

    def weights(b: ComputationGraphBuilder) -> None:
        w = b.input("w", SHAPE, "float32", stitch.program.InputKind.PARAMETER)
        b.output("y", w * -0.5)

    made.append(Kind(model("weights", weights, target=machine),
                     lambda x: (x * np.float32(-0.5),), remembered=True))  # fmt: skip
    return tuple(made)


def _affine(name: str, a: float, b: float, machine: Machine, placement: Sequence[str]
            ) -> stitch.CompiledModel:  # fmt: skip
    def build(builder: ComputationGraphBuilder) -> None:
        builder.output("y", builder.input("x", SHAPE, "float32") * a + b)

    return model(name, build, target=machine, placement=placement)


def tuple_of(result: Any) -> tuple[stitch.Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


class Drill:
    """One device, its programs, and the model of what is held."""

    #: What is said of a value that was overwritten.
    given_away = "donated to 'eat"

    def __init__(self, device: RuntimeDevice, name: str, seed: int, fails: bool) -> None:
        self.device, self.choice, self.fails = device, random.Random(seed), fails
        self.kinds = kinds(name)
        self.loaded = [device.load(k.compiled) for k in self.kinds]
        self.held: list[Held] = []
        self.pipelines: list[tuple[stitch.Pipeline, list[int]]] = []
        self.numbers = self.refused = 0
        #: Program runs until a hook raises.
        self.fuse: int | None = None
        self.error: type[BaseException] = Planted
        self.seen: list[Array] = []
        self.steps = (
            (8, self.call), (5, self.chain), (8, self.pipe), (4, self.again), (5, self.drop),
            (2, self.duplicate), (2, self.view), (2, self.export), (2, self.write),
            (2, self.convert), (1, self.deallocate), (1, self.retain), (2, self.flush),
            (1, self.reload), (1, self.make), (1, self.collect), (1, self.account),
            (1, self.let_exports_go), (1, self.room), (3, self.pairs), (2, self.remember),
            (4, self.feed_back),
        )  # fmt: skip

    # -- the model -------------------------------------------------------------------------------

    def array(self) -> Array:
        start = self.choice.randrange(50)
        made = (np.arange(start, start + 256) % 61).reshape(SHAPE).astype(np.float32) - 20
        made.flags.writeable = self.choice.random() < 0.5
        return made

    def hold(self, tensor: stitch.Tensor, expected: Array) -> Held:
        self.numbers += 1
        held = Held(tensor, expected, self.numbers)
        self.held.append(held)
        return held

    def pick(self, whole: bool = True) -> Held | None:
        found = [h for h in self.held if not (whole and h.is_view)]
        return self.choice.choice(found) if found else None

    def argument(self, kind: Kind, first: bool) -> tuple[Any, Array, Held | None]:
        """An array, a new tensor or a held one."""
        held = self.pick()
        giving = kind.donates and first
        if held is not None and self.choice.random() < 0.6 and not (giving and self.shared(held)):
            return held.tensor, held.expected, held
        array = self.array()
        if self.choice.random() < 0.3:
            return self.device.tensor(array, borrow=not giving), array, None
        return array, array, None

    def shared(self, held: Held) -> bool:
        return bool(held.exports) or sum(h.bytes_of == held.bytes_of for h in self.held) > 1

    def check(self) -> None:
        """Nothing that is held has changed; what is pending stays so."""
        for held in self.held:
            assert held.tensor.is_allocated, f"{held.tensor} is gone: {held.tensor._record.by}"
            if not held.tensor.is_pending:
                np.testing.assert_array_equal(held.tensor.numpy(), held.expected)
                for array in held.exports:
                    np.testing.assert_array_equal(array, held.expected)

    def step(self) -> None:
        if self.fails and self.choice.random() < 0.08:
            self.fuse = self.choice.randrange(4)
            self.error = self.choice.choice([Planted, KeyboardInterrupt])
        weights = [weight for weight, _ in self.steps]
        what = self.choice.choices(self.steps, weights)[0][1]
        # Beside others one may have failed by now that was never made.
        ready = [h for h in self.held if h.tensor._record.status is Status.READY]
        self.given: list[Held] = []
        try:
            what()
            self.check()
            del self.held[24:]
        except (Planted, KeyboardInterrupt):
            lost = [h for h in ready if not h.tensor.is_allocated and h not in self.given]
            assert not lost, f"a failure has taken {lost[0].tensor._record.by}"
        except StitchError as error:
            # Queued work that was hit earlier; without planted failures only memory may run out.
            if not (
                self.fails or isinstance(error, stitch.OutOfMemoryError) or "pinned" in str(error)
            ):
                raise
            self.refused += 1
            lost = [h for h in ready if not h.tensor.is_allocated and h not in self.given]
            assert not lost, f"a failure has taken {lost[0].tensor._record.by}"
            self.held = [h for h in self.held if h.tensor.is_allocated]
        if self.fails:
            self.held = [h for h in self.held if h.tensor.is_allocated]
        self.check()

    def burn(self, context: object) -> None:
        """Called before each program when failures are planted."""
        if self.fuse is not None:
            self.fuse -= 1
            if self.fuse < 0:
                self.fuse = None
                raise self.error("planted")

    # -- steps -----------------------------------------------------------------------------------

    def call(self) -> None:
        index = self.choice.randrange(len(self.kinds))
        kind = self.kinds[index]
        arguments = [self.argument(kind, at == 0) for at in range(kind.takes)]
        self.give(kind, arguments)
        results = tuple_of(self.loaded[index](*[a for a, _, _ in arguments]))
        self.keep(results, kind.rule(*[e for _, e, _ in arguments]), kind.remembered)

    def give(self, kind: Kind, arguments: Sequence[tuple[Any, Array, Held | None]]) -> None:
        if kind.donates and arguments[0][2] is not None:
            self.held.remove(arguments[0][2])
            self.given.append(arguments[0][2])

    def keep(self, results: Sequence[stitch.Tensor], expected: Sequence[Array],
             remembered: bool = False) -> None:  # fmt: skip
        for tensor, array in zip(results, expected, strict=True):
            assert remembered or not tensor.retain, "a new result has another's placement option"
            if self.choice.random() < 0.6:
                held = self.hold(tensor, array)
                twins = [h for h in self.held if h.tensor._record is tensor._record]
                held.bytes_of = twins[0].bytes_of
            elif self.choice.random() < 0.5:
                np.testing.assert_array_equal(tensor.numpy(), array)

    def chain(self) -> None:
        simple = [i for i, k in enumerate(self.kinds) if k.takes == 1 and not k.donates]
        value, expected, _ = self.argument(self.kinds[0], True)
        for _ in range(self.choice.randrange(1, 6)):
            index = self.choice.choice(simple)
            results = tuple_of(self.loaded[index](value))
            arrays = self.kinds[index].rule(expected)
            at = self.choice.randrange(len(results))
            value, expected = results[at], arrays[at]
            if self.choice.random() < 0.2:
                self.keep([value], [expected])
        self.keep([value], [expected])

    def pipe(self) -> None:
        if len(self.pipelines) < 4 or self.choice.random() < 0.05:
            self.pipelines = [*self.pipelines[-5:], self.new_pipeline()]
        self.run_pipe(*self.choice.choice(self.pipelines))

    def new_pipeline(self) -> tuple[stitch.Pipeline, list[int]]:
        simple = [
            i
            for i, k in enumerate(self.kinds)
            if k.takes == 1 and not k.remembered and i != self.two
        ]
        stages = [self.choice.choice(simple) for _ in range(self.choice.choice([1, 2, 2, 3, 7]))]
        if self.choice.random() < 0.4:
            stages[-1] = self.two
        return stitch.Pipeline([self.loaded[i] for i in stages]), stages

    @property
    def two(self) -> int:
        return next(
            i for i, k in enumerate(self.kinds) if k.compiled.binary.programs[0].name == "two"
        )

    def run_pipe(self, pipeline: stitch.Pipeline, stages: list[int]) -> None:
        first = self.kinds[stages[0]]
        value, expected, held = self.argument(first, True)
        self.give(first, [(value, expected, held)])
        results = tuple_of(pipeline(value))
        arrays: tuple[Array, ...] = (expected,)
        for index in stages:
            arrays = self.kinds[index].rule(arrays[0])
        self.keep(results, arrays)

    def again(self) -> None:
        """A loop, so that the steady state is reached."""
        if not self.pipelines:
            return
        pipeline, stages = self.choice.choice(self.pipelines)
        ring = self.choice.randrange(4)
        for _ in range(self.choice.randrange(4, 12)):
            x = self.array()
            results = tuple_of(pipeline(x))
            arrays: tuple[Array, ...] = (x,)
            for index in stages:
                arrays = self.kinds[index].rule(arrays[0])
            for tensor, array in zip(results, arrays, strict=True):
                np.testing.assert_array_equal(tensor.numpy(), array)
                if ring:
                    self.hold(tensor, array)
            del results, tensor
            if len(self.held) > ring:
                del self.held[self.choice.randrange(len(self.held))]

    def feed_back(self) -> None:
        """A state that programs read or overwrite, looked at or not, with handles left behind."""
        overwrites = [i for i, kind in enumerate(self.kinds) if kind.donates]
        reads = [i for i, kind in enumerate(self.kinds) if kind.takes == 1 and not kind.remembered]
        value, expected, held = self.argument(self.kinds[overwrites[0]], True)
        if held is not None:
            self.held.remove(held)
            self.given.append(held)
        index, looks = self.choice.choice(overwrites), self.choice.random() < 0.6
        for _ in range(self.choice.randrange(2, 9)):
            if self.choice.random() < 0.15:
                index = self.choice.choice([*overwrites, *reads])
            before = value
            value = tuple_of(self.loaded[index](before))[0]
            expected = self.kinds[index].rule(expected)[0]
            if looks:
                np.testing.assert_array_equal(value.numpy(), expected)
            if self.kinds[index].donates and isinstance(before, stitch.Tensor):
                with pytest.raises(stitch.TaskError, match=self.given_away):
                    before.numpy()
            if self.choice.random() < 0.1:
                # Held as it is now: what overwrites it next must be given another.
                self.keep([value], [expected])
                value = np.array(expected)
        if isinstance(value, stitch.Tensor):
            self.keep([value], [expected])

    def drop(self) -> None:
        for _ in range(self.choice.randrange(1, 5)):
            if self.held:
                del self.held[self.choice.randrange(len(self.held))]

    def duplicate(self) -> None:
        held = self.pick(whole=False)
        if held is not None:
            self.held.append(
                Held(copy.copy(held.tensor), held.expected, held.bytes_of, held.is_view)
            )

    def view(self) -> None:
        held = self.pick()
        if held is None:
            return
        self.device.flush()
        rows = self.choice.choice([(0, 2), (1, 3), (0, 4), (3, 4)])
        try:
            tensor = held.tensor[slice(*rows)]
        except stitch.LayoutError:
            return
        whole = rows == (0, 4)
        self.held.append(Held(tensor, held.expected[slice(*rows)], held.bytes_of, not whole))

    def export(self) -> None:
        held = self.pick()
        if held is None:
            return
        with contextlib.suppress(BufferError):
            held.exports += (np.from_dlpack(held.tensor),)

    def let_exports_go(self) -> None:
        for held in self.held:
            held.exports = ()

    def write(self) -> None:
        held = self.pick()
        if held is None or self.shared(held):
            return
        self.device.flush()
        array = self.array()
        before, held.expected = held.expected, np.array(array)
        try:
            self.device.write(held.tensor, array)
        except stitch.LayoutError:
            held.expected = before
        except BaseException:
            held.expected = before
            raise

    def convert(self) -> None:
        held = self.pick()
        if held is None:
            return
        spaces = [s for s in (Space.L1, Space.DRAM) if s in self.device.backend.spaces]
        layout = Layout(F32, self.choice.choice([*spaces, Space.HOST]))
        if layout.space in self.device.backend.spaces:
            self.hold(held.tensor.to_layout(layout, retain=True, copy=True), held.expected)

    def deallocate(self) -> None:
        held = self.pick()
        if held is not None and not self.shared(held):
            self.held.remove(held)
            self.given.append(held)
            held.tensor.deallocate()
            with pytest.raises(stitch.TaskError):
                held.tensor.numpy()

    def retain(self) -> None:
        held = self.pick(whole=False)
        if held is not None:
            held.tensor.retain = not held.tensor.retain

    def flush(self) -> None:
        self.device.flush()

    def reload(self) -> None:
        """Programs go while their results are held, and come back."""
        index = self.choice.randrange(len(self.loaded))
        self.loaded[index] = self.device.load(self.kinds[index].compiled)
        self.pipelines = [p for p in self.pipelines if index not in p[1]]

    def make(self) -> None:
        if Space.L1 not in self.device.backend.spaces:
            return
        tensor = self.device.empty(TensorDesc(SHAPE, Layout(F32, Space.L1)))
        array = self.array()
        self.device.write(tensor, array)
        self.hold(tensor, np.array(array))

    def collect(self) -> None:
        gc.collect(0)

    def room(self) -> None:
        with self.device.lock:
            self.device.run_queue()
            self.device.make_room()

    def pairs(self) -> None:
        """Two sources in one buffer, then in two."""
        left, right = self.pick(), self.pick()
        index = next(i for i, kind in enumerate(self.kinds) if kind.takes == 2)
        if left is None or right is None:
            return
        for one, other in ((left, left), (left, right), (right, left)):
            a, b = one.tensor, copy.copy(other.tensor)
            if one is other:
                self.device.flush()
                try:
                    b = a[0:4]
                except stitch.LayoutError:
                    continue
            (expected,) = self.kinds[index].rule(one.expected, other.expected)
            np.testing.assert_array_equal(tuple_of(self.loaded[index](a, b))[0].numpy(), expected)

    def remember(self) -> None:
        """A remembered result, which is then written."""
        held = self.pick()
        if held is None:
            return
        index = next(i for i, kind in enumerate(self.kinds) if kind.remembered)
        (expected,) = self.kinds[index].rule(held.expected)
        twins = [tuple_of(self.loaded[index](held.tensor))[0] for _ in range(2)]
        records = {id(twin._record) for twin in twins}
        if any(id(h.tensor._record) in records for h in self.held):
            return
        for twin in twins:
            np.testing.assert_array_equal(twin.numpy(), expected)
        self.device.write(twins[0], self.array())

    def account(self) -> None:
        self.device.account()


@contextlib.contextmanager
def watched(device: RuntimeDevice, how: str) -> Iterator[None]:
    """With somebody who looks on."""
    with contextlib.ExitStack() as stack:
        if how == "listener":
            stack.callback(device.events.subscribe(lambda event: None))
        elif how == "hooks":
            stack.callback(device.hooks.register(before_program=lambda context: None))
        elif how == "operation hooks":
            stack.callback(device.hooks.register(after_operation=lambda context: None))
        elif how == "trace and record":
            trace, recorder = ChromeTrace(device), Recorder(device)
            stack.callback(trace.as_json)
            stack.callback(recorder.text)
        yield


def drilled(
    name: str, seed: int, steps: int, *, window: int, debug: bool, fails: bool = False,
    how: str = "nobody",
) -> tuple[int, int]:  # fmt: skip
    """Run one drill to its end; gives how many programs ran and copies were made."""
    with stitch.open_device(machine_of(name), window=window, debug=debug) as device:
        drill = Drill(device, name, seed, fails)
        forget = device.hooks.register(before_program=drill.burn) if fails else None
        with watched(device, how):
            for _ in range(steps):
                drill.step()
            drill.fuse = None
            with contextlib.suppress(StitchError):
                device.flush()
            total = device.account().total
        assert device.statistics().windows
        drill.held.clear()
        drill.given.clear()
        drill.pipelines.clear()
        drill.loaded.clear()
        if forget is not None:
            forget()
        del drill, forget
        device.constant_cache.clear()
        gc.collect(0)
        if held_by(device):
            gc.collect()
        assert held_by(device) == []
    return total.programs, total.copies


def campaign(seed: int, steps: int, fails: bool) -> None:
    choice = random.Random(seed)
    name, window = choice.choice(MACHINES), choice.choice([1, 4, 64])
    drilled(name, seed, steps, window=window, debug=choice.random() < 0.3, fails=fails)


@pytest.mark.parametrize("fails", [False, True], ids=["sound", "with failures"])
@pytest.mark.parametrize("seed", every(2, range(16)))
def test_nothing_that_is_held_changes(seed: int, fails: bool) -> None:
    window, debug = (1, 4, 64)[seed % 3], seed % 5 == 4
    drilled(MACHINES[seed % 4], seed, 80, window=window, debug=debug, fails=fails)


@pytest.mark.parametrize(("seed", "name"), in_turn(range(4), GRANULES))
def test_granules_and_policies_change_nothing_that_is_held(name: str, seed: int) -> None:
    drilled(name, 300 + seed, 60, window=(4, 64)[seed % 2], debug=seed == 3, fails=seed == 2)


@pytest.fixture
def nothing_is_collected() -> Iterator[None]:
    """When garbage is collected, and with it tensors, depends on all that a process has done."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize(
    "how", ["listener", "hooks", "operation hooks", "trace and record", "no counts"]
)
def test_observers_change_neither_results_nor_copies(
    how: str, monkeypatch: pytest.MonkeyPatch, nothing_is_collected: None
) -> None:
    for seed, name in enumerate(MACHINES):
        window = (1, 4, 64)[seed % 3]
        alone = drilled(name, 100 + seed, 40, window=window, debug=False)
        with monkeypatch.context() as patch:
            if how == "no counts":
                # Who holds what is never read from the interpreter's counts.
                patch.setattr(sys, "getrefcount", lambda thing: 2)
            assert drilled(name, 100 + seed, 40, window=window, debug=False, how=how) == alone


@pytest.mark.parametrize("seed", range(4))
def test_limits_that_are_met_all_the_time_change_nothing(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One lease, one binding, few kinds: everything ends while something is held."""
    monkeypatch.setattr(recording, "MAX_LEASES", 1)
    monkeypatch.setattr(recordings, "MAX_VARIANTS", 2)
    monkeypatch.setattr(recordings, "MAX_KINDS", 4)
    monkeypatch.setattr(recording_maker, "MAX_BINDINGS", 1)
    drilled(MACHINES[seed % 4], 200 + seed, 60, window=4, debug=False, fails=seed % 2 == 1)


@pytest.mark.campaign("recordings")
@pytest.mark.parametrize("part", range(5))
def test_many_drills(part: int) -> None:
    for seed in range(part * 25, part * 25 + 25):
        campaign(1000 + seed, 150, fails=seed % 2 == 1)
