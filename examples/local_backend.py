"""A model as tasks: an MLP is registered operator by operator, run forward and back, and trained.

Each operator has a forward task and a backward task, whose signature and binding are inferred from
the forward one's; one task updates all weights. Tensors are written and read by name. Last, a task
of our own runs on the same tensors.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping

import numpy as np

import stitch
from stitch.tasks import Permission
from stitch.training import (
    LocalTaskBackend,
    ModelTrainingInstance,
    TaskArgumentAccessor,
    TaskBinding,
    TaskInvocation,
    task_signature,
)

RANDOM = np.random.default_rng(0)
STEPS = 100


def mlp() -> stitch.graph.ComputationGraph:
    """Batches of 16 times 10 features, to 32, to 1, with a ReLU between."""
    b = stitch.ComputationGraphBuilder("mlp")
    x = b.input("x", (16, 10), "float32")

    def weight(name: str, *shape: int) -> stitch.graph.SymbolicTensor:
        return b.parameter(name, RANDOM.standard_normal(shape, dtype=np.float32) * np.float32(0.3))

    hidden = b.relu(b.linear(x, weight("fc1.weight", 32, 10), weight("fc1.bias", 32)))
    b.output("y", b.linear(hidden, weight("fc2.weight", 1, 32), weight("fc2.bias", 1)))
    return b.build()


def show(bound: Mapping[str, object]) -> str:
    """What slots are bound to, on one line."""
    return ", ".join(f"{slot}={name}" for slot, name in bound.items())


def largest(accessor: TaskArgumentAccessor) -> float:
    """A task of our own: the largest absolute value of a tensor."""
    return float(np.abs(accessor.get_tensor("tensor", Permission.READ_ONLY).numpy()).max())


def main() -> int:
    """Register, run one step with times, train, and ask a task of our own."""
    graph = mlp()
    x = RANDOM.standard_normal((16, 10), dtype=np.float32)
    label = np.tanh(x[:, :1] - x[:, 1:2])
    with LocalTaskBackend(graph, optimizer=stitch.Adam(lr=0.01), loss="mse") as backend:
        for role in ("forward", "loss", "backward"):
            for task in backend.tasks(role):
                binding = task.invocation.binding
                print(f"{task.invocation.task_id:16} {show(binding.tensors)}")
                if binding.gradients:
                    print(f"{'gradients':>16} {show(binding.gradients)}")
        instance = ModelTrainingInstance(graph, backend)
        backend.set_tensor("x", x)
        backend.set_tensor("label", label)
        backend.profiling = True
        for name in ("forward", "backward", "update"):
            print(f"\n== {name}")
            for time in getattr(instance, name)() or ():
                print(f"{time.name:8} {time.op:6} {time.seconds * 1e6:9.1f} us")
        backend.profiling = False
        losses = []
        for _ in range(STEPS):
            instance.forward()
            instance.backward()
            instance.update()
            losses.append(backend.get_tensor("loss").item())
        print(f"\nloss: {losses[0]:.4f}, after {STEPS} steps {losses[-1]:.1e}")
        signature = task_signature(inputs=["tensor"], returns=float)
        backend.register_task("largest", signature, largest)
        for name in ("fc1.weight", "relu", "relu.grad"):
            found = backend.execute(TaskInvocation("largest", TaskBinding({"tensor": name})))
            print(f"largest of {name}: {found:.4f}")
    return 0 if losses[-1] < 1e-2 * losses[0] else 1


if __name__ == "__main__":
    sys.exit(main())
