"""Errors of functions over nests: the same in both modes, with the place, what was wanted and what
was got."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from stitch import fractal as ops
from stitch.errors import UsageError
from stitch.fractal import FractalTensor
from stitch.fractal.modes import MODES

XS = FractalTensor([1.0, 2.0, 3.0])
RAGGED = FractalTensor([[1.0], [2.0, 3.0]])
#: What is called, and what its error says.
WRONG: dict[str, tuple[Callable[[], Any], tuple[str, ...]]] = {
    "shape": (
        lambda: ops.scan(lambda s, x: ops.stack(FractalTensor([s, x])), XS),
        ("shape or type of its state", "round 1, element 1", "float32[]", "float32[2]"),
    ),
    "shape from the right": (
        lambda: ops.scanr(lambda s, x: np.reshape(s, (1,)), XS, 0.0),
        ("shape or type of its state", "round 0, element 2", "float32[]", "float32[1]"),
    ),
    "type": (
        lambda: ops.fold(lambda s, x: s.astype(np.float64), XS, 0.0),
        ("shape or type of its state", "round 0, element 0", "float32[]", "float64[]"),
    ),
    "depth": (
        lambda: ops.fold(lambda s, x: FractalTensor([x]), XS, 0.0),
        ("shape or type of its state", "round 0, element 0", "depth 1 over float32[]"),
    ),
    "states": (
        lambda: ops.scan(lambda s, x: s[0], XS, (0.0, 1.0)),
        ("shape or type of its state", "round 0, element 0", "(float32[], float32[])"),
    ),
    "a later round": (
        lambda: ops.scan(lambda s, r: s if len(r) == 1 else r, RAGGED, 0.0),
        ("shape or type of its state", "round 1, element 1", "depth 1"),
    ),
    "depths": (
        lambda: ops.map(lambda r: r[0] if len(r) == 1 else r, RAGGED),
        ("different", "element 1", "float32[], as for element 0", "depth 1 over float32[]"),
    ),
    "shapes": (
        lambda: ops.map(ops.stack, RAGGED),
        ("different", "element 1", "float32[1], as for element 0", "float32[2]"),
    ),
    "as many results": (
        lambda: ops.map(lambda r: (r[0],) * len(r), RAGGED),
        ("different", "element 1", "(float32[]), as for", "(float32[], float32[])"),
    ),
    "nothing": (
        lambda: ops.map(lambda x: None, XS), ("function of map", "NoneType", "return"),
    ),
    "text": (lambda: ops.scan(lambda s, x: "a", XS), ("function of scanl", "str: 'a'")),
    "a number as predicate": (
        lambda: ops.filter(lambda x: x, XS), ("one bool", "element 0", "float32[]", "x > 0"),
    ),
    "several bools": (
        lambda: ops.filter(lambda x: np.reshape(x > 0, (1,)) & np.ones(2, bool), XS),
        ("one bool", "element 0", "bool[2]"),
    ),
    "no function": (lambda: ops.map(3, XS), ("must be a function", "int: 3")),  # type: ignore[arg-type]
}  # fmt: skip


@pytest.fixture(params=MODES)
def mode(request: pytest.FixtureRequest) -> Iterator[str]:
    with ops.mode(request.param):
        yield request.param


@pytest.mark.parametrize("case", WRONG)
@pytest.mark.usefixtures("mode")
def test_errors_say_what_where_and_what_was_wanted(case: str) -> None:
    call, words = WRONG[case]
    with pytest.raises(UsageError) as raised:
        call()
    for word in words:
        assert word in str(raised.value), str(raised.value)
    assert ops.map(lambda x: x + 1, XS).tolist() == [2.0, 3.0, 4.0]
