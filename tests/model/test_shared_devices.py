"""Compiled models called as functions share a device: what one gives, the next one takes."""

from __future__ import annotations

import copy
import gc
import os
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

import stitch
from stitch.errors import IncompatibleError, UsageError

X = np.arange(16, dtype=np.float32).reshape(2, 8) / 8


@pytest.fixture
def no_gc() -> Iterator[None]:
    """Without the cyclic garbage collector: what ends here ends by its references."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def linear(rows: int = 8, seed: int = 0) -> torch.nn.Linear:
    torch.manual_seed(seed)
    return torch.nn.Linear(8, rows)


def compiled(module: Any, **options: Any) -> Any:
    return stitch.compile(module, (torch.zeros(2, 8),), **options)


def copies(device: stitch.Device) -> int:
    """How many copies the device has made."""
    return device.history.whole().copies


def test_the_documents_example_runs_as_it_is_written() -> None:
    """The simple example of the document on runtime stitching, but for the name of the compiler."""
    forge: Any = stitch
    PyTorch_module_a, PyTorch_module_b = linear(seed=1), linear(4, seed=2)
    ins_a = torch.from_numpy(X)
    mod_a = forge.compile(PyTorch_module_a, (ins_a,))
    mod_b = forge.compile(PyTorch_module_b, (ins_a,))

    for i in range(10):  # noqa: B007
        outs_a = mod_a(ins_a)
        outs_b = mod_b(outs_a)

    expected = PyTorch_module_b(PyTorch_module_a(ins_a)).detach()
    np.testing.assert_allclose(outs_b.numpy(), expected, atol=1e-6)
    assert outs_a.device is outs_b.device


@pytest.mark.parametrize("target", ["wormhole_n150", "tiny"])
def test_ten_passes_over_two_models_cost_the_one_copy_of_their_input(target: str) -> None:
    a, b = compiled(linear(), target=target), compiled(linear(4), target=target)
    device = b(a(X)).device
    x = device.tensor(X)
    device.flush()
    before = copies(device)
    for _ in range(10):
        y = b(a(x))
    y.numpy()
    assert copies(device) - before == 1


def test_models_of_other_targets_and_executors_have_devices_of_their_own() -> None:
    one, same = compiled(linear()), compiled(linear(), executor="numpy")
    other, there = compiled(linear(), executor="onnxruntime"), compiled(linear(), target="host")
    devices = [model(X).device for model in (one, same, other, there)]
    assert devices[0] is devices[1]
    assert len({id(device) for device in devices}) == 3
    assert [d.executor for d in devices] == ["numpy", "numpy", "onnxruntime", "numpy"]


def test_a_model_runs_where_its_input_lies() -> None:
    model: Any = compiled(linear())
    linked: Any = stitch.link([compiled(linear()), compiled(linear())])
    with stitch.open_device("wormhole_n150", window=1) as device:
        x = device.tensor(X)
        assert model(x).device is device
        assert model(input=x).device is device
        assert linked(x).device is device
        own = model(X)
        assert own.device is not device
        np.testing.assert_array_equal(model(x).numpy(), own.numpy())
    with pytest.raises(stitch.TaskError, match="closed"):
        model(x)
    np.testing.assert_array_equal(model(X).numpy(), own.numpy())


def test_an_executor_that_a_model_was_compiled_for_is_not_replaced_by_that_of_its_input() -> None:
    a, b = compiled(linear()), compiled(linear(), executor="onnxruntime")
    with pytest.raises(UsageError, match=r"executor=numpy(.|\n)*\.numpy\(\)"):
        b(a(X))
    assert a(b(X)).device.executor == "onnxruntime"


def test_an_input_on_another_machine_is_refused_with_both_names() -> None:
    model = compiled(linear())
    with (
        stitch.open_device("tiny") as device,
        pytest.raises(IncompatibleError, match=r"wormhole_n150(.|\n)*tiny"),
    ):
        model(device.tensor(X))


def test_the_shared_device_closes_with_the_last_model_that_uses_it(no_gc: None) -> None:
    a, b = compiled(linear(), target="tiny"), compiled(linear(), target="tiny")
    device = b(a(X)).device
    del a
    assert not device.is_closed
    np.testing.assert_array_equal(b(X).numpy(), b(X).numpy())
    del b
    assert device.is_closed
    c = compiled(linear(), target="tiny")
    assert c(X).device is not device


def test_the_shared_device_of_a_model_in_a_reference_cycle_closes_with_it() -> None:
    """It may be told before the model's program, whose constants lie on it, is given back."""
    cycle: list[Any] = [compiled(linear(), target="tiny")]
    cycle.append(cycle)
    device = cycle[0](X).device
    del cycle
    gc.collect()
    assert device.is_closed


def test_a_result_outlives_the_models_that_made_it(no_gc: None) -> None:
    expected = compiled(linear(), target="tiny")(X).numpy()
    pending = compiled(linear(), target="tiny")(X)
    np.testing.assert_array_equal(pending.numpy(), expected)
    ready = compiled(linear(), target="tiny")(X)
    ready.numpy()
    np.testing.assert_array_equal(ready.numpy(), expected)
    assert not ready.device.is_closed


def test_a_shared_device_that_was_closed_is_replaced() -> None:
    model = compiled(linear())
    first = model(X)
    expected, device = first.numpy(), first.device
    device.close()
    np.testing.assert_array_equal(model(X).numpy(), expected)


def test_a_copy_of_a_model_is_called_apart() -> None:
    model = compiled(linear(), target="tiny")
    expected = model(X).numpy()
    for twin in (copy.copy(model), copy.deepcopy(model)):
        assert twin.session is not model.session
        assert twin.encode() == model.encode()
        np.testing.assert_array_equal(twin(X).numpy(), expected)
        assert model(twin(X)).shape == (2, 8)


def test_models_are_called_from_several_threads_at_once() -> None:
    models = [compiled(linear(seed=n), target="tiny") for n in range(4)]
    expected = [linear(seed=n)(torch.from_numpy(X)).detach().numpy() for n in range(4)]
    start, found = threading.Barrier(4), [X] * 4

    def call(n: int) -> None:
        start.wait()
        found[n] = models[n](X)

    threads = [threading.Thread(target=call, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({id(y.device) for y in found}) == 1
    for y, wanted in zip(found, expected, strict=True):
        np.testing.assert_allclose(y, wanted, atol=1e-6)


def test_after_a_fork_the_child_shares_a_device_of_its_own() -> None:
    model = compiled(linear(), target="tiny")
    expected, read, write = model(X).numpy(), *os.pipe()
    child = os.fork()
    if not child:
        try:
            os.write(write, model(model(X)).device.executor.encode() + model(X).numpy().tobytes())
        finally:
            os._exit(0)
    os.close(write)
    os.waitpid(child, 0)
    assert os.read(read, 1000) == b"numpy" + expected.tobytes()
    os.close(read)
