"""What all ways have in common: a function over nests with its inputs, and what a way is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from stitch.fractal import FractalTensor
from stitch.program import Array

#: Of results: relative, and absolute to the greatest number that is expected.
TOLERANCE = 2e-4
#: Computes once; what it gives is ready, and its numbers can be read.
Run = Callable[[], Any]


class NotAvailableError(Exception):
    """A way is there, but something that it needs is missing; the text says what."""


@dataclass(frozen=True, slots=True, eq=False)
class Peer:
    """What would be run instead: `make` prepares it, with all that it imports."""

    name: str
    make: Callable[[], Run]


@dataclass(frozen=True, slots=True)
class RatioGoal:
    """The most that best of ours may take of a peer's time."""

    name: str
    peer: str
    most: float


@dataclass(frozen=True, slots=True, eq=False)
class Case:
    """A network over nests, its arguments, and the peers that compute the same.

    `small`: another one of few elements, which runs one operation after the other as well;
    `too_slow`: schedules that are not measured by name.
    """

    name: str
    text: str
    network: Callable[..., Any]
    given: tuple[Any, ...]
    peers: tuple[Peer, ...] = ()
    goals: tuple[RatioGoal, ...] = ()
    small: Case | None = None
    too_slow: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Way:
    """One way to run a case; `note` says how its loops run."""

    name: str
    side: str
    run: Run
    note: str = ""


@dataclass(frozen=True, slots=True)
class Absent:
    """A way that cannot be had here, and why."""

    name: str
    reason: str


def numbers(result: Any) -> Array:
    """All numbers of a result, in order: of nests, tensors of any kind, several of them."""
    return np.concatenate([np.asarray(part).reshape(-1) for part in _parts(result)])


def _parts(result: Any) -> Iterator[Any]:
    if isinstance(result, tuple | list):
        for each in result:
            yield from _parts(each)
    elif isinstance(result, FractalTensor):
        yield result.leaves()
    elif isinstance(result, np.ndarray):
        yield result
    else:
        yield result.numpy()


def check_alike(name: str, found: Array, expected: Array) -> None:
    """Raise `AssertionError`, naming the way, unless two results are the same within rounding."""
    greatest = float(np.abs(expected).max(initial=0.0))
    np.testing.assert_allclose(
        found, expected, rtol=TOLERANCE, atol=TOLERANCE * greatest, err_msg=name
    )


def reason_of(error: BaseException) -> str:
    """Why a way cannot be had, on one line."""
    if isinstance(error, ModuleNotFoundError):
        return f"not installed ({error.name})"
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
