"""The task store: the slots of registered tasks, the tensors that they are bound to, arguments.

A tensor that has its place keeps it: what is written goes there.

The accessor: what a running task is given, by slot, and only with permission.

What runs tasks, and the instance that goes through a model with it: forward, backward,
update.

A task that is a program: its slots are a program's, and running it queues the program.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol, TypeAlias, runtime_checkable

import numpy as np

from stitch.argument_kinds import instance_of, takes, with_method
from stitch.compiler import CompileOptions, compile_graph
from stitch.errors import TaskError, UsageError, closest
from stitch.graph import ComputationGraph
from stitch.machine import Machine
from stitch.program import Array, Program, Role, Space, TensorDesc
from stitch.runtime import LoadedProgram, RuntimeDevice, Tensor
from stitch.tasks import Permission
from stitch.training.local_backend.signatures import (
    RuntimeArgument,
    TaskBinding,
    TaskInvocation,
    TaskSignature,
    check_binding,
    names_of,
)
from stitch.training.observing import LayerTime, profiled
from stitch.training.programs import slot_places
from stitch.training.stitching import NamedCells
from stitch.ttb import Binary


class TaskStore:
    """What the slots of tasks stand for on a device."""

    def __init__(
        self, device: RuntimeDevice, references: Mapping[RuntimeArgument, Callable[[], Any]]
    ) -> None:
        self.device = device
        #: The slots of the tasks, by id.
        self.signatures: dict[str, TaskSignature] = {}
        self._references = references
        self._cells = NamedCells(device)

    # -- tensors -----------------------------------------------------------------------------------

    @property
    def names(self) -> tuple[str, ...]:
        """The tensors that are known, whether there or not."""
        return tuple(self._cells.numbers)

    def add_tensor(self, name: str, desc: TensorDesc) -> None:
        """Make a tensor known, which is not there before someone writes it.

        Raises `UsageError` where one of this name is described otherwise.
        """
        number = self._cells.numbers.get(name)
        if number is None:
            self._cells.number(name, desc)
        elif self._cells.descs[number] != desc.without_address():
            raise UsageError(
                f"there is another tensor {name!r}",
                expected=self._cells.descs[number].text(), got=desc.text(),
            )  # fmt: skip

    def desc(self, name: str) -> TensorDesc:
        """How a tensor is described; raises `UsageError` for a name that is not known."""
        return self._cells.descs[self._number(name)]

    def find(self, name: str) -> Tensor | None:
        """A handle on a tensor, None where it is not there; `UsageError` for an unknown name."""
        return self._cells.tensor(self._number(name))

    def tensor(self, name: str) -> Tensor:
        """A handle on a tensor; raises `UsageError` for one that is unknown, or not there."""
        tensor = self.find(name)
        if tensor is None:
            raise UsageError(
                f"tensor {name!r} is not there yet: no task has written it, and nobody has set it",
                expected=self.desc(name).text(),
                remedy=f"set_tensor({name!r}, array), or run a task that writes it",
            )
        return tensor

    def hold(self, name: str, tensor: Tensor) -> None:
        """The tensor of a name is this one from now on; raises what `check` does."""
        self.check(name, tensor)
        self.replace(name, tensor)

    def check(self, name: str, tensor: Tensor) -> None:
        """Raise `UsageError` for a tensor that cannot be that of a name: of another shape, element
        type or device."""
        wanted = self.desc(name)
        self.device.check_device(tensor, f"tensor {name!r}")
        given = tensor.desc
        if (given.shape, given.layout.data_type) != (wanted.shape, wanted.layout.data_type):
            raise UsageError(
                f"tensor {name!r} is described otherwise", expected=wanted.text(),
                got=given.text(),
            )  # fmt: skip

    def replace(self, name: str, tensor: Tensor) -> None:
        """The tensor of a name is this one, which was checked, from now on."""
        self._cells.hold(self._number(name), tensor)

    def write(self, name: str, array: Any) -> None:
        """Overwrite the elements of a tensor, which gets its place if it has none.

        Raises `UsageError` for an unknown name, `LinkError` where shape or kind of number differ.
        """
        self._number(name)
        self._cells.put(name, array)

    def drop(self, names: Iterable[str]) -> None:
        """These are not there any more."""
        self._cells.drop(tuple(map(self._number, names)))

    def close(self) -> None:
        """Give all tensors back."""
        self._cells.close()

    def _number(self, name: str) -> int:
        number = self._cells.numbers.get(name)
        if number is None:
            raise UsageError(
                f"there is no tensor {name!r}", expected=", ".join(self.names) or "none",
                remedy=closest(name, self.names) or None,
            )  # fmt: skip
        return number

    # -- arguments ---------------------------------------------------------------------------------

    def argument(self, value: Any) -> Any:
        """An argument's value: what it refers to now, if it is a reference."""
        return self._references[value]() if isinstance(value, RuntimeArgument) else value


