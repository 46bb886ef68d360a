"""Task graphs on several devices give the bits of one device, whatever happens to the servers."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import FunctionType
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

import stitch
from stitch.errors import LinkError, TaskError, UsageError
from stitch.mesh import Mesh, MeshGraph, RemoteTensor, open_mesh
from stitch.mesh.carrier import Outcome, Sending
from stitch.mesh.local_carrier import FAULTS, LocalCarrier
from stitch.mesh.messages import Message
from stitch.mesh.server import DeviceServer
from stitch.mesh.specification import MachineSpecification
from stitch.program import TensorDesc, host_layout
from tests.support import placed_graphs
from tests.support.grids import in_turn
from tests.support.placed_graphs import DESCS, MACHINE, WIDE, by_one_device
from tests.support.task_graphs import same


def chain() -> tuple[stitch.TaskGraph, Any]:
    """Return a graph that goes to and fro between two devices, and its result by NumPy."""
    x = np.zeros((4, 8), np.float32)
    grow = stitch.compile(lambda x: x * 2 + 1, [x], name="grow", target="host")
    square = stitch.compile(lambda x: x * x, [x], name="square", target="host")
    graph = stitch.TaskGraph("chain")
    given = graph.input(grow.program.input_desc(0), "x")
    with graph.on("device0"):
        first = graph.call(grow, given)
    with graph.on("device1"):
        second = graph.call(square, first)
    with graph.on("device0"):
        third = graph.call(grow, second)
        # The input and a value of the first piece are read again on their device.
        fourth = graph.call(square, first)
    graph.output(second, "second")
    graph.output(third, "third")
    graph.output(fourth, "fourth")

    def expected(x: Any) -> tuple[Any, ...]:
        first = x * np.float32(2) + np.float32(1)
        second = first * first
        return second, second * np.float32(2) + np.float32(1), second

    return graph, expected


def mesh_with(faults: Mapping[int, str], seed: int | None = None) -> Mesh:
    """Return a mesh of two devices in this process, with faults at messages."""
    specification = MachineSpecification.of(2, "host")

    def open_server(name: str) -> DeviceServer:
        return DeviceServer(name, stitch.open_device("host"))

    return Mesh(specification, LocalCarrier(open_server, seed, faults))


def batches(count: int) -> list[Any]:
    draw = np.random.default_rng(0)
    return [draw.standard_normal((4, 8), np.float32) for _ in range(count)]


def test_a_call_gives_the_values_of_one_device_in_one_message_a_piece() -> None:
    graph, expected = chain()
    with open_mesh(2, machine="host") as mesh:
        run = mesh.prepare(graph)
        for x in batches(6):
            for result, wanted in zip(run(x), expected(x), strict=True):
                assert np.array_equal(result.numpy(), wanted)
        carrier = mesh.client.carrier
        assert isinstance(carrier, LocalCarrier)
        assert carrier.sent["Run"] == 6 * len(run.pieces) == 6 * 3
        # `first` goes to device1, `second` to device0: each once, although two tasks read it.
        assert carrier.crossings == 6 * 2


def test_a_result_is_an_argument_of_another_call_in_its_mesh_only() -> None:
    graph, expected = chain()
    (x,) = batches(1)
    with open_mesh(2, machine="host") as mesh, open_mesh(2, machine="host") as other:
        run = mesh.prepare(graph)
        second, _, _ = run(x=x)
        assert isinstance(second, RemoteTensor)
        (again, _, _) = run(second)
        assert np.array_equal(again.numpy(), expected(expected(x)[0])[0])
        with pytest.raises(UsageError, match="another mesh"):
            other.prepare(graph)(second)
        with pytest.raises(LinkError):
            run(np.zeros((3, 8), np.float32))
        with pytest.raises(TypeError, match="belongs to its mesh"):
            second.__reduce__()
        assert len(second) == 4
        for copied in (torch.as_tensor(second), torch.from_dlpack(second)):
            assert np.array_equal(copied.numpy(), second.numpy())
            copied.zero_()
            assert second.numpy().all()
    with pytest.raises(TaskError, match=r"closed\n  try: .*open another mesh"):
        second.numpy()
    with pytest.raises(TaskError, match="closed"), mesh:
        pass


@pytest.mark.parametrize(("fault", "seed"), in_turn(FAULTS, [None, 1]))
def test_a_fault_at_any_message_changes_no_result(fault: str, seed: int | None) -> None:
    graph, expected = chain()
    given = batches(3)
    with mesh_with({}, seed) as mesh:
        run = mesh.prepare(graph)
        for x in given:
            run(x)
        run.wait()
        carrier = mesh.client.carrier
        assert isinstance(carrier, LocalCarrier)
        count = carrier.messages
    for number in range(count):
        with mesh_with({number: fault}, seed) as mesh:
            run = mesh.prepare(graph)
            results = [run(x) for x in given]
            for x, outputs in zip(given, results, strict=True):
                for result, wanted in zip(outputs, expected(x), strict=True):
                    assert np.array_equal(result.numpy(), wanted), (number, fault)
            if fault.startswith("kill"):
                assert sum(mesh.client.restarts.values()) == 1


def test_a_server_that_ends_again_and_again_is_one_error() -> None:
    graph, _ = chain()
    mesh = mesh_with(dict.fromkeys(range(6, 200), "kill before"))
    with mesh, pytest.raises(TaskError, match="ended 4 times"):
        mesh.prepare(graph)(batches(1)[0])[0].numpy()


@pytest.mark.parametrize("writer", ["device0", "device1"])
def test_carried_values_stay_where_one_piece_reads_and_writes_them(writer: str) -> None:
    x = np.zeros((4, 8), np.float32)
    step = stitch.compile(lambda h, x: h * np.float32(0.5) + x, [x, x], name="s", target="host")
    graph = stitch.TaskGraph("rounds")
    h, given = (graph.input(step.program.input_desc(i), name) for i, name in enumerate("hx"))
    with graph.on("device0"):
        first = graph.call(step, h, given)
    with graph.on(writer):
        second = graph.call(step, first, given)
    graph.output(second, "after")
    graph.output(first, "first")
    given_now = batches(40)
    wanted = np.ones((4, 8), np.float32)
    for kill in (None, 3, 30, 90):
        with mesh_with({} if kill is None else {kill: "kill after"}) as mesh:
            run = mesh.prepare(graph, carry={"h": "after"})
            run.write(h=np.ones((4, 8), np.float32))
            wanted, results = np.ones((4, 8), np.float32), []
            for value in given_now:
                half = wanted * np.float32(0.5) + value
                wanted = half * np.float32(0.5) + value
                results.append((run(value), half))
            for result, half in results:
                assert np.array_equal(result.numpy(), half)
            assert np.array_equal(run.read("h"), wanted)
            if kill is None:
                carrier = mesh.client.carrier
                assert isinstance(carrier, LocalCarrier)
                assert carrier.crossings == (0 if writer == "device0" else 2 * 40 - 1)


def two_steps() -> stitch.TaskGraph:
    """A graph with inputs h, k and x, and outputs h + x, under two names, and k * 2 + h."""
    x = np.zeros((4, 8), np.float32)
    step = stitch.compile(lambda h, k, x: (h + x, k * 2 + h), [x, x, x], name="step", target="host")
    graph = stitch.TaskGraph("two")
    given = [graph.input(step.program.input_desc(i), name) for i, name in enumerate("hkx")]
    with graph.on("device0"):
        first, second = graph.call(step, *given)
    for name, value in (("first", first), ("again", first), ("second", second)):
        graph.output(value, name)
    return graph


@pytest.mark.parametrize(
    "carry", [{"h": "first", "k": "first"}, {"h": "first", "k": "again"}, {"h": "second"},
              {"h": "second", "k": "first"}],
)  # fmt: skip
def test_carried_inputs_get_their_outputs_also_where_two_get_one(carry: dict[str, str]) -> None:
    with open_mesh(2, machine="host") as mesh:
        run = mesh.prepare(two_steps(), carry=carry)
        now = {"h": np.ones((4, 8), np.float32), "k": np.full((4, 8), 3, np.float32)}
        run.write(**{name: now[name] for name in carry})
        for x in batches(5):
            first, second = now["h"] + x, now["k"] * np.float32(2) + now["h"]
            made = {"first": first, "again": first, "second": second}
            arguments = {"x": x} | {name: now[name] for name in now if name not in carry}
            answers = run(**arguments)
            answers = answers if isinstance(answers, tuple) else (answers,)
            names = [name for name in made if name not in carry.values()]
            assert [answer.name for answer in answers] == names
            for name, answer in zip(names, answers, strict=True):
                assert np.array_equal(answer.numpy(), made[name])
            now |= {name: made[after] for name, after in carry.items()}
            for name in carry:
                assert np.array_equal(run.read(name), now[name])


def test_a_host_function_that_its_name_does_not_find_is_refused() -> None:
    other = FunctionType(placed_graphs.two.__code__, vars(placed_graphs))
    other.__qualname__ = "bump"
    for function in (other, stitch.TaskGraph("g").input):
        graph = stitch.TaskGraph("g")
        graph.output(graph.host(function, graph.input(DESCS[WIDE]), returns=DESCS[WIDE]))
        refused = pytest.raises(UsageError, match="not what a device server finds by its name")
        with open_mesh(1, functions=[function.__module__]) as mesh, refused:
            mesh.prepare(graph)


def test_a_graph_that_no_device_prepares_is_refused_with_the_words_of_a_device() -> None:
    graph = stitch.TaskGraph("g")
    x, y = graph.input(DESCS[WIDE], "x"), graph.input(DESCS[WIDE], "y")
    unread = stitch.TaskGraph.of(graph.table())
    graph.output(graph.copy(x, DESCS[WIDE].layout))
    graph.output(y, "passed")
    for case in (stitch.TaskGraph("empty"), unread, graph):
        with pytest.raises(UsageError) as by_device, stitch.open_device() as device:
            device.prepare(case)
        with pytest.raises(UsageError) as by_mesh, open_mesh(1) as mesh:
            mesh.prepare(case)
        assert str(by_mesh.value) == str(by_device.value)


def test_write_sets_all_carried_inputs_or_none() -> None:
    ones = np.ones((4, 8), np.float32)
    with open_mesh(2, machine="host") as mesh:
        run = mesh.prepare(two_steps(), carry={"h": "first", "k": "second"})
        run.write(h=ones, k=ones)
        with pytest.raises(LinkError):
            run.write(h=ones * 5, k=np.ones(3, np.float32))
        with pytest.raises(UsageError, match="no carried input 'x'"):
            run.write(h=ones * 5, x=ones)
        assert np.array_equal(run.read("h"), ones)


@pytest.mark.parametrize("seed", [None, 1])
def test_threads_use_a_mesh_one_at_a_time(seed: int | None) -> None:
    graph, expected = chain()
    interval = sys.getswitchinterval()
    with open_mesh(2, machine="host", seed=seed) as mesh, ThreadPoolExecutor(4) as pool:
        runs = [mesh.prepare(graph), mesh.prepare(graph)]

        def worked(number: int) -> bool:
            x = batches(1)[0] + np.float32(number)
            results = runs[number % 2](x)
            return all(
                np.array_equal(result.numpy(), wanted)
                for result, wanted in zip(results, expected(x), strict=True)
            )

        try:
            sys.setswitchinterval(1e-5)
            assert all(pool.map(worked, range(100)))
        finally:
            sys.setswitchinterval(interval)


def test_the_package_that_ray_needs_is_named_where_it_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "stitch.mesh.ray_carrier", raising=False)
    with pytest.raises(UsageError, match=r"pip install 'stitch-runtime\[ray\]'"):
        open_mesh(2, backend="ray")


@pytest.mark.parametrize("strict_types", [False, True])
def test_readers_of_another_type_get_the_value_as_it_is(strict_types: bool) -> None:
    x = np.linspace(-3, 3, 32, dtype=np.float32).reshape(4, 8) * np.float32(1.0001)
    narrow, wide = [
        stitch.compile(lambda x: x * 2, [x.astype(kind)], name="p", target="wormhole_n150")
        for kind in (ml_dtypes.bfloat16, np.float32)
    ]
    for order in ((narrow, wide), (wide, narrow)):
        for is_made in (True, False):
            graph = stitch.TaskGraph("g")
            value = graph.input(DESCS[WIDE], "x")
            if is_made:
                with graph.on("device0"):
                    value = graph.call(wide, value)
            with graph.on("device1"):
                made = {model: graph.call(model, value) for model in order}
            graph.output(made[narrow], "narrow")
            graph.output(made[wide], "wide")
            whole = stitch.TaskGraph.of(replace(graph.table(), devices=()))
            with (
                stitch.open_device("wormhole_n150", strict_types=strict_types) as device,
                open_mesh(2, strict_types=strict_types) as mesh,
            ):
                if strict_types:
                    for prepare in (device.prepare, mesh.prepare):
                        with pytest.raises(LinkError, match="strict_types is set"):
                            prepare(whole if prepare == device.prepare else graph)
                    continue
                tensors = (*device.prepare(whole)(x), *mesh.prepare(graph)(x))
                results = [tensor.numpy().copy() for tensor in tensors]
            given = x * np.float32(2) if is_made else x
            for by_narrow, by_wide in (results[:2], results[2:]):
                assert np.array_equal(by_wide, given * np.float32(2))
                assert np.array_equal(by_narrow, given.astype(ml_dtypes.bfloat16) * 2)


def test_each_value_tells_of_the_failure_that_it_depends_on() -> None:
    checked, double = placed_graphs.FUNCTIONS["checked"][0], placed_graphs.FUNCTIONS["two"][0]
    graph = stitch.TaskGraph("g")
    x, stops = graph.input(DESCS[WIDE], "x"), [graph.input(DESCS[WIDE], name) for name in "ab"]
    halves = []
    for number, stop in enumerate(stops):
        with graph.on(f"device{number}"):
            halves.append(graph.host(checked, x, stop, number))
    with graph.on("device2"):
        for half in reversed(halves):
            graph.output(graph.host(double, half)[0])
        graph.output(graph.host(double, x)[0])
    ones = np.ones((4, 8), np.float32)
    with open_mesh(3, functions=[placed_graphs.__name__]) as mesh:
        second, first, other = mesh.prepare(graph)(ones, ones * 0, ones)
        with pytest.raises(TaskError, match="failed: 0") as caught:
            first.numpy()
        assert caught.value.got == "Told: 0" and caught.value.remedy is None
        with pytest.raises(TaskError, match="failed: 1"):
            second.numpy()
        assert np.array_equal(other.numpy(), ones * 2)


def test_the_error_of_a_task_without_results_is_raised_once() -> None:
    graph = stitch.TaskGraph("g")
    x, stop = graph.input(DESCS[WIDE], "x"), graph.input(DESCS[WIDE], "stop")
    with graph.on("device0"):
        graph.host(placed_graphs.noticed, x, stop, 3)
    with graph.on("device1"):
        graph.output(graph.copy(x, DESCS[WIDE].layout))
    ones = np.ones((4, 8), np.float32)
    with open_mesh(2, functions=[placed_graphs.__name__], in_flight=1) as mesh:
        run = mesh.prepare(graph)
        for tell in (run.wait, mesh.wait, lambda: run(ones, ones)):
            result = run(ones, ones * 3)
            with pytest.raises(TaskError, match="Told: 3"):
                tell()
            assert np.array_equal(result.numpy(), ones)
            run.wait()


class CopyingServer(DeviceServer):
    """A server whose answers are copied at once, as by a carrier between processes."""

    def handle(self, message: Message, *values: Any) -> object:
        answer = super().handle(message, *values)
        if not isinstance(answer, tuple):
            return answer
        return tuple([each.copy() if isinstance(each, np.ndarray) else each for each in answer])


def test_a_view_that_leaves_does_not_pin_what_the_next_answer_needs() -> None:
    case = placed_graphs.placed_case(1028, 24, ("device0", "device1", "device2"))
    modules = [placed_graphs.__name__]

    def open_server(name: str) -> DeviceServer:
        return CopyingServer(name, stitch.open_device(MACHINE), modules, copies=False)

    specification = MachineSpecification.of(3, MACHINE)
    with Mesh(specification, LocalCarrier(open_server), functions=modules) as mesh:
        results = mesh.prepare(case.graph)(**case.inputs)
        found = {tensor.name: tensor.numpy() for tensor in results}
    with stitch.open_device(MACHINE) as device:
        wanted = by_one_device(case.graph, case.inputs, device)
    assert same(found, wanted)


def test_arrays_of_the_caller_may_change_after_a_call_and_results_are_its_own() -> None:
    graph, expected = chain()
    (x,) = batches(1)
    given = x.copy()
    with open_mesh(2, machine="host", seed=3) as mesh:
        results = mesh.prepare(graph)(given)
        given[...] = 7
        for result, wanted in zip(results, expected(x), strict=True):
            result.numpy()[...] = 7
            with pytest.raises(ValueError, match="read-only"):
                np.asarray(result)[...] = 7
            assert np.array_equal(result.numpy(), wanted)


def test_a_remote_tensor_of_another_shape_is_refused_by_the_call() -> None:
    graph, _ = chain()
    small = stitch.TaskGraph("small")
    small.output(small.copy(small.input(TensorDesc((2, 8), host_layout(WIDE))), host_layout(WIDE)))
    with open_mesh(2, machine="host") as mesh:
        result = mesh.prepare(small)(np.ones((2, 8), np.float32))
        with pytest.raises(UsageError, match="input 'x' has another type"):
            mesh.prepare(graph)(result)


def test_records_of_a_graph_that_was_not_called_are_an_error() -> None:
    graph, _ = chain()
    with (
        open_mesh(2, machine="host") as mesh,
        pytest.raises(UsageError, match="no record of a call of task graph"),
    ):
        mesh.prepare(graph).last_records()


def prepared_and_called(mesh: Mesh, value: float) -> tuple[Any, MeshGraph]:
    """Prepare a program of its own, with a carried value, and call it."""
    x = np.zeros((4, 8), np.float32)
    program = stitch.compile(
        lambda h, x: h + x * np.float32(value), [x, x], name="step", target="host"
    )
    graph = stitch.TaskGraph("g")
    descs = [program.program.input_desc(i).without_address() for i in range(2)]
    h, given = graph.input(descs[0], "h"), graph.input(descs[1], "x")
    with graph.on("device0"):
        after = graph.call(program, h, given)
    graph.output(after, "after")
    with graph.on("device1"):
        graph.output(graph.copy(after, descs[1].layout), "y")
    run = mesh.prepare(graph, carry={"h": "after"})
    run.write(h=np.ones((4, 8), np.float32))
    return run(x + 1), run


def test_pieces_of_graphs_that_were_dropped_are_dropped_by_servers_and_client() -> None:
    devices: dict[str, DeviceServer] = {}

    def open_server(name: str) -> DeviceServer:
        devices[name] = DeviceServer(name, stitch.open_device("host"))
        return devices[name]

    carrier = LocalCarrier(open_server, seed=1)
    with Mesh(MachineSpecification.of(2, "host"), carrier) as mesh:
        for number in range(20):
            result, run = prepared_and_called(mesh, number)
            if number == 10:
                del run
                carrier._kill("device0")
            assert result.numpy()[0, 0] == number + 1
        assert run.read("h")[0, 0] == 20
        # The graph of this round, and that of the round before, which was there when it was made.
        for name, device in devices.items():
            held = mesh.client._devices[name]
            assert len(held.pieces) == len(device._pieces) == 2
            assert len(held.files) == len(device._binaries) <= 2
            assert len(held.snapshot.buffers) <= 2 and len(device._state.buffers) <= 2
        assert mesh.client.restarts["device0"] == 1


class LosingCarrier(LocalCarrier):
    """A carrier that loses values after they were made; messages with them are lost, too."""

    lost: tuple[Any, ...] = ()

    def values(self, references: Sequence[Any]) -> list[Any]:
        values = super().values(references)
        pairs = zip(references, values, strict=True)
        return [Outcome.LOST if each in self.lost else value for each, value in pairs]

    def send(self, device: str, *sendings: Sending) -> list[tuple[Any, ...]]:
        answers = []
        for sending in sendings:
            if any(value in self.lost for value in sending.values):
                lost = replace(self.put(np.zeros(1)), outcome=Outcome.LOST)
                answers.append((lost,) * sending.returns)
            else:
                answers += super().send(device, sending)
        return answers


def test_a_value_that_is_lost_after_it_was_made_is_an_error_of_what_reads_it() -> None:
    graph, expected = chain()
    (x,) = batches(1)
    carrier = LosingCarrier(lambda name: DeviceServer(name, stitch.open_device("host")))
    with Mesh(MachineSpecification.of(2, "host"), carrier) as mesh:
        run = mesh.prepare(graph)
        second, third, _ = run(x)
        third.settle()
        carrier.lost = (third._value.reference,)
        with pytest.raises(TaskError, match=r"(?s)tensor 'third' of device 'device0' is lost"):
            third.numpy()
        for result in run(third):
            with pytest.raises(TaskError, match="a value of device 'device0' is lost"):
                result.numpy()
        assert np.array_equal(second.numpy(), expected(x)[0])
        assert np.array_equal(run(second)[0].numpy(), expected(second.numpy())[0])
