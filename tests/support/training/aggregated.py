"""A merged task of programs as one program, and programs run by the names of tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stitch.linker import link_tasks
from stitch.machine import MachineShape
from stitch.program import Array, Program
from stitch.runtime import RuntimeDevice, Tensor
from stitch.tasks import ProgramAgent, TaskGraph
from stitch.ttb import Binary


def linked(graph: TaskGraph, machine: MachineShape) -> tuple[Program, list[str], list[str]]:
    """A graph of one task, merged of programs, linked; its inputs and outputs as tensors' names."""
    table = link_tasks(graph.table(), machine)
    (row,) = table.tasks
    assert isinstance(row.agent, ProgramAgent)
    outside = {number: name for name, number in table.inputs}
    called = {number: name for name, number in table.outputs}
    inputs = [outside[number] for number in row.inputs]
    return row.agent.program, inputs, [called[number] for number in row.outputs]


def run(
    device: RuntimeDevice, program: Program, inputs: list[str], outputs: list[str],
    values: Mapping[str, Any],
) -> dict[str, Array]:  # fmt: skip
    """The results of a program by the names that its outputs have."""
    agent = device.load(Binary((program,), device.machine.shape, "test"))
    results = device.submit(agent, [_own(device, values[name]) for name in inputs])
    tensors = (results,) if isinstance(results, Tensor) else results
    return {name: t.numpy() for name, t in zip(outputs, tensors, strict=True)}


def _own(device: RuntimeDevice, value: Any) -> Tensor:
    """A tensor that a program may be given for good."""
    return device.tensor(value)
