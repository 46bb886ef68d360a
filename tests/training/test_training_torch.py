"""Torch modules in training: step for step as torch trains them, statistics and all."""

from __future__ import annotations

import copy
import io
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import stitch
from stitch.errors import CompileError, UsageError
from tests.support.grids import in_turn

OPTIMIZERS: list[tuple[str, dict[str, Any]]] = [
    ("SGD", {"lr": 0.05, "momentum": 0.9, "nesterov": True}),
    ("Adam", {"lr": 0.003}),
    ("AdamW", {"lr": 0.003, "weight_decay": 0.05}),
]
CLASSES = 5


class Convolutional(nn.Module):  # type: ignore[misc]  # torch has no types here
    """Two convolutions with batch normalization, one linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 6, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(6)
        self.second = nn.Conv2d(6, 8, 3, stride=2, bias=False)
        self.other_norm = nn.BatchNorm2d(8)
        self.out = nn.Linear(8 * 3 * 3, CLASSES)

    def forward(self, x: Any) -> Any:
        x = torch.relu(self.norm(self.first(x)))
        x = torch.relu(self.other_norm(self.second(x)))
        return self.out(x.flatten(1))


class Transformer(nn.Module):  # type: ignore[misc]  # torch has no types here
    """An embedding, layers of attention, a linear layer on the mean."""

    def __init__(self, dropout: float = 0.0, depth: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(17, 16)
        self.places = nn.Parameter(torch.randn(6, 16) * 0.1)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(16, 2, 32, dropout=dropout, batch_first=True)
            for _ in range(depth)
        )
        self.out = nn.Linear(16, CLASSES)

    def forward(self, x: Any) -> Any:
        x = self.embedding(x) + self.places
        for layer in self.layers:
            x = layer(x)
        return self.out(x.mean(1))


def batches(module: nn.Module, count: int = 4) -> list[tuple[Any, Any]]:
    """Batches of eight, with labels."""
    generator = torch.Generator().manual_seed(11)

    def one() -> Any:
        if isinstance(module, Transformer):
            return torch.randint(0, 17, (8, 6), generator=generator)
        return torch.randn(8, 3, 8, 8, generator=generator)

    return [(one(), torch.randint(0, CLASSES, (8,), generator=generator)) for _ in range(count)]


def made(kind: type[nn.Module], **options: Any) -> Any:
    torch.manual_seed(5)
    return kind(**options).train()


def compiled(module: Any, optimizer: Any, **options: Any) -> stitch.CompiledModel:
    example = (batches(module, 1)[0][0],)
    loss = stitch.losses.CrossEntropyLoss()
    model: stitch.CompiledModel = stitch.compile(
        module, example, target="host", optimizer=optimizer, loss=loss, **options
    )
    return model


def step(model: stitch.CompiledModel, x: Any, y: Any) -> float:
    assert model.training is not None
    loss = model.training.loss(model(x), y)
    loss.backward()
    model.training.optimizer.step()
    model.training.optimizer.zero_grad()
    return float(loss.item())


@pytest.mark.parametrize(("optimizer", "kind"), in_turn(OPTIMIZERS, [Convolutional, Transformer]))
def test_fifty_steps_equal_those_of_torch(
    optimizer: tuple[str, dict[str, Any]], kind: type[nn.Module]
) -> None:
    name, options = optimizer
    module = made(kind)
    model = compiled(copy.deepcopy(module), getattr(stitch, name)(**options))
    stepped = getattr(torch.optim, name)(module.parameters(), **options)
    data = batches(module)
    plans = []
    for number in range(50):
        x, y = data[number % len(data)]
        expected = nn.functional.cross_entropy(module(x), y)
        expected.backward()
        stepped.step()
        stepped.zero_grad()
        assert step(model, x, y) == pytest.approx(expected.item(), abs=1e-4)
        plans.append(model.instance.device.statistics().plans_made)
    assert plans[2:] == plans[2:3] * 48
    state = module.state_dict()
    for buffer in model.instance.programs.buffers:
        found = model.instance.get_tensor(buffer)
        np.testing.assert_allclose(found, state[buffer].numpy(), rtol=1e-3, atol=1e-4)
    module.eval()
    x = data[0][0]
    np.testing.assert_allclose(
        model.instance.predict(x).numpy(), module(x).detach().numpy(), atol=2e-3
    )


class Masked(nn.Module):  # type: ignore[misc]  # torch has no types here
    """Attention whose first row sees no key."""

    def __init__(self, dropout: float = 0.0, is_bool: bool = False) -> None:
        super().__init__()
        self.dropout = dropout
        self.project = nn.Linear(4, 12)
        mask = torch.full((5, 5), -torch.inf).triu()
        self.register_buffer("mask", mask == 0 if is_bool else mask)

    def forward(self, x: Any) -> Any:
        heads = self.project(x).chunk(3, -1)
        dropout = self.dropout if self.training else 0.0
        return nn.functional.scaled_dot_product_attention(*heads, self.mask, dropout).mean(1)


def test_rows_of_attention_that_see_no_key_have_gradients_of_zero() -> None:
    module = made(Masked)
    x, y = torch.randn(3, 5, 4), torch.randint(0, 4, (3,))
    loss, optimizer = stitch.losses.CrossEntropyLoss(), stitch.SGD(lr=0.5)
    model = stitch.compile(module, (x,), target="host", optimizer=optimizer, loss=loss)
    stepped = torch.optim.SGD(module.parameters(), lr=0.5)
    for _ in range(2):
        expected = nn.functional.cross_entropy(module(x), y)
        expected.backward()
        stepped.step()
        stepped.zero_grad()
        assert step(model, x, y) == pytest.approx(expected.item(), abs=1e-5)


class Unread(nn.Module):  # type: ignore[misc]  # torch has no types here
    """A module that leaves its second argument out."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Any, lengths: Any) -> Any:
        return self.layer(x)


