"""Whatever the local backend is given: an error of ours says what is taken, and which task it was.

Beside `tests/end_to_end/test_wrong_arguments.py`, which has the public functions of `stitch`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from stitch.errors import UsageError
from stitch.graph import ComputationGraph, ComputationGraphBuilder
from stitch.tasks import Permission
from stitch.training import (
    LocalTaskBackend,
    ModelTrainingInstance,
    TaskArgumentAccessor,
    TaskInvocation,
    task_signature,
)


def line() -> ComputationGraph:
    """A weight times an input, and one operator more."""
    b = ComputationGraphBuilder("line")
    h = b.mul(b.input("x", (2, 3), "float32"), b.parameter("w", np.ones(3, np.float32)))
    b.output("y", b.relu(h))
    return b.build()


@pytest.fixture
def backend() -> Iterator[LocalTaskBackend]:
    with LocalTaskBackend(line()) as backend:
        backend.set_tensor("x", np.ones((2, 3), np.float32))
        yield backend


def accessor(backend: LocalTaskBackend) -> TaskArgumentAccessor:
    return backend.get_args(backend.tasks("forward")[0].invocation)


def torchs_own(graph: ComputationGraph) -> LocalTaskBackend:
    optimizer: Any = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], 0.1)
    return LocalTaskBackend(graph, optimizer=optimizer)


#: A call, and what its error says.
CALLS: list[tuple[Callable[[LocalTaskBackend, Any], object], str]] = [
    (lambda b, _: b.tasks("foward"),
     r"tasks takes a role \(forward, loss, backward, update\) as role\n  got: str: 'foward'"),
    (lambda b, _: b.task_graph("fw"), r"task_graph takes a role \(forward, loss, backward, update"),
    (lambda b, _: LocalTaskBackend(b.graph, spaces={"y": "l3"}),
     r"takes a space \(.*l1.*\) as the space of 'y'\n  got: str: 'l3'"),
    (lambda b, three: LocalTaskBackend(b.graph, loss=three),
     r"LocalTaskBackend takes a loss of stitch\.losses, its name, or a mapping, or None as loss"),
    (lambda b, three: LocalTaskBackend(b.graph, optimizer=three),
     r"LocalTaskBackend takes an optimizer of stitch \(SGD, Adam, .*\), its name, or a mapping"),
    (lambda b, _: torchs_own(b.graph), r"an optimizer of stitch \(SGD(.|\n)*got: SGD: SGD \("),
    (lambda b, _: ModelTrainingInstance(b, b.graph),  # type: ignore[arg-type]
     "ModelTrainingInstance takes a ComputationGraph as graph\n  got: LocalTaskBackend"),
    (lambda b, three: ModelTrainingInstance(b.graph, three),
     r"takes a RuntimeBacking, such as LocalTaskBackend\(graph\) as backing"),
    (lambda b, read: accessor(b).get_tensor("input0", read),
     r"takes a Permission \(NONE, READ_ONLY, WRITE_ONLY, READ_WRITE\) as permission\n.*int: 3"),
    (lambda b, three: accessor(b).get_tensor(three, Permission.READ_ONLY),
     "the task has no tensor slot 3\n  expected: input0, input1, output0"),
    (lambda b, three: b.get_tensor(three), "there is no tensor 3\n  expected: x, w,"),
    (lambda _, three: task_signature(inputs="abc", outputs=three),
     "task_signature takes a list of names as inputs\n  got: str: 'abc'"),
    (lambda _, three: task_signature(outputs=three),
     "task_signature takes a list of names as outputs\n  got: int: 3"),
    (lambda b, three: b.register_task("mine", three, print),
     "register_task takes a TaskSignature as signature\n  got: int: 3"),
    (lambda b, three: b.register_task(three, task_signature(), print), "takes a text as task_id"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "said"), CALLS, ids=[said[:40] for _, said in CALLS])
def test_a_wrong_argument_is_answered_with_what_is_taken(
    backend: LocalTaskBackend, call: Callable[[LocalTaskBackend, Any], object], said: str
) -> None:
    with pytest.raises(UsageError, match=said):
        call(backend, 3)


def with_own_forward(
    backend: LocalTaskBackend, does: Callable[[TaskArgumentAccessor], None]
) -> TaskInvocation:
    """The last forward task, which does something else from now on."""
    invocation = backend.tasks("forward")[-1].invocation
    backend.register_task(invocation.task_id, backend.signature(invocation.task_id), does)
    return invocation


def test_a_task_that_raises_is_named_in_a_note(backend: LocalTaskBackend) -> None:
    def divide(access: TaskArgumentAccessor) -> None:
        raise ZeroDivisionError("by zero")

    invocation = with_own_forward(backend, divide)
    for run in (ModelTrainingInstance(backend.graph, backend).forward,
                lambda: backend.execute(invocation)):  # fmt: skip
        with pytest.raises(ZeroDivisionError, match="by zero") as caught:
            run()
        (note,) = caught.value.__notes__
        assert note.startswith("in task 'Relu.forward', on tensors ") and note.endswith(", y")
