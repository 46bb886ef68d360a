"""How a result is held changes neither what runs nor what it costs, nor ever what is held."""

from __future__ import annotations

import copy
import gc
import random
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import stitch
from stitch.program import Array
from stitch.runtime.backends import BoundStep, LocalBackend
from stitch.runtime.hooks import HookContext
from stitch.runtime.lending import lend, take_back
from stitch.runtime.recording import bound_parts, recording, recording_maker, recordings
from tests.support.grids import in_turn
from tests.support.lines_run import lines_run
from tests.support.stitched_models import integers, model, one, scaled, several, used

#: Results that are held at a time, in places drawn at random.
SLOTS = 20


def two_outputs() -> stitch.CompiledModel:
    def build(b: stitch.ComputationGraphBuilder) -> None:
        x = b.input("x", (4, 64), "float32")
        b.output("twice", x * 2)
        b.output("less", x - 1)

    return model("two", build, target="wormhole_n150")


def still(device: stitch.Device, run: Callable[[int], object], first: int, then: int) -> None:
    """After the first passes nothing is even bound any more, or goes by the queue: plans that are
    known run, and that is all."""
    for number in range(first):
        run(number)
    before = device.statistics()
    for number in range(first, first + then):
        run(number)
    after = device.statistics()
    assert after == replace(before, replays=after.replays)
    assert after.replays >= before.replays + then


def settled(device: stitch.Device, run: Callable[[int], object], first: int, then: int) -> None:
    """After the first passes nothing is planned or written any more."""
    for number in range(first):
        run(number)
    before = device.statistics()
    for number in range(first, first + then):
        run(number)
    after = device.statistics()
    for what in ("plans_made", "recordings_made", "code_written", "revocations"):
        assert getattr(after, what) == getattr(before, what), what


@pytest.mark.parametrize("length", [1, 2, 5])
def test_what_is_held_at_random_settles_and_keeps_its_values(length: int) -> None:
    with stitch.open_device("wormhole_n150") as device:
        program = device.load(scaled("a", 2.0, target=device.machine))
        # One program several times: each run has bound steps of its own.
        pipe = stitch.Pipeline([program] * length)
        drawn, held = random.Random(length), dict[int, tuple[int, stitch.Tensor]]()

        def run(number: int) -> None:
            held[drawn.randrange(SLOTS)] = number, one(pipe(integers(start=number % 7)))

        settled(device, run, 20, 300)
        made = device.statistics().bindings_made
        for number in range(100):
            run(number)
        assert device.statistics().bindings_made == made
        for number, tensor in held.values():
            expected: Array = integers(start=number % 7)
            for _ in range(length):
                expected = expected * 2 + 1
            np.testing.assert_array_equal(tensor.numpy(), expected)


@pytest.mark.parametrize("count", [2, 3, 4])
def test_outputs_that_are_held_singly_at_random_settle(count: int) -> None:
    def build(b: stitch.ComputationGraphBuilder) -> None:
        x = b.input("x", (4, 64), "float32")
        for number in range(count):
            b.output(f"y{number}", x * number)

    with stitch.open_device("wormhole_n150") as device:
        pipe = stitch.Pipeline([device.load(model("outputs", build, target="wormhole_n150"))])
        drawn, held = random.Random(count), dict[int, tuple[int, Array, stitch.Tensor]]()

        def run(number: int) -> None:
            x, output = integers(start=number % 7), drawn.randrange(count)
            held[drawn.randrange(SLOTS)] = output, x, several(pipe(x))[output]

        still(device, run, 400, 200)
        made = device.statistics().bindings_made
        assert made < SLOTS + 10, "one for each that is held at a time, and a few"
        for output, x, tensor in held.values():
            np.testing.assert_array_equal(tensor.numpy(), x * output)


@pytest.mark.parametrize("machine", ["wormhole_n150", "tiny"])
@pytest.mark.parametrize(
    "phases", [[(0, 0), (1, 0)], [(0, 0), (1, 1)], [(0, 0), (1, 0), (0, 0), (1, 1)]]
)
def test_pipelines_in_turn_take_nothing_from_each_other_for_ever(
    machine: str, phases: list[tuple[int, int]]
) -> None:
    with stitch.open_device(machine) as device:
        programs = [device.load(scaled(f"a{i}", i + 2.0, target=machine)) for i in range(2)]
        pipes = [stitch.Pipeline([programs[i] for i in chain]) for chain in phases]
        for first in range(0, len(pipes), 2):

            def run(_: int, first: int = first) -> None:
                for pipe in pipes[first : first + 2]:
                    pipe(integers())

            still(device, run, 20, 20)


