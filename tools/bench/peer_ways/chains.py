"""What all ways have in common: the chains, their numbers, and what a way is.

Comes in: a chain's widths. Goes out: a `Case` with random weights, an input and the result that
every way must give. Must not know any peer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from stitch.program import Array

Layer = tuple[Array, Array]
#: Of a way's result: relative, and absolute to the greatest expected number.
FLOAT32_TOLERANCE = 1e-4


class NotAvailableError(Exception):
    """A peer is installed, but something that it needs is missing; the text says what."""


@dataclass(frozen=True, slots=True)
class Chain:
    """Programs by the widths of their layers; each layer is one Gemm and one Relu."""

    name: str
    programs: tuple[tuple[int, ...], ...]
    batch: int
    #: The most that best of ours / best peer may be.
    goal: float
    rounds: int

    def text(self) -> str:
        """Widths of the programs, and the batch."""
        widths = " | ".join("-".join(map(str, widths)) for widths in self.programs)
        return f"{widths}, batch {self.batch}"


@dataclass(frozen=True, slots=True, eq=False)
class Case:
    """A chain with its numbers: weights [in, out] and biases [out], input [batch, in]."""

    chain: Chain
    programs: tuple[tuple[Layer, ...], ...]
    x: Array
    expected: Array

    @property
    def layers(self) -> tuple[Layer, ...]:
        """The layers of all programs in a row."""
        return tuple(layer for program in self.programs for layer in program)

    def check(self, way: Way) -> None:
        """Raise `AssertionError` unless a way's result is the expected one, three times over."""
        for _ in range(3):
            found = np.asarray(way.result(way.run(way.given)), np.float32)
            np.testing.assert_allclose(
                found,
                self.expected,
                rtol=way.tolerance,
                atol=way.tolerance * float(np.abs(self.expected).max()),
                err_msg=way.name,
            )


@dataclass(frozen=True, slots=True, eq=False)
class Way:
    """One way to run a chain: `run(given)` is timed; `result` makes an array of what it gives."""

    name: str
    run: Callable[[Any], Any]
    given: Any
    result: Callable[[Any], Array] = np.asarray
    tolerance: float = FLOAT32_TOLERANCE


def make_case(chain: Chain) -> Case:
    """Random numbers for a chain; the same ones every time."""
    random = np.random.default_rng(0)

    def layer(inner: int, outer: int) -> Layer:
        w = random.standard_normal((inner, outer), dtype=np.float32)
        # Keeps the values of every layer about as large as those of the one before.
        w *= np.float32(np.sqrt(2 / inner))
        return w, random.standard_normal(outer, dtype=np.float32)

    programs = tuple(tuple(layer(a, b) for a, b in pairwise(widths)) for widths in chain.programs)
    x = random.standard_normal((chain.batch, chain.programs[0][0]), dtype=np.float32)
    expected = x
    for w, b in (layer for program in programs for layer in program):
        expected = np.maximum(expected @ w + b, np.float32(0))
    return Case(chain, programs, x, expected)
