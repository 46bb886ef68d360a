"""Lower the nodes of an ATen graph into a builder, one after the other."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from stitch.errors import CompileError, InternalError, StitchError
from stitch.frontend.torch.aten_call import (
    Call,
    ComplexTensor,
    Lowering,
    is_complex,
    type_of_tensor,
)
from stitch.frontend.torch.lowering import CHECKS, complex_lowering_of, lowering_of
from stitch.frontend.torch.refused_nodes import (
    COMPILE_REMEDY,
    Refusal,
    RefusedNodes,
    briefly,
    location_of,
    name_of,
    operator_of,
)
from stitch.frontend.torch.symbolic_export import TorchSizes
from stitch.frontend.torch.torch_internals import pytree
from stitch.graph import ComputationGraphBuilder, SymbolicTensor, choose, repeat_while
from stitch.program import ValueType

# Control flow: `torch.cond` and `while_loop` ------------------------------------------------------


@dataclass(frozen=True, slots=True)
class InnerGraph:
    """A graph module that is an attribute of another one, with its path."""

    target: str
    module: Any


#: Lowers an inner graph on operands; returns the arguments of its output node.
WriteInner = Callable[[InnerGraph, Sequence[Any]], Sequence[Any]]
#: Maps a call, a `WriteInner` and the operands to one value per result.
Control = Callable[..., Sequence[SymbolicTensor]]


def _cond(
    call: Call, write: WriteInner, predicate: Any, then: InnerGraph, otherwise: InnerGraph,
    operands: Sequence[Any] = (),
) -> Sequence[SymbolicTensor]:  # fmt: skip
    if not isinstance(predicate, SymbolicTensor):
        raise CompileError(
            "the condition of torch.cond is not a tensor", expected="a boolean tensor",
            got=repr(predicate), remedy="branch in Python: the condition is known at compile time",
        )  # fmt: skip

    def side(graph: InnerGraph) -> Callable[..., Sequence[SymbolicTensor]]:
        def written(tensors: Sequence[SymbolicTensor]) -> Sequence[SymbolicTensor]:
            return _tensors(write(graph, _in_place(operands, tensors)))

        return written

    sides = side(then), side(otherwise)
    return choose(call.builder, predicate, sides, _symbolic(operands), _kinds(call))


def _while_loop(
    call: Call, write: WriteInner, asked: InnerGraph, following: InnerGraph,
    carried: Sequence[Any], additional: Sequence[Any] = (),
) -> Sequence[SymbolicTensor]:  # fmt: skip
    _kinds(call)
    states, many = _tensors(carried), len(carried)

    def written(graph: InnerGraph, tensors: Sequence[SymbolicTensor]) -> list[SymbolicTensor]:
        read = _in_place(additional, tensors[many:])
        return _tensors(write(graph, [*tensors[:many], *read]))

    return repeat_while(
        call.builder, lambda tensors: written(asked, tensors)[0],
        lambda tensors: written(following, tensors), states, _symbolic(additional),
    )  # fmt: skip


def _symbolic(operands: Sequence[Any]) -> list[SymbolicTensor]:
    """The operands that are tensors, not sizes."""
    return [operand for operand in operands if isinstance(operand, SymbolicTensor)]


def _in_place(operands: Sequence[Any], tensors: Sequence[SymbolicTensor]) -> list[Any]:
    """The operands with their tensors replaced."""
    rest = iter(tensors)
    return [next(rest) if isinstance(o, SymbolicTensor) else o for o in operands]


def _kinds(call: Call) -> list[ValueType]:
    kinds = [kind for kind in call.results if kind is not None]
    if len(kinds) < len(call.results):
        raise CompileError("a result of a branch or loop is not a tensor")
    return kinds


def _tensors(values: Sequence[Any]) -> list[SymbolicTensor]:
    for value in values:
        if not isinstance(value, SymbolicTensor):
            raise CompileError(
                "an operand or result of a branch or loop is not a real tensor",
                got=type(value).__name__,
            )
    return list(values)


CONTROL: Mapping[Any, Control] = {
    torch.ops.higher_order.cond: _cond, torch.ops.higher_order.while_loop: _while_loop,
}  # fmt: skip

# Graphs -------------------------------------------------------------------------------------------

_NUMBERS = (torch.SymInt, torch.SymFloat, torch.SymBool)
#: Functions of numbers of torch, as Python's.
_OF_SIZES: Mapping[Any, Callable[..., Any]] = {
    torch.sym_float: float,
    torch.sym_not: operator.not_,
    torch.sym_int: int,
}


@dataclass(frozen=True, slots=True)
class Unreadable:
    """The value of a node that no program can read; nodes that read it are not compiled either."""

    reason: str

    @staticmethod
    def because(error: StitchError) -> Unreadable:
        """A value of an unsupported type."""
        return Unreadable(f"it reads a value that programs cannot read: {briefly(error)}")


_FAILED = Unreadable("it reads a value that is not compiled")


def lower_graph(
    graph: Any, builder: ComputationGraphBuilder, bindings: Mapping[str, Callable[[], Any]],
    attributes: Callable[[str], Any], title: str, remedy: str = COMPILE_REMEDY,
    sizes: TorchSizes | None = None,
) -> Sequence[Any]:  # fmt: skip
    """Add the operations of an fx graph to a builder.

    Args:
        graph: A graph of ATen operators.
        builder: Receives the operations.
        bindings: By the name of a placeholder, a function that returns its value; called only for
            placeholders that are read.
        attributes: Returns the value of a get_attr target.
        title: The module's name in errors.
        remedy: The remedy in errors.
        sizes: The symbolic sizes of the graph.

    Returns:
        The arguments of the graph's output node.

    Raises:
        CompileError: lists each operator that cannot be compiled with its source line.
    """
    walk = _Walk(builder, bindings, attributes, RefusedNodes(title, remedy), sizes=sizes)
    values = walk.graph(graph)
    walk.refusals.raise_any()
    unread = any(isinstance(value, Unreadable) for value in pytree.tree_leaves(values))
    assert not unread, "unreported refusal"
    return values


def try_lowering(
    graph: Any, builder: ComputationGraphBuilder, bindings: Mapping[str, Callable[[], Any]],
    attributes: Callable[[str], Any], sizes: TorchSizes | None = None,
) -> tuple[Sequence[Any], Sequence[Refusal], Sequence[Any]]:  # fmt: skip
    """Add the operations as `lower_graph` does, but return refusals instead of raising them.

    The result of a refused node becomes an input, so a node is refused only for itself, or because
    no program can read its operands. With refusals, discard the builder.

    Returns:
        The arguments of the output node, the refused nodes, and for each operation of the builder
        the node that it was added for.
    """
    walk = _Walk(builder, bindings, attributes, RefusedNodes(""), goes_on=True, sizes=sizes)
    values = walk.graph(graph)
    return values, walk.refusals.each, walk.nodes


@dataclass
class _Walk:
    builder: ComputationGraphBuilder
    bindings: Mapping[str, Callable[[], Any]]
    attributes: Callable[[str], Any]
    refusals: RefusedNodes
    #: Continue after a refused node: its result becomes an input.
    goes_on: bool = False
    values: dict[Any, Any] = field(default_factory=dict)
    #: For each operation of the builder, the node that it was added for.
    nodes: list[Any] = field(default_factory=list)
    #: The symbolic sizes of the graph.
    sizes: TorchSizes | None = None

    def graph(self, graph: Any) -> Sequence[Any]:
        outputs: Sequence[Any] = ()
        for node in graph.nodes:
            if node.op == "output":
                outputs = node.args[0]
            else:
                self.node(node)
                missing = len(self.builder.operations) - len(self.nodes)
                self.nodes += [node] * missing
        values = torch.fx.node.map_arg(outputs, self.value)
        return tuple(values) if isinstance(values, list | tuple) else (values,)

    def value(self, node: Any) -> Any:
        """The value of a node; constants are added to the builder when they are first read."""
        if node not in self.values:
            # Not in advance: an unused buffer must not become a constant.
            value = (
                self.bindings[node.name]()
                if node.op == "placeholder"
                else self.attributes(node.target)
            )
            if isinstance(value, torch.fx.GraphModule):
                value = InnerGraph(node.target, value)
            self.values[node] = value
        return self.values[node]

    def node(self, node: Any) -> None:
        if node.op in ("placeholder", "get_attr") or node.target in CHECKS:
            return
        where = location_of(node)
        if self.sizes is not None and isinstance(node.meta.get("val"), _NUMBERS):
            with self.builder.at(where):
                try:
                    self.values[node] = self._number(node, self.sizes)
                except CompileError as error:
                    self.values[node] = _FAILED
                    self.refusals.failed(node, where, error)
            return
        if isinstance(node.meta.get("val"), _NUMBERS) and lowering_of(node.target) is None:
            # A size that depends on data: the operator that it comes from is refused already.
            self.values[node] = _FAILED
            self.refusals.note(node, where, "its result is a number")
            return
        operands: list[Any] = []
        torch.fx.node.map_arg((node.args, node.kwargs), operands.append)
        with self.builder.at(where):
            try:
                if not is_known(node):
                    self.refusals.unsupported(node, where, _case(node))
                elif (unread := self._unreadable(operands)) is not None:
                    if self.goes_on:
                        self.refusals.note(node, where, unread.reason)
                else:
                    self.values[node] = self._lowered(node)
            except StitchError as error:
                if isinstance(error, InternalError) and not self.goes_on:
                    raise
                self.refusals.failed(node, where, error)
            except Exception as error:
                if not self.goes_on:
                    raise
                self.refusals.note(node, where, f"its lowering failed: {error!r}")
            if node not in self.values:
                self.values[node] = self._refused_value(node)

    def _number(self, node: Any, sizes: TorchSizes) -> Any:
        """The size of a node; a real number or a flag that is computed from sizes is known at the
        sizes of this compilation only."""
        promised = node.meta["val"]
        if isinstance(promised, torch.SymInt):
            return sizes.size(promised)
        compute = _OF_SIZES.get(node.target, node.target)
        operands = torch.fx.node.map_arg(node.args, self.value)
        is_python = getattr(compute, "__module__", "") in ("_operator", "math", "builtins")
        if not is_python or any(isinstance(operand, Unreadable) for operand in operands):
            raise CompileError("a number is computed from sizes or data", got=name_of(node))
        return compute(*operands)

    def _unreadable(self, operands: Sequence[Any]) -> Unreadable | None:
        values = (self.value(operand) for operand in operands)
        return next((value for value in values if isinstance(value, Unreadable)), None)

    def _refused_value(self, node: Any) -> Any:
        """The inputs that replace the results of a refused node."""
        if not self.goes_on:
            return _FAILED
        promised = node.meta.get("val")
        if isinstance(promised, list | tuple):
            return [self._input(f"{node.name}__{i}", each) for i, each in enumerate(promised)]
        return self._input(node.name, promised)

    def _input(self, name: str, promised: Any) -> Any:
        try:
            kind = readable_type(promised, self.sizes)
            slot = self.builder.input(name, kind.shape, kind.data_type)
            return ComplexTensor(slot) if is_complex(promised) else slot
        except StitchError as error:
            return Unreadable.because(error)

    def _lowered(self, node: Any) -> Any:
        arguments = torch.fx.node.map_arg(node.args, self.value)
        named = torch.fx.node.map_arg(node.kwargs, self.value)
        if node.target is operator.getitem:
            return arguments[0][arguments[1]]
        promised = node.meta["val"]
        several = isinstance(promised, list | tuple)
        values = promised if several else (promised,)
        call = Call(
            self.builder,
            tuple(_type_of(value, self.sizes) for value in values),
            _used(node) if several else frozenset((0,)),
            tuple(a.meta.get("val") if isinstance(a, torch.fx.Node) else a for a in node.args),
            bool(values) and is_complex(values[0]),
        )
        control = CONTROL.get(node.target)
        if control is not None:
            results: Any = control(call, self._inner, *arguments, **named)
        else:
            lowering = _lowering(node)
            assert lowering is not None, "a node without lowering is refused"
            results = lowering(call, *arguments, **named)
        _check_promise(node, call, results if several else (results,))
        return results

    def _inner(self, inner: InnerGraph, operands: Sequence[Any]) -> Sequence[Any]:
        """Lower a graph that is an operand; raise `CompileError` if one of its nodes is refused."""
        graph = inner.module.graph
        placeholders = [node for node in graph.nodes if node.op == "placeholder"]
        walk = _Walk(
            self.builder, {}, lambda target: self.attributes(f"{inner.target}.{target}"),
            RefusedNodes(""), values=dict(zip(placeholders, operands, strict=True)),
            sizes=self.sizes,
        )  # fmt: skip
        values = walk.graph(graph)
        refused = walk.refusals.each
        if refused:
            lines = dict.fromkeys(f"{one.operator} ({one.reason})" for one in refused)
            raise CompileError(
                f"its graph cannot be compiled: {', '.join(lines)}", where=refused[0].where
            )
        return values


def _check_promise(node: Any, call: Call, results: Any) -> None:
    """Raise `InternalError` if a result that is read has another type than in torch's graph: its
    readers were traced for that type."""
    for number, promised in enumerate(call.results):
        if promised is None or number not in call.used:
            continue
        result = results[number] if number < len(results) else None
        if isinstance(result, ComplexTensor):
            result = result.pairs
        if not (isinstance(result, SymbolicTensor) and result.type == promised):
            raise InternalError(
                f"internal error: result {number} of the lowering of operator "
                f"{operator_of(node)} has another type than in torch's graph",
                where=location_of(node),
                expected=promised.text(),
                got=result.type.text() if isinstance(result, SymbolicTensor) else repr(result),
                remedy="please report it; " + COMPILE_REMEDY,
            )


def is_known(node: Any) -> bool:
    """Whether there is a lowering of a node's operator."""
    if node.op != "call_function":
        return False
    if node.target in CONTROL:
        return not has_complex(node)
    return node.target is operator.getitem or _lowering(node) is not None


