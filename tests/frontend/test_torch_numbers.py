"""Numbers beside narrow floats, reductions of nothing, special values: as eager torch has them."""

from __future__ import annotations

import fnmatch
import logging
import math
import random
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

import stitch
from stitch.frontend.torch.compile.backend import stitch_backend
from tests.support.grids import every, in_turn, named
from tests.support.run_seed import SEED
from tests.support.torch.agreement import Applied
from tests.support.torch.operator_samples import (
    _as_function,
    _called,
    _failure,
    _is_as_near,
    graph_module_of,
    operators,
    samples_of,
)

EXECUTORS = ("numpy", "onnxruntime", "torch", "auto")
NARROW = (torch.float16, torch.bfloat16)
NUMBERS = (70000.0, 1e-8, 0.1, 1 / 3, -2.7, 65504.0, 1e30, 3)
#: As many as torch's vector kernels take at once: what is left over they round otherwise.
OPERANDS = (
    0.001, 0.5, 1.0, 2.0, -3.0, 100.0, 6000.0, -65504.0, 0.0, -0.0, 5.96e-8, 1e-5, math.inf,
    math.nan, -math.inf, 7.0, 0.3, -0.7, 1.3, 0.9, -0.1, 17.0, -33.0, 0.02, 3.3, 250.0, -1.7, 0.25,
    12.5, -0.004, 77.0, 1.01,
)  # fmt: skip

Scalar = Callable[[Any, Any], Any]
WITH_A_NUMBER: dict[str, Scalar] = {
    "mul": lambda x, c: x * c,
    "div": lambda x, c: x / c,
    "number / x": lambda x, c: c / x,
    "add": lambda x, c: x + c,
    "number - x": lambda x, c: c - x,
    "x // number": lambda x, c: x // c,
    "div, trunc": lambda x, c: torch.div(x, c, rounding_mode="trunc"),
    "remainder": lambda x, c: x % c,
    "number % x": lambda x, c: torch.remainder(c, x),
    "fmod": torch.fmod,
    "pow": lambda x, c: x**c,
    "number ** x": lambda x, c: c**x,
    "eq": lambda x, c: x == c,
    "gt": lambda x, c: x > c,
    "le": lambda x, c: x <= c,
    "add, alpha": lambda x, c: torch.add(x, x.flip(0), alpha=c),
    "sub, alpha": lambda x, c: torch.sub(x, x.flip(0), alpha=c),
    "rsub, alpha": lambda x, c: torch.rsub(x, 3, alpha=c),
    "lerp": lambda x, c: torch.lerp(x, x.flip(0), c),
    "addcmul": lambda x, c: torch.addcmul(x, x.flip(0), x.roll(1), value=c),
    "addcdiv": lambda x, c: torch.addcdiv(x, x.flip(0), x.roll(1), value=c),
    "where": lambda x, c: torch.where(x > 0, x, c),
    "masked_fill": lambda x, c: x.masked_fill(x > 0, c),
    "full_like": torch.full_like,
    "clamp": lambda x, c: x.clamp(-abs(c), abs(c)),
    "leaky_relu": functional.leaky_relu,
    "celu": functional.celu,
    "elu": functional.elu,
    "threshold": lambda x, c: functional.threshold(x, 0.1, c),
    "xlogy": torch.xlogy,
    "number xlogy x": lambda x, c: torch.xlogy(c, x),
    "x * a tensor without axes": lambda x, c: x * torch.tensor(c),
    "a tensor without axes * x": lambda x, c: torch.tensor(c) * x,
    "x * a wide tensor without axes": lambda x, c: x * torch.tensor(c, dtype=torch.float64),
    "x / a tensor without axes": lambda x, c: x / torch.tensor(c),
    "a tensor without axes / x": lambda x, c: torch.tensor(c) / x,
    "x + a tensor without axes": lambda x, c: x + torch.tensor(c),
    "x // a tensor without axes": lambda x, c: x // torch.tensor(c),
    "lerp by a tensor without axes": lambda x, c: torch.lerp(x, x.flip(0), torch.tensor(c)),
    "atan2 of a tensor without axes": lambda x, c: torch.atan2(x, torch.tensor(c)),
}  # fmt: skip


def computed(function: Callable[..., Any], executor: str, *tensors: Any) -> list[Any]:
    """What programs alone compute, through the backend of torch.compile."""

    def listed(*given: Any) -> list[Any]:
        made = function(*given)
        return [made] if isinstance(made, torch.Tensor) else list(made)

    options = {"executor": executor, "fallback": "error"}
    run = stitch_backend(graph_module_of(listed, tensors), tensors, options=options)
    return list(run(*tensors))


