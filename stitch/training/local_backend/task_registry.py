"""The tasks that are registered: signatures and implementations by id, and how one of them runs.

Comes in: signatures, functions, invocations. Goes out: accessors, implementations. Must not know:
layers, graphs, programs.
"""

from __future__ import annotations

from stitch.argument_kinds import TEXT, instance_of, takes
from stitch.errors import TaskError, UsageError, closest
from stitch.runtime import RuntimeDevice
from stitch.training.local_backend.runtime_backing import TaskImplementation
from stitch.training.local_backend.task_arguments import TaskArgumentAccessor
from stitch.training.local_backend.task_binding import TaskInvocation
from stitch.training.local_backend.task_slots import TaskSignature
from stitch.training.local_backend.task_store import TaskStore


class TaskRegistry:
    """Tasks by id, over the tensors and arguments of a store."""

    def __init__(self, device: RuntimeDevice, store: TaskStore) -> None:
        self.device, self.store = device, store
        self._implementations: dict[str, TaskImplementation] = {}
        self._closed = False

    @takes(task_id=TEXT, signature=instance_of("a TaskSignature", TaskSignature))
    def register_task(
        self, task_id: str, signature: TaskSignature, implementation: TaskImplementation
    ) -> None:
        """Make a task known by its id; one that is known may get another implementation.

        Raises `UsageError` where its signature is another then.
        """
        known = self.store.signatures.get(task_id)
        if known is not None and known != signature:
            raise UsageError(
                f"there is a task {task_id!r} with another signature",
                remedy="register it under another id, or with the signature that it has: "
                "backend.signature(task_id)",
            )
        if not callable(implementation):
            raise UsageError(f"task {task_id!r} needs a function", got=repr(implementation))
        self.store.signatures[task_id] = signature
        self._implementations[task_id] = implementation

    def signature(self, task_id: str) -> TaskSignature:
        """The signature of a task; raises `TaskError` for one that is not registered."""
        self._check_known(task_id)
        return self.store.signatures[task_id]

    def get_args(self, invocation: TaskInvocation) -> TaskArgumentAccessor:
        """What an invocation may see and change; raises `TaskError` for an unknown task,
        `UsageError` for a binding that does not fit."""
        self._check_known(invocation.task_id)
        return TaskArgumentAccessor(self.store, invocation)

    def get_task_impl(self, invocation: TaskInvocation) -> TaskImplementation:
        """What an invocation does; raises `TaskError` for an unknown task."""
        self._check_known(invocation.task_id)
        return self._implementations[invocation.task_id]

    def check_open(self) -> None:
        """Raise `UsageError` once it is closed."""
        if self._closed or self.device.is_closed:
            raise UsageError("this backend is closed", remedy="make another one")

    def _check_known(self, task_id: str) -> None:
        self.check_open()
        if task_id not in self._implementations:
            raise TaskError(
                f"no task {task_id!r} is registered",
                expected=", ".join(self._implementations) or "none",
                remedy=closest(task_id, self._implementations) or None,
            )
