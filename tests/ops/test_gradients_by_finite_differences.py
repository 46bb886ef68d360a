"""Every operator's gradient equals central finite differences of its own kernel."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from stitch.ops import operators
from stitch.program import DataType
from stitch.testing import check_gradients
from tests.support.gradients.running import (
    Case,
    gradients,
    graph_of,
    operands_of,
    wanted_names,
)
from tests.support.gradients.tables import ROWS
from tests.support.grids import every


@pytest.mark.parametrize("one", ROWS, ids=str)
def test_gradients_equal_finite_differences(one: Case) -> None:
    operands = operands_of(one)
    graph, feeds = graph_of(one, operands)
    check_gradients(graph, feeds, wanted_names(one, operands))


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
