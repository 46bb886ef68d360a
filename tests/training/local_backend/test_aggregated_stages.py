"""All tasks of a stage, aggregated, are the program that the compiler makes for the whole graph."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import stitch
from stitch.graph import ComputationGraph, ComputationGraphBuilder
from stitch.program import Array, InputKind, Program, Role
from stitch.runtime import RuntimeDevice
from stitch.tasks import aggregate
from stitch.training import LocalTaskBackend, ModelTrainingInstance
from tests.support.grids import in_turn
from tests.support.training.aggregated import linked, run
from tests.support.training.models import mlp

RNG = np.random.default_rng(5)
Given = dict[str, Array]


def weight(b: ComputationGraphBuilder, name: str, *shape: int) -> Any:
    return b.parameter(name, (RNG.standard_normal(shape) * 0.3).astype(np.float32))


def branches() -> ComputationGraph:
    """Values with several readers, one operator that reads a value twice, a weight of two layers,
    and an output that is read inside."""
    b = ComputationGraphBuilder("branches")
    x = b.input("x", (8, 12), "float32")
    shared = weight(b, "shared", 12, 12)
    h = b.matmul(x, shared)
    a, c, d = b.tanh(h), b.sigmoid(h), b.relu(h)
    joined = (a * c + d * d) - b.matmul(h, shared)
    b.output("y", b.linear(joined, weight(b, "w", 3, 12), weight(b, "bias", 3)))
    b.output("joined", joined)
    return b.build()


def convolution() -> ComputationGraph:
    """Convolution, normalization with running statistics, pooling, a split and a concatenation."""
    b = ComputationGraphBuilder("convolution")
    x = b.input("x", (2, 3, 8, 8), "float32")
    kernel = b.input("conv.w", (4, 3, 3, 3), "float32", InputKind.PARAMETER)
    bias = b.input("conv.b", (4,), "float32", InputKind.PARAMETER)
    h = b.op("Conv", x, kernel, bias, pads=(1, 1, 1, 1))
    mean = b.input("mean", (4,), "float32", InputKind.STATE)
    var = b.input("var", (4,), "float32", InputKind.STATE)
    scale = b.input("scale", (4,), "float32", InputKind.PARAMETER)
    shift = b.input("shift", (4,), "float32", InputKind.PARAMETER)
    h, mean2, var2 = b.op(
        "BatchNormalization", h, scale, shift, mean, var, outputs=3, training_mode=1
    )
    h = b.op("MaxPool", b.relu(h), kernel_shape=(2, 2), strides=(2, 2))
    first, second = b.op("Split", h, outputs=2, axis=1, num_outputs=2)
    h = b.op("Concat", second, first, second, axis=1)
    h = b.op("Flatten", h)
    w = b.input("fc", (96, 5), "float32", InputKind.PARAMETER)
    b.output("y", b.op("Softmax", b.matmul(h, w), axis=1))
    b.output("mean", mean2)
    b.output("var", var2)
    return b.build()


def attention() -> ComputationGraph:
    """Batched products with a transposed operand, softmax, layer normalization, gelu."""
    b = ComputationGraphBuilder("attention")
    x = b.input("x", (2, 6, 8), "float32")
    h = b.op("LayerNormalization", x, weight(b, "ln.w", 8), weight(b, "ln.b", 8), axis=-1)
    q, k, v = (b.matmul(h, weight(b, name, 8, 8)) for name in ("q", "k", "v"))
    scores = b.matmul(q, b.transpose(k, (0, 2, 1)))
    mixed = b.matmul(b.op("Softmax", scores * 0.35, axis=-1), v)
    h = x + b.linear(mixed, weight(b, "o.w", 8, 8), weight(b, "o.b", 8))
    b.output("y", b.op("Gelu", b.linear(h, weight(b, "up", 8, 8))))
    return b.build()


def operators(program: Program) -> Counter[str]:
    """How often each operator is there, but for those that only hand a value on."""
    return Counter(o.op for o in program.operations if o.op != "Identity")


def values_of(graph: ComputationGraph) -> Given:
    """Something for every input that has no value."""
    made = {}
    for i, slot in enumerate(graph.inputs):
        kind = graph.input_type(i)
        array = RNG.random(kind.shape) + 0.5 if slot.kind is InputKind.STATE else None
        normal = RNG.standard_normal(kind.shape)
        made[slot.name] = (normal if array is None else array).astype(np.float32)
    return made


def check(role: Role, backend: LocalTaskBackend, whole: Program, spelled: Callable[[str], str],
          before: Given) -> None:  # fmt: skip
    """The aggregated stage gives, to the bit, what the program and the tasks themselves give.

    `before`: all tensors as the stage found them; `spelled`: what the program's slot is here.
    """
    device: RuntimeDevice = backend.device
    graph = backend.task_graph(role)
    merged = aggregate(graph, branches="keep")
    assert len(merged) == 1
    program, inputs, outputs = linked(merged, device.machine.shape)
    if role is Role.FORWARD:
        assert operators(program) == operators(whole)
    ours = run(device, program, inputs, outputs, before)
    slots = [spelled(slot.name) for slot in whole.inputs]
    results = [slot.name for slot in whole.outputs]
    theirs = run(device, whole, slots, results, before)
    assert set(theirs) >= {"y"} or role is not Role.FORWARD
    for name, array in theirs.items():
        mine = spelled(name)
        if role is Role.FORWARD:
            mine = backend.layers.next_states.get(mine, mine)
        assert backend.store.tensor(mine).numpy().tobytes() == array.tobytes(), name
        # The compiler saves a tensor in the shape that it was made in, tasks in that which is read.
        assert mine in ours or name.startswith("saved."), name
        assert mine not in ours or ours[mine].tobytes() == array.tobytes(), name


@pytest.mark.parametrize(
    ("make", "optimizer"), in_turn([mlp, branches, convolution, attention], ["sgd", "adam"])
)
def test_the_aggregated_tasks_are_the_programs_of_the_training(
    make: Callable[[], ComputationGraph], optimizer: str
) -> None:
    graph = make()
    given = values_of(graph)
    model = stitch.compile(graph, optimizer=optimizer, loss="mse", weights={
        slot.name: given[slot.name] for slot in graph.inputs
        if slot.kind is not InputKind.ACTIVATION
    })  # fmt: skip
    assert model.training is not None
    programs = model.training.programs
    weights = {n: a for n, a in given.items() if n != "x"}
    with LocalTaskBackend(graph, optimizer=optimizer, loss="mse", weights=weights) as backend:
        backend.set_tensor("x", given["x"])
        label = RNG.standard_normal(programs.loss.input_desc(0).shape).astype(np.float32)
        backend.set_tensor("label", label)
        # A step before, so that the optimizer's state is not zero.
        instance = ModelTrainingInstance(graph, backend)
        instance.forward()
        instance.backward()
        instance.update()
        for role, whole in zip(
            (Role.FORWARD, Role.LOSS, Role.BACKWARD, Role.UPDATE), programs.in_order, strict=True
        ):
            before = everything(backend)
            with backend.stage(role) as tasks:
                for task in tasks:
                    backend.execute(task.invocation)
            check(role, backend, whole, spelled_here(backend), before)


def everything(backend: LocalTaskBackend) -> Given:
    """Every tensor that is there, and the rate of the next update."""
    found = {}
    for name in backend.store.names:
        tensor = backend.store.find(name)
        if tensor is not None:
            found[name] = tensor.numpy()
    for name, after in backend.layers.next_states.items():
        if after in found:
            found[name] = found[after]
    assert backend.optimizer is not None
    rate = backend.optimizer.rate(backend.iteration)
    found["learning_rate"] = np.asarray(rate, np.float32)
    return found


def spelled_here(backend: LocalTaskBackend) -> Callable[[str], str]:
    """What a slot of the training's programs is called here: saved tensors have their own names."""
    differentiated = backend.layers.differentiated
    assert differentiated is not None
    values = {slot.name: slot.value for slot in differentiated.forward.outputs}
    names = {n: backend.layers.names[values[n]] for n in differentiated.saved}

    def spelled(name: str) -> str:
        return names.get(name, name)

    return spelled
