"""Names of which no two are alike, and what finding them costs."""

from __future__ import annotations

from stitch.program import FreeNames


def test_a_taken_name_gets_its_prefix_and_then_a_number() -> None:
    names = FreeNames(["x", "a.x.3"])
    assert [names.free("x", "a") for _ in range(4)] == ["a.x", "a.x.2", "a.x.4", "a.x.5"]
    assert [names.free("y", "a"), names.free("y")] == ["y", "y.2"]
    counted = FreeNames(["m"], mark="_", first=1)
    assert [counted.free("m") for _ in range(2)] == ["m_1", "m_2"]
