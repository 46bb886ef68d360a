"""The accessor: what a running task is given, by slot, and only with permission."""

from __future__ import annotations

from typing import Any

import numpy as np

from stitch.argument_kinds import instance_of
from stitch.errors import TaskError, UsageError
from stitch.program import Array, TensorDesc
from stitch.runtime import RuntimeDevice, Tensor
from stitch.tasks import Permission
from stitch.training.local_backend.task_binding import (
    TaskInvocation,
    check_binding,
    names_of,
)
from stitch.training.local_backend.task_store import TaskStore

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
