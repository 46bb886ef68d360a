"""Task bindings: which value each slot of a task stands for, and invocations of tasks."""

from __future__ import annotations

import enum
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, TypeAlias

from stitch.errors import UsageError
from stitch.tasks import Permission
from stitch.training.local_backend.task_slots import SlotKind, TaskSignature

#: The name of a tensor; several for a variadic slot.
Bound: TypeAlias = "str | tuple[str, ...]"


class RuntimeArgument(enum.Enum):
    """An argument by reference: what it is, the backend says when the task runs."""

    #: The device that the task runs on.
    DEVICE_STATE = "device state"
    #: How many updates there have been.
    ITERATION = "iteration"
    #: Whether times are asked for.
    PROFILING = "profiling"
    #: The optimizer's rate in this iteration.
    LEARNING_RATE = "learning rate"


@dataclass(frozen=True, slots=True)
class TaskBinding:
    """What the slots of a task stand for: tensors by name, and, apart from them, gradients.

    `arguments` are values, or `RuntimeArgument`s.

    >>> TaskBinding({"x": "image", "y": "logits"}).tensors["y"]
    'logits'
    """

    tensors: Mapping[str, Bound] = field(default_factory=dict)
    gradients: Mapping[str, Bound] = field(default_factory=dict)
    arguments: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for side in ("tensors", "gradients", "arguments"):
            object.__setattr__(self, side, MappingProxyType(dict(getattr(self, side))))

    def names(self) -> Iterator[str]:
        """The names of all tensors and gradients that are bound."""
        for bound in (*self.tensors.values(), *self.gradients.values()):
            yield from names_of(bound)


@dataclass(frozen=True, slots=True)
class TaskInvocation:
    """A task, by its id, on what its slots are bound to."""

    task_id: str
    binding: TaskBinding


def check_binding(signature: TaskSignature, invocation: TaskInvocation) -> None:
    """Raise one `UsageError` with all slots that are not bound, or to what they cannot take."""
    problems = [*_problems(signature, invocation.binding)]
    if problems:
        raise UsageError(
            f"task {invocation.task_id!r} cannot run with this binding: " + "; ".join(problems)
        )


def _problems(signature: TaskSignature, binding: TaskBinding) -> Iterator[str]:
    slots = {slot.name: slot for slot in signature.tensors}
    for slot in signature.tensors:
        if slot.name not in binding.tensors and slot.kind is not SlotKind.OPTIONAL:
            yield f"{slot.kind.value} slot {slot.name!r} is not bound"
    sides = (("tensor", binding.tensors), ("gradient", binding.gradients))
    for word, bound in sides:
        for name, value in bound.items():
            known = slots.get(name)
            if known is None or (word == "gradient" and known.gradient is Permission.NONE):
                yield f"there is no {word} slot {name!r}"
            elif known.variadic is isinstance(value, str):
                wanted = "a tuple of names" if known.variadic else "one name"
                yield f"{word} slot {name!r} takes {wanted}, not {value!r}"
    for name, kind in signature.arguments.items():
        given = binding.arguments.get(name)
        if name not in binding.arguments:
            yield f"argument {name!r} is not bound"
        elif not isinstance(given, RuntimeArgument | kind):
            yield f"argument {name!r} is {type(given).__name__}, expected {_called(kind)}"
    for name in binding.arguments.keys() - signature.arguments.keys():
        yield f"there is no argument slot {name!r}"


def _called(kind: Any) -> str:
    return kind.__name__ if isinstance(kind, type) else str(kind)


def names_of(bound: Bound) -> tuple[str, ...]:
    """The tensors that a slot is bound to."""
    return (bound,) if isinstance(bound, str) else bound


def gradient_name(tensor: str) -> str:
    """What the gradient of a tensor is called.

    >>> gradient_name("fc.weight")
    'fc.weight.grad'
    """
    return f"{tensor}.grad"


def backward_binding(
    forward: TaskBinding, backward: TaskSignature, flowing: Container[str] | None = None
) -> TaskBinding:
    """The binding of the task that goes back: as forward, and gradients of the same tensors.

    `backward` is its signature. `flowing`: the tensors that a gradient flows to or from (default:
    all that have a gradient slot).
    """
    gradients: dict[str, Bound] = {}
    for slot in backward.tensors:
        bound = forward.tensors.get(slot.name)
        if bound is None or slot.gradient is Permission.NONE:
            continue
        names = names_of(bound)
        if flowing is None or all(name in flowing for name in names):
            of = tuple(map(gradient_name, names))
            gradients[slot.name] = of[0] if isinstance(bound, str) else of
    return TaskBinding(forward.tensors, gradients, forward.arguments)
