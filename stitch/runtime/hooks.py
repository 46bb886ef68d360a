"""Hooks: callables before and after programs and operations, for inspection and debugging.

While an operation hook is registered, programs run one operation at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType
from typing import get_args

from stitch.argument_kinds import CALLABLE, optional
from stitch.errors import UsageError
from stitch.program import Array, Operation, Program
from stitch.runtime.events import Moment


@dataclass(frozen=True, slots=True, eq=False)
class HookContext:
    """What a hook sees: the program, and, for operation hooks, the operation and its arrays.

    The arrays are the live ones, read-only; copy what is to be kept.
    """

    program: Program
    operation: Operation | None = None
    inputs: tuple[Array | None, ...] = ()
    outputs: tuple[Array, ...] = ()


Hook = Callable[[HookContext], object]
HOOK = optional(CALLABLE)


class Hooks:
    """The hooks of one device. Registrations add up; each is undone by what `register` returns."""

    def __init__(self, changed: Callable[[], None]) -> None:
        self._changed = changed
        self._registered: list[MappingProxyType[Moment, Hook]] = []
        self.active = False
        self.on_operations = False

    def register(
        self,
        *,
        before_program: Hook | None = None,
        after_program: Hook | None = None,
        before_operation: Hook | None = None,
        after_operation: Hook | None = None,
    ) -> Callable[[], None]:
        """Register any of the four; returns what unregisters them. Raises `UsageError` for none, or
        what is no function."""
        given: dict[Moment, Hook | None] = {
            "before_program": before_program,
            "after_program": after_program,
            "before_operation": before_operation,
            "after_operation": after_operation,
        }
        for moment, hook in given.items():
            HOOK.check("hooks.register", moment, hook)
        hooks = {moment: hook for moment, hook in given.items() if hook is not None}
        if not hooks:
            raise UsageError("register needs a hook", expected=", ".join(get_args(Moment)))
        entry = MappingProxyType(hooks)
        self._registered.append(entry)
        self._update()

        def unregister() -> None:
            if entry in self._registered:
                self._registered.remove(entry)
                self._update()

        return unregister

    def _update(self) -> None:
        self.active = bool(self._registered)
        self.on_operations = any(
            "before_operation" in entry or "after_operation" in entry for entry in self._registered
        )
        self._changed()

    def call(self, moment: Moment, context: HookContext) -> None:
        """Call every hook of a moment, in the order of registration; exceptions propagate."""
        for entry in tuple(self._registered):
            hook = entry.get(moment)
            if hook is not None:
                hook(context)