def assert_equal(found: list[Any], wanted: Any, what: str) -> None:
    """Equal types, shapes and elements, NaN and NaN being equal."""
    several = [wanted] if isinstance(wanted, torch.Tensor) else list(wanted)
    assert len(found) == len(several), what
    for got, want in zip(found, several, strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True, msg=what)


def assert_numbers_agree(names: Sequence[str], dtype: Any, numbers: Any, executor: str) -> None:
    """Bit for bit, where eager torch takes the number."""
    x = torch.tensor(OPERANDS).to(dtype)
    taken: list[tuple[str, Any, Any]] = []
    for name in names:
        before = len(taken)
        for number in numbers:
            try:
                taken.append((name, number, WITH_A_NUMBER[name](x, number)))
            except RuntimeError:
                continue  # It does not fit into the type, which torch refuses.
        assert len(taken) > before, name

    def every(given: Any) -> list[Any]:
        return [WITH_A_NUMBER[name](given, number) for name, number, _ in taken]

    for found, (name, number, wanted) in zip(computed(every, executor, x), taken, strict=True):
        assert_equal([found], wanted, f"{name} of {dtype} and {number} by {executor}")


@pytest.mark.parametrize(("dtype", "part"), in_turn(named(str, NARROW), range(8)))
def test_a_number_beside_narrow_floats_is_rounded_where_torch_rounds_it(
    part: int, dtype: Any
) -> None:
    assert_numbers_agree([*WITH_A_NUMBER][part::8], dtype, NUMBERS, "numpy")


@pytest.mark.campaign("torch_numbers")
@pytest.mark.parametrize("executor", EXECUTORS[1:])
@pytest.mark.parametrize("dtype", NARROW, ids=str)
@pytest.mark.parametrize("name", ("mul", "div", "x // number", "add, alpha", "lerp", "gt", "clamp"))
def test_numbers_beside_narrow_floats_are_the_same_for_every_executor(
    name: str, dtype: Any, executor: str
) -> None:
    assert_numbers_agree([name], dtype, NUMBERS, executor)


@pytest.mark.parametrize("executor", EXECUTORS)
def test_halves_times_numbers_beyond_them_are_those_of_eager_torch(executor: str) -> None:
    x = torch.tensor([0.001, 0.5, 1.0, 0.0], dtype=torch.float16)
    for number in (70000.0, 1e-8):
        found = computed(lambda x, c=number: x * c, executor, x)
        assert_equal(found, x * number, str(number))
        model = stitch.compile(Applied(lambda x, c=number: x * c), (x,), executor=executor)
        assert_equal([torch.from_numpy(model(x).numpy())], x * number, str(number))


WITH_INTEGERS = (
    "add", "mul", "number - x", "eq", "gt", "le", "add, alpha", "sub, alpha", "where",
    "masked_fill", "full_like", "x * a tensor without axes",
)  # fmt: skip
BITWISE: dict[str, Scalar] = {
    "and": lambda x, c: x & c, "or": lambda x, c: x | c, "number ^ x": lambda x, c: c ^ x,
}  # fmt: skip
INTEGERS = (3, -1, 0, True, 200, 300, -300, 70000, 2**31, 2**40)


@pytest.mark.parametrize("dtype", (torch.uint8, torch.int8, torch.int64, torch.bool), ids=str)
def test_numbers_beyond_an_integer_type_wrap_around_as_in_eager_torch(dtype: Any) -> None:
    x = torch.tensor((0, 1, 2, -1, -128, 127, 100, 255, 0, 1)).to(dtype)
    calls, wanted = [], []
    for name, function in ({n: WITH_A_NUMBER[n] for n in WITH_INTEGERS} | BITWISE).items():
        for number in INTEGERS:
            try:
                wanted.append(function(x, number))
            except RuntimeError:
                continue  # It does not fit into the type, which torch refuses.
            calls.append((name, function, number))

    def every(given: Any) -> list[Any]:
        return [function(given, number) for _, function, number in calls]

    for found, want, (name, _, number) in zip(
        computed(every, "numpy", x), wanted, calls, strict=True
    ):
        assert_equal([found], want, f"{name} of {dtype} and {number}")


# Nothing ---------------------------------------------------------------------------------------

SHAPES = ((0, 4), (2, 0, 3), (0,))
Reduction = Callable[..., Any]
REDUCTIONS: dict[str, Reduction] = {
    name: getattr(torch, name) for name in (
        "any", "all", "sum", "mean", "prod", "nansum", "nanmean", "logsumexp", "var", "std",
        "var_mean", "std_mean", "norm", "amax", "amin", "argmax", "argmin", "median", "max", "min",
        "count_nonzero",
    )
}  # fmt: skip
REDUCTIONS |= {
    "population variance": lambda x, *dim: torch.var(x, *dim, correction=0),
    "variance with correction 2": lambda x, *dim: torch.var(x, *dim, correction=2),
    "1-norm": lambda x, *dim: torch.linalg.vector_norm(x, 1, *dim),
    "maximum norm": lambda x, *dim: torch.linalg.vector_norm(x, math.inf, *dim),
    "softmax": lambda x, dim=0: torch.softmax(x, dim),
    "cumsum": lambda x, dim=0: torch.cumsum(x, dim),
    "cumprod": lambda x, dim=0: torch.cumprod(x, dim),
    "mean square error": lambda x, *_: functional.mse_loss(x, x),
}


