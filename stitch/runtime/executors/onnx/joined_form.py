"""The joined form of a linked program: the optimised forms of its parts, joined by their names.

Comes in: a program with seams. Goes out: one form, which is run without further optimisation.
ONNX Runtime fuses operations, and what it fuses rounds otherwise. So it optimises each part by
itself, as it did when that was a program of its own, and sees the whole only to run it: the same
bits, in one call. Must not know sessions.

Between two parts values are rounded as they are when they are stored. A value that a part gives in
chunks gets its shape back, which is a view. What a part gives and nobody reads is not computed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import onnx
from onnx import helper, numpy_helper

from stitch.errors import CompileError
from stitch.ops import onnx_code
from stitch.program import Array, Contents, Program, Seam
from stitch.runtime.executors.host import PartOfProgram, WholeProgram, compute_type
from stitch.runtime.executors.onnx.form_writer import (
    IR_VERSION,
    OPSET,
    OnnxForm,
    all_nodes,
    names_read,
    placeholder,
    value_info,
    value_name,
)
from stitch.runtime.executors.onnx.model_form import onnx_form
from stitch.runtime.executors.onnx.optimised_form import OptimisedForm, optimised_form, plain_form
from stitch.runtime.executors.onnx.session import EXPECT


def joined_form(program: Program) -> OnnxForm:
    """The form of a program with seams; raises one of `REFUSALS` for what cannot be run."""
    _check_expectations(program)
    forms, joint = _OptimisedForms(), _Joint(program)
    whole = WholeProgram(program)
    for seam, operations in zip(program.seams or (Seam(0),), program.parts(), strict=True):
        part = PartOfProgram(whole, operations, frozenset(seam.held))
        joint.add(part, forms.of(part))
    return joint.form()


def _check_expectations(program: Program) -> None:
    """What a program expects of an input is checked before it runs, so it must be an input."""
    given = {slot.value for slot in program.inputs}
    for operation in program.operations:
        if (operation.domain, operation.op) == EXPECT and operation.inputs[1] not in given:
            raise CompileError("only inputs are compared, and only with constants")


class _OptimisedForms:
    """Optimised forms by what they are made of: many equal parts cost one."""

    def __init__(self) -> None:
        self._contents = Contents()
        self._found: dict[tuple[object, ...], OptimisedForm] = {}

    def of(self, part: PartOfProgram) -> OptimisedForm:
        """The optimised form of a part; a `Cast` of a wire stays as it is."""
        form = onnx_form(part.program_of_part())
        if all(operation.op == "Cast" for operation in part.operations):
            return plain_form(form)
        weights = tuple([self._contents.number(data, data.dtype.str) for _, data in form.weights])
        key = form.model, weights, form.without
        found = self._found.get(key)
        if found is None:
            found = self._found[key] = optimised_form(form)
        return found


class _Joint:
    """The model under construction: nodes of all parts, under names of the whole."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.nodes: list[onnx.NodeProto] = []
        self.initializers: list[onnx.TensorProto] = []
        self.contents = Contents()
        self.opsets = {"": OPSET}
        self.chunked: dict[int, tuple[int, ...]] = {}
        #: The name under which later parts read a value.
        self.names = {slot.value: value_name(slot.value) for slot in program.inputs}
        self.parts = 0

    def add(self, part: PartOfProgram, optimised: OptimisedForm) -> None:
        """Append a part; what it reads was given by parts before it, or is an input."""
        values = {number: value for value, number in part.numbers.items()}
        form = optimised.form
        names = {value_name(n): self.names[values[n]] for n in form.inputs}
        names |= {value_name(n): value_name(values[n]) for n in form.outputs}
        names |= {name: self._weight(data) for name, data in optimised.weights.items()}
        renamed = onnx.GraphProto()
        renamed.CopyFrom(optimised.graph)
        _rename(renamed, _Names(names, f"p{self.parts}."))
        self.nodes += renamed.node
        self.initializers += renamed.initializer
        used = {node.domain for node in all_nodes(renamed.node)}
        for domain, version in optimised.opsets.items():
            if domain in used and self.opsets.setdefault(domain, version) != version:
                raise CompileError(
                    f"its parts hold operators of {domain} of opset {version} and of "
                    f"{self.opsets[domain]}, which one model cannot"
                )
        rounded = {v for o in part.operations if o.op != "Cast" for v in o.outputs}
        for number in form.outputs:
            value = values[number]
            self.names[value] = self._between(value, form.chunked.get(number), number in rounded)
        self.parts += 1

    def form(self) -> OnnxForm:
        """The finished model: what its outputs need of all that was added."""
        program = self.program
        outputs = tuple(slot.value for slot in program.outputs)
        nodes = _needed(self.nodes, map(value_name, outputs))
        read = {name for node in nodes for name in names_read(node)}
        inputs = tuple(s.value for s in program.inputs if value_name(s.value) in read)
        weights = [(f"w{i}", data) for i, data in enumerate(self.contents.arrays)]
        weights = [(name, data) for name, data in weights if name in read]
        constants = [tensor for tensor in self.initializers if tensor.name in read]
        graph = helper.make_graph(
            nodes, "program",
            [value_info(v, program.values[v].type, program.values[v].type.shape) for v in inputs],
            [value_info(v, program.values[v].type, self._shape(v)) for v in outputs],
            [*constants, *(placeholder(name, data) for name, data in weights)],
        )  # fmt: skip
        opsets = [helper.make_opsetid(domain, number) for domain, number in self.opsets.items()]
        model = helper.make_model(graph, opset_imports=opsets, ir_version=IR_VERSION)
        chunked = {v: self.chunked[v] for v in outputs if v in self.chunked}
        return OnnxForm(
            model.SerializeToString(), inputs, outputs, tuple(weights), chunked, is_optimised=True
        )

    def _shape(self, value: int) -> tuple[int, ...]:
        return self.chunked.get(value, self.program.values[value].type.shape)

    def _weight(self, data: Array) -> str:
        return f"w{self.contents.number(data, (data.dtype.str, data.shape))}"

    def _between(self, value: int, chunks: tuple[int, ...] | None, is_rounded: bool) -> str:
        """The name of a value for parts that read it: in its own shape, as it is when stored."""
        name, kind = value_name(value), self.program.values[value].type
        if chunks is not None:
            self.chunked[value] = chunks
            shape = numpy_helper.from_array(np.array(kind.shape, np.int64), f"{name}.shape")
            self.initializers.append(shape)
            name = self._node("Reshape", [name, shape.name], f"{name}.whole")
        if is_rounded and kind.data_type.dtype != kind.data_type.compute_dtype:
            for to in (kind.data_type, compute_type(kind)):
                name = self._node("Cast", [name], f"{name}.{to.short}", to=onnx_code(to))
        return name

    def _node(self, op: str, inputs: Sequence[str], output: str, **attributes: object) -> str:
        self.nodes.append(helper.make_node(op, inputs, [output], **attributes))
        return output


