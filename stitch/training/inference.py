"""The model that is being trained, as it is used: no statistics of the batch, no new buffers.

Comes in: the graph that is trained, a training instance or the values of its weights. Goes out: a
graph for inference, and predictions with the weights of this moment, which stay where they are.
Must not know: losses, files, front ends.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from stitch.compiler import CompileOptions, compile_graph
from stitch.errors import UsageError
from stitch.graph import ComputationGraph, ComputationGraphBuilder, SymbolicTensor, Wish
from stitch.program import ABSENT, Array, InputKind, Operation, Program
from stitch.runtime import Tensor
from stitch.training.instance import TrainingInstance
from stitch.training.programs import home_space
from stitch.ttb import Binary

_WEIGHTS = (InputKind.PARAMETER, InputKind.STATE)


def graph_of(program: Program) -> ComputationGraph:
    """The graph that a program was before it was placed."""
    return ComputationGraph(
        program.name,
        program.inputs,
        tuple(replace(slot, aliases_input=None) for slot in program.outputs),
        tuple(replace(value, layout=None) for value in program.values),
        program.operations,
        program.constants,
    )


def inference_graph(
    graph: ComputationGraph, prediction: str, values: Mapping[str, Array] | None = None
) -> ComputationGraph:
    """The graph with one output, and operators as they are in use.

    BatchNormalization takes its running statistics. With `values` weights are constants, else
    inputs. Raises `UsageError` for an output that there is not.
    """
    builder = ComputationGraphBuilder(graph.name)
    known: dict[int, SymbolicTensor] = {}
    for i, slot in enumerate(graph.inputs):
        kind = graph.input_type(i)
        if values is not None and slot.kind in _WEIGHTS:
            data = values[slot.name].astype(kind.data_type.dtype)
            known[slot.value] = builder.parameter(slot.name, data)
        else:
            known[slot.value] = builder.input(slot.name, kind.shape, kind.data_type, slot.kind)
    for constant in graph.constants:
        known[constant.value] = builder.parameter(graph.values[constant.value].name, constant.data)
    for operation in graph.operations:
        _write(builder, graph, _in_use(operation), known)
    wanted = [slot.value for slot in graph.outputs if slot.name == prediction]
    if not wanted:
        raise UsageError(f"graph {graph.name!r} has no output {prediction!r}")
    builder.output(prediction, known[wanted[0]])
    return builder.build()


def _in_use(operation: Operation) -> Operation:
    if operation.domain or operation.op != "BatchNormalization":
        return operation
    attributes = {k: v for k, v in operation.attributes.items() if k != "training_mode"}
    return replace(operation, attributes=attributes, outputs=operation.outputs[:1])


def _write(
    builder: ComputationGraphBuilder, graph: ComputationGraph, operation: Operation,
    known: dict[int, SymbolicTensor],
) -> None:  # fmt: skip
    if any(v != ABSENT and v not in known for v in operation.inputs):
        return  # It reads what is only there in training, such as a batch's own statistics.
    present = [v for v in operation.outputs if v != ABSENT]
    with builder.at(operation.location):
        made = builder.apply(
            operation.op,
            [None if v == ABSENT else known[v] for v in operation.inputs],
            [graph.values[v].name for v in present],
            operation.attributes,
            operation.domain,
        )
    known.update(zip(present, made, strict=True))


class Inference:
    """Predictions of a model in training, on the same device, from the same weights in place."""

    def __init__(self, instance: TrainingInstance, graph: ComputationGraph) -> None:
        """Compile and load; raises what compiling raises."""
        self.instance = instance
        self.prediction = instance.programs.prediction
        wanted = inference_graph(graph, self.prediction)
        home = home_space(instance.device.machine)
        wishes = tuple(Wish("input", i, "space", home) for i in range(len(wanted.inputs)))
        machine = instance.device.machine
        made = compile_graph(wanted, machine, CompileOptions(wishes=wishes, name=wanted.name))
        binary = Binary((made.program,), machine.shape, "stitch training")
        self._agent = instance.device.load(binary)
        self._slots = made.program.inputs

    def __call__(self, batch: Mapping[str, Array]) -> Array:
        """The prediction for one batch, by input; random operators draw with the key 0."""
        given: list[Any] = []
        for slot, port in zip(self._slots, self._agent.ports, strict=True):
            if slot.kind in _WEIGHTS:
                given.append(self.instance._cells.get(slot.name))
            elif slot.kind is InputKind.KEY:
                given.append(np.zeros(port.shape, port.dtype))
            else:
                given.append(batch[slot.name])
        made = self.instance.device.submit(self._agent, given)
        assert isinstance(made, Tensor)
        return made.numpy()
