"""torch's own database of operators (OpInfo) on the backend: each sample right, or refused clearly.

Samples go through `stitch_backend` as graphs of dynamo do, without dynamo's seconds. `tools/zoo`
and the tests read the same outcomes.
"""

from __future__ import annotations

import functools
import importlib.util
import itertools
import sys
import types
import unittest
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import getitem
from typing import Any
from unittest.mock import patch

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from stitch.errors import InternalError, StitchError
from stitch.frontend.torch.compile.backend import stitch_backend

#: What results and gradients of float32 may differ by from eager torch's.
TOLERANCE = {"rtol": 2e-4, "atol": 2e-4}
RIGHT, REFUSED, BREAKS, WRONG, BROKEN = "right", "refused", "breaks", "wrong", "broken"
#: What torch's tracing raises where shapes or numbers depend on data: dynamo breaks graphs there.
_BREAKING = (
    torch._subclasses.fake_tensor.DataDependentOutputException,
    torch._subclasses.fake_tensor.DynamicOutputShapeException,
)
#: Operators that give memory as it is.
_EMPTY = (
    "empty",
    "empty_like",
    "empty_strided",
    "empty_permuted",
    "new_empty",
    "new_empty_strided",
)


_OPERATORS = """
add sub mul div.no_rounding_mode div.floor_rounding div.trunc_rounding remainder fmod pow
true_divide floor_divide rsub eq ne lt le gt ge logical_and logical_or logical_xor logical_not
where masked_fill clamp clamp_min clamp_max maximum minimum abs neg sign exp log sqrt rsqrt
reciprocal sin cos tan asin acos atan sinh cosh tanh asinh acosh atanh erf erfc expm1 log1p log2
log10 exp2 floor ceil round trunc square sigmoid isnan isinf isfinite nan_to_num sum mean prod
amax amin var std var_mean norm linalg.vector_norm any all max.reduction_with_dim
min.reduction_with_dim argmax argmin cumsum cumprod logsumexp softmax log_softmax topk sort stack
cat split chunk unbind flip roll repeat tril triu gather index_select index_put scatter
scatter_add diagonal unfold permute transpose expand reshape squeeze unsqueeze select slice
index_add index_copy matmul mm bmm addmm baddbmm mv dot einsum outer linalg.multi_dot addr addmv
as_strided as_strided_scatter copysign fmax fmin round.decimals_3 diagonal_scatter
slice_scatter select_scatter atan2 hypot cummax cummin median nanmedian kthvalue bucketize
searchsorted histc scatter_reduce.mean scatter_reduce.amax scatter_reduce.prod addcmul addcdiv
lerp xlogy logit signbit __getitem__ eye full_like ones_like zeros_like arange angle atleast_2d
flatten unflatten movedim broadcast_to tile
"""
_FUNCTIONS = """
pad.constant pad.reflect linear relu gelu silu elu selu celu softplus mish hardswish hardsigmoid
leaky_relu relu6 logsigmoid softsign hardtanh tanhshrink glu prelu softshrink hardshrink threshold
conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d max_pool1d max_pool2d
max_pool3d avg_pool1d avg_pool2d avg_pool3d adaptive_avg_pool1d adaptive_avg_pool2d
adaptive_avg_pool3d batch_norm layer_norm group_norm rms_norm local_response_norm
normalize cross_entropy nll_loss mse_loss smooth_l1_loss huber_loss l1_loss kl_div
binary_cross_entropy binary_cross_entropy_with_logits embedding scaled_dot_product_attention
interpolate.nearest interpolate.bilinear interpolate.linear interpolate.trilinear pixel_shuffle
pixel_unshuffle
"""
#: Operators of the database that programs run, forward and backward.
COMPILED = (*_OPERATORS.split(), *(f"nn.functional.{name}" for name in _FUNCTIONS.split()))


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one sample.

    `state`: right; refused by one error of ours; breaks, where torch itself cannot trace it; wrong,
    which says where; broken, by an error that is none of ours. `core`: the overloads that torch
    tags so, of those that eager torch called.
    """

    operator: str
    sample: int
    state: str
    text: str = ""
    core: frozenset[str] = frozenset()


@functools.cache
def operators() -> Mapping[str, Any]:
    """torch's database by full name, as far as it has samples of float32 on the CPU."""
    return {op.full_name: op for op in _database() if torch.float32 in op.supported_dtypes("cpu")}


@functools.cache
def _database() -> Sequence[Any]:
    # Its module asks for this package, of which it takes the class of its own tests alone.
    if importlib.util.find_spec("expecttest") is None:
        stand_in = types.ModuleType("expecttest")
        stand_in.TestCase = unittest.TestCase  # type: ignore[attr-defined]  # as the package has it
        sys.modules["expecttest"] = stand_in
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = importlib.import_module("torch.testing._internal.common_methods_invocations")
    return tuple(module.op_db)


