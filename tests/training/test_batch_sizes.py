"""Batches of another size than the first one's: as the smaller last one of a loader."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import helper, numpy_helper
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import stitch
import stitch.torch
from stitch.errors import TaskError, UsageError
from stitch.training import instance as instance_module

loss_fn = nn.CrossEntropyLoss()
OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01),
}


class Net(nn.Module):  # type: ignore[misc]  # torch has no types here
    """Normalization over the batch, and a view that counts its rows."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8, bias=False)
        self.norm = nn.BatchNorm1d(8)
        self.second = nn.Linear(8, 3)

    def forward(self, x: Any) -> Any:
        return self.second(torch.relu(self.norm(self.first(x))).view(x.size(0), -1))


def data(rows: int = 10, features: int = 6) -> tuple[Any, Any]:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(rows, features, generator=generator)
    return x, torch.randint(0, 3, (rows,), generator=generator)


def net() -> Any:
    torch.manual_seed(3)
    return Net()


def epoch(model: Any, optimizer: Any, number: int) -> list[float]:
    """What a user writes: ten rows in batches of four, the last of two."""
    generator = torch.Generator().manual_seed(number)
    losses = []
    for x, y in DataLoader(TensorDataset(*data()), 4, shuffle=True, generator=generator):
        optimizer.zero_grad()
        loss = loss_fn(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def assert_same_tensors(ours: Any, theirs: Any) -> None:
    wanted = theirs.state_dict()
    for name, tensor in ours.state_dict().items():
        if name != "norm.num_batches_tracked":
            torch.testing.assert_close(tensor, wanted[name], rtol=1e-4, atol=1e-5, msg=name)


def trained_by_torch(optimizer: str, epochs: int) -> tuple[Any, list[float]]:
    module = net()
    own = OPTIMIZERS[optimizer](module.parameters())
    return module, [loss for n in range(epochs) for loss in epoch(module, own, n)]


@pytest.mark.parametrize("target", ["host", "wormhole_n150"])
@pytest.mark.parametrize("word", OPTIMIZERS)
def test_a_loader_with_a_smaller_last_batch_trains_as_torch_does(word: str, target: str) -> None:
    theirs, wanted = trained_by_torch(word, 2)
    module = net()
    optimizer = OPTIMIZERS[word](module.parameters())
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 100)
    model = stitch.torch.compile(module, optimizer=optimizer, target=target)
    losses = epoch(model, optimizer, 0)
    at = {name: parameter.data_ptr() for name, parameter in module.named_parameters()}
    schedule.step()
    losses += epoch(model, optimizer, 1)
    assert losses == pytest.approx(wanted, rel=1e-5)
    assert_same_tensors(module, theirs)
    # The weights of all sizes are the same buffers, where they were.
    assert at == {name: parameter.data_ptr() for name, parameter in module.named_parameters()}


def started(module: Any = None, **options: Any) -> Any:
    """A training of ours on batches of four."""
    x, _ = data()
    options = {"optimizer": stitch.SGD(lr=0.1, momentum=0.9), "target": "host", **options}
    return stitch.compile(module or net(), (x[:4],), loss=loss_fn, **options).start()


def steps(instance: Any, sizes: tuple[int, ...], x: Any, y: Any) -> list[float]:
    losses, first = [], 0
    for size in sizes:
        rows = slice(first, first := first + size)
        loss = loss_fn(instance(x[rows]), y[rows])
        loss.backward()
        instance.optimizer.step()
        instance.optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_micro_batches_of_several_sizes_are_one_step() -> None:
    x, y = data()
    theirs, ours = net(), net()
    own = torch.optim.SGD(theirs.parameters(), lr=0.1)
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.1)
    model = stitch.torch.compile(ours, optimizer=optimizer, target="host")
    for _ in range(2):
        for module, stepped in ((theirs, own), (model, optimizer)):
            stepped.zero_grad()
            for rows in (slice(0, 4), slice(4, 8), slice(8, 10)):
                (loss_fn(module(x[rows]), y[rows]) / 3).backward()
            stepped.step()
    assert_same_tensors(ours, theirs)


