"""Kept results of random programs are those of single runs."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import numpy as np
import pytest

import stitch
from stitch.errors import StitchError
from stitch.machine import load_machine
from stitch.program import Array
from stitch.ttb import Binary
from tests.support.executors.drawn_programs import DrawnProgram, drawn_program
from tests.support.grids import in_turn


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
    seeds = range(20 * part, 20 * part + 10)
    assert sum(kept_equals_single(seed, machine, "numpy") for seed in seeds) > 2


def test_kept_results_of_other_executors_are_those_of_single_runs() -> None:
    assert sum(kept_equals_single(seed, "tiny", "onnxruntime") for seed in range(100, 115)) > 3
