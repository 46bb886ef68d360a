"""The tensors of tasks by name, what a running task may access, and how tasks run.

`TaskStore` has the tensors; a `TaskArgumentAccessor` gives a task those of its slots, with the
permissions of its signature; `execute` runs one task, `ModelTrainingInstance` those of a training
step. A `ProgramTask` is a compiled task: running it queues its program.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy as np

from stitch.argument_kinds import instance_of, takes, with_method
from stitch.errors import TaskError, UsageError
from stitch.graph import ComputationGraph
from stitch.program import Array, Role, TensorDesc
from stitch.runtime import RuntimeDevice, Tensor
from stitch.tasks import Permission
from stitch.training.local_backend.signatures import (
    LayerTask,
    RuntimeArgument,
    TaskBinding,
    TaskInvocation,
    TaskSignature,
    check_binding,
    gradient_name,
    named,
    names_of,
    tensor_of,
)
from stitch.training.observing import LayerTime, profile_operations
from stitch.training.programs import compilation
from stitch.training.stitching import NamedCells, load_program


class TaskStore:
    """The tensors of tasks on a device, by name, and the signatures of registered tasks.

    `references` gives the values of arguments by reference.
    """

    def __init__(
        self, device: RuntimeDevice, references: Mapping[RuntimeArgument, Callable[[], Any]]
    ) -> None:
        self.device, self.references = device, references
        self.signatures: dict[str, TaskSignature] = {}
        self._cells = NamedCells(device)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._cells.numbers)

    def add_tensor(self, name: str, desc: TensorDesc) -> None:
        """Declare a tensor, which has no elements until it is written.

        Raises `UsageError` if a tensor of this name has another description.
        """
        number = self._cells.numbers.get(name)
        if number is None:
            self._cells.number(name, desc)
        elif self._cells.descs[number] != desc.without_address():
            raise UsageError(
                f"tensor {name!r} is declared with another description",
                expected=self._cells.descs[number].text(), got=desc.text(),
            )  # fmt: skip

    def desc(self, name: str) -> TensorDesc:
        """Return a tensor's description; raise `UsageError` for an unknown name."""
        return self._cells.descs[self._number(name)]

    def find(self, name: str) -> Tensor | None:
        """Return a tensor, None if it is not written yet; raise `UsageError` for an unknown
        name."""
        return self._cells.tensor(self._number(name))

    def tensor(self, name: str) -> Tensor:
        """Return a tensor; raise `UsageError` if it is unknown or not written yet."""
        tensor = self.find(name)
        if tensor is None:
            raise UsageError(
                f"tensor {name!r} has no elements: no task or set_tensor call has written it",
                expected=self.desc(name).text(),
                remedy=f"set_tensor({name!r}, array), or run a task that writes it",
            )
        return tensor

    def hold(self, name: str, tensor: Tensor) -> None:
        """Check a tensor as `check` does and store it under a name."""
        self.check(name, tensor)
        self._cells.hold(self._number(name), tensor)

    def check(self, name: str, tensor: Tensor) -> None:
        """Raise `UsageError` for a tensor of another shape, element type or device than
        declared."""
        expected, actual = self.desc(name), tensor.desc
        self.device.check_device(tensor, f"tensor {name!r}")
        if (actual.shape, actual.layout.data_type) != (expected.shape, expected.layout.data_type):
            raise UsageError(
                f"tensor {name!r} has another shape or data type", expected=expected.text(),
                got=actual.text(),
            )  # fmt: skip

    def write(self, name: str, array: Any) -> None:
        """Overwrite the elements of a tensor; allocate it if needed.

        Raises `UsageError` for an unknown name, `LinkError` for another shape or kind of number.
        """
        self._number(name)
        self._cells.put(name, array)

    def drop(self, names: Iterable[str]) -> None:
        self._cells.drop(tuple(map(self._number, names)))

    def close(self) -> None:
        """Release all tensors."""
        self._cells.close()

    def _number(self, name: str) -> int:
        return named(name, self._cells.numbers, f"there is no tensor {name!r}")


# --------------------------------------------------------------------------------------------------
# Arguments of a task

_PERMISSION = instance_of(
    f"a Permission ({', '.join(kind.name for kind in Permission)})", Permission
)


