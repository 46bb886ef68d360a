"""Prepared task graphs give what their tasks give one by one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import stitch
from stitch.errors import StitchError, TaskError, UsageError
from stitch.program import Array, DataType, Layout, Space, TensorDesc, host_layout
from stitch.report import Device
from stitch.runtime import lend
from stitch.tasks import TaskGraph, aggregate, task
from tests.support.grids import in_turn
from tests.support.stitched_models import consuming, one, scaled, several, used

SHAPE = (4, 64)
DESC = TensorDesc(SHAPE, host_layout(DataType.FLOAT32))
X = np.arange(256, dtype=np.float32).reshape(SHAPE)
IN_L1 = ("input.x.space=l1", "output.y.space=l1")


def open_tiny(window: int = 64) -> Device:
    return stitch.open_device("tiny", window=window)


@task(returns=DESC)
def double(x: Array) -> Array:
    return x * 2


@task(updates="x")
def increment(x: Array, by: float = 1.0) -> None:
    x += by


def mixed(program: stitch.CompiledModel) -> TaskGraph:
    """Programs, host functions, copies, an update; two outputs, the later one first."""
    graph = TaskGraph("mixed")
    x = graph.input(DESC, "x")
    w = graph.input(DESC, "w")
    a = graph.call(program, x)
    b = graph.call(double, a)
    c = graph.copy(b, Layout(DataType.BFLOAT16, Space.DRAM))
    d = graph.call(increment, graph.host(np.add, c, w, returns=DESC), by=3.0)
    graph.output(graph.call(program, d), "last")
    graph.output(b, "middle")
    return graph


def mixed_reference(x: Array, w: Array) -> tuple[Array, Array]:
    b = (3 * x + 1) * 2
    c = b.astype(DataType.BFLOAT16.dtype).astype(np.float32)
    return 3 * (c + w + 3) + 1, b


@pytest.mark.parametrize("window", (1, 64))
@pytest.mark.parametrize("placement", ((), IN_L1))
def test_a_graph_gives_what_its_tasks_give(window: int, placement: tuple[str, ...]) -> None:
    with open_tiny(window=window) as device:
        prepared = device.prepare(mixed(scaled("a", 3.0, placement=placement)))
        assert prepared.input_names == ("x", "w")
        assert prepared.output_names == ("last", "middle")
        for i in range(6):
            x, w = X + i, X * i
            last, middle = several(prepared(x, w) if i % 2 else prepared(w=w, x=x))
            assert not last.is_pending
            for got, wanted in zip((last, middle), mixed_reference(x, w), strict=True):
                np.testing.assert_array_equal(got.numpy(), wanted)
        # A second set of places, as results of the first are still held.
        assert device.statistics().plans_made <= 2


@pytest.mark.parametrize("target", ["host", "tiny"])
def test_writes_to_lent_bytes_after_unchanged_runs_are_read(
    target: str,
) -> None:
    with stitch.open_device(target) as device:
        run = stitch.Pipeline([device.load(scaled("a", 3.0, target=target))])
        bytes_of_another = X.copy()
        tensor = lend(device, bytes_of_another, "another")
        for number in range(3):
            bytes_of_another[:] = X + number
            for _ in range(4):
                np.testing.assert_array_equal(one(run(tensor)).numpy(), (X + number) * 3 + 1)


def test_tensor_inputs_are_read_in_place_and_updated_ones_are_gone() -> None:
    graph = TaskGraph()
    x, y = graph.input(DESC, "x"), graph.input(DESC, "y")
    graph.output(graph.call(increment, graph.host(np.subtract, x, y, returns=DESC)))
    graph.output(graph.call(increment, y))
    with open_tiny() as device:
        prepared = device.prepare(graph)
        for i in range(5):
            given = device.tensor(X), device.tensor(X * i)
            first, second = several(prepared(*given))
            np.testing.assert_array_equal(first.numpy(), X - X * i + 1)
            np.testing.assert_array_equal(second.numpy(), X * i + 1)
            np.testing.assert_array_equal(given[0].numpy(), X)
            with pytest.raises(TaskError, match="donated to 'increment'"):
                given[1].numpy()


def test_a_donating_program_takes_its_input() -> None:
    graph = TaskGraph("loop")
    x = graph.input(DESC, "x")
    graph.output(graph.call(consuming("c", 2.0), x), "y")
    with open_tiny() as device:
        prepared, x_now = device.prepare(graph), device.tensor(X)
        for i in range(5):
            x_now = one(prepared(x_now))
            np.testing.assert_array_equal(x_now.numpy(), X * 2.0 ** (i + 1))


def compiled(name: str, f: Any, count: int, machine: str) -> stitch.CompiledModel:
    return stitch.compile(f, [X] * count, target=machine, name=name)


@pytest.mark.parametrize(
    ("machine", "kind"), in_turn(["host", "tiny"], ["arrays", "tensors", "mixed", "turned"])
)
def test_inputs_may_be_read_in_any_order(machine: str, kind: str) -> None:
    # Programs alone: with a host function among the tasks every run would go by way of the queue.
    subtract = compiled("less", lambda a, b: a - b, 2, machine)
    twice = compiled("twice", lambda a: a + a, 1, machine)
    graph = TaskGraph()
    x, w, v = (graph.input(DESC, name) for name in "xwv")
    graph.call(twice, v)
    graph.output(graph.call(subtract, w, x), "less")
    graph.output(graph.call(twice, v), "more")
    with stitch.open_device(machine) as device:
        prepared, windows = device.prepare(graph), []
        for i in range(5):
            given = [X * i, X + i, X - i]
            tensors = [device.tensor(array) for array in given]
            if kind == "mixed" or (kind == "turned" and i % 2):
                entered: list[object] = [given[0], tensors[1], given[2]]
            else:
                entered = list(tensors if kind == "tensors" else given)
            less, more = several(prepared(*entered))
            np.testing.assert_array_equal(less.numpy(), given[1] - given[0])
            np.testing.assert_array_equal(more.numpy(), given[2] * 2)
            windows.append(device.statistics().batches)
            del less, more
    assert kind != "arrays" or windows[-1] == windows[-2], "it runs past the queue"


def test_a_graph_for_effect_gives_nothing() -> None:
    seen: list[float] = []
    graph = TaskGraph()
    graph.host(lambda x: seen.append(float(x.sum())), graph.input(DESC, "x"))
    with open_tiny() as device:
        prepared = device.prepare(graph)
        for i in range(4):
            assert prepared(np.full(SHAPE, i, np.float32)) == ()
    assert seen == [256.0 * i for i in range(4)]


def test_graphs_that_cannot_be_prepared_are_refused_with_the_reason() -> None:
    with open_tiny() as device, open_tiny() as other:
        with pytest.raises(UsageError, match="it has no task"):
            device.prepare(TaskGraph("empty"))
        with pytest.raises(UsageError, match="takes a task graph"):
            device.prepare(double)  # type: ignore[arg-type]
        passes = TaskGraph()
        x = passes.input(DESC, "x")
        passes.output(passes.call(double, x))
        passes.output(x, "same")
        with pytest.raises(UsageError, match="output 'same': it is one of the inputs"):
            device.prepare(passes)
        unread = TaskGraph()
        unread.input(DESC, "spare")
        unread.output(unread.call(double, unread.input(DESC, "x")))
        with pytest.raises(UsageError, match="input 'spare': no task reads it"):
            device.prepare(unread)
        elsewhere = TaskGraph()
        elsewhere.output(elsewhere.call(other.load(scaled("a", 2.0)), elsewhere.input(DESC, "x")))
        with pytest.raises(UsageError, match="are on one device"):
            device.prepare(elsewhere)
        prepared = device.prepare(mixed(scaled("a", 3.0)))
        with pytest.raises(UsageError, match="another device"):
            prepared(other.tensor(X), X)
        with pytest.raises(StitchError, match="shape"):
            prepared(X[:2], X)
        with pytest.raises(UsageError, match="missing: w"):
            prepared(X)
    with pytest.raises(TaskError, match="closed"):
        prepared(X, X)


@pytest.mark.parametrize("window", (1, 64))
def test_buffers_of_a_failed_run_are_freed(window: int) -> None:
    turns = iter(range(1000))

    @task(returns=DESC)
    def perhaps(x: Array) -> Array:
        if next(turns) % 3:
            raise OverflowError("on purpose")
        return x

    graph = TaskGraph()
    x, w = graph.input(DESC, "x"), graph.input(DESC, "w")
    middle = graph.call(scaled("a", 2.0), x)
    copied = graph.call(double, middle)
    graph.output(graph.call(increment, w))
    graph.output(graph.call(consuming("c", 2.0), graph.call(perhaps, copied)))
    graph.output(graph.call(double, middle))
    with open_tiny(window) as device:
        prepared = device.prepare(graph)
        failed = 0
        for i in range(12):
            try:
                updated, scaled_twice, twice = several(
                    prepared(device.tensor(X), device.tensor(X + i))
                )
            except OverflowError:
                failed += 1
                continue
            np.testing.assert_array_equal(updated.numpy(), X + i + 1)
            np.testing.assert_array_equal(scaled_twice.numpy(), (2 * X + 1) * 4)
            np.testing.assert_array_equal(twice.numpy(), (2 * X + 1) * 2)
            del updated, scaled_twice, twice
        assert failed == 8
        del prepared
        device.wait()
        assert used(device)["host"] == 0


@pytest.mark.parametrize("window", [1, 64])
def test_arrays_that_lie_in_a_space_after_a_failure_are_read_as_they_are(window: int) -> None:
    programs = {
        name: stitch.compile(function, [X] * takes, target="tiny", name=name, placement=placement)
        for name, function, takes, placement in (
            ("add", lambda x, y: x + y, 2, ("input.0.space=dram", "input.1.space=dram")),
            ("negate", lambda x: -x, 1, ("input.0.space=dram",)),
        )
    }
    seen: list[Array] = []

    @task
    def fail(x: Array) -> None:
        raise ValueError("as told")

    @task
    def see(x: Array) -> None:
        seen.append(x.copy())

    graph = TaskGraph("fails")
    x, y = graph.input(DESC, "x"), graph.input(DESC, "y")
    graph.output(graph.copy(x, Layout(DataType.FLOAT32, Space.DRAM)), "x")
    fail(graph.call(programs["add"], x, y))
    for value in (x, y):
        see(graph.call(programs["negate"], value))
    with open_tiny(window) as device:
        run, before = device.prepare(graph), used(device)
        for turn in range(3):
            with pytest.raises(ValueError, match="as told"):
                run(x=X + turn, y=1 - X)
            assert [array[0, 1] for array in seen] == [-1 - turn, 0], turn
            seen.clear()
        negate = device.load(programs["negate"])
        for turn in range(3):
            assert np.array_equal(one(negate(X * turn)).numpy(), X * -turn), turn
        del negate
        assert used(device) == before


def test_one_value_as_two_outputs_is_two_in_every_run() -> None:
    """The fourth run, past the queue, gave one tensor."""
    graph, model = TaskGraph(), stitch.compile(lambda x: x * np.float32(2), [X])
    with stitch.open_device("wormhole_n150") as device:
        program = device.load(model)
        y = graph.call(program, graph.input(program.ports[0].desc, "x"))
        graph.output(y, "one")
        graph.output(y, "two")
        call = device.prepare(graph)
        for _ in range(6):
            result = several(call(X))
            for each in result:
                np.testing.assert_array_equal(each.numpy(), X * 2)
            assert len(result) == 2
            del result, each


def test_tensors_and_futures_of_other_owners_are_refused() -> None:
    graph = TaskGraph("steps")
    x = graph.input(DESC, "x")

    @task(returns=DESC)
    def first(a: Array, b: object) -> Array:
        return a

    with open_tiny() as device:
        tensor = device.tensor(X)
        program = device.load(stitch.compile(lambda x: x + x, [X], target="tiny", name="double"))
        with pytest.raises(UsageError, match="a tensor of a device is no plain argument"):
            first(x, tensor)
        with pytest.raises(UsageError, match=r"input 'x' of 'double' is not an array or tensor"):
            program(x)
        for arguments in ((x, 1), (tensor, x)):
            with pytest.raises(UsageError, match="a future of a task graph has no value"):
                device.call(first, *arguments)

        @task
        def thing(a: Array) -> object:
            return "object"

        with pytest.raises(UsageError, match="is not an array or tensor"):
            program(device.call(thing, tensor))


def test_a_member_of_an_aggregated_task_that_fails_is_named_by_its_own_name() -> None:
    @task(returns=DESC)
    def broken(x: Array) -> Array:
        raise ZeroDivisionError("no number")

    graph = TaskGraph("steps")
    graph.output(double(broken(double(graph.input(DESC, "x")))), "y")
    merged = aggregate(graph)
    assert [row.name for row in merged.tasks] == ["double+broken+double"]
    with open_tiny() as device:
        prepared = device.prepare(merged)
        with pytest.raises(ZeroDivisionError, match="no number") as caught:
            prepared(X)
        notes = getattr(caught.value, "__notes__", [])
        assert "'broken'" in "".join([str(caught.value), *notes])
        assert "double+broken" not in str(caught.value)
