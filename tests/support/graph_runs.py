"""Ways of running a task graph on a device, and what came of each: results, calls, copies.

A `Script` gives the host functions of a graph: each task has its own, by its own name, which notes
that it was called, and raises `Told` where it is to fail. One of the kind "spread" queues more: on
a device what it is given goes into two further tasks; by plain Python they are computed at once.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

import numpy as np

from stitch.errors import TaskError
from stitch.program import Array
from stitch.report import Device
from stitch.runtime import Tensor
from stitch.tasks import Agent, CopyAgent, HostCall, HostFunction, ProgramAgent, TaskGraph, task
from stitch.tasks.host_calls import InputPlace, OutputPlace
from stitch.ttb import Binary
from tests.support.small_programs import HOST
from tests.support.stitched_models import one
from tests.support.task_graphs import (
    FUNCTIONS,
    KERNELS,
    PROGRAMS,
    Told,
    interpreted,
    random_graph,
    weighted,
)

Arrays = Mapping[str, Array]


@dataclass
class Outcome:
    """What one run gave, and how often it called each host function.

    `outputs` by name, None where nothing is handed out of a run that fails; `seen`: other values by
    number, those that are gone as None; `further`: what tasks queued, by the names of these.
    """

    outputs: dict[str, Array] | None
    seen: dict[int, Array | None]
    further: dict[str, list[Array]] = field(default_factory=dict)
    called: Counter[str] = field(default_factory=Counter)
    copies: int = 0


class Worker:
    """A device, and the programs of random graphs, loaded."""

    def __init__(self, device: Device) -> None:
        self.device = device
        shape = device.machine.shape
        self.programs = {
            name: device.load(Binary((each,), shape, "tests")) for name, each in PROGRAMS.items()
        }


#: Runs one graph on a device with inputs, any number of times.
Run = Callable[[Arrays], Outcome]


class Script:
    """A random graph, what its host functions are to do, and what they did."""

    def __init__(self, seed: int, tasks: int = 12) -> None:
        self.seed = seed
        self.names: list[str] = []
        #: The names of functions that fail from now on.
        self.failing: frozenset[str] = frozenset()
        self._worker: Worker | None = None
        self._called: Counter[str] = Counter()
        self._further: dict[str, list[Any]] = {}
        self.graph = random_graph(seed, tasks, of=self._function, more=("spread",))
        self.table = self.graph.table()

    def some_names(self) -> frozenset[str]:
        """One or two of its functions, if it has any; the same each time."""
        chance = random.Random(self.seed)
        return frozenset(chance.sample(self.names, min(len(self.names), chance.randint(1, 2))))

    def expected(self, inputs: Arrays) -> Outcome:
        """By plain Python, one task after the other."""
        history: dict[int, Array] = {}
        outputs = interpreted(self.table, inputs, history)
        return self._noted(Outcome(outputs, dict(history)))

    def run(self, worker: Worker, run: Run, inputs: Arrays) -> Outcome:
        """On a device."""
        self._worker, before = worker, worker.device.account().total.copies
        try:
            outcome = self._noted(run(inputs))
        finally:
            self._worker = None
        outcome.copies = worker.device.account().total.copies - before
        return outcome

    def may_fail(self) -> Any:
        """Around what raises where a function fails as it was told to, or reads what is gone."""
        return suppress(Told, TaskError) if self.failing else nullcontext()

    def _noted(self, outcome: Outcome) -> Outcome:
        for name, values in self._further.items():
            outcome.further[name] = [np.asarray(value) for value in values]
        outcome.called, self._called, self._further = self._called, Counter(), {}
        return outcome

    def _function(self, kind: str) -> HostFunction:
        name = f"{kind}{len(self.names)}"
        self.names.append(name)
        like = FUNCTIONS.get(kind)
        plain = self._spread(name) if like is None else like.function

        @wraps(plain)
        def noted(*arguments: Any, **named: Any) -> Any:
            self._called[name] += 1
            if name in self.failing:
                raise Told(name)
            return plain(*arguments, **named)

        if like is None:
            return task(returns=HOST, name=name)(noted)
        return task(returns=like.returns, writes=like.writes, updates=like.updates, name=name)(
            noted
        )

    def _spread(self, name: str) -> Callable[[Array], Array]:
        def spread(x: Array) -> Array:
            worker = self._worker
            if worker is None:
                first = weighted.function(x, x)
                self._further[name] = [first, KERNELS["Abs"](first)]
            else:
                first = one(worker.device.call(weighted, x, x))
                self._further[name] = [first, worker.programs["abs"](first)]
            return x + x

        return spread


def in_one_go(worker: Worker, script: Script, graph: TaskGraph | None = None) -> Run:
    """Its graph, or another form of it, prepared."""
    prepared = worker.device.prepare(script.graph if graph is None else graph)

    def run(inputs: Arrays) -> Outcome:
        results = None
        with script.may_fail():
            results = prepared(**inputs)
        worker.device.wait()
        if results is None:
            return Outcome(None, {})
        tensors = results if isinstance(results, tuple) else (results,)
        named = zip(script.graph.outputs, tensors, strict=True)
        return Outcome({name: tensor.numpy() for name, tensor in named}, {})

    return run


def one_by_one(worker: Worker, script: Script) -> Run:
    """Each task is a call on the device; now and then the host reads a value in between.

    Handles are let go of where the last task that reads them has been queued.
    """
    table, device = script.table, worker.device
    last = {number: at for at, row in enumerate(table.tasks) for number in row.inputs}
    kept = {number for _, number in table.outputs}

    def read(value: Any) -> Array | None:
        for _ in range(2):  # The first time, whatever fails says so.
            with script.may_fail():
                return np.array(value)
        return None

    def run(inputs: Arrays) -> Outcome:
        chance = random.Random(script.seed)
        held: dict[int, Any] = {number: inputs[name] for name, number in table.inputs}
        seen = {}
        for at, (agent, needed, made) in enumerate(table.tasks):
            results: tuple[Any, ...] = ()
            if held.keys() >= set(needed):
                with script.may_fail():
                    results = _queued(worker, agent, [held[number] for number in needed])
            for number in needed:
                if last[number] == at and number not in kept:
                    held.pop(number, None)
            held |= {
                number: value
                for number, value in zip(made, results, strict=bool(results))
                if number in last or number in kept
            }
            del results
            if held and chance.random() < 0.15:
                number = chance.choice(sorted(held))
                if isinstance(held[number], Tensor):
                    seen[number] = read(held[number])
        with script.may_fail():
            device.wait()
        device.wait()
        outputs = {name: read(held.get(number)) for name, number in table.outputs if number in held}
        return Outcome({n: array for n, array in outputs.items() if array is not None}, seen)

    return run


def _queued(worker: Worker, agent: Agent, given: list[Any]) -> tuple[Any, ...]:
    """What stands for the results of a task that was queued."""
    device, results = worker.device, None
    if isinstance(agent, ProgramAgent):
        results = worker.programs[agent.program.name](*given)
    elif isinstance(agent, CopyAgent):
        tensor = given[0] if isinstance(given[0], Tensor) else device.tensor(given[0])
        results = device.to_layout(tensor, agent.desc, copy=True)
    else:
        assert isinstance(agent, HostCall)

        def passed(value: object) -> object:
            return given[value.index] if isinstance(value, InputPlace) else value

        by_position = [passed(v) for v in agent.arguments if not isinstance(v, OutputPlace)]
        named = {n: passed(v) for n, v in agent.named if not isinstance(v, OutputPlace)}
        results = device.call(agent.function, *by_position, **named)
    return results if isinstance(results, tuple) else (results,)
