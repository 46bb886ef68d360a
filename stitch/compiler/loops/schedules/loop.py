"""What a schedule is told of a loop, and what it tells: whether it can be, what it costs, how it is
written."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from stitch import ops
from stitch.compiler.loops.loop_costs import LoopCosts
from stitch.program import Body, Operation, ScanForm


@dataclass(frozen=True, slots=True)
class Loop:
    """A scan; `fixed` are the inputs of its body that are constants, `copies` is how often it is
    written, since loops around it are written out."""

    body: Body
    form: ScanForm
    fixed: tuple[int, ...] = ()
    copies: int = 1


@dataclass(frozen=True, slots=True)
class WrittenLoop:
    """The results of a loop, and the operators in it that have no batching rule."""

    results: tuple[Any, ...]
    without_rule: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Candidate:
    """A way in which a loop may run: the seconds that this is estimated to take, what writes it to
    a builder, for operands, and how many rounds are one, where that is a choice."""

    seconds: float
    write: Callable[[Any, Sequence[Any]], WrittenLoop]
    lanes: int = 0


class Surroundings(Protocol):
    """The graph that a loop is part of, on the way from one without schedules to one with them."""

    @property
    def estimate(self) -> LoopCosts:
        """What bodies cost, by the executor that is being asked."""

    @property
    def bodies(self) -> Sequence[Body]:
        """The bodies that operations carry."""

    def written(self, operation: Operation, context: ops.BatchingContext) -> Sequence[Any]:
        """An operation with a body, or without a batching rule, for the lanes of a context."""

    def least_seconds(self, loop: Loop) -> float:
        """What a loop costs that is scheduled as it will be."""

    def copied(self, times: int) -> AbstractContextManager[None]:
        """What is written meanwhile is written so many times."""
