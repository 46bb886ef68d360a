"""`rng="torch"`: what torch.compile with Stitch draws is, to the bit, what eager torch draws."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.support.grids import in_turn
from tests.support.torch.compiled import assert_same, compiled, storage_of

X = torch.linspace(-2, 3, 56).view(7, 8)


def drawn(run: Any, operand: Any = X) -> list[Any]:
    """Results of two calls, the gradient of both, and what torch draws afterwards."""
    torch.manual_seed(11)
    x = operand.clone().requires_grad_(operand.is_floating_point())
    first, second = run(x), run(x)
    results = [first.detach(), second.detach(), torch.rand(2)]
    if not first.requires_grad:
        return results
    (first * second).sum().backward()
    return [*results, x.grad]


def assert_equal(found: list[Any], wanted: list[Any]) -> None:
    """The same bits."""
    assert len(found) == len(wanted)
    for got, want in zip(found, wanted, strict=True):
        assert got.dtype is want.dtype and torch.equal(got, want)


@pytest.mark.parametrize(
    ("p", "dtype"), in_turn([0.1, 0.3, 0.5, 1.0], [torch.float32, torch.float16, torch.bfloat16])
)
def test_dropout_is_that_of_eager_torch_to_the_bit(dtype: Any, p: float) -> None:
    def dropout(x: Any) -> Any:
        return F.dropout(x, p)

    assert_equal(drawn(compiled(dropout, rng="torch"), X.to(dtype)), drawn(dropout, X.to(dtype)))


def test_dropout_of_what_lies_in_another_order_is_that_of_eager_torch() -> None:
    def dropout(x: Any) -> Any:
        return F.dropout(x.t() * 2, 0.3)

    assert_equal(drawn(compiled(dropout, rng="torch")), drawn(dropout))


def test_two_dropouts_of_one_tensor_are_two() -> None:
    """Where there are gradients aot_autograd makes one of nodes that are alike."""

    def twice(x: Any) -> Any:
        y = x.sin()
        return torch.cat([F.dropout(y, 0.3), F.dropout(y, 0.3)])

    assert_same(drawn(compiled(twice, rng="torch")), drawn(twice))
    first, second = compiled(twice)(X.clone().requires_grad_()).chunk(2)
    assert not torch.equal(first, second)


def test_two_draws_of_one_custom_operator_are_two() -> None:
    tags = (torch.Tag.nondeterministic_seeded,)
    library = torch.library.Library("stitch_draws", "FRAGMENT")
    library.define("noise(Tensor x) -> Tensor", tags=tags)
    library.impl("noise", torch.rand_like, "CompositeExplicitAutograd")
    library.impl("noise", torch.empty_like, "Meta")

    def twice(x: Any) -> Any:
        y = x.sin()
        noise = torch.ops.stitch_draws.noise
        return torch.cat([y * noise(y.detach()), y * noise(y.detach())])

    assert_same(drawn(compiled(twice, fallback="torch")), drawn(twice))
    library._destroy()


def test_every_random_operator_draws_in_its_turn() -> None:
    def numbers(x: Any) -> Any:
        x = x.detach()
        first = [torch.rand_like(x), torch.randn(8), torch.randint(0, 5, (7, 8)), torch.randperm(8)]
        second = [torch.empty_like(x).uniform_(2, 3), torch.empty(8).normal_()]
        third = [torch.empty(8).exponential_(), torch.empty(8).bernoulli_(0.4), F.dropout(x, 0.2)]
        return torch.cat([part.float().flatten() for part in [*first, *second, *third]])

    assert_equal(drawn(compiled(numbers, rng="torch")), drawn(numbers))


def test_shapes_that_change_draw_as_eager_torch() -> None:
    def dropout(x: Any) -> Any:
        return F.dropout(x, 0.3) + torch.rand(x.shape[1])

    run = compiled(dropout, dynamic=True, rng="torch")
    for rows in (3, 5, 7):
        assert_equal(drawn(run, X[:rows].clone()), drawn(dropout, X[:rows].clone()))


def test_what_is_drawn_by_data_keeps_its_turn() -> None:
    def numbers(x: Any) -> Any:
        before = F.dropout(x.detach(), 0.5) * torch.rand(8)
        chosen = torch.multinomial(before.abs() + 1, 3)
        after = [torch.bernoulli(torch.full((8,), 0.5)), F.dropout(before, 0.25)]
        return torch.cat([part.flatten() for part in (before, chosen.float(), *after)])

    run = compiled(numbers, rng="torch", fallback="torch")
    assert_equal(drawn(run), drawn(numbers))


def test_what_is_drawn_by_data_is_an_error_where_nothing_is_left_to_torch() -> None:
    run = compiled(lambda x: torch.bernoulli(x.sigmoid()), rng="torch", fallback="error")
    with pytest.raises(BackendCompilerFailed, match="draws by data"):
        run(X)


def test_a_checkpoint_draws_again_what_it_drew() -> None:
    def kept(x: Any) -> Any:
        return checkpoint(lambda y: F.dropout(y * 2, 0.3) * 3, x, use_reentrant=False)

    assert_equal(drawn(compiled(kept, rng="torch")), drawn(kept))


def test_a_network_in_training_has_the_losses_of_eager_torch() -> None:
    def losses(run: Any, module: Any) -> list[float]:
        torch.manual_seed(5)
        optimizer, found = torch.optim.SGD(module.parameters(), lr=0.1), []
        for _ in range(5):
            optimizer.zero_grad()
            loss = run(torch.randn(2, 5, 8)).square().sum()
            loss.backward()
            optimizer.step()
            found.append(float(loss.detach()))
        return found

    def made() -> Any:
        torch.manual_seed(3)
        return nn.TransformerEncoderLayer(8, 2, 16, dropout=0.3, batch_first=True)

    module, eager = made(), made()
    found = losses(compiled(module, rng="torch"), module)
    assert_same([torch.tensor(found)], [torch.tensor(losses(eager, eager))])


def test_dropout_takes_no_program_apart() -> None:
    module = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.2), nn.Linear(8, 8), nn.Dropout(0.2))
    counts = storage_of(rng="torch").counts
    before = counts.programs
    with torch.no_grad():
        compiled(module, rng="torch")(X)
    assert counts.programs == before + 1


def test_an_unknown_source_of_numbers_is_refused() -> None:
    with pytest.raises(BackendCompilerFailed, match="no such rng"):
        compiled(lambda x: x + 1, rng="numpy")(X)
