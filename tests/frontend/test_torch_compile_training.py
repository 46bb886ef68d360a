"""Training through torch.compile: torch's loop and optimizers, Stitch's programs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.support.grids import every
from tests.support.torch.compiled import (
    assert_same,
    assert_trains_alike,
    compiled,
    storage_of,
)

STEPS = 20


class Decoder(nn.Module):  # type: ignore[misc]  # torch has no types here
    """A block of a causal language model, words in and out through one matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(20, 16), nn.Parameter(torch.randn(8, 16) / 10)
        self.norm, self.last = nn.LayerNorm(16), nn.LayerNorm(16)
        self.projection, self.merged = nn.Linear(16, 48, bias=False), nn.Linear(16, 16)
        self.wide, self.narrow = nn.Linear(16, 32), nn.Linear(32, 16)
        self.head = nn.Linear(16, 20, bias=False)
        self.head.weight = self.words.weight

    def forward(self, ids: Any) -> Any:
        x = self.words(ids) + self.places
        parts = self.projection(self.norm(x)).view(*ids.shape, 3, 2, 8)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.merged(seen.transpose(1, 2).reshape(*ids.shape, 16))
        return self.head(self.last(x + self.narrow(F.gelu(self.wide(x)))) / 4)


def _encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    return nn.Sequential(
        nn.Embedding(20, 16),
        nn.TransformerEncoder(layer, 2, enable_nested_tensor=False),
        nn.Linear(16, 20),
    )


def _cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(),
        nn.MaxPool2d(3, 2, 1), nn.Conv2d(8, 8, 3, groups=4, padding=1), nn.SiLU(),
        nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(32, 5),
    )  # fmt: skip


def _mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(6, 9), nn.GELU(), nn.Linear(9, 9), nn.Tanh(), nn.LayerNorm(9), nn.Linear(9, 5)
    )


def _sgd(parameters: Any) -> Any:
    return torch.optim.SGD(parameters, 0.05, momentum=0.9)


def _adam(parameters: Any) -> Any:
    # Its steps have the size of the rate whatever the gradient's, so noise near zero counts.
    return torch.optim.Adam(parameters, 1e-3, eps=1e-4)


def _classes(scores: Any) -> Any:
    return F.cross_entropy(scores, torch.arange(len(scores)) % 5)


def _words(scores: Any) -> Any:
    flat = scores.flatten(0, 1)
    return F.cross_entropy(flat, torch.arange(len(flat)) % 20)


CASES: dict[str, tuple[Any, Any, Any, Any]] = {
    "MLP, SGD": (_mlp, lambda: torch.randn(7, 6), _classes, _sgd),
    "MLP, Adam": (_mlp, lambda: torch.randn(7, 6), _classes, _adam),
    "CNN, SGD": (_cnn, lambda: torch.randn(4, 3, 16, 16), _classes, _sgd),
    "encoder, SGD": (_encoder, lambda: torch.randint(20, (3, 8)), _words, _sgd),
    "decoder, Adam": (Decoder, lambda: torch.randint(20, (3, 8)), _words, _adam),
}


@pytest.mark.parametrize("name", every(2, CASES))
def test_twenty_steps_are_those_of_eager_torch(name: str) -> None:
    torch.manual_seed(0)
    make, batch, loss, optimizer = CASES[name]
    module = make()
    assert_trains_alike(module, [batch() for _ in range(STEPS)], loss, optimizer)


def test_twenty_steps_on_a_device_are_those_of_eager_torch() -> None:
    torch.manual_seed(0)
    batches = [torch.randint(20, (3, 8)) for _ in range(STEPS)]
    assert_trains_alike(Decoder(), batches, _words, _sgd, target="wormhole_n150")


