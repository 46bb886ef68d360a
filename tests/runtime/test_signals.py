"""Real signals at random times of calls, pipelines, graphs and trainings: a device that was
interrupted works on, or says that it is inconsistent; one that is used or closed by a signal
handler is right or refuses."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest

from tests.support.grids import every
from tests.support.run_seed import SEED
from tests.support.signals import WORKS, Work, interrupted, visited


def check_interrupts(kind: type[Work], count: int, seed: int) -> Counter[str]:
    """Interrupt a work; at least 99 % of the devices work on."""
    seen = interrupted(kind, count, Random(seed))
    print(f"{kind.__name__}, seed {seed}: {dict(seen)}")
    assert seen["works on"] + seen["inconsistent"] == count
    assert seen["works on"] >= 0.99 * count - 1
    return seen


def names(kind: object) -> str | None:
    return kind.__name__ if isinstance(kind, type) else None


@pytest.mark.parametrize("kind", every(3, WORKS), ids=names)
def test_an_interrupted_device_works_on_or_says_that_it_is_inconsistent(kind: type[Work]) -> None:
    check_interrupts(kind, 12, 0)


@pytest.mark.campaign("injection")
@pytest.mark.parametrize("kind", WORKS, ids=names)
def test_many_interrupted_devices_work_on_or_say_that_they_are_inconsistent(
    kind: type[Work],
) -> None:
    assert check_interrupts(kind, WORKS[kind], SEED)["raised"] > 0


@pytest.mark.parametrize("closes", [False, True], ids=["uses", "closes"])
def test_a_signal_handler_that_uses_or_closes_the_device_leaves_nothing_broken(
    closes: bool,
) -> None:
    for kind in list(WORKS)[1:5]:
        visited(kind, 8, Random(0), closes=closes)


@pytest.mark.campaign("injection")
@pytest.mark.parametrize("closes", [False, True], ids=["uses", "closes"])
@pytest.mark.parametrize("kind", WORKS, ids=names)
def test_signal_handlers_that_use_or_close_the_device_leave_nothing_broken(
    kind: type[Work], closes: bool
) -> None:
    visited(kind, WORKS[kind] // (100 if closes else 20), Random(SEED), closes=closes)
