"""What people write in a training loop beside the five lines of the document."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import stitch
import stitch.torch
import stitch.torch.nn as nn
from stitch.errors import UsageError

X, Y = torch.randn(8, 10), torch.randint(0, 3, (8,))
loss_fn = nn.CrossEntropyLoss()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(10, 16), nn.Dropout(0.5), nn.Linear(16, 3))

    def forward(self, x: Any) -> Any:
        return self.layers(x)


@pytest.fixture
def parts() -> tuple[Any, Any, Any]:
    module = Net()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    return module, optimizer, module.compile(optimizer=optimizer)


def step(model: Any, optimizer: Any) -> Any:
    optimizer.zero_grad()
    loss = loss_fn(model(X), Y)
    loss.backward()
    optimizer.step()
    return loss


def test_a_loop_begins_with_zero_grad(parts: Any) -> None:
    _, optimizer, model = parts
    assert step(model, optimizer).item() != step(model, optimizer).item()


def test_zero_grad_of_our_own_optimizer_before_the_first_call_drops_nothing() -> None:
    optimizer = stitch.SGD(lr=0.1)
    optimizer.zero_grad()
    with pytest.raises(UsageError, match="no training uses this optimizer"):
        optimizer.step()
    model = Net().compile(optimizer=optimizer, target="host")
    optimizer.zero_grad()
    assert step(model, optimizer).item() > 0


def test_predictions_and_losses_are_waited_for(parts: Any) -> None:
    _, _, model = parts
    pred = model(X)
    assert pred.wait() is pred
    stitch.wait(pred)  # There is nothing to wait for before its loss is known.
    loss = loss_fn(pred, Y)
    assert loss.wait() is loss and pred.wait() is pred
    stitch.wait([loss, pred])
    second = model(X)
    stitch.wait(second)
    assert not second.tensor.is_pending
    assert second.wait() is second


def test_a_first_prediction_is_read_before_its_loss(parts: Any) -> None:
    module, optimizer, model = parts
    state = torch.get_rng_state()
    pred = model(X)
    classes = pred.argmax(1)
    assert torch.equal(state, torch.get_rng_state())
    assert classes.shape == (8,) and 0 <= (classes == Y).sum().item() <= 8
    assert pred.shape == (8, 3) and pred[0].shape == (3,) and len(pred) == 8
    assert torch.argmax(pred, 1).tolist() == classes.tolist()
    with pytest.raises(UsageError, match=r"does not support backward\(\)"):
        pred.pow(2).sum().backward()
    loss = loss_fn(pred, Y)
    loss.backward()
    optimizer.step()
    assert loss.item() > 0 and module.training


def test_the_mode_of_the_module_is_that_of_the_calls(parts: Any) -> None:
    module, optimizer, model = parts
    assert model.eval() is model and not module.training
    first = model(X)  # Before the first step torch itself predicts.
    torch.testing.assert_close(first, module(X))
    assert model.train().module.training
    step(model, optimizer)
    for switch in (model.eval, module.eval):
        model.train()
        step(model, optimizer)
        switch()
        with torch.no_grad():
            pred = model(X)
        wanted = module(X)  # Torch, with the current weights, and without dropout.
        torch.testing.assert_close(torch.as_tensor(pred.numpy()), wanted, rtol=1e-4, atol=1e-5)
        assert pred.argmax(1).numpy().tolist() == wanted.argmax(1).tolist()
        assert loss_fn(pred, Y).item() == pytest.approx(loss_fn(wanted, Y).item(), rel=1e-4)
    model.train()
    assert step(model, optimizer).item() > 0


def test_a_module_that_is_compiled_in_its_evaluation_mode_is_trained_in_it() -> None:
    module = Net().eval()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    model = module.compile(optimizer=optimizer)
    assert step(model, optimizer).item() > step(model, optimizer).item()


def test_a_smaller_last_batch_is_trained_on_and_one_of_other_features_is_one_error(
    parts: Any,
) -> None:
    _, optimizer, model = parts
    step(model, optimizer)
    with pytest.raises(UsageError, match=r"(?s)\[5, 9\].*only the number of rows"):
        model(X[:5, :9])
    optimizer.zero_grad()
    loss_fn(model(X[:5]), Y[:5]).backward()
    optimizer.step()
    step(model, optimizer)


def test_torch_evaluates_a_batch_of_another_size(parts: Any) -> None:
    module, optimizer, model = parts
    step(model, optimizer)
    model.eval()
    with torch.no_grad():
        pred = model(X[:5])
    torch.testing.assert_close(torch.as_tensor(pred.numpy()), module(X[:5]))
    with pytest.raises(UsageError, match="has another shape"):
        model(X[0])  # Another number of axes is a mistake.
    model.train()
    step(model, optimizer)


def test_class_numbers_that_are_floats_are_told_what_they_are(parts: Any) -> None:
    _, _, model = parts
    with pytest.raises(UsageError, match=r"(?s)probabilities.*label\.long\(\)"):
        loss_fn(model(X), Y.float())


WORDS: dict[str, tuple[dict[str, Any], str]] = {
    "option": ({"precission": "bfloat16"}, "takes no precission(.|\n)*'precision'"),
    "algorithm": ({"algorithm": "serch"}, "did you mean 'search'"),
    "value": ({"recompute": "evry 3"}, "recompute must be"),
    "executor": ({"executor": "nunpy"}, "did you mean 'numpy'"),
    "target": ({"target": "wormhole_n15"}, "did you mean 'wormhole_n150'"),
    "optimizer": ({"optimizer": "sdg"}, "did you mean 'sgd'"),
    "loss": ({"loss": "cros_entropy"}, "loss"),
}


@pytest.mark.parametrize("word", WORDS)
def test_a_misspelt_word_is_told_at_the_call(word: str) -> None:
    options, message = WORDS[word]
    with pytest.raises(UsageError, match=message):
        Net().compile(**{"optimizer": "sgd", **options})
