"""The slots of the task that updates all parameters: what it steps, with what, at which rate.

Comes in: the graph of an update. Goes out: a signature, a binding, and what the program's slots
are. Must not know: optimizers' formulas, devices.
"""

from __future__ import annotations

from collections.abc import Sequence

from stitch.graph import ComputationGraph
from stitch.program import Ownership
from stitch.tasks import Permission
from stitch.training.graphs import LEARNING_RATE, Parameter
from stitch.training.local_backend.program_task import TaskPort
from stitch.training.local_backend.task_binding import RuntimeArgument, TaskBinding
from stitch.training.local_backend.task_slots import SlotKind, TaskSignature, TensorSlot


def update_slots(
    graph: ComputationGraph, parameters: Sequence[Parameter]
) -> tuple[TaskSignature, TaskBinding, dict[str, TaskPort]]:
    """A slot for each parameter and state, called after it; the rate is an argument by reference.

    What is replaced is read and written, gradients are read.
    """
    gradients = {parameter.gradient: parameter.name for parameter in parameters}
    taken = {slot.name: slot for slot in graph.inputs if slot.name != LEARNING_RATE}
    names = [name for name in taken if name not in gradients]
    names += [slot.name for slot in graph.outputs if slot.name not in taken]
    slots = []
    for name in names:
        given = name in taken
        replaced = not given or taken[name].ownership is Ownership.DONATE
        kind = SlotKind.WEIGHT if name in gradients.values() else SlotKind.UNTRAINABLE
        slots.append(
            TensorSlot(
                name,
                kind if given else SlotKind.OUTPUT,
                _permission(reads=given, writes=replaced),
                Permission.READ_ONLY if kind is SlotKind.WEIGHT else Permission.NONE,
            )
        )
    arguments = {LEARNING_RATE: float, "profiling": bool}
    binding = TaskBinding(
        {name: name for name in names},
        {name: gradient for gradient, name in gradients.items()},
        {LEARNING_RATE: RuntimeArgument.LEARNING_RATE, "profiling": RuntimeArgument.PROFILING},
    )
    ports = {name: TaskPort("tensor", name) for name in names}
    ports |= {gradient: TaskPort("gradient", name) for gradient, name in gradients.items()}
    ports[LEARNING_RATE] = TaskPort("argument", LEARNING_RATE)
    signature = TaskSignature(tuple(slots), arguments, float | None)
    return signature, binding, ports


def _permission(*, reads: bool, writes: bool) -> Permission:
    one = Permission.READ_ONLY if reads else Permission.NONE
    return one.join(Permission.WRITE_ONLY if writes else Permission.NONE)