def test_the_gradients_of_a_micro_batch_are_still_seen_when_another_size_is_compiled() -> None:
    x, y = data()
    module = net()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    model = stitch.torch.compile(module, optimizer=optimizer, target="host")
    loss_fn(model(x[:4]), y[:4]).backward()
    before = module.second.weight.grad.clone()
    loss = loss_fn(model(x[4:6]), y[4:6])
    assert torch.equal(module.second.weight.grad, before)
    loss.backward()
    assert not torch.equal(module.second.weight.grad, before)


def test_batches_of_any_size_are_predicted_by_running_statistics() -> None:
    x, y = data()
    module = net()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    model = stitch.torch.compile(module, optimizer=optimizer, target="host")
    for sizes in ((4, 2), (4,)):
        for size in sizes:
            loss_fn(model(x[:size]), y[:size]).backward()
            optimizer.step()
        module.eval()
        # One row has no variance to train with, and can be predicted.
        for size in (1, 4, 10, 1):
            with torch.no_grad():
                wanted = module(x[:size])
            given = torch.as_tensor(model.instance.predict(x[:size]).numpy())
            torch.testing.assert_close(given, wanted, rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(torch.as_tensor(model(x[:size]).numpy()), given)
        module.train()


class Counting(nn.Module):  # type: ignore[misc]  # torch has no types here
    """Changes buffers in evaluation too, and gives classes beside their scores."""

    def __init__(self, counts_in: str) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 3)
        self.counts_in = counts_in
        self.register_buffer("seen", torch.zeros(6))

    def forward(self, x: Any) -> Any:
        if self.counts_in != "evaluation" or not self.training:
            self.seen.mul_(0.5).add_(x.detach().mean(0))
        scores = self.linear(x - self.seen)
        return scores.argmax(1), scores


@pytest.mark.parametrize("counts_in", ["both", "evaluation"])
def test_what_is_predicted_is_what_is_trained_on_whatever_else_evaluation_gives(
    counts_in: str,
) -> None:
    x, y = data()
    module = Counting(counts_in)
    theirs = copy.deepcopy(module)
    own = torch.optim.SGD(theirs.parameters(), lr=0.1)
    with started(module, optimizer=stitch.SGD(lr=0.1)) as instance:
        steps(instance, (4, 2), x, y)
        for rows in (slice(0, 4), slice(4, 6)):
            own.zero_grad()
            loss_fn(theirs(x[rows])[1], y[rows]).backward()
            own.step()
        for size in (4, 7, 4):
            evaluated = copy.deepcopy(theirs).eval()
            _, wanted = evaluated(x[:size])
            given = torch.as_tensor(instance.predict(x[:size]).numpy())
            torch.testing.assert_close(given, wanted.detach(), rtol=1e-4, atol=1e-5)


def test_a_prediction_between_forward_and_backward_changes_nothing() -> None:
    x, y = data()
    with started() as one, started() as other:
        loss = loss_fn(one(x[:4]), y[:4])
        one.predict(x[:7])
        loss.backward()
        one.optimizer.step()
        steps(other, (4,), x, y)
        assert np.array_equal(one.get_tensor("first.weight"), other.get_tensor("first.weight"))


def test_a_prediction_is_not_entered_by_what_it_calls() -> None:
    instance = started()
    x, _ = data()

    class Sly:
        shape, dtype = tuple(x.shape), np.dtype(np.float32)

        def __array__(self, *_: Any, **__: Any) -> Any:
            instance.predict(x)
            return x.numpy()

    with pytest.raises(TaskError, match="during a call of it"):
        instance.predict(Sly())
    assert instance.predict(x).shape == (10, 3)


