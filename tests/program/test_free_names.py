"""Names of which no two are alike, and what finding them costs."""

from __future__ import annotations

from stitch.program import FreeNames
from tests.support.lines_run import lines_run


def test_a_taken_name_gets_its_prefix_and_then_a_number() -> None:
    names = FreeNames(["x", "a.x.3"])
    assert [names.free("x", "a") for _ in range(4)] == ["a.x", "a.x.2", "a.x.4", "a.x.5"]
    assert [names.free("y", "a"), names.free("y")] == ["y", "y.2"]
    counted = FreeNames(["m"], mark="_", first=1)
    assert [counted.free("m") for _ in range(2)] == ["m_1", "m_2"]


def test_names_are_found_in_constant_time() -> None:
    def work(count: int) -> int:
        names = FreeNames()
        return lines_run(lambda: [names.free("p") for _ in range(count)])

    assert work(200) < 3 * work(100)
