"""Failures in the middle of what a device runs: before the n-th kernel call, copy or transfer.

Planted where executors and memory spaces prepare these calls, so that devices run them as ever.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest

from stitch.memory import SpaceMemory
from stitch.memory.conversion import CopyKernel
from stitch.planner import Plan
from stitch.program import Array
from stitch.runtime import RuntimeDevice
from stitch.runtime.executors import BoundProgram, PreparedProgram, Workspace
from stitch.runtime.executors.host import NumpyExecutor

Call = Callable[[], object]


class Planted(Exception):
    """What a fuse raises."""


class Fuse:
    """Counts what is about to happen; raises when it has burnt down."""

    #: It changes nothing, so a run that overwrites values may call it again.
    is_repeatable = True

    def __init__(self) -> None:
        self.left: int | None = None
        self.count = 0
        #: Of the parts counted, those inside a move.
        self.transfers = 0
        #: What happens where it has burnt down.
        self.act: Callable[[], object] = _fail

    def __call__(self, *_: object) -> None:
        """One part further."""
        self.count += 1
        if self.left is not None:
            self.left -= 1
            if self.left < 0:
                self.left = None
                self.act()


def _fail() -> None:
    raise Planted("planted")


@dataclass(frozen=True, slots=True)
class _Mine:
    mines: Mines
    number: int
    is_repeatable = True

    def __call__(self) -> None:
        if self.number in self.mines.at:
            self.mines.at.discard(self.number)
            raise Planted("planted")


class Mines:
    """What raises before some of the calls of programs and conversions, each of which has its
    number: the same ones on whatever thread they are made."""

    def __init__(self) -> None:
        self.at: set[int] = set()
        self.count = 0

    def _number(self) -> Call:
        self.count += 1
        return _Mine(self, self.count - 1)

    def lay(self, patch: pytest.MonkeyPatch) -> None:
        """All calls that are bound from now on are numbered."""
        _between_calls(patch, self._number)


def lay(patch: pytest.MonkeyPatch, fuse: Fuse) -> list[Plan]:
    """All devices burn the fuse from now on; gives the plans that they bind, as they bind them."""
    _between_calls(patch, lambda: fuse)
    moves, begin, plans = SpaceMemory.moves, RuntimeDevice.__init__, list[Plan]()

    def moving(self: SpaceMemory, *arguments: Any) -> list[Call]:
        first, *others = moves(self, *arguments)

        def burning() -> None:
            fuse.transfers += 1
            fuse()
            first()

        return [burning, *others]

    def opened(self: RuntimeDevice, *arguments: Any, **options: Any) -> None:
        begin(self, *arguments, **options)
        self.on_plan(plans.append)

    patch.setattr(SpaceMemory, "moves", moving)
    patch.setattr(RuntimeDevice, "__init__", opened)
    return plans


def _between_calls(patch: pytest.MonkeyPatch, make: Callable[[], Call]) -> None:
    """Put calls before each call of a program of the NumPy executor, behind its last, and before
    each of a conversion."""
    prepare, calls = NumpyExecutor.prepare, CopyKernel.calls

    def prepared(self: NumpyExecutor, *arguments: Any, **options: Any) -> PreparedProgram:
        return _Prepared(prepare(self, *arguments, **options), make)

    def converting(self: CopyKernel, *arguments: Any) -> tuple[Call, ...]:
        return tuple(each for call in calls(self, *arguments) for each in (make(), call))

    patch.setattr(NumpyExecutor, "prepare", prepared)
    patch.setattr(CopyKernel, "calls", converting)


class _Prepared(PreparedProgram):
    def __init__(self, prepared: PreparedProgram, make: Callable[[], Call]) -> None:
        self._prepared, self._make = prepared, make

    def bind(
        self, inputs: tuple[Array, ...], outputs: tuple[Array, ...], scratch: Array | None
    ) -> BoundProgram:
        return self._with_calls(self._prepared.bind(inputs, outputs, scratch))

    def on_thread(self, workspace: Workspace) -> PreparedProgram:
        return _Prepared(self._prepared.on_thread(workspace), self._make)

    def _with_calls(self, bound: BoundProgram) -> BoundProgram:
        others = bound.one_by_one
        return replace(
            bound,
            steps=(*(each for step in bound.steps for each in (self._make(), step)), self._make()),
            operations=tuple((o, 2 * first, 2 * stop) for o, first, stop in bound.operations),
            one_by_one=None if others is None else partial(self._again, others),
        )

    def _again(self, others: Callable[[], BoundProgram]) -> BoundProgram:
        return self._with_calls(others())
