"""The device on which torch.compile's graphs run is a device like any other."""

from __future__ import annotations

import pytest
import torch

import stitch
from stitch.runtime.executors import automatic, price_names

NET, X = torch.nn.Linear(4, 2), torch.ones(3, 4)


def test_the_device_of_torch_compile_explains_itself() -> None:
    options = {"target": "wormhole_n150"}
    double = torch.compile(lambda x: x + x, backend="stitch", options=options)
    double(torch.ones(4, 4))
    device = stitch.device_of(options)
    assert isinstance(device, stitch.Device)
    assert "program run" in device.explain()
    assert "dram" in device.memory_report() and device.memory_views()


def test_torch_compile_chooses_by_the_prices_that_it_is_given() -> None:
    options = {"prices": "x86_avx512_intel"}
    torch.compile(NET, backend="stitch", options=options)(X)
    assert "by the prices 'x86_avx512_intel'" in stitch.device_of(options).explain()
    assert stitch.device_of(options) is not stitch.device_of({"prices": "x86_avx512_amd"})


def test_torch_compile_computes_without_onnx_runtime(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(automatic, "find_spec", lambda name: None)
    # A window of its own: the device is made here.
    options = {"window": 59}
    torch.manual_seed(0)
    net, x = torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.GELU()), torch.ones(512, 64)
    found = torch.compile(net, backend="stitch", options=options)(x)
    torch.testing.assert_close(found, net(x))
    prices = stitch.device_of(options).prices
    assert prices is not None and prices.name in price_names()
