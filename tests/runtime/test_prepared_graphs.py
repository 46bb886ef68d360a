"""Task graphs on a device: what they give is what their tasks give one by one, by one recording."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import stitch
from stitch.errors import StitchError, TaskError, UsageError
from stitch.program import Array, DataType, Layout, Space, TensorDesc, host_layout
from stitch.report import Device
from stitch.runtime import lend
from stitch.tasks import TaskGraph, task
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


@task(returns=DESC)
def difference(x: Array, y: Array) -> Array:
    return x - y


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


@pytest.mark.parametrize("given", ["arrays", "a tensor", "another tensor"])
def test_inputs_may_be_read_in_another_order_than_they_are_given(given: str) -> None:
    graph = TaskGraph("order")
    first, second, third = (graph.input(DESC, name) for name in ("first", "second", "third"))
    hidden = double(third)
    graph.output(difference(difference(hidden, first), second), "y")
    with open_tiny() as device:
        run = device.prepare(graph)
        for start in range(5):
            arrays = [X * np.float32(at + 1) + np.float32(start) for at in range(3)]
            arguments: list[Any] = list(arrays)
            if given != "arrays":
                at = 0 if given == "a tensor" else 2
                arguments[at] = device.tensor(arrays[at])
            expected = arrays[2] * 2 - arrays[0] - arrays[1]
            np.testing.assert_array_equal(one(run(*arguments)).numpy(), expected)
        assert device.statistics().plans_made <= 2


def test_held_results_stay_as_they_are() -> None:
    with open_tiny() as device:
        prepared = device.prepare(mixed(scaled("a", 3.0)))
        held = [several(prepared(X + i, X)) for i in range(20)]
        for i, results in enumerate(held):
            for got, wanted in zip(results, mixed_reference(X + i, X), strict=True):
                np.testing.assert_array_equal(got.numpy(), wanted)


def test_graphs_that_run_in_turn_run_into_what_they_made_last(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with open_tiny() as device:
        pipelines = [stitch.Pipeline([device.load(scaled(f"p{n}", n + 2.0))]) for n in range(3)]

        def turn(given: Array) -> None:
            for number, pipeline in enumerate(pipelines):
                made = one(pipeline(given)).numpy()
                np.testing.assert_array_equal(made, given * (number + 2) + 1)

        for _ in range(4):
            turn(X)
        read: list[object] = []
        monkeypatch.setattr(type(device), "run_queue", read.append)
        for number in range(4):
            turn(X + number)
        monkeypatch.undo()
        assert read == []


def test_what_was_dropped_is_freed_before_the_next_run_of_a_graph() -> None:
    with open_tiny() as device:
        pipeline = stitch.Pipeline([device.load(scaled("a", 2.0))])
        for _ in range(4):
            pipeline(X)
        held = device.empty(TensorDesc(SHAPE, Layout(DataType.FLOAT32, Space.DRAM)))
        place = (held.space, held.address)
        pipeline(X)
        pipeline(X)
        del held
        assert place in device.records.buffers
        pipeline(X)
        assert place not in device.records.buffers


@pytest.mark.parametrize("target", ["host", "tiny"])
def test_what_is_written_to_lent_bytes_is_read_at_every_run(target: str) -> None:
    with stitch.open_device(target) as device:
        program = stitch.compile(lambda v: v * 3.0, (X,), target=target)
        graph = TaskGraph()
        x = graph.input(DESC, "x")
        graph.output(graph.call(program, x))
        prepared, bytes_of_another = device.prepare(graph), X.copy()
        tensor = lend(device, bytes_of_another, "another")
        for number in range(5):
            bytes_of_another[:] = X + number
            np.testing.assert_array_equal(one(prepared(tensor)).numpy(), (X + number) * 3)


@pytest.mark.parametrize("target", ["host", "tiny"])
def test_what_is_written_to_lent_bytes_after_runs_that_found_them_as_they_were_is_read(
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


def test_tensors_enter_where_they_lie_and_one_that_is_updated_is_gone() -> None:
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


@pytest.mark.parametrize("rounds_before", (0, 4))
def test_a_failure_leaves_the_graph_as_it_was(rounds_before: int) -> None:
    fails: list[bool] = []

    @task(returns=DESC)
    def perhaps(x: Array) -> Array:
        if fails:
            raise OverflowError("on purpose")
        return x + 1

    graph = TaskGraph()
    graph.output(graph.call(double, graph.call(perhaps, graph.input(DESC, "x"))))
    with open_tiny() as device:
        prepared = device.prepare(graph)
        one(prepared(X)).numpy()
        before = used(device)
        for _ in range(rounds_before):
            one(prepared(X)).numpy()
        fails.append(True)
        with pytest.raises(OverflowError, match="on purpose"):
            prepared(X)
        fails.clear()
        np.testing.assert_array_equal(one(prepared(X)).numpy(), (X + 1) * 2)
        assert used(device) == before


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
            windows.append(device.statistics().windows)
            del less, more
    assert kind != "arrays" or windows[-1] == windows[-2], "it runs past the queue"


def test_programs_are_loaded_once() -> None:
    model = scaled("a", 3.0)
    graph = TaskGraph()
    value = graph.input(DESC, "x")
    for _ in range(5):
        value = graph.call(model, value)
    graph.output(value)
    with open_tiny() as device:
        prepared = device.prepare(graph)
        assert len({id(row.agent) for row in prepared._graph._rows}) == 1
        assert one(prepared(np.zeros(SHAPE, np.float32))).numpy()[0, 0] == 1 + 3 + 9 + 27 + 81


def test_one_value_may_be_two_outputs() -> None:
    graph = TaskGraph()
    y = graph.call(double, graph.input(DESC, "x"))
    graph.output(y, "one")
    graph.output(y, "two")
    with open_tiny() as device:
        first, second = several(device.prepare(graph)(X))
        np.testing.assert_array_equal(first.numpy(), X * 2)
        np.testing.assert_array_equal(second.numpy(), X * 2)


def test_a_graph_for_effect_gives_nothing() -> None:
    seen: list[float] = []
    graph = TaskGraph()
    graph.host(lambda x: seen.append(float(x.sum())), graph.input(DESC, "x"))
    with open_tiny() as device:
        prepared = device.prepare(graph)
        for i in range(4):
            assert prepared(np.full(SHAPE, i, np.float32)) == ()
    assert seen == [256.0 * i for i in range(4)]


def test_what_cannot_be_prepared_says_why() -> None:
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
def test_what_a_failure_leaves_half_way_is_given_back(window: int) -> None:
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
    """What one array's copy gives is not what another's does, in the run that fails and later."""
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


def test_messages_call_a_graph_by_its_name() -> None:
    graph = TaskGraph("steps")
    graph.output(graph.call(double, graph.input(DESC, "x")))
    with open_tiny() as device:
        call = device.prepare(graph)
        with pytest.raises(UsageError, match=r"wrong inputs for task graph 'steps'"):
            call(z=X)
        with pytest.raises(
            UsageError, match=r"(?s)task graph 'e' cannot be prepared: tasks: it has no.*try"
        ):
            device.prepare(TaskGraph("e"))
        with pytest.raises(
            UsageError, match=r"^the task graph cannot be prepared: tasks: it has no"
        ):
            device.prepare(TaskGraph())


def test_what_belongs_elsewhere_is_no_argument() -> None:
    """A tensor of a device in a graph's call, and a graph's future in a device's."""
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
        with pytest.raises(UsageError, match=r"input 'x' of 'double' is no value of a device"):
            program(x)
        for arguments in ((x, 1), (tensor, x)):
            with pytest.raises(UsageError, match="a future of a task graph has no value"):
                device.call(first, *arguments)

        @task
        def thing(a: Array) -> object:
            return "object"

        with pytest.raises(UsageError, match="is no value of a device"):
            program(device.call(thing, tensor))