# --------------------------------------------------------------------------------------------------
# Arguments of a task

_PERMISSION = instance_of(
    f"a Permission ({', '.join(kind.name for kind in Permission)})", Permission
)


class _TensorInUse:
    """A tensor while one task runs, however many of its slots are bound to it: what was put in its
    place, or its elements, which the task writes to."""

    __slots__ = ("_store", "desc", "elements", "name", "put", "read")

    def __init__(self, store: TaskStore, name: str) -> None:
        self.name, self.desc, self._store = name, store.desc(name), store
        self.put: Tensor | None = None
        self.elements: Array | None = None
        #: What slots that only read it have seen.
        self.read: Array | None = None

    @property
    def is_there(self) -> bool:
        """Whether there is anything to read."""
        written = self.put is not None or self.elements is not None
        return written or self._store.find(self.name) is not None

    def tensor(self) -> Tensor:
        """A handle on what it holds now."""
        if self.elements is not None:
            return self._store.device.tensor(self.elements)
        return self._store.tensor(self.name) if self.put is None else self.put

    def take(self, tensor: Tensor) -> None:
        """It is this one when the task has ended, and what was written into it before is lost."""
        self._store.check(self.name, tensor)
        self.put, self.elements, self.read = tensor, None, None

    def finish(self) -> None:
        """The task has ended: its changes count from now on."""
        if self.elements is not None:
            self._store.write(self.name, self.elements)
        elif self.put is not None:
            self._store.replace(self.name, self.put)


class TensorAccessor:
    """A tensor that a task was given, as far as its permission goes.

    Functions take it as an array (`numpy`), programs as a handle (`tensor`, `put`). Slots that are
    bound to one tensor share what is written.
    """

    __slots__ = ("_used", "_zeros", "permission")

    def __init__(self, used: _TensorInUse, permission: Permission, *, zeros: bool) -> None:
        """`zeros`: what is read before it is there is zero, as a sum is before its first part."""
        self.permission = permission
        self._used, self._zeros = used, zeros

    @property
    def name(self) -> str:
        """The tensor's name."""
        return self._used.name

    @property
    def desc(self) -> TensorDesc:
        """How the tensor is described."""
        return self._used.desc

    @property
    def tensor(self) -> Tensor:
        """A handle on the device's tensor; raises `TaskError` without permission to read."""
        self._require(self.permission.reads, "read")
        return self._used.tensor()

    def put(self, tensor: Tensor) -> None:
        """A device's tensor takes its place when the task has ended.

        Raises `TaskError` without permission to write, `UsageError` for one that does not fit.
        """
        self._require(self.permission.writes, "written")
        self._used.take(tensor)

    def numpy(self) -> Array:
        """The elements: a read-only array, or one whose elements are written back when the task
        has ended; to write only, it holds zeros, unless the task has written to it by another
        slot."""
        self._require(self.permission is not Permission.NONE, "looked at")
        used = self._used
        if self.permission.writes:
            if used.elements is None:
                used.elements = self._elements()
            return used.elements
        if used.elements is not None:
            # Others may write to it, whoever only reads it may not.
            used.read = used.elements.view()
        elif used.read is None:
            used.read = self._elements()
        used.read.flags.writeable = False
        return used.read

    def _elements(self) -> Array:
        used = self._used
        if used.put is not None or (self.permission.reads and (used.is_there or not self._zeros)):
            return used.tensor().numpy()
        return np.zeros(self.desc.shape, self.desc.layout.data_type.dtype)

    def _require(self, allowed: bool, what: str) -> None:
        if not allowed:
            raise TaskError(
                f"tensor {self.name!r} cannot be {what}: it was taken {self.permission.value}"
            )


