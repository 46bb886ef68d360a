"""What leaves a loop beforehand: the results stay, and what reads states stays too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from stitch import fractal as ops
from stitch.fractal import FractalTensor
from tests.support import plain_nests as plain
from tests.support.plain_nests import assert_same, lists_of

NUMBERS = np.random.default_rng(3)


def drawn(*shape: int) -> Any:
    return NUMBERS.normal(size=shape).astype(np.float32) * np.float32(0.5)


XS, W, U, B = drawn(5, 1, 4), drawn(4, 4), drawn(4, 4), drawn(1, 4)
BOTH, START = drawn(8, 4), drawn(1, 4)
ROWS = drawn(5, 3, 1, 4)
Step = Callable[[Any, Any], Any]

STEPS: dict[str, Step] = {
    "product of the element": lambda h, x: np.tanh(x @ W + h @ U),
    "with a bias": lambda h, x: np.tanh((x @ W + B) + h @ U),
    "bias at the end": lambda h, x: np.tanh(x @ W + h @ U + B),
    "joined": lambda h, x: np.tanh(np.concatenate([x, h], 1) @ BOTH),
    "joined, states first": lambda h, x: np.tanh(np.concatenate([h, x], 1) @ BOTH + B),
    "joined twice": lambda h, x: np.tanh(
        np.concatenate([x, h], 1) @ BOTH * (np.concatenate([h, x], 1) @ BOTH)
    ),
    "two products in a row": lambda h, x: np.tanh(np.tanh(x @ W) @ U) + h,
    "what is added is made later": lambda h, x: np.tanh((x @ W + h) + np.exp(x * 0.5)),
    "sums of five": lambda h, x: np.tanh((((x @ W + h) + B) + np.tanh(x)) + x),
    "the element twice": lambda h, x: np.tanh((x @ W + h @ U) + x @ W),
    "the state twice": lambda h, x: np.tanh((x @ W + h) + h),
    "a sum that others read": lambda h, x: (lambda s: np.tanh(s + B) + s * 0.25)(x @ W + h),
    "a number to a row": lambda h, x: np.tanh((h + x[:, :1]) + x @ W),
    "of elements only": lambda h, x: x @ W,
    "gates": lambda h, x: np.split(x @ np.tile(W, 2) + h @ np.tile(U, 2), 2, axis=1)[0],
}  # fmt: skip


@pytest.mark.parametrize("name", ["scanl", "scanr", "foldl", "foldr"])
@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
def test_loops_give_the_same_with_products_beforehand(step: Step, name: str) -> None:
    xs = FractalTensor(XS)
    expected = getattr(plain, name)(step, list(XS), START)
    for schedule in ("hoisted", "rounds"):
        compiled = ops.compile(
            lambda xs: getattr(ops, name)(step, xs, START), xs, schedule=schedule
        )
        assert_same(lists_of(compiled(xs)), expected, 1e-5, schedule)
    hoisted = ops.compile(lambda xs: ops.scan(step, xs, START), xs, schedule="hoisted")
    can_leave = step is not STEPS["of elements only"]
    assert ("hoisted" in hoisted.explain().split(":")[-1].split(";")[0]) == can_leave


def test_products_after_a_loop_in_the_loop_stay_with_it() -> None:
    """That loop reads no state, and is not computed beforehand: nor is what reads its result."""

    def network(o: Any, xs: Any) -> Any:
        def step(h: Any, row: Any) -> Any:
            return np.tanh(o.foldl(lambda s, x: s * 0.5 + x, row, B) @ W + h @ U)

        return o.scanl(step, xs, START)

    xs = FractalTensor([FractalTensor(row) for row in ROWS])
    expected = network(plain, [list(row) for row in ROWS])
    for schedule in ("hoisted", "rounds"):
        compiled = ops.compile(lambda xs: network(ops, xs), xs, schedule=schedule)
        assert_same(lists_of(compiled(xs)), expected, 1e-5, schedule)
