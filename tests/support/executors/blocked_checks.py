"""What blocks of channels give, beside NumPy's kernels, and what operators a model has for them."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import onnx
import pytest

import stitch
from stitch.graph import ComputationGraph
from stitch.program import Program
from stitch.runtime.executors import blocked_convolutions
from stitch.runtime.executors.onnx.blocked_writer import DOMAIN
from stitch.runtime.executors.onnx.onnx_model import write_model


def save_very_much(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if blocks saved very much: small images are put into them too."""
    monkeypatch.setattr(blocked_convolutions, "SAVED_PRODUCT_NS", 1e6)
    monkeypatch.setattr(blocked_convolutions, "SAVED_DEPTHWISE_NS", 1e6)


def program_of(graph: ComputationGraph) -> Program:
    return stitch.compile(graph, target="host").binary.programs[0]


def operators(graph: ComputationGraph) -> Counter[str]:
    """The operators of the model, those in blocks with a star."""
    nodes = onnx.load_from_string(write_model(program_of(graph)).serialized).graph.node
    return Counter(f"{n.op_type}*" if n.domain == DOMAIN else n.op_type for n in nodes)


def results(graph: ComputationGraph, arrays: dict[str, np.ndarray], executor: str) -> list[Any]:
    with stitch.open_device("host", executor=executor) as device:
        found = device.load(stitch.compile(graph, target="host"))(**arrays)
        found = found if isinstance(found, tuple) else (found,)
        return [tensor.numpy() for tensor in found]


def assert_agrees(
    graph: ComputationGraph, arrays: dict[str, np.ndarray], rtol: float = 1e-4
) -> None:
    """NumPy's kernels and the blocks give the same, but for rounding of so many sums."""
    ours, theirs = (results(graph, arrays, name) for name in ("numpy", "onnxruntime"))
    for one, other in zip(ours, theirs, strict=True):
        scale = np.abs(np.where(np.isfinite(one), one, 0)).max(initial=1e-3)
        np.testing.assert_allclose(other, one, rtol=rtol, atol=float(scale) * rtol / 5)