class _Names(dict[str, str]):
    """New names by old ones; all that have none are told apart by a prefix."""

    def __init__(self, names: Mapping[str, str], prefix: str) -> None:
        super().__init__(names)
        self._prefix = prefix

    def __missing__(self, name: str) -> str:
        return f"{self._prefix}{name}" if name else ""


def _rename(graph: onnx.GraphProto, names: _Names) -> None:
    """Names of values, in bodies too; those of nodes, which mean nothing, go."""
    for node in graph.node:
        node.name = ""
        node.input[:] = [names[name] for name in node.input]
        node.output[:] = [names[name] for name in node.output]
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                _rename(attribute.g, names)
    for declared in (graph.initializer, graph.input, graph.output, graph.value_info):
        for each in declared:
            each.name = names[each.name]


def _needed(nodes: Sequence[onnx.NodeProto], outputs: Iterable[str]) -> list[onnx.NodeProto]:
    """The nodes that outputs depend on, in their order."""
    makers = {name: i for i, node in enumerate(nodes) for name in node.output if name}
    open_names, found = list(outputs), set[int]()
    while open_names:
        index = makers.get(open_names.pop())
        if index is not None and index not in found:
            found.add(index)
            open_names += names_read(nodes[index])
    return [node for i, node in enumerate(nodes) if i in found]
