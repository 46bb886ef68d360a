"""What a person sees of an object at a prompt: a few lines, whatever the size of the model."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

import stitch


def many() -> stitch.CompiledModel:
    b = stitch.ComputationGraphBuilder("many")
    for i in range(100):
        b.output(f"y{i}", b.input(f"x{i}", (8, 64), "float32") + 1.0)
    return stitch.compile(b.build())


def trained() -> stitch.CompiledModel:
    b = stitch.ComputationGraphBuilder("line")
    x = b.input("x", (16, 10), "float32")
    b.output("y", b.linear(x, b.parameter("w", np.zeros((1, 10), np.float32))))
    return stitch.compile(b.build(), optimizer="sgd", loss="mse")


@pytest.mark.parametrize("make", [many, trained])
def test_a_model_and_its_parts_are_shown_in_five_lines(
    make: Callable[[], stitch.CompiledModel],
) -> None:
    model = make()
    parts = [model, model.graph, model.binary, *model.binary.programs, model.training]
    for shown in map(repr, parts):
        assert len(shown.splitlines()) <= 5 and len(shown) < 1500 and "array(" not in shown
    assert repr(model).splitlines()[0] == f"<CompiledModel for {model.target}:"
