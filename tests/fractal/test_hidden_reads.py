"""What functions read without naming it: through other names, through what Python and NumPy call by
themselves, through bytes that are shared. A kept trace is never older than any of it."""

from __future__ import annotations

import collections
import dataclasses
import functools
import sys
import typing
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import stitch
from stitch import fractal as ops
from stitch.fractal import FractalTensor
from stitch.fractal.meanings import MeaningReader
from stitch.graph import ComputationGraphBuilder, SymbolicTensor

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


# Arrays ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [4, 40_000])
def test_the_base_of_a_view_is_read_where_it_is_named(size: int) -> None:
    whole = np.ones(size, F32)
    view = whole[1:]
    check(lambda x: x * view.base[0], lambda: whole.put(0, 3))  # type: ignore[index]


def test_bytes_beside_a_view_are_not_missed() -> None:
    whole = np.ones(4, F32)
    view = whole[:1]
    beyond = np.lib.stride_tricks.as_strided
    check(lambda x: x * beyond(view, (4,), (4,))[3], lambda: whole.put(3, 3))


def test_arrays_that_share_bytes_are_others_than_equal_ones_that_do_not() -> None:
    whole = np.ones(4, F32)
    parts = [whole[:2]]

    def written_meanwhile(x: Any) -> Any:
        whole[0] = 9
        try:
            return x * parts[0][0]
        finally:
            whole[0] = 1

    def move(part: Any) -> Callable[[], None]:
        return lambda: parts.__setitem__(0, part)

    changes = move(np.ones(2, F32)), move(whole[2:]), move(whole[:2])
    check(written_meanwhile, *changes)
    check(lambda x: x * (2 if np.shares_memory(whole, parts[0]) else 3), *changes)
    check(lambda x: x * (2 if np.shares_memory(whole[:2], parts[0]) else 3), *changes)


def test_an_object_that_lends_bytes_is_not_taken_for_its_attributes() -> None:
    weights = np.full(3, 2, F32)
    lending, of_class = Bare(), type("Lending", (), {})
    lending.__array_interface__ = weights.__array_interface__  # type: ignore[attr-defined]
    of_class.__array_interface__ = weights.__array_interface__  # type: ignore[attr-defined]
    for each in (lending, of_class()):
        weights[:] = 2
        check(functools.partial(_times_first, each), lambda: weights.fill(3))


def _times_first(held: Any, x: Any) -> Any:
    return x * np.asarray(held)[0]


def test_how_numpy_shows_arrays_is_read() -> None:
    array = np.ones(2) / 3
    shown: tuple[Callable[[Any], Any], ...] = (
        lambda x: x * len(repr(array)), lambda x: x * len(f"{array}"),
        lambda x: x * len("%s" % array),  # noqa: UP031  # as others write it
    )  # fmt: skip
    try:
        for f in shown:
            check(
                f, lambda: np.set_printoptions(precision=3),
                lambda: np.set_printoptions(precision=8),
                lambda: np.set_printoptions(formatter={"float": lambda _: "long as it is"}),
                lambda: np.set_printoptions(formatter=None),
            )  # fmt: skip
    finally:
        np.set_printoptions(precision=8, formatter=None)


# Objects and classes -----------------------------------------------------------------------------


class Calling:
    def __init__(self, number: float) -> None:
        self.number = number

    def __call__(self, x: Any) -> Any:
        return x * self.number


class Finding:
    def __init__(self, number: float) -> None:
        self.number = number

    def __get__(self, owner: Any, kind: Any) -> Any:
        return lambda x: x * self.number


def test_what_python_calls_of_a_class_need_not_be_a_function() -> None:
    calling, finding, numbers = Calling(2.0), Finding(2.0), [2.0]
    part = functools.partial(lambda held, x: x * held[0], numbers)
    callable_, partial_, found = (
        type("Made", (), members)()
        for members in ({"__call__": calling}, {"__call__": part}, {"__matmul__": finding})
    )
    check(lambda x: callable_(x), lambda: setattr(calling, "number", 3.0))
    check(lambda x: partial_(x), lambda: numbers.__setitem__(0, 3.0))
    check(lambda x: found @ x, lambda: setattr(finding, "number", 3.0))


