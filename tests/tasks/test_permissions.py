"""Permissions are a lattice: none < read-only, write-only < read-write."""

from __future__ import annotations

import itertools

import pytest

from stitch.tasks import Permission

NONE, READ, WRITE, BOTH = Permission


@pytest.mark.parametrize(("one", "other"), [*itertools.product(Permission, repeat=2)])
def test_join_and_meet_are_those_of_the_order(one: Permission, other: Permission) -> None:
    upper = [p for p in Permission if p.allows(one) and p.allows(other)]
    lower = [p for p in Permission if one.allows(p) and other.allows(p)]
    assert one.join(other) in upper and all(p.allows(one.join(other)) for p in upper)
    assert one.meet(other) in lower and all(one.meet(other).allows(p) for p in lower)


def test_the_order() -> None:
    allowed = {(a, b) for a in Permission for b in Permission if a is not b and a.allows(b)}
    assert allowed == {
        (READ, NONE), (WRITE, NONE), (BOTH, NONE), (BOTH, READ), (BOTH, WRITE),
    }  # fmt: skip
