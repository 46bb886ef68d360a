"""Hooks: callables before and after programs and operations, for inspection and debugging.

While an operation hook is registered, programs run one operation at a time. If hooks change during
a run, this affects the same moment at its next occurrence and other moments from the next run.

A hook cannot use its device, which is in the middle of a run: it gets a `TaskError`. Another thread
may enqueue meanwhile, but a read waits for the run, so a hook must not wait for such a thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import get_args

import numpy as np

from stitch.argument_kinds import CALLABLE, WHOLE, optional
from stitch.errors import UsageError
from stitch.program import Array, Operation, Program
from stitch.runtime.events import TIMES, Moment


def not_just_made(program: Program, index: int | None) -> UsageError:
    """Return the error for a `HookContext.replace` that comes too early or too late."""
    return UsageError(
        "HookContext.replace was called outside the after_operation hook of its operation",
        where=f"program {program.name!r}" + ("" if index is None else f", operation {index}"),
        expected="a call in an after_operation hook, before it returns, in the same thread",
    )


@dataclass(frozen=True, slots=True, eq=False)
class HookContext:
    """What a hook receives: the program and, for operation hooks, the operation and its arrays.

    The arrays are live and read-only; copy them to keep them. The same context may be passed again
    in a later run. `index` numbers the operations of a program. `put` writes an output and is set
    only right after the operation.
    """

    program: Program
    operation: Operation | None = None
    inputs: tuple[Array | None, ...] = ()
    outputs: tuple[Array, ...] = ()
    put: Callable[[int, Array], None] | None = None
    index: int | None = None

    def replace(self, output: int, array: Array) -> None:
        """In `after_operation`: replace an output; later operations read the new elements.

        Args:
            output: Number of the output.
            array: New elements, with the shape and type of `outputs[output]`; copied, and rounded
                to the
                value's type.

        Raises:
            UsageError: Wrong output, shape or type; the output shares its bytes with an input, a
                constant
                or a live value; the hook has returned; or another thread called. Nothing has
                changed.
        """
        if self.put is None:
            raise not_just_made(self.program, self.index)
        if not WHOLE.accepts(output) or not 0 <= output < len(self.outputs):
            raise UsageError(
                f"the operation has no output {output!r}", expected=f"0 to {len(self.outputs) - 1}"
            )
        wanted = self.outputs[output]
        if not isinstance(array, np.ndarray) or (array.shape, array.dtype) != (
            wanted.shape, wanted.dtype,
        ):  # fmt: skip
            raise UsageError(
                "the replacement of an output must have its shape and type",
                where=f"output {output} of {'' if self.operation is None else self.operation.op}",
                expected=f"{wanted.dtype}{list(wanted.shape)}",
                got=f"{array.dtype}{list(array.shape)}" if isinstance(array, np.ndarray)
                else type(array).__name__,
            )  # fmt: skip
        self.put(output, array)


Hook = Callable[[HookContext], object]
HOOK = optional(CALLABLE)
#: Bit of the first moment; `TIMES`, for listeners, is the one below.
FIRST_BIT = TIMES << 1
MOMENTS: tuple[Moment, ...] = get_args(Moment)


class MomentHooks:
    """The hooks of one moment, in the order of registration; `bit` identifies the moment."""

    __slots__ = ("bit", "hooks")

    def __init__(self, bit: int) -> None:
        self.bit = bit
        self.hooks: tuple[Hook, ...] = ()


def call_hooks(moment: MomentHooks, context: HookContext) -> None:
    """Call every hook of a moment; exceptions propagate."""
    for hook in moment.hooks:
        hook(context)


class Hooks:
    """The hooks of one device; several registrations may be active.

    `bits`: the bits of the moments that have hooks, from `FIRST_BIT` on; 0 if there are none.
    """

    def __init__(self, changed: Callable[[], None]) -> None:
        self._changed = changed
        #: One mapping per registration, compared by identity.
        self._registered: list[Mapping[Moment, Hook]] = []
        self.moments = {m: MomentHooks(FIRST_BIT << i) for i, m in enumerate(MOMENTS)}
        self.bits = 0

    @property
    def active(self) -> bool:
        """Whether there is any hook."""
        return self.bits != 0

    def register(
        self,
        *,
        before_program: Hook | None = None,
        after_program: Hook | None = None,
        before_operation: Hook | None = None,
        after_operation: Hook | None = None,
    ) -> Callable[[], None]:
        """Register any of the four hooks; returns a function that unregisters them.

        Raises:
            UsageError: No hook was given, or one is not callable.
        """
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
            raise UsageError("hooks.register needs at least one hook", expected=", ".join(MOMENTS))
        try:
            self._add(hooks)
        except BaseException:
            # Interrupted: the caller has no function to unregister them with.
            self._remove(hooks)
            raise
        return partial(self._remove, hooks)

    @contextmanager
    def registered(self, hooks: Mapping[Moment, Hook]) -> Iterator[None]:
        """Register the hooks for the duration of the block."""
        own = {**hooks}
        try:
            self._add(own)
            yield
        finally:
            self._remove(own)

    def _add(self, hooks: Mapping[Moment, Hook]) -> None:
        self._registered.append(hooks)
        self._update()

    def _remove(self, hooks: Mapping[Moment, Hook]) -> None:
        """Remove a registration; idempotent, and completes an interrupted removal."""
        self._registered = [each for each in self._registered if each is not hooks]
        self._update()

    def _update(self) -> None:
        for moment, those in self.moments.items():
            those.hooks = tuple([hooks[moment] for hooks in self._registered if moment in hooks])
        self.bits = sum(those.bit for those in self.moments.values() if those.hooks)
        self._changed()
