"""A device server answers a `Failure` with what, where, expected and got, whatever it is sent."""

from __future__ import annotations

import json
import pickle
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import stitch
from stitch.errors import StitchError, TaskError, UsageError
from stitch.machine import load_machine
from stitch.mesh import open_mesh
from stitch.mesh.client import sha256_of
from stitch.mesh.messages import (
    Drop,
    Failure,
    Load,
    Prepare,
    Read,
    Report,
    Run,
    Source,
    Target,
    Write,
)
from stitch.mesh.server import DeviceServer, open_server
from stitch.tasks import TaskGraph, host_function
from stitch.ttb import encode
from tests.support import placed_graphs
from tests.support.mesh_runs import LocalMesh
from tests.support.placed_graphs import DESCS, MACHINE, SHAPE, WIDE, compiled, weighted

ADD = encode(compiled("add").binary)
X = np.ones(SHAPE, np.float32)
ANSWERED = (Target(True),)


def graph_text(part: str = "programs", **changes: Any) -> str:
    """The JSON of a graph of one program, with its program or its task changed."""
    graph = TaskGraph("add")
    x = graph.input(DESCS[WIDE], "x")
    graph.output(graph.call(compiled("add"), x, x), "y")
    (name,) = graph.programs
    document = json.loads(graph.as_json(files={name: (sha256_of(ADD), 0)}))
    document[part][0] |= changes
    return json.dumps(document)


def host_text(name: str = "weighted") -> str:
    graph = TaskGraph("host")
    x = graph.input(DESCS[WIDE], "x")
    graph.output(graph.host(host_function(weighted, returns=DESCS[WIDE], name=name), x, x), "y")
    return graph.as_json()


def prepare(text: str, function: str | None = None, sources: tuple[Source, ...] = (Source("sent"),),
            targets: tuple[Target, ...] = ANSWERED) -> Prepare:  # fmt: skip
    functions = () if function is None else (("weighted", function),)
    return Prepare(0, text, functions, sources, targets)


@pytest.fixture
def server() -> Iterator[DeviceServer]:
    made = DeviceServer("left", stitch.open_device(MACHINE), [placed_graphs.__name__, "os"])
    assert made.handle(Load(sha256_of(ADD), ADD)) is True
    yield made
    made.device.close()


def refused(answer: object) -> StitchError:
    """Return the error of an answer, which names where it came from."""
    assert isinstance(answer, Failure), answer
    error = answer.error()
    assert error.what and error.where
    return error


class Bytes(bytes):
    """No message holds a subclass."""


class Lookalike:
    """No message, although it has the fields of one."""

    sha256, data = sha256_of(ADD), ADD


WRONG: list[tuple[Any, str]] = [
    (None, "takes messages only"), ("Load", "takes messages only"), (Load, "takes messages only"),
    (Lookalike(), "takes messages only"), (pickle.dumps(Drop((), ())), "takes messages only"),
    (Load(sha256_of(ADD), bytearray(ADD)), "field 'data'"),  # type: ignore[arg-type]
    (Load(sha256_of(ADD), Bytes(ADD)), "field 'data'"),
    (Load(sha256_of(ADD), {"a": 1}), "field 'data'"),  # type: ignore[arg-type]
    (Load(b"", ADD), "field 'sha256'"),  # type: ignore[arg-type]
    (Load("0" * 64, ADD), "changed on the way"),
    (Load(sha256_of(ADD).upper(), ADD), "changed on the way"),
    (Load(sha256_of(pickle.dumps([1])), pickle.dumps([1])), "no .ttb|magic|too short|not a"),
    (Run("0", 1), "field 'piece'"), (Run(0, True), "field 'run'"),  # type: ignore[arg-type]
    (Run(0, 1.0), "field 'run'"), (Run(9, 1), "no piece 9"),  # type: ignore[arg-type]
    (Read(["a"]), "field 'buffers'"), (Read((1,)), "field 'buffers'"),  # type: ignore[arg-type]
    (Write(("a",)), "one array for each buffer"), (Report("secrets"), "no report 'secrets'"),
    (Report(1), "field 'what'"),  # type: ignore[arg-type]
    (prepare("{"), ""), (prepare("[]"), ""), (prepare("null"), ""),
    (prepare(graph_text(sha256="0" * 64)), "'add' is not given"),
    (prepare(graph_text(index=7)), "7"),
    (prepare(graph_text(index="x")), "index"), (prepare(graph_text("tasks", inputs=[9, 0])), "9"),
    (prepare(graph_text(), sources=()), "one source for each input"),
    (prepare(graph_text(), sources=(Source("stolen"),)), "field 'sources'"),
    (prepare(graph_text(), targets=(Target(1),)), "field 'targets'"),  # type: ignore[arg-type]
    (prepare(host_text()), "weighted"),
    (prepare(host_text(), "subprocess:run"), "does not allow"),
    (prepare(host_text(), "os.path:join"), "does not allow"),
    (prepare(host_text(), "tests.support.placed_graphs:absent"), "has no function 'absent'"),
    (prepare(host_text(), "tests.support.placed_graphs:<lambda>"), "has no function '<lambda>'"),
    (prepare(host_text(), "tests.support.placed_graphs:SHAPE"), "has no function 'SHAPE'"),
    (prepare(host_text(), "tests.support.placed_graphs"), "has no function ''"),
    (replace(prepare(host_text()), functions=((1, 2),)), "field 'functions'"),  # type: ignore[arg-type]
]  # fmt: skip


