"""A merged task of programs as one program, and programs run by the names of tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stitch.linker import Wire, link_programs
from stitch.machine import MachineShape
from stitch.program import Array, Program
from stitch.runtime import RuntimeDevice, Tensor
from stitch.tasks import MergedAgent, ProgramAgent, TaskGraph, TaskRow
from stitch.ttb import Binary


def linked(graph: TaskGraph, machine: MachineShape) -> tuple[Program, list[str], list[str]]:
    """A graph of one task, merged of programs, linked; its inputs and outputs as tensors' names."""
    table = graph.table()
    (row,) = table.tasks
    agent = row.agent
    if isinstance(agent, ProgramAgent):  # A graph of one program.
        given, first = tuple(range(agent.takes)), agent.takes
        made = tuple(range(first, first + len(row.outputs)))
        agent = MergedAgent(agent.takes, (TaskRow(agent, given, made),), made)
    assert isinstance(agent, MergedAgent)
    outside = {number: name for name, number in table.inputs}
    entering = [outside[number] for number in row.inputs]
    called = {number: name for name, number in table.outputs}
    programs: list[Program] = []
    sources: dict[int, tuple[int, int]] = {}
    wires, inputs = [], []
    for index, member in enumerate(agent.members):
        assert isinstance(member.agent, ProgramAgent)
        programs.append(member.agent.program)
        for i, number in enumerate(member.inputs):
            if number in sources:
                wires.append(Wire(*sources[number], index, i))
            else:
                inputs.append(entering[number])
        sources.update({number: (index, o) for o, number in enumerate(member.outputs)})
    ports = {
        sources[number]: called[out] for number, out in zip(agent.kept, row.outputs, strict=True)
    }
    program = link_programs(programs, wires, machine=machine, name=graph.name, keep={*ports})
    return program, inputs, [ports[port] for port in sorted(ports)]


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
