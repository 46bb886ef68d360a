"""What ONNX has no operator for agrees with eager torch on every executor, forward and backward."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import stitch
from stitch.frontend.torch.compile.backend import stitch_backend
from tests.support.grids import in_turn
from tests.support.run_seed import SEED
from tests.support.torch.agreement import outcomes_of
from tests.support.torch.operator_samples import graph_module_of, results_and_gradients

EXECUTORS = ("numpy", "onnxruntime", "torch", "auto")
#: These divide a program between the others; of the largest family they run in the long campaign.
DIVIDING = ("torch", "auto")
LONG = pytest.mark.campaign("torch_operators")
NAN, INF = math.nan, math.inf

torch.manual_seed(11)
X = torch.randn(3, 4)
Y = torch.randn(3, 4)
CUBE = torch.randn(2, 3, 5)
IMAGE = torch.randn(2, 3, 5, 4)
VOLUME = torch.randn(1, 2, 3, 4, 3)
NARROW = torch.randn(3, 4).bfloat16()
WHOLE = torch.tensor([[3, -1, 3, 0], [2, 2, -5, 7]])
ODD = torch.tensor([0.0, -0.0, 1.0, -1.0, INF, -INF, NAN])
FLAG = torch.tensor([[True, False, True, True], [False] * 4, [True] * 4])
NONE = torch.zeros(0, 4)
ROWS = torch.tensor([[0.5, 1.0, 1.0, 2.0], [-1.0, 0.0, 0.25, 9.0], [0.0, 0.0, 0.0, NAN]])
TABLE = torch.randn(7, 3)
TAKEN = torch.tensor([1, 6, 1, 0, 2, 2])
STARTS = torch.tensor([0, 2, 2, 5])
GRID = torch.rand(2, 4, 3, 2) * 2.4 - 1.2
SPACE = torch.rand(1, 2, 2, 2, 3) * 2.4 - 1.2
ROW_GROUPS = torch.randn(16, 8).bfloat16()

Case = tuple[Callable[..., Any], tuple[Any, ...]]
VIEWS: dict[str, Case] = {
    "as_strided repeating": (lambda x: x.as_strided((2, 3, 4), (0, 1, 3), 0), (X,)),
    "as_strided of what is turned": (lambda x: x.t().contiguous().t().as_strided((5,), (2,)), (X,)),
    "as_strided of nothing": (lambda x: x.as_strided((0, 3), (3, 1)), (X,)),
    "as_strided of one": (lambda x: x.as_strided((), (), 7), (X,)),
    "channels last": (
        lambda x: F.adaptive_avg_pool2d(x.contiguous(memory_format=torch.channels_last), 1),
        (IMAGE,),
    ),
}  # fmt: skip
POINTWISE: dict[str, Case] = {
    "atan2 of bfloat16": (torch.atan2, (NARROW, NARROW.flip(0))),
    "atan2 of integers": (torch.atan2, (WHOLE, WHOLE.flip(0))),
    "hypot of large ones": (lambda x, y: torch.hypot(x * 1e30, y * 1e30), (X, Y)),
}  # fmt: skip
ORDERED: dict[str, Case] = {
    "cummin of equal ones": (lambda x: torch.cummin(x, -1), (WHOLE,)),
    "cummax of a longer axis": (lambda x: torch.cummax(x, -2)[0], (torch.randn(2, 37, 3),)),
    "cummax of bfloat16": (lambda x: torch.cummax(x, 0), (NARROW,)),
    "median of integers": (lambda x: (x.median(), x.median(0)), (WHOLE,)),
    "nanmedian": (lambda x: (x.nanmedian(), x.nanmedian(-1)[0]), (ROWS,)),
    "searchsorted": (
        lambda x, y: torch.searchsorted(x, y, right=True, out_int32=True), (X.sort().values, Y),
    ),
    "searchsorted of what is not sorted": (
        lambda x, y: (torch.searchsorted(x, y, sorter=x.argsort()),
                      torch.searchsorted(y[0].sort().values, 0.5)), (X, Y),
    ),
    "softmax of a number": (lambda s: (s.softmax(0) * 3, s.log_softmax(0) * s), (X[0, 0],)),
}  # fmt: skip
LAYERS: dict[str, Case] = {
    "affine_grid": (lambda t: F.affine_grid(t, [2, 3, 4, 5], False), (torch.randn(2, 2, 3),)),
    **{
        f"embedding_bag {mode}": (
            lambda w, i, o, m=mode: F.embedding_bag(i, w, o, mode=m, padding_idx=2),
            (TABLE, TAKEN, STARTS),
        )
        for mode in ("sum", "mean")
    },
    "weight norm": (lambda v, g: torch._weight_norm(v, g, 2), (CUBE, torch.randn(1, 1, 5))),
    "avg_pool with ceil_mode and a divisor": (
        lambda x: F.avg_pool2d(x, 3, 2, 1, True, True, 5), (IMAGE,),
    ),
    **{
        f"grouped product, ends {ends}": (
            lambda x, w, o: torch._grouped_mm(x, w, offs=o),
            (ROW_GROUPS, torch.randn(4, 8, 24).bfloat16(), torch.tensor(ends, dtype=torch.int32)),
        )
        for ends in ([3, 3, 10, 16], [0, 0, 0, 16], [16] * 4, [4, 8, 12, 16])
    },
    "grouped product of columns": (
        lambda x, w, o: torch._grouped_mm(w, x.t().contiguous(), offs=o),
        (ROW_GROUPS, torch.randn(3, 16, 8).bfloat16(), torch.tensor([1, 9, 16], dtype=torch.int32)),
    ),
    "grouped product without groups": (
        torch._grouped_mm, (torch.randn(2, 8, 8).bfloat16(), torch.randn(2, 8, 16).bfloat16()),
    ),
    "addmv": (torch.addmv, (X[:, 0], X, torch.randn(4))),
    "bags of nothing": (
        lambda w, i, o: F.embedding_bag(i, w, o, mode="sum"), (TABLE, TAKEN[:0], STARTS[:1]),
    ),
    "attention of groups": (
        lambda q, k: F.scaled_dot_product_attention(q, k, k, enable_gqa=True),
        (torch.randn(2, 4, 3, 8), torch.randn(2, 2, 5, 8)),
    ),
    "layer_norm without weights": (lambda x: F.layer_norm(x, (4,)), (X,)),
    "elu with every number": (lambda x: torch.ops.aten.elu(x, 2.0, 1.5, 0.7), (X,)),
}  # fmt: skip
#: Values that no rounding explains, and operators whose gradients torch runs: without gradients.
ODDITIES: dict[str, Case] = {
    "masked_scatter": (lambda x, m, y: x.masked_scatter(m, y), (X, FLAG, torch.randn(8))),
    "replication padding": (lambda x: F.pad(x, (1, 2, -1, 1), "replicate"), (IMAGE,)),
    **{
        f"grid_sample {mode} {padding} {corners}": (
            lambda x, g, m=mode, p=padding, c=corners: F.grid_sample(x, g, m, p, c), (IMAGE, GRID),
        )
        for padding in ("zeros", "border", "reflection")
        for mode, corners in (("bilinear", True), ("bilinear", False), ("nearest", True))
    },
    **{
        f"grid_sample in space {mode}": (
            lambda x, g, m=mode: F.grid_sample(x, g, m, "reflection", False), (VOLUME, SPACE),
        )
        for mode in ("bilinear", "nearest")
    },
    "signs": (lambda x: (torch.signbit(x[:6]), torch.copysign(x[2], x[:6])), (ODD,)),
    "fmax": (lambda x: (torch.fmax(x[:, None], x), torch.fmin(x[:, None], x)), (ODD,)),
    "embedding_bag of weights": (
        lambda w, i, o, s: F.embedding_bag(i, w, o, mode="sum", per_sample_weights=s),
        (TABLE, TAKEN, STARTS, torch.randn(6)),
    ),
    "atan2": (lambda x: torch.atan2(x[:, None], x), (ODD,)),
    "hypot": (lambda x: torch.hypot(x[:, None], x), (ODD,)),
    "cummax": (lambda x: (x.cummax(0), x.cummin(0)), (torch.tensor([0, 1, INF, NAN, -INF, 1]),)),
    "median": (lambda x: (x.median(1), x.nanmedian(1), x.median()), (ROWS[[2, 0]],)),
    "bucketize": (torch.bucketize, (ODD, ROWS[1])),
    "histc between its elements": (
        lambda x: (torch.histc(x, 4), torch.histc(torch.ones_like(x), 3)), (X,),
    ),
    "of a number": (
        lambda s: (s.cummax(0), s.kthvalue(1), s.max(0), s.cumsum(0), s.unfold(0, 1, 1)),
        (torch.tensor(2.5),),
    ),
    "of whole numbers": (
        lambda w, i: (torch.signbit(w), w.trunc(),
                      torch.fmax(w, w.flip(0)), torch.fmin(w, w.flip(1)),
                      w.scatter_reduce(0, i, w.flip(0), "amax", include_self=False),
                      w.scatter_reduce(1, i, w.flip(0), "amin", include_self=False)),
        (WHOLE, torch.tensor([[0, 1, 0, 1], [0, 0, 1, 1]])),
    ),
    "norms": (
        lambda x: (torch.linalg.vector_norm(x, INF), torch.linalg.vector_norm(x, -INF, 1),
                   torch.linalg.vector_norm(x, 3, 0), torch.round(x * 50, decimals=-1)), (X,),
    ),
    "writing nothing": (
        lambda x, i, y: (x.gather(0, i), x.scatter(0, i, 1.0), x.slice_scatter(y, 0, 2, 2),
                         x.scatter_reduce(0, i, y, "sum"), x.diagonal_scatter(y[:, 0], 4),
                         x.as_strided_scatter(y, (0, 4), (4, 1)), y.median(),
                         y.masked_scatter(y > 0, y)),
        (X, torch.zeros(0, 4, dtype=torch.int64), NONE),
    ),
    "histc": (lambda x: torch.histc(x, 4, -1, 1), (torch.cat([X.flatten(), ODD]),)),
    "nothing": (
        lambda x, r: (torch.cummax(x, 0), torch.bucketize(x, r), torch.histc(x, 3, 0, 1)),
        (NONE, ROWS[0]),
    ),
}  # fmt: skip
FAMILIES = {"views": VIEWS, "pointwise": POINTWISE, "ordered": ORDERED, "layers": LAYERS}

Outcomes = dict[str, list[tuple[Any, Any]]]


def compared(cases: dict[str, Case], executor: str, *, gradients: bool) -> Outcomes:
    """All cases as one graph: for each its results and gradients, here and in eager torch."""
    tensors = [
        t.detach().clone().requires_grad_(gradients and t.is_floating_point())
        for _, operands in cases.values() for t in operands
    ]  # fmt: skip
    names: list[str] = []

    def every(*given: Any) -> list[Any]:
        names.clear()
        results, rest = [], iter(given)
        for name, (function, operands) in cases.items():
            made = torch.utils._pytree.tree_leaves(function(*itertools.islice(rest, len(operands))))
            results += made
            names.extend([name] * len(made))
        return results

    wanted = results_and_gradients(every, tensors)
    labels = names + [
        name for name, (_, operands) in cases.items()
        for t in operands if gradients and t.is_floating_point()
    ]  # fmt: skip
    compiled = stitch_backend(
        graph_module_of(every, tensors),
        tensors,
        # Else what has no lowering would be torch's, and be right.
        options={"executor": executor, "fallback": "error"},
    )
    got = results_and_gradients(compiled, tensors)
    assert wanted is not None and got is not None
    found: Outcomes = {name: [] for name in cases}
    for name, mine, eager in zip(labels, got, wanted, strict=True):
        found[name].append((mine, eager))
    return found


@pytest.fixture(scope="module")
def outcomes() -> Callable[[str, str], Outcomes]:
    kept: dict[tuple[str, str], Outcomes] = {}

    def of(family: str, executor: str) -> Outcomes:
        if (family, executor) not in kept:
            odd = family == "oddities"
            cases = ODDITIES if odd else FAMILIES[family]
            kept[family, executor] = compared(cases, executor, gradients=not odd)
        return kept[family, executor]

    return of


def assert_as_eager(pairs: list[tuple[Any, Any]]) -> None:
    assert pairs
    for mine, eager in pairs:
        if mine is None or eager is None:
            left = eager if mine is None else mine
            assert left is None or not left.any()
            continue
        loose = 0.02 if eager.dtype is torch.bfloat16 else 1e-4
        torch.testing.assert_close(mine, eager, rtol=loose, atol=loose, equal_nan=True)


@pytest.mark.parametrize(
    ("family", "name", "executor"),
    [
        pytest.param(
            family, name, executor,
            marks=[LONG] if (family == "layers" and executor in DIVIDING) or turn % 2 else [],
        )
        # The quick suite has each case by every other executor.
        for at, executor in enumerate(EXECUTORS) for family, cases in FAMILIES.items()
        for turn, name in enumerate(cases, at)
    ],
)  # fmt: skip
def test_results_and_gradients_are_those_of_eager_torch(
    family: str, name: str, executor: str, outcomes: Callable[[str, str], Outcomes]
) -> None:
    assert_as_eager(outcomes(family, executor)[name])


@pytest.mark.parametrize(("executor", "name"), in_turn(EXECUTORS, ODDITIES))
def test_what_is_not_finite_is_as_in_eager_torch(
    name: str, executor: str, outcomes: Callable[[str, str], Outcomes]
) -> None:
    assert_as_eager(outcomes("oddities", executor)[name])


def test_grouped_products_of_the_package_transformers_are_lowered_by_name() -> None:
    import transformers.integrations.moe  # noqa: F401  # it defines the operator

    def product(x: Any, matrices: Any, ends: Any) -> list[Any]:
        return [torch.ops.transformers.grouped_mm_fallback(x, matrices, ends)]

    tensors = [
        torch.randn(9, 4, requires_grad=True),
        torch.randn(3, 4, 5, requires_grad=True),
        torch.tensor([2, 2, 9]),
    ]
    compiled = stitch_backend(graph_module_of(product, tensors), tensors)
    mine, eager = (results_and_gradients(run, tensors) for run in (compiled, product))
    assert mine is not None and eager is not None
    assert_as_eager(list(zip(mine, eager, strict=True)))


def test_bags_of_float64_are_weighted_in_float64() -> None:
    def bags(w: Any, i: Any, o: Any, s: Any) -> list[Any]:
        return [F.embedding_bag(i, w, o, mode="sum", per_sample_weights=s)]

    table, weights = ((x.double() / 3).requires_grad_() for x in (TABLE, torch.randn(6)))
    tensors = [table, TAKEN, STARTS, weights]
    compiled = stitch_backend(graph_module_of(bags, tensors), tensors)
    mine, eager = (results_and_gradients(run, tensors) for run in (compiled, bags))
    torch.testing.assert_close(mine, eager, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("mode", ["linear", "bilinear", "trilinear", "nearest"])
def test_an_axis_that_a_scale_leaves_as_long_is_copied(mode: str) -> None:
    """By 1.1, five elements stay five, each its own; the last axis grows beside it."""
    axes = {"linear": 1, "bilinear": 2, "trilinear": 3, "nearest": 2}[mode]
    for scale in ((1.1,) * axes, (1.1,) * (axes - 1) + (2.0,)):
        resized = torch.nn.Upsample(scale_factor=scale, mode=mode, recompute_scale_factor=False)
        x = torch.randn((1, 2, *[5] * axes))
        made = stitch.compile(resized, (x,))(x)
        torch.testing.assert_close(torch.from_numpy(made.numpy()), resized(x))


@pytest.mark.parametrize("axes", [1, 2, 3])
@pytest.mark.parametrize("scale", [1.3, 2.3])
@pytest.mark.parametrize("length", [3, 80])
def test_nearest_indices_follow_the_scale_where_torch_follows_it(
    axes: int, scale: float, length: int
) -> None:
    """Torch copies an axis that stays as long, and repeats one that doubles, in small images."""
    scale = scale if length == 3 else round(scale) + 0.9 / length
    shape = (1, 2, *[2] * (axes - 1), length)
    resized = torch.nn.Upsample(scale_factor=(1.0,) * (axes - 1) + (scale,))
    x = torch.arange(2.0 ** (axes - 1) * 2 * length).reshape(shape)
    made = stitch.compile(resized, (x,))(x)
    torch.testing.assert_close(torch.from_numpy(made.numpy()), resized(x))


BYTES = torch.tensor([-128, -7, 0, 1, 7, 127], dtype=torch.int8)
COUNTS = torch.tensor([1, 2, 4, 8, 31, -1], dtype=torch.int8)
INTEGERS = (torch.int8, torch.uint8, torch.int16, torch.int32)


def _whole(kind: Any) -> Any:
    """Shifts, powers and products of whole numbers of a type."""
    x, counts = BYTES.to(kind), COUNTS.to(kind)
    generator = torch.Generator().manual_seed(SEED)
    left, right = (
        torch.randint(-128, 127, shape, generator=generator).to(kind)
        for shape in ((2, 4, 40), (2, 40, 3))
    )
    return (
        lambda x, counts, a, b: (
            *(moved for n in (0, 1, 4, 7, 8, 31, 33, -1) for moved in (x << n, x >> n)),
            x << counts, x >> counts, 2 << counts, 100 >> counts, (x >> 4) & 15,
            -x, x**2, x**3, x.square(), 2 ** x.clamp(0, 5),
            a @ b, a[0] @ b[0], torch.einsum("bij,bjk->ik", a, b),
            torch.addmm(a[0][:, :3], a[0], b[0], beta=2, alpha=3),
            torch.nn.functional.linear(a[0], b[0].t()),
        ), (x, counts, left, right),
    )  # fmt: skip


def test_narrow_whole_numbers_are_shifted_multiplied_and_raised_modulo_their_range() -> None:
    for name, (got, want) in outcomes_of(
        {str(kind): _whole(kind) for kind in INTEGERS}, False
    ).items():
        for number, (result, expected) in enumerate(zip(got, want, strict=True)):
            assert result.dtype == expected.numpy().dtype, (name, number)
            np.testing.assert_array_equal(result, expected, f"{name}, result {number}")


@pytest.mark.filterwarnings("ignore:.*degrees of freedom")
def test_a_variance_corrected_by_all_elements_or_more_is_infinite() -> None:
    cases: dict[str, Case] = {
        f"{correction}": (
            lambda x, c=correction: (x.var(0, correction=c), x.std(0, correction=c)),
            (torch.tensor([[1.0, 2.0], [3.0, 2.0], [7.0, 2.0]]),),
        )
        for correction in (2, 3, 4)
    }
    for name, (got, want) in outcomes_of(cases, False).items():
        for result, expected in zip(got, want, strict=True):
            np.testing.assert_allclose(result, expected, 1e-6, err_msg=name)
