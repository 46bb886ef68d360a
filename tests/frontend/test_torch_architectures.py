"""Whole architectures with random weights agree with eager torch."""

from __future__ import annotations

import pytest

from tests.support.torch.agreement import assert_agrees
from tests.support.torch.architectures import ARCHITECTURES, IDS, Tied, made


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_an_architecture_agrees_with_eager(name: str) -> None:
    assert_agrees(*made(name))


def test_weights_that_are_tied_are_one_constant() -> None:
    graph = assert_agrees(Tied().eval(), (IDS % 20,))
    shapes = [graph.values[constant.value].type.shape for constant in graph.constants]
    assert shapes.count((20, 8)) == 1