def test_dataclasses_show_what_they_have() -> None:
    length = 2

    @dataclasses.dataclass(eq=False)
    class Shown:
        number: Any

    @dataclasses.dataclass
    class Own:
        number: Any

        def __repr__(self) -> str:
            return "a" * length

    def longer() -> None:
        nonlocal length
        length = 5

    shown, own = Shown(1), Own(1)
    check(lambda x: x * len(f"{shown}"), lambda: setattr(shown, "number", 12345))
    check(lambda x: x * len(repr(own)), longer)


def test_attributes_beside_the_fields_of_a_named_tuple_are_read() -> None:
    class Pair(collections.namedtuple("Two", "a b")):
        number = 2.0

    pair = Pair(1, 2)
    check(lambda x: x * pair.number, lambda: setattr(pair, "number", 3.0))


def test_attributes_in_a_dictionary_of_another_kind_are_not_missed() -> None:
    held = Bare()
    held.__dict__ = collections.OrderedDict(number=2.0)
    check(lambda x: x * held.number, lambda: setattr(held, "number", 3.0))


def test_names_texts_and_annotations_of_functions_and_classes_are_read() -> None:
    def named(a: typing.Any) -> None:
        "a"

    class Named:
        pass

    instance = Named()
    check(lambda x: x * len(named.__name__), lambda: setattr(named, "__name__", "other"))
    check(lambda x: x * len(named.__qualname__), lambda: setattr(named, "__qualname__", "other"))
    check(lambda x: x * len(named.__doc__ or ""), lambda: setattr(named, "__doc__", "longer"))
    check(lambda x: x * len(type(instance).__name__), lambda: setattr(Named, "__name__", "C"))
    told: dict[str, Any] = named.__annotations__
    told["a"] = int
    check(
        lambda x: x * (2 if named.__annotations__["a"] is int else 3), lambda: told.update(a=float)
    )
    told.update(a=int, **{"return": int})
    hints = typing.get_type_hints
    check(lambda x: x * (2 if hints(named)["a"] is int else 3), lambda: told.update(a=float))


def test_what_reads_all_attributes_is_not_trusted() -> None:
    held = Bare()
    bound, unbound, state = "{0.number}".format, str.format, object.__getattribute__
    mapped = "{a.number}".format_map
    uses: tuple[Callable[[Any], Any], ...] = (
        lambda x: x * float(bound(held)), lambda x: x * float(unbound("{0.number}", held)),
        lambda x: x * float(mapped({"a": held})), lambda x: x * state(held, "number"),
        lambda x: x * held.__reduce_ex__(2)[2]["number"],  # type: ignore[index]
    )  # fmt: skip
    for use in uses:
        held.number = 2.0
        check(use, lambda: setattr(held, "number", 3.0))


def test_what_numpy_asks_an_object_for_by_itself_is_read() -> None:
    held, mean, amax = Bare(), np.mean, np.amax
    held.dtype = np.dtype("f4")  # type: ignore[attr-defined]
    held.mean = lambda **_: held.number  # type: ignore[attr-defined]
    held.max = lambda **_: held.number  # type: ignore[attr-defined]
    check(
        lambda x: x * np.zeros(1, held).itemsize,  # type: ignore[call-overload]
        lambda: setattr(held, "dtype", np.dtype("f8")),
    )
    for f in (mean, amax):
        held.number = 2.0
        check(functools.partial(_times_found, f, held), lambda: setattr(held, "number", 3.0))


def _times_found(find: Any, held: Any, x: Any) -> Any:
    return x * find(held)


