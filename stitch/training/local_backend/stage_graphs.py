"""A part of a training step as a task graph: what others aggregate, show, or run elsewhere.

Comes in: the tasks of a stage, in order, and the programs that they are. Goes out: a `TaskGraph`
whose inputs and outputs are called after the tensors. Must not know: devices, accessors.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from stitch.tasks import Future, TaskGraph
from stitch.training.local_backend.program_task import ProgramTask
from stitch.training.local_backend.runtime_backing import LayerTask


def stage_graph(
    name: str, stage: Sequence[LayerTask], tasks: Mapping[str, ProgramTask], kept: Collection[str]
) -> TaskGraph:
    """The tasks of a stage as calls of their programs; `kept`: the tensors that are outputs."""
    graph = TaskGraph(name)
    #: What a tensor is after the tasks so far.
    now: dict[str, Future] = {}
    made: dict[str, None] = {}
    for layer in stage:
        task, binding = tasks[layer.invocation.task_id], layer.invocation.binding
        given = []
        for i, port in enumerate(task.inputs):
            tensor = port.name(binding)
            if tensor not in now:
                now[tensor] = graph.input(task.program.input_desc(i), tensor)
            given.append(now[tensor])
        results = graph.call(task.program, *given)
        names = [port.name(binding) for port in task.outputs]
        now.update(zip(names, (results,) if isinstance(results, Future) else results, strict=True))
        made |= dict.fromkeys(names)
    for tensor in made:
        if tensor in kept:
            graph.output(now[tensor], tensor)
    return graph