def test_activations_are_those_of_the_last_size() -> None:
    x, y = data()
    with started() as instance:
        for size in (4, 2, 4):
            loss_fn(instance(x[:size]), y[:size])
            inside = [v.name for v in instance.programs.forward.values if "relu" in v.name]
            assert instance.get_tensor(inside[0]).shape == (size, 8)
            assert np.array_equal(instance.get_tensor("x"), x[:size])
            assert instance.get_tensor("label").shape == (size,)
            instance.set_tensor("label", y[:size].numpy()[::-1].copy())
            assert np.array_equal(instance.get_tensor("label"), y[:size].numpy()[::-1])


def test_a_batch_that_the_model_cannot_take_is_one_error_and_training_goes_on() -> None:
    x, y = data()
    wide, _ = data(4, 7)
    with started() as one, started() as other:
        wanted = steps(other, (4, 2), x, y)
        losses = steps(one, (4,), x, y)
        loss = loss_fn(one(x[4:6]), y[4:6])
        for given in (wide, x[0]):
            with pytest.raises(
                UsageError, match=r"(?s)input 'x' has another shape.*number of rows"
            ):
                one(given)
            with pytest.raises(UsageError, match="input 'x' has another shape"):
                one.predict(given)
        loss.backward()
        one.optimizer.step()
        assert [*losses, loss.item()] == wanted


def test_a_model_that_was_read_from_a_file_has_the_sizes_of_its_programs() -> None:
    x, y = data()
    model = stitch.compile(net(), (x[:4],), optimizer="sgd", loss=loss_fn, target="host")
    loaded = stitch.CompiledModel.load(io.StringIO(model.as_json()))
    with loaded.start() as instance:
        steps(instance, (4,), x, y)
        with pytest.raises(UsageError, match=r"(?s)for other shapes.*drop_last=True"):
            instance(x[:2])


def test_a_size_is_compiled_in_the_modes_and_with_the_frozen_weights_of_then() -> None:
    x, y = data()
    theirs, ours = net(), net()
    for module in (theirs, ours):
        module.first.requires_grad_(False)
    own = torch.optim.SGD([p for p in theirs.parameters() if p.requires_grad], 0.1, momentum=0.9)
    with started(ours) as instance:
        ours.eval()
        with torch.no_grad():
            ours.first.weight.fill_(7.0)
            ours.second.weight.zero_()
        for rows in (slice(0, 4), slice(4, 6)):
            own.zero_grad()
            loss_fn(theirs(x[rows]), y[rows]).backward()
            own.step()
        steps(instance, (4, 2), x, y)
        wanted = theirs.second.weight.detach().numpy()
        np.testing.assert_allclose(instance.get_tensor("second.weight"), wanted, atol=1e-5)
        assert not ours.training and not ours.norm.training
        given = instance.predict(x[:3]).numpy()
    theirs.eval()
    np.testing.assert_allclose(given, theirs(x[:3]).detach().numpy(), rtol=1e-4, atol=1e-5)


def test_the_programs_of_few_sizes_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = data(40)
    with started() as instance:
        wanted = steps(instance, (4, 2, 5, 4, 2), x, y)
    monkeypatch.setattr(instance_module, "MAX_SIZES", 2)
    with started() as instance:
        assert steps(instance, (4, 2, 5, 4, 2), x, y) == wanted


def test_a_setting_that_changes_the_update_holds_for_all_sizes() -> None:
    x, y = data()
    theirs, ours = net(), net()
    own = torch.optim.SGD(theirs.parameters(), lr=0.1, momentum=0.9)
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.1, momentum=0.9)
    model = stitch.torch.compile(ours, optimizer=optimizer, target="host")
    for momentum in (0.9, 0.5):
        for module, stepped in ((theirs, own), (model, optimizer)):
            stepped.param_groups[0]["momentum"] = momentum
            for rows in (slice(0, 4), slice(4, 6)):
                stepped.zero_grad()
                loss_fn(module(x[rows]), y[rows]).backward()
                stepped.step()
    assert_same_tensors(ours, theirs)