@pytest.mark.parametrize(("machine", "seed"), in_turn(["wormhole_n150", "tiny"], range(16)))
def test_pipelines_in_turn_settle_however_their_results_are_held(machine: str, seed: int) -> None:
    drawn = random.Random(seed)
    with stitch.open_device(machine) as device:
        programs = [device.load(scaled(n, 0.5, (2, 32), target=machine)) for n in "abc"]
        chains = [
            drawn.choices(programs, k=drawn.randint(1, 4)) for _ in range(drawn.randint(2, 4))
        ]
        pipes = [stitch.Pipeline(chain) for chain in chains]
        rings = [deque[object](maxlen=drawn.randrange(4)) for _ in pipes]
        # Some come in only when the others have settled.
        for last in (drawn.randint(1, len(pipes)), len(pipes)):

            def run(_: int, last: int = last) -> None:
                for pipe, ring in zip(pipes[:last], rings, strict=False):
                    ring.append(pipe(integers((2, 32))))

            still(device, run, 20, 20)


def test_results_that_are_fed_back_settle_however_they_are_held() -> None:
    with stitch.open_device("wormhole_n150") as device:
        pipe = stitch.Pipeline([device.load(scaled("half", 0.5, target=device.machine))])
        drawn, expected = random.Random(0), integers()
        h = one(pipe(expected))
        expected = expected * np.float32(0.5) + 1
        held = [(h, expected)] * 6

        def run(number: int) -> None:
            nonlocal h, expected
            h, expected = one(pipe(h)), expected * np.float32(0.5) + 1
            held[drawn.randrange(6)] = h, expected

        settled(device, run, 20, 300)
        made = device.statistics().bindings_made
        for number in range(100):
            run(number)
        assert device.statistics().bindings_made == made
        for tensor, array in held:
            np.testing.assert_array_equal(tensor.numpy(), array)


@pytest.mark.parametrize(("window", "length"), in_turn([1, 8, 64], [1, 2, 65]))
def test_ways_of_holding_that_take_turns_settle(length: int, window: int) -> None:
    """What one holds for long takes no place from the others, as long as there is memory."""
    with stitch.open_device("wormhole_n150", window=window) as device:
        programs = [device.load(scaled("a", 0.5, target=device.machine))] * length
        rings = [deque[stitch.Tensor](maxlen=n) for n in (0, 1, 2, 3, 5, 8, 13, 20)]
        pipes, kept = [stitch.Pipeline(programs) for _ in range(10)], list[stitch.Tensor]()
        drawn, held = random.Random(length), dict[int, stitch.Tensor]()
        h = one(pipes[9](integers()))

        def run(number: int) -> None:
            nonlocal h
            x = integers(start=number % 7)
            for pipe, ring in zip(pipes, rings, strict=False):
                ring.append(one(pipe(x)))
            held[drawn.randrange(SLOTS)] = one(pipes[8](x))
            h = one(pipes[9](h))
            one(pipes[8](x)).numpy()
            kept.append(one(pipes[0](x)))
            if len(kept) == 150:
                kept.clear()

        settled(device, run, 20, 40)
        for number in range(200):
            run(number)
        made = device.statistics().bindings_made
        settled(device, run, 0, 320)
        assert device.statistics().bindings_made < made + SLOTS, "but for more held at a time"


