"""Host functions: what they may do with which parameter, and what is passed where at a call."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from stitch.errors import UsageError
from stitch.tasks import (
    Future,
    HostCall,
    HostFunction,
    InputPlace,
    OutputPlace,
    Permission,
    TaskGraph,
    host_call,
    host_function,
    task,
)
from tests.support.small_programs import HOST


def scaled(x: Any, out: Any, factor: float = 2.0, *rest: Any, bias: Any = 0, **more: Any) -> None:
    out[:] = x * factor + bias
    for array in (*rest, *more.values()):
        out += array


def call(function: HostFunction, *arguments: Any, **named: Any) -> tuple[HostCall, list[str]]:
    """A call in which texts stand for values."""
    made, values = host_call(function, arguments, named, lambda v: isinstance(v, str))
    return made, list(values)


def test_all_parameters_are_read_unless_it_is_said_otherwise() -> None:
    both = host_function(scaled, returns=HOST, writes="out", updates="x")
    assert {p.name: p.permission for p in both.parameters} == {
        "x": Permission.READ_WRITE, "out": Permission.WRITE_ONLY, "factor": Permission.READ_ONLY,
        "rest": Permission.READ_ONLY, "bias": Permission.READ_ONLY, "more": Permission.READ_ONLY,
    }  # fmt: skip
    some = host_function(scaled, returns=HOST, writes="out", reads=["x"])
    assert some.permission("bias") is Permission.NONE


def test_values_have_places_and_the_rest_is_plain() -> None:
    function = host_function(scaled, returns=HOST, writes="out")
    made, values = call(function, "a", 3.0, "b", bias="c", other=4)
    assert values == ["a", "b", "c"] and made.takes == 3
    first, second, third = map(InputPlace, range(3))
    assert made.arguments == (first, OutputPlace(0), 3.0, second)
    assert dict(made.named) == {"bias": third, "other": 4}
    assert made.input_name(0) == "x" and made.input_name(1) == "rest"
    assert made.input_name(2) == "bias"


def test_running_a_call_passes_arrays_at_their_places() -> None:
    function = host_function(scaled, returns=HOST, writes="out")
    made, _ = call(function, "a", 3.0, "b", bias=1.0)
    out = np.zeros(2)
    made.run([np.array([1.0, 2.0]), np.array([10.0, 20.0])], [out])
    assert out.tolist() == [14.0, 27.0]


def test_what_is_written_comes_first_then_what_is_returned_then_what_is_updated() -> None:
    def step(state: Any, grad: Any, norm: Any) -> Any: ...

    small = HOST.__class__((1,), HOST.layout)
    function = host_function(step, returns=(small, HOST), writes="norm", updates="state")
    made, values = call(function, "s", "g")
    assert values == ["s", "g"]
    assert made.outputs([HOST, HOST]) == (small, HOST, HOST)
    assert made.aliases == ((2, 0),) and made.consumes == {0}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"reads": "y"}, "has no parameter 'y'"),
        ({"writes": "outt"}, "did you mean 'out'"),
        ({"reads": "x", "updates": "x"}, "stands in updates= and in reads="),
        ({"reads": ("x", "x")}, "stands in reads= and twice"),
        ({"writes": "rest"}, "any number of arguments"),
        ({"updates": "more"}, "any number of arguments"),
        ({"writes": "out"}, "returns= describes 0 arrays"),
        ({"returns": 3}, "takes a TensorDesc"),
        ({"returns": (HOST, 3)}, "takes a TensorDesc"),
        ({"reads": 3}, "a parameter's name"),
    ],
)
def test_bad_words_are_refused(words: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        host_function(scaled, **words)


def test_coroutines_and_generators_are_no_host_functions() -> None:
    async def later() -> None: ...

    def some() -> Iterator[int]:
        yield 1

    for function in (later, some):
        with pytest.raises(UsageError, match="coroutine or a generator"):
            host_function(function)
    with pytest.raises(UsageError, match="a host function already"):
        host_function(host_function(scaled))


@pytest.mark.parametrize(
    ("arguments", "named", "message"),
    [
        ((), {}, "missing a required argument: 'x'"),
        (("a",), {"out": "b"}, "may do nothing|leave out out"),
        (("a",), {"x": "b"}, "multiple values"),
        (([1, "a"],), {}, r"a list with futures in it\n.* as in \*x$"),
        (({"k": "a"},), {}, r"a dict with futures in it\n.* as in \*\*x$"),
    ],
)
def test_bad_calls_are_refused(
    arguments: tuple[Any, ...], named: dict[str, Any], message: str
) -> None:
    def function(x: Any, out: Any) -> None: ...

    with pytest.raises(UsageError, match=message):
        call(host_function(function, returns=HOST, writes="out"), *arguments, **named)


def test_an_array_where_none_may_be_and_none_where_one_must_be() -> None:
    function = host_function(scaled, reads="x")
    with pytest.raises(UsageError, match="may do nothing with an array as 'bias'"):
        call(function, "a", 1, bias="b")
    with pytest.raises(UsageError, match="updates x, which needs a future"):
        call(host_function(scaled, updates="x"), 1.0, 2.0)


def test_the_decorator_makes_a_task_that_queues_where_its_futures_are() -> None:
    @task(returns=HOST, name="double")
    def twice(x: Any) -> Any:
        return x + x

    graph = TaskGraph()
    made = twice(graph.input(HOST))
    assert isinstance(made, Future) and made.desc == HOST
    assert graph.tasks[0].name == "double"
    with pytest.raises(UsageError, match="none of the arguments of task 'double' is a future"):
        twice(np.zeros(3))

    @task
    def shown(x: Any) -> None: ...

    assert shown(made) == () and len(graph) == 2


def test_objects_that_are_called_need_no_hash() -> None:
    class Scale:
        __hash__ = None  # type: ignore[assignment]

        def __call__(self, x: Any) -> Any:
            return x * 2

    graph, scale = TaskGraph(), Scale()
    x = graph.input(HOST)
    for _ in range(2):
        x = graph.host(scale, x, returns=HOST)
        x = graph.host(host_function(scale, returns=HOST), x)
    assert [made.name for made in graph.tasks] == ["Scale"] * 4 and graph.validate() == ()
