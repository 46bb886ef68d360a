"""Running products of matrices over lists of different lengths, with peers; and how time grows with
the number of lists (onnxruntime#23024 reports that ONNX Runtime's grows by its square).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np

import stitch
from fractal_ways.cases import (
    Case,
    NotAvailableError,
    Peer,
    Run,
    check_alike,
    numbers,
    reason_of,
)
from fractal_ways.measuring import interleaved
from fractal_ways.ours import MACHINE
from fractal_ways.recurrent_cases import SMALL, eager_goals, loop_peers, normal
from fractal_ways.results import Figure
from stitch import fractal as ops
from stitch.fractal import FractalTensor
from stitch.program import Array

#: Rows of a matrix, as in the issue.
SIZE = 3
#: So many times the lists; the time that may take, relative: linear, and some noise.
MORE_LISTS, LISTS_GOAL = 4, 4.4
MAPPED = "onnxruntime, SequenceMap of a Scan"


def matrices_of(lists: int, length: int) -> list[Array]:
    """Lists of 1 to `length` matrices [3, 3]."""
    lengths = np.random.default_rng(0).integers(1, length + 1, lists).tolist()
    return [normal(n, SIZE, SIZE, scale=SIZE**-0.5, seed=i) for i, n in enumerate(lengths)]


def network(nest: Any) -> Any:
    """All products of each list from the left."""
    identity = np.eye(SIZE, dtype=np.float32)

    def products(some: Any) -> Any:
        return ops.scan(lambda product, matrix: product @ matrix, some, identity)

    return ops.map(products, nest)


def nest_of(matrices: list[Array]) -> FractalTensor:
    """The lists as a nest."""
    return FractalTensor([list(each) for each in matrices])


def ragged_products(lists: int, length: int, compiled: bool, small: bool = True) -> Case:
    """Lists of matrices; products of each."""
    matrices = matrices_of(lists, length)

    def of_onnx(model: str) -> Run:
        from fractal_ways import onnx_peers

        return onnx_peers.ragged_products(model, matrices)

    return Case(
        "ragged products", f"{lists} lists of 1 to {length} matrices {SIZE}x{SIZE}",
        network, (nest_of(matrices),),
        (
            *loop_peers("ragged_products", matrices, compiled=compiled),
            Peer("onnxruntime, a Scan for each list", lambda: of_onnx("scans")),
            Peer(MAPPED, lambda: of_onnx("sequence map")),
        ),
        eager_goals(), ragged_products(3, SMALL[1], False, False) if small else None,
    )  # fmt: skip


def growth(lists: int, length: int, rounds: int) -> Iterator[Figure]:
    """The time of more lists over that of these, of ours on NumPy and of the peer that maps."""
    few, many = (matrices_of(n, length) for n in (lists, MORE_LISTS * lists))
    with ExitStack() as stack:
        runs = []
        for matrices in (few, many):
            nest = ops.compile(network, nest_of(matrices), target=MACHINE)
            nest.on(stack.enter_context(stitch.open_device(MACHINE, executor="numpy")))
            runs.append(_run(nest, nest_of(matrices)))
        reason = ""
        try:
            from fractal_ways import onnx_peers

            mapped = [onnx_peers.ragged_products("sequence map", each) for each in (few, many)]
            for ours, theirs in zip(runs, mapped, strict=True):
                check_alike("ragged products", numbers(ours()), numbers(theirs()))
            runs += mapped
        except (ImportError, NotAvailableError) as error:
            reason = reason_of(error)
        spent = [each.processor for each in interleaved(runs, rounds)]
    name = f"{MORE_LISTS} times the lists, "
    yield Figure(f"{name}stitch numpy (LISTS_GOAL)", spent[1] / spent[0], "x", LISTS_GOAL)
    ratio = spent[3] / spent[2] if len(spent) == 4 else None
    yield Figure(f"{name}{MAPPED}", ratio, "x", None, reason)


def _run(nest: Any, given: FractalTensor) -> Run:
    return lambda: numbers(nest(given))