def test_arguments_that_forward_does_not_read_are_passed_all_the_same() -> None:
    x, lengths, y = torch.randn(6, 4), torch.arange(6), torch.randint(0, 3, (6,))
    loss, optimizer = stitch.losses.CrossEntropyLoss(), stitch.SGD(lr=0.1)
    module = made(Unread)
    model = stitch.compile(module, (x, lengths), loss=loss, optimizer=optimizer)
    expected = nn.functional.cross_entropy(module(x, lengths), y)
    assert loss(model(x, lengths), y).item() == pytest.approx(expected.item(), abs=1e-5)


def test_batches_of_torch_are_taken_in_bfloat16_and_refused_with_a_gradient() -> None:
    x, y = torch.randn(6, 4).bfloat16(), torch.randint(0, 3, (6,))
    loss, optimizer = stitch.losses.CrossEntropyLoss(), stitch.SGD(lr=0.1)
    module = nn.Linear(4, 3).bfloat16()
    model = stitch.compile(module, (x,), loss=loss, optimizer=optimizer)
    expected = nn.functional.cross_entropy(module(x), y)
    assert loss(model(x), y).item() == pytest.approx(expected.item(), rel=0.02)
    with pytest.raises(UsageError, match=r"input 'input' .* has a gradient[\s\S]*x.detach"):
        model(x.requires_grad_())


def test_compiling_leaves_the_module_as_it_was() -> None:
    module = made(Convolutional)
    module.norm.eval()
    before = copy.deepcopy(module.state_dict())
    compiled(module, stitch.SGD(lr=0.1))
    assert module.training
    assert not module.norm.training
    for name, tensor in module.state_dict().items():
        assert torch.equal(tensor, before[name])


class Stopped(nn.Identity):  # type: ignore[misc]  # torch has no types here
    """A part whose mode cannot be changed before somebody has pressed a key."""

    def train(self, mode: bool = True) -> Any:
        raise KeyboardInterrupt


def test_an_interrupt_while_compiling_leaves_the_module_in_its_mode() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), Stopped(), nn.Linear(4, 2))
    with pytest.raises(KeyboardInterrupt):
        stitch.compile(net, (torch.ones(3, 4),), optimizer="sgd", loss="mse_mean")
    assert all(part.training for part in net.modules())


class OnSharedBytes(nn.Module):  # type: ignore[misc]  # torch has no types here
    """Two tensors that somebody has laid on one storage."""

    def __init__(self, first: Any, second: Any) -> None:
        super().__init__()
        self.first, self.second = nn.Parameter(first), second

    def forward(self, x: Any) -> Any:
        return x @ self.first @ self.second


def _shared(kind: str) -> nn.Module:
    whole = torch.randn(6, 4)
    if kind == "transposed":
        square = whole[:4]
        return OnSharedBytes(square, nn.Parameter(square.t()))
    if kind == "two parameters":
        return OnSharedBytes(whole[:4], nn.Parameter(whole[:4]))
    if kind == "tied by data":
        module = OnSharedBytes(whole[:4], nn.Parameter(torch.randn(4, 4)))
        module.second.data = module.first.data
        return module
    if kind == "a buffer":
        module = OnSharedBytes(whole[:4], None)
        del module.second
        module.register_buffer("second", module.first.data)
        return module
    if kind == "a part":
        return OnSharedBytes(whole[:4], nn.Parameter(whole[2:]))
    raise AssertionError(kind)


