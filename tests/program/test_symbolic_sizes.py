"""Symbolic sizes: arithmetic agrees with Python's integers, comparisons are recorded, and whatever
needs a number records it."""

from __future__ import annotations

import math
import operator
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stitch.errors import CompileError, UsageError
from stitch.program import (
    Dim,
    SymbolicData,
    SymbolicSize,
    SymbolicSizes,
    at_sizes,
    int64_array,
)

NAMES = ("a", "b")


def new_sizes(hint: int = 6, least: int = 1, most: int = 40) -> tuple[SymbolicSizes, Any]:
    sizes = SymbolicSizes({"x": {0: Dim("a", least, most), 1: Dim("b", least, most)}})
    return sizes, sizes.shape_of("x", (hint, hint + 1))


#: Expressions as trees: a name, a number, or an operator of two expressions.
TREES = st.recursive(
    st.sampled_from(NAMES) | st.integers(-5, 9),
    lambda inner: st.tuples(st.sampled_from("+-*/%"), inner, inner),
    max_leaves=10,
)
OPERATORS: dict[str, Callable[[Any, Any], Any]] = {
    "+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.floordiv,
    "%": operator.mod,
}  # fmt: skip


def value_of(tree: Any, names: dict[str, Any]) -> Any:
    if isinstance(tree, str):
        return names[tree]
    if isinstance(tree, int):
        return tree
    return OPERATORS[tree[0]](value_of(tree[1], names), value_of(tree[2], names))


@settings(max_examples=200, deadline=None)
@given(TREES, st.integers(1, 40), st.integers(1, 40))
def test_expressions_agree_with_integers_at_every_size(tree: Any, a: int, b: int) -> None:
    sizes, (first, second) = new_sizes()
    try:
        symbolic = value_of(tree, {"a": first, "b": second})
    except ZeroDivisionError:
        with pytest.raises(ZeroDivisionError):
            value_of(tree, {"a": a, "b": b})
        return
    assert not sizes.guards  # Arithmetic alone relies on nothing.
    try:
        number = value_of(tree, {"a": a, "b": b})
    except ZeroDivisionError:
        return  # A quotient that cancelled does not divide any more.
    if isinstance(symbolic, SymbolicSize):
        assert symbolic.expression.at({"a": a, "b": b}) == number
        low, high = symbolic.expression.bounds(sizes.bounds)
        assert low <= number <= high
        assert eval(str(symbolic.expression), {"a": a, "b": b}) == number
    else:
        assert symbolic == number


@settings(max_examples=200, deadline=None)
@given(
    TREES, TREES, st.sampled_from(["eq", "ne", "lt", "le", "gt", "ge"]),
    st.integers(1, 40), st.integers(1, 40),
)  # fmt: skip
def test_a_comparison_holds_wherever_its_guards_hold(
    one: Any, other: Any, relation: str, a: int, b: int
) -> None:
    sizes, (first, second) = new_sizes()
    compare, hints = getattr(operator, relation), {"a": 6, "b": 7}
    try:
        pair = [value_of(tree, {"a": first, "b": second}) for tree in (one, other)]
        decided = compare(*pair)
        assert bool(decided) == compare(*(value_of(tree, hints) for tree in (one, other)))
        at = [value_of(tree, {"a": a, "b": b}) for tree in (one, other)]
    except ZeroDivisionError:
        return
    if all(guard.holds({"a": a, "b": b}) for guard in sizes.guards):
        assert decided == compare(*at)
    else:
        assert decided != compare(*at)


