"""`stitch.torch`: modules that compile themselves, captured when enough is known."""

from __future__ import annotations

import copy
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import stitch
import stitch.torch
import stitch.torch.nn as nn
from stitch.errors import UsageError
from stitch.training import LossTensor, TensorFuture


class Net(nn.Module):
    """Two layers, with dropout and running statistics between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(6, 8), nn.BatchNorm1d(8)
        self.drop, self.last = nn.Dropout(0.1), nn.Linear(8, 5)

    def forward(self, x: Any) -> Any:
        return self.last(self.drop(torch.relu(self.norm(self.first(x)))))


LOSS = nn.CrossEntropyLoss()


def made(**options: Any) -> tuple[Net, Any, Any]:
    """A network, its optimizer, and what its `compile` gives."""
    torch.manual_seed(0)
    net = Net()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    return net, optimizer, net.compile(optimizer=optimizer, target="host", **options)


def batches(count: int) -> list[tuple[Any, Any]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(12, 6, generator=generator), torch.randint(0, 5, (12,), generator=generator))
        for _ in range(count)
    ]


def step(model: Any, optimizer: Any, count: int = 3) -> float:
    for x, y in batches(count):
        loss = LOSS(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return float(loss.item())


def test_the_first_loss_says_how_the_model_is_trained() -> None:
    _, optimizer, model = made()
    (x, y), *_ = batches(1)
    pred = model(x)
    assert not model.is_captured
    loss = LOSS(pred, y)
    assert type(loss) is LossTensor
    assert model.model.training.loss.config()["loss"] == "sparse_categorical_crossentropy"
    assert pred.numpy().shape == (12, 5)
    loss.backward()
    optimizer.step()
    assert type(model(x)) is TensorFuture
    with pytest.raises(UsageError, match="another loss"):
        nn.MSELoss()(model(x), torch.zeros(12, 5))


def test_steps_are_those_of_stitch_compile_with_everything_known() -> None:
    net, optimizer, model = made(algorithm="search")
    other = copy.deepcopy(net)
    beside = torch.optim.Adam(other.parameters(), lr=0.01)
    known = stitch.torch.compile(
        other, (batches(1)[0][0],), algorithm="search", optimizer=beside, loss=LOSS, target="host"
    )
    assert isinstance(known, stitch.CompiledModel)
    assert step(model, optimizer) == step(known, beside)
    assert known.search_result is not None
    assert model.search_result.as_data() == known.search_result.as_data()


def test_what_was_changed_after_the_first_call_does_not_count() -> None:
    losses = []
    for changes, is_array in ((False, False), (True, False), (True, True)):
        _, _, model = made()
        (x, y), *_ = batches(1)
        pred = model(x.numpy() if is_array else x)
        if changes:
            x.zero_()
        losses.append(LOSS(pred, y).item())
    assert losses[0] == losses[1] == losses[2]


def test_with_a_prediction_without_a_loss_nothing_is_computed_yet() -> None:
    _, _, model = made()
    pred = model(batches(1)[0][0])
    with pytest.raises(AttributeError, match="AwaitedPrediction has no 'tensor'"):
        _ = pred.tensor


def test_a_prediction_is_known_by_torch_before_the_loss_and_by_the_device_after_it() -> None:
    net, _, model = made()
    net.drop.p = 0.0
    (x, y), *_ = batches(1)
    expected = copy.deepcopy(net)(x).detach()
    assert repr(model) == "<CapturedModel of Net: not compiled yet>"
    with pytest.raises(UsageError, match="not compiled yet"):
        model.as_json()
    pred = model(x)
    assert repr(pred) == "<AwaitedPrediction: its loss is not known yet>"
    np.testing.assert_allclose(np.asarray(pred), expected, rtol=1e-5, atol=1e-6)
    with pytest.raises(UsageError, match="not the prediction"):
        nn.MSELoss()(torch.zeros(12, 5), pred)
    assert LOSS(pred, y).item() == LOSS(pred, y).item() == pytest.approx(
        LOSS(expected, y).item(), rel=1e-5)  # fmt: skip
    assert "12x5" in repr(pred) and "Net" in repr(model)
    torch.testing.assert_close(pred.sigmoid().detach(), expected.sigmoid())
    model.dump(file := io.StringIO())
    assert file.getvalue() == model.as_json()


def test_gradients_are_read_by_name_of_a_module_that_is_not_compiled() -> None:
    net, _, model = made()
    with pytest.raises(UsageError, match=r"'first\.bias' has no gradient now"):
        model.get_tensor("first.bias.grad")
    net(batches(1)[0][0]).sum().backward()
    np.testing.assert_array_equal(model.get_tensor("first.bias.grad"), net.first.bias.grad)
    with pytest.raises(UsageError, match=r"no tensor 'first\.bais'"):
        model.get_tensor("first.bais")


def test_a_loss_that_cannot_be_leaves_the_model_as_it_was() -> None:
    _, optimizer, model = made()
    (x, y), *_ = batches(1)
    with pytest.raises(UsageError, match="is not a supported loss"):
        torch.nn.functional.gaussian_nll_loss(model(x), torch.zeros(12, 5), torch.ones(12, 5))
    for labels in (y + 9, y[:3], torch.zeros(12)):
        with pytest.raises(UsageError, match="label"):
            LOSS(model(x), labels)
        assert not model.is_captured
        assert "step" not in vars(optimizer)
    assert LOSS(model(x), y).item() > 0


def test_a_module_without_an_optimizer_is_compiled_for_inference() -> None:
    torch.manual_seed(0)
    net = Net().eval()
    model = net.compile(algorithm="greedy", target="wormhole_n150")
    x = batches(1)[0][0]
    np.testing.assert_allclose(np.asarray(model(x)), net(x).detach(), rtol=1e-5, atol=1e-6)
    assert model.search_result.solution.algorithm == "greedy"


def test_arguments_of_torchs_compile_call_torchs_method() -> None:
    net = Net().eval()
    assert net.compile(backend="eager") is None
    x = batches(1)[0][0]
    torch.testing.assert_close(net(x), net.forward(x))


def test_tensors_are_read_and_written_before_and_after_the_first_call() -> None:
    net, optimizer, model = made()
    for one in (net, model):
        one.set_tensor("first.bias", [1.0, 2.0], slice(2))
        assert one.get_tensor("first.bias", (slice(2),)).tolist() == [1.0, 2.0]
    step(model, optimizer)
    model.set_tensor("first.bias", 7.0, 0)
    assert net.get_tensor("first.bias", 0) == 7.0
    assert net.get_tensor("first.weight.exp_avg").shape == (8, 6)
    assert net.state_dict()["first.bias"][0].item() == 7.0
    assert net.first.bias.detach()[0].item() == 7.0
    with pytest.raises(UsageError, match=r"no tensor 'first\.bais'"):
        net.set_tensor("first.bais", 0.0)


def test_a_state_dict_has_what_the_device_has() -> None:
    net, optimizer, model = made()
    step(model, optimizer)
    state = net.state_dict()
    for name in ("first.weight", "norm.running_mean", "norm.num_batches_tracked"):
        np.testing.assert_array_equal(state[name], model.get_tensor(name))
    before = state["first.weight"].clone()
    step(model, optimizer, 1)
    # As in torch it is the module's tensors, not what they were.
    np.testing.assert_array_equal(state["first.weight"], model.get_tensor("first.weight"))
    assert not torch.equal(state["first.weight"], before)


def test_a_training_goes_on_from_its_json_with_torchs_optimizer(tmp_path: Path) -> None:
    net, optimizer, model = made(algorithm="search")
    step(model, optimizer)
    net.dump(tmp_path / "model.json")
    other = Net()
    beside = torch.optim.Adam(other.parameters(), lr=0.01)
    again = stitch.torch.load(tmp_path / "model.json", other, beside)
    assert again.search_result.as_data() == model.search_result.as_data()
    assert step(again, beside) == step(model, optimizer)
    np.testing.assert_array_equal(other.first.weight.detach(), again.get_tensor("first.weight"))
    assert again.get_tensor("first.weight").tobytes() == model.get_tensor("first.weight").tobytes()
    counts = [o.state_dict()["state"][0]["step"].item() for o in (optimizer, beside)]
    assert counts == [6, 6]


def test_another_optimizer_than_that_of_the_json_is_refused() -> None:
    net, optimizer, model = made()
    step(model, optimizer)
    other = Net()
    for kind, options in ((torch.optim.SGD, {}), (torch.optim.Adam, {"betas": (0.5, 0.9)})):
        beside = kind(other.parameters(), lr=0.01, **options)
        with pytest.raises(UsageError, match="trained by another optimizer"):
            stitch.torch.load(io.StringIO(net.as_json()), other, beside)
    stranger = torch.nn.Sequential(torch.nn.Linear(4, 3))
    beside = torch.optim.Adam(stranger.parameters(), lr=0.01)
    with pytest.raises(UsageError, match=r"has no parameter 'first\.weight'"):
        stitch.torch.load(io.StringIO(net.as_json()), stranger, beside)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"algorithm": "unity"}, "unknown algorithm"),
        ({"loss": LOSS, "optimizer": None}, "without an optimizer"),
        ({"loss": 3}, "compile takes a loss of stitch.losses or torch.nn"),
        ({"optimizer": 3}, "compile takes an optimizer"),
        ({"optimizer": None, "dynamic_shapes": {"x": {0: stitch.Dim("n")}}}, "needs example"),
    ],
)
def test_what_cannot_be_is_refused_when_it_is_said(options: dict[str, Any], told: str) -> None:
    net = Net()
    given = {"optimizer": torch.optim.SGD(net.parameters(), lr=0.1), **options}
    with pytest.raises(UsageError, match=told):
        net.compile(**given)


def same_as_eager(model: Any, steps: Any) -> None:
    """The model has what the same steps in torch give."""
    torch.manual_seed(0)
    net = Plain()
    steps(net, torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9), net)
    for name, parameter in net.named_parameters():
        np.testing.assert_allclose(
            model.get_tensor(name), parameter.detach().numpy(), rtol=1e-4, atol=1e-5
        )


class Plain(nn.Module):
    """One layer."""

    def __init__(self) -> None:
        super().__init__()
        self.only = nn.Linear(6, 5)

    def forward(self, x: Any) -> Any:
        return self.only(x)


def plain() -> tuple[Plain, Any, Any]:
    torch.manual_seed(0)
    net = Plain()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    return net, optimizer, net.compile(optimizer=optimizer, target="host")


def test_a_step_whose_closure_makes_the_first_call_is_a_step() -> None:
    def steps(_: Any, optimizer: Any, model: Any) -> None:
        for x, y in batches(3):

            def closure(x: Any = x, y: Any = y) -> Any:
                optimizer.zero_grad()
                loss = LOSS(model(x), y)
                loss.backward()
                return loss

            optimizer.step(closure)

    net, optimizer, model = plain()
    steps(net, optimizer, model)
    same_as_eager(model, steps)


def test_a_parameter_that_is_frozen_on_the_way_is_refused() -> None:
    net, optimizer, model = plain()
    step(model, optimizer)
    net.only.bias.requires_grad_(False)
    with pytest.raises(UsageError, match="requires_grad"):
        step(model, optimizer)
    net.only.bias.requires_grad_(True)
    step(model, optimizer)


def test_the_state_of_an_optimizer_with_a_frozen_parameter_is_loaded() -> None:
    torch.manual_seed(0)
    net = Plain()
    net.only.bias.requires_grad_(False)
    optimizer = torch.optim.Adagrad(net.parameters(), lr=0.1)
    model = net.compile(optimizer=optimizer, target="host")
    step(model, optimizer)
    kept = copy.deepcopy(optimizer.state_dict())
    step(model, optimizer)
    optimizer.load_state_dict(kept)
    assert float(optimizer.state_dict()["state"][0]["step"]) == 3


def test_with_a_backend_compile_is_torchs() -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {"algorithm": "search", "optimizer": optimizer}
    compiled = stitch.torch.compile(model, backend="stitch", options=options)
    assert isinstance(compiled, torch.nn.Module)
    before = model.weight.detach().clone()
    compiled(torch.ones(4, 3)).sum().backward()
    optimizer.step()
    torch.testing.assert_close(model.weight, before - 0.1 * torch.full((2, 3), 4.0))
    assert stitch.torch.compile(model, backend="eager", fullgraph=True)(torch.ones(3)).shape == (2,)
    given: list[dict[str, Any]] = [{"optimizer": optimizer}, {"algorithm": "search"}]
    for own in given:
        with pytest.raises(UsageError, match=rf"got: {next(iter(own))}(.|\n)*options=dict"):
            stitch.torch.compile(model, backend="stitch", **own)
    with pytest.raises(UsageError, match=r"(?s)none to divide.*got: devices"):
        stitch.api.device_of({"algorithm": "search", "devices": 2})
    with pytest.raises(UsageError, match=r"got: example"):
        stitch.torch.compile(model, (torch.ones(3),), backend="stitch")


def test_a_sequential_has_the_methods_of_a_module_and_takes_modules_only() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 5))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    model = net.compile(optimizer=optimizer, target="host")
    before = step(model, optimizer, 1)
    assert step(model, optimizer, 3) < before
    assert np.array_equal(net.get_tensor("2.bias"), model.get_tensor("2.bias"))
    model.instance.close()
    sequential: Any = nn.Sequential
    with pytest.raises(UsageError, match="Sequential takes modules") as refused:
        sequential([net[0]])
    assert refused.value.remedy == "unpack a list: Sequential(*layers)"
    with pytest.raises(UsageError, match="Sequential takes no first"):
        sequential(first=net[0])