@pytest.mark.parametrize(
    "kind", ["transposed", "a buffer", "a part", "two parameters", "tied by data"]
)
def test_trained_tensors_that_share_bytes_are_refused(kind: str) -> None:
    with pytest.raises(CompileError, match=r"'first' and 'second' share memory"):
        compiled_apart(_shared(kind))


def compiled_apart(module: nn.Module) -> stitch.CompiledModel:
    return stitch.compile(
        module, (torch.randn(2, 4),), target="host", optimizer=stitch.SGD(lr=0.1),
        loss=stitch.losses.MSELoss(),
    )  # fmt: skip


def test_parameters_side_by_side_in_one_storage_are_trained_apart() -> None:
    whole = torch.randn(4, 8)
    for first, second in (
        (whole[:, :4], whole[:, 4:]),
        (whole.view(-1)[:16].view(4, 4), whole.view(-1)[16:].view(4, 4)),
        (whole[:, ::2], whole[:, 1::2]),
    ):
        model = compiled_apart(OnSharedBytes(first, nn.Parameter(second)))
        assert model.training is not None
        assert len(model.training.programs.parameters) == 2


@pytest.mark.parametrize("trains", [False, True])
def test_what_torch_writes_after_compiling_does_not_reach_the_model(trains: bool) -> None:
    module, x = nn.Linear(4, 3), torch.randn(2, 4)
    wanted = module(x).detach().numpy().copy()
    given: dict[str, Any] = (
        {"optimizer": stitch.SGD(lr=0.1), "loss": stitch.losses.MSELoss()} if trains else {}
    )
    model = stitch.compile(module, (x,), target="host", **given)
    module.weight.data.fill_(7.0)
    module.bias.detach().numpy()[...] = 7.0
    np.testing.assert_allclose(np.asarray(model(x.numpy())), wanted, rtol=1e-5, atol=1e-6)


def test_dropout_draws_anew_at_every_step_and_the_seed_decides_what() -> None:
    module = made(Transformer, dropout=0.3, depth=1)
    data = batches(module, 1) * 5
    kept, recomputed = (
        compiled(module, stitch.SGD(lr=0.05), recompute=which) for which in ("none", "all")
    )

    def losses(model: stitch.CompiledModel, seed: int) -> list[float]:
        model.start(seed=seed)
        return [step(model, x, y) for x, y in data]

    first = losses(kept, 1)
    assert len(set(first)) == 5
    assert losses(kept, 1) == first
    assert losses(kept, 2) != first
    assert losses(recomputed, 1) == first


def test_the_key_advances_so_that_the_same_weights_and_batch_give_other_losses() -> None:
    module = made(Transformer, dropout=0.3, depth=1)
    model = compiled(module, stitch.SGD(lr=0.0))
    x, y = batches(module, 1)[0]
    assert len({step(model, x, y) for _ in range(5)}) == 5
    kept = [model.instance.predict(x).numpy() for _ in range(2)]
    np.testing.assert_array_equal(kept[0], kept[1])
    module.eval()
    np.testing.assert_allclose(kept[0], module(x).detach().numpy(), atol=1e-5)


@pytest.mark.parametrize("is_bool", [False, True])
def test_attention_that_drops_nothing_is_attention(is_bool: bool) -> None:
    module = made(Masked, dropout=1e-12, is_bool=is_bool)
    x, loss = torch.randn(3, 5, 4), stitch.losses.CrossEntropyLoss()
    model = stitch.compile(module, (x,), loss=loss, optimizer=stitch.SGD(lr=0.1))
    wanted = module.eval()(x).detach()
    np.testing.assert_allclose(model(x).numpy(), wanted, rtol=1e-4, atol=1e-5)


def test_attention_draws_anew_at_every_step() -> None:
    x, y = torch.randn(3, 5, 4), torch.randint(0, 4, (3,))
    loss, optimizer = stitch.losses.CrossEntropyLoss(), stitch.SGD(lr=1e-4)
    model = stitch.compile(made(Masked, dropout=0.4), (x,), optimizer=optimizer, loss=loss)
    losses = {step(model, x, y) for _ in range(5)}
    assert len(losses) == 5 and np.isfinite([*losses]).all()


def test_a_run_with_dropout_goes_on_elsewhere_with_the_same_masks() -> None:
    module = made(Transformer, dropout=0.3, depth=1)
    data = batches(module, 6)
    whole = compiled(module, stitch.Adam(lr=0.01))
    first, second = (stitch.CompiledModel.load(io.StringIO(whole.as_json())) for _ in range(2))
    expected = [step(whole, x, y) for x, y in data]
    assert [step(first, x, y) for x, y in data[:3]] == expected[:3]
    second.start(seed=99).load_state_dict(first.instance.state_dict())
    assert [step(second, x, y) for x, y in data[3:]] == expected[3:]
