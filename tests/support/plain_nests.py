"""Functions over nests on Python's lists: what each gives, by definition.

A nest is a list, a leaf an array or a number of NumPy; zipped nests, and several results, are
tuples. Functions take zipped elements as one tuple.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from stitch.fractal import FractalTensor


def zip(*nests: Any) -> Any:
    return nests


def _elements(nest: Any) -> list[Any]:
    if isinstance(nest, tuple):
        parts = [_elements(part) for part in nest]
        return [tuple([part[i] for part in parts]) for i in range(len(parts[0]))]
    return list(nest)


def _nest(results: list[Any]) -> Any:
    if results and isinstance(results[0], tuple):
        return tuple([_nest([r[k] for r in results]) for k in range(len(results[0]))])
    return results


def map(f: Callable[..., Any], xs: Any, *args: Any, **named: Any) -> Any:
    return _nest([f(x, *args, **named) for x in _elements(xs)])


def forall(f: Callable[..., Any], xs: Any) -> Any:
    part = xs[0] if isinstance(xs, tuple) else xs
    if part and isinstance(part[0], list):
        return map(lambda x: forall(f, x), xs)
    return map(f, xs)


def _states(f: Callable[..., Any], xs: list[Any], start: Any, args: Any, named: Any) -> list[Any]:
    states = []
    for x in xs:
        start = x if start is None else f(start, x, *args, **named)
        states.append(start)
    return states


def scanl(f: Callable[..., Any], xs: Any, start: Any = None, *args: Any, **named: Any) -> Any:
    return _nest(_states(f, _elements(xs), start, args, named))


def scanr(f: Callable[..., Any], xs: Any, start: Any = None, *args: Any, **named: Any) -> Any:
    return _nest(_states(f, _elements(xs)[::-1], start, args, named)[::-1])


def foldl(f: Callable[..., Any], xs: Any, start: Any = None, *args: Any, **named: Any) -> Any:
    return [start, *_states(f, _elements(xs), start, args, named)][-1]


def foldr(f: Callable[..., Any], xs: Any, start: Any = None, *args: Any, **named: Any) -> Any:
    return [start, *_states(f, _elements(xs)[::-1], start, args, named)][-1]


reduce, scan, fold = foldl, scanl, foldl


def slide(xs: list[Any], size: int, stride: int = 1) -> list[Any]:
    return [xs[i : i + size] for i in range(0, len(xs) - size + 1, stride)]


def dilate(xs: list[Any], apart: int) -> list[Any]:
    return [xs[i::apart] for i in range(min(apart, len(xs)))]


def product(xs: list[Any], ys: list[Any]) -> tuple[list[Any], list[Any]]:
    return [list(xs) for _ in ys], [[y for _ in xs] for y in ys]


def lists_of(value: Any) -> Any:
    """The value of a function over nests in this form."""
    if isinstance(value, tuple):
        return tuple([lists_of(each) for each in value])
    if isinstance(value, FractalTensor):
        return [lists_of(each) for each in value]
    return value.numpy() if hasattr(value, "numpy") else np.asarray(value)


def assert_same(found: Any, expected: Any, tolerance: float, where: str = "value") -> None:
    """Equal in form, in type, and in bits without a tolerance."""
    if isinstance(expected, tuple | list):
        assert type(found) is type(expected), (where, found, expected)
        assert len(found) == len(expected), (where, found, expected)
        for i in range(len(found)):
            assert_same(found[i], expected[i], tolerance, f"{where}[{i}]")
        return
    array = np.asarray(expected)
    assert (found.dtype, found.shape) == (array.dtype, array.shape), where
    if tolerance and array.dtype.kind == "f":
        np.testing.assert_allclose(found, array, tolerance, tolerance, err_msg=where)
    else:
        np.testing.assert_array_equal(found, array, err_msg=where)
