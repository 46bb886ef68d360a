"""Random operators of torch take a key: the same for a seed, and of the distribution asked for."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from stitch.frontend.torch.compile.backend import stitch_backend
from tests.support.grids import every
from tests.support.torch.compiled import compiled
from tests.support.torch.operator_samples import graph_module_of

N = 20_000
WEIGHTS = torch.tensor([0.0, 1.0, 3.0, 0.0, 4.0, 0.0])

#: What is drawn; its mean and deviation, each with what it may be off.
DRAWS: dict[str, tuple[Callable[..., Any], float, float]] = {
    "uniform": (lambda x, w: torch.empty_like(x).uniform_(-1, 3), 1.0, 4 / math.sqrt(12)),
    "normal": (lambda x, w: torch.empty_like(x).normal_(2.0, 0.5), 2.0, 0.5),
    "normal around tensors": (lambda x, w: torch.normal(x + 1, x + 2), 1.0, 2.0),
    "exponential": (lambda x, w: torch.empty_like(x).exponential_(2.0), 0.5, 0.5),
    "geometric": (lambda x, w: torch.empty_like(x).geometric_(0.5), 2.0, math.sqrt(2)),
    "randint": (lambda x, w: torch.randint(-2, 5, (N,)).float(), 1.0, 2.0),
    "randint_like": (lambda x, w: torch.randint_like(x, 7), 3.0, 2.0),
    "randperm": (lambda x, w: torch.randperm(N).float() / N, 0.5, 1 / math.sqrt(12)),
    "multinomial": (
        lambda x, w: w.multinomial(N, replacement=True).float(), 2.875, 1.1659,
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def drawn() -> Callable[[int], dict[str, Any]]:
    """All draws as one program, run after a seed."""
    x = torch.zeros(N)

    def every(*given: Any) -> list[Any]:
        return [draw(*given) for draw, _, _ in DRAWS.values()]

    run = stitch_backend(graph_module_of(every, [x, WEIGHTS]), [x, WEIGHTS])

    def after(seed: int) -> dict[str, Any]:
        torch.manual_seed(seed)
        return dict(zip(DRAWS, run(x, WEIGHTS), strict=True))

    return after


@pytest.mark.parametrize("name", DRAWS)
def test_draws_are_of_the_distribution(name: str, drawn: Callable[[int], dict[str, Any]]) -> None:
    _, mean, deviation = DRAWS[name]
    values = drawn(3)[name]
    assert abs(values.mean().item() - mean) < 5 * deviation / math.sqrt(N)
    assert values.std().item() == pytest.approx(deviation, rel=0.05)


@pytest.mark.parametrize("name", every(3, DRAWS))
def test_a_seed_decides_what_is_drawn(name: str, drawn: Callable[[int], dict[str, Any]]) -> None:
    assert torch.equal(drawn(3)[name], drawn(3)[name])
    assert not torch.equal(drawn(3)[name], drawn(4)[name])


def test_a_permutation_has_every_number_once(drawn: Callable[[int], dict[str, Any]]) -> None:
    order = (drawn(5)["randperm"] * N).round().long()
    assert torch.equal(order.sort().values, torch.arange(N))


def test_whole_numbers_stay_within_their_bounds(drawn: Callable[[int], dict[str, Any]]) -> None:
    assert set(drawn(5)["randint"].tolist()) == set(range(-2, 5))


def test_categories_without_weight_are_never_drawn(drawn: Callable[[int], dict[str, Any]]) -> None:
    assert set(drawn(5)["multinomial"].tolist()) == {1.0, 2.0, 4.0}


def test_choices_without_replacement_differ_and_have_weight() -> None:
    rows = WEIGHTS.repeat(500, 1)
    chosen = compiled(lambda w: torch.multinomial(w, 3))(rows)
    assert torch.equal(chosen.sort(1).values, torch.tensor([1, 2, 4]).expand(500, 3))
    # The weightiest comes first half the time.
    assert (chosen[:, 0] == 4).float().mean().item() == pytest.approx(0.5, abs=0.1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_uniform_numbers_stay_below_their_bound_in_every_type(dtype: Any) -> None:
    def function(x: Any) -> Any:
        return torch.rand_like(x), torch.empty_like(x).uniform_(2, 3), x.clone().uniform_(5, 5)

    torch.manual_seed(0)
    drawn, between, alone = compiled(function)(torch.zeros(20_000, dtype=dtype))
    assert drawn.min() >= 0 and 0.99 < drawn.max() < 1
    assert between.min() >= 2 and 2.97 < between.max() < 3
    assert bool((alone == 5).all())


def test_errors_of_torch_compile_do_not_advise_eval() -> None:
    with pytest.raises(Exception, match="poisson") as caught:
        compiled(torch.poisson)(torch.rand(3))
    assert "its result is random" in str(caught.value) and ".eval()" not in str(caught.value)


def test_two_dropouts_of_one_tensor_are_two() -> None:
    """Where there are gradients aot_autograd makes one of nodes that are alike."""

    def twice(x: Any) -> Any:
        y = x.sin()
        return torch.cat([F.dropout(y, 0.3), F.dropout(y, 0.3)])

    first, second = compiled(twice)(torch.ones(7, 8, requires_grad=True)).chunk(2)
    assert not torch.equal(first, second)


def test_two_draws_of_one_custom_operator_are_two() -> None:
    """Torch runs them; aot_autograd must not make one of them."""
    tags = (torch.Tag.nondeterministic_seeded,)
    library = torch.library.Library("stitch_draws", "FRAGMENT")
    library.define("noise(Tensor x) -> Tensor", tags=tags)
    library.impl("noise", torch.rand_like, "CompositeExplicitAutograd")
    library.impl("noise", torch.empty_like, "Meta")

    def twice(x: Any) -> Any:
        y = x.sin()
        noise = torch.ops.stitch_draws.noise
        return torch.cat([y * noise(y.detach()), y * noise(y.detach())])

    x = torch.linspace(-2, 3, 56, requires_grad=True)
    try:
        torch.manual_seed(11)
        found = compiled(twice, fallback="torch")(x)
        torch.manual_seed(11)
        torch.testing.assert_close(found, twice(x))
    finally:
        library._destroy()
