"""However results are held, planning stops and held values never change."""

from __future__ import annotations

import copy
import random
from collections import deque
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

import stitch
from stitch.program import Array
from tests.support.grids import in_turn
from tests.support.stitched_models import integers, model, one, scaled

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
    for what in ("plans_made", "executables_made", "code_written", "revocations"):
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
def test_pipelines_with_differently_held_results_settle(length: int, window: int) -> None:
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


@pytest.mark.parametrize(("debug", "seed"), in_turn([False, True], range(6)))
def test_bound_steps_are_those_of_their_places(seed: int, debug: bool) -> None:
    """Plans are dropped now and then, so that some are bound anew; views and results go in
    again."""
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
            if seed % 2 and not number % 7:
                device.make_room()
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


def test_a_graph_whose_plan_was_dropped_makes_another() -> None:
    with stitch.open_device("wormhole_n150") as device:
        a, b = (device.load(scaled(n, f, target=device.machine)) for n, f in (("a", 2.0), ("b", 3)))
        pipes, kept = [stitch.Pipeline([a, a]), stitch.Pipeline([b, b])], list[stitch.Tensor]()
        for number in range(30):
            kept += [one(pipes[number % 2](integers(start=number)))]
            if number % 5 == 4:
                device.make_room()
        for number, tensor in enumerate(kept):
            factor = np.float32(2 + number % 2)
            expected = (integers(start=number) * factor + 1) * factor + 1
            np.testing.assert_array_equal(tensor.numpy(), expected)


@pytest.mark.parametrize("machine", ["tiny", "host"])
def test_a_result_that_lost_one_of_two_handles_is_held_by_the_other(machine: str) -> None:
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
