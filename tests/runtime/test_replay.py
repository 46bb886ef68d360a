"""A replay runs only where nothing has changed since the last run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import stitch
from stitch.errors import TaskError
from stitch.program import Array, DataType, Layout, Space, TensorDesc, host_layout
from stitch.report import Device
from stitch.runtime import PreparedGraph, chain_graph, lend, take_back
from stitch.tasks import TaskGraph
from tests.support.stitched_models import binary_op, consuming, one, scaled, several

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
    x.deallocate()
    with pytest.raises(TaskError, match=r"given away or freed|was freed"):
        prepared(x, W)


def test_a_tensor_that_was_given_away_is_not_read_again(device: Device) -> None:
    prepared, loaded = _sum(device), device.load(scaled("a", 2.0, target=device.machine))
    x = one(loaded(X))
    x.settle()
    _ready(prepared, x, W)
    eat = device.load(consuming("eat", 2.0, target=device.machine))
    pending = one(eat(x))  # It takes the tensor, and has not run.
    with pytest.raises(TaskError, match=r"given away|donated"):
        prepared(x, W)
    np.testing.assert_array_equal(pending.numpy(), (X * 2 + 1) * 2)


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

    def made(self, array: Array = X) -> Array:
        return one(self.prepared(array, self.tensor)).numpy()


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
        results.append(repeated.made(X * number))
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


def _dropped(of: _Repeated) -> object:
    dropped = of.device.tensor(X)
    del dropped
    return None


@pytest.mark.parametrize(
    "change",
    [_make_something, _queue, _held, _dropped,
     lambda of: of.device.make_room(),
     lambda of: of.device.events.subscribe(_nothing),
     lambda of: of.device.hooks.register(before_program=_nothing)],
    ids=["allocated", "queued", "held", "dropped", "plans dropped", "listener", "hook"],
)  # fmt: skip
def test_results_are_right_whatever_changes_between_calls(
    repeated: _Repeated, change: Callable[[_Repeated], object]
) -> None:
    for number in range(4):
        kept = change(repeated)
        np.testing.assert_array_equal(repeated.made(X * number), X * number + W)
        np.testing.assert_array_equal(repeated.made(X), X + W)
        del kept


@pytest.mark.parametrize("change", [_take_back, lambda of: of.device.close()])
def test_a_call_is_refused_once_what_it_reads_is_gone(
    repeated: _Repeated, change: Callable[[_Repeated], object]
) -> None:
    change(repeated)
    with pytest.raises(TaskError, match=r"took the bytes back|is closed"):
        repeated.made()


def test_a_repeated_call_takes_other_arrays_and_tensors(repeated: _Repeated) -> None:
    prepared, tensor = repeated.prepared, repeated.tensor
    other = lend(repeated.device, X.copy(), "another")
    wide = X.astype(np.float64)
    for _ in range(3):
        np.testing.assert_array_equal(one(prepared(wide, tensor)).numpy(), X + W)
        for first, second, right in ((X, other, X + X), (tensor, tensor, W + W),
                                     (tensor, X, X + W), (X, X, X + X)):  # fmt: skip
            np.testing.assert_array_equal(one(prepared(first, second)).numpy(), right)
        np.testing.assert_array_equal(repeated.made(), X + W)
    with pytest.raises(stitch.StitchError):
        prepared(X[:2], tensor)
    np.testing.assert_array_equal(repeated.made(), X + W)


def test_results_come_in_the_order_of_the_graphs_outputs(host: Device) -> None:
    graph = TaskGraph()
    x = graph.input(TensorDesc(SHAPE, host_layout(DataType.FLOAT32)), "x")
    first = graph.call(scaled("a", 2.0, target="host"), x)
    second = graph.call(scaled("b", 3.0, target="host"), x)
    graph.output(second)
    graph.output(first)
    prepared = host.prepare(graph)
    _ready(prepared, X)
    for made, wanted in zip(several(prepared(X)), (X * 3 + 1, X * 2 + 1), strict=True):
        np.testing.assert_array_equal(made.numpy(), wanted)