class _OpenTensor:
    """A tensor while one task runs, shared by all slots that are bound to it.

    `written` replaces it: a tensor, or an array that the task writes to. `read` is the array that
    read-only slots have.
    """

    __slots__ = ("desc", "name", "read", "store", "written")

    def __init__(self, store: TaskStore, name: str) -> None:
        self.name, self.desc, self.store = name, store.desc(name), store
        self.written: Tensor | Array | None = None
        self.read: Array | None = None

    def tensor(self) -> Tensor:
        if isinstance(self.written, np.ndarray):
            return self.store.device.tensor(self.written)
        return self.store.tensor(self.name) if self.written is None else self.written

    def finish(self) -> None:
        """Store the changes at the end of the task."""
        if isinstance(self.written, np.ndarray):
            self.store.write(self.name, self.written)
        elif self.written is not None:
            self.store.hold(self.name, self.written)


class TensorAccessor:
    """A tensor of a task's slot, with the permission that the task asked for.

    Host functions use arrays (`numpy`), programs use handles (`tensor`, `put`). Slots bound to one
    tensor share what is written.
    """

    __slots__ = ("_used", "_zeros", "permission")

    def __init__(self, used: _OpenTensor, permission: Permission, *, zeros: bool) -> None:
        """`zeros`: a tensor that is not written yet reads as zeros, as a sum before its first
        term."""
        self.permission = permission
        self._used, self._zeros = used, zeros

    @property
    def name(self) -> str:
        return self._used.name

    @property
    def desc(self) -> TensorDesc:
        return self._used.desc

    @property
    def tensor(self) -> Tensor:
        """Return the device's tensor; raise `TaskError` without permission to read."""
        self._require(self.permission.reads, "read")
        return self._used.tensor()

    def put(self, tensor: Tensor) -> None:
        """Replace the tensor when the task ends; earlier writes of the task are lost.

        Raises `TaskError` without permission to write, `UsageError` for a tensor that does not fit.
        """
        self._require(self.permission.writes, "written")
        self._used.store.check(self.name, tensor)
        self._used.written, self._used.read = tensor, None

    def numpy(self) -> Array:
        """Return the elements.

        With permission to write, changes to the array are stored when the task ends. Without
        permission to read it holds zeros, unless the task has written to it through another slot.
        Without permission to write it is read-only.
        """
        self._require(self.permission is not Permission.NONE, "read or written")
        used = self._used
        if self.permission.writes:
            if not isinstance(used.written, np.ndarray):
                used.written = self._elements()
            return used.written
        if isinstance(used.written, np.ndarray):
            # A view, so that only this accessor's array is read-only.
            used.read = used.written.view()
        elif used.read is None:
            used.read = self._elements()
        used.read.flags.writeable = False
        return used.read

    def _elements(self) -> Array:
        used = self._used
        is_new = self._zeros and used.store.find(self.name) is None
        if used.written is not None or (self.permission.reads and not is_new):
            return used.tensor().numpy()
        return np.zeros(self.desc.shape, self.desc.layout.data_type.dtype)

    def _require(self, allowed: bool, what: str) -> None:
        if not allowed:
            raise TaskError(
                f"tensor {self.name!r} cannot be {what}: the task asked for {self.permission.value}"
            )


