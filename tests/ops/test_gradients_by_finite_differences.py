"""Every operator's gradient equals central finite differences of its own kernel."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from stitch.ops import operators
from stitch.program import Array, DataType
from tests.support.gradients.running import (
    Case,
    gradients,
    graph_of,
    operands_of,
    run,
    wanted_names,
)
from tests.support.gradients.tables import ROWS
from tests.support.grids import every

DIRECTIONS = 3


def slope_along(one: Case, index: int, direction: Array, seeds: dict[str, Array]) -> float:
    """The slope of sum(seed · output) along a direction of one operand, by differences."""
    operands = operands_of(one)
    start = operands[index]
    assert start is not None
    step = 1e-6 if start.dtype == np.float64 else 1e-2
    total = 0.0
    for sign in (1, -1):
        operands[index] = (start + sign * step * direction).astype(start.dtype)
        graph, feeds = graph_of(one, operands)
        results = run(graph, feeds)
        for name, seed in seeds.items():
            total += sign * float((results[name].astype(np.float64) * seed).sum())
    return total / (2 * step)


@pytest.mark.parametrize("one", ROWS, ids=str)
def test_gradients_equal_finite_differences(one: Case) -> None:
    made, seeds, feeds = gradients(one)
    rng = np.random.default_rng(5)
    single = any(a.dtype == np.float32 for a in (*feeds.values(), *seeds.values()))
    tolerance = 3e-2 if single else 2e-6
    for name, gradient in made.items():
        for _ in range(DIRECTIONS):
            direction = rng.normal(0, 1, gradient.shape)
            expected = slope_along(one, int(name[1:]), direction, seeds)
            got = float((gradient * direction).sum())
            size = float(np.abs(gradient * direction).sum())
            assert got == pytest.approx(expected, rel=tolerance, abs=tolerance * (1 + size))


def in_bfloat16(one: Case) -> Case:
    """The case in bfloat16, its statistics too."""
    bfloat16 = DataType.BFLOAT16.dtype
    specs = tuple(
        spec.replace("f64", "bf16")
        if isinstance(spec, str)
        else spec.astype(bfloat16)
        if isinstance(spec, np.ndarray) and spec.dtype == np.float64
        else spec
        for spec in one.specs
    )
    attributes = {k: v for k, v in one.attributes.items() if k != "stash_type"}
    return dataclasses.replace(one, specs=specs, attributes=attributes)


@pytest.mark.parametrize("op", every(3, sorted({one.op for one in ROWS})))
def test_gradients_of_bfloat16_are_bfloat16_and_close(op: str) -> None:
    for one in (one for one in ROWS if one.op == op and "f64" in str(one)):
        wide, _, _ = gradients(one)
        narrow, _, _ = gradients(in_bfloat16(one))
        assert narrow.keys() == wide.keys()
        for name, expected in wide.items():
            assert narrow[name].dtype == DataType.BFLOAT16.dtype
            size = max(1.0, float(np.abs(expected).max(initial=0.0)))
            got = narrow[name].astype(np.float64)
            np.testing.assert_allclose(got, expected, rtol=0.3, atol=0.3 * size)


@pytest.mark.parametrize(
    "one", every(4, [one for one in ROWS if len(wanted_names(one, operands_of(one))) > 1]), ids=str
)
def test_a_gradient_alone_equals_the_one_among_others(one: Case) -> None:
    together, _, _ = gradients(one)
    for name, expected in together.items():
        alone, _, _ = gradients(one, [name])
        assert list(alone) == [name]
        np.testing.assert_allclose(alone[name], expected, rtol=1e-12, atol=1e-12)


def test_every_operator_with_a_gradient_has_a_case_and_no_other() -> None:
    assert {d.name for d in operators() if d.gradient} == {one.op for one in ROWS}