def samples_of(operator: Any, count: int) -> Iterator[Any]:
    """The first samples of an operator, the same at every call."""
    torch.manual_seed(0)
    gradients = bool(operator.supports_autograd)
    # torch looks in the stack for the test that asks, whose seed it takes: 0.1 s for each operator.
    with patch("inspect.stack", list):
        samples = operator.sample_inputs("cpu", torch.float32, requires_grad=gradients)
    return itertools.islice(iter(samples), count)


def outcome_of(
    operator: Any, number: int, sample: Any, options: Mapping[str, Any] | None = None
) -> Outcome | None:
    """What becomes of a sample; None where eager torch refuses it, or gives no dense tensor."""
    function, tensors = _as_function(operator, sample)
    return _outcome(operator.full_name, number, function, tensors, options)


def outcome_in_one_graph(
    names: Sequence[str], options: Mapping[str, Any] | None = None
) -> Outcome | None:
    """What becomes of the first samples of several operators in one graph, which torch traces and
    Stitch compiles in a third of the time that they take one after the other."""
    calls = [
        _as_function(operators()[name], next(samples_of(operators()[name], 1))) for name in names
    ]

    def function(*tensors: Any) -> list[Any]:
        given = iter(tensors)
        return [
            result for call, own in calls for result in call(*itertools.islice(given, len(own)))
        ]

    return _outcome(" ".join(names), 0, function, [t for _, own in calls for t in own], options)


def _outcome(
    name: str,
    number: int,
    function: Callable[..., Any],
    tensors: Sequence[Any],
    options: Mapping[str, Any] | None,
) -> Outcome | None:
    """What becomes of a function of tensors, as `outcome_of` says it."""
    try:
        eager = results_and_gradients(function, tensors)
    except Exception:
        # Operators for other devices, and sparse ones.
        return None
    called = _called(function, tensors)
    if eager is None or not called.is_dense:
        return None
    core = frozenset(str(op) for op in called.overloads if torch.Tag.core in op.tags)
    try:
        compiled = stitch_backend(graph_module_of(function, tensors), tensors, options=options)
        mine = results_and_gradients(compiled, tensors)
    except Exception as error:
        return Outcome(name, number, *_failure(error), core)
    assert mine is not None
    # Of what is random, or memory as it is, only the types can be compared.
    draws = any(torch.Tag.nondeterministic_seeded in op.tags for op in called.overloads)
    is_free = name in _EMPTY or draws
    difference = _difference(mine, eager, types_only=is_free)
    if difference and not is_free and _is_as_near(function, tensors, mine, eager):
        difference = ""
    return Outcome(name, number, WRONG if difference else RIGHT, difference, core)


def _failure(error: BaseException) -> tuple[str, str]:
    """What a failure is, and its text."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, (StitchError, *_BREAKING)):
        cause = cause.__cause__ or cause.__context__
    if isinstance(cause, InternalError) or cause is None:
        return BROKEN, f"{type(error).__name__}: {error}"
    if isinstance(cause, StitchError):
        return REFUSED, cause.sentence()
    return BREAKS, str(cause).partition("\n")[0]


def cases_of(names: Sequence[str]) -> dict[str, tuple[Callable[..., Any], tuple[Any, ...]]]:
    """The first sample of each operator, as a function and its operands without gradients."""
    cases = {}
    for name in names:
        function, tensors = _as_function(operators()[name], next(samples_of(operators()[name], 1)))
        cases[name] = function, tuple(tensor.detach() for tensor in tensors)
    return cases


def outcomes_of(
    operator: Any, count: int, options: Mapping[str, Any] | None = None, first: int = 0
) -> list[Outcome]:
    """What becomes of an operator's first samples but for `first`, as far as eager torch takes
    them."""
    found = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for number, sample in enumerate(samples_of(operator, count)):
            if number < first:
                continue
            outcome = outcome_of(operator, number, sample, options)
            if outcome is not None:
                found.append(outcome)
    return found


def core_share(outcomes: Sequence[Outcome]) -> tuple[int, int]:
    """How many overloads tagged `core` own programs ran in a right sample, and how many came."""
    right = {name for o in outcomes if o.state == RIGHT for name in o.core}
    return len(right), len({name for o in outcomes for name in o.core})


def _as_function(operator: Any, sample: Any) -> tuple[Callable[..., Any], list[Any]]:
    """A sample's call as a function of its tensors alone, which gives a flat list of tensors."""
    leaves, spec = pytree.tree_flatten((sample.input, sample.args, sample.kwargs))
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]

    def function(*tensors: Any) -> list[Any]:
        given = list(leaves)
        for place, tensor in zip(places, tensors, strict=True):
            given[place] = tensor
        first, others, named = pytree.tree_unflatten(given, spec)
        result = operator(first, *others, **named)
        if sample.output_process_fn_grad is not None:
            result = sample.output_process_fn_grad(result)
        return [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]

    return function, [leaves[i] for i in places]


