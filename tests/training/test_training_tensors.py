"""Any tensor of a training can be read and written, and every operation can be timed."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import stitch
from stitch.errors import LinkError, StitchError, UsageError
from stitch.training import LayerTime
from tests.support.training.models import batches, compiled, torch_mlp, train


def test_gradients_and_activations_are_those_of_torch() -> None:
    model = compiled()
    theirs = torch_mlp(model)
    ((x, y),) = batches(1)
    hidden = theirs[0](torch.from_numpy(x))
    pred = theirs[2](theirs[1](hidden))
    torch.nn.functional.mse_loss(pred, torch.from_numpy(y)).backward()
    instance = model.start()
    instance.forward(x)
    np.testing.assert_allclose(instance.get_tensor("y"), pred.detach(), atol=1e-5)
    inside = instance.get_tensor("gemm")
    np.testing.assert_allclose(inside, hidden.detach(), atol=1e-5)
    np.testing.assert_allclose(instance.get_tensor("saved.relu"), hidden.relu().detach(), atol=1e-5)
    instance.compute_loss(y)
    instance.backward()
    for name, parameter in zip(instance.parameters(), theirs.parameters(), strict=True):
        np.testing.assert_allclose(instance.get_tensor(f"{name}.grad"), parameter.grad, atol=1e-5)


def test_writing_parameters_gradients_activations_and_state_decides_what_comes_next() -> None:
    model = compiled(stitch.SGD(lr=0.5, momentum=0.9))
    instance = model.start()
    ((x, y),) = batches(1)
    instance.set_tensor("fc2.weight", np.zeros((1, 32)))
    instance.set_tensor("fc2.bias", [0.25])
    np.testing.assert_array_equal(instance(x).numpy(), np.full((16, 1), 0.25, np.float32))
    instance.set_tensor("saved.relu", np.zeros((16, 32)))
    instance.compute_loss(y)
    instance.backward()
    assert not instance.get_tensor("fc2.weight.grad").any()
    instance.set_tensor("fc2.bias.grad", [2.0])
    instance.set_tensor("fc2.bias.momentum_buffer", [1.0])
    instance.update()
    assert instance.get_tensor("fc2.bias.momentum_buffer")[0] == pytest.approx(2.9)
    assert instance.get_tensor("fc2.bias")[0] == pytest.approx(0.25 - 0.5 * 2.9)


def test_a_tensor_takes_its_own_shape_only_and_unknown_names_are_refused() -> None:
    instance = compiled().start()
    with pytest.raises(LinkError, match=r"'fc1\.bias' has another shape") as caught:
        instance.set_tensor("fc1.bias", np.zeros(3))
    assert caught.value.remedy == "reshape the array"  # No word of batches.
    with pytest.raises(UsageError, match=r"no tensor 'fc1.gewicht'"):
        instance.get_tensor("fc1.gewicht")
    with pytest.raises(UsageError, match="does not exist at this point"):
        instance.get_tensor("fc1.weight.grad")


def test_profiling_runs_every_kernel_exactly_once() -> None:
    profile_operations, plain = compiled(stitch.Adam(lr=0.01)), compiled(stitch.Adam(lr=0.01))
    instance = profile_operations.start()
    instance.profiling = True
    runs: list[str] = []
    instance.device.hooks.register(after_program=lambda c: runs.append(c.program.role.value))
    for x, y in batches(3):
        forward = instance.forward(x)
        loss = instance.compute_loss(y)
        backward, update = instance.backward(), instance.update()
        instance.zero_grad()
        (expected,) = train(plain, [(x, y)])
        assert loss.item() == expected
        for times, program in ((forward, 0), (backward, 2), (update, 3)):
            assert times is not None
            assert all(isinstance(t, LayerTime) and t.seconds > 0 for t in times)
            operations = profile_operations.binary.programs[program].operations
            assert [t.op for t in times] == [operation.op for operation in operations]
    assert runs == ["forward", "loss", "backward", "update"] * 3
    for name, value in plain.instance.parameters().items():
        np.testing.assert_array_equal(instance.get_tensor(name), value)


def test_the_state_of_another_training_is_refused_and_changes_nothing() -> None:
    instance = compiled(stitch.Adam(lr=0.01)).start()
    before = instance.state_dict()
    other = compiled(stitch.SGD(lr=0.01)).start().state_dict()
    with pytest.raises(StitchError, match="exp_avg is missing"):
        instance.load_state_dict(other)
    wrong = before | {"fc1.bias": np.zeros(3, np.float32)}
    with pytest.raises(StitchError, match=r"fc1\.bias is float32"):
        instance.load_state_dict(wrong)
    for name, value in instance.state_dict().items():
        np.testing.assert_array_equal(value, before[name])
