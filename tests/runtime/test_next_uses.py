"""Learned next uses: loops over more weights than fit cost the least possible copies."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import pytest

import stitch
from tests.support.stitched_models import binary_op, model, one, scaled, tiny

WEIGHTS, ROOM = 6, 5
SHAPE = (32, 32)
NBYTES = 4 * 32 * 32
#: Room for five weights of 1,024 bytes a bank, and for what runs through them.
MACHINE = tiny(l1_nbytes=ROOM * 1024 + 512)


def least_loads(rounds: int) -> int:
    """The least loads of a loop over the weights that ends as it began, by trying all it can do."""

    @cache
    def loads(inside: frozenset[int], at: int, goal: frozenset[int]) -> float:
        if at == rounds * WEIGHTS:
            return 0 if inside == goal else float("inf")
        wanted = at % WEIGHTS
        if wanted in inside:
            return loads(inside, at + 1, goal)
        choices = [inside - {gone} | {wanted} for gone in inside]
        return 1 + min(loads(choice, at + 1, goal) for choice in choices)

    every = frozenset(range(WEIGHTS))
    return int(min(loads(every - {gone}, 0, every - {gone}) for gone in every))


def times() -> stitch.CompiledModel:
    """y = x w, a row by a matrix."""

    def build(b: stitch.ComputationGraphBuilder) -> None:
        x, w = b.input("x", (1, 32), "float32"), b.input("w", SHAPE, "float32")
        b.output("y", b.op("MatMul", x, w))

    return model("times", build, target=MACHINE)


def weights_of(device: stitch.Device) -> list[stitch.Tensor]:
    return [device.tensor(np.roll(np.eye(32, dtype=np.float32), k, 0)) for k in range(WEIGHTS)]


@pytest.mark.parametrize("window", [1, 2, 3, 6, 8, 64])
def test_a_cycle_of_six_weights_in_room_for_five_is_the_best_after_two_rounds(window: int) -> None:
    carried = []
    with stitch.open_device(MACHINE, window=window) as device:
        program, weights = device.load(times()), weights_of(device)
        x = device.tensor(np.arange(32, dtype=np.float32)[None])
        for _ in range(12):
            before = device.account().total.nbytes
            for weight in weights:
                x = one(program(x, weight))
            device.run_queue()
            carried.append(device.account().total.nbytes - before)
        shift = 12 * sum(range(WEIGHTS)) % 32
        assert np.array_equal(x.numpy()[0], np.roll(np.arange(32, dtype=np.float32), -shift))
    assert sum(carried[2:]) == least_loads(10) * NBYTES


def rounds_in_a_file(folder: Path, rounds: int) -> Path:
    """A pipeline of so many rounds over the weights."""
    times().save(folder / "times.ttb")
    step = "{{run: times, inputs: {{x: x{0}, w: w{0}}}, outputs: {{y: x{1}}}}}"
    slots = {"x0": (1, 32)} | {f"w{k}": SHAPE for k in range(WEIGHTS)}
    inputs = [f"{name}: {{shape: {list(shape)}, type: float32}}" for name, shape in slots.items()]
    steps = [f"    - {step.format(k, k + 1)}" for k in range(WEIGHTS)]
    lines = ["name: rounds", "modules: {times: times.ttb}", f"inputs: {{{', '.join(inputs)}}}",
             "steps:", f"- repeat: {rounds}", f"  carry: {{x0: x{WEIGHTS}}}", "  steps:", *steps,
             "outputs: {y: x0}"]  # fmt: skip
    file = folder / "rounds.yaml"
    file.write_text("\n".join(lines), encoding="utf-8")
    return file


@pytest.mark.parametrize("window", [1, 8, 64])
def test_rounds_of_a_pipeline_file_carry_what_the_best_loop_carries(
    tmp_path: Path, window: int
) -> None:
    carried = []
    for rounds in (12, 22):
        file = rounds_in_a_file(tmp_path, rounds)
        with stitch.open_device(MACHINE, window=window) as device:
            pipe = stitch.Pipeline.from_yaml(file, device=device)
            x = device.tensor(np.arange(32, dtype=np.float32)[None])
            result = one(pipe(x, *weights_of(device))).numpy()[0]
            shift = rounds * sum(range(WEIGHTS)) % 32
            assert np.array_equal(result, np.roll(np.arange(32, dtype=np.float32), -shift))
            carried.append(device.account().total.nbytes)
    assert carried[1] - carried[0] == least_loads(10) * NBYTES


def test_a_file_that_is_run_again_settles_to_the_best_loop(tmp_path: Path) -> None:
    file, plans, carried = rounds_in_a_file(tmp_path, 10), [], []
    with stitch.open_device(MACHINE, window=1) as device:
        pipe, weights = stitch.Pipeline.from_yaml(file, device=device), weights_of(device)
        x = device.tensor(np.arange(32, dtype=np.float32)[None])
        for _ in range(16):
            before = device.account().total.nbytes
            one(pipe(x, *weights)).numpy()
            plans.append(device.statistics().plans_made)
            carried.append(device.account().total.nbytes - before)
    assert carried[3:] == [least_loads(10) * NBYTES] * 13
    assert sum(carried[:3]) <= 3 * least_loads(10) * NBYTES + ROOM * NBYTES
    assert plans[-1] == plans[-5]


@pytest.mark.parametrize(("tasks", "window"), [
    (100, 101), (100, 64), pytest.param(1000, 64, marks=pytest.mark.campaign("random_work"))
])  # fmt: skip
def test_a_queue_that_begins_anew_amid_a_cycle_settles(tasks: int, window: int) -> None:
    made = []
    with stitch.open_device(MACHINE, window=window) as device:
        program, weights = device.load(times()), weights_of(device)
        x = device.tensor(np.arange(32, dtype=np.float32)[None])
        for _ in range(14):
            y = x
            for k in range(tasks):
                y = one(program(y, weights[k % WEIGHTS]))
            device.run_queue()
            statistics = device.statistics()
            made.append((statistics.plans_made, statistics.bindings_made))
    assert made[-1] == made[-5]


@pytest.mark.parametrize("window", [1, 2, 4, 16])
def test_a_tensor_that_is_read_from_dram_next_is_evicted_from_l1(window: int) -> None:
    """Three of a pass's tensors lie in L1 and are read from DRAM, in room for four: where these
    reads counted, what nobody reads again was written out each round."""
    machine = tiny(l1_nbytes=4 * 1024)
    l1 = ("output.y.space=l1", "input.x.space=l1")
    first = scaled("first", 1.0, shape=SHAPE, target=machine, placement=l1)
    placement = ("output.y.space=l1", "input.x.space=dram", "input.w.space=l1")
    add = binary_op("add", "Add", SHAPE, target=machine, placement=placement)
    copies: list[int] = []
    held: list[stitch.Tensor] = []
    with stitch.open_device(machine, window=window) as device:
        f, g, x = device.load(first), device.load(add), np.ones(SHAPE, np.float32)
        for _ in range(8):
            a = one(f(x))
            b = one(f(a))
            c = one(f(b))
            d = one(f(c))
            for _ in range(40):
                between = one(g(b, one(g(a, d))))
                d = one(g(c, between))
                del between
            held = [d]
            device.run_queue()
            copies.append(device.account().total.copies - sum(copies))
        assert np.array_equal(held[0].numpy(), np.full(SHAPE, 365, np.float32))
    assert max(copies) <= 8