def _case(node: Any) -> str:
    """Follows an operator's name in an error if it is lowered, but not for complex numbers."""
    is_known = node.target in CONTROL or lowering_of(operator_of(node)) is not None
    return " for complex numbers" if is_known and has_complex(node) else ""


def _lowering(node: Any) -> Lowering | None:
    lowering = complex_lowering_of if has_complex(node) else lowering_of
    return lowering(node.target)


def has_complex(node: Any) -> bool:
    """Whether a node has a complex operand or result."""
    traced = [one.meta.get("val") for one in (node, *node.all_input_nodes)]
    written = (node.args, node.kwargs)
    return any(map(is_complex, (*pytree.tree_leaves(traced), *pytree.tree_leaves(written))))


def _used(node: Any) -> frozenset[int]:
    """The numbers of an operator's results that are read."""
    return frozenset(
        user.args[1] for user in node.users if user.target is operator.getitem and user.users
    )


def _type_of(promised: Any, sizes: TorchSizes | None = None) -> ValueType | None:
    if not isinstance(promised, torch.Tensor):
        return None
    if promised.device.type not in ("cpu", "cuda") or promised.layout is not torch.strided:
        raise CompileError(
            "a tensor of the graph is not a dense tensor on the processor or a CUDA card",
            got=f"{promised.layout} on {promised.device}",
            remedy="call .to('cpu') and .to_dense() before the compiled code",
        )
    if sizes is not None:
        kind = type_of_tensor(promised)
        return ValueType(sizes.shape(kind.shape), kind.data_type)
    if not all(isinstance(d, int) for d in promised.shape):
        raise CompileError(
            "the shape of its result depends on data",
            remedy="use torch.where(mask, x, other), or torch.compile, which breaks the graph "
            "there",
        )
    return type_of_tensor(promised)


def readable_type(promised: Any, sizes: TorchSizes | None = None) -> ValueType:
    """The type of a traced tensor, of a complex one that of its pairs; raises `CompileError` for
    values that programs cannot read. `sizes`: the symbolic sizes of the graph."""
    kind = _type_of(promised, sizes)
    if kind is None:
        raise CompileError("programs read only tensors", got=type(promised).__name__)
    return kind
