"""`NodeCall`: one ONNX node, its operands looked up, and what it was given as settings."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from stitch.errors import FormatError
from stitch.frontend.onnx.node_refusals import Refusing
from stitch.graph import ComputationGraphBuilder, SymbolicTensor
from stitch.program import Array


@dataclass(frozen=True, slots=True)
class NodeCall(Refusing):
    """A node with its operands looked up: None for an operand that is absent.

    `outputs` are names, empty where a result is not wanted. `version` is the opset it stands in.
    """

    op: str
    domain: str
    version: int
    inputs: tuple[SymbolicTensor | None, ...]
    outputs: tuple[str, ...]
    attributes: dict[str, Any]
    where: str

    def operand(self, index: int) -> SymbolicTensor | None:
        """An operand, None where it is absent."""
        return self.inputs[index] if index < len(self.inputs) else None

    def required(self, index: int) -> SymbolicTensor:
        """An operand that must be there."""
        tensor = self.operand(index)
        if tensor is None:
            raise self.malformed(f"{self.op} needs its operand {index}")
        return tensor

    def whole(self, name: str, default: int = 0) -> int:
        """An attribute that is one whole number."""
        value = self.attributes.get(name, default)
        if not isinstance(value, int):
            raise self.unfit(name, "one whole number", value)
        return value

    def real(self, name: str, default: float = 0.0) -> float:
        """An attribute that is one number."""
        value = self.attributes.get(name, default)
        if not isinstance(value, int | float):
            raise self.unfit(name, "one number", value)
        return float(value)

    def word(self, name: str, default: str, allowed: Collection[str]) -> str:
        """An attribute that is one of some words."""
        value = self.attributes.get(name, default)
        if value not in allowed:
            raise self.unfit(name, f"one of {', '.join(allowed)}", value)
        return str(value)

    def wholes(self, name: str, count: int | None = None) -> tuple[int, ...]:
        """An attribute that is a list of whole numbers, empty where it is absent."""
        return self._listed(name, count, (int,), "a list of whole numbers")

    def words(self, name: str, count: int | None = None) -> tuple[str, ...]:
        """An attribute that is a list of words, empty where it is absent."""
        return self._listed(name, count, (str,), "a list of words")

    def reals(self, name: str, count: int | None = None) -> Array:
        """An attribute that is a list of float32 numbers, empty where it is absent."""
        return np.array(self._listed(name, count, (int, float), "a list of numbers"), np.float32)

    def unfit(self, name: str, expected: str, got: object) -> FormatError:
        """What is said about an attribute that does not fit."""
        return self.malformed(
            f"attribute {name!r} of {self.op} does not fit", expected=expected, got=str(got)[:80]
        )

    def _listed(
        self, name: str, count: int | None, kinds: tuple[type, ...], expected: str
    ) -> tuple[Any, ...]:
        values = self.attributes.get(name, ())
        if not isinstance(values, tuple) or not all(isinstance(one, kinds) for one in values):
            raise self.unfit(name, expected, values)
        if count is not None and len(values) != count:
            raise self.unfit(name, f"{count} elements", len(values))
        return values


#: None stands for a result that is not wanted.
Results = Sequence[SymbolicTensor | None]
_Make = Callable[[ComputationGraphBuilder, NodeCall], Results]
_MakeOne = Callable[[ComputationGraphBuilder, NodeCall], SymbolicTensor]


@dataclass(frozen=True, slots=True)
class Lowering:
    """How an operator is lowered, and all that it may be given; `results` are their indices.
    `decides` is the operand whose data decides the shape of a result, -1 for none.

    What a lowering does not know (an attribute, an operand, a result) is refused, never passed
    over.
    """

    make: _Make
    operands: int
    attributes: frozenset[str]
    results: tuple[int, ...]
    decides: int = -1

    def of(self, builder: ComputationGraphBuilder, call: NodeCall) -> Results:
        """The results of a node; raises `CompileError`, `FormatError`."""
        strange = sorted(call.attributes.keys() - self.attributes)
        given = [i for i, one in enumerate(call.inputs) if one is not None]
        strange += [f"operand {i}" for i in given if i >= self.operands]
        wanted = [i for i, name in enumerate(call.outputs) if name]
        strange += [f"result {i}" for i in wanted if i not in self.results]
        if strange:
            domain = f"{call.domain}." if call.domain else ""
            raise call.refused(
                f"operator {domain}{call.op} is not supported with {', '.join(strange)}"
            )
        return self.make(builder, call)


def to_one(make: _MakeOne, operands: int, attributes: str = "") -> Lowering:
    """A lowering to one result."""
    return to_several(lambda builder, call: [make(builder, call)], operands, attributes, (0,))


def to_several(
    make: _Make, operands: int, attributes: str = "", results: tuple[int, ...] = (0, 1)
) -> Lowering:
    """A lowering to several results."""
    return Lowering(make, operands, frozenset(attributes.split()), results)
