"""What functions read of unusual kinds: numbers and types with attributes, aliases of `typing`, the
clock, classes of torch modules. A kept trace is never older than any of it."""

from __future__ import annotations

import typing
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

import stitch
from stitch import fractal as ops
from stitch.fractal import FractalTensor

XS = FractalTensor([1.0, 2.0])
F32 = np.float32


@pytest.fixture(autouse=True)
def within() -> Iterator[stitch.Device]:
    with stitch.open_device("host") as device, ops.mode("parallel", device=device):
        yield device


def check(f: Callable[[Any], Any], *changes: Callable[[], object]) -> None:
    """A map gives what the function gives now, before and after each change."""
    for change in (lambda: None, *changes):
        change()
        expected = [float(f(F32(1))), float(f(F32(2)))]
        for _ in range(2):
            assert ops.map(f, XS).tolist() == expected


class Bare:
    """What it has is set from outside."""

    number: Any = 2.0


def test_what_a_type_of_numbers_says_beside_its_name() -> None:
    held = Bare()

    def type_of(number: float) -> Any:
        return np.dtype("f4", metadata={"number": number})

    held.number = type_of(2.0)
    check(
        lambda x: x * held.number.metadata["number"],
        lambda: setattr(held, "number", type_of(3.0)),
    )
    held.number = np.zeros(2, type_of(2.0))
    check(
        lambda x: x * held.number.dtype.metadata["number"],
        lambda: setattr(held, "number", np.zeros(2, type_of(3.0))),
    )


def test_attributes_of_a_number_and_of_its_class() -> None:
    class Named(np.float64):
        shared = 2.0

        def __mul__(self, other: Any) -> Any:
            return other * self.shared

    number: Any = Named(1.0)
    number.own = 2.0
    check(lambda x: x * number.shared, lambda: setattr(Named, "shared", 3.0))
    check(lambda x: x * number.own, lambda: setattr(number, "own", 3.0))
    check(lambda x: number * x, lambda: setattr(Named, "shared", 4.0))


def test_attributes_of_what_is_of_typing() -> None:
    new_type: Any = typing.NewType
    kind = new_type("kind", float)
    kind.number = 2.0
    held = {"number": 2.0}
    noted: Any = typing.Annotated[float, held]
    check(lambda x: x * kind.number, lambda: setattr(kind, "number", 3.0))
    check(lambda x: x * noted.__metadata__[0]["number"], lambda: held.update(number=3.0))


@pytest.mark.parametrize(
    ("name", "value", "whose"),
    [("__array_ufunc__", None, "class"), ("__array_priority__", 100.0, "class"),
     ("__array_priority__", 100.0, "object")],
)  # fmt: skip
def test_whom_numpy_asks_first(name: str, value: Any, whose: str) -> None:
    class Product:
        def __rmul__(self, other: Any) -> Any:
            return other * F32(3)

        def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
            return np.array(5, F32)

    product: Any = Product()
    ones = np.ones(2, F32)
    owner = Product if whose == "class" else product
    check(lambda x: x * (ones * product)[0], lambda: setattr(owner, name, value))


def test_what_a_class_refuses_to_be_asked() -> None:
    class Numbers:
        def __getitem__(self, index: int) -> float:
            return [2.0, 3.0][index]

    numbers: Any = Numbers()

    def sum_of(x: Any) -> Any:
        try:
            return x * sum(numbers)
        except TypeError:
            return x

    check(sum_of, lambda: setattr(Numbers, "__iter__", None))


DATES = "datetime64[us]"


@pytest.mark.parametrize(
    "now",
    [lambda: np.datetime64("now", "us"), lambda: np.array("now", "M8[us]"),
     lambda: np.array("now").astype(DATES),
     lambda: np.busday_offset("today", 0, roll="forward")],
    ids=["number", "array", "text elsewhere", "day of work"],
)  # fmt: skip
def test_what_may_read_the_clock_is_traced_at_each_call(
    now: Callable[[], Any], capsys: pytest.CaptureFixture[str]
) -> None:
    def since(x: Any) -> Any:
        print("traced")
        return x * float(now().astype(np.int64) % 7 > 0)

    for _ in range(3):
        ops.map(since, XS)
    assert capsys.readouterr().out.split().count("traced") >= 3


# Torch modules -----------------------------------------------------------------------------------


class Scaled(torch.nn.Module):  # type: ignore[misc]
    """Its factor is its class's."""

    factor: Any = 2.0
    by: Any = torch.tensor(2.0)

    def forward(self, x: Any) -> Any:
        return self.scaled(x) * self.by

    def scaled(self, x: Any) -> Any:
        return x * self.factor


@pytest.mark.parametrize(
    "change",
    [lambda: setattr(Scaled, "factor", 3.0), lambda: Scaled.by.fill_(5.0),
     lambda: setattr(Scaled, "scaled", lambda _, x: x * 7)],
    ids=["number", "tensor in place", "method"],
)  # fmt: skip
def test_what_the_class_of_a_module_has(
    change: Callable[[], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("factor", "scaled"):
        monkeypatch.setattr(Scaled, name, vars(Scaled)[name])
    monkeypatch.setattr(Scaled, "by", torch.tensor(2.0))

    class Derived(Scaled):
        """What its base has is its own."""

    for module in (Scaled(), Derived()):
        for _ in range(2):
            expected = [float(module(torch.tensor(x))) for x in (1.0, 2.0)]
            assert ops.map(module, XS).tolist() == expected
            change()


def test_sets_in_a_module_are_read() -> None:
    class Summed(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.numbers = {1.0, 2.0}

        def forward(self, x: Any) -> Any:
            return x * max(self.numbers)

    module = Summed()
    assert ops.map(module, XS).tolist() == [2.0, 4.0]
    module.numbers.add(3.0)
    assert ops.map(module, XS).tolist() == [3.0, 6.0]


def test_an_object_in_a_module_is_read_where_a_function_names_it() -> None:
    module, held = Scaled(), Bare()
    module.held = held
    check(lambda x: x * module.held.number, lambda: setattr(held, "number", 3.0))


class Reading(torch.nn.Module):  # type: ignore[misc]
    """What it has as Python's functions reads what is not its own."""

    @property
    def number(self) -> Any:
        return Bare.number

    def scaled(self, x: Any) -> Any:
        return x * Bare.number

    def __call__(self, x: Any) -> Any:
        return x * Bare.number


READING: Any = Reading()


@pytest.mark.parametrize(
    "f",
    [lambda x: x * READING.number, lambda x: READING.scaled(x), READING.scaled,
     lambda x: READING(x)],
    ids=["property", "method", "bound method", "call"],
)  # fmt: skip
def test_what_functions_of_a_module_read_that_a_function_calls(
    f: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    check(f, lambda: monkeypatch.setattr(Bare, "number", 3.0))