@pytest.mark.parametrize("window", [1, 64])
def test_another_place_for_a_result_binds_no_kernel(
    window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    bound = list[object]()
    bind = LocalBackend.bind_step

    def noting(self: LocalBackend, *arguments: Any) -> BoundStep:
        bound.append(arguments[0])
        return bind(self, *arguments)

    monkeypatch.setattr(LocalBackend, "bind_step", noting)
    with stitch.open_device("wormhole_n150", window=window) as device:
        a = device.load(scaled("a", 2.0, target=device.machine))
        pipe, b, kept = stitch.Pipeline([a, a]), device.load(two_outputs()), list[stitch.Tensor]()

        def run(number: int) -> None:
            h = one(pipe(integers(start=number % 9)))
            kept.extend((h, *several(b(h))))
            stitch.wait(kept[-2:])

        settled(device, run, 20, 100)
        bound.clear()
        settled(device, run, 0, 100)
        assert not bound
        for number in range(100):
            x = integers(start=number % 9) * 4 + 3
            for tensor, expected in zip(kept[-300 + 3 * number :], (x, x * 2, x - 1), strict=False):
                np.testing.assert_array_equal(tensor.numpy(), expected)


def test_what_observes_later_is_told_of_bindings_that_were_never_observed() -> None:
    """Their kernels are bound only then."""
    with stitch.open_device("wormhole_n150") as device:
        a = device.load(scaled("a", 2.0, target=device.machine))
        pipe, kept = stitch.Pipeline([a, a]), list[stitch.Tensor]()
        for number in range(12):
            kept.append(one(pipe(integers(start=number))))
        seen = list[HookContext]()
        kept[3:9] = []
        device.hooks.register(after_operation=seen.append)
        for number in range(12):
            kept.append(one(pipe(integers(start=number))))
        assert len(seen) == 12 * 2 * 2
        for number, tensor in enumerate(kept[-12:]):
            x = (integers(start=number) * 2 + 1) * 2 + 1
            np.testing.assert_array_equal(tensor.numpy(), x)


def test_all_results_are_kept_without_a_plan_for_each() -> None:
    with stitch.open_device("wormhole_n150") as device:
        pipe, kept = stitch.Pipeline([device.load(two_outputs())]), list[stitch.Tensor]()
        settled(device, lambda n: kept.extend(several(pipe(integers(start=n % 9)))), 4, 300)
        for number in range(304):
            x = integers(start=number % 9)
            np.testing.assert_array_equal(kept[2 * number].numpy(), x * 2)
            np.testing.assert_array_equal(kept[2 * number + 1].numpy(), x - 1)


#: Which of two results a pass keeps, of all that are made.
KEPT: dict[str, Callable[[int], tuple[int, ...]]] = {
    "both": lambda number: (0, 1), "the first": lambda number: (0,),
    "the second": lambda number: (1,), "in turn": lambda number: (number % 2,),
    "one, and the other at times": lambda number: (0,) if number % 5 else (1,),
    "the first, and the other for a pass": lambda number: (0,),
}  # fmt: skip


@pytest.mark.parametrize(("window", "way"), in_turn([1, 64], KEPT))
def test_a_pass_takes_no_more_work_the_more_results_are_kept(way: str, window: int) -> None:
    with stitch.open_device("wormhole_n150", window=window) as device:
        pipe = stitch.Pipeline([device.load(two_outputs())])
        kept: list[tuple[int, int, stitch.Tensor]] = []

        def run(passes: int) -> None:
            for number in range(passes):
                results = several(pipe(integers(start=number % 9)))
                kept.extend((number, place, results[place]) for place in KEPT[way](number))
                if way != "the first, and the other for a pass":
                    del results

        run(60)
        few = lines_run(lambda: run(60))
        run(700)
        assert lines_run(lambda: run(60)) <= 1.5 * few
        for number, place, tensor in kept[::7]:
            x = integers(start=number % 9)
            np.testing.assert_array_equal(tensor.numpy(), x - 1 if place else x * 2)


def test_places_that_are_shared_find_their_way_back() -> None:
    """Whoever has a place together with others may end while its result lies there."""
    with stitch.open_device("wormhole_n150") as device:
        pipe = stitch.Pipeline([device.load(two_outputs())])
        empty, ended = used(device), 0
        drawn, held = random.Random(5), dict[int, tuple[int, int, stitch.Tensor]]()
        for number in range(600):
            results = several(pipe(integers(start=number % 7)))
            place = drawn.randrange(2) if number > 200 else 0
            held[drawn.randrange(SLOTS)] = number, place, results[place]
            del results
            if number % 30 == 29:
                device.flush()
                spare = device.records.spare_leases()
                ended += sum(lease.shares and lease.held > 0 for lease in spare[::2])
                device.records.revoke(spare[::2])
            for lease in device.records.leases.values():
                lying = [b for b in lease.buffers if b.lease is lease and not b.is_spare]
                assert lease.held == len(lying)
                assert (lease in lease.holder.idle) == (not lying)
        assert ended > 20
        for number, place, tensor in held.values():
            x = integers(start=number % 7)
            np.testing.assert_array_equal(tensor.numpy(), x - 1 if place else x * 2)
        del tensor
        held.clear()
        device.flush()
        assert used(device) == empty


@pytest.mark.parametrize(("debug", "seed"), in_turn([False, True], range(6)))
def test_bound_steps_are_those_of_their_places(
    seed: int, debug: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few bindings are kept, so that some are always made anew; views and results go in again."""
    monkeypatch.setattr(recording_maker, "MAX_BINDINGS", 1 + seed % 3)
    monkeypatch.setattr(bound_parts, "MIN_BOUND", 1 + seed % 3)
    monkeypatch.setattr(recording, "MAX_LEASES", 2 + seed)
    choice = random.Random(seed)
    with stitch.open_device("wormhole_n150", debug=debug) as device:
        a, two = device.load(scaled("a", 0.5, target=device.machine)), device.load(two_outputs())
        rules: list[Callable[[Array], tuple[Array, ...]]] = [
            lambda x: (x * np.float32(0.5) + 1,),
            lambda x: ((x * np.float32(0.5) + 1) * np.float32(0.5) + 1,),
            lambda x: (x * 2, x - 1),
            lambda x: (((x * np.float32(0.5) + 1) * 2), x * np.float32(0.5)),
        ]
        pipes = [stitch.Pipeline(p) for p in ([a], [a, a], [two], [a, two])]
        held = list[tuple[stitch.Tensor, Array]]()
        for number in range(150):
            x: Array = integers(start=number % 5)
            given: object = x
            if held and choice.random() < 0.6:
                given, x = choice.choice(held)
                if choice.random() < 0.3:
                    given = given[0:4]
            which = choice.randrange(len(pipes))
            results = pipes[which](given)
            found = results if isinstance(results, tuple) else (results,)
            for tensor, expected in zip(found, rules[which](x), strict=True):
                np.testing.assert_array_equal(tensor.numpy(), expected)
                if choice.random() < 0.5:
                    held.append((tensor, expected))
            del results, found, tensor, given
            while len(held) > 6:
                del held[choice.randrange(len(held))]
            same = [np.array_equal(kept.numpy(), array) for kept, array in held]
            assert all(same), f"changed after pass {number}: {same}"
        held.clear()


def test_bound_steps_do_not_keep_what_was_lent_to_them() -> None:
    with stitch.open_device("host") as device:
        pipe = stitch.Pipeline([device.load(scaled("a", 2.0, target=device.machine))])
        seen = []
        for number in range(40):
            array = integers(start=number)
            tensor = lend(device, array, "an array")
            np.testing.assert_array_equal(one(pipe(tensor)).numpy(), array * 2 + 1)
            take_back(device, tensor)
            seen.append(weakref.ref(array))
            del array, tensor
        gc.collect()
        assert sum(ref() is not None for ref in seen) <= 2 * recording_maker.MAX_LENT_BINDINGS


def test_a_graph_whose_recording_was_dropped_makes_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What is held lies outside of where recordings work, as long as they are recordings."""
    monkeypatch.setattr(recordings, "MAX_KINDS", 1)
    with stitch.open_device("wormhole_n150") as device:
        a, b = (device.load(scaled(n, f, target=device.machine)) for n, f in (("a", 2.0), ("b", 3)))
        pipes, kept = [stitch.Pipeline([a, a]), stitch.Pipeline([b, b])], list[stitch.Tensor]()
        for number in range(30):
            kept += [one(pipes[number % 2](integers(start=number)))]
        for number, tensor in enumerate(kept):
            factor = np.float32(2 + number % 2)
            expected = (integers(start=number) * factor + 1) * factor + 1
            np.testing.assert_array_equal(tensor.numpy(), expected)


@pytest.mark.parametrize("machine", ["tiny", "host"])
def test_a_result_that_lost_one_of_two_handles_is_held_by_the_other(machine: str) -> None:
    """The next run takes over what the last one made only where that has no handle at all."""
    with stitch.open_device(machine) as device:
        pipeline = stitch.Pipeline([device.load(scaled("a", 2.0, target=machine))])
        for start in range(12):
            y = one(pipeline(integers(start=start)))
            other = copy.copy(y) if start % 2 else y[...]
            del y
            for later in range(3):
                one(pipeline(integers(start=30 + later)))
                np.testing.assert_array_equal(other.numpy(), integers(start=start) * 2 + 1)
            del other


def test_a_result_is_held_where_its_neighbour_of_the_same_run_is_not() -> None:
    with stitch.open_device("wormhole_n150") as device:
        pipeline = stitch.Pipeline([device.load(two_outputs())])
        for start in range(12):
            results = several(pipeline(integers(start=start)))
            expected = [tensor.numpy() for tensor in results]
            held = results[start % 2]
            del results
            for later in range(3):
                pipeline(integers(start=30 + later))
                np.testing.assert_array_equal(held.numpy(), expected[start % 2])
            del held
