"""Objects that are alive: an interrupt that comes where one of them dies is not lost."""

from __future__ import annotations

import _thread
import sys
import weakref
from typing import Any

import pytest

from stitch.live_objects import LiveObjects


class Session:
    """An object that nothing else holds."""


class _Pending(int):
    """Reading `soon` makes SIGINT pending, with no call behind which it would be handled."""

    soon = property(_thread.interrupt_main)


PENDING = _Pending(2)


def interrupt(reference: object) -> None:
    PENDING.soon  # noqa: B018


def interrupted_where_one_dies(live: Any) -> bool:
    """Whether an interrupt comes out that arrives just before a set is told of an object's end."""
    thing = Session()
    live.add(thing)
    # References are told in the opposite order of their making.
    first = weakref.ref(thing, interrupt)
    try:
        del thing
        len(())
    except KeyboardInterrupt:
        return first() is None
    return False


def test_what_dies_leaves_and_the_rest_stays() -> None:
    live: LiveObjects[Session] = LiveObjects()
    sessions = [Session() for _ in range(5)]
    for session in (*sessions, *sessions):
        live.add(session)
    assert {*live} == {*sessions} and len([*live]) == 5
    del session, sessions[2:]
    assert {*live} == {*sessions} and len([*live]) == 2
    assert len(live._references) == 2, "nothing is left of those that died"


def test_an_interrupt_where_an_object_dies_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    swallowed: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda said: swallowed.append(said.exc_type))
    live: LiveObjects[Session] = LiveObjects()
    assert interrupted_where_one_dies(live) and not swallowed and [*live] == []
    assert not interrupted_where_one_dies(weakref.WeakSet()) and swallowed == [KeyboardInterrupt]
