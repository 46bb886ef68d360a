"""Aggregation: run connected programs of the queue as one linked program if that is faster.

A set of programs is linked if no path leaves it and returns; host reads in between keep the value
that they read. Host functions (in call order), copies, and programs with donated inputs remain
separate tasks. `"auto"` links if the executor guarantees identical bits and the same work has run
often enough; it counts runs and never measures time, so it is deterministic. `"always"` links at
once, even if sums may differ. Linked work that would evict something runs unlinked again.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol, TypeAlias
from weakref import WeakValueDictionary

from stitch.argument_kinds import ArgumentKind
from stitch.errors import StitchError
from stitch.linker import link_merged, linked_inputs, wiring_of
from stitch.machine import Machine
from stitch.program import Program
from stitch.runtime.executors import Executor
from stitch.runtime.loaded import LoadedProgram
from stitch.runtime.queue import Linked
from stitch.runtime.recording import Agent, TaskBatch
from stitch.tasks import (
    MergedAgent,
    NumberedTask,
    ProgramAgent,
    TaskRow,
    TaskSequence,
    TransformationKind,
    edges_of,
    groups_of,
    members_of,
    merge_rows,
    order_of_groups,
)

#: Number of cached decisions. Unlinked work is evicted first, least recently used: relinking
#: evicted work in turn would cost more than it saves.
MAX_KINDS = 512
#: Linked programs, and reasons against linking, kept for `explain`.
MAX_NOTES = 16
#: Runs after which a lack of benefit is reported: not for work that runs once.
REPEATED = 2
AGGREGATE: Final = ArgumentKind(
    '"auto", "never" or "always"', lambda value: value in ("auto", "never", "always")
)
#: Tasks, and which of their values are kept.
_Work: TypeAlias = tuple[TaskSequence, tuple[bool, ...]]


class LinkingSite(Protocol):
    """A device, as aggregation uses it."""

    machine: Machine
    strict_types: bool

    def runs_on_threads(self, window: TaskBatch, kept: tuple[bool, ...]) -> bool:
        """Return whether the unlinked plans of a batch run sections in parallel."""

    def load_made(self, program: Program) -> LoadedProgram:
        """Load a generated program; the caller holds the run lock."""


@dataclass(slots=True, eq=False)
class _Kind:
    """The decision for one kind of work."""

    runs: int = 0
    #: The run at which it is linked or reported; None if not analyzed yet.
    when: int | None = None
    linked: Linked | None = None
    #: Reports of the linked programs, by their names.
    notes: tuple[tuple[str, str], ...] = ()
    #: Whether the decision is final.
    is_settled: bool = False


class Aggregation:
    """The link decisions of one device, by kind of work."""

    def __init__(self, device: LinkingSite, executor: Executor, *, is_always: bool) -> None:
        """`is_always`: link regardless of the executor's guarantees."""
        self._device, self._executor, self._is_always = device, executor, is_always
        self._kinds: dict[_Work, _Kind] = {}
        #: Linked programs in use; equal merged tasks share one.
        self._programs: WeakValueDictionary[Hashable, LoadedProgram] = WeakValueDictionary()
        #: Reports: linked programs by the names of their parts; and for each reason against linking
        #: the first names and a count.
        self._joined: dict[str, str] = {}
        self._apart: dict[str, tuple[str, int]] = {}
        #: Names of the programs in the current work that would not become faster.
        self._gain_nothing: dict[str, None] = {}

    @property
    def notes(self) -> tuple[str, ...]:
        """One line for each linked set, and for each reason against linking."""
        apart = [
            f"{names} run apart{f', and {times - 1} more sets' if times > 1 else ''}: {why}"
            for why, (names, times) in self._apart.items()
        ]
        return (*[f"{names} {what}" for names, what in self._joined.items()], *apart)

    # -- the queue asks ----------------------------------------------------------------------------

    def linked(self, window: TaskBatch, kept: tuple[bool, ...]) -> Linked | None:
        """See `Linking.linked`."""
        kind = self._kind(window.graph, kept)
        if not kind.is_settled:
            kind.runs += 1
            if kind.when is None or kind.runs >= kind.when:
                self._look(kind, window, kept)
        return kind.linked

    def is_settled(self, window: TaskBatch, kept: tuple[bool, ...]) -> bool:
        """See `Linking.is_settled`."""
        return self._kind(window.graph, kept).is_settled

    def keep_apart(self, window: TaskBatch, kept: tuple[bool, ...], why: str) -> None:
        """See `Linking.keep_apart`."""
        kind = self._kind(window.graph, kept)
        for names, _ in kind.notes:
            self._joined.pop(names, None)
            self._note_apart(names, why)
        kind.linked, kind.is_settled, kind.notes = None, True, ()

    def forget(self, transformation: int) -> None:
        """Drop the decisions that involve an unloaded program."""
        for work in [work for work in self._kinds if work[0].has(transformation)]:
            del self._kinds[work]

    def clear(self) -> None:
        """Drop all decisions."""
        self._kinds.clear()

    def _kind(self, graph: TaskSequence, kept: tuple[bool, ...]) -> _Kind:
        kinds = self._kinds
        kind = kinds.get((graph, kept))
        if kind is not None and len(kinds) >= MAX_KINDS and not (kind.is_settled or kind.linked):
            # Move to the end: LRU order.
            kinds[graph, kept] = kinds.pop((graph, kept))
        if kind is None:
            kind = _Kind()
            if len(self._kinds) >= MAX_KINDS:
                apart = next((work for work, k in self._kinds.items() if k.linked is None), None)
                if apart is None:
                    self._note_apart("further calls", f"{MAX_KINDS} kinds of work are linked")
                    kind.is_settled = True
                    return kind
                del self._kinds[apart]
            self._kinds[graph, kept] = kind
        return kind

    # -- what is linked ----------------------------------------------------------------------------

    def _look(self, kind: _Kind, window: TaskBatch, kept: tuple[bool, ...]) -> None:
        """Determine when linking a kind of work pays, and link it at that run."""
        tasks, agents = window.graph.tasks, window.agents
        self._gain_nothing.clear()
        before = self._edges(tasks, agents)
        groups = groups_of(before)
        when = 0
        for members in _sets(groups):
            repeats = self._repeats([agents[i] for i in members])
            when = max(when, repeats)
            if not repeats:
                for task in members:
                    groups[task] = task
        kind.when = when or (REPEATED if self._gain_nothing else 0)
        if kind.runs >= kind.when:
            if not when:
                self._note_gain_nothing()
            elif not self._is_always and self._device.runs_on_threads(window, kept):
                names = [agent.name for agent in agents if isinstance(agent, LoadedProgram)]
                self._note_apart(_shown(names), "they run beside each other on threads")
            else:
                kind.linked, kind.notes = self._linked(window, kept, before, groups)
            kind.is_settled = True

    def _edges(
        self, tasks: Sequence[NumberedTask], agents: Sequence[Agent | None]
    ) -> list[dict[int, bool]]:
        """Return for each task its predecessors, and whether the two may be linked."""
        fitting: dict[tuple[int, int], bool] = {}
        edges = []
        last_call: int | None = None
        for task, earlier in enumerate(edges_of(tasks)):
            found = {}
            for other, passes in earlier.items():
                pair = (id(agents[other]), id(agents[task]))
                if passes and pair not in fitting:
                    fitting[pair] = self._fit(agents[other], agents[task])
                found[other] = passes and fitting[pair]
            if tasks[task].transformation.kind is TransformationKind.HOST:
                # Host functions run in the order in which they were queued.
                if last_call is not None:
                    found[last_call] = False
                last_call = task
            edges.append(found)
        return edges

    def _fit(self, first: Agent | None, second: Agent | None) -> bool:
        """Return whether two tasks may be linked."""
        for agent in (first, second):
            if not isinstance(agent, LoadedProgram) or agent.transformation.donated:
                return False
        return self._repeats((first, second)) > 0

    def _repeats(self, agents: Sequence[Agent | None]) -> int:
        """Return the number of runs after which linking pays; 0 if never or not allowed."""
        if self._is_always:
            return 1
        programs = [agent.program for agent in agents if agent is not None]
        terms = self._executor.link_terms([p for p in programs if p is not None])
        if terms.obstacle:
            self._note_apart(_shown([p.name for p in programs if p is not None]), terms.obstacle)
        elif terms.repeats is None:
            self._gain_nothing.update(dict.fromkeys([p.name for p in programs if p is not None]))
        return 0 if terms.obstacle or terms.repeats is None else max(1, terms.repeats)

    def _linked(
        self, window: TaskBatch, kept: Sequence[bool], before: list[dict[int, bool]],
        groups: list[int],
    ) -> tuple[Linked | None, tuple[tuple[str, str], ...]]:  # fmt: skip
        """Link each set of programs.

        Returns:
            The linked work (None if no set could be linked), and the reports.
        """
        tasks = window.graph.tasks
        notes = []
        made: dict[int, tuple[TaskRow, LoadedProgram]] = {}
        outside = _outside(tasks, groups, kept)
        for members in _sets(groups):
            one = self._one(tasks, window.agents, members, outside)
            if one is not None:
                made[members[0]] = one
                names = _shown([tasks[i].transformation.name for i in members])
                notes.append((names, f"run as one program, {one[1].name!r}"))
        if not made:
            return None, ()
        self._joined.update(notes[: MAX_NOTES - len(self._joined)])
        groups = [group if group in made else task for task, group in enumerate(groups)]
        sets = members_of(groups)
        graph = window.nothing
        #: Value number → number in the linked work.
        at: dict[int, int] = {}
        order = order_of_groups(before, groups)
        for group in order:
            if group in made:
                row, program = made[group]
                what, inputs, outputs = program.transformation, linked_inputs(row), row.outputs
            else:
                what, inputs, outputs = tasks[group]
            fresh = [number for number in dict.fromkeys(inputs) if number not in at]
            for number in fresh:
                at[number] = len(at)
            graph = graph.after(what, tuple([at[number] for number in inputs]), len(fresh))
            for number in outputs:
                at[number] = len(at)
        linked = Linked(
            graph,
            tuple([tuple(sets[group]) for group in order]),
            tuple([made[group][1] if group in made else None for group in order]),
            tuple(at),
            tuple([kept[number] for number in at]),
            tuple([n for task in tasks for n in task.outputs if n not in at]),
        )
        return linked, tuple(notes)

    def _one(
        self, tasks: Sequence[NumberedTask], all_agents: Sequence[Agent | None],
        members: Sequence[int], outside: Collection[int],
    ) -> tuple[TaskRow, LoadedProgram] | None:  # fmt: skip
        """Link a set of programs; None if they cannot be linked."""
        agents = [agent for i in members if isinstance(agent := all_agents[i], LoadedProgram)]
        assert len(agents) == len(members), "only programs fit"
        rows = [
            TaskRow(
                ProgramAgent(agent, agent.program, agent.transformation, agent.output_descs),
                tasks[i].inputs, tasks[i].outputs,
            )
            for i, agent in zip(members, agents, strict=True)
        ]  # fmt: skip
        row = merge_rows(rows, outside)
        merged = row.agent
        assert type(merged) is MergedAgent, "several"
        key = wiring_of(merged)
        program = self._programs.get(key)
        try:
            if program is None:
                for agent in dict.fromkeys(agents):
                    # The linked program contains their constants, which are not verified again.
                    agent.verify()
                device = self._device
                whole = link_merged(merged, device.machine.shape, strict_types=device.strict_types)
                program = self._programs[key] = device.load_made(whole)
                # Keep the parts alive: the key refers to them.
                program.linked_from = tuple([agent.program for agent in agents])
        except StitchError as error:
            self._note_apart(_shown([row.agent.name for row in rows]), error.brief())
            return None
        return row, program

    def _note_gain_nothing(self) -> None:
        if self._gain_nothing:
            why = f"linked, the executor {self._executor.name!r} would be no faster"
            self._note_apart(_shown([*self._gain_nothing]), why)

    def _note_apart(self, names: str, why: str) -> None:
        if why in self._apart or len(self._apart) < MAX_NOTES:
            first, times = self._apart.get(why, (names, 0))
            self._apart[why] = first, times + (times == 0 or names != first)


def _shown(names: Sequence[str]) -> str:
    """Return program names for messages."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(map(repr, names[:3])) + more


def _sets(groups: Sequence[int]) -> list[list[int]]:
    """Return the groups of more than one task, in order."""
    return [members for members in members_of(groups).values() if len(members) > 1]


def _outside(
    tasks: Sequence[NumberedTask], groups: Sequence[int], kept: Sequence[bool]
) -> set[int]:
    """Return the values that remain outputs of linked tasks: kept, read elsewhere, or never read.

    Unread outputs are computed as in separate programs: they may fail, and executors depend on the
    outputs that a program has.
    """
    maker = {n: groups[i] for i, task in enumerate(tasks) for n in task.outputs}
    readers = [(n, groups[i]) for i, task in enumerate(tasks) for n in task.inputs]
    inside = {number for number, group in readers if maker.get(number) == group}
    outside = {number for number, group in readers if maker.get(number) != group}
    return {n for n in maker if kept[n] or n in outside or n not in inside}
