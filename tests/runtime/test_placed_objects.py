"""What written code is given for another binding is what binding its kernels there would give."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from random import Random

import numpy as np
import pytest

import stitch
from stitch.errors import StitchError
from stitch.machine import load_machine
from stitch.memory import Arrivals
from stitch.planner import Buffer
from stitch.program import Array, DataType, Space, TensorDesc, host_layout
from stitch.runtime.recording.placed_objects import PlacedObjects
from stitch.ttb import Binary
from tests.support.executors.drawn_programs import DrawnProgram, drawn_program
from tests.support.grids import in_turn

NBYTES = 256


class Bytes:
    """A space of one bank."""

    def __init__(self) -> None:
        self.all: Array = np.arange(4 * NBYTES, dtype=np.uint32).astype(np.uint8)

    def region(self, space: Space, address: int, size: int) -> Array:
        return self.all[address : address + size]

    def floats(self, start: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> Array:
        return np.ndarray(shape, np.float32, self.all, start, strides)


def buffer(number: int, address: int) -> Buffer:
    desc = TensorDesc((NBYTES // 4,), host_layout(DataType.FLOAT32))
    return Buffer(number, Space.DRAM, address, NBYTES, desc, "a test")


def test_arrays_over_a_buffer_follow_it_and_all_else_stays() -> None:
    there = Bytes()
    elsewhere: Array = np.zeros(4, np.float32)
    rows, back = there.floats(64, (2, 3), (32, 4)), there.floats(124, (4,), (-8,))
    neighbour = there.floats(NBYTES, (2,), (4,))
    own = [rows, np.add, elsewhere, back, rows.dot, elsewhere.dot, (1, None), neighbour, 0.5]
    objects = PlacedObjects.of([(own, [buffer(7, 0)])], there.region)
    assert objects is not None
    placed = objects.at({7: 512}, there.region)
    for at, start in ((0, 64), (3, 124)):
        array, was = placed[at], own[at]
        assert isinstance(array, np.ndarray) and isinstance(was, np.ndarray)
        assert (array.shape, array.strides, array.dtype) == (was.shape, was.strides, was.dtype)
        array.flat[0] = start
        assert there.floats(512 + start, (1,), (4,))[0] == start
    assert getattr(placed[4], "__self__", None) is not rows
    np.testing.assert_array_equal(placed[4](np.eye(3, dtype=np.float32)), placed[0])  # type: ignore[operator]
    for at in (1, 2, 5, 6, 7, 8):
        assert placed[at] is own[at]


def closure(array: Array) -> object:
    return lambda: array


@pytest.mark.parametrize(
    "thing",
    [
        pytest.param(lambda a: closure(a), id="a closure"),
        pytest.param(lambda a: partial(np.copyto, a, a), id="a call"),
        pytest.param(lambda a: [a], id="a list"),
        pytest.param(lambda a: (a,), id="an array in a tuple"),
        pytest.param(lambda a: memoryview(a), id="a view of another kind"),
        pytest.param(lambda a: np.ndarray(4, np.uint8, a.base, NBYTES - 2), id="two buffers"),
        pytest.param(lambda a: [].append, id="a method of what may change"),
    ],
)
def test_what_may_hide_an_address_is_bound_anew(thing: object) -> None:
    there = Bytes()
    array = there.floats(64, (2,), (4,))
    assert callable(thing)
    for own in ([thing(array)], [np.add, thing(array), Arrivals()]):
        assert PlacedObjects.of([(own, [buffer(0, 0)])], there.region) is None


def drawn(seed: int, machine: str) -> DrawnProgram | None:
    try:
        return drawn_program(Random(seed), load_machine(machine), 12, long=False)
    except StitchError:
        return None


def results(pipe: stitch.Pipeline, data: Sequence[Array]) -> tuple[stitch.Tensor, ...]:
    result = pipe(*data)
    return result if isinstance(result, tuple) else (result,)


def kept_equals_single(seed: int, machine: str, executor: str) -> bool:
    """Whether there was a program: then all results of ten runs, all kept, are those of one run."""
    program = drawn(seed, machine)
    if program is None:
        return False
    binary = Binary((program.program,), program.machine.shape, "a test")
    with stitch.open_device(machine, executor=executor) as device:
        pipe = stitch.Pipeline([device.load(binary)])
        data = [[np.roll(a, n) for a in program.inputs] for n in range(3)]
        alone = [[tensor.numpy() for tensor in results(pipe, some)] for some in data]
        kept = [results(pipe, data[n % 3]) for n in range(12)]
        for number, tensors in enumerate(kept):
            for tensor, expected in zip(tensors, alone[number % 3], strict=True):
                np.testing.assert_array_equal(tensor.numpy(), expected)
    return True


@pytest.mark.parametrize(("machine", "part"), in_turn(["tiny", "host", "wormhole_n150"], range(4)))
def test_kept_results_of_random_programs_are_those_of_single_runs(machine: str, part: int) -> None:
    seeds = range(20 * part, 20 * part + 20)
    assert sum(kept_equals_single(seed, machine, "numpy") for seed in seeds) > 5


def test_kept_results_of_other_executors_are_those_of_single_runs() -> None:
    assert sum(kept_equals_single(seed, "tiny", "onnxruntime") for seed in range(100, 115)) > 3
