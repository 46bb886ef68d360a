"""Task signatures: the slots that a task has, and what it may do with what is bound to them."""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType, UnionType
from typing import Any

from stitch.argument_kinds import MAPPING, WORDS, takes
from stitch.errors import UsageError, closest
from stitch.tasks import Permission


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
