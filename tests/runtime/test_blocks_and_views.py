"""Chunked elementwise groups and reshapes without copies give the numbers of NumPy."""

from __future__ import annotations

import numpy as np
import pytest

import stitch
from stitch.graph import ComputationGraphBuilder
from stitch.ops import KernelArguments, lookup
from stitch.program import Array
from stitch.runtime.executors.host.chunks import Member, can_join, joins, steps_by_chunks
from tests.support.stitched_models import model, several

SHAPE = (64, 32, 128)
RANDOM = np.random.default_rng(3)


def draw(*shape: int) -> Array:
    return RANDOM.standard_normal(shape, dtype=np.float32)


def member(index: int, op: str, *inputs: Array, out: Array, inside: bool = False) -> Member:
    readers = frozenset((index + 1,)) if inside else None
    arguments = KernelArguments(tuple(inputs), (out,), {}, (False,) * len(inputs))
    return Member(index, lookup(op), arguments, readers)


def run(group: list[Member]) -> None:
    for step in steps_by_chunks(group):
        step()


@pytest.mark.parametrize("shape", [SHAPE, (), (1,), (1, 1, 1)], ids=str)
def test_long_operands_and_numbers_give_the_same_sums(shape: tuple[int, ...]) -> None:
    a, b = draw(*SHAPE), draw(*shape)
    between, out = np.full(SHAPE, 7, np.float32), np.empty(SHAPE, np.float32)
    group = [
        member(0, "Add", a, b, out=between, inside=True),
        member(1, "Mul", between, b, out=out),
    ]
    assert can_join(group[0])
    assert joins(group[:1], group[1])
    run(group)
    assert np.array_equal(out, (a + b) * b)
    assert (between == 7).all(), "what only the group reads is never written as a whole"


def test_a_result_that_others_read_is_written_as_a_whole() -> None:
    a, between, out = draw(*SHAPE), np.empty(SHAPE, np.float32), np.empty(SHAPE, np.float32)
    run([member(0, "Add", a, a, out=between), member(1, "Mul", between, a, out=out)])
    assert np.array_equal(between, a + a)
    assert np.array_equal(out, (a + a) * a)


def test_results_that_take_the_place_of_operands_stay_right() -> None:
    a, b = draw(*SHAPE), draw(*SHAPE)
    wanted = (a - b) * (a - b)
    place = a.copy()
    run([member(0, "Sub", place, b, out=place), member(1, "Mul", place, place, out=place)])
    assert np.array_equal(place, wanted)


def test_results_that_lie_across_each_other_are_in_no_group() -> None:
    room = draw(65 * 32 * 128)
    size = int(np.prod(SHAPE))
    first, second = room[:size].reshape(SHAPE), room[4096 : 4096 + size].reshape(SHAPE)
    between = np.empty(SHAPE, np.float32)
    one = member(0, "Add", first, first, out=between)
    assert not joins([one], member(1, "Mul", between, between, out=second))


def test_every_last_element_is_computed() -> None:
    a, out = draw(1_000_003), np.zeros(1_000_003, np.float32)
    between = np.empty_like(a)
    group = [
        member(0, "Add", a, a, out=between, inside=True),
        member(1, "Add", between, a, out=out),
    ]
    run(group)
    assert np.array_equal(out, a + a + a)


def reshaped(builder: ComputationGraphBuilder) -> None:
    """Values seen in two shapes at once, some of which die long before their views."""
    x = builder.input("x", (8, 6), "float32")
    sums = x + x
    rows = builder.reshape(sums, (6, 8))
    products = builder.matmul(rows, sums)
    squares = sums * sums
    turned = builder.reshape(builder.reshape(squares, (3, 16)), (6, 8))
    builder.output("y", builder.reshape(products, 36))
    builder.output("z", (turned + rows) * turned)
    builder.output("again", builder.reshape(sums, 48))


def test_reshaped_values_are_right_and_hooks_still_see_every_operation() -> None:
    x = draw(8, 6)
    sums = x + x
    rows, turned = sums.reshape(6, 8), (sums * sums).reshape(6, 8)
    wanted = (rows @ sums).reshape(36), (turned + rows) * turned, sums.reshape(48)
    seen: list[tuple[int, ...]] = []
    with stitch.open_device("tiny", debug=True) as device:
        program = device.load(model("reshaped", reshaped))
        plain = [made.numpy() for made in several(program(x))]
        device.hooks.register(after_operation=lambda c: seen.append(c.outputs[0].shape))
        hooked = [made.numpy() for made in several(program(x))]
    for found, again, right in zip(plain, hooked, wanted, strict=True):
        np.testing.assert_allclose(found, right, rtol=1e-5)
        np.testing.assert_array_equal(found, again)
    assert (3, 16) in seen