class TaskArgumentAccessor:
    """What one invocation of a task may read and write.

    Raises `UsageError` for a binding that does not match the signature, and for unknown tensors.
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
        self._used: dict[str, _OpenTensor] = {}

    @property
    def device(self) -> RuntimeDevice:
        return self._store.device

    def get_tensor(self, slot: str, permission: Permission) -> TensorAccessor:
        """Return the tensor of a slot.

        Raises `UsageError` for an unknown, unbound or variadic slot, `TaskError` for a permission
        that the signature does not allow.
        """
        return self._all(slot, permission, is_gradient=False, variadic=False)[0]

    def get_tensor_grad(self, slot: str, permission: Permission) -> TensorAccessor:
        """Return the gradient of a slot's tensor; raises as `get_tensor`."""
        return self._all(slot, permission, is_gradient=True, variadic=False)[0]

    def get_variadic_tensor(self, slot: str, permission: Permission) -> tuple[TensorAccessor, ...]:
        """Return the tensors of a variadic slot; raises as `get_tensor`."""
        return self._all(slot, permission, is_gradient=False, variadic=True)

    def get_variadic_tensor_grad(
        self, slot: str, permission: Permission
    ) -> tuple[TensorAccessor, ...]:
        """Return the gradients of a variadic slot's tensors; raises as `get_tensor`."""
        return self._all(slot, permission, is_gradient=True, variadic=True)

    def get_argument(self, slot: str) -> Any:
        """Return the value of an argument slot.

        Raises `UsageError` for an unknown slot, `TaskError` if a reference has another type than
        declared.
        """
        kind, value = self.signature.argument(slot), self.binding.arguments[slot]
        if isinstance(value, RuntimeArgument):
            value = self._store.references[value]()
        if not isinstance(value, kind):
            raise TaskError(
                f"argument {slot!r} of task {self.task_id!r} has another type than declared",
                expected=str(kind), got=f"{type(value).__name__}: {value!r:.60}",
            )  # fmt: skip
        return value

    def has(self, slot: str) -> bool:
        """Return whether a tensor is bound to a slot."""
        return slot in self.binding.tensors

    def has_grad(self, slot: str) -> bool:
        """Return whether a gradient is bound to a slot."""
        return slot in self.binding.gradients

    def finish(self) -> None:
        """Store what the task put and wrote; called after it has returned."""
        for used in self._used.values():
            used.finish()

    def _all(
        self, slot: str, permission: Permission, *, is_gradient: bool, variadic: bool
    ) -> tuple[TensorAccessor, ...]:
        if not isinstance(permission, Permission):
            _PERMISSION.check("a task's accessor", "permission", permission)
        declared = self.signature.tensor(slot)
        what = f"gradient of slot {slot!r}" if is_gradient else f"slot {slot!r}"
        allowed = declared.gradient if is_gradient else declared.permission
        if not allowed.allows(permission):
            raise TaskError(
                f"the signature does not allow {permission.value} for the {what} of task "
                f"{self.task_id!r}",
                expected=f"at most {allowed.value}", got=permission.value,
                remedy="ask for less, or register the task with a wider signature",
            )  # fmt: skip
        bound = (self.binding.gradients if is_gradient else self.binding.tensors).get(slot)
        if bound is None:
            raise UsageError(
                f"nothing is bound to the {what} of task {self.task_id!r}",
                remedy=f"ask has{'_grad' if is_gradient else ''}({slot!r}) first",
            )
        if declared.variadic is not variadic:
            method = "get_tensor" if variadic else "get_variadic_tensor"
            raise UsageError(
                f"the {what} of task {self.task_id!r} takes "
                + ("any number of tensors" if declared.variadic else "one tensor"),
                remedy=f"ask with {method}{'_grad' if is_gradient else ''}",
            )
        names = names_of(bound)
        for name in names:
            if name not in self._used:
                self._used[name] = _OpenTensor(self._store, name)
        return tuple([TensorAccessor(self._used[n], permission, zeros=is_gradient) for n in names])


# --------------------------------------------------------------------------------------------------
# Registered tasks

#: A task's function: it takes the accessor, and may return the seconds that it has measured.
TaskImplementation: TypeAlias = Callable[[TaskArgumentAccessor], Any]


@runtime_checkable
class RuntimeBacking(Protocol):
    """A backend of tasks: it stores tasks, tensors and arguments."""

    #: Whether tasks run one at a time and are timed.
    profiling: bool

    @property
    def graph(self) -> ComputationGraph: ...

    def register_task(
        self, task_id: str, signature: TaskSignature, implementation: TaskImplementation
    ) -> None: ...

    def get_args(self, invocation: TaskInvocation) -> TaskArgumentAccessor: ...

    def get_task_impl(self, invocation: TaskInvocation) -> TaskImplementation: ...

    def stage(self, role: Role) -> AbstractContextManager[Sequence[LayerTask]]:
        """Return a context with the tasks of one part of a step, to be run in order inside it."""

    def synchronize(self) -> None:
        """Wait for all queued work."""


