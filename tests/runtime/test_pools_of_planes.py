"""Pools of long images that ONNX Runtime computes plane by plane."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from stitch.graph import ComputationGraph, ComputationGraphBuilder
from stitch.runtime.executors.onnx import expansions
from tests.support.executors.blocked_networks import operators, results

LONG, SHORT = (64, 16, 28, 28), (2, 16, 28, 28)


def pooled(shape: tuple[int, ...], op: str = "MaxPool", **attributes: Any) -> ComputationGraph:
    b = ComputationGraphBuilder("pooled")
    b.output("y", b.op(op, b.input("x", shape, "float32"), **attributes))
    return b.build()


def image(*shape: int) -> dict[str, np.ndarray]:
    return {"x": np.random.default_rng(0).standard_normal(shape, dtype=np.float32)}


HALVED: dict[str, Any] = {"kernel_shape": [2, 2], "strides": [2, 2]}


def test_a_long_image_is_pooled_by_planes() -> None:
    graph = pooled(LONG, **HALVED)
    assert operators(graph) == {"Reshape": 1, "MaxPool": 1}
    ours, theirs = (results(graph, image(*LONG), e) for e in ("numpy", "onnxruntime"))
    np.testing.assert_array_equal(theirs[0], ours[0])


@pytest.mark.parametrize("is_given", [False, True])
def test_what_reads_the_maxima_has_them_in_their_shape(is_given: bool) -> None:
    b = ComputationGraphBuilder("net")
    y = b.op("MaxPool", b.input("x", LONG, "float32"), **HALVED)
    b.output("sum", b.op("Add", y, b.constant(np.ones((1, 16, 1, 1), np.float32))))
    if is_given:
        b.output("y", y)
    graph = b.build()
    assert operators(graph) == {"Reshape": 2, "MaxPool": 1, "Add": 1}
    for one, other in zip(
        *(results(graph, image(*LONG), e) for e in ("numpy", "onnxruntime")), strict=True
    ):
        np.testing.assert_array_equal(other, one)


@pytest.mark.parametrize(
    ("shape", "op", "attributes"),
    [
        (SHORT, "MaxPool", HALVED), (LONG, "AveragePool", HALVED),
        (LONG, "MaxPool", {"kernel_shape": [4, 4]}),
        (LONG, "MaxPool", {"kernel_shape": [3, 3], "strides": [3, 3]}),
        ((64, 16, 784), "MaxPool", {"kernel_shape": [2], "strides": [2]}),
    ],
)  # fmt: skip
def test_what_planes_do_not_make_faster_is_pooled_whole(
    shape: tuple[int, ...], op: str, attributes: dict[str, Any]
) -> None:
    assert operators(pooled(shape, op, **attributes)) == {op: 1}


def test_images_that_lie_in_blocks_stay_there() -> None:
    b = ComputationGraphBuilder("net")
    weight = np.ones((16, 16, 3, 3), np.float32)
    y = b.op("Conv", b.input("x", LONG, "float32"), weight, pads=[1] * 4)
    b.output("y", b.op("MaxPool", y, **HALVED))
    assert operators(b.build()) == {"Conv": 1, "MaxPool": 1}


@pytest.mark.parametrize(
    "attributes",
    [
        HALVED, {"kernel_shape": [3, 3], "strides": [2, 1], "pads": [1, 0, 1, 1]},
        {"kernel_shape": [2, 3], "strides": [2, 2], "ceil_mode": 1},
        {"kernel_shape": [3, 2], "auto_pad": "SAME_LOWER", "dilations": [2, 1]},
        {"kernel_shape": [1, 3], "auto_pad": "SAME_UPPER", "strides": [1, 2]},
    ],
)  # fmt: skip
def test_windows_of_all_kinds(attributes: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expansions, "PLANES_NBYTES", 0)
    graph = pooled((3, 16, 9, 7), **attributes)
    assert operators(graph) == {"Reshape": 1, "MaxPool": 1}
    ours, theirs = (results(graph, image(3, 16, 9, 7), e) for e in ("numpy", "onnxruntime"))
    np.testing.assert_array_equal(theirs[0], ours[0])


def test_places_that_are_asked_for_are_those_in_the_whole_image() -> None:
    b = ComputationGraphBuilder("net")
    y, places = b.op("MaxPool", b.input("x", LONG, "float32"), outputs=2, **HALVED)
    b.output("y", y)
    b.output("places", places)
    graph = b.build()
    for one, other in zip(
        *(results(graph, image(*LONG), e) for e in ("numpy", "onnxruntime")), strict=True
    ):
        np.testing.assert_array_equal(other, one)
