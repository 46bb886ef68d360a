"""What all ways have in common: programs in the forms that they are built from, and what a way
is.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from stitch.program import Array

#: Ways of ONNX Runtime that goals are about.
BOUND, MERGED = "onnxruntime, a session each, bound", "onnxruntime, merged, bound"
#: Of a way's result: relative, and absolute to the greatest expected number.
FLOAT32_TOLERANCE = 1e-4


class NotAvailableError(Exception):
    """A peer is installed, but something that it needs is missing; the text says what."""


class Program(ABC):
    """One program: takes one array and gives one. Forms that need a package import it when asked.

    Every form may raise `ModuleNotFoundError`, or `NotAvailableError` where there is none.
    """

    @abstractmethod
    def stitch_source(self, name: str) -> tuple[Any, tuple[Any, ...]]:
        """What `stitch.compile` takes: a module and its example inputs."""

    @abstractmethod
    def torch_module(self) -> Any:
        """A module in evaluation mode."""

    @abstractmethod
    def onnx_model(self) -> bytes:
        """A model with one input and one output, as it would be exported."""

    @abstractmethod
    def mlir(self, name: str) -> tuple[str, str, str]:
        """The text of a module of this name, its dialect (IREE's word), its function."""


@dataclass(frozen=True, slots=True, eq=False)
class Case:
    """Programs in a row, all of them as one, an input, the expected result."""

    programs: tuple[Program, ...]
    merged: Program
    x: Array
    expected: Array

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


@dataclass(frozen=True, slots=True)
class Goal:
    """The most that the best way of a side of ours (`ours`, `linked`, `calls`) / a peer's way may
    be; `more_us`: beside that many microseconds."""

    side: str
    peer_way: str
    most: float
    more_us: float = 0.0


@dataclass(frozen=True, slots=True)
class Subject:
    """Something to measure: `goal` is the most that best of ours / best peer may be.

    `stitched_only`: the goal is about peers that run the same programs one by one, and not about
    one that was given all of them as one. `more_goals`: those of programs that were linked, or are
    called one by one. `without`: peers that are left out, each with the reason.
    """

    name: str
    text: str
    goal: float
    rounds: int
    make: Callable[[], Case]
    stitched_only: bool = False
    more_goals: tuple[Goal, ...] = ()
    without: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class Way:
    """One way to run a case: `run(given)` is timed; `result` makes an array of what it gives.

    `stitched`: it runs the programs as they are; false for one that was given them as one.
    """

    name: str
    run: Callable[[Any], Any]
    given: Any
    result: Callable[[Any], Array] = np.asarray
    tolerance: float = FLOAT32_TOLERANCE
    stitched: bool = True


@dataclass(frozen=True, slots=True)
class Absent:
    """A way that cannot be had here, and why, where others of the same peer can."""

    name: str
    reason: str
