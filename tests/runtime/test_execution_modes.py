"""Random task graphs, run in every way that there is: the same bits, tasks and memory, no more
copies than one by one.

Graphs have branches, joins, several outputs, updates in place, host functions that queue more, and
host reads; in one of several runs, some of their functions fail.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

import stitch
from stitch.tasks import aggregate
from tests.support.graph_runs import Outcome, Run, Script, Worker, in_one_go, one_by_one
from tests.support.grids import every
from tests.support.short_threads import shorten
from tests.support.stitched_models import used
from tests.support.task_graphs import inputs_of, same


@dataclass(frozen=True)
class Mode:
    """How graphs are run, on a device that was opened with these words."""

    run: Callable[[Worker, Script], Run]
    options: Mapping[str, Any] = field(default_factory=dict)


#: What all others are compared with: each task runs as it is called.
EAGER = "one by one, window 1"
MODES = {
    EAGER: Mode(one_by_one, {"window": 1}),
    "one by one": Mode(one_by_one),
    "in one go": Mode(in_one_go),
    "two threads": Mode(one_by_one, {"inter_op_threads": 2}),
    "two threads in one go": Mode(in_one_go, {"inter_op_threads": 2}),
    "aggregated": Mode(lambda w, s: in_one_go(w, s, aggregate(s.graph, "keep"))),
}
#: Runs of each graph; in one of them, which its seed says, functions fail.
TURNS = 3


@pytest.fixture
def workers(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Worker]]:
    forked = shorten(monkeypatch)
    with ExitStack() as stack:
        made = {
            name: Worker(stack.enter_context(stitch.open_device("tiny", **mode.options)))
            for name, mode in MODES.items()
        }
        yield made
        assert forked, "some sections ran concurrently"


def check(outcome: Outcome, expected: Outcome) -> None:
    """The same functions were called, as often, and what is there has the same bits."""
    assert outcome.called == expected.called
    assert expected.outputs is not None
    if outcome.outputs is not None:
        assert same(outcome.outputs, expected.outputs)
    for number, array in outcome.seen.items():
        wanted = expected.seen.get(number)
        if array is None or wanted is None:
            assert array is wanted
        else:
            assert np.array_equal(array, wanted, equal_nan=True)
    assert outcome.further.keys() == expected.further.keys()
    for name, arrays in expected.further.items():
        for made, wanted in zip(outcome.further[name], arrays, strict=True):
            assert np.array_equal(made, wanted)


class Case:
    """A graph, the inputs of each run, and what comes of them with failures and without."""

    def __init__(self, seed: int, tasks: int) -> None:
        self.script = script = Script(seed, tasks)
        self.failing_turn = seed % TURNS
        self.inputs = [inputs_of(script.table, turn) for turn in range(TURNS)]
        self._expected = {}
        for turn, inputs in enumerate(self.inputs):
            for failing in (frozenset(), script.some_names()):
                script.failing = failing
                self._expected[turn, failing] = script.expected(inputs)

    def copies(self, mode: Mode, worker: Worker) -> list[int | None]:
        """Of each run in a mode, None where functions failed; raises `AssertionError` for what is
        not as it should be."""
        script, before = self.script, used(worker.device)
        run, copies = mode.run(worker, script), []
        for turn, inputs in enumerate(self.inputs):
            fails = turn == self.failing_turn
            script.failing = script.some_names() if fails else frozenset()
            outcome = script.run(worker, run, inputs)
            check(outcome, self._expected[turn, script.failing])
            copies.append(None if fails else outcome.copies)
        del run
        assert used(worker.device) == before, "all that it took is given back"
        return copies


def compare(workers: dict[str, Worker], seed: int, tasks: int) -> None:
    """Run a graph in all modes."""
    case = Case(seed, tasks)
    copies = {}
    for name, worker in workers.items():
        try:
            copies[name] = case.copies(MODES[name], worker)
        except Exception as error:
            error.add_note(f"seed {seed}, {name}: {case.script.graph}")
            raise
    for name, counts in copies.items():
        for count, most in zip(counts, copies[EAGER], strict=True):
            assert count is None or most is None or count <= most, (seed, name, copies)


@pytest.mark.parametrize("block", every(4, range(4)))
def test_every_execution_mode_gives_the_same_bits_with_no_more_copies(
    workers: dict[str, Worker], block: int
) -> None:
    for seed in range(block * 25, block * 25 + 25):
        compare(workers, seed, 8)


@pytest.mark.campaign("random_work")
@pytest.mark.parametrize("block", range(4))
def test_every_execution_mode_gives_the_same_bits_in_large_graphs(
    workers: dict[str, Worker], block: int
) -> None:
    for seed in range(1000 + block * 67, 1067 + block * 67):
        compare(workers, seed, 40)