@pytest.mark.parametrize("message, words", WRONG)
def test_a_wrong_message_is_a_failure(server: DeviceServer, message: Any, words: str) -> None:
    answer = server.handle(message)
    answer = answer[0] if isinstance(answer, tuple) else answer
    error = refused(answer)
    assert any(word in str(error) for word in words.split("|")), str(error)
    assert server.handle(prepare(graph_text())) is True, "the server goes on"


@pytest.mark.parametrize(
    "value",
    [np.array([None, 1], object), np.ones(SHAPE, ml_dtypes.bfloat16), pickle.dumps(X), [1.0],
     np.ones(SHAPE, np.float64), np.ones((2, 2), np.float32), np.array(["a"]), X.astype(">f4"),
     np.zeros(2, [("a", "f4")]), None],
)  # fmt: skip
def test_a_wrong_value_is_a_failure(server: DeviceServer, value: Any) -> None:
    assert server.handle(prepare(graph_text())) is True
    answers = server.handle(Run(0, 1), value)
    assert isinstance(answers, tuple) and len(answers) == 2
    refused(answers[0])
    result = server.handle(Run(0, 2), X)[0]  # type: ignore[index]
    assert np.array_equal(result, X + X)


def test_values_too_many_or_with_another_message_are_failures(server: DeviceServer) -> None:
    assert server.handle(prepare(graph_text())) is True
    for values in ((), (X, X)):
        refused(server.handle(Run(0, 1), *values)[0])  # type: ignore[index]
    refused(server.handle(Drop((), ()), X))


def test_damaged_files_are_failures(server: DeviceServer) -> None:
    draw = random.Random(0)
    for _ in range(400):
        at = draw.randrange(len(ADD))
        damaged = bytearray(ADD)
        damaged[at] ^= 1 << draw.randrange(8)
        data = bytes(damaged)
        refused(server.handle(Load(sha256_of(ADD), data)))
        # With the SHA-256 of the damaged bytes, the file's own checks find the damage.
        refused(server.handle(Load(sha256_of(data), data)))
    refused(server.handle(Load(sha256_of(ADD[:-1]), ADD[:-1])))
    refused(server.handle(Load(sha256_of(b""), b"")))


def test_damaged_graphs_never_raise(server: DeviceServer) -> None:
    draw, text = random.Random(1), graph_text()
    for _ in range(300):
        at, letter = draw.randrange(len(text)), chr(draw.randrange(32, 127))
        answer = server.handle(prepare(text[:at] + letter + text[at + 1 :]))
        assert answer is True or refused(answer)


def test_a_piece_that_was_never_prepared_can_be_dropped(server: DeviceServer) -> None:
    assert server.handle(Drop((7,), ("0" * 64,))) is True
    server.device.close()
    refused(server.handle(prepare(graph_text())))


def test_a_mesh_refuses_what_its_servers_would() -> None:
    graph = TaskGraph("lambda")
    x = graph.input(DESCS[WIDE], "x")
    graph.output(graph.host(host_function(lambda x: x, returns=DESCS[WIDE], name="f"), x))
    with LocalMesh() as mesh:
        with pytest.raises(UsageError, match="cannot be imported by a device server"):
            mesh.prepare(graph)
        with pytest.raises(UsageError, match="at least 1"):
            open_mesh(2, machine=MACHINE, in_flight=0)
        case = placed_graphs.placed_case(0)
        run = mesh.prepare(case.graph)
        results = run(**case.inputs)
        with open_mesh(2, machine=MACHINE) as other, pytest.raises(UsageError, match="not allow"):
            other.prepare(graph_of_weighted())
    tensor = results[0] if isinstance(results, tuple) else results
    for act in (tensor.numpy, tensor.settle, lambda: run(**case.inputs), mesh.explain,
                lambda: mesh.prepare(case.graph)):  # fmt: skip
        with pytest.raises(TaskError, match="closed"):
            act()
    mesh.close()


def graph_of_weighted() -> TaskGraph:
    graph = TaskGraph("host")
    x = graph.input(DESCS[WIDE], "x")
    graph.output(graph.host(host_function(weighted, returns=DESCS[WIDE]), x, x), "y")
    return graph


def test_servers_of_one_computer_share_its_memory() -> None:
    machine = load_machine("host")
    alone, shared = (
        open_server("a", machine, executor="numpy", modules=(), processes=n).device for n in (1, 4)
    )
    assert shared.allowed_nbytes == alone.allowed_nbytes // 4