class Reader(nn.Module):  # type: ignore[misc]  # torch has no types here
    """A recurrent layer over words, and a switch that is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(11, 5)
        self.reader = nn.GRU(5, 4, batch_first=True)
        self.out = nn.Linear(4, 3)

    def forward(self, words: Any, scale: Any, doubles: bool) -> Any:
        steps, _ = self.reader(self.words(words) * (2 if doubles else 1))
        return self.out(steps[:, -1] * scale)


def test_words_of_another_length_are_read_as_torch_reads_them() -> None:
    generator = torch.Generator().manual_seed(1)
    torch.manual_seed(2)
    theirs = Reader()
    ours = copy.deepcopy(theirs)
    own = torch.optim.SGD(theirs.parameters(), lr=0.5)
    batches = [
        (torch.randint(0, 11, shape, generator=generator), torch.rand(shape[0], 1))
        for shape in ((4, 5), (4, 3), (3, 5), (4, 5))
    ]
    labels = torch.randint(0, 3, (4,), generator=generator)
    optimizer = stitch.SGD(lr=0.5)
    first = (*batches[0], True)
    model = stitch.compile(ours, first, optimizer=optimizer, loss=loss_fn, target="host")
    with model.start() as instance:
        for words, scale in batches:
            own.zero_grad()
            wanted = loss_fn(theirs(words, scale, True), labels[: len(words)])
            wanted.backward()
            own.step()
            loss = loss_fn(instance(words=words, scale=scale), labels[: len(words)])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            assert loss.item() == pytest.approx(wanted.item(), rel=1e-5)


def trained_weights(weight: Any, sizes: tuple[int, ...]) -> Any:
    """What torch makes of `x @ weight`."""
    x, y = data()
    own = torch.tensor(weight, requires_grad=True)
    optimizer = torch.optim.SGD([own], lr=0.1)
    first = 0
    for size in sizes:
        rows = slice(first, first := first + size)
        optimizer.zero_grad()
        loss_fn(x[rows] @ own, y[rows]).backward()
        optimizer.step()
    return own.detach().numpy()


def test_functions_and_onnx_models_are_read_again() -> None:
    weight = np.linspace(-1, 1, 18, dtype=np.float32).reshape(6, 3)
    shape, kind = ["rows", 6], onnx.TensorProto.FLOAT
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["out"])], "product",
        [helper.make_tensor_value_info("x", kind, shape)],
        [helper.make_tensor_value_info("out", kind, ["rows", 3])],
        [numpy_helper.from_array(weight, "w")],
    )  # fmt: skip
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])
    x, y = data()
    sources: list[tuple[Any, dict[str, Any], str]] = [
        (lambda x: x @ weight, {"example_inputs": (x[:4].numpy(),)}, "constant"),
        (proto, {"input_shapes": {"x": (4, 6)}}, "w"),
    ]
    for source, given, name in sources:
        model = stitch.compile(
            source, **given, optimizer=stitch.SGD(lr=0.1), loss=loss_fn, target="host",
            trainable=[name],
        )  # fmt: skip
        with model.start() as instance:
            steps(instance, (4, 2, 4), x, y)
            wanted = trained_weights(weight, (4, 2, 4))
            np.testing.assert_allclose(instance.get_tensor(name), wanted, atol=1e-6)
            given_back = instance.predict(x).numpy()
            np.testing.assert_allclose(given_back, x.numpy() @ wanted, atol=1e-5)


def test_a_graph_of_fixed_shapes_says_so() -> None:
    graph = stitch.ComputationGraphBuilder("fixed")
    x = graph.input("x", (4, 6), stitch.DataType.FLOAT32)
    graph.output("out", x @ graph.parameter("w", np.ones((6, 3), np.float32)))
    model = stitch.compile(graph.build(), optimizer="sgd", loss=loss_fn, target="host")
    with pytest.raises(UsageError, match=r"(?s)'x' has another shape: .*fixed shapes.*drop_last"):
        model(np.ones((2, 6), np.float32))