def graph_module_of(function: Callable[..., Any], tensors: Sequence[Any]) -> Any:
    """A graph as dynamo would give it, of one call."""
    with torch.no_grad():
        count = len(function(*map(_fresh, tensors)))
    graph = torch.fx.Graph()
    inputs = [graph.placeholder(f"x{i}") for i in range(len(tensors))]
    call = graph.call_function(function, tuple(inputs))
    graph.output(tuple(graph.call_function(getitem, (call, i)) for i in range(count)))
    return torch.fx.GraphModule(torch.nn.Module(), graph)


def _fresh(tensor: Any) -> Any:
    copy = tensor.detach().clone(memory_format=torch.preserve_format)
    return copy.requires_grad_(tensor.requires_grad)


class _Called(TorchDispatchMode):  # type: ignore[misc]  # torch has no types here
    """Remembers which overloads were called, and whether all that they gave is dense."""

    def __init__(self) -> None:
        super().__init__()
        self.overloads: set[Any] = set()
        self.is_dense = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.overloads.add(func)
        result = func(*args, **(kwargs or {}))
        tensors = [t for t in pytree.tree_leaves(result) if isinstance(t, torch.Tensor)]
        self.is_dense &= all(t.layout is torch.strided for t in tensors)
        return result


def _called(function: Callable[..., Any], tensors: Sequence[Any]) -> _Called:
    called = _Called()
    with called, torch.no_grad():
        function(*map(_fresh, tensors))
    return called


def results_and_gradients(function: Callable[..., Any], tensors: Sequence[Any]) -> list[Any] | None:
    """Results, then gradients of what has them; None if there are no results."""
    given = list(map(_fresh, tensors))
    results = list(function(*given))
    if not results:
        return None
    ends = [r for r in results if r.requires_grad and r.is_floating_point()]
    wanted = [t for t in given if t.requires_grad]
    if not ends or not wanted:
        return [r.detach() for r in results]
    weights = [torch.linspace(0.5, 1.5, e.numel()).view(e.shape).to(e.dtype) for e in ends]
    gradients = torch.autograd.grad(ends, wanted, weights, allow_unused=True)
    return [r.detach() for r in results] + list(gradients)


def _is_as_near(
    function: Callable[..., Any], tensors: Sequence[Any], mine: Sequence[Any], eager: Sequence[Any]
) -> bool:
    """Whether results are as near to those of float64 as eager torch's: what is ill-conditioned
    differs by more than the tolerance from itself."""
    wide = [t.detach().double() if t.is_floating_point() else t.detach() for t in tensors]
    for tensor, given in zip(wide, tensors, strict=True):
        tensor.requires_grad_(given.requires_grad)
    try:
        exact = results_and_gradients(function, wide)
    except Exception:
        return False
    if exact is None or len(exact) != len(eager):
        return False
    for got, want, true in zip(mine, eager, exact, strict=True):
        if got is None or want is None or true is None or got.shape != want.shape:
            continue
        if true.dtype is torch.bool:
            got, want, true = got.int(), want.int(), true.int()
        apart, allowed = (got - true).abs(), (want - true).abs()
        bound = 4 * allowed.max() if allowed.numel() else 0.0
        if bool((apart > bound + TOLERANCE["atol"] + TOLERANCE["rtol"] * true.abs()).any()):
            return False
    return True


def _difference(mine: Sequence[Any], eager: Sequence[Any], *, types_only: bool = False) -> str:
    """Where two runs differ, in words; empty where they do not."""
    if len(mine) != len(eager):
        return f"{len(mine)} results, not {len(eager)}"
    for place, (got, want) in enumerate(zip(mine, eager, strict=True)):
        if want is None or got is None:
            whole = want if got is None else got
            if whole is not None and bool(whole.any()) and not types_only:
                return f"result {place} is missing"
            continue
        if got.dtype != want.dtype or got.shape != want.shape:
            return f"result {place} is {got.dtype}{list(got.shape)}, not {want.dtype}"
        if not types_only and not torch.allclose(got, want, equal_nan=True, **TOLERANCE):
            far = (got.double() - want.double()).abs().max().item()
            return f"result {place} differs by {far:.3g}"
    return ""
