"""Executors agree on values at the edges of their types, but for what a table lists, and only that.

Each operator is drawn in every class of values, and computed by NumPy's kernels, which the others
are compared with, by ONNX Runtime's, and by PyTorch's; and as `auto` and `torch` have it computed.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from functools import cache

import numpy as np
import pytest

from stitch.errors import CompileError
from stitch.ops import operators
from stitch.program import SCAN
from stitch.runtime.executors import Workspace, make_executor
from stitch.runtime.executors.host.numpy_executor import PreparedKernels
from tests.support.executors.differences import PAGE, lines
from tests.support.executors.named_prices import ATEN
from tests.support.grids import every
from tests.support.operators.one_operation import MACHINE, Binding, OneOperation, Row, one_operation
from tests.support.operators.special_values import (
    CLASSES,
    WAYS,
    differences,
    draws,
    in_other_integers,
    rows,
)

#: Whose kernels differ from NumPy's.
KERNELS = ("onnxruntime", "torch")
#: By executor that chooses, whose kernels it may choose beside NumPy's.
CHOOSES = {"auto": ("onnxruntime",), "torch": KERNELS}
EXECUTORS = {name: make_executor(name) for name in ("numpy", "onnxruntime", *CHOOSES)}
#: Draws of each class and kind of a row; more where few of them differ.
TIMES = 2
SELDOM = {
    "Conv": 8, "DeformConv": 8, "Det": 16, "Gemm": 8, "GlobalAveragePool": 8, "GridSample": 4,
    "GroupNormalization": 24, "LayerNormalizationGradient": 8, "MaxPoolGradient": 40,
    "QLinearConv": 32, "RNN": 8, "ReduceLogSum": 4,
    "ReduceProd": 8, "SoftmaxGradient": 48,
}  # fmt: skip
#: Kernels, class of values, and way in which results differ.
Difference = tuple[str, str, str]
#: What was drawn and computed. It is shown of few: thousands of draws differ as the table says.
Drawn = tuple[object, ...]


@cache
def rows_by_operator() -> dict[str, list[Row]]:
    found: dict[str, list[Row]] = defaultdict(list)
    for row in rows():
        found[row.op].append(row)
    return found


def said() -> list[tuple[str, Difference, bool]]:
    """Operator and difference of every line, as often as they are said, and whether every
    processor shows it."""
    return [
        (op, (kernels, name, line.way), kernels not in line.optional)
        for line in lines()
        for op in line.operators
        for kernels in line.kernels
        for name in line.classes
    ]


@cache
def listed() -> dict[str, dict[Difference, bool]]:
    """What the table lists, by operator: whether every processor shows it."""
    found: dict[str, dict[Difference, bool]] = defaultdict(dict)
    for op, difference, is_everywhere in said():
        found[op][difference] = is_everywhere
    return found


def by_kernels(one: OneOperation) -> dict[str, Binding]:
    """The operation by each one's kernels, where they have it."""
    found = {}
    try:
        prepared = EXECUTORS["onnxruntime"].prepare(one.program, MACHINE)
        found["onnxruntime"] = Binding(prepared, one.program)
    except CompileError:
        pass
    if ATEN.price(one.program, one.operation, 1, 1) < math.inf:
        chosen = PreparedKernels(one.program, MACHINE, Workspace(), (), ATEN, [0])
        found["torch"] = Binding(chosen, one.program)
    return found


def differing(row: Row, times: int, seed: int) -> Iterator[tuple[Difference, Drawn]]:
    """Every difference in some draws of a row, and what was drawn."""
    one = one_operation(row, open_=True)
    usual = Binding(EXECUTORS["numpy"].prepare(one.program, MACHINE), one.program)
    others = by_kernels(one)
    choosing = {
        name: Binding(EXECUTORS[name].prepare(one.program, MACHINE), one.program)
        for name in CHOOSES
    }
    for name, operands in draws(row, one, np.random.default_rng(seed), times):
        wanted = usual.outcome(operands)
        for kernels, binding in others.items():
            for way in differences(name, wanted, binding.outcome(operands)):
                yield (kernels, name, way), (row, operands, wanted)
        for executor, binding in choosing.items():
            made = binding.outcome(operands)
            for way in differences(name, wanted, made):
                ways = {(kernels, name, way) for kernels in CHOOSES[executor]}
                if not ways & listed()[row.op].keys():
                    yield (executor, name, way), (row, operands, wanted, made)


def found_of(op: str, seed: int, more: int = 1) -> dict[Difference, Drawn]:
    """The differences of all rows of an operator, each with a draw that shows it."""
    found: dict[Difference, Drawn] = {}
    for index, row in enumerate(rows_by_operator()[op]):
        times = SELDOM.get(op, TIMES) * more
        for difference, drawn in differing(row, times, seed + index):
            found.setdefault(difference, drawn)
    return found


def drawable(row: Row) -> bool:
    """Whether a row is one that the operator takes."""
    try:
        one_operation(row, open_=True)
    except CompileError:
        return False
    return True


def check_listed(op: str, found: dict[Difference, Drawn]) -> None:
    unknown = [
        "\n".join(map(str, (f"{d}:", *drawn)))
        for d, drawn in found.items()
        if d not in listed()[op]
    ]
    assert not unknown, f"{op} differs otherwise than {PAGE.name} says: " + "\n".join(unknown[:4])


def test_every_operator_is_drawn() -> None:
    # What a scan computes is what its body does.
    assert {*rows_by_operator(), SCAN[1]} == {definition.name for definition in operators()}


@pytest.mark.parametrize("op", every(8, sorted(rows_by_operator())))
def test_an_operator_differs_where_the_table_says_and_nowhere_else(op: str) -> None:
    found = found_of(op, 1)
    check_listed(op, found)
    dead = {each for each, is_everywhere in listed()[op].items() if is_everywhere} - set(found)
    assert not dead, f"{op} no longer differs in what {PAGE.name} lists: {sorted(dead)}"


@pytest.mark.campaign("executors")
@pytest.mark.parametrize("op", sorted(rows_by_operator()))
def test_in_many_draws_an_operator_differs_only_where_the_table_says(op: str) -> None:
    check_listed(op, found_of(op, 1_000_003, 5))


@pytest.mark.campaign("executors")
@pytest.mark.parametrize("op", sorted(rows_by_operator()))
def test_whole_numbers_of_every_type_differ_only_where_the_table_says(op: str) -> None:
    for row in rows_by_operator()[op]:
        for other in filter(drawable, in_other_integers(row)):
            check_listed(op, dict(differing(other, 2, 1)))


def test_the_table_speaks_of_what_there_is_and_says_why() -> None:
    known = {definition.name for definition in operators()}
    for line in lines():
        assert set(line.operators) <= known, line
        assert set(line.kernels) <= set(KERNELS), line
        assert set(line.classes) <= set(CLASSES), line
        assert line.way in WAYS, line
        assert line.reason, line
    assert len(said()) == len({said_of[:2] for said_of in said()})
