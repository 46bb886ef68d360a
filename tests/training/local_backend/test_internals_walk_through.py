"""The walk-through of FlexFlow's local backend: a test for each rule, named after it.

`docs/tasks.md` lists the rules.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import pytest

from stitch.errors import UsageError
from stitch.graph import ComputationGraph, ComputationGraphBuilder
from stitch.program import Role
from stitch.tasks import Permission
from stitch.training import (
    LayerTask,
    LocalTaskBackend,
    ModelTrainingInstance,
    RuntimeBacking,
    TaskArgumentAccessor,
    TaskBinding,
    TaskInvocation,
    TaskSignature,
    execute,
    task_signature,
)


def branching() -> ComputationGraph:
    """Two linear layers read one value, and another adds what they give; each operator is another
    task."""
    rng = np.random.default_rng(0)
    b = ComputationGraphBuilder("branching")
    x = b.input("x", (4, 6), "float32")
    weights = [b.parameter(f"w{i}", rng.standard_normal((6, 6)).astype(np.float32)) for i in (0, 1)]
    h = b.relu(b.linear(x, weights[0]))
    b.output("y", b.add(b.tanh(h), b.sigmoid(b.matmul(h, weights[1]))))
    return b.build()


class Watched:
    """A backing that notes what is asked of the one inside, in order."""

    def __init__(self, inside: LocalTaskBackend) -> None:
        self.inside, self.profiling = inside, False
        self.asked: list[tuple[str, str]] = []

    @property
    def graph(self) -> ComputationGraph:
        return self.inside.graph

    def register_task(self, task_id: str, signature: TaskSignature, implementation: Any) -> None:
        self.inside.register_task(task_id, signature, implementation)

    def get_args(self, invocation: TaskInvocation) -> TaskArgumentAccessor:
        self.asked.append(("args", invocation.task_id))
        return self.inside.get_args(invocation)

    def get_task_impl(self, invocation: TaskInvocation) -> Any:
        self.asked.append(("impl", invocation.task_id))
        plain = self.inside.get_task_impl(invocation)

        def noted(accessor: TaskArgumentAccessor) -> Any:
            self.asked.append(("call", invocation.task_id))
            return plain(accessor)

        return noted

    def stage(self, role: Role) -> AbstractContextManager[Sequence[LayerTask]]:
        return self.inside.stage(role)

    def synchronize(self) -> None:
        self.inside.synchronize()

    def called(self) -> list[str]:
        """The tasks that were called since it was asked last."""
        names = [name for what, name in self.asked if what == "call"]
        self.asked.clear()
        return names


@pytest.fixture
def backend() -> Iterator[LocalTaskBackend]:
    with LocalTaskBackend(branching(), optimizer="sgd", loss="mse") as backend:
        backend.set_tensor("x", np.ones((4, 6), np.float32))
        backend.set_tensor("label", np.zeros((4, 6), np.float32))
        yield backend


def ids(tasks: Sequence[LayerTask]) -> list[str]:
    return [task.invocation.task_id for task in tasks]


# -- compilation -----------------------------------------------------------------------------------


def test_a_computation_graph_initializes_a_runtime_backing(backend: LocalTaskBackend) -> None:
    backing: RuntimeBacking = backend
    assert isinstance(backing.graph, ComputationGraph)
    assert len(backend.tasks(Role.FORWARD)) == len(backing.graph.operations) > 0


def test_a_forward_task_is_registered_for_each_operator_in_topological_order(
    backend: LocalTaskBackend,
) -> None:
    forward = backend.tasks(Role.FORWARD)
    assert ids(forward) == [f"{op}.forward" for op in
                            ("Gemm", "Relu", "Tanh", "MatMul", "Sigmoid", "Add")]  # fmt: skip
    known = {"x", "w0", "w1"}
    for task in forward:
        slots = task.invocation.binding.tensors.items()
        assert {name for slot, name in slots if slot.startswith("input")} <= known
        known |= {str(name) for slot, name in slots if slot.startswith("output")}
    registered = list(backend.store.signatures)
    assert registered[: len(forward)] == ids(forward)


def test_a_backward_task_is_registered_for_each_operator_in_reverse(
    backend: LocalTaskBackend,
) -> None:
    forward, back = backend.tasks(Role.FORWARD), backend.tasks(Role.BACKWARD)
    assert [task.layer for task in back] == [task.layer for task in reversed(forward)]
    registered = [name for name in backend.store.signatures if name.endswith(".backward")]
    assert registered == ids(back)


def test_the_update_task_is_registered_last(backend: LocalTaskBackend) -> None:
    assert list(backend.store.signatures)[-1] == "update"


def test_registering_a_task_adds_its_argument_and_tensor_slots_to_the_store(
    backend: LocalTaskBackend,
) -> None:
    signature = task_signature(inputs=["a"], outputs=["b"], arguments={"factor": float})
    backend.register_task("mine", signature, lambda accessor: None)
    stored = backend.store.signatures["mine"]
    assert [slot.name for slot in stored.tensors] == ["a", "b"]
    assert dict(stored.arguments) == {"factor": float}


def test_registering_a_task_maps_its_id_to_its_implementation(backend: LocalTaskBackend) -> None:
    def implementation(accessor: TaskArgumentAccessor) -> None:
        raise AssertionError("nobody calls it")

    backend.register_task("mine", task_signature(), implementation)
    invocation = TaskInvocation("mine", TaskBinding())
    assert backend.get_task_impl(invocation) is implementation


# -- runtime ---------------------------------------------------------------------------------------


def test_an_instance_refers_to_the_graph_and_the_backing(backend: LocalTaskBackend) -> None:
    instance = ModelTrainingInstance(backend.graph, backend)
    assert instance.graph is backend.graph and instance.backing is backend


def test_forward_executes_each_operator_in_topological_order(backend: LocalTaskBackend) -> None:
    watched = Watched(backend)
    ModelTrainingInstance(watched.graph, watched).forward()
    assert watched.called() == ids(backend.tasks(Role.FORWARD))


def test_backward_executes_each_operator_in_reverse(backend: LocalTaskBackend) -> None:
    watched = Watched(backend)
    instance = ModelTrainingInstance(watched.graph, watched)
    instance.forward()
    watched.called()
    instance.backward()
    assert watched.called() == ["loss", *ids(backend.tasks(Role.BACKWARD))]


def test_update_executes_one_task(backend: LocalTaskBackend) -> None:
    watched = Watched(backend)
    instance = ModelTrainingInstance(watched.graph, watched)
    instance.forward()
    instance.backward()
    before = backend.get_tensor("w0")
    watched.called()
    instance.update()
    assert watched.called() == ["update"]
    assert not np.array_equal(backend.get_tensor("w0"), before)


def test_execute_gets_the_accessor_and_the_implementation_and_calls_it(
    backend: LocalTaskBackend,
) -> None:
    watched = Watched(backend)
    given: list[Any] = []

    def implementation(accessor: TaskArgumentAccessor) -> int:
        given.append(accessor)
        return 7

    backend.register_task("mine", task_signature(inputs=["a"], returns=int), implementation)
    invocation = TaskInvocation("mine", TaskBinding({"a": "x"}))
    assert execute(watched, invocation) == 7
    assert watched.asked == [("args", "mine"), ("impl", "mine"), ("call", "mine")]
    assert [type(accessor) for accessor in given] == [TaskArgumentAccessor]


def test_get_args_gives_an_accessor_of_what_the_store_has_for_the_task(
    backend: LocalTaskBackend,
) -> None:
    signature = task_signature(inputs=["a"], arguments={"factor": float})
    backend.register_task("mine", signature, lambda accessor: None)
    binding = TaskBinding({"a": "x"}, arguments={"factor": 2.5})
    accessor = backend.get_args(TaskInvocation("mine", binding))
    array = accessor.get_tensor("a", Permission.READ_ONLY).numpy()
    np.testing.assert_array_equal(array, backend.get_tensor("x"))
    assert accessor.get_argument("factor") == 2.5


def test_get_task_impl_gives_what_the_task_does(backend: LocalTaskBackend) -> None:
    (task,) = [t for t in backend.tasks(Role.FORWARD) if t.op == "Relu"]
    slots = task.invocation.binding.tensors
    backend.set_tensor(str(slots["input0"]), np.full((4, 6), -1, np.float32))
    implementation = backend.get_task_impl(task.invocation)
    accessor = backend.get_args(task.invocation)
    implementation(accessor)
    accessor.finish()
    made = backend.get_tensor(str(slots["output0"]))
    np.testing.assert_array_equal(made, np.zeros((4, 6)))


def test_backward_before_forward_says_what_comes_first() -> None:
    b = ComputationGraphBuilder("line")
    x = b.input("x", (4, 3), "float32")
    b.output("y", b.linear(x, b.parameter("w", np.zeros((1, 3), np.float32))))
    graph = b.build()
    for loss in ("mse", None):
        with LocalTaskBackend(graph, loss=loss) as backend:
            assert isinstance(backend, RuntimeBacking) and not isinstance(graph, RuntimeBacking)
            instance = ModelTrainingInstance(graph, backend)
            backend.set_tensor("x", np.ones((4, 3), np.float32))
            with pytest.raises(UsageError, match=r"(?s)before forward.*call forward\(\) first"):
                instance.backward()
            assert repr(instance).startswith(f"<ModelTrainingInstance of {graph.name} by ")
            instance.forward()
            name = "y.grad" if loss is None else "label"
            backend.set_tensor(name, np.ones((4, 1), np.float32))
            instance.backward()
            assert backend.get_tensor("w.grad").shape == (1, 3)
