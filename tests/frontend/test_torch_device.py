"""The device on which torch.compile's graphs run is a device like any other."""

from __future__ import annotations

import torch

import stitch
from stitch.frontend.torch_compile import device_of


def test_the_device_of_torch_compile_explains_itself() -> None:
    options = {"target": "wormhole_n150"}
    double = torch.compile(lambda x: x + x, backend="stitch", options=options)
    double(torch.ones(4, 4))
    device = device_of(options)
    assert isinstance(device, stitch.Device)
    assert "program run" in device.explain()
    assert "dram" in device.memory_report() and device.memory_views()
