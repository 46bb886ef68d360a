"""Transposed convolutions in blocks of channels, compared with NumPy's kernels."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from stitch.graph import ComputationGraph
from stitch.runtime.executors.onnx.onnx_model import write_model
from tests.support.executors.blocked_checks import (
    assert_agrees,
    operators,
    program_of,
    results,
    save_very_much,
)
from tests.support.executors.blocked_networks import Net, drawn
from tests.support.executors.blocked_reference import blocked_results
from tests.support.grids import in_turn


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small images are put into blocks too."""
    save_very_much(monkeypatch)


def transposed(
    channels: tuple[int, int], kernel: tuple[int, ...] = (3, 3), **attributes: Any
) -> ComputationGraph:
    """One of an image of so many channels to so many."""
    net = Net()
    x = net.input("x", (2, channels[0], *(7, 6)[: len(kernel)]))
    group = attributes.get("group", 1)
    weight = net.input("weight", (channels[0], channels[1] // group, *kernel))
    bias = net.input("bias", (channels[1],))
    return net.graph(net.b.op("ConvTranspose", x, weight, bias, **attributes))


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize(("attributes", "kernel"), in_turn([
        {}, {"pads": [1, 1, 1, 1]}, {"pads": [1, 0, 1, 2]}, {"dilations": [2, 1]},
        {"dilations": [1, 2], "pads": [0, 3, 1, 1]}, {"auto_pad": "SAME_UPPER"},
        {"auto_pad": "SAME_LOWER", "dilations": [2, 1]}, {"output_shape": [7, 8]},
        {"dilations": [2, 2], "output_padding": [1, 0]},
    ], [(3, 3), (2, 3), (1, 1)]))  # fmt: skip
def test_one_without_strides_is_a_convolution_in_blocks(
    kernel: tuple[int, int], attributes: dict[str, Any]
) -> None:
    if kernel == (1, 1) and attributes.keys() & {"pads", "output_shape", "output_padding"}:
        attributes = {}
    graph = transposed((32, 16), kernel, **attributes)
    found = operators(graph)
    assert (found["Conv*"], found["ConvTranspose"]) == (1, 0)
    assert_agrees(graph, drawn(graph, 1))


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize(
    ("channels", "kernel", "attributes"),
    [
        ((32, 16), (3, 3), {"strides": [1, 2]}), ((32, 16), (3, 3), {"group": 2}),
        ((32, 16), (3, 3), {"pads": [3, 0, 0, 0]}), ((33, 16), (3, 3), {}),
        ((32, 8), (3, 3), {}), ((32, 16), (3,), {}),
    ],
)  # fmt: skip
def test_others_stay_as_they_are(
    channels: tuple[int, int], kernel: tuple[int, ...], attributes: dict[str, Any]
) -> None:
    graph = transposed(channels, kernel, **attributes)
    found = operators(graph)
    assert (found["Conv*"], found["ConvTranspose"]) == (0, 1)
    assert_agrees(graph, drawn(graph, 2))


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("block", [8, 16])
@pytest.mark.parametrize("first", [3, 8, 20])
def test_blocks_of_every_processor(first: int, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("blocked_writer", "onnx_model"):
        name = f"stitch.runtime.executors.onnx.{module}.block_channels"
        monkeypatch.setattr(name, lambda: block)
    graph = transposed((first, 24), (3, 2), pads=[1, 0, 1, 1])
    assert operators(graph)["Conv*"] == 1
    arrays, program = drawn(graph, 3), program_of(graph)
    given = {slot.value: arrays[slot.name] for slot in program.inputs}
    (one,) = results(graph, arrays, "numpy")
    (other,) = blocked_results(write_model(program), given, block)
    np.testing.assert_allclose(other, one, rtol=1e-4, atol=float(np.abs(one).max()) * 2e-5)


@pytest.mark.usefixtures("always")
def test_what_follows_one_is_part_of_it() -> None:
    net = Net()
    x, weight = net.input("x", (2, 32, 9, 8)), net.input("weight", (32, 16, 3, 3))
    y = net.norm(net.b.op("ConvTranspose", x, weight, pads=[1] * 4))
    graph = net.graph(net.conv(net.b.op("Relu", y), 16))
    found = operators(graph)
    assert (found["Conv*"], found["ReorderOutput*"]) == (2, 1)
    assert not {"BatchNormalization", "Relu", "ConvTranspose"} & found.keys()
    assert_agrees(graph, drawn(graph, 4))
