"""Failures in the middle of what a device runs: at the n-th call of a step, or of a transfer.

The steps stay those that the backend has bound.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from stitch.memory import SpaceMemory
from stitch.planner import Plan
from stitch.runtime.backends import BoundPlan, BoundStep, LocalBackend


class Planted(Exception):
    """What a fuse raises."""


class Fuse:
    """Counts what is about to happen; raises when it has burnt down."""

    def __init__(self) -> None:
        self.left: int | None = None
        self.count = 0
        #: Of the parts counted, those inside a move.
        self.transfers = 0

    def burn(self, *_: object) -> None:
        """One part further."""
        self.count += 1
        if self.left is not None:
            self.left -= 1
            if self.left < 0:
                self.left = None
                raise Planted("planted")


class Mines:
    """What raises before some of the calls of steps, each of which has its number: the same ones
    on whatever thread they are made."""

    def __init__(self) -> None:
        self.at: set[int] = set()
        self.count = 0

    def step_on(self, number: int) -> None:
        """A call comes; each mine explodes once."""
        if number in self.at:
            self.at.discard(number)
            raise Planted("planted")

    def _before(self, step: BoundStep) -> BoundStep:
        thunks: list[Callable[[], object]] = []
        for thunk in step.thunks:
            thunks += [partial(self.step_on, self.count), thunk]
            self.count += 1
        return replace(step, thunks=tuple(thunks))

    def lay(self, patch: pytest.MonkeyPatch) -> None:
        """All calls of plans that devices bind from now on are numbered."""
        bind = LocalBackend.bind

        def mined(backend: LocalBackend, *arguments: Any, **options: Any) -> BoundPlan:
            bound = bind(backend, *arguments, **options)
            return bound.with_steps({i: self._before(s) for i, s in enumerate(bound.steps)})

        patch.setattr(LocalBackend, "bind", mined)


def lay(patch: pytest.MonkeyPatch, fuse: Fuse) -> list[Plan]:
    """All devices burn the fuse from now on; gives the plans that they bind, as they bind them."""
    bind, mover = LocalBackend.bind, SpaceMemory.mover
    plans: list[Plan] = []

    def fused(self: LocalBackend, plan: Plan, *arguments: Any, **options: Any) -> BoundPlan:
        plans.append(plan)
        bound = bind(self, plan, *arguments, **options)
        return bound.with_steps({i: _fused(s, fuse) for i, s in enumerate(bound.steps)})

    def moving(self: SpaceMemory, *arguments: Any) -> Callable[[], object]:
        move = mover(self, *arguments)

        def burning() -> None:
            fuse.transfers += 1
            fuse.burn()
            move()

        return burning

    patch.setattr(LocalBackend, "bind", fused)
    patch.setattr(SpaceMemory, "mover", moving)
    return plans


def _fused(step: BoundStep, fuse: Fuse) -> BoundStep:
    return replace(step, thunks=_between(step.thunks, fuse))


def _between(thunks: Sequence[Callable[[], object]], fuse: Fuse) -> tuple[Any, ...]:
    return tuple(call for thunk in thunks for call in (fuse.burn, thunk))
