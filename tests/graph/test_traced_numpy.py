"""NumPy's functions in a traced function give NumPy's values, shapes and types, or one error."""

from __future__ import annotations

import copy
import inspect
import operator
from collections.abc import Callable, Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from stitch.errors import CompileError
from stitch.graph import trace
from stitch.program import Array
from tests.support.run_seed import SEED

Run = Callable[..., dict[str, Array]]
TYPES = ("?", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8")
CAMPAIGN = pytest.mark.campaign("traced_numpy")


def drawn(kind: str, shape: tuple[int, ...] = (3, 4), seed: int = SEED) -> Array:
    """An array of ordinary numbers of a type."""
    rng = np.random.default_rng([seed, TYPES.index(kind)])
    if kind == "?":
        return rng.integers(0, 2, shape).astype(np.bool_)
    if kind.startswith("f"):
        return (rng.normal(size=shape) * 3).astype(kind)
    low = 0 if kind.startswith("u") else -50
    return rng.integers(low, 100 + low, shape).astype(kind)


def check(run: Run, f: Callable[..., Any], *arrays: Array) -> None:
    """`f` traced gives what `f` gives: as many results, shapes, types, values; it is refused where
    NumPy refuses it."""
    with np.errstate(all="ignore"):
        try:
            found = f(*arrays)
        except (TypeError, ValueError, OverflowError) as error:
            with pytest.raises((CompileError, type(error))):
                trace(f, *arrays)
            return
    expected = [np.asarray(e) for e in (found if isinstance(found, tuple | list) else [found])]
    results = list(run(trace(f, *arrays), *arrays).values())
    assert len(results) == len(expected)
    for result, wanted in zip(results, expected, strict=True):
        assert (result.shape, result.dtype) == (wanted.shape, wanted.dtype)
        close = {"float16": 4e-3, "float32": 1e-5}.get(wanted.dtype.name, 1e-12)
        np.testing.assert_allclose(
            result.astype(np.float64), wanted.astype(np.float64), rtol=close, atol=close
        )


def eleventh(points: list[Any]) -> list[Any]:
    """Every eleventh point is in the quick suite (of twelve types), the others in the campaign."""
    return [
        pytest.param(*p, marks=() if i % 11 == 0 else CAMPAIGN, id="-".join(map(str, p)))
        for i, p in enumerate(points)
    ]


REDUCTIONS = (
    "sum", "mean", "prod", "var", "std", "any", "all", "max", "min", "argmax", "argmin",
    "cumsum", "cumprod", "median", "sort", "argsort", "count_nonzero", "nansum",
    "nanprod", "nanmean", "nanmax", "nanmin", "nancumsum", "amax", "amin",
)  # fmt: skip


@pytest.mark.parametrize(("name", "kind"), eleventh([(n, t) for n in REDUCTIONS for t in TYPES]))
def test_a_reduction_of_any_type_has_numpys_type_and_value(name: str, kind: str, run: Run) -> None:
    f, words = getattr(np, name), {"kind": "stable"} if name == "argsort" else {}
    for axis in (None, 0, -1):
        check(run, lambda x, axis=axis: f(x, axis=axis, **words), drawn(kind))
    if "keepdims" in inspect.signature(f).parameters:
        check(run, lambda x: f(x, axis=1, keepdims=True), drawn(kind))


@pytest.mark.parametrize("kind", TYPES)
def test_the_mean_of_whole_numbers_is_not_cut_off(kind: str, run: Run) -> None:
    x = np.array([1, 0, 1, 1], kind)
    check(run, lambda x: (np.mean(x), x.mean(), x.sum(), x.var(ddof=1), x.std()), x)


UFUNCS = sorted({n for n in np.__all__ if isinstance(getattr(np, n), np.ufunc)} - {
    "bitwise_count", "frexp", "gcd", "heaviside", "lcm", "ldexp", "logaddexp2", "matvec", "modf",
    "nextafter", "spacing", "vecdot", "vecmat",
})  # fmt: skip


@pytest.mark.parametrize(("name", "kind"), eleventh([(n, t) for n in UFUNCS for t in TYPES]))
def test_a_ufunc_of_any_type_has_numpys_type_and_value(name: str, kind: str, run: Run) -> None:
    f = getattr(np, name)
    arrays = [drawn(kind, (4, 4), i) for i in range(f.nin)]
    if name in ("left_shift", "right_shift", "bitwise_left_shift", "bitwise_right_shift"):
        arrays[1] = (np.abs(arrays[1]) % 7).astype(kind)
    if name in ("power", "pow") and kind[0] in "iu":
        arrays[1] = (arrays[1] % np.asarray(4, kind)).astype(kind)
    if name == "reciprocal" and kind[0] in "iu":
        arrays[0] += arrays[0] == 0
    check(run, lambda *given: f(*given), *arrays)


BINARY = (
    operator.add, operator.sub, operator.mul, operator.truediv, operator.floordiv, operator.mod,
    operator.lt, operator.eq, operator.ge, operator.and_, np.maximum, np.arctan2, np.logical_or,
)  # fmt: skip


@pytest.mark.parametrize(
    ("number", "left"), eleventh([(i, t) for i in range(len(BINARY)) for t in TYPES])
)
def test_two_operands_are_promoted_as_numpy_promotes_them(number: int, left: str, run: Run) -> None:
    f = BINARY[number]
    for right in TYPES:
        check(run, lambda x, y: f(x, y), drawn(left), drawn(right, seed=1))
    for scalar in (2, 2.5, True, -1, np.float64(2), np.int8(2), np.float32(0.5)):
        check(run, lambda x, s=scalar: f(x, s), drawn(left))
        if not isinstance(scalar, np.generic):
            check(run, lambda x, s=scalar: f(s, x), drawn(left))


def test_a_method_of_a_ufunc_that_is_not_supported_is_named() -> None:
    for f in (np.arctan2.reduce, np.maximum.accumulate):
        with pytest.raises(CompileError, match=rf"numpy\.\w+\.{f.__name__}"):
            trace(lambda x: f(x), drawn("f4"))  # noqa: B023  # called at once


def test_a_number_beyond_a_type_is_compared_and_not_added(run: Run) -> None:
    x = np.array([0, 200], np.uint8)
    check(run, lambda x: (x < 300, x == -1, x > -1), x)
    with pytest.raises(CompileError, match=r"numpy\.add.*300 does not fit"):
        trace(lambda x: x + 300, x)


#: The functions that people use most, each with the arguments that they give it.
CASES: dict[str, Callable[..., Any]] = {
    "round": lambda x: (np.round(x, 1), x.round(2), np.round(x, -1)),
    "isnan": lambda x: (np.isnan(x / x), np.isfinite(x), np.isinf(1 / (x - x))),
    "pad": lambda x: (
        np.pad(x, 1), np.pad(x, ((1, 0), (0, 2)), constant_values=7), np.pad(x, 2, mode="edge"),
        np.pad(x, ((2, 1), (1, 2)), mode="reflect"), np.pad(x, 5, mode="symmetric"),
        np.pad(x, 5, mode="wrap"), np.pad(x, 1, constant_values=((1, 2), (3, 4)))),
    "tile": lambda x: (np.tile(x, 2), np.tile(x, (2, 1, 3))),
    "repeat": lambda x: (np.repeat(x, 2), np.repeat(x, [1, 0, 2], axis=0), x.repeat(2, 1)),
    "roll": lambda x: (np.roll(x, 1), np.roll(x, -1, axis=0), np.roll(x, (1, 2), axis=(0, 1))),
    "log1p": lambda x: (np.log1p(abs(x) * 1e-6), np.expm1(x * 1e-6), np.log1p(abs(x))),
    "sort": lambda x: (np.sort(x), np.sort(x, axis=None), np.argsort(x, axis=0)),
    "cumsum": lambda x: (np.cumsum(x), x.cumsum(1), np.cumsum(x, 0, dtype=np.float64)),
    "tril": lambda x: (np.tril(x), np.tril(x, -1), np.triu(x, 1), np.triu(x[0])),
    "outer": lambda x: (np.outer(x[0], x[1]), np.add.outer(x[0], x[1]), np.outer(x, 1)),
    "take": lambda x: (np.take(x, [1, -1]), x.take([0, 2], 1), np.take(x, 9, mode="wrap"),
                       np.take(x, [5], 0, mode="clip")),
    "median": lambda x: (np.median(x), np.median(x, 0), np.median(x, (0, 1), keepdims=True),
                         np.quantile(x, 0.3, axis=1), np.percentile(x, [10, 75], axis=0)),
    "linalg.norm": lambda x: (
        np.linalg.norm(x), np.linalg.norm(x, axis=1), np.linalg.norm(x, np.inf, 0),
        np.linalg.norm(x, 1, 1, True), np.linalg.norm(x, 3, 1), np.linalg.norm(x, 1),
        np.linalg.norm(x, -np.inf), np.linalg.norm(x, "fro")),
    "x.any": lambda x: (x.any(), x.any(0), (x > 0).all(axis=1, keepdims=True)),
    "x.copy": lambda x: (x.copy(), np.copy(x), +x, x.real, x.conj(), x.imag),
    "x.dot": lambda x: (x.dot(x.T), np.dot(x, 2), np.inner(x, x),
                        np.dot(x, np.stack([x.T, x.T])), np.tensordot(x, x, 2)),
    "reshape(order=)": lambda x: (x.reshape(4, 3, order="F"), x.ravel("F"), x.flatten(),
                                  np.reshape(x, -1), x.reshape((2, -1))),
    "var(ddof=)": lambda x: (x.var(ddof=1), np.std(x, 0, ddof=2), np.var(x, axis=1, mean=x[:, :1])),
    "sum(dtype=)": lambda x: (x.sum(dtype=np.float64), np.sum(x, 0, np.int16), np.prod(x, 1, "f8"),
                              np.mean(x, dtype="f8"), np.sum(x, where=x > 0, initial=3),
                              np.sum(x > 0, dtype=bool)),
    "an index": lambda x: (x[np.argmax(x[:, 0])], x[x.argmin(0)],
                           x[x.argmax(0)[:3], x[:3].argmin(1)],
                           x[np.int64(1), x.argmax(1)], x[:, None, x.argmin(1)],
                           x[x.argmax(0).astype(np.uint8), 1]),
    "index arrays": lambda x: (x[[0, 1], [1, 2]], x[0, [1, 2]], x[[[0], [2]], [1, 3]],
                               x[[True, False, True]], x[np.eye(3, 4) > 0], x[None, [2], ..., 0],
                               np.stack([x, x])[[0, 1], :, [1, 2]], x[::-1, [3, 1]]),
    "shapes": lambda x: (
        np.vstack([x, x[0]]), np.hstack([x, x]), np.dstack([x, x]), np.column_stack([x[0], x[1]]),
        np.append(x, x), np.append(x, 0.5), np.atleast_3d(x), np.rot90(x), np.fliplr(x),
        np.delete(x, 1, 0), np.diagonal(x), np.diag(x), np.diag(x[0], 1), np.trace(x),
        np.resize(x, (5, 2)), *np.array_split(x, 2), *np.hsplit(x, 2), *np.split(x, [2, 1]),
        np.broadcast_arrays(x, x[0])[1], np.concatenate([x, x.astype(np.float64)], axis=None)),
    "more": lambda x: (
        np.diff(x), np.clip(x, None, 1), x.clip(0),
        np.isclose(x, x + 1e-9), np.allclose(x, x), np.array_equal(x, x), np.nan_to_num(x / 0.0),
        np.compress([True, False, True], x, 0),
        np.where(x > 0, x, 2.5), np.take_along_axis(x, np.argsort(x, 1), 1), np.einsum("ij->ji", x),
        np.zeros_like(x), np.full_like(x, 3), np.ones_like(x, dtype="i4", shape=(2,)),
        np.fmod(x, 3), np.reciprocal(2 * x + 1), np.maximum.reduce(x, axis=1),
        np.add.accumulate(x), x // 0.7,
        1 << abs(x.astype(np.int64) % 9)),
    "where=": lambda x: (np.max(x, where=x > 0, initial=1), np.min(x, 0, where=x < 9, initial=5),
                         np.any(x, where=x > 0), np.all(x, axis=0, where=x > 0)),
    "lists of tensors": lambda x: (
        np.where(x > 0, [x[0], x[1], [1, 2, 3, 4]], x), np.take(x, [x[0].argmax(), 1], 1)),
    "places computed": lambda x: (
        np.take(x, x[:, :2].argmax(0), 0), np.take(x, 7 + x.argmax(1), mode="wrap"),
        np.take(x, x.argmax(1) - 2, 1, mode="clip"), np.take_along_axis(x, x.argsort(None), None)),
    "axes": lambda x: (
        np.moveaxis(x[:, None], 0, -1), np.moveaxis(x[None, :, None], (0, 1), (2, -1)),
        np.pad(x, {0: (1, 2)}), np.pad(x, {-1: 2}), np.argmax(x, keepdims=True),
        np.linalg.norm(x, 0, 1), x[[]], x[1, []]),
    "more words": lambda x: (
        np.clip(x, -1, 1, dtype=np.float64), np.round(x > 0), np.nan_to_num(x > 0),
        np.isclose(x / 0.0, x / 0.0, equal_nan=True), np.isclose(x * np.nan, x, equal_nan=True),
        np.array_equal(x * np.nan, x * np.nan, equal_nan=True), copy.deepcopy(x), copy.copy(x)),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("kind", ["f4", "i4"])
def test_a_function_that_people_use_gives_numpys_result(name: str, kind: str, run: Run) -> None:
    f = CASES[name]
    with np.errstate(all="ignore"):
        flat = [part for part in f(drawn(kind)) if not isinstance(part, tuple)]
    results = run(
        trace(lambda x: [part for part in f(x) if not isinstance(part, tuple)], drawn(kind)),
        drawn(kind),
    )
    for number, (result, wanted) in enumerate(zip(results.values(), flat, strict=True)):
        known = np.asarray(wanted)
        assert (result.shape, result.dtype) == (known.shape, known.dtype), number
        np.testing.assert_allclose(result, known, rtol=2e-5, atol=1e-9, err_msg=str(number))


UNKNOWN: Any = "none"
#: What NumPy refuses, a function of a shape (3, 4).
REFUSED: tuple[Callable[[Any], Any], ...] = (
    lambda x: np.tile(x, -1), lambda x: np.pad(x, -1), lambda x: np.pad(x, 1, mode=UNKNOWN),
    lambda x: x.reshape(-1, order="Z"), lambda x: np.split(x, 5),
    lambda x: np.moveaxis(x, (0, 1), 0), lambda x: np.squeeze(x, 0),
    lambda x: np.concatenate([x[0, 0], x[0, 1]]), lambda x: np.stack([x, x[:2]]),
    lambda x: np.take(x, x / 2), lambda x: np.tensordot(x, x, 1),
    lambda x: np.linalg.norm(np.stack([x, x]), 1), lambda x: np.linalg.norm(x, "fro", axis=0),
    lambda x: np.power(x.astype(np.int64), -2),
    lambda x: np.max(x, where=x > 0), lambda x: np.max(x[:0], axis=0), lambda x: x[:0].argmax(),
    lambda x: np.quantile(x, 1.5), lambda x: x.reshape(2, [6]), lambda x: x["a":],
)  # fmt: skip


@pytest.mark.parametrize("number", range(len(REFUSED)))
def test_what_numpy_refuses_is_refused(number: int) -> None:
    f, x = REFUSED[number], drawn("f4")
    with pytest.raises((TypeError, ValueError, IndexError)):
        f(x)
    with pytest.raises((CompileError, TypeError, ValueError, IndexError)):
        trace(f, x)


def test_bfloat16_is_promoted_and_summed_as_numpy_does(run: Run) -> None:
    x = np.arange(12).reshape(3, 4).astype(ml_dtypes.bfloat16)
    check(run, lambda x: (x + 2, 3 - x, x.sum(0), np.prod(x[:2], 1), np.maximum(x, 5)), x)


# Everything else --------------------------------------------------------------------------------

#: What NumPy does without asking the tensor: it reads a buffer, and no object can answer for that.
BUFFERS = {"frombuffer", "fromiter"}
#: What has to do with files, settings and types, and with no tensor.
NOT_OF_ARRAYS = {
    "save", "savez", "savez_compressed", "savetxt", "fromfile", "load", "loadtxt", "genfromtxt",
    "fromregex", "info", "test", "set_printoptions", "printoptions", "seterr", "seterrcall",
    "setbufsize", "show_config", "show_runtime", "get_include", "typename", "mintypecode",
    "issubdtype", "isdtype", "isscalar", "iterable", "bmat", "asmatrix", "may_share_memory",
}  # fmt: skip


def walked() -> Iterator[tuple[str, Callable[..., Any]]]:
    for prefix, module in (("", np), ("linalg.", np.linalg), ("fft.", np.fft)):
        for name in sorted(module.__all__):
            f = getattr(module, name)
            if callable(f) and not inspect.isclass(f) and name not in NOT_OF_ARRAYS | BUFFERS:
                yield f"{prefix}{name}", f


CALLS: tuple[Callable[[Any, Any], Any], ...] = (
    lambda f, x: f(x), lambda f, x: f(x, x), lambda f, x: f([x, x]), lambda f, x: f(x, 1),
    lambda f, x: f(x, 2, 1), lambda f, x: f(x, (4, 3)), lambda f, x: f(x, [0, 1]),
    lambda f, x: f(x, x, x), lambda f, x: f(x[:, :3] @ x[:, :3].T), lambda f, x: f(x[:, :3], 2),
    lambda f, x: f(x.ravel()), lambda f, x: f(0.5, x), lambda f, x: f([1, 0, 1], x, 0),
    lambda f, x: f("ij,kj->ik", x, x),
)  # fmt: skip
#: What these give is chance.
UNINITIALISED = {"empty_like", "empty"}


@pytest.mark.parametrize("name", dict(walked()))
def test_every_public_function_gives_numpys_result_or_an_error_that_names_it(
    name: str, run: Run
) -> None:
    f = dict(walked())[name]
    x = drawn("f4")
    for call in CALLS:
        try:
            with np.errstate(all="ignore"):
                found = call(f, x)
            trace(lambda x: call(f, x), x)  # noqa: B023  # called at once
        except CompileError as error:
            asked = getattr(f, "__name__", "")
            dispatches = isinstance(f, np.ufunc) or hasattr(f, "_implementation")
            told = asked in error.what or "has no data" in error.what or "returned a" in error.what
            assert told or not dispatches, f"{name}: {error.what}"
        except Exception:  # NumPy does not take these arguments itself
            try:
                with np.errstate(all="ignore"):
                    call(f, x)
            except Exception:
                continue
            raise
        else:
            numeric = np.asarray(found).dtype.kind in "biuf" if not isinstance(
                found, tuple | list) else False  # fmt: skip
            if numeric and name not in UNINITIALISED:
                check(run, lambda x: call(f, x), x)  # noqa: B023  # called at once


@pytest.mark.parametrize("name", sorted(n for n in dir(np.ndarray) if not n.startswith("__")))
def test_every_attribute_of_an_array_is_numpys_or_an_error_that_names_it(
    name: str, run: Run
) -> None:
    x = drawn("f4")
    for arguments in ((), (1,), ([0, 1],), (np.float64,)):
        try:
            said = getattr(x, name)
            found = said(*arguments) if callable(said) else said
            traced = trace(
                lambda t: _called(t, name, arguments), x)  # noqa: B023  # called at once  # fmt: skip
        except CompileError as error:
            named = f"ndarray.{name}" in error.what or "has no data" in error.what
            assert named or name in error.what or "returned a" in error.what, error.what
            continue
        except (TypeError, ValueError, AttributeError, IndexError):
            continue
        if isinstance(found, np.ndarray | np.generic) and name != "setfield":
            (result,) = run(traced, x).values()
            np.testing.assert_allclose(result, np.asarray(found, np.float64), rtol=1e-5)


def _called(tensor: Any, name: str, arguments: tuple[Any, ...]) -> Any:
    said = getattr(tensor, name)
    return said(*arguments) if callable(said) else said


def accumulated(x: Array) -> Any:
    total = x.copy()
    total += 1
    total *= x.astype(np.float64)
    other = x.astype(np.float32)
    other -= total
    flat = x.flatten()
    flat /= 2
    joined = np.concatenate([x])
    joined **= 2
    single = x.sum()
    kept = single
    single += 1.5
    part = x[1:]
    part = part * 2
    part += 1
    return x, total, other, flat, joined, kept, single, part


def test_what_is_written_in_place_keeps_its_type_and_copies_stay_as_they_are(run: Run) -> None:
    check(run, accumulated, drawn("f4"))


def under_another_name(x: Array) -> Any:
    y = x + 1
    z = y
    z += 1
    return y


def through_a_part(x: Array) -> Any:
    y = x + 1
    part = y.reshape(-1)[2:]
    part += 1
    return y


def through_the_transpose(x: Array) -> Any:
    y = x + 1
    for row in np.split(y.T, 2):
        row *= 2
    return y


@pytest.mark.parametrize("f", [under_another_name, through_a_part, through_the_transpose])
def test_bytes_written_to_under_another_name_are_refused_and_not_stale(
    f: Callable[..., Any],
) -> None:
    with pytest.raises(CompileError, match=r"overwritten under another name(.|\n)*x\.copy\(\)"):
        trace(f, drawn("f4"))


@pytest.mark.parametrize("kind", ["i4", "u1"])
def test_a_result_of_another_kind_is_not_written_into_whole_numbers(kind: str, run: Run) -> None:
    def halved(x: Array) -> Array:
        x /= 2
        return x

    def mixed(x: Array) -> Array:
        x += 1.5
        return x

    check(run, halved, drawn(kind))
    check(run, mixed, drawn(kind))


def test_types_are_called_by_numpys_names(run: Run) -> None:
    def cast(x: Array) -> Any:
        return tuple(
            x.astype(name) for name in ("f8", "i8", "u8", "<f4", "double", "i2", "float32")
        )

    check(run, cast, np.abs(drawn("f4")) * 100)


def test_whole_numbers_are_clipped_by_bounds_beyond_their_type(run: Run) -> None:
    check(run, lambda x: (np.clip(x, -1, 300), x.clip(10, 2**40)), drawn("u1"))
    check(run, lambda x: x.clip(-5, -1), drawn("u1"))
    check(run, lambda x: (np.clip(x, -1000, 1000), x.clip(-3, 300)), drawn("i1"))


def test_extremes_along_axes_with_elements_of_nothing_are_nothing(run: Run) -> None:
    nothing = np.zeros((0, 4), np.float32)
    check(run, lambda x: (x.max(1), np.min(x, axis=1, keepdims=True)), nothing)
