"""Scans for tests: functions of one round that run on tensors and on arrays alike, and what they
are given; the loop in plain NumPy that says what they come to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from stitch.graph import ComputationGraph, ComputationGraphBuilder, scan
from stitch.program import Array, DataType

#: `(states, sequences, f, count, taken_backward, given_backward)` to last states and what is given.
Loop = Callable[..., tuple[Sequence[Any], Sequence[Any]]]
#: `(loop, states, elements, shared inputs)` of one round to states and what it gives.
Round = Callable[[Loop, Sequence[Any], Sequence[Any], Sequence[Any]], tuple[Any, Any]]


@dataclass(frozen=True, slots=True)
class ScanCase:
    """One scan: `drawn` gives its states, sequences and shared inputs for a number of rounds."""

    name: str
    round: Round
    drawn: Callable[[np.random.Generator, int], tuple[list[Array], list[Array], list[Array]]]
    taken_backward: tuple[bool, ...] = ()
    given_backward: tuple[bool, ...] = ()
    #: Relative, where values are not whole numbers.
    tolerance: float = 1e-5
    #: Whether what is shared are constants of the graph around, not inputs.
    is_fixed: bool = False


def graph_of(case: ScanCase, count: int, prefix: str = "") -> ComputationGraph:
    """The case as a graph; its inputs are states, sequences and what is shared."""
    states, sequences, shared = given_to(case, count)
    b = ComputationGraphBuilder(f"{prefix}{case.name}")
    tensors = [
        b.parameter(f"{side}{i}", array)
        if case.is_fixed and side == "shared"
        else b.input(f"{prefix}{side}{i}", array.shape, DataType.from_dtype(array.dtype))
        for side, arrays in (("state", states), ("sequence", sequences), ("shared", shared))
        for i, array in enumerate(arrays)
    ]

    def loop(
        states: Any, sequences: Any, f: Any, count: int, taken: Any = (), given: Any = ()
    ) -> Any:
        return scan(
            b, f, states, sequences, count=count, taken_backward=taken, given_backward=given
        )

    last, given = results(case, loop, tensors, len(states), len(sequences), count)
    for name, side in (("last", last), ("given", given)):
        for i, tensor in enumerate(side):
            b.output(f"{prefix}{name}{i}", tensor)
    return b.build()


def results(
    case: ScanCase, loop: Loop, operands: Sequence[Any], states: int, sequences: int, count: int
) -> tuple[Sequence[Any], Sequence[Any]]:
    """Last states and what rounds gave, by either loop."""
    first, lists = operands[:states], operands[states : states + sequences]
    shared = operands[states + sequences :]

    def f(s: Sequence[Any], e: Sequence[Any]) -> tuple[Any, Any]:
        return case.round(loop, s, e, shared)

    return loop(first, lists, f, count, case.taken_backward, case.given_backward)


def given_to(case: ScanCase, count: int) -> tuple[list[Array], list[Array], list[Array]]:
    """States, sequences and shared inputs, the same in every call."""
    return case.drawn(np.random.default_rng(count), count)


def inputs_of(case: ScanCase, count: int) -> list[Array]:
    """What the graph of a case is called with."""
    states, sequences, shared = given_to(case, count)
    return [*states, *sequences, *([] if case.is_fixed else shared)]


def expected_of(case: ScanCase, count: int) -> list[Array]:
    """What the loop in NumPy gives, for at least one round."""
    states, sequences, shared = given_to(case, count)
    operands = [*states, *sequences, *shared]
    with np.errstate(all="ignore"):
        last, given = results(case, plain_loop, operands, len(states), len(sequences), count)
    return [*last, *given]


def plain_loop(
    states: Sequence[Any],
    sequences: Sequence[Any],
    f: Callable[[Any, Any], tuple[Any, Any]],
    count: int,
    taken: Sequence[bool] = (),
    given: Sequence[bool] = (),
) -> tuple[list[Array], list[Array]]:
    """Rounds one after the other, on arrays."""
    rows: list[Sequence[Array]] = []
    backward = taken or (False,) * len(sequences)
    for number in range(count):
        places = [count - 1 - number if back else number for back in backward]
        states, made = f(states, [s[p] for s, p in zip(sequences, places, strict=True)])
        rows.append([np.array(each) for each in made])
    collected = [np.stack(column) for column in zip(*rows, strict=True)]
    order = given or (False,) * len(collected)
    return [np.asarray(s) for s in states], [
        c[::-1] if back else c for c, back in zip(collected, order, strict=True)
    ]


# Rounds --------------------------------------------------------------------------------------

HIDDEN = 6
_RNG = np.random.default_rng(7)
#: More than is copied into bodies, and less.
WIDE = _RNG.standard_normal((64, 4 * HIDDEN), np.float32) * np.float32(0.1)
NARROW = _RNG.standard_normal((HIDDEN, 4 * HIDDEN), np.float32) * np.float32(0.3)


def _sigmoid(x: Any) -> Any:
    return 1.0 / (1.0 + np.exp(-x))


def _lstm(_: Loop, s: Any, e: Any, __: Any) -> Any:
    gates = e[0] @ WIDE + s[0] @ NARROW
    i, o, f, c = (gates[:, k * HIDDEN : (k + 1) * HIDDEN] for k in range(4))
    cell = _sigmoid(f) * s[1] + _sigmoid(i) * np.tanh(c)
    hidden = _sigmoid(o) * np.tanh(cell)
    return [hidden, cell], [hidden]


def _weights(_: Loop, s: Any, e: Any, shared: Any) -> Any:
    after = np.tanh(e[0] @ (shared[0] * 0.125) + s[0] @ shared[1])
    return [after], [after @ shared[1]]


def _sums(_: Loop, s: Any, e: Any, __: Any) -> Any:
    after = s[0] + e[0]
    return [after], [after]


def _two(_: Loop, s: Any, e: Any, __: Any) -> Any:
    return [s[0] * 0.5 + e[0] - e[1]], [s[0] + e[1], e[0] * e[1]]


def _several(_: Loop, s: Any, e: Any, __: Any) -> Any:
    # Two change places; whole numbers beside them.
    return [s[1], s[0] + e[0], s[2] * 3 + 1], [s[2], s[0]]


def _nested(loop: Loop, s: Any, e: Any, shared: Any) -> Any:
    def inner(t: Any, x: Any) -> Any:
        after = t[0] * 0.9 + x[0] + shared[0]
        return [after], [after * s[0]]

    last, rows = loop([s[0]], [e[0]], inner, 3)
    return [last[0] * 0.25], [rows[0], last[0]]


def _map(_: Loop, s: Any, e: Any, shared: Any) -> Any:
    return [], [np.tanh(e[0] @ shared[0]), e[0] + e[0]]


def _power(_: Loop, s: Any, e: Any, shared: Any) -> Any:
    after = np.tanh(shared[0] @ s[0])
    return [after], [after + 1.0]


def _no_collection(_: Loop, s: Any, e: Any, shared: Any) -> Any:
    return [s[0] * shared[0] + shared[0]], []


def _weighted(_: Loop, s: Any, e: Any, shared: Any) -> Any:
    scores = e[0] * shared[0] - np.max(e[0])
    weights = np.exp(scores)
    return [s[0] + weights / np.sum(weights)], [weights]


def _random(*shapes: tuple[int, ...], dtype: Any = np.float32) -> Any:
    """A drawer: shapes with -1 for the number of rounds; states, then sequences, then shared."""

    def one(rng: np.random.Generator, shape: tuple[int, ...], count: int) -> Array:
        numbers = rng.standard_normal(tuple(count if n == -1 else n for n in shape))
        return np.asarray(numbers.astype(np.float32).astype(dtype))

    def drawn(sides: tuple[int, int]) -> Any:
        def draw(
            rng: np.random.Generator, count: int
        ) -> tuple[list[Array], list[Array], list[Array]]:
            arrays = [one(rng, shape, count) for shape in shapes]
            a, b = sides
            return arrays[:a], arrays[a : a + b], arrays[a + b :]

        return draw

    return drawn


def _with_whole(rng: np.random.Generator, count: int) -> Any:
    states, sequences, shared = _random((4,), (4,), (-1, 4))((2, 1))(rng, count)
    return [*states, np.array([1, -2], np.int64)], sequences, shared


def _integers(rng: np.random.Generator, count: int) -> Any:
    return [np.array([5, 1 << 40])], [rng.integers(-9, 9, (count, 2))], []


BFLOAT16 = DataType.BFLOAT16.dtype
CASES = (
    ScanCase("lstm", _lstm, _random((2, HIDDEN), (2, HIDDEN), (-1, 2, 64))((2, 1))),
    ScanCase("weights", _weights,
             _random((2, HIDDEN), (-1, 2, 300), (300, HIDDEN), (HIDDEN, HIDDEN))((1, 1)),
             is_fixed=True),
    ScanCase("sums", _sums, _random((4,), (-1, 4))((1, 1)), given_backward=(True,)),
    ScanCase("two_ways", _two, _random((3, 2), (-1, 3, 2), (-1, 3, 2))((1, 2)),
             (False, True), (True, False)),
    ScanCase("several", _several, _with_whole),
    ScanCase("nested", _nested, _random((2,), (-1, 3, 2), (2,))((1, 1))),
    ScanCase("map", _map, _random((-1, 2, 5), (5, 3))((0, 1)), (True,)),
    ScanCase("power", _power, _random((5,), (5, 5))((1, 0))),
    ScanCase("factor", _no_collection, _random((3,), (3,))((1, 0))),
    ScanCase("scalars", _two, _random((), (-1,), (-1,))((1, 2)), (True, False)),
    ScanCase("weighted", _weighted, _random((4,), (-1, 4), (4,))((1, 1))),
    ScanCase("bfloat16", _two, _random((8,), (-1, 8), (-1, 8), dtype=BFLOAT16)((1, 2)),
             tolerance=2e-2),
    ScanCase("float16", _sums, _random((8,), (-1, 8), dtype=np.float16)((1, 1)), tolerance=2e-3),
    ScanCase("int64", _sums, _integers, (True,)),
)  # fmt: skip
