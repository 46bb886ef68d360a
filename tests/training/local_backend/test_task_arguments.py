"""What a task may take: permissions by slot, forward and back, variadic slots, arguments."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from stitch.errors import TaskError, UsageError
from stitch.graph import ComputationGraphBuilder
from stitch.program import DataType, TensorDesc, host_layout
from stitch.runtime import RuntimeDevice
from stitch.tasks import Permission
from stitch.training import (
    LocalTaskBackend,
    RuntimeArgument,
    SlotKind,
    TaskArgumentAccessor,
    TaskBinding,
    TaskInvocation,
    TaskSignature,
    backward_binding,
    backward_signature,
    task_signature,
)

READ, WRITE, BOTH = Permission.READ_ONLY, Permission.WRITE_ONLY, Permission.READ_WRITE
DESC = TensorDesc((2, 2), host_layout(DataType.FLOAT32))
FORWARD = task_signature(
    inputs=["x", "many"], untrainable=["mask"], optional=["bias"], weights=["w"], outputs=["y"],
    variadic=["many"], arguments={"scale": float, "times": bool},
)  # fmt: skip
BINDING = TaskBinding(
    {"x": "a", "many": ("a", "b"), "mask": "b", "w": "c", "y": "d"},
    arguments={"scale": 0.5, "times": RuntimeArgument.PROFILING},
)


@pytest.fixture
def backend() -> Iterator[LocalTaskBackend]:
    b = ComputationGraphBuilder("nothing")
    b.output("out", b.relu(b.input("in", (1,), "float32")))
    with LocalTaskBackend(b.build(), RuntimeDevice("tiny")) as made:
        for name in "abcd":
            made.store.add_tensor(name, DESC)
            made.store.add_tensor(f"{name}.grad", DESC)
        for name in ("a", "b", "c", "d", "d.grad"):
            made.set_tensor(name, np.full((2, 2), ord(name[0]), np.float32))
        yield made
        made.device.close()


def given(backend: LocalTaskBackend, *, back: bool = False) -> TaskArgumentAccessor:
    """The accessor of one invocation, forward or backward."""
    signature, binding = FORWARD, BINDING
    if back:
        signature = backward_signature(FORWARD)
        binding = backward_binding(BINDING, signature)
    task_id = "back" if back else "forth"
    backend.register_task(task_id, signature, lambda accessor: None)
    return backend.get_args(TaskInvocation(task_id, binding))


#: Of each slot: what the forward task may do with its tensor, the backward task with its gradient.
ALLOWED = [
    ("x", READ, BOTH),
    ("mask", READ, Permission.NONE),
    ("w", READ, BOTH),
    ("y", WRITE, READ),
]


@pytest.mark.parametrize("asked", Permission)
@pytest.mark.parametrize(("slot", "forward", "back"), ALLOWED)
def test_a_tensor_is_taken_with_what_the_signature_allows(
    backend: LocalTaskBackend, slot: str, forward: Permission, back: Permission, asked: Permission
) -> None:
    cases: list[tuple[Callable[..., Any], Permission]] = [
        (given(backend).get_tensor, forward),
        (given(backend).get_tensor_grad, Permission.NONE),
        (given(backend, back=True).get_tensor, READ),
        (given(backend, back=True).get_tensor_grad, back),
    ]
    for take, allowed in cases:
        if not allowed.allows(asked):
            with pytest.raises(TaskError, match=f"allow {asked.value} for .*{slot!r}"):
                take(slot, asked)
        elif asked is not Permission.NONE:
            assert take(slot, asked).permission is asked


def test_what_is_read_cannot_be_written_and_what_is_written_not_read(
    backend: LocalTaskBackend,
) -> None:
    accessor = given(backend)
    x, y = accessor.get_tensor("x", READ), accessor.get_tensor("y", WRITE)
    assert x.numpy().tolist() == [[97, 97], [97, 97]]
    with pytest.raises(ValueError, match="read-only"):
        x.numpy()[0] = 1
    with pytest.raises(TaskError, match="'a' cannot be written: the task asked for read_only"):
        x.put(x.tensor)
    with pytest.raises(TaskError, match="'d' cannot be read: the task asked for write_only"):
        _ = y.tensor
    # To write only, nothing shows of what was there.
    assert y.numpy().tolist() == [[0, 0], [0, 0]]


def test_what_is_put_counts_when_the_task_has_ended_and_not_if_it_raises(
    backend: LocalTaskBackend,
) -> None:
    signature = task_signature(outputs=["y"], arguments={"raises": bool})
    ones, device = np.ones((2, 2), np.float32), backend.device

    def putting(accessor: TaskArgumentAccessor) -> None:
        taken = accessor.get_tensor("y", WRITE)
        with pytest.raises(UsageError, match="'d' has another shape"):
            taken.put(device.tensor(ones[0]))
        taken.put(device.tensor(ones))
        if accessor.get_argument("raises"):
            raise ValueError("no")

    backend.register_task("putting", signature, putting)
    for raises in (True, False):
        invocation = TaskInvocation("putting", TaskBinding({"y": "d"}, {}, {"raises": raises}))
        if raises:
            with pytest.raises(ValueError, match="no"):
                backend.execute(invocation)
        else:
            backend.execute(invocation)
        expected = np.full((2, 2), ord("d")) if raises else ones
        np.testing.assert_array_equal(backend.get_tensor("d"), expected)


def test_a_gradient_is_added_to_zero_before_its_first_part(backend: LocalTaskBackend) -> None:
    for expected in (100, 200):
        accessor = given(backend, back=True)
        gradient = accessor.get_tensor_grad("x", BOTH).numpy()
        gradient += accessor.get_tensor_grad("y", READ).numpy()
        accessor.finish()
        assert backend.get_tensor("a.grad").tolist() == [[expected] * 2] * 2


def test_variadic_slots_give_all_their_tensors(backend: LocalTaskBackend) -> None:
    forth, back = given(backend), given(backend, back=True)
    taken = forth.get_variadic_tensor("many", READ)
    assert [tensor.numpy()[0, 0] for tensor in taken] == [97, 98]
    gradients = back.get_variadic_tensor_grad("many", BOTH)
    assert [gradient.name for gradient in gradients] == ["a.grad", "b.grad"]
    with pytest.raises(TaskError, match="does not allow write_only"):
        forth.get_variadic_tensor("many", WRITE)
    with pytest.raises(UsageError, match=r"any number.*\n.*get_variadic_tensor$"):
        forth.get_tensor("many", READ)
    with pytest.raises(UsageError, match=r"one tensor.*\n.*get_tensor_grad$"):
        back.get_variadic_tensor_grad("x", READ)


def test_arguments_are_values_or_what_they_refer_to(backend: LocalTaskBackend) -> None:
    accessor = given(backend)
    assert accessor.get_argument("scale") == 0.5
    assert accessor.get_argument("times") is False
    backend.profiling = True
    assert accessor.get_argument("times") is True
    with pytest.raises(UsageError, match=r"no argument slot 'scal'(.|\n)*did you mean 'scale'"):
        accessor.get_argument("scal")


def test_a_binding_that_does_not_fit_is_refused_with_all_that_is_wrong(
    backend: LocalTaskBackend,
) -> None:
    backend.register_task("task", FORWARD, lambda accessor: None)
    wrong = TaskBinding(
        {"x": ("a", "b"), "many": "a", "w": "c", "what": "d"}, {"x": "a.grad"}, {"scale": "large"}
    )
    with pytest.raises(UsageError) as raised:
        backend.get_args(TaskInvocation("task", wrong))
    for problem in (
        "slot 'mask' is not bound", "slot 'y' is not bound", "no tensor slot 'what'",
        "'x' takes one name", "'many' takes a tuple of names", "no gradient slot 'x'",
        "'scale' is str, expected float", "'times' is not bound",
    ):  # fmt: skip
        assert problem in str(raised.value)
    unknown = TaskBinding({**BINDING.tensors, "x": "aa"}, arguments=BINDING.arguments)
    with pytest.raises(UsageError, match="there is no tensor 'aa'"):
        backend.get_args(TaskInvocation("task", unknown))


def test_backward_has_the_same_slots_and_gradients() -> None:
    back = backward_signature(FORWARD)
    assert [(s.name, s.kind, s.variadic) for s in back.tensors] == [
        (s.name, s.kind, s.variadic) for s in FORWARD.tensors
    ]
    assert {s.permission for s in back.tensors} == {READ}
    assert back.arguments == FORWARD.arguments
    binding = backward_binding(BINDING, back)
    assert binding.tensors == BINDING.tensors
    assert binding.gradients == {
        "x": "a.grad", "many": ("a.grad", "b.grad"), "w": "c.grad", "y": "d.grad"
    }  # fmt: skip
    assert backward_binding(BINDING, back, flowing={"c", "d"}).gradients.keys() == {"w", "y"}


def test_slots_bound_to_one_tensor_add_to_it_together(backend: LocalTaskBackend) -> None:
    """Each had an array of its own, and the last one written back won."""
    binding = TaskBinding(
        {"x": "a", "many": ("a", "a"), "mask": "b", "w": "c", "y": "d"},
        arguments=dict(BINDING.arguments),
    )
    signature = backward_signature(FORWARD)
    binding = backward_binding(binding, signature)

    def add(access: TaskArgumentAccessor) -> None:
        reading = access.get_tensor_grad("x", READ).numpy()
        for slot in (
            access.get_tensor_grad("x", BOTH), access.get_tensor_grad("x", BOTH),
            *access.get_variadic_tensor_grad("many", BOTH),
        ):  # fmt: skip
            elements = slot.numpy()
            elements += 1
        assert (reading == 0).all() and (access.get_tensor_grad("x", READ).numpy() == 4).all()
        assert (access.get_tensor_grad("x", READ).tensor.numpy() == 4).all()
        assert (access.get_tensor_grad("x", WRITE).numpy() == 4).all()
        with pytest.raises(ValueError, match="read-only"):
            access.get_tensor_grad("x", READ).numpy()[0] = 1

    backend.register_task("add", signature, add)
    backend.execute(TaskInvocation("add", binding))
    np.testing.assert_array_equal(backend.get_tensor("a.grad"), np.full((2, 2), 4, np.float32))


@pytest.mark.parametrize("looks", ["before", "after", "writes", "never"])
def test_a_tensor_that_is_put_stays_as_it_is(backend: LocalTaskBackend, looks: str) -> None:
    signature = backward_signature(FORWARD)
    mine = backend.device.tensor(np.full((2, 2), 7, np.float32))

    def put(access: TaskArgumentAccessor) -> None:
        gradient = access.get_tensor_grad("w", BOTH)
        if looks == "before":
            gradient.numpy()[:] = 1
        gradient.put(mine)
        if looks == "after":
            assert (gradient.numpy() == 7).all()
        if looks == "writes":
            gradient.numpy()[:] += 1

    backend.register_task("put", signature, put)
    backend.execute(TaskInvocation("put", backward_binding(BINDING, signature)))
    expected = 8 if looks == "writes" else 7
    assert (backend.get_tensor("c.grad") == expected).all() and (mine.numpy() == 7).all()


def test_a_tensor_that_was_put_is_not_written_to_where_others_hold_it(
    backend: LocalTaskBackend,
) -> None:
    """What a gradient rule gives on as it is, and what a caller keeps."""
    signature = backward_signature(FORWARD)

    def pass_on(access: TaskArgumentAccessor) -> None:
        access.get_tensor_grad("w", BOTH).put(access.get_tensor_grad("y", READ).tensor)

    def add(access: TaskArgumentAccessor) -> None:
        elements = access.get_tensor_grad("w", BOTH).numpy()
        elements += 1

    before = backend.get_tensor("d.grad")
    for name, function in (("pass_on", pass_on), ("add", add)):
        backend.register_task(name, signature, function)
        backend.execute(TaskInvocation(name, backward_binding(BINDING, signature)))
    np.testing.assert_array_equal(backend.get_tensor("d.grad"), before)
    np.testing.assert_array_equal(backend.get_tensor("c.grad"), before + 1)
    kept = backend.store.tensor("c.grad")
    backend.set_tensor("c.grad", before)
    np.testing.assert_array_equal(kept.numpy(), before + 1)


def test_a_reference_to_another_type_is_refused(backend: LocalTaskBackend) -> None:
    signature = TaskSignature(arguments={"count": int, "where": RuntimeDevice})
    backend.register_task("counting", signature, lambda accessor: None)
    right = {
        "count": RuntimeArgument.ITERATION, "where": RuntimeArgument.DEVICE_STATE
    }  # fmt: skip
    accessor = backend.get_args(TaskInvocation("counting", TaskBinding(arguments=right)))
    assert accessor.get_argument("count") == 0
    assert accessor.get_argument("where") is backend.device
    wrong = {**right, "count": RuntimeArgument.DEVICE_STATE}
    accessor = backend.get_args(TaskInvocation("counting", TaskBinding(arguments=wrong)))
    with pytest.raises(TaskError, match="'count' of task 'counting' has another type"):
        accessor.get_argument("count")


def test_optional_slots_may_stay_unbound(backend: LocalTaskBackend) -> None:
    accessor = given(backend)
    assert accessor.has("x") and not accessor.has("bias") and not accessor.has_grad("x")
    with pytest.raises(UsageError, match="nothing is bound to the slot 'bias'"):
        accessor.get_tensor("bias", READ)


def test_two_slots_of_one_name_are_refused() -> None:
    with pytest.raises(UsageError, match="two slots 'x'"):
        task_signature(inputs=["x"], outputs=["x"])
    with pytest.raises(UsageError, match="no tensor slot 'z'"):
        task_signature(inputs=["x"], variadic=["z"])
    assert task_signature(weights=["w"]).tensor("w").kind is SlotKind.WEIGHT
