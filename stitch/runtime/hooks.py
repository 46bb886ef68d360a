"""Hooks: callables before and after programs and operations, for inspection and debugging.

While an operation hook is registered, programs run one operation at a time. Hooks that come and go
during a run are called from its next moment on, those of other moments from the next run on.

A hook cannot use its device, which is in the middle of a run, and is told so. Another thread may
queue meanwhile; if it reads, it waits for the run: a hook must not wait for it.
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
    """What is raised where `HookContext.replace` comes too early or too late."""
    return UsageError(
        "replace is for what an operation has just made",
        where=f"program {program.name!r}" + ("" if index is None else f", operation {index}"),
        expected="to be called in an after_operation hook, before it returns",
    )


@dataclass(frozen=True, slots=True, eq=False)
class HookContext:
    """What a hook sees: the program, and, for operation hooks, the operation and its arrays.

    The arrays are the live ones, read-only; copy what is to be kept. The same context may come
    again, in a later run of the same work. `index` numbers the operations of a program. `put` is
    what writes another array into an output, where the operation has just run.
    """

    program: Program
    operation: Operation | None = None
    inputs: tuple[Array | None, ...] = ()
    outputs: tuple[Array, ...] = ()
    put: Callable[[int, Array], None] | None = None
    index: int | None = None

    def replace(self, output: int, array: Array) -> None:
        """In `after_operation`: other elements for an output, by its number; what runs next reads
        them, rounded to the value's type as the operation's own are.

        `array` has the shape and the type of `outputs[output]`; it is copied. Raises `UsageError`
        for anything else, where an input, a constant or a value that is still read lies in the same
        bytes, and once the hook has returned or in another thread; then nothing has changed.
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
                "an output is replaced by an array of its own shape and type",
                where=f"output {output} of {'' if self.operation is None else self.operation.op}",
                expected=f"{wanted.dtype}{list(wanted.shape)}",
                got=f"{array.dtype}{list(array.shape)}" if isinstance(array, np.ndarray)
                else type(array).__name__,
            )  # fmt: skip
        self.put(output, array)


Hook = Callable[[HookContext], object]
HOOK = optional(CALLABLE)
#: The bit of the first moment; that of listeners to events is below.
FIRST_BIT = TIMES << 1
MOMENTS: tuple[Moment, ...] = get_args(Moment)


class MomentHooks:
    """The hooks of one moment, in the order of registration; `bit` tells moments apart."""

    __slots__ = ("bit", "hooks")

    def __init__(self, bit: int) -> None:
        self.bit = bit
        self.hooks: tuple[Hook, ...] = ()


def call_hooks(moment: MomentHooks, context: HookContext) -> None:
    """Call every hook of a moment; exceptions propagate."""
    for hook in moment.hooks:
        hook(context)


class Hooks:
    """The hooks of one device. Registrations add up; each is undone by what `register` returns.

    `bits`: those of the moments that have hooks, from `FIRST_BIT` on; 0 if there is none.
    """

    def __init__(self, changed: Callable[[], None]) -> None:
        self._changed = changed
        #: What was registered in one go; another one of the same functions is another.
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
            raise UsageError("register needs a hook", expected=", ".join(MOMENTS))
        try:
            self._add(hooks)
        except BaseException:
            # An interrupt: nobody has what would unregister them.
            self._remove(hooks)
            raise
        return partial(self._remove, hooks)

    @contextmanager
    def registered(self, hooks: Mapping[Moment, Hook]) -> Iterator[None]:
        """Within the block these are registered, however it ends."""
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
        """Twice does no harm, and brings to an end what an interrupt has left of the first time."""
        self._registered = [each for each in self._registered if each is not hooks]
        self._update()

    def _update(self) -> None:
        for moment, those in self.moments.items():
            those.hooks = tuple([hooks[moment] for hooks in self._registered if moment in hooks])
        self.bits = sum(those.bit for those in self.moments.values() if those.hooks)
        self._changed()
