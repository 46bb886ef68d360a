"""Nodes of an ONNX graph into a builder, one after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from itertools import pairwise
from typing import Any

from onnx import SparseTensorProto

from stitch import ops
from stitch.errors import CompileError, FormatError, StitchError
from stitch.frontend.onnx.calls import (
    Expansion,
    Functions,
    NodeCall,
    constant_array,
    is_upgraded,
    reference_results,
    upgraded,
)
from stitch.frontend.onnx.composed_operators import LOWERINGS, ONNX_RUNTIME
from stitch.frontend.onnx.control_flow import (
    ControlCall,
    Loops,
    OuterValues,
    T,
    check_body,
    known_number,
    lower_loop,
    lower_scan,
    tensors_in,
)
from stitch.frontend.onnx.foreign_nodes import DeclaredValues, lower_foreign, may_be_foreign
from stitch.frontend.onnx.node_refusals import Refusals, Unsupported
from stitch.frontend.onnx.protos import (
    NEWEST_OPSET,
    OnnxModel,
    attributes_of,
    dense_array,
    opsets_of,
    plain_domain,
    tensor_array,
)
from stitch.frontend.onnx.values import (
    FAILED,
    LIST_OPERATORS,
    Bound,
    Dependencies,
    Failed,
    Given,
    ListCall,
    Scope,
    TensorList,
    asked_operand,
    is_listed,
    kind_of,
    lower_list,
)
from stitch.graph import ComputationGraphBuilder, LayerMethods, SymbolicTensor, choose
from stitch.program import int64_array

# --------------------------------------------------------------------------------------------------
# If, Loop, Scan and SequenceMap: the branch that is taken, loops as scans or unrolled.


def lower_control(bodies: Walk, call: ControlCall) -> Sequence[Bound]:
    """What a node makes; raises `Unsupported` where data decides."""
    return _HANDLERS[call.op](bodies, call)


def _if(bodies: Walk, call: ControlCall) -> Sequence[Bound]:
    condition = call.operand(0)
    if isinstance(condition, SymbolicTensor) and bodies.builder.known_data(condition) is None:
        try:
            return _choice(bodies, call, condition)
        except (CompileError, Unsupported):
            bodies.loops.given_up += 1
    name = "then_branch" if known_number(bodies, call, condition) else "else_branch"
    branch = call.body(name)
    return bodies.body(branch, bodies.body_scope(branch, call), (), call)


def _choice(bodies: Walk, call: ControlCall, condition: SymbolicTensor) -> Sequence[Bound]:
    """The results of the side that data choose; raises `StitchError` where sides differ in kind."""
    branches = [call.body(f"{name}_branch") for name in ("then", "else")]
    around = OuterValues(bodies, branches, call)
    #: What the first side gave, twice (the first time its types are found), and the second.
    written: list[list[Bound]] = []

    def side(branch: Any, shared: Scope) -> Callable[..., Sequence[SymbolicTensor]]:
        def write(entered: Sequence[SymbolicTensor]) -> Sequence[SymbolicTensor]:
            results = around.write(branch, shared, (), entered)
            written.append(results)
            if not all(isinstance(value, SymbolicTensor | TensorList) for value in results):
                raise Unsupported(call.op)
            return tensors_in(*results)

        return write

    then, other = [side(branch, bodies.body_scope(branch, call)) for branch in branches]
    made = choose(bodies.inside[-1], condition, (then, other), around.tensors)
    bodies.loops.given_up += 1  # What finding the types left behind.
    if any(list(map(_form, a)) != list(map(_form, b)) for a, b in pairwise(written)):
        raise Unsupported(call.op)
    for result, *sources in zip(made, *(tensors_in(*values) for values in written), strict=True):
        bodies.dependencies.note(call.op, [condition, *sources], [result])
    rest = iter(made)
    return [
        TensorList(tuple(next(rest) for _ in value.items))
        if isinstance(value, TensorList)
        else next(rest)
        for value in written[0]
    ]


def _form(value: Bound) -> int | None:
    """How many tensors a sequence has; None for a tensor."""
    return len(value.items) if isinstance(value, TensorList) else None


def _sequence_map(bodies: Walk, call: ControlCall) -> Sequence[Bound]:
    body, first = call.body("body"), call.operand(0)
    if not isinstance(first, TensorList):
        raise call.malformed("operand 0 of SequenceMap is a sequence", got=kind_of(first))
    check_body(call, body, len(call.operands), 0)
    lists = [value for value in call.operands if isinstance(value, TensorList)]
    if any(len(one.items) != len(first.items) for one in lists):
        raise call.malformed("the sequences of SequenceMap differ in length")
    collected: list[list[SymbolicTensor]] = [[] for _ in body.output]
    shared = bodies.body_scope(body, call)
    for index in range(len(first.items)):
        operands = [v.items[index] if isinstance(v, TensorList) else v for v in call.operands]
        results = bodies.body(body, shared, operands, call)
        for values, value in zip(collected, results, strict=True):
            if isinstance(value, Failed):
                return [FAILED] * call.outputs
            if not isinstance(value, SymbolicTensor):
                raise call.malformed("the body of SequenceMap makes tensors")
            values.append(value)
    return [TensorList(tuple(values)) for values in collected]


_HANDLERS: dict[str, Callable[[Walk, ControlCall], Sequence[Bound]]] = {
    "If": _if,
    "Loop": lower_loop,
    "Scan": lower_scan,
    "SequenceMap": _sequence_map,
}
CONTROL_OPERATORS = frozenset(_HANDLERS)


#: Functions that call functions can describe any number of nodes in a few bytes.
MAX_NODES = 1 << 18
MAX_DEPTH = 50
#: Bodies of branches and loops are written so many times at most, tries counted.
MAX_BODIES = 1 << 14

_OWN = frozenset(("", name) for name in {"Constant"} | CONTROL_OPERATORS | LIST_OPERATORS)


class Walk:
    """Writes the nodes of one model into one builder."""

    def __init__(self, model: OnnxModel, builder: ComputationGraphBuilder, loops: Loops) -> None:
        self.model = model
        self.builder = builder
        self.loops = loops
        self.inside: list[LayerMethods] = [builder]
        self.refusals = Refusals(model.title)
        self.declared = DeclaredValues(model.graph)
        self.dependencies = Dependencies()
        self._functions = Functions(model.proto, model.title)
        self._nodes = 0
        self._inside_of: list[str] = []

    def nodes(self, nodes: Iterable[Any], scope: Scope) -> None:
        """Every node, in order."""
        for index, node in enumerate(nodes):
            self._nodes += 1
            if self._nodes > MAX_NODES:
                raise CompileError(
                    f"the model expands to more than {MAX_NODES} nodes", where=self.model.title
                )
            where = scope.place or f"{self.model.title}:{node.name or f'#{index}'}"
            results: Sequence[Bound] = [FAILED] * len(node.output)
            try:
                with self.builder.at(where):
                    results = self._node(node, scope, where)
            except Unsupported as error:
                self.refusals.unsupported(error.what, where)
            except StitchError as error:
                self.refusals.failed(where, error)
            self._define(node, results, scope, where)

    def look_up(self, name: str, scope: Scope, where: str) -> Bound:
        """What a name stands for in a scope; raises `StitchError`."""
        return scope.look_up(name, where, self._parameter)

    def _parameter(self, tensor: Any) -> SymbolicTensor:
        if isinstance(tensor, SparseTensorProto):
            where = f"{self.model.title}: sparse initializer {tensor.values.name!r}"
            data = dense_array(tensor, self.model.folder, where)
            return self.builder.parameter(tensor.values.name, data)
        where = f"{self.model.title}: initializer {tensor.name!r}"
        return self.builder.parameter(tensor.name, tensor_array(tensor, self.model.folder, where))

    def _define(self, node: Any, results: Sequence[Bound], scope: Scope, where: str) -> None:
        for index, name in enumerate(node.output):
            if not name:
                continue
            try:
                scope.define(name, results[index] if index < len(results) else FAILED, where)
                if index >= len(results):
                    raise FormatError(f"{node.op_type} has no output {index}", where=where)
            except FormatError as error:
                self.refusals.failed(where, error)

    def _node(self, node: Any, scope: Scope, where: str) -> Sequence[Bound]:
        domain = plain_domain(node.domain)
        version = scope.opsets.get(domain)
        if version is None:
            raise FormatError(
                f"{node.op_type} is of domain {node.domain or 'ai.onnx'!r}, "
                "which the model does not import",
                where=where,
            )
        operands = [self.look_up(name, scope, where) for name in node.input]
        attributes = attributes_of(node.attribute, scope.called_with, where)
        local = self._functions.local(node, attributes, where)
        if any(operand is FAILED for operand in operands):
            if local is None and not self._is_supported(node.op_type, domain, version):
                raise Unsupported(_title(node.op_type, domain))
            return [FAILED] * len(node.output)
        given = tuple(o for o in operands if not isinstance(o, Failed))
        names = [scope.titles.get(name, name) for name in node.output]
        # A Split has as many parts as names, wanted or not.
        while names and not names[-1] and node.op_type != "Split":
            names.pop()
        tensors = tuple(o if isinstance(o, SymbolicTensor) else None for o in given)
        call = NodeCall(node.op_type, domain, version, tensors, tuple(names), attributes, where)
        if local is not None:
            return self._expanded(local, call, given)
        if not domain and call.op in CONTROL_OPERATORS:
            control = ControlCall(call.op, given, len(names), attributes, scope, where)
            return lower_control(self, control)
        if not domain and is_listed(call.op, given):
            listed = ListCall(call.op, given, attributes, where, self.builder, self.dependencies)
            return lower_list(listed)
        self._check_plain(call, given)
        if (domain, call.op) == ("", "Constant"):
            return self._constant(call)
        if (domain, call.op) in LOWERINGS:
            return self._lowered(call)
        made = upgraded(self.builder, call)
        if not isinstance(made, NodeCall):
            return made
        if ops.is_defined(made.op, domain):
            if (domain, made.op) == ("", "Size") and tensors and tensors[0] is not None:
                return [self.builder.constant(int64_array([tensors[0].size], ()))]
            return self._apply(made)
        return self._without_definition(node, call)

    def _check_plain(self, call: NodeCall, given: Sequence[Given]) -> None:
        for index, value in enumerate(given):
            if value is not None and not isinstance(value, SymbolicTensor):
                raise call.refused(
                    f"operator {_title(call.op, call.domain)} is not supported on "
                    f"{kind_of(value)} (operand {index})"
                )

    def _is_supported(self, op: str, domain: str, version: int) -> bool:
        known = (domain, op) in _OWN | LOWERINGS.keys() or ops.is_defined(op, domain)
        known |= not domain and is_upgraded(op)
        if known or self._functions.has_schema(op, domain, version):
            return True
        return may_be_foreign(op, domain, version)

    def _apply(self, call: NodeCall) -> Sequence[Bound]:
        for name, value in call.attributes.items():
            if not isinstance(value, int | float | str | tuple):
                raise call.refused(
                    f"{call.op} takes no {type(value).__name__} as attribute {name!r}"
                )
        names = [name or "unused" for name in call.outputs] or ["unused"]
        try:
            results = self._applied(call, call.inputs, names)
        except CompileError:
            self._note_deciding_inputs(call, len(names))
            raise
        self.dependencies.note(call.op, call.inputs, results)
        return results

    def _applied(
        self, call: NodeCall, operands: Sequence[SymbolicTensor | None], names: Sequence[str]
    ) -> Sequence[SymbolicTensor]:
        try:
            return self.builder.apply(call.op, operands, names, call.attributes, call.domain)
        except CompileError:
            known = [None if t is None else self.builder.known_data(t) for t in operands]
            if len(self.inside) == 1 or all(data is None for data in known):
                raise
        # Bodies read parameters as operands, so a setting that is one becomes a constant in them.
        held = [
            tensor if data is None else data for tensor, data in zip(operands, known, strict=True)
        ]
        return self.builder.apply(call.op, held, names, call.attributes, call.domain)

    def _note_deciding_inputs(self, call: NodeCall, outputs: int) -> None:
        known = [None if t is None else self.builder.known_data(t) for t in call.inputs]
        asked = asked_operand(call, known, outputs)
        operand = None if asked is None else call.operand(asked)
        if operand is not None:
            self.dependencies.want(operand)

    def _without_definition(self, node: Any, call: NodeCall) -> Sequence[Bound]:
        types = [None if t is None else t.type for t in call.inputs]
        expansion = self._functions.of_schema(
            node, call.version, call.attributes, types, call.where
        )
        if expansion is not None:
            return self._expanded(expansion, call, call.inputs)
        known = [None if t is None else self.builder.known_data(t) for t in call.inputs]
        if all(t is None or data is not None for t, data in zip(call.inputs, known, strict=True)):
            results = reference_results(node, call, known)
            if results is not None:
                return [self.builder.constant(array) for array in results]
        return self._foreign(call)

    def _lowered(self, call: NodeCall) -> Sequence[Bound]:
        """What an operator of another domain is made of; what a lowering does not know of ONNX
        Runtime's own operators may still be a foreign operator: they mean what it computes."""
        lowering = LOWERINGS[call.domain, call.op]
        for deciding in map(call.operand, lowering.decides):
            if deciding is not None and self.builder.known_data(deciding) is None:
                self.dependencies.want(deciding)
        try:
            results = lowering.of(self.builder, call)
        except CompileError:
            if call.domain != ONNX_RUNTIME:
                raise
            with suppress(CompileError, Unsupported):
                return self._foreign(call)
            raise
        made = [result for result in results if result is not None]
        self.dependencies.note(call.op, call.inputs, made)
        return results

    def _foreign(self, call: NodeCall) -> Sequence[Bound]:
        results = lower_foreign(self.builder, call, self.declared, self.dependencies.want)
        made = [result for result in results if result is not None]
        self.dependencies.note(call.op, call.inputs, made)
        return results

    def _constant(self, call: NodeCall) -> Sequence[Bound]:
        array = constant_array(call, self.model.folder)
        return [self.builder.parameter(call.outputs[0] if call.outputs else "constant", array)]

    def attempt(self, write: Callable[[], T]) -> T | None:
        """What a function writes; None, and nothing said of it, where some of it is refused."""
        refusals, wanted = self.refusals, dict(self.dependencies.wanted)
        self.refusals, result = Refusals(self.model.title), None
        with suppress(StitchError):
            result = write()
        if self.refusals.is_empty and self.dependencies.wanted == wanted:
            self.refusals = refusals
            return result
        self.refusals, self.dependencies.wanted = refusals, wanted
        return None

    def body_scope(self, body: Any, call: ControlCall) -> Scope:
        """The names that every run of a body shares: those around it and its initializers."""
        shared = call.scope.inner()
        shared.add_initializers(body.initializer, body.sparse_initializer)
        return shared

    def body(
        self, body: Any, shared: Scope, operands: Sequence[Given], call: ControlCall
    ) -> list[Bound]:
        """Writes the body of a branch or loop once; loops in loops could ask for it for ever."""
        self.loops.written += 1
        if self.loops.written > MAX_BODIES:
            raise call.refused(
                f"loops and branches within each other come to more than {MAX_BODIES} bodies: "
                "rounds that cannot stay a loop are written out"
            )
        inner = shared.inner()
        for info, operand in zip(body.input, operands, strict=False):
            inner.define(info.name, operand, call.where)
        outputs = [o.name for o in body.output]
        return self._inside(body.node, outputs, inner, call.op, call.where)

    def _expanded(
        self, expansion: Expansion, call: NodeCall, operands: Sequence[Given]
    ) -> Sequence[Bound]:
        body = expansion.body
        if len(operands) > len(body.input) or len(call.outputs) > len(body.output):
            raise call.malformed(
                f"{call.op} has too many operands or outputs",
                expected=f"at most {len(body.input)} and {len(body.output)}",
                got=f"{len(operands)} and {len(call.outputs)}",
            )  # fmt: skip
        # Bodies of ONNX's own functions may leave out what their domain imports anyway.
        opsets = {} if expansion.is_local else {"": NEWEST_OPSET} | dict(self.model.opsets)
        inner = Scope(
            opsets | opsets_of(body.opset_import),
            called_with=expansion.attributes,
            titles=dict(zip(body.output, call.outputs, strict=False)),
            place=call.where,
        )
        for index, name in enumerate(body.input):
            given = operands[index] if index < len(operands) else None
            inner.define(name, given, call.where)
        pairs = zip(call.outputs, body.output, strict=False)
        outputs = [name if wanted else "" for wanted, name in pairs]
        title = _title(call.op, call.domain)
        return self._inside(body.node, outputs, inner, title, call.where)

    def _inside(
        self, nodes: Iterable[Any], outputs: Sequence[str], inner: Scope, title: str, where: str
    ) -> list[Bound]:
        if title in self._inside_of and title not in CONTROL_OPERATORS:
            raise FormatError(f"the function {title} calls itself", where=where)
        if len(self._inside_of) >= MAX_DEPTH:
            raise FormatError(
                f"functions and branches are nested more than {MAX_DEPTH} deep", where=where
            )
        self._inside_of.append(title)
        try:
            self.nodes(nodes, inner)
        finally:
            self._inside_of.pop()
        return [self.look_up(name, inner, where) for name in outputs]


def _title(op: str, domain: str) -> str:
    return f"{domain}.{op}" if domain else op