def test_sums_and_products_have_one_normal_form() -> None:
    sizes, (a, b) = new_sizes()
    assert a * b + a == a * (b + 1)
    assert (a + b) * (a - b) == a * a - b * b
    assert (a * 784) % 28 == 0 and a * 784 // 28 == 28 * a
    assert a * b // a == b and -a + a == 0 and a * 0 == 0
    assert a // 2 * 2 + a % 2 == a
    assert (a // 2 + 3) // 4 == (a + 6) // 8
    assert not sizes.guards
    assert isinstance(a - a, int)


def test_bounds_decide_what_they_can() -> None:
    sizes, (a, b) = new_sizes(least=1, most=40)
    assert a != 0 and a > 0 and a <= 40 and a * b < 1601 and a // 2 <= 20 and a + b != 0
    assert bool(a) and not sizes.guards
    assert a // 2 <= a and a // 3 * 3 <= a and a - (a // 5) * 5 < 5 and (a + b) // 2 * 2 <= a + b
    assert not a // 2 * 2 > a and (a * 32 + 32) // (a * 8 + 8) == 4
    assert not sizes.guards


#: Comparisons that hold, and whether their guards say the same where b is 20.
SAME_GUARDS: list[tuple[Callable[..., bool], Callable[..., bool], bool]] = [
    (lambda a, b: a // b == 0, lambda a, b: a // 20 == 0, True),
    (lambda a, b: a < b, lambda a, b: a <= 19, True),
    (lambda a, b: a < b, lambda a, b: a <= 20, False),
    (lambda a, b: a != b, lambda a, b: a <= 20, False),
    (lambda a, b: a - b != 0, lambda a, b: 20 - a != 0, True),
    (lambda a, b: a != b, lambda a, b: a != 19, False),
]


@pytest.mark.parametrize(("one", "other", "is_same"), SAME_GUARDS)
def test_guards_are_equal_where_they_say_the_same_of_some_sizes(
    one: Callable[..., bool], other: Callable[..., bool], is_same: bool
) -> None:
    sizes, pair = new_sizes()
    assert one(*pair) and other(*pair)
    first, second = (guard.condition({"b": 20}) for guard in sizes.guards)
    assert (first == second) is is_same


def test_a_quotient_of_a_sum_has_parentheses() -> None:
    _, (a, _) = new_sizes()
    assert str(((a + 3) // 2).expression) == "((a + 3) // 2)"


def test_what_bounds_leave_open_is_a_guard_once() -> None:
    sizes, (a, b) = new_sizes()
    for _ in range(2):
        assert a < b
        assert a != 1
    assert [(str(g.left), g.relation, str(g.right)) for g in sizes.guards] == [
        ("a", "<", "b"), ("a", "!=", "1"),
    ]  # fmt: skip
    guard = sizes.guards[0]
    assert guard.line.startswith("test_symbolic_sizes.py:") and not guard.is_specialised


#: Each needs a number, as does every way of C code to one.
LEAKS: list[Callable[[Any], Any]] = [
    int, operator.index, float, hash, str, repr, "{}".format, "{:4d}".format, round, abs,
    np.array, np.asarray, lambda n: np.prod((n, 2)), lambda n: range(n), lambda n: [0] * n,
    lambda n: [1, 2, 3, 4, 5, 6, 7][n], lambda n: {n: 1}, lambda n: np.zeros((n, 2)).shape,
    lambda n: n / 2, lambda n: 1 / n, lambda n: n**2, lambda n: 2**n, lambda n: n << 1,
    lambda n: n & 3, lambda n: n | 1, lambda n: 1 ^ n, lambda n: ~n, lambda n: math.sqrt(n),
    lambda n: np.float32(2) * n, lambda n: np.arange(n).sum(), lambda n: f"{n}",
    "{0:x}".format,
    lambda n: n * 0.5, lambda n: 1.5 - n, lambda n: n % 2.5, lambda n: 2.5 // n, lambda n: n == 6.0,
    lambda n: n > 5.5, lambda n: n != np.float32(6), lambda n: n >= 6.5, lambda n: n * [1],
    lambda n: int64_array([n]).tolist(), lambda n: np.asarray(int64_array([n, 3])).sum(),
    lambda n: int64_array([n]).tobytes(), lambda n: str((n, 2)),
]  # fmt: skip


@pytest.mark.parametrize("index", range(len(LEAKS)))
def test_whatever_needs_a_number_specialises(index: int) -> None:
    sizes, (a, _) = new_sizes()
    found = LEAKS[index](a)
    expected = LEAKS[index](6)
    assert type(found) is type(expected) and np.array_equal(found, expected)
    (guard,) = sizes.guards
    assert guard.is_specialised and (str(guard.left), str(guard.right)) == ("a", "6")


def test_numbers_stay_weak_beside_arrays() -> None:
    _, (a, _) = new_sizes()
    assert (np.ones(2, np.float32) * a).dtype == np.float32
    assert (a + np.ones(2, np.int8)).dtype == np.int8


def test_a_size_of_one_value_is_no_specialisation() -> None:
    sizes = SymbolicSizes({"x": {0: Dim("a", 5, 5)}})
    (a,) = sizes.shape_of("x", (5,))
    assert int(a) == 5 and a == 5 and not sizes.guards


@pytest.mark.parametrize("example", [0, 1])
def test_special_examples_are_no_hints(example: int) -> None:
    sizes = SymbolicSizes({"x": {0: Dim("a", 0, 64)}})
    sizes.shape_of("x", (example,))
    assert sizes.hints == {"a": 7}


def test_symbolic_data_has_the_attributes_of_an_array() -> None:
    sizes, (a, b) = new_sizes()
    data: Any = int64_array([a, 3, a * b, -1], (2, 2))
    assert isinstance(data, SymbolicData)
    assert (data.shape, data.size, data.ndim, data.nbytes) == ((2, 2), 4, 2, 32)
    assert at_sizes(data.elements, {"a": 4, "b": 5}) == (4, 3, 20, -1)
    assert not sizes.guards
    assert np.asarray(data).tolist() == [[6, 3], [42, -1]] and data.max() == 42
    with pytest.raises(AttributeError):
        data.no_such_attribute  # noqa: B018


def test_sizes_do_not_outlive_their_compilation() -> None:
    sizes, (a, b) = new_sizes()
    sizes.is_open = False
    assert repr(a * 2) == "<symbolic 2*a>" and a * b == b * a
    for use in (int, hash, lambda n: n < b):
        with pytest.raises(UsageError, match="after its compilation"):
            use(a)
    with pytest.raises(UsageError, match="pickled"):
        pickle.dumps(a)
    with pytest.raises(UsageError, match="different compilations"):
        a + new_sizes()[1][0]


WRONG_DIMS: list[tuple[tuple[Any, ...], str]] = [
    (("2x",), "identifier"), ((3,), "identifier"), (("a", 5, 4), "no sizes"),
    (("a", -1, 4), "no sizes"), (("a", 1, 1 << 60), "no sizes"), (("a", 1.0, 4), "whole numbers"),
    (("a", True, 4), "whole numbers"),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "message"), WRONG_DIMS)
def test_a_wrong_dim_is_refused(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Dim(*arguments)


A = Dim("a", 1, 9)
WRONG_SHAPES: list[tuple[Any, str]] = [
    ({"x": A}, "mapping of axes"), ({"x": {0: 3}}, "mapping of axes"),
    ({"x": {"0": A}}, "mapping of axes"), ({"x": {2: A}}, "axis 2"),
    ({"x": {0: A, -2: A}}, "twice"),
    ({"x": {0: A, 1: Dim("a", 1, 8)}}, "different bounds"), ({"x": {0: Dim("a", 1, 2)}}, "bounds"),
    ({"x": {0: A, 1: A}}, "disagree"),
]  # fmt: skip


@pytest.mark.parametrize(("dynamic_shapes", "message"), WRONG_SHAPES)
def test_wrong_dynamic_shapes_are_refused(dynamic_shapes: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        SymbolicSizes(dynamic_shapes).shape_of("x", (3, 4))


def test_a_guard_that_divides_by_zero_does_not_hold() -> None:
    sizes, (a, b) = new_sizes(least=0)
    assert b // a == 1
    with pytest.raises(CompileError, match=r"\(b // a\) == 1"):
        sizes.check({"a": 0, "b": 4}, "p")


def test_check_names_the_line_that_relied_on_a_guard() -> None:
    sizes, (a, b) = new_sizes()
    assert a < b
    given: dict[str, Any] = {"a": np.int32(3), "b": 4}
    assert sizes.check(given, "p") == {"a": 3, "b": 4}
    with pytest.raises(CompileError, match=r"a < b") as caught:
        sizes.check({"a": 4, "b": 4}, "p")
    assert "test_symbolic_sizes.py:" in str(caught.value) and "a=4, b=4" in str(caught.value)
    for wrong in ({"a": 3}, {"a": 3, "b": 4, "c": 5}, {"a": 0, "b": 4}, {"a": 3, "b": 41},
                  {"a": True, "b": 4}, {"a": 3.0, "b": 4}):  # fmt: skip
        with pytest.raises(UsageError):
            sizes.check(wrong, "p")  # type: ignore[arg-type]