def assert_nothing_is_reduced_alike(name: str, executor: str) -> None:
    """Over all axes, over each, and to be refused where eager torch refuses it."""
    function = REDUCTIONS[name]
    for shape in SHAPES:
        for dim in ((), *((axis,) for axis in range(len(shape)))):
            x, what = torch.zeros(shape), f"{name} of {shape} over {dim or 'all'} by {executor}"
            try:
                wanted = function(x, *dim)
            except (IndexError, RuntimeError, TypeError):
                if dim:
                    with pytest.raises(Exception):  # noqa: B017  # whichever way torch says it
                        computed(lambda x, d=dim: function(x, *d), executor, x)
                continue
            assert_equal(computed(lambda x, d=dim: function(x, *d), executor, x), wanted, what)


@pytest.mark.filterwarnings("ignore:.*degrees of freedom")
@pytest.mark.parametrize("name", ("any", "all", "mean", "var_mean"))
def test_reductions_of_nothing_are_those_of_eager_torch(name: str) -> None:
    assert_nothing_is_reduced_alike(name, "onnxruntime")


@pytest.mark.campaign("torch_numbers")
@pytest.mark.filterwarnings("ignore:.*degrees of freedom")
@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("name", REDUCTIONS)
def test_every_reduction_of_nothing_is_that_of_eager_torch(name: str, executor: str) -> None:
    assert_nothing_is_reduced_alike(name, executor)


# Special values --------------------------------------------------------------------------------

SPECIAL = (
    math.nan, math.inf, -math.inf, 0.0, -0.0, 1e-40, -1e-40, 3.4e38, -3.4e38, -200.0, 100.0, 2.5,
    -2.5, -0.5, -100.0, 1e-8,
)  # fmt: skip
OF_SPECIAL: dict[str, Callable[[Any], Any]] = {
    "expm1": torch.expm1,
    "celu": lambda x: functional.celu(x, 0.3),
    "log1p": torch.log1p,
    "sign": torch.sign,
    "sgn": torch.sgn,
    "norm of one": lambda x: torch.linalg.vector_norm(x[:, None], dim=1),
    "floor of a quotient": lambda x: torch.div(x, x.flip(0), rounding_mode="floor"),
    "floor of a quotient by a number": lambda x: x // 0.1,
    "logit": lambda x: torch.logit(x, 0.01),
    "xlogy": lambda x: torch.xlogy(x, x.flip(0)),
}


@pytest.mark.parametrize("name", every(2, OF_SPECIAL))
def test_special_values_are_those_of_eager_torch(name: str) -> None:
    function, x = OF_SPECIAL[name], torch.tensor(SPECIAL)
    for executor in ("numpy", "torch"):
        (found,) = computed(function, executor, x)
        torch.testing.assert_close(found, function(x), rtol=3e-6, atol=1e-44, equal_nan=True)


@pytest.mark.parametrize("name", ["elu", "selu", "celu"])
@pytest.mark.parametrize("length", [1, 5, 64])
def test_activations_keep_the_sign_of_zero_as_eager_torch(name: str, length: int) -> None:
    x = torch.tensor([-0.0, 0.0, -1.0, 1.0, -1e-40] * length)
    (found,) = computed(getattr(functional, name), "numpy", x)
    assert torch.equal(torch.signbit(found), torch.signbit(x))
    torch.testing.assert_close(found, getattr(functional, name)(x), rtol=3e-6, atol=1e-44)


@pytest.mark.parametrize("value", [2.5, -1.9, 3, 0.5])
def test_addcmul_of_integers_cuts_its_value_as_eager_torch(value: float) -> None:
    x = torch.arange(-3, 4)

    def product(x: Any) -> Any:
        return torch.addcmul(x, x, x, value=value)

    assert_equal(computed(product, "numpy", x), product(x), str(value))
    compiled = stitch.compile(Applied(product), (x,), target="host")(x)
    assert compiled.numpy().tolist() == product(x).tolist()


# torch's own database ----------------------------------------------------------------------------