def test_a_slot_by_its_descriptor_and_a_class_by_a_type_are_read() -> None:
    class Slotted:
        __slots__ = ("number",)
        number: float
        shared = 2.0

    kinds: Any = typing.List[Slotted]  # noqa: UP006  # one of typing's own
    held, slot = Slotted(), vars(Slotted)["number"]
    held.number = 2.0
    check(lambda x: x * slot.__get__(held), lambda: setattr(held, "number", 3.0))
    check(lambda x: x * kinds.__args__[0].shared, lambda: setattr(Slotted, "shared", 3.0))


def test_sets_are_read_in_their_order() -> None:
    numbers = {0, 8}

    def turn() -> None:
        numbers.clear()
        numbers.update([8])
        numbers.add(0)

    check(lambda x: x * (1 + next(iter(numbers))), turn)


def test_a_zero_of_another_sign_is_another_weight_of_a_torch_module() -> None:
    torch = pytest.importorskip("torch")

    class Divided(torch.nn.Module):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.by = torch.nn.Parameter(torch.zeros(1))

        def forward(self, x: Any) -> Any:
            return x / self.by

    module, xs = Divided(), FractalTensor(np.ones((2, 1), F32))
    assert ops.map(module, xs).tolist() == [[np.inf]] * 2
    with torch.no_grad():
        module.by.fill_(-0.0)
    assert ops.map(module, xs).tolist() == [[-np.inf]] * 2


# How it is read ----------------------------------------------------------------------------------


def test_lists_within_lists_without_end_are_no_error() -> None:
    held, deep = Bare(), list[Any]()
    for _ in range(3000):
        deep = [deep]
    held.number = deep
    check(lambda x: x * len(held.number))


def test_a_dictionary_that_others_change_meanwhile_is_read() -> None:
    builder = ComputationGraphBuilder("none")
    table: dict[str, Any] = {name: builder.input(name, (), "float32") for name in "ab"}

    def changing(_: SymbolicTensor) -> str:
        table[f"new {len(table)}"] = 1.0
        return "value"

    key: Any = MeaningReader(changing).of(table)
    assert len(key) == 3 and len(table) == 4


def test_what_is_looked_at_grows_as_the_objects_in_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_value(_: SymbolicTensor) -> Any:
        raise AssertionError

    def looks(count: int) -> int:
        first: Any = None
        for _ in range(count):
            made = Bare()
            made.next = first  # type: ignore[attr-defined]
            first = made
        lines = 0

        def note(*_: Any) -> Any:
            nonlocal lines
            lines += 1
            return note

        reader, before = MeaningReader(no_value), sys.gettrace()
        key = reader.of(lambda x: x * first.next.number)
        sys.settrace(note)
        try:
            reader.meaning(key)
        finally:
            sys.settrace(before)
        return lines

    assert looks(800) < 5 * looks(200)


# What is not read --------------------------------------------------------------------------------

GENERATOR = np.random.default_rng(0)


class Drawn:
    """Made of random numbers, which nobody draws who has one already."""

    def __init__(self) -> None:
        self.number = F32(GENERATOR.integers(2, 9))

    def __call__(self, x: Any) -> Any:
        print("traced")
        return x * self.number

    @classmethod
    def another(cls) -> Drawn:
        return cls()


def test_how_an_object_was_made_is_not_read(capsys: pytest.CaptureFixture[str]) -> None:
    drawn = Drawn()
    for _ in range(3):
        assert ops.map(drawn, XS).tolist() == [drawn.number, 2 * drawn.number]
    assert capsys.readouterr().out.split() == ["traced"]


def test_how_objects_are_made_is_read_where_they_can_be() -> None:
    drawn, kind = Drawn(), type
    makers: tuple[Callable[[], Drawn], ...] = (
        lambda: Drawn(), lambda: kind(drawn)(), lambda: drawn.__class__(), lambda: drawn.another(),
        lambda: Drawn.another(),
    )  # fmt: skip
    for make in makers:
        values = {ops.map(lambda x, make=make: x * make().number, XS).tolist()[0] for _ in range(9)}
        assert len(values) > 1