class TaskArgumentAccessor:
    """What one invocation of a task may see and change.

    Raises `UsageError` at once for a binding that does not fit the signature, and for tensors that
    are not known.
    """

    def __init__(self, store: TaskStore, invocation: TaskInvocation) -> None:
        signature = store.signatures[invocation.task_id]
        check_binding(signature, invocation)
        for name in invocation.binding.names():
            store.desc(name)
        self.task_id = invocation.task_id
        self.signature = signature
        self.binding = invocation.binding
        self._store = store
        self._used: dict[str, _TensorInUse] = {}

    @property
    def device(self) -> RuntimeDevice:
        """Where the task runs."""
        return self._store.device

    def get_tensor(self, slot: str, permission: Permission) -> TensorAccessor:
        """The tensor of a slot; raises `UsageError` for an unknown, unbound or variadic slot,
        `TaskError` for a permission that the signature does not allow."""
        return self._one(slot, permission, is_gradient=False)

    def get_tensor_grad(self, slot: str, permission: Permission) -> TensorAccessor:
        """The gradient of a slot's tensor; raises as `get_tensor`."""
        return self._one(slot, permission, is_gradient=True)

    def get_variadic_tensor(self, slot: str, permission: Permission) -> tuple[TensorAccessor, ...]:
        """The tensors of a variadic slot; raises as `get_tensor`."""
        return self._all(slot, permission, is_gradient=False, variadic=True)

    def get_variadic_tensor_grad(
        self, slot: str, permission: Permission
    ) -> tuple[TensorAccessor, ...]:
        """The gradients of a variadic slot's tensors; raises as `get_tensor`."""
        return self._all(slot, permission, is_gradient=True, variadic=True)

    def get_argument(self, slot: str) -> Any:
        """The value of an argument slot; raises `UsageError` for an unknown one, `TaskError` where
        what it refers to is of another type."""
        kind = self.signature.argument(slot)
        value = self._store.argument(self.binding.arguments[slot])
        if not isinstance(value, kind):
            raise TaskError(
                f"argument {slot!r} of task {self.task_id!r} refers to another type",
                expected=str(kind), got=f"{type(value).__name__}: {value!r:.60}",
            )  # fmt: skip
        return value

    def has(self, slot: str) -> bool:
        """Whether a tensor is bound to a slot."""
        return slot in self.binding.tensors

    def has_grad(self, slot: str) -> bool:
        """Whether a gradient is bound to a slot: not where none flows."""
        return slot in self.binding.gradients

    def finish(self) -> None:
        """The task has ended: what it put and what it wrote into arrays counts from now on."""
        for used in self._used.values():
            used.finish()

    def _one(self, slot: str, permission: Permission, *, is_gradient: bool) -> TensorAccessor:
        (access,) = self._all(slot, permission, is_gradient=is_gradient, variadic=False)
        return access

    def _all(
        self, slot: str, permission: Permission, *, is_gradient: bool, variadic: bool
    ) -> tuple[TensorAccessor, ...]:
        if not isinstance(permission, Permission):
            _PERMISSION.check("a task's accessor", "permission", permission)
        known = self.signature.tensor(slot)
        what = f"gradient of slot {slot!r}" if is_gradient else f"slot {slot!r}"
        allowed = known.gradient if is_gradient else known.permission
        if not allowed.allows(permission):
            raise TaskError(
                f"the {what} of task {self.task_id!r} cannot be taken {permission.value}",
                expected=f"at most {allowed.value}", got=permission.value,
                remedy="ask for less, or register the task with a signature that allows it",
            )  # fmt: skip
        bound = (self.binding.gradients if is_gradient else self.binding.tensors).get(slot)
        if bound is None:
            raise UsageError(
                f"nothing is bound to the {what} of task {self.task_id!r}",
                remedy=f"ask has{'_grad' if is_gradient else ''}({slot!r}) first",
            )
        if known.variadic is not variadic:
            method = "get_tensor" if variadic else "get_variadic_tensor"
            raise UsageError(
                f"the {what} of task {self.task_id!r} takes "
                + ("any number of tensors" if known.variadic else "one tensor"),
                remedy=f"ask with {method}{'_grad' if is_gradient else ''}",
            )
        return tuple([
            TensorAccessor(self._in_use(name), permission, zeros=is_gradient)
            for name in names_of(bound)
        ])  # fmt: skip

    def _in_use(self, name: str) -> _TensorInUse:
        used = self._used.get(name)
        if used is None:
            used = self._used[name] = _TensorInUse(self._store, name)
        return used


