"""The rules by which next uses are learned and forgotten, each by itself."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Any

import pytest

from stitch.program import DataType, Layout, Space, TensorDesc
from stitch.runtime.recording import next_uses
from stitch.runtime.recording.next_uses import NextUses
from stitch.runtime.recording.task_batch import TaskBatch
from stitch.runtime.values import ValueRecord
from stitch.tasks import TaskSequence, Transformation, TransformationKind

L1, DRAM = Space.L1, Space.DRAM


class Passage:
    """Tasks one after the other, each a window of its own, that are noted and learned from."""

    def __init__(self) -> None:
        self.uses = NextUses()
        self.uses.is_wanted = True
        self.window = TaskBatch(0, TaskSequence())
        self._kinds: dict[tuple[str, Sequence[Space], int], Transformation] = {}

    def value(self) -> ValueRecord:
        """A tensor that somebody holds."""
        nowhere: Any = None
        value = ValueRecord(nowhere, TensorDesc((4,), Layout(DataType.FLOAT32, L1)), 0)
        value.handles = 1
        return value

    def queue(
        self, name: str, *inputs: ValueRecord, spaces: Sequence[Space] = (), makes: int = 0
    ) -> list[ValueRecord]:
        """A task more in the window; what it reads is wanted in L1, or in these spaces."""
        spaces = tuple(spaces or [L1] * len(inputs))
        if (name, spaces, makes) not in self._kinds:
            descs = tuple(TensorDesc((4,), Layout(DataType.FLOAT32, s)) for s in (*spaces, L1))
            self._kinds[name, spaces, makes] = Transformation(
                name, TransformationKind.PROGRAM, descs[:-1], descs[-1:] * makes
            )
        made = [self.value() for _ in range(makes)]
        graph, fresh, gone = self.window.after(self._kinds[name, spaces, makes], inputs)
        self.window.take(graph, None, fresh, made, gone)
        return made

    def end(self, *, is_noted: bool = True) -> None:
        """The window has run, and the next one begins."""
        if is_noted:
            self.uses.note(self.window)
            self.uses.learn()
        for value in self.window.values:
            value.last_used = self.window.end
        self.window = self.window.following()

    def task(
        self, name: str, *inputs: ValueRecord, spaces: Sequence[Space] = (), makes: int = 0
    ) -> list[ValueRecord]:
        """A window of one task."""
        made = self.queue(name, *inputs, spaces=spaces, makes=makes)
        self.end()
        return made

    def idle(self, tasks: int) -> None:
        """So many tasks of others."""
        for _ in range(tasks):
            self.task("other", self.value())

    def after(self, value: ValueRecord) -> float:
        """In how many tasks a value is read next, as predicted after a task that is none of its."""
        self.queue("now", self.value())
        found = self.uses.next_use(self.window, value) - self.window.number
        self.window = TaskBatch(self.window.number, self.window.nothing)
        return found


def test_the_distance_after_a_use_is_predicted_again() -> None:
    passage = Passage()
    weight = passage.value()
    for _ in range(3):
        passage.task("read", weight)
        passage.idle(2)
    passage.task("read", weight)
    assert passage.after(weight) == 2
    passage.idle(2)
    assert passage.after(weight) == 1


def test_the_longest_equal_history_decides() -> None:
    """After `first` a weight comes again in two tasks, after `second` in three."""
    passage = Passage()
    weight = passage.value()
    for _ in range(3):
        for name, between in (("first", 1), ("second", 2)):
            passage.task(name, passage.value())
            passage.task("other", passage.value())
            passage.task("other", passage.value())
            passage.task("read", weight)
            passage.idle(between)
            passage.task("read", weight)
    passage.task("first", passage.value())
    passage.idle(2)
    passage.task("read", weight)
    assert passage.after(weight) == 1


def test_the_last_observation_counts() -> None:
    passage = Passage()
    weight = passage.value()
    for number, between in enumerate((1, 5, 0)):
        for other in range(3):
            passage.task(f"{number} {other}", passage.value())
        passage.task("read", weight)
        passage.idle(between)
    assert passage.after(weight) == 5 + 3


def test_a_prediction_that_is_overdue_by_twice_is_dropped() -> None:
    passage = Passage()
    weight = passage.value()
    passage.task("read", weight)
    passage.idle(3)
    passage.task("read", weight)
    found = []
    for _ in range(9):
        found.append(passage.after(weight))
        passage.idle(1)
    assert found == [3, 2, 1, 1, 1, 1, inf, inf, inf]


def test_a_read_in_another_space_is_no_use() -> None:
    """A tensor is read from DRAM in between: when it is read in L1 stays as it was."""
    passage = Passage()
    weight = passage.value()
    for _ in range(2):
        passage.task("read", weight)
        passage.idle(1)
        passage.task("aside", weight, spaces=[DRAM])
        passage.idle(1)
    passage.task("read", weight)
    assert passage.after(weight) == 3
    passage.idle(1)
    passage.task("aside", weight, spaces=[DRAM])
    assert passage.after(weight) == 1


def test_an_output_is_predicted_by_its_producer() -> None:
    passage = Passage()
    for _ in range(2):
        (made,) = passage.task("make", makes=1)
        passage.idle(2)
        passage.task("read", made)
    (made,) = passage.task("make", makes=1)
    assert passage.after(made) == 2


def test_input_slots_are_distinguished() -> None:
    passage = Passage()
    often, seldom = passage.value(), passage.value()
    for _ in range(2):
        passage.task("read both", seldom, often)
        passage.idle(1)
        passage.task("read", often)
        passage.idle(3)
    passage.task("read both", seldom, often)
    assert passage.after(often) == 1 and passage.after(seldom) == 5


def test_an_unseen_use_counts_as_the_last_one() -> None:
    passage = Passage()
    weight = passage.value()
    for _ in range(2):
        passage.task("read", weight)
        passage.idle(4)
    passage.task("read", weight)
    passage.queue("unseen", weight)
    passage.end(is_noted=False)
    assert passage.after(weight) == 4


def test_noted_windows_are_learned_from_in_their_order() -> None:
    passage = Passage()
    weight = passage.value()
    passage.uses.is_wanted = False
    passage.task("read", weight)
    passage.idle(3)
    passage.task("read", weight)
    passage.uses.is_wanted = True
    passage.idle(1)
    assert passage.after(weight) == 2


def test_predictions_are_counted_from_the_window_on() -> None:
    passage = Passage()
    weight, gone = passage.value(), passage.value()
    for _ in range(2):
        passage.task("read", weight)
        passage.task("read once", gone)
        passage.idle(2)
    passage.queue("read", weight)
    passage.queue("other", passage.value())
    passage.end()
    passage.queue("other", passage.value())
    window, kept = passage.window, [False]
    assert passage.uses.predicted(window, kept, {7: weight, 9: passage.value()}) == ((7, 2),)


def test_a_wrong_prediction_makes_a_new_version() -> None:
    passage = Passage()
    weight = passage.value()
    versions = []
    for between in (2, 2, 2, 2, 5, 5):
        passage.task("read", weight)
        passage.idle(between)
        versions.append(passage.uses.version)
    # Where stretches of four and more are told apart, what was before counts for the first time.
    assert versions[0] == 0 and versions[1] == versions[3] < versions[5]


def test_the_values_that_were_used_last_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(next_uses, "MAX_VALUES", 2)
    passage = Passage()
    values = [passage.value() for _ in range(4)]
    for value in values:
        passage.task("read", value)
    assert set(passage.uses._last) == set(values[2:])


def test_values_without_handles_are_forgotten() -> None:
    passage = Passage()
    value, other = passage.value(), passage.value()
    passage.task("read", value)
    value.handles = 0
    passage.task("read", other)
    assert set(passage.uses._last) == {other}


def test_the_oldest_observation_is_forgotten_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(next_uses, "MAX_DISTANCES", 8)
    passage = Passage()
    passage.idle(70)
    for name in ("first", "second", "third"):
        value = passage.value()
        passage.task(name, value)
        passage.idle(3)
        passage.task(name, value)
    found = []
    for name in ("first", "second", "third"):
        value = passage.value()
        passage.task(name, value)
        found.append(passage.after(value))
    assert found == [inf, 3, 3]
