"""A node with bodies: its operands and attributes, and what it asks of the walk over a model.

`OuterValues` are what a body reads of the values around it: what may not run at all (the side of a
choice, the rounds of a loop that ends by data) is given these as operands, so that nothing of it is
computed outside.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from stitch.frontend.onnx.kept_loops import LoopWriter
from stitch.frontend.onnx.node_refusals import Refusing, Unsupported
from stitch.frontend.onnx.values import Bound, Failed, Given, Scope, TensorList, kind_of
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

    def look_up(self, name: str, scope: Scope, where: str) -> Bound:
        """What a name stands for in a scope."""

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


class OuterValues:
    """The tensors around bodies that these read and that nobody knows yet."""

    def __init__(self, bodies: Bodies, graphs: Sequence[Any], call: ControlCall) -> None:
        self._bodies, self._call = bodies, call
        names = dict.fromkeys(name for graph in graphs for name in names_in(graph))
        self._values = {
            name: bodies.look_up(name, call.scope, call.where)
            for name in names
            if call.scope.has(name)
        }
        tensors = [t for value in self._values.values() for t in tensors_in(value)]
        unknown = [t for t in tensors if bodies.builder.known_data(t) is None]
        self.tensors = list({(id(t.builder), t.index): t for t in unknown}.values())

    def write(
        self, body: Any, shared: Scope, operands: Sequence[Given], entered: Sequence[SymbolicTensor]
    ) -> list[Bound]:
        """Write a body where `entered` stand for the tensors around it; raises `StitchError`.

        Args:
            shared: What `Bodies.body_scope` gave for the body.
            operands: The body's own inputs.
        """
        bodies, call = self._bodies, self._call
        inside = {}
        for outer, inner in zip(self.tensors, entered, strict=True):
            bodies.dependencies.note(call.op, [outer], [inner])
            inside[id(outer.builder), outer.index] = inner
        scope = shared.inner()
        own = {tensor.name for tensor in body.initializer}
        own |= {tensor.values.name for tensor in body.sparse_initializer}
        for name, value in self._values.items():
            if name not in own:
                scope.define(name, _replaced(value, inside), call.where)
        within: list[Any] = [t.builder for t in (*entered, *tensors_in(*operands))][:1]
        bodies.inside += within
        try:
            return bodies.body(body, scope, operands, call)
        finally:
            del bodies.inside[len(bodies.inside) - len(within) :]


def names_in(graph: Any) -> dict[str, None]:
    """The names that the nodes and outputs of a body read, also within bodies inside it."""
    pending, found = [graph], dict[str, None]()
    while pending:
        inner = pending.pop()
        found |= dict.fromkeys(output.name for output in inner.output)
        for node in inner.node:
            found |= dict.fromkeys(name for name in node.input if name)
            for attribute in node.attribute:
                pending += [*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs]
    return found


def tensors_in(*values: object) -> list[SymbolicTensor]:
    """The tensors among values, those of sequences as well."""
    found: list[SymbolicTensor] = []
    for value in values:
        found += value.items if isinstance(value, TensorList) else ()
        found += [value] if isinstance(value, SymbolicTensor) else []
    return found


def _replaced(value: Bound, inside: Mapping[tuple[int, int], SymbolicTensor]) -> Bound:
    def of(tensor: SymbolicTensor) -> SymbolicTensor:
        return inside.get((id(tensor.builder), tensor.index), tensor)

    if isinstance(value, TensorList):
        return TensorList(tuple(map(of, value.items)))
    return of(value) if isinstance(value, SymbolicTensor) else value


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