# --------------------------------------------------------------------------------------------------
# Registered tasks

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


# --------------------------------------------------------------------------------------------------
# Programs as tasks


@dataclass(frozen=True, slots=True)
class TaskPort:
    """Where a slot of a program comes from or goes to: a tensor, a gradient or an argument."""

    what: Literal["tensor", "gradient", "argument"]
    slot: str

    def name(self, binding: TaskBinding) -> str:
        """The tensor that a binding says it is; for an argument, that of the argument."""
        if self.what == "argument":
            return self.slot
        bound = (binding.tensors if self.what == "tensor" else binding.gradients)[self.slot]
        assert isinstance(bound, str), "programs have a slot for each tensor"
        return bound


@dataclass(frozen=True, slots=True, eq=False)
class ProgramTask:
    """A program as a task: the ports of its inputs and outputs, in the program's order."""

    program: Program
    signature: TaskSignature
    inputs: tuple[TaskPort, ...]
    outputs: tuple[TaskPort, ...]


def program_task(
    graph: ComputationGraph, task_id: str, role: Role, machine: Machine,
    signature: TaskSignature, ports: Mapping[str, TaskPort], spaces: Mapping[str, Space],
) -> ProgramTask:  # fmt: skip
    """A graph, compiled; `ports` says what its slots are, `spaces` where they lie, if not at home.

    Raises what compiling a graph raises.
    """
    graph = replace(graph, name=task_id)
    placement = tuple(slot_places(graph, machine, spaces))
    program = compile_graph(graph, machine, CompileOptions(placement=placement, role=role)).program
    return ProgramTask(
        program,
        signature,
        tuple([ports[slot.name] for slot in program.inputs]),
        tuple([ports[slot.name] for slot in program.outputs]),
    )


class LoadedTask:
    """A program's task on a device: what is registered as its implementation.

    It gives the seconds that its operations took while profiling is asked for, else None.
    """

    def __init__(self, task: ProgramTask, device: RuntimeDevice) -> None:
        self.task = task
        binary = Binary((task.program,), device.machine.shape, "stitch training")
        self._agent: LoadedProgram = device.load(binary)

    def __call__(self, accessor: TaskArgumentAccessor) -> float | None:
        if not accessor.get_argument("profiling"):
            self._queue(accessor)
            return None
        times = profiled(accessor.device, lambda: self._queue(accessor))
        return sum([time.seconds for time in times], 0.0)

    def _queue(self, accessor: TaskArgumentAccessor) -> None:
        given = [
            np.asarray(accessor.get_argument(port.slot), known.dtype)
            if port.what == "argument"
            else _access(accessor, port, Permission.READ_ONLY).tensor
            for port, known in zip(self.task.inputs, self._agent.ports, strict=True)
        ]
        written = [
            _access(accessor, port, Permission.WRITE_ONLY) for port in self.task.outputs
        ]  # fmt: skip
        results = accessor.device.submit(self._agent, given)
        tensors = (results,) if isinstance(results, Tensor) else results
        for access, tensor in zip(written, tensors, strict=True):
            access.put(tensor)


def _access(
    accessor: TaskArgumentAccessor, port: TaskPort, permission: Permission
) -> TensorAccessor:
    if port.what == "gradient":
        return accessor.get_tensor_grad(port.slot, permission)
    return accessor.get_tensor(port.slot, permission)
