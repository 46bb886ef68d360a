"""Operators of other domains as rows: how each is lowered, and all that it may be given.

Comes in: functions from a `NodeCall` to plain operations. Goes out: `Lowering`s. Must not know:
which operators there are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from stitch.frontend.onnx.calls.node_call import NodeCall
from stitch.graph import ComputationGraphBuilder, SymbolicTensor

#: None stands for a result that is not wanted.
Results = Sequence[SymbolicTensor | None]
_Make = Callable[[ComputationGraphBuilder, NodeCall], Results]
_MakeOne = Callable[[ComputationGraphBuilder, NodeCall], SymbolicTensor]


@dataclass(frozen=True, slots=True)
class Lowering:
    """How an operator is lowered, and all that it may be given; `results` are their indices."""

    make: _Make
    operands: int
    attributes: frozenset[str]
    results: tuple[int, ...]


def to_one(make: _MakeOne, operands: int, attributes: str = "") -> Lowering:
    """A lowering to one result."""
    return to_several(lambda builder, call: [make(builder, call)], operands, attributes, (0,))


def to_several(
    make: _Make, operands: int, attributes: str = "", results: tuple[int, ...] = (0, 1)
) -> Lowering:
    """A lowering to several results."""
    return Lowering(make, operands, frozenset(attributes.split()), results)
