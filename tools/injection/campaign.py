"""Campaigns: one scenario, one fault, many places, each in a process that may hang or fall.

A process is made by a fork once everything is imported and warm, so every run begins alike. It goes
through its share of the places until one leaves something broken; then it ends, and another goes
on behind that place. Whatever hangs is ended by its number.
"""

from __future__ import annotations

import gc
import json
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from injection.faults import Fault, Place
from injection.model import (
    Case,
    Reference,
    is_inconsistent,
    reference_of,
    says_lost,
    what_closing_breaks,
    what_is_broken,
)

Scenario = Callable[[], Case]
#: The longest that one place may take, the preparation of its case included.
SECONDS_A_PLACE = 60.0
#: The longest that finding the places may take.
SECONDS_FOR_PLACES = 120.0


@dataclass
class Outcome:
    """What a campaign saw: places in all, places tried, broken ones, those where all is well but
    something that was held says that it was lost, and those where the device says that it is
    inconsistent and closes.

    Each broken one is the place, its callers behind it, and what is broken.
    """

    scenario: str
    fault: str
    places: int = 0
    tried: int = 0
    lost: int = 0
    inconsistent: int = 0
    broken: list[tuple[tuple[Place, ...], str]] = field(default_factory=list)


def run_campaign(
    name: str,
    scenario: Scenario,
    fault: Fault,
    *,
    every: int = 1,
    seconds: float = 60.0,
) -> Outcome:
    """Try every `every`-th place of a scenario; another thread may take `seconds` afterwards."""
    reference = _warm(scenario, fault)
    outcome = Outcome(name, fault.name)
    places = _places(name, scenario, fault)
    outcome.places = len(places)
    chosen = places[::every]
    while outcome.tried < len(chosen):
        rest, began = chosen[outcome.tried :], outcome.tried

        def child(tell: Callable[[Any], None], rest: Sequence[Place] = rest) -> None:
            _try_places(scenario, fault, rest, reference, seconds, tell)

        for message in _messages(child, SECONDS_A_PLACE):
            if outcome.tried == len(chosen):
                break  # Its end: a case for all of them is closed.
            told = message or {"broken": "the process hangs or falls"}
            outcome.lost += told.get("lost", False)
            outcome.inconsistent += told.get("inconsistent", False)
            if told["broken"] is not None:
                hit = tuple(Place(**place) for place in told.get("hit", ()))
                outcome.broken.append((hit or (chosen[outcome.tried],), told["broken"]))
            outcome.tried += 1
        if outcome.tried == began:
            raise RuntimeError(f"{name}: a process ended without a word")
    return outcome


def _places(name: str, scenario: Scenario, fault: Fault) -> list[Place]:
    """Every place, one for each number: what comes twice behind one instruction counts once."""

    def child(tell: Callable[[Any], None]) -> None:
        _tell_places(scenario, fault, tell)

    told = next(_messages(child, SECONDS_FOR_PLACES)) or {"error": "no answer"}
    if "error" in told:
        raise RuntimeError(f"{name}: the places could not be listed: {told['error']}")
    places = [Place(**place) for place in told["places"]]
    return list({place.number: place for place in reversed(places)}.values())[::-1]


def _warm(scenario: Scenario, fault: Fault) -> Reference:
    """Run unharmed, so that what is found or imported once is there in every process."""
    for _ in range(2):
        reference = reference_of(scenario, visits=fault.visits)
    gc.collect()
    gc.freeze()
    return reference


def _tell_places(scenario: Scenario, fault: Fault, tell: Callable[[Any], None]) -> None:
    for _ in range(2):  # The first run in a process may still find something out.
        case = scenario()
        gc.disable()
        places = fault.places(case.act)
        gc.enable()
        case.close()
        del case
        gc.collect()
    tell({"places": [asdict(place) for place in places]})


def _try_places(
    scenario: Scenario,
    fault: Fault,
    places: Sequence[Place],
    reference: Reference,
    seconds: float,
    tell: Callable[[Any], None],
) -> None:
    """Strike one place after the other until something is broken."""
    sys.unraisablehook = lambda what: None  # What a finalizer cannot raise is no failure.
    case: Case | None = None
    for place in places:
        case = case or scenario()
        fault.prepare(case, reference)
        gc.disable()
        error = fault.strike(case.act, place)
        gc.enable()
        broken = fault.broken
        if error is not None and not fault.is_expected(error):
            broken = f"{type(error).__name__} came out instead"
        del error
        if broken is None and not fault.has_closed:
            broken = what_is_broken(case, reference, seconds)
        is_over = fault.has_closed or not case.reusable
        if not fault.visits and is_inconsistent(broken):
            broken, inconsistent, is_over = None, True, True
        else:
            inconsistent = False
        lost = broken is None and not (fault.has_closed or inconsistent) and says_lost(case)
        if broken is None and is_over:
            broken = what_closing_breaks(case)
        hit = [asdict(place) for place in fault.hit]
        tell({"broken": broken, "lost": lost, "inconsistent": inconsistent, "hit": hit})
        if broken is not None:
            return
        if is_over:
            case = None
            gc.collect()
    if case is not None:
        case.close()


# Processes ----------------------------------------------------------------------------------------


def _messages(
    work: Callable[[Callable[[Any], None]], None], seconds: float
) -> Iterator[dict[str, Any] | None]:
    """What a forked process tells; a last None where it hangs or falls."""
    reader, writer = os.pipe()
    process = os.fork()
    if process == 0:
        os.close(reader)
        _be_child(work, writer)
    os.close(writer)
    try:
        while (told := _told(reader, seconds)) is not None:
            if told == "end":
                return
            yield told
        yield None
    finally:
        os.close(reader)
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)


def _told(reader: int, seconds: float) -> Any:
    """One message out of a pipe, its length before it; None where it ends or takes too long."""
    until = time.monotonic() + seconds
    head = _bytes(reader, 4, until)
    body = head and _bytes(reader, int.from_bytes(head, "little"), until)
    return json.loads(body) if body else None


def _bytes(reader: int, count: int, until: float) -> bytes | None:
    data = b""
    while len(data) < count:
        ready, _, _ = select.select([reader], [], [], max(0.0, until - time.monotonic()))
        part = os.read(reader, count - len(data)) if ready else b""
        if not part:
            return None
        data += part
    return data


def _be_child(work: Callable[[Callable[[Any], None]], None], writer: int) -> None:
    def tell(what: Any) -> None:
        body = json.dumps(what).encode()
        with os.fdopen(writer, "wb", closefd=False) as stream:
            stream.write(len(body).to_bytes(4, "little") + body)

    try:
        work(tell)
        tell("end")
    except BaseException as error:
        tell({"error": f"{type(error).__name__}: {error}", "broken": f"the check itself: {error}"})
    finally:
        os._exit(0)