TABLE = Path(__file__).parents[2] / "docs" / "torch_special_values.md"
_FLOAT = torch.finfo(torch.float32)
VALUES: dict[str, tuple[float, ...]] = {
    "NaN": (math.nan,),
    "infinity": (math.inf, -math.inf),
    "zero": (0.0, -0.0),
    "denormal": (_FLOAT.smallest_normal / 4, -_FLOAT.smallest_normal / 4),
    "huge": (_FLOAT.max, _FLOAT.min),
    "ordinary": (1.0, -1.0, 0.5, -0.5, 2.5, -2.5, 100.0, -100.0, _FLOAT.eps),
}


def listed_differences() -> list[tuple[str, frozenset[str]]]:
    """Rows of the table: patterns of operators' names, and the values for which they may differ."""
    rows = []
    for line in TABLE.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 3 and set(cells[1].split(", ")) <= VALUES.keys():
            rows.append((cells[0], frozenset(cells[1].split(", "))))
    return rows


def is_in(name: str, patterns: str) -> bool:
    return any(fnmatch.fnmatch(name, pattern) for pattern in patterns.split(", "))


def replaced(tensor: Any, values: tuple[float, ...], draw: random.Random) -> Any:
    """A third of the elements of a float32 tensor, or all of them, drawn from these values."""
    if tensor.dtype is not torch.float32:
        return tensor
    flat, share = tensor.detach().flatten().clone(), draw.choice((0.3, 1.0))
    for place in range(flat.numel()):
        if draw.random() < share:
            flat[place] = draw.choice(values)
    return flat.view(tensor.shape)


def difference(found: Any, wanted: Any) -> str:
    """How two results differ beyond rounding; nothing where they do not."""
    if found.dtype != wanted.dtype or found.shape != wanted.shape:
        return f"{found.dtype}{list(found.shape)}, not {wanted.dtype}{list(wanted.shape)}"
    is_close = torch.isclose(found, wanted, rtol=3e-4, atol=3e-6, equal_nan=True)
    if bool(is_close.all()):
        return ""
    place = int((~is_close).flatten().nonzero()[0])
    return f"{found.flatten()[place].item()}, not {wanted.flatten()[place].item()}"


def is_compared(name: str, called: Any) -> bool:
    """Whether torch promises what an operator gives of these values."""
    is_random = any(torch.Tag.nondeterministic_seeded in op.tags for op in called.overloads)
    return called.is_dense and not is_random and not name.startswith(("empty", "new_empty"))


def differences_of(name: str, seed: int = SEED) -> dict[str, str]:
    """For which values an operator's samples differ from eager torch's, and an example each."""
    found: dict[str, str] = {}
    for number, sample in enumerate(samples_of(operators()[name], 2)):
        function, tensors = _as_function(operators()[name], sample)
        tensors = [tensor.detach() for tensor in tensors]
        try:
            if any(t.is_complex() for t in tensors) or not is_compared(
                name, _called(function, tensors)
            ):
                continue
            run = stitch_backend(
                graph_module_of(function, tensors), tensors,
                options={"executor": "numpy", "fallback": "error"},
            )  # fmt: skip
        except Exception as error:
            assert _failure(error)[0] != "wrong"
            continue
        for kind, values in VALUES.items():
            draw = random.Random(f"{name} {number} {kind} {seed}")
            given = [replaced(tensor, values, draw) for tensor in tensors]
            try:
                wanted = function(*[tensor.clone() for tensor in given])
            except Exception:
                continue  # torch refuses such values.
            got = run(*given)
            told = [text for pair in zip(got, wanted, strict=True) if (text := difference(*pair))]
            # Sums that cancel leave rounding alone, in which eager torch is as far from the truth.
            if told and not (kind == "ordinary" and _is_as_near(function, given, got, wanted)):
                found.setdefault(kind, f"sample {number}: {told[0]}")
    return found


@pytest.fixture
def quiet() -> Iterator[None]:
    """Without torch's warnings and traces, which are megabytes for a failing test."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    logging.disable(before)


def assert_differences_are_listed(names: list[str]) -> None:
    rows, told = listed_differences(), []
    for name in names:
        allowed = {kind for patterns, kinds in rows if is_in(name, patterns) for kind in kinds}
        if allowed == VALUES.keys():
            continue
        for kind, text in differences_of(name).items():
            if kind not in allowed:
                told.append(f"{name}, {kind}, {text}")
    if told:
        pytest.fail("\n".join(told), pytrace=False)


@pytest.mark.usefixtures("quiet")
def test_some_operators_of_the_database_have_special_values_as_eager_torch() -> None:
    assert_differences_are_listed(sorted(operators())[7::100])


@pytest.mark.campaign("torch_numbers")
@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("part", range(8))
def test_every_operator_of_the_database_has_special_values_as_eager_torch(part: int) -> None:
    assert_differences_are_listed(sorted(operators())[part::8])
