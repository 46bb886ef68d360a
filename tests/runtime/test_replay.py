"""A replay runs only where nothing has changed since the last run."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import stitch
from stitch.errors import TaskError
from stitch.program import Array, DataType, Layout, Space, TensorDesc, host_layout
from stitch.report import Device
from stitch.runtime import PreparedGraph, Replay, chain_graph, lend, take_back
from stitch.runtime.graphs import replay
from stitch.tasks import TaskGraph
from tests.support.stitched_models import binary_op, one, scaled

SHAPE = (4, 64)
X = np.arange(256, dtype=np.float32).reshape(SHAPE)
W = X[::-1].copy()


def _prepared(device: Device, model: stitch.CompiledModel) -> PreparedGraph:
    graph, _ = chain_graph((device.load(model),), ({},), "graph")
    return device.prepare(graph)


@pytest.fixture(params=["host", "tiny"])
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    with stitch.open_device(request.param) as opened:
        yield opened


def _sum(device: Device) -> PreparedGraph:
    return _prepared(device, binary_op("sum", "Add", SHAPE, target=device.machine))


def _ready(prepared: PreparedGraph, *given: Any) -> None:
    for _ in range(4):
        prepared(*given)


# The same tensors ------------------------------------------------------------------------------


def test_swapped_tensors_are_read_in_their_new_order(device: Device) -> None:
    prepared = _prepared(device, binary_op("less", "Sub", SHAPE, target=device.machine))
    x, w = device.tensor(X), device.tensor(W)
    _ready(prepared, x, w)
    np.testing.assert_array_equal(one(prepared(w, x)).numpy(), W - X)
    np.testing.assert_array_equal(one(prepared(x, w)).numpy(), X - W)


def test_an_array_instead_of_a_tensor_is_read_and_the_reverse(device: Device) -> None:
    prepared, x = _sum(device), device.tensor(X)
    _ready(prepared, x, W)
    np.testing.assert_array_equal(one(prepared(W, W)).numpy(), W + W)
    _ready(prepared, x, W)
    np.testing.assert_array_equal(one(prepared(X, device.tensor(X))).numpy(), X + X)
    np.testing.assert_array_equal(one(prepared(x, W)).numpy(), X + W)


def test_a_tensor_that_was_freed_is_not_read_again(device: Device) -> None:
    prepared, make = _sum(device), _prepared(device, scaled("a", 2.0, target=device.machine))
    _ready(make, X)
    # It lies in a lease, which has its place back then: what the allocators know is the same.
    x = one(make(X))
    _ready(prepared, x, W)
    generation = device.records.generation
    x.deallocate()
    assert device.records.generation == generation
    with pytest.raises(TaskError, match=r"given away or freed|was freed"):
        prepared(x, W)


def test_a_tensor_that_was_given_away_is_not_read_again(device: Device) -> None:
    prepared, loaded = _sum(device), device.load(scaled("a", 2.0, target=device.machine))
    x = one(loaded(X))
    x.settle()
    _ready(prepared, x, W)
    # Given away, though what takes it has not run.
    x._record.consumed = True
    with pytest.raises(TaskError, match="given away"):
        prepared(x, W)
    x._record.consumed = False


@pytest.mark.parametrize("space", ["l1", "dram"])
def test_what_is_written_to_a_tensor_that_others_see_since_is_read(space: str) -> None:
    with stitch.open_device("tiny") as device:
        made = one(device.load(scaled("a", 1.0, placement=[f"output.y.space={space}"]))(X))
        made.settle()
        prepared = _prepared(device, scaled("b", 2.0, placement=["input.x.space=l1"]))
        _ready(prepared, made)
        seen = np.from_dlpack(made)
        seen[...] = 5.0
        np.testing.assert_array_equal(one(prepared(made)).numpy(), np.full(SHAPE, 11.0))
        seen[...] = 6.0
        np.testing.assert_array_equal(one(prepared(made)).numpy(), np.full(SHAPE, 13.0))


def test_copies_that_others_do_not_see_are_compared_before_they_are_read() -> None:
    with stitch.open_device("tiny") as device:
        array = X.copy()
        prepared, tensor = _sum(device), lend(device, array, "another")
        _ready(prepared, tensor, W)
        assert len(tensor._record.instances) > 1
        for number in range(3):
            array[...] = number
            np.testing.assert_array_equal(one(prepared(tensor, W)).numpy(), array + W)


# Over and over, with copies of the results -----------------------------------------------------


class _Repeated:
    """A sum of two lent arrays and one of the call, which is repeated."""

    def __init__(self, device: Device) -> None:
        self.device, self.w = device, W.copy()
        self.prepared = _sum(device)
        self.other = device.load(binary_op("other", "Sub", SHAPE, target="host"))
        self.tensor = lend(device, self.w, "another")
        _ready(self.prepared, X, self.tensor)
        repeat = self.prepared.repeat((X, self.tensor))
        assert repeat is not None
        self.repeat: Replay = repeat

    def made(self, array: Array = X) -> Array | None:
        made = self.repeat([array])
        return None if made is None else made[0]


@pytest.fixture()
def host() -> Iterator[Device]:
    with stitch.open_device("host") as opened:
        yield opened


@pytest.fixture()
def repeated(host: Device) -> _Repeated:
    return _Repeated(host)


def test_a_repeat_reads_its_arrays_and_what_is_lent_now(repeated: _Repeated) -> None:
    results = []
    for number in range(4):
        repeated.w[...] = number
        made = repeated.made(X * number)
        assert made is not None
        results.append(made)
    for number, made in enumerate(results):
        np.testing.assert_array_equal(made, X * number + number)


def _nothing(_: object) -> None: ...


def _take_back(of: _Repeated) -> None:
    take_back(of.device, of.tensor)


def _make_something(of: _Repeated) -> object:
    return of.device.empty(TensorDesc(SHAPE, Layout(DataType.FLOAT32, Space.HOST)))


def _queue(of: _Repeated) -> object:
    return of.other(X, W)


def _held(of: _Repeated) -> object:
    return of.prepared(X, of.tensor)


def _note(of: _Repeated) -> object:
    thing = set("a")
    of.device.deaths.notes.await_end(thing)
    del thing
    return None


def _dropped(of: _Repeated) -> object:
    dropped = of.device.tensor(X)
    del dropped
    return None


def _half_done(of: _Repeated) -> object:
    of.device.records.is_consistent = False
    return None


def _ran_otherwise(of: _Repeated) -> object:
    of.repeat.lease.again = None
    return None


def _shares(of: _Repeated) -> object:
    of.repeat.lease.shares = True
    return None


@pytest.mark.parametrize(
    "change",
    [_take_back, _make_something, _queue, _held, _note, _dropped, _half_done, _shares,
     _ran_otherwise,
     lambda of: of.device.events.subscribe(_nothing),
     lambda of: of.device.hooks.register(before_program=_nothing),
     lambda of: of.device.close()],
    ids=["taken back", "allocated", "queued", "held", "note", "dropped", "half done", "shared",
         "ran otherwise",
         "listener", "hook", "closed"],
)  # fmt: skip
def test_a_replay_refuses_where_anything_has_changed(
    repeated: _Repeated, change: Callable[[_Repeated], object]
) -> None:
    assert repeated.made() is not None
    kept, runs = change(repeated), repeated.repeat.again.binding.tally.runs
    assert repeated.made() is None
    assert repeated.repeat.again.binding.tally.runs == runs
    repeated.device.records.is_consistent = True
    del kept


def test_an_array_of_another_form_is_not_repeated(repeated: _Repeated) -> None:
    assert repeated.made(X.astype(np.float64)) is None
    assert repeated.made(X[:2]) is None
    assert repeated.made() is not None


def test_nothing_is_repeated_before_it_ran_nor_on_tensors_that_may_be_given_away(
    host: Device,
) -> None:
    prepared, make = _sum(host), _prepared(host, scaled("a", 2.0, target="host"))
    assert prepared.repeat((X, W)) is None
    _ready(make, X)
    for tensor in (one(make(X)), host.tensor(W)):
        _ready(prepared, X, tensor)
        assert prepared.repeat((X, tensor)) is None
    _ready(prepared, X, W)
    assert prepared.repeat((X, W)) is not None


def test_only_a_run_on_the_very_same_tensors_is_repeated(repeated: _Repeated) -> None:
    prepared, tensor = repeated.prepared, repeated.tensor
    other = lend(repeated.device, W.copy(), "another")
    assert prepared.repeat((X, tensor)) is not None
    for given in ((X, other), (tensor, tensor), (tensor, X), (X, X)):
        assert prepared.repeat(given) is None
    # One tensor twice goes by the queue each time, and no lease remembers that.
    for _ in range(3):
        np.testing.assert_array_equal(one(prepared(tensor, tensor)).numpy(), W + W)
        assert prepared.repeat((tensor, tensor)) is None
    _ready(prepared, X, W)
    assert prepared.repeat((X, tensor)) is None
    assert prepared.repeat((X, W)) is not None


def test_results_come_in_the_order_of_the_graphs_outputs(host: Device) -> None:
    graph = TaskGraph()
    x = graph.input(TensorDesc(SHAPE, host_layout(DataType.FLOAT32)), "x")
    first = graph.call(scaled("a", 2.0, target="host"), x)
    second = graph.call(scaled("b", 3.0, target="host"), x)
    graph.output(second)
    graph.output(first)
    prepared = host.prepare(graph)
    _ready(prepared, X)
    repeat = prepared.repeat((X,))
    assert repeat is not None
    for made, wanted in zip(repeat([X]) or (), (X * 3 + 1, X * 2 + 1), strict=True):
        np.testing.assert_array_equal(made, wanted)


def test_a_kernel_that_fails_while_it_is_repeated_is_heard_of(repeated: _Repeated) -> None:
    def fails(arrays: object) -> bool:
        raise FloatingPointError("no number")

    again = dataclasses.replace(repeated.repeat.again, run=fails)
    repeated.repeat = dataclasses.replace(repeated.repeat, again=again)
    repeated.repeat.lease.again = again
    with pytest.raises(FloatingPointError):
        repeated.made()
    repeated.repeat.lease.again = None
    np.testing.assert_array_equal(one(repeated.prepared(X, repeated.tensor)).numpy(), X + W)


def test_large_results_are_not_copied_under_the_lock(
    repeated: _Repeated, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replay, "LARGE_NBYTES", X.nbytes)
    assert repeated.prepared.repeat((X, repeated.tensor)) is None
