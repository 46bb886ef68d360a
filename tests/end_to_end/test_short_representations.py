"""What a person sees of an object at a prompt: a few lines, whatever the size of the model."""

from __future__ import annotations

import numpy as np
import pytest

import stitch
from stitch.program import Array


def layer(x: Array) -> Array:
    result: Array = np.maximum(x @ np.ones((64, 64), np.float32), np.float32(0))
    return result


def many(*xs: Array) -> tuple[Array, ...]:
    return tuple(x + np.float32(1) for x in xs)


def trained() -> stitch.CompiledModel:
    b = stitch.ComputationGraphBuilder("line")
    x = b.input("x", (16, 10), "float32")
    b.output("y", b.linear(x, b.parameter("w", np.zeros((1, 10), np.float32))))
    return stitch.compile(b.build(), optimizer="sgd", loss="mse")


X = np.ones((8, 64), np.float32)
MODELS = {
    "one layer": lambda: stitch.compile(layer, [X]),
    "a hundred slots": lambda: stitch.compile(many, [X] * 100),
    "a training": trained,
}


@pytest.mark.parametrize("kind", MODELS)
def test_a_model_and_what_it_is_made_of_are_shown_in_five_lines(kind: str) -> None:
    model = MODELS[kind]()
    parts = [model, model.graph, model.binary, *model.binary.programs]
    if model.training is not None:
        parts += [model.training]
    for part in parts:
        shown = repr(part)
        assert len(shown.splitlines()) <= 5, shown
        assert len(shown) < 1500, shown
        assert "array(" not in shown
    assert repr(model).splitlines()[0] == f"<CompiledModel for {model.target}:"


def test_a_program_says_its_slots_and_how_much_is_in_it() -> None:
    (program,) = stitch.compile(layer, [X], name="layer").binary.programs
    # The zero of the maximum, and the weights of 64 x 64.
    assert repr(program) == (
        "<Program layer(x: 8x64xf32) -> output: 8x64xf32; 2 operations, 2 constants of 16388 B>"
    )
