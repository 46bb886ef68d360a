"""A node with bodies: its operands and attributes, and what it asks of the walk over a model.

Comes in: a node, the scope around it. Goes out: bodies that are written once; the number that
decides how often, or which. Must not know: which nodes there are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from stitch.frontend.onnx.kept_loops import LoopWriter
from stitch.frontend.onnx.node_refusals import Refusing, Unsupported
from stitch.frontend.onnx.values import Bound, Failed, Given, Scope, kind_of
from stitch.graph import ComputationGraphBuilder, SymbolicTensor
from stitch.program import Array


@dataclass(frozen=True, slots=True)
class ControlCall(Refusing):
    """A node with bodies; `scope` is where a body looks up names that are not its own."""

    op: str
    operands: tuple[Given, ...]
    outputs: int
    attributes: Mapping[str, Any]
    scope: Scope
    where: str

    def operand(self, index: int) -> Given:
        """An operand of any kind, None where it is absent."""
        return self.operands[index] if index < len(self.operands) else None

    def body(self, name: str) -> Any:
        """A graph that is an attribute."""
        graph = self.attributes.get(name)
        if graph is None or not hasattr(graph, "node"):
            missing = "a branch" if self.op == "If" else f"its {name}"
            raise self.malformed(f"{self.op} lacks {missing}")
        return graph

    def integers(self, name: str, count: int) -> tuple[int, ...]:
        """A list of integers, zeros where it is not written."""
        values = self.attributes.get(name) or (0,) * count
        if not isinstance(values, tuple) or len(values) != count:
            raise self.malformed(
                f"attribute {name!r} of {self.op} does not fit", expected=f"{count} integers",
                got=repr(values),
            )  # fmt: skip
        return values


class Bodies(LoopWriter, Protocol):
    """What writes bodies into a graph: the walk over a model."""

    builder: ComputationGraphBuilder

    def body_scope(self, body: Any, call: ControlCall) -> Scope:
        """The names that every run of a body shares."""

    def body(
        self, body: Any, shared: Scope, operands: Sequence[Given], call: ControlCall
    ) -> list[Bound]:
        """Writes a body once and gives its outputs."""


def known_number(
    bodies: Bodies, call: ControlCall, value: Given, *, integers_only: bool = True
) -> Array:
    """The one element of a condition or trip count.

    Where it is not known the inputs that decide it are wanted, with `integers_only` those of real
    numbers not.
    """
    if not isinstance(value, SymbolicTensor):
        raise call.malformed(f"{call.op} is given no tensor where it wants one", got=kind_of(value))
    data = bodies.builder.known_data(value)
    if data is None or data.size != 1:
        bodies.dependencies.want(value, integers_only=integers_only)
        raise Unsupported(call.op)
    return data.reshape(())


def run_once(
    bodies: Bodies, body: Any, operands: Sequence[Given], call: ControlCall
) -> list[Bound]:
    """The outputs of a body that is written once."""
    return bodies.body(body, bodies.body_scope(body, call), operands, call)


def check_body(call: ControlCall, body: Any, inputs: int, outputs: int) -> None:
    """Refuses a body with other slots than the node has."""
    if len(body.input) != inputs or len(body.output) < outputs:
        raise call.malformed(
            f"the body of {call.op} does not fit its operands",
            expected=f"{inputs} inputs and at least {outputs} outputs",
            got=f"{len(body.input)} and {len(body.output)}",
        )  # fmt: skip


def bound(value: Bound) -> Given:
    """A value that was not refused."""
    assert not isinstance(value, Failed)
    return value
