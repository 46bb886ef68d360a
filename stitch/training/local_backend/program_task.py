"""A task that is a program: its slots are a program's, and running it queues the program."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from stitch.compiler import CompileOptions, compile_graph
from stitch.graph import ComputationGraph
from stitch.machine import Machine
from stitch.program import Program, Role, Space
from stitch.runtime import LoadedProgram, RuntimeDevice, Tensor
from stitch.tasks import Permission
from stitch.training.local_backend.task_arguments import TaskArgumentAccessor, TensorAccessor
from stitch.training.local_backend.task_binding import TaskBinding
from stitch.training.local_backend.task_slots import TaskSignature
from stitch.training.observing import profiled
from stitch.training.programs import slot_places
from stitch.ttb import Binary


@dataclass(frozen=True, slots=True)
class TaskPort:
    """Where a slot of a program comes from or goes to: a tensor, a gradient or an argument."""

    what: Literal["tensor", "gradient", "argument"]
    slot: str

    def name(self, binding: TaskBinding) -> str:
        """The tensor that a binding says it is; for an argument, that of the argument."""
        if self.what == "argument":
            return self.slot
        bound = (binding.tensors if self.what == "tensor" else binding.gradients)[self.slot]
        assert isinstance(bound, str), "programs have a slot for each tensor"
        return bound


@dataclass(frozen=True, slots=True, eq=False)
class ProgramTask:
    """A program as a task: the ports of its inputs and outputs, in the program's order."""

    program: Program
    signature: TaskSignature
    inputs: tuple[TaskPort, ...]
    outputs: tuple[TaskPort, ...]


def program_task(
    graph: ComputationGraph, task_id: str, role: Role, machine: Machine,
    signature: TaskSignature, ports: Mapping[str, TaskPort], spaces: Mapping[str, Space],
) -> ProgramTask:  # fmt: skip
    """A graph, compiled; `ports` says what its slots are, `spaces` where they lie, if not at home.

    Raises what compiling a graph raises.
    """
    graph = replace(graph, name=task_id)
    placement = tuple(slot_places(graph, machine, spaces))
    program = compile_graph(graph, machine, CompileOptions(placement=placement, role=role)).program
    return ProgramTask(
        program,
        signature,
        tuple([ports[slot.name] for slot in program.inputs]),
        tuple([ports[slot.name] for slot in program.outputs]),
    )


class LoadedTask:
    """A program's task on a device: what is registered as its implementation.

    It gives the seconds that its operations took while profiling is asked for, else None.
    """

    def __init__(self, task: ProgramTask, device: RuntimeDevice) -> None:
        self.task = task
        binary = Binary((task.program,), device.machine.shape, "stitch training")
        self._agent: LoadedProgram = device.load(binary)

    def __call__(self, accessor: TaskArgumentAccessor) -> float | None:
        if not accessor.get_argument("profiling"):
            self._queue(accessor)
            return None
        times = profiled(accessor.device, lambda: self._queue(accessor))
        return sum([time.seconds for time in times], 0.0)

    def _queue(self, accessor: TaskArgumentAccessor) -> None:
        given = [
            np.asarray(accessor.get_argument(port.slot), known.dtype)
            if port.what == "argument"
            else _access(accessor, port, Permission.READ_ONLY).tensor
            for port, known in zip(self.task.inputs, self._agent.ports, strict=True)
        ]
        written = [
            _access(accessor, port, Permission.WRITE_ONLY) for port in self.task.outputs
        ]  # fmt: skip
        results = accessor.device.submit(self._agent, given)
        tensors = (results,) if isinstance(results, Tensor) else results
        for access, tensor in zip(written, tensors, strict=True):
            access.put(tensor)


def _access(
    accessor: TaskArgumentAccessor, port: TaskPort, permission: Permission
) -> TensorAccessor:
    if port.what == "gradient":
        return accessor.get_tensor_grad(port.slot, permission)
    return accessor.get_tensor(port.slot, permission)
