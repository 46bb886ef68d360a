"""Task signatures: the slots that a task has, and what it may do with what is bound to them.

Task bindings: which value each slot of a task stands for, and invocations of tasks.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType, UnionType
from typing import Any, TypeAlias

from stitch.argument_kinds import MAPPING, WORDS, takes
from stitch.errors import UsageError, closest
from stitch.tasks import Permission

# --------------------------------------------------------------------------------------------------
# Signatures


class SlotKind(enum.Enum):
    """What a tensor is to a task. `UNTRAINABLE`: an input that has no gradient."""

    INPUT = "input"
    OPTIONAL = "optional"
    UNTRAINABLE = "untrainable"
    OUTPUT = "output"
    WEIGHT = "weight"


@dataclass(frozen=True, slots=True)
class TensorSlot:
    """A slot for a tensor, or, if `variadic`, for any number of them.

    `gradient`: what the task may do with the gradient of what is bound to it.
    """

    name: str
    kind: SlotKind
    permission: Permission
    gradient: Permission = Permission.NONE
    variadic: bool = False


@dataclass(frozen=True, slots=True)
class TaskSignature:
    """The slots of a task: tensors, arguments by name and type, and the type of what it returns.

    Raises `UsageError` for two slots of one name. `returns`: None for a task that gives nothing.
    """

    tensors: tuple[TensorSlot, ...] = ()
    arguments: Mapping[str, type | UnionType] = field(default_factory=dict)
    returns: type | UnionType | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "arguments", MappingProxyType(dict(self.arguments)))
        counts = Counter([*(slot.name for slot in self.tensors), *self.arguments])
        twice = [name for name, count in counts.items() if count > 1]
        if twice:
            raise UsageError(f"a task signature has two slots called {twice[0]!r}",
                             expected="a name of its own for each slot")  # fmt: skip

    def tensor(self, name: str) -> TensorSlot:
        """The tensor slot of a name; raises `UsageError` where there is none."""
        for slot in self.tensors:
            if slot.name == name:
                return slot
        names = [slot.name for slot in self.tensors]
        raise UsageError(
            f"the task has no tensor slot {name!r}", expected=", ".join(names) or "none",
            remedy=closest(name, names) or None,
        )  # fmt: skip

    def argument(self, name: str) -> type | UnionType:
        """The type of an argument slot; raises `UsageError` where there is none."""
        if name not in self.arguments:
            raise UsageError(
                f"the task has no argument slot {name!r}",
                expected=", ".join(self.arguments) or "none",
                remedy=closest(name, self.arguments) or None,
            )
        return self.arguments[name]


@takes(
    inputs=WORDS,
    optional=WORDS,
    untrainable=WORDS,
    weights=WORDS,
    outputs=WORDS,
    variadic=WORDS,
    arguments=MAPPING,
)
def task_signature(
    *,
    inputs: Iterable[str] = (),
    optional: Iterable[str] = (),
    untrainable: Iterable[str] = (),
    weights: Iterable[str] = (),
    outputs: Iterable[str] = (),
    variadic: Iterable[str] = (),
    arguments: Mapping[str, Any] = MappingProxyType({}),
    returns: type | UnionType | None = None,
) -> TaskSignature:
    """The signature of a forward task: outputs are written, all else is read.

    `variadic`: those of the slots that take any number of tensors. Raises `UsageError` for two
    slots of one name, and for variadic slots that are none.

    >>> task_signature(inputs=["x"], outputs=["y"]).tensor("y").permission
    <Permission.WRITE_ONLY: 'write_only'>
    """
    kinds = (
        (SlotKind.INPUT, inputs), (SlotKind.OPTIONAL, optional),
        (SlotKind.UNTRAINABLE, untrainable), (SlotKind.WEIGHT, weights),
        (SlotKind.OUTPUT, outputs),
    )  # fmt: skip
    many = set(variadic)
    slots = [
        TensorSlot(
            name, kind,
            Permission.WRITE_ONLY if kind is SlotKind.OUTPUT else Permission.READ_ONLY,
            variadic=name in many,
        )
        for kind, names in kinds for name in names
    ]  # fmt: skip
    signature = TaskSignature(tuple(slots), arguments, returns)
    for name in sorted(many):
        signature.tensor(name)
    return signature


def backward_signature(forward: TaskSignature) -> TaskSignature:
    """The signature of the task that goes back: the same slots, all read, and gradient slots.

    Gradients of outputs are read; those of inputs and weights are read and written, because what
    several tasks contribute is added up. Untrainable inputs have none.

    >>> forward = task_signature(inputs=["x"], outputs=["y"])
    >>> backward_signature(forward).tensor("x").gradient
    <Permission.READ_WRITE: 'read_write'>
    """
    of = {SlotKind.OUTPUT: Permission.READ_ONLY, SlotKind.UNTRAINABLE: Permission.NONE}
    return replace(
        forward,
        tensors=tuple([
            replace(
                slot, permission=Permission.READ_ONLY,
                gradient=of.get(slot.kind, Permission.READ_WRITE),
            )
            for slot in forward.tensors
        ]),
    )  # fmt: skip


# --------------------------------------------------------------------------------------------------
# Bindings

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
