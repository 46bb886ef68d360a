"""The device on which torch.compile's graphs run is a device like any other."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import stitch
from stitch.errors import UsageError

NET, X = torch.nn.Linear(4, 2), torch.ones(3, 4)


def test_the_device_of_torch_compile_explains_itself() -> None:
    options = {"target": "wormhole_n150"}
    double = torch.compile(lambda x: x + x, backend="stitch", options=options)
    double(torch.ones(4, 4))
    device = stitch.device_of(options)
    assert isinstance(device, stitch.Device)
    assert "program run" in device.explain()
    assert "dram" in device.memory_report() and device.memory_views()


@pytest.mark.parametrize(
    ("work", "said"),
    [
        (lambda: stitch.device_of({"tagret": "tiny"}), "did you mean 'target'"),
        (lambda: stitch.open_device("tiny", executor="onnx"), "did you mean 'onnxruntime'"),
        (lambda: stitch.compile(NET), r"stitch.compile\(module, \(x,\)\)"),
        (lambda: stitch.compile(NET, (X,), loss="mze", optimizer="sgd"), "did you mean 'mse'"),
        (lambda: stitch.compile(NET, (X,), loss="mse", optimizer="adamx"), "did you mean 'adam"),
    ],
)
def test_a_mistake_of_torch_s_users_is_answered_with_what_was_meant(
    work: Callable[[], object], said: str
) -> None:
    with pytest.raises(UsageError, match=said):
        work()
