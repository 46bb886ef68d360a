"""What runs tasks, and the instance that goes through a model with it: forward, backward,
update.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, runtime_checkable

from stitch.argument_kinds import instance_of, takes, with_method
from stitch.errors import TaskError, UsageError
from stitch.graph import ComputationGraph
from stitch.program import Role
from stitch.training.local_backend.task_arguments import TaskArgumentAccessor
from stitch.training.local_backend.task_binding import TaskInvocation
from stitch.training.local_backend.task_slots import TaskSignature
from stitch.training.observing import LayerTime

#: What a task does: it is called with its accessor. It may return seconds that it has measured.
TaskImplementation: TypeAlias = Callable[[TaskArgumentAccessor], Any]


@dataclass(frozen=True, slots=True)
class LayerTask:
    """One layer's task: whose it is (the name of its first result), operator, user's line."""

    layer: str
    op: str
    location: str
    invocation: TaskInvocation


@runtime_checkable
class RuntimeBacking(Protocol):
    """Who keeps tasks, tensors and arguments, and gives a task what it needs."""

    #: Whether tasks run one at a time and are timed.
    profiling: bool

    @property
    def graph(self) -> ComputationGraph:
        """The graph whose tasks it has."""

    def register_task(
        self, task_id: str, signature: TaskSignature, implementation: TaskImplementation
    ) -> None:
        """Make a task known by its id."""

    def get_args(self, invocation: TaskInvocation) -> TaskArgumentAccessor:
        """What an invocation may see and change."""

    def get_task_impl(self, invocation: TaskInvocation) -> TaskImplementation:
        """What an invocation does."""

    def stage(self, role: Role) -> AbstractContextManager[Sequence[LayerTask]]:
        """The tasks of a part of a step, in order, to be run inside of the context."""

    def synchronize(self) -> None:
        """Wait for all that was asked for."""


def execute(backing: RuntimeBacking, invocation: TaskInvocation) -> Any:
    """Run a task: fetch its accessor and its implementation, and call it; gives what it returns.

    If it raises, nothing of what it put or wrote into arrays is kept, and a note on the error says
    which task it was. Raises `TaskError` for an unknown task and for a result of another type than
    its signature says.
    """
    accessor = backing.get_args(invocation)
    implementation = backing.get_task_impl(invocation)
    try:
        result = implementation(accessor)
    except Exception as error:
        # One that takes no note is raised as it is.
        with suppress(Exception):
            names = ", ".join(invocation.binding.names())
            error.add_note(f"in task {invocation.task_id!r}, on tensors {names or '(none)'}")
        raise
    kind = accessor.signature.returns
    if not isinstance(result, type(None) if kind is None else kind):
        raise TaskError(
            f"task {invocation.task_id!r} returned another type than its signature says",
            expected="nothing" if kind is None else str(kind),
            got=f"{type(result).__name__}: {result!r:.60}",
        )
    accessor.finish()
    return result


class ModelTrainingInstance:
    """A model in training by tasks: its graph, and the backing that runs them.

    Each call gives, while the backing is `profiling`, the time of every layer's task, which has
    really run; else None. Raises `UsageError` for a graph whose tasks the backing does not have.
    """

    @takes(
        graph=instance_of("a ComputationGraph", ComputationGraph),
        backing=with_method("a RuntimeBacking, such as LocalTaskBackend(graph)", "stage"),
    )
    def __init__(self, graph: ComputationGraph, backing: RuntimeBacking) -> None:
        if backing.graph is not graph:
            raise UsageError(
                f"the backing has the tasks of another graph than {graph.name!r}",
                expected=f"the graph that it was made for, {backing.graph.name!r}",
                remedy="LocalTaskBackend(graph)",
            )
        self.graph = graph
        self.backing = backing

    def __repr__(self) -> str:
        return f"<ModelTrainingInstance of {self.graph.name} by {self.backing!r}>"

    def forward(self) -> tuple[LayerTime, ...] | None:
        """Run the forward task of every operator, in topological order."""
        return self._run(Role.FORWARD)

    def backward(self) -> tuple[LayerTime, ...] | None:
        """Run the loss, if there is one, and the backward tasks in reverse order."""
        judged, back = self._run(Role.LOSS), self._run(Role.BACKWARD)
        return None if judged is None or back is None else (*judged, *back)

    def update(self) -> tuple[LayerTime, ...] | None:
        """Run the update of all parameters with their gradients."""
        return self._run(Role.UPDATE)

    def _run(self, role: Role) -> tuple[LayerTime, ...] | None:
        with self.backing.stage(role) as tasks:
            if self.backing.profiling:
                return tuple([self._timed(task) for task in tasks])
            for task in tasks:
                execute(self.backing, task.invocation)
        return None

    def _timed(self, task: LayerTask) -> LayerTime:
        backing, invocation = self.backing, task.invocation
        backing.synchronize()
        began = time.perf_counter()
        measured = execute(backing, invocation)
        backing.synchronize()
        seconds = time.perf_counter() - began
        if isinstance(measured, float):  # The task knows it better: its kernels alone.
            seconds = measured
        return LayerTime(invocation.task_id, task.layer, task.op, task.location, seconds)
