"""Which tasks there are, whose they are, the user's own; tensors that keep their places; copies."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import stitch
from stitch.errors import CompileError, TaskError, UsageError
from stitch.graph import ComputationGraph, ComputationGraphBuilder, PlacementOption
from stitch.program import InputKind, Role, Space
from stitch.runtime import PreparedGraph
from stitch.tasks import Permission, aggregate
from stitch.training import (
    LocalTaskBackend,
    ModelTrainingInstance,
    TaskArgumentAccessor,
    TaskBinding,
    TaskInvocation,
    task_signature,
)
from tests.support.training.models import batches, mlp

READ, WRITE, BOTH = Permission.READ_ONLY, Permission.WRITE_ONLY, Permission.READ_WRITE


def deep(layers: int) -> ComputationGraph:
    """Linear layers of one size, one after the other, and an operator that stops gradients."""
    rng = np.random.default_rng(2)
    b = ComputationGraphBuilder("deep")
    h = b.input("x", (4, 8), "float32")
    for i in range(layers):
        h = b.linear(h, b.parameter(f"w{i}", (rng.standard_normal((8, 8)) / 3).astype(np.float32)))
    b.output("y", h)
    b.output("sign", b.op("Sign", h))
    return b.build()


def ids(backend: LocalTaskBackend, role: Role) -> list[str]:
    return [task.invocation.task_id for task in backend.tasks(role)]


def test_layers_that_are_alike_share_a_task() -> None:
    with LocalTaskBackend(deep(5)) as backend:
        forward, back = ids(backend, Role.FORWARD), ids(backend, Role.BACKWARD)
        layers = [task.layer for task in backend.tasks(Role.FORWARD)]
    assert len(layers) == len(set(layers)) == 7
    # The first layer's input has no gradient, so its tasks are others.
    assert forward[1:5] == forward[1:2] * 4 and forward[0] != forward[1]
    assert back[-5:-1] == back[-5:-4] * 4 and back[-1] != back[-2]
    # The last layer's result is read by Sign, so the output is a value of its own.
    assert forward[5:] == ["Sign.forward", "Identity.forward"]


def test_backward_tasks_come_in_reverse_and_not_where_nothing_flows_back() -> None:
    with LocalTaskBackend(deep(3), wanted=["w1", "w2"]) as backend:
        forward = [task.layer for task in backend.tasks(Role.FORWARD)]
        back = [task.layer for task in backend.tasks(Role.BACKWARD)]
    # Nothing flows back through Sign, nor into the first layer.
    assert set(forward) - set(back) == {forward[0], "sign"}
    assert [name for name in reversed(forward) if name in back] == back


def test_a_task_that_is_not_registered_is_named() -> None:
    with LocalTaskBackend(mlp()) as backend:
        wrong = TaskInvocation("Relu.forwards", TaskBinding())
        for ask in (backend.get_task_impl, backend.get_args, backend.execute):
            with pytest.raises(TaskError, match=r"'Relu.forwards'(.|\n)*mean 'Relu.forward'"):
                ask(wrong)
        with pytest.raises(TaskError, match=r"'Relu\.update' is registered"):
            backend.signature("Relu.update")


def test_a_weight_on_which_nothing_depends_has_a_gradient_of_zeros() -> None:
    b = ComputationGraphBuilder("unused")
    x = b.input("x", (2, 3), "float32")
    w, lost = (b.input(n, (3,), "float32", InputKind.PARAMETER) for n in ("w", "lost"))
    b.output("y", x * w)
    b.output("z", b.op("Sign", lost))
    graph = b.build()
    optimizer = stitch.SGD(lr=1.0, weight_decay=0.5)
    with LocalTaskBackend(graph, optimizer=optimizer, loss="mse") as backend:
        ones = np.ones(3, np.float32)
        for name, value in (("x", np.ones((2, 3))), ("w", ones), ("lost", ones)):
            backend.set_tensor(name, value)
        backend.set_tensor("label", np.zeros((2, 3)))
        instance = ModelTrainingInstance(graph, backend)
        instance.forward()
        instance.backward()
        assert backend.get_tensor("lost.grad").tolist() == [0, 0, 0]
        instance.update()
        assert backend.get_tensor("lost").tolist() == [0.5, 0.5, 0.5]


# -- tensors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("elsewhere", "copies"), [((), 0), (("x",), 1), (("x", "fc1.weight"), 2)])
def test_a_copy_is_made_for_each_tensor_that_lies_elsewhere(
    elsewhere: tuple[str, ...], copies: int
) -> None:
    ((x, _),) = batches(1)
    with LocalTaskBackend(mlp()) as backend:
        instance = ModelTrainingInstance(backend.graph, backend)
        backend.set_tensor("x", x)
        instance.forward()
        expected = backend.get_tensor("y")
        for name in elsewhere:
            layout = replace(backend.store.desc(name).layout, space=Space.L1)
            backend.set_tensor(name, backend.store.tensor(name).to_layout(layout))
        before = backend.device.account().total.copies
        instance.forward()
        assert backend.get_tensor("y").tobytes() == expected.tobytes()
        assert backend.device.account().total.copies - before == copies


def test_a_part_of_a_step_is_a_task_graph_which_aggregation_makes_one_task() -> None:
    ((x, label),) = batches(1)
    graph = mlp()
    with LocalTaskBackend(graph, optimizer="sgd", loss="mse") as backend:
        backend.set_tensor("x", x)
        backend.set_tensor("label", label)
        instance = ModelTrainingInstance(graph, backend)
        instance.forward()
        instance.backward()
        for role in (Role.FORWARD, Role.LOSS, Role.BACKWARD):
            merged = aggregate(backend.task_graph(role), branches="keep")
            assert len(merged) == 1
            prepared = PreparedGraph(backend.device, merged.table())
            found = prepared(**{name: backend.get_tensor(name) for name in prepared.input_names})
            made = found if isinstance(found, tuple) else (found,)
            for name, tensor in zip(prepared.output_names, made, strict=True):
                assert tensor.numpy().tobytes() == backend.get_tensor(name).tobytes(), (role, name)


# -- the user's own tasks --------------------------------------------------------------------------


def leaky(accessor: TaskArgumentAccessor) -> None:
    x = accessor.get_tensor("input0", READ).numpy()
    accessor.get_tensor("output0", WRITE).numpy()[:] = np.where(x > 0, x, x / 8)


def leaky_back(accessor: TaskArgumentAccessor) -> None:
    x = accessor.get_tensor("input0", READ).numpy()
    coming = accessor.get_tensor_grad("output0", READ).numpy()
    accessor.get_tensor_grad("input0", BOTH).numpy()[:] += coming * np.where(x > 0, 1, 0.125)


def leaky_mlp() -> ComputationGraph:
    """What the two tasks above make of the small model."""
    graph = mlp()
    b = ComputationGraphBuilder("mlp")
    values = {graph.values[c.value].name: c.data for c in graph.constants}
    x = b.input("x", graph.input_type(0).shape, "float32")
    weights = {name: b.parameter(name, data) for name, data in values.items() if "." in name}
    h = b.linear(x, weights["fc1.weight"], weights["fc1.bias"])
    h = b.op("LeakyRelu", h, alpha=0.125)
    b.output("y", b.linear(h, weights["fc2.weight"], weights["fc2.bias"]))
    return b.build()


def gradients_of(graph: ComputationGraph, change: Callable[[LocalTaskBackend], None]) -> Any:
    ((x, label),) = batches(1)
    with LocalTaskBackend(graph, loss="mse") as backend:
        change(backend)
        backend.set_tensor("x", x)
        backend.set_tensor("label", label)
        instance = ModelTrainingInstance(graph, backend)
        instance.forward()
        instance.backward()
        return [backend.get_tensor(f"fc{i}.weight.grad") for i in (1, 2)]


def test_an_operator_may_get_an_implementation_of_the_users() -> None:
    def change(backend: LocalTaskBackend) -> None:
        for task_id, function in (("Relu.forward", leaky), ("Relu.backward", leaky_back)):
            # What an implementation returns is for the signature to say.
            backend.register_task(task_id, backend.signature(task_id), function)
        with pytest.raises(TaskError, match=r"'Relu.forward' of layer 'relu' was registered"):
            backend.task_graph("forward")

    found = gradients_of(mlp(), change)
    expected = gradients_of(leaky_mlp(), lambda backend: None)
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-7)


def test_a_task_that_fails_changes_nothing() -> None:
    def fail(accessor: TaskArgumentAccessor) -> None:
        accessor.get_tensor("y", WRITE).numpy()[:] = 3
        raise ValueError("on purpose")

    def wrong(accessor: TaskArgumentAccessor) -> Any:
        accessor.get_tensor("y", WRITE).numpy()[:] = 3
        return "a text"

    ((x, _),) = batches(1)
    with LocalTaskBackend(mlp()) as backend:
        backend.set_tensor("x", x)
        backend.register_task("fail", task_signature(outputs=["y"]), fail)
        backend.register_task("wrong", task_signature(outputs=["y"], returns=float), wrong)
        with pytest.raises(ValueError, match="on purpose"):
            backend.execute(TaskInvocation("fail", TaskBinding({"y": "x"})))
        with pytest.raises(TaskError, match="returned another type"):
            backend.execute(TaskInvocation("wrong", TaskBinding({"y": "x"})))
        np.testing.assert_array_equal(backend.get_tensor("x"), x)


# -- times -----------------------------------------------------------------------------------------


def test_times_are_those_of_every_layer_and_the_kernels_really_run() -> None:
    ((x, label),) = batches(1)
    results = []
    for profiling in (False, True):
        with LocalTaskBackend(mlp(), optimizer="sgd", loss="mse") as backend:
            backend.profiling = profiling
            instance = ModelTrainingInstance(backend.graph, backend)
            backend.set_tensor("x", x)
            backend.set_tensor("label", label)
            times = [instance.forward(), instance.backward(), instance.update()]
            results.append(backend.get_tensor("fc1.weight"))
            if not profiling:
                assert times == [None, None, None]
                continue
            forward, back, updated = times
            assert forward is not None and back is not None and updated is not None
            assert [t.name for t in forward] == ["gemm", "relu", "y"]
            assert [t.op for t in back] == ["mse", "Gemm", "Relu", "Gemm"]
            assert [t.program for t in updated] == ["update"]
            assert all(t.seconds > 0 for t in (*forward, *back, *updated))
            assert forward[0].location.startswith("models.py:")
    assert results[0].tobytes() == results[1].tobytes()


def test_a_tensor_that_is_there_is_taken_as_it_is() -> None:
    ((x, _),) = batches(1)
    with LocalTaskBackend(mlp()) as backend:
        given = backend.device.tensor(x).to_layout(backend.store.desc("x"))
        backend.set_tensor("x", given)
        ModelTrainingInstance(backend.graph, backend).forward()
        assert backend.store.tensor("x").address == given.address
        with pytest.raises(UsageError, match="'x' has another shape"):
            backend.set_tensor("x", backend.device.tensor(x[:3]))
        with pytest.raises(UsageError, match="'x' is declared with another description"):
            backend.store.add_tensor("x", backend.store.desc("fc1.bias"))


def test_placement_of_the_graph_are_refused() -> None:
    graph = mlp().with_placement(PlacementOption("input", "x", "space", Space.L1))
    with pytest.raises(CompileError, match="has placement options"):
        LocalTaskBackend(graph)


def test_a_task_keeps_its_signature() -> None:
    with LocalTaskBackend(mlp()) as backend:
        with pytest.raises(UsageError, match=r"'Relu\.forward' is registered with another"):
            backend.register_task("Relu.forward", task_signature(outputs=["y"]), leaky)
        with pytest.raises(UsageError, match="cannot be called"):
            backend.register_task("new", task_signature(), None)  # type: ignore[arg-type]


def test_names_that_are_no_tensors_are_refused() -> None:
    with pytest.raises(UsageError, match=r"fc1\.wait"):
        LocalTaskBackend(mlp(), weights={"fc1.wait": [0.0]})
    with pytest.raises(CompileError, match=r"no input 'fc3\.weight'"):
        LocalTaskBackend(mlp(), wanted=["fc3.weight"])
    with pytest.raises(UsageError, match="takes a ComputationGraph as graph"):
        LocalTaskBackend("mlp")  # type: ignore[arg-type]


def test_a_closed_backend_says_so() -> None:
    with LocalTaskBackend(mlp()) as backend:
        instance = ModelTrainingInstance(backend.graph, backend)
    with pytest.raises(UsageError, match="this backend is closed"):
        instance.forward()


def test_a_wrong_permission_is_named() -> None:
    wrong: Any = 3
    with LocalTaskBackend(mlp()) as backend:
        accessor = backend.get_args(backend.tasks("forward")[0].invocation)
        with pytest.raises(UsageError, match=r"takes a Permission .* as permission"):
            accessor.get_tensor("input0", wrong)