def test_parameters_enter_a_device_again_when_the_optimizer_has_written_them() -> None:
    module = nn.Linear(64, 64, bias=False)
    run, device = (
        compiled(module, target="wormhole_n150"),
        storage_of(target="wormhole_n150").device,
    )
    x = torch.randn(2, 64)

    def written() -> int:
        before = device.account().nbytes_seen
        with torch.no_grad():
            assert_same(run(x), module(x))
        return device.account().nbytes_seen - before

    assert written() == module.weight.nbytes + x.nbytes
    assert [written(), written()] == [x.nbytes, x.nbytes]
    with torch.no_grad():
        module.weight.mul_(2)
    assert written() == module.weight.nbytes + x.nbytes
    assert written() == x.nbytes


def test_gradients_add_up_over_several_backward_passes() -> None:
    module, twin = nn.Linear(5, 3), nn.Linear(5, 3)
    twin.load_state_dict(module.state_dict())
    run = compiled(module)
    for scale in (1.0, 2.0, 3.0):
        x = torch.randn(4, 5)
        (run(x).square().sum() * scale).backward()
        (twin(x).square().sum() * scale).backward()
    assert_same([p.grad for p in module.parameters()], [p.grad for p in twin.parameters()])


def test_dropout_keeps_its_share_and_uses_one_mask_for_both_passes() -> None:
    torch.manual_seed(1)
    run = compiled(lambda x: F.dropout(x, 0.3))
    x = torch.ones(200, 200, requires_grad=True)
    made = run(x)
    made.backward(torch.ones_like(made))
    assert set(made.detach().unique().tolist()) == {0.0, made.detach().max().item()}
    assert abs(made.detach().max().item() - 1 / 0.7) < 1e-6
    kept = (made != 0).float()
    # Five standard deviations of 40,000 draws, and of 200 in each row and column.
    assert abs(kept.mean().item() - 0.7) < 5 * (0.21 / 40_000) ** 0.5
    assert (kept.mean(0) - 0.7).abs().max() < 5 * (0.21 / 200) ** 0.5
    assert (kept.mean(1) - 0.7).abs().max() < 5 * (0.21 / 200) ** 0.5
    torch.testing.assert_close(x.grad, made.detach())


def test_torchs_seed_decides_what_is_random() -> None:
    run = compiled(lambda x: (F.dropout(x, 0.5), torch.rand_like(x), torch.randn(3, 4)))
    x = torch.ones(30, 30)

    def drawn(seed: int) -> Any:
        torch.manual_seed(seed)
        return run(x)

    first, again, other = drawn(5), drawn(5), drawn(6)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(first, other, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(other, run(x), strict=True))


# torch warns of its own deprecated parts; nobody can do anything about them here.
@pytest.mark.filterwarnings("ignore:.*script_method.*:DeprecationWarning")
def test_a_whole_step_may_be_compiled_with_its_optimizer() -> None:
    module, twin = nn.Linear(4, 4), nn.Linear(4, 4)
    twin.load_state_dict(module.state_dict())
    ours, theirs = (torch.optim.Adam(m.parameters(), 1e-2) for m in (module, twin))
    step = compiled(ours.step)
    for _ in range(4):
        x = torch.randn(3, 4)
        for network, optimizer in ((module, ours), (twin, theirs)):
            optimizer.zero_grad()
            network(x).square().sum().backward()
        step()
        theirs.step()
    assert_same(list(module.parameters()), list(twin.parameters()))


def test_a_checkpoint_draws_the_same_numbers_in_both_passes() -> None:
    torch.manual_seed(0)

    def block(x: Any) -> Any:
        return F.dropout(F.dropout(x, 0.3).square(), 0.4)

    run = compiled(lambda x: checkpoint(block, x, use_reentrant=False))
    x = (torch.rand(40, 40) + 0.5).requires_grad_()
    made = run(x)
    (grad,) = torch.autograd.grad(made.sum(), x)
    # Of c x², where c is 0 or what both layers scale by, the derivative is 2 c x.
    torch.testing.assert_close(grad, 2 * made.detach() / x.detach())
    assert abs((made == 0).float().mean() - (1 - 0.7 * 0.6)) < 0.07