def execute(backing: RuntimeBacking, invocation: TaskInvocation) -> Any:
    """Run a task and return its result.

    If the task raises, its changes are discarded and a note on the error names the task.

    Raises:
        TaskError: The task is unknown, or its result has another type than its signature says.
    """
    accessor = backing.get_args(invocation)
    implementation = backing.get_task_impl(invocation)
    try:
        result = implementation(accessor)
    except Exception as error:
        with suppress(Exception):
            names = ", ".join(invocation.binding.names())
            error.add_note(f"in task {invocation.task_id!r}, on tensors {names or '(none)'}")
        raise
    kind = accessor.signature.returns
    if not isinstance(result, type(None) if kind is None else kind):
        raise TaskError(
            f"task {invocation.task_id!r} returned another type than its signature declares",
            expected="nothing" if kind is None else str(kind),
            got=f"{type(result).__name__}: {result!r:.60}",
        )
    accessor.finish()
    return result


class ModelTrainingInstance:
    """A model that is trained task by task, in terms of FlexFlow.

    While `backing.profiling` is set, each call returns the measured time of every layer's task;
    otherwise None. Raises `UsageError` if `backing` was created for another graph.
    """

    @takes(
        graph=instance_of("a ComputationGraph", ComputationGraph),
        backing=with_method("a RuntimeBacking, such as LocalTaskBackend(graph)", "stage"),
    )
    def __init__(self, graph: ComputationGraph, backing: RuntimeBacking) -> None:
        if backing.graph is not graph:
            raise UsageError(
                f"the backing was created for another graph than {graph.name!r}",
                expected=f"its graph, {backing.graph.name!r}",
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
        """Run the loss task, if there is one, and the backward tasks in reverse order."""
        judged, back = self._run(Role.LOSS), self._run(Role.BACKWARD)
        return None if judged is None or back is None else (*judged, *back)

    def update(self) -> tuple[LayerTime, ...] | None:
        """Update all parameters with their gradients."""
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
        if isinstance(measured, float):  # The time of the kernels alone.
            seconds = measured
        return LayerTime(invocation.task_id, task.layer, task.op, task.location, seconds)


# --------------------------------------------------------------------------------------------------
# Programs as tasks


class ProgramTask:
    """A graph compiled and loaded as the implementation of a task.

    The graph's slots have the names of the task's tensor slots, their gradients and its arguments.
    It returns the seconds of its operations while profiling, else None.
    """

    def __init__(
        self, graph: ComputationGraph, role: Role, signature: TaskSignature, device: RuntimeDevice
    ) -> None:
        self.signature = signature
        self.program = compilation(role, graph, device.machine, {}).program
        self._agent = load_program(device, self.program)

    def inputs(self, binding: TaskBinding) -> list[tuple[str, TensorDesc]]:
        """Return the tensors that the program reads."""
        program, arguments = self.program, self.signature.arguments
        return [
            (tensor_of(binding, slot.name), program.input_desc(i))
            for i, slot in enumerate(program.inputs) if slot.name not in arguments
        ]  # fmt: skip

    def outputs(self, binding: TaskBinding) -> list[tuple[str, TensorDesc]]:
        """Return the tensors that the program writes."""
        program = self.program
        return [
            (tensor_of(binding, slot.name), program.output_desc(i))
            for i, slot in enumerate(program.outputs)
        ]

    def __call__(self, accessor: TaskArgumentAccessor) -> float | None:
        if not accessor.get_argument("profiling"):
            self._queue(accessor)
            return None
        times = profile_operations(accessor.device, lambda: self._queue(accessor))
        return sum([time.seconds for time in times], 0.0)

    def _queue(self, accessor: TaskArgumentAccessor) -> None:
        operands = [
            np.asarray(accessor.get_argument(port.name), port.dtype)
            if port.name in self.signature.arguments
            else _access(accessor, port.name, Permission.READ_ONLY).tensor
            for port in self._agent.ports
        ]
        written = [
            _access(accessor, slot.name, Permission.WRITE_ONLY) for slot in self.program.outputs
        ]
        results = accessor.device.submit(self._agent, operands)
        tensors = (results,) if isinstance(results, Tensor) else results
        for access, tensor in zip(written, tensors, strict=True):
            access.put(tensor)


def _access(accessor: TaskArgumentAccessor, slot: str, permission: Permission) -> TensorAccessor:
    if slot in accessor.binding.tensors:
        return accessor.get_tensor(slot, permission)
    return accessor.get_tensor_grad(slot.removesuffix(gradient_name("")), permission)
