"""`torch.compile(module, backend="stitch")` computes what eager torch computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.support.grids import every, in_turn
from tests.support.torch.architectures import ARCHITECTURES
from tests.support.torch.compiled import assert_same, compiled, storage_of


def test_the_backend_is_found_by_its_entry_point() -> None:
    assert "stitch" in torch._dynamo.list_backends()


def test_new_shapes_are_compiled_anew_and_old_ones_are_kept() -> None:
    module = nn.Sequential(
        nn.Conv2d(1, 2, 3, padding=1), nn.MaxPool2d(2), nn.Flatten(), nn.LazyLinear(3)
    )
    small, large = torch.randn(2, 1, 8, 6), torch.randn(5, 1, 8, 6)
    module(small)
    run = compiled(module)
    with torch.no_grad():
        for batch in (small, large, small, torch.randn(7, 1, 8, 6), large):
            assert_same(run(batch), module(batch))
        device = storage_of().device
        before = device.statistics().plans_made
        for _ in range(3):
            assert_same(run(large), module(large))
        assert device.statistics().plans_made <= before + 1


def test_one_symbolic_graph_serves_many_shapes_with_gradients() -> None:
    run = compiled(lambda x: (x.view(-1, 2) * x.shape[0]).sum(1), dynamic=True)
    for rows in (2, 3, 6):
        x = torch.randn(rows, 4, requires_grad=True)
        made = run(x)
        made.sum().backward()
        assert_same(made.detach(), (x.detach().view(-1, 2) * rows).sum(1))
        assert_same(x.grad, torch.full((rows, 4), float(rows)))


def _views_of_an_argument(x: Any) -> Any:
    return x[:1].expand(x.shape[0], -1), x[1 : x.shape[0] - 1], x * 2


def _views_of_a_result(x: Any) -> Any:
    made = x * 2
    return made, made[:1].expand(x.shape[0], -1), made[1 : x.shape[0] - 1]


@pytest.mark.parametrize(
    ("function", "has_gradients"),
    in_turn([_views_of_an_argument, _views_of_a_result], [False, True]),
)
def test_views_whose_sizes_are_symbols_are_those_of_eager_torch(
    function: Any, has_gradients: bool
) -> None:
    run = compiled(function, dynamic=True)
    for rows in (4, 5, 4):
        x = torch.randn(rows, 3, requires_grad=has_gradients)
        made, wanted = run(x), function(x)
        assert_same([m.detach() for m in made], [w.detach() for w in wanted])
        assert [m.storage_offset() for m in made] == [w.storage_offset() for w in wanted]
        if has_gradients:
            given = torch.autograd.grad(sum(m.square().sum() for m in made), x)
            assert_same(given, torch.autograd.grad(sum(w.square().sum() for w in wanted), x))


def test_the_effect_of_in_place_operators_shows() -> None:
    def change(x: Any, state: Any) -> Any:
        made = x * 2
        made.add_(1)
        made[0] = 5
        state.mul_(2).add_(made.sum())
        x.relu_()
        return made, state.view(-1)[:2]

    run = compiled(change)
    x, state = torch.randn(4, 3), torch.ones(2, 3)
    same_x, same_state = x.clone(), state.clone()
    for _ in range(3):
        assert_same(run(x, state), change(same_x, same_state))
        assert_same((x, state), (same_x, same_state))


def test_statistics_of_batch_normalisation_move_as_in_eager_torch() -> None:
    module = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
    twin = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
    twin.load_state_dict(module.state_dict())
    run = compiled(module)
    for _ in range(3):
        x = torch.randn(2, 3, 6, 6)
        assert_same(run(x).detach(), twin(x).detach())
    assert_same(list(module.buffers()), list(twin.buffers()))
    assert module[1].num_batches_tracked == 3


def test_outputs_have_the_strides_that_eager_torch_gives() -> None:
    def turned(x: Any) -> Any:
        return x.t() * 1, (x @ x.t()).t(), x[:, ::2], x.permute(1, 0), torch.ones(3), x

    x = torch.randn(3, 4)
    assert_same(compiled(turned)(x), turned(x))


def test_tensors_of_every_type_go_in_and_out() -> None:
    def mixed(x: Any, n: Any, flags: Any, narrow: Any) -> Any:
        return x.double().sum(), (n + 1).int(), flags & (x > 0), narrow * 2, x.half(), n.to(x.dtype)

    operands = (
        torch.randn(3, 4), torch.arange(3), torch.ones(3, 4, dtype=torch.bool),
        torch.randn(4).bfloat16(),
    )  # fmt: skip
    run = compiled(mixed)
    for _ in range(3):
        assert_same(run(*operands), mixed(*operands))


def test_tensors_that_are_not_dense_empty_or_without_axes_go_in() -> None:
    def added(x: Any, y: Any, z: Any) -> Any:
        return x + 1, y.sum(), z * 2

    operands = (torch.randn(4, 6)[:, ::2], torch.zeros(0, 3), torch.tensor(2.0))
    run = compiled(added)
    for _ in range(2):
        assert_same(run(*operands), added(*operands), strides=False)


def test_inference_mode_works_and_its_writes_are_seen() -> None:
    module = nn.Linear(4, 4)
    for target in ("host", "wormhole_n150"):
        run = compiled(module, target=target)
        with torch.inference_mode():
            made = run(torch.randn(2, 4))
            run(made)
            made.mul_(2)
            assert_same(run(made), module(made))


def test_constants_of_the_code_are_constants_of_the_program() -> None:
    table = torch.tensor([1.0, 2.0, 3.0])
    run = compiled(lambda x: x * table + torch.tensor([4.0, 5.0, 6.0]))
    assert_same(run(torch.ones(2, 3)), torch.tensor([[5.0, 7.0, 9.0]] * 2))


def test_tied_weights_are_lent_once() -> None:
    module, examples = ARCHITECTURES["tied weights"]()
    run, account = compiled(module), storage_of()
    before = account.lent
    with torch.no_grad():
        assert_same(run(*examples), module(*examples))
    assert account.lent - before == len(list(module.parameters())) == 3


@pytest.mark.parametrize(
    "options",
    every(
        2,
        [
            {"target": "wormhole_n150"},
            {"executor": "numpy"},
            {"executor": "onnxruntime", "window": 1},
            {"passes": False},
        ],
    ),
    ids=str,
)
def test_every_option_gives_the_same_numbers(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    module, examples = ARCHITECTURES["Transformer encoder"]()
    module.eval()
    run = compiled(module, **options)
    with torch.no_grad():
        for _ in range(2):
            assert_same(run(*examples), module(*examples))
    device = storage_of(**options).device
    assert device.machine.name == options.get("target", "host")
    assert device.executor == options.get("executor", "torch")


@pytest.mark.parametrize("target", every(2, ["host", "wormhole_n150"]))
def test_outputs_that_share_memory_in_eager_torch_share_it_here(target: str) -> None:
    def shared(x: Any) -> Any:
        made = x * 2
        return made.view(-1), made[1], made.t(), made

    run, x = compiled(shared, target=target), torch.randn(3, 4)
    found, wanted = run(x), shared(x)
    assert_same(found, wanted)
    for outputs in (found, wanted):
        outputs[0].add_(1)
    assert_same(found, wanted)
    double = compiled(lambda given: given * 2, target=target)
    found[3].mul_(2)
    assert_same(double(found[3]), found[3] * 2)


def test_data_may_decide_where_the_graph_breaks() -> None:
    def choosing(x: Any) -> Any:
        if x.sum() > 0:
            return x * 2
        return x[x < 0].sum() + x * 3

    run = compiled(choosing)
    for sign in (1.0, -1.0):
        assert_same(run(torch.full((3,), sign)), choosing(torch.full((3,), sign)))
