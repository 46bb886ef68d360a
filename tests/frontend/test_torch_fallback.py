"""What Stitch cannot compile torch runs, and results and gradients are those of eager torch."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo import config as dynamo_config
from torch.utils.checkpoint import checkpoint

from stitch.torch import explain
from tests.support.grids import every, in_turn
from tests.support.torch.compiled import assert_same, assert_trains_alike, compiled, gradients

#: Each part is a program, however small.
ALL_PARTS = {"fallback": "torch", "min_operations": 1}
bessel = torch.special.i0
#: What the operator `noted` was called with.
noted: list[int] = []


def _compiled(function: Any, dynamic: bool | None = None, **options: Any) -> Any:
    return compiled(function, dynamic, **{**ALL_PARTS, **options})


@pytest.fixture(scope="module")
def operators() -> Iterator[Any]:
    """Custom operators: one with a gradient, one that writes to its operand, one with effects."""
    library = torch.library.Library("stitch_tests", "FRAGMENT")

    @torch.library.custom_op("stitch_tests::scaled", mutates_args=())  # type: ignore[untyped-decorator]  # torch has no types here
    def scaled(x: torch.Tensor, factor: float) -> torch.Tensor:
        return x * factor

    scaled.register_fake(lambda x, factor: torch.empty_like(x))

    def setup(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.factor = inputs[1]

    scaled.register_autograd(
        lambda ctx, gradient: (gradient * ctx.factor, None), setup_context=setup
    )

    @torch.library.custom_op("stitch_tests::add_to", mutates_args=("x",))  # type: ignore[untyped-decorator]  # torch has no types here
    def add_to(x: torch.Tensor, y: torch.Tensor) -> None:
        x.add_(y)

    @torch.library.custom_op("stitch_tests::unknown", mutates_args=())  # type: ignore[untyped-decorator]  # torch has no types here
    def unknown(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @torch.library.custom_op("stitch_tests::noted", mutates_args=())  # type: ignore[untyped-decorator]  # torch has no types here
    def note(x: torch.Tensor, number: int) -> torch.Tensor:
        noted.append(number)
        return x.clone()

    note.register_fake(lambda x, number: torch.empty_like(x))

    yield torch.ops.stitch_tests
    library._destroy()


def _no_lowering(x: Any) -> Any:
    return (bessel(x * 2 + 1).sin() @ x).relu() + x


def _tuples(x: Any) -> Any:
    square = x @ x.t() + torch.eye(4)
    return torch.linalg.slogdet(square).logabsdet + torch.linalg.svdvals(square).sin()


def _complex_inside(x: Any) -> Any:
    waves = torch.fft.fft(x * 2) * (1 + 0.5j)
    return torch.fft.ifft(waves).real.relu() + torch.view_as_real(torch.complex(x, x)).sum(-1)


def _views(x: Any) -> Any:
    sliced, turned = (x + 1)[:, ::2], (x * 2).t()
    wide = x.sum(0, keepdim=True).expand(4, 4)
    picked = (x * 3).as_strided((2, 3), (1, 2), 1)
    return bessel(sliced), bessel(turned), bessel(wide) * 2, bessel(picked).sin()


def _parts(x: Any) -> Any:
    first, second = (x * 2).sin().split(2, 1)
    return bessel(second) + first, bessel(first.t()).t() * second


def _attention(x: Any) -> Any:
    heads = x.view(2, 8, 2, 4).transpose(1, 2)
    made = nn.functional.scaled_dot_product_attention(heads * 2, heads, bessel(heads))
    return bessel(made.transpose(1, 2).reshape(2, 8, 8)) * 2


def _branches(x: Any) -> Any:
    chosen = torch.cond(x.sum() > 0, lambda y: y.sin() * 2, lambda y: y.cos(), (x * 2,))
    return chosen.relu() + 1


def _in_double(x: Any) -> Any:
    return bessel(x * 2).double().sin() * x


CASES: dict[str, tuple[Callable[..., Any], tuple[int, ...]]] = {
    "no lowering": (_no_lowering, (4, 4)),
    "several results": (_tuples, (4, 4)),
    "complex values inside": (_complex_inside, (3, 8)),
    "views of every kind": (_views, (4, 4)),
    "parts of one tensor": (_parts, (4, 4)),
    "strides that kernels ask for": (_attention, (2, 8, 8)),
    "a branch": (_branches, (4, 4)),
    "another type": (_in_double, (4, 4)),
    "no axes": (lambda x: bessel(x * 2).sin() * bessel(x) + 1, ()),
}


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # torch's own, of its branches
@pytest.mark.parametrize(("least", "name"), in_turn([1, 8], CASES))
def test_results_and_gradients_are_those_of_eager_torch(name: str, least: int) -> None:
    function, shape = CASES[name]
    torch.manual_seed(1)
    x = torch.rand(shape) * 0.5
    run = _compiled(function, min_operations=least)
    for _ in range(2):
        assert_same(gradients(run, [x]), gradients(function, [x]))
    run = _compiled(function, min_operations=least)
    for _ in range(2):
        assert_same(run(x), function(x))


def test_tensors_without_elements_pass_between_both() -> None:
    def function(x: Any) -> Any:
        return bessel(x * 2).sin() + bessel(x.t() + 1).t(), bessel(x).sum()

    x = torch.zeros(0, 3)
    assert_same(_compiled(function)(x), function(x), strides=False)


def test_what_a_lowering_refuses_torch_runs() -> None:
    # Bytes of float8 are cast by no program.
    def narrowed(x: Any) -> Any:
        narrow = (x * 2).to(torch.float8_e4m3fn)
        return narrow.to(torch.float32) + 1, narrow

    x = torch.rand(4, 4)
    found, wanted = _compiled(narrowed)(x), narrowed(x)
    assert_same(found[0], wanted[0])
    assert found[1].dtype is torch.float8_e4m3fn
    assert_same(found[1].float(), wanted[1].float())


def test_arguments_of_a_type_that_programs_lack_go_to_torch() -> None:
    def turned(z: Any, x: Any) -> Any:
        return (z * x).abs().relu() * 2, z.conj() * 2, x.sin() + x

    z, x = torch.randn(4, dtype=torch.complex64), torch.randn(4)
    run = _compiled(turned)
    for _ in range(2):
        for found, wanted in zip(run(z, x), turned(z, x), strict=True):
            torch.testing.assert_close(found, wanted)


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("layout", ["sparse_coo", "sparse_csr"])
def test_sparse_arguments_go_to_torch(layout: str) -> None:
    def applied(matrix: Any, x: Any) -> Any:
        return (matrix @ (x.relu() * 2)).sin() + 1

    matrix = torch.eye(4).to_sparse(layout=getattr(torch, layout))
    x = torch.randn(4, 3)
    assert_same(_compiled(applied)(matrix, x), applied(matrix, x))


def test_torch_runs_operators_on_another_device() -> None:
    there, here = _compiled(lambda x: ((x * 2).to("meta").sin(), x + 1))(torch.ones(2, 3))
    assert there.device.type == "meta"
    assert_same(here, torch.full((2, 3), 2.0))


def test_custom_operators_run_and_have_their_gradients(operators: Any) -> None:
    def function(x: Any) -> Any:
        return operators.scaled(x.relu() * 2 + 1, 3.0).sin() * x

    x = torch.randn(4, 5)
    assert_same(gradients(_compiled(function), [x]), gradients(function, [x]))


def test_a_custom_operator_writes_to_what_it_is_given(operators: Any) -> None:
    def changing(x: Any, y: Any) -> Any:
        made = (x * 2).sin()
        before = made.cos()
        operators.add_to(made, y)
        operators.add_to(x, made.cos())
        return before, made.cos() + x.exp(), made.view(-1)

    run = _compiled(changing)
    for _ in range(3):
        mine = [torch.randn(3, 4), torch.randn(3, 4)]
        theirs = [tensor.clone() for tensor in mine]
        assert_same(run(*mine), changing(*theirs))
        assert_same(mine, theirs)


def test_custom_operators_run_in_the_order_of_the_code(operators: Any) -> None:
    def function(x: Any) -> Any:
        late = operators.noted(bessel(x).sin() * 2, 1)
        early = operators.noted(x, 2)
        return late + operators.noted(early.exp() + 1, 3)

    noted.clear()
    x = torch.rand(3)
    assert_same(_compiled(function)(x), function(x))
    assert noted == [1, 2, 3, 1, 2, 3]


def test_an_error_of_torchs_operator_is_torchs_and_the_next_call_works() -> None:
    def function(x: Any) -> Any:
        return torch.linalg.eigh(x * 2)[0].sin() + 1

    run = _compiled(function)
    assert_same(run(torch.eye(3)), function(torch.eye(3)))
    with pytest.raises(torch.linalg.LinAlgError, match="failed to converge"):
        run(torch.full((3, 3), torch.nan))
    assert_same(run(torch.eye(3)), function(torch.eye(3)))


def test_a_custom_operator_without_a_fake_is_named_with_what_to_do(operators: Any) -> None:
    with pytest.raises(Exception, match=r"(?s)stitch_tests.unknown.*register_fake"):
        _compiled(lambda x: operators.unknown(x + 1) * 2)(torch.ones(3))


def test_random_operators_of_torch_draw_what_eager_torch_draws() -> None:
    def drawing(x: Any) -> Any:
        first = torch.poisson(x.abs() * 3)
        second = bessel(torch.poisson(bessel(x))) * 2
        return first, second, torch.poisson(x.abs()) + first.relu()

    x = torch.linspace(0.1, 2, 50)
    run = _compiled(drawing)
    for seed in range(3):
        torch.manual_seed(seed)
        found = run(x)
        torch.manual_seed(seed)
        assert_same(found, drawing(x))


def test_a_checkpoint_around_random_operators_of_both_keeps_their_masks() -> None:
    def inner(x: Any) -> Any:
        return bessel(nn.functional.dropout(x * 2, 0.5)).sin()

    x = torch.ones(50, requires_grad=True)
    made = _compiled(lambda x: checkpoint(inner, x, use_reentrant=False) * 2)(x)
    (gradient,) = torch.autograd.grad(made.sum(), x)
    dropped = (made - 2 * bessel(torch.zeros(())).sin()).abs() < 1e-5
    assert 5 < dropped.sum() < 45
    assert_same(gradient == 0, dropped)


def test_outputs_that_share_memory_in_eager_torch_share_it() -> None:
    def shared(x: Any) -> Any:
        made, other = bessel(x * 2), (x + 1) * 2
        return made, made.view(-1), made[1:], other.t(), other[0], other, made.sin()

    run, x = _compiled(shared), torch.rand(3, 4)
    for _ in range(2):
        found, wanted = run(x), shared(x)
        assert_same(found, wanted)
        for outputs in (found, wanted):
            outputs[0].add_(1)
            outputs[4].mul_(3)
        assert_same(found, wanted)


def test_sizes_that_depend_on_data_stay_inside_what_torch_runs() -> None:
    def picking(x: Any) -> Any:
        made = (x * 2).sin()
        rows = made.nonzero()
        chosen = torch.masked_select(made, made > 0)
        return made[rows[:, 0]].sum() + 1, rows.cos() * 2, chosen + 1, made.relu() * 3

    def counting(x: Any) -> Any:
        return x.relu() * (x.abs().sum() * 2).int().item() + bessel(x)

    settings: Any = {"capture_dynamic_output_shape_ops": True, "capture_scalar_outputs": True}
    with dynamo_config.patch(settings):
        for function in (picking, counting):
            run = _compiled(function)
            for zeros in range(4):
                x = torch.randn(5)
                x[:zeros] = 0
                assert_same(run(x), function(x))


def test_torch_runs_nested_tensors() -> None:
    rows = torch.nested.nested_tensor([torch.rand(2, 3), torch.rand(4, 3)], layout=torch.jagged)
    run = _compiled(lambda given: (given * 2).sin().values())
    assert_same(run(rows), (rows.values() * 2).sin())


def test_results_that_are_equal_are_not_one() -> None:
    def function(x: Any) -> Any:
        made, other = bessel(x), x.sin()
        last = bessel(other)
        return made.clone(), made, other.clone(), other, last.contiguous(), last

    run, x = _compiled(function), torch.rand(3, 4)
    for _ in range(2):
        found, wanted = run(x), function(x)
        for outputs in (found, wanted):
            for number in (0, 2, 5):
                outputs[number].add_(number + 1)
        assert_same(found, wanted)


def test_a_graph_with_symbolic_sizes_is_cut_for_each_shape() -> None:
    def function(x: Any) -> Any:
        return bessel(x.view(-1, 2) * x.shape[0]).sum(1).sin() * x.shape[0]

    run = _compiled(function, dynamic=True)
    for rows in (2, 3, 6, 3):
        x = torch.rand(rows, 4) * 0.1
        assert_same(run(x), function(x))
        assert_same(gradients(run, [x]), gradients(function, [x]))


@pytest.mark.parametrize("target", every(2, ["host", "wormhole_n150"]))
def test_a_network_with_fallbacks_trains_as_in_eager_torch(target: str) -> None:
    class Network(nn.Module):  # type: ignore[misc]  # torch has no types here
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(8, 16, bias=False), nn.Linear(16, 4)
            self.norm = nn.BatchNorm1d(16)

        def forward(self, x: Any) -> Any:
            hidden = self.norm(self.first(x)).tanh()
            return self.second(bessel(hidden) * hidden)

    torch.manual_seed(2)
    assert_trains_alike(
        Network(), [torch.randn(4, 8) for _ in range(6)], lambda made: made.square().mean(),
        lambda given: torch.optim.Adam(given, 1e-2), target=target, **ALL_PARTS,
    )  # fmt: skip


def test_a_module_that_replaces_its_own_parameters_is_followed() -> None:
    class Growing(nn.Module):  # type: ignore[misc]  # torch has no types here
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))
            self.register_buffer("calls", torch.zeros(3))

        def forward(self, x: Any) -> Any:
            self.weight.data.mul_(2)
            self.calls += 1
            return bessel(x) * self.weight * self.calls

    module = Growing()
    eager = copy.deepcopy(module)
    run = _compiled(module)
    for _ in range(3):
        x = torch.rand(3)
        assert_same(run(x).detach(), eager(x).detach())
    assert_same(module.weight.detach(), eager.weight.detach())


def test_autocast_reaches_what_torch_runs() -> None:
    layer, x = nn.Linear(8, 8), torch.randn(3, 8)

    def function(x: Any) -> Any:
        return bessel(layer(x).float()) * layer(x)

    run = _compiled(function)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(run(x), function(x), rtol=0.02, atol=0.02)


#: What executor `onnxruntime` refuses, between what it computes.
REFUSED_THERE: dict[str, Callable[[Any], Any]] = {
    "aten._fft_r2c.default": lambda x: torch.fft.rfft(x * 2).abs() + 1,
    "aten.prod.dim_int": lambda x: (x * 9).to(torch.int64).prod(0).float() * 2 + 1,
}


@pytest.mark.parametrize("operator", REFUSED_THERE)
def test_torch_runs_what_the_executor_refuses(operator: str) -> None:
    function, x = REFUSED_THERE[operator], torch.linspace(-2, 3, 12).view(3, 4)
    options = {**ALL_PARTS, "executor": "onnxruntime"}
    explained = explain(function, options=options)(x)
    assert operator in explained.by_torch
    assert "aten.add.Tensor" in explained.by_stitch
    torch.testing.assert_close(_compiled(function, executor="onnxruntime")(x), function(x))


@pytest.mark.parametrize("operator", REFUSED_THERE)
def test_what_the_executor_refuses_is_an_error_where_nothing_may_be_left_to_torch(
    operator: str,
) -> None:
    run = compiled(REFUSED_THERE[operator], executor="onnxruntime", fallback="error")
    with pytest.raises(Exception, match="the onnxruntime executor cannot run"):
        run(torch.ones(3, 4))
