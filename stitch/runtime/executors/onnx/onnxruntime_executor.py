"""The ONNX Runtime executor: a program is one model, one session, and one call per run.

Dense values are bound where they lie in the spaces: nothing is copied to enter or leave, and
constants are read from the file's mapping. Others are staged. Programs compute in float32 where
their types are narrower, and round at casts, at their outputs, and what a scan's rounds hand on; so
results agree with the NumPy executor's within a relative 1e-4 in float32 (sums are taken in another
order), and within one rounding of the narrow type for every operation between an output and its
inputs.

What ONNX leaves open, ONNX Runtime decides otherwise than NumPy, on NaN, infinities and other
values at the edges of their types: `docs/executor_differences.md` lists all of it.

A linked program (one with seams) is run as the optimised forms of its parts, joined: the bits of
its programs apart, in one call (`joined_form`). Programs of which only some take small numbers as
zero, as follows, all do so once they are linked.

Numbers below the smallest normal one (1.2e-38) count as zero in programs with a Softmax, where the
platform can be told so for one call: see `flushing`.

An output that takes the buffer of an input is computed apart and copied, but where every operation
of the program is one that ONNX Runtime itself declares safe in place.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import numpy as np
import onnx
from onnx import helper, numpy_helper

from stitch.errors import CompileError
from stitch.linker import expanded
from stitch.machine import MachineShape
from stitch.ops import bind, multiply_adds, onnx_code
from stitch.program import Array, Contents, Operation, Program, Seam
from stitch.runtime.executors.executor import (
    BoundProgram,
    Executor,
    LinkTerms,
    PreparedProgram,
    ProgramBytes,
    Thunk,
    Workspace,
    cached_attribute,
    checked_threads,
)
from stitch.runtime.executors.host import (
    PartOfProgram,
    PreparedKernels,
    StagedRegions,
    StagingArrays,
    WholeProgram,
    as_bytes,
    compute_type,
    program_bytes,
    repacked_nbytes,
    session_bytes,
)
from stitch.runtime.executors.onnx.foreign_calls import Sessions
from stitch.runtime.executors.onnx.model_writer import (
    EMBEDDED_NBYTES,
    IR_VERSION,
    OPSET,
    OnnxForm,
    all_nodes,
    names_read,
    placeholder,
    value_info,
    value_name,
)
from stitch.runtime.executors.onnx.onnx_model import onnx_form, operation_form
from stitch.runtime.executors.onnx.session import (
    EXPECT,
    REFUSALS,
    Session,
    check_kernels,
    computed_apart,
    first_line,
    has_effect,
    is_masked,
    session_call,
    write_optimised,
)

# --------------------------------------------------------------------------------------------------
# The optimised form: what ONNX Runtime makes of a form, read back from it.

_MODEL, _CONSTANTS = "model.onnx", "constants"


@dataclass(frozen=True, slots=True, eq=False)
class OptimisedForm:
    """A graph, its large constants by name, and the versions of the operators' domains.

    The graph's inputs and outputs have the names that they have in `form`.
    """

    form: OnnxForm
    graph: onnx.GraphProto
    weights: Mapping[str, Array]
    opsets: Mapping[str, int]


def optimised_form(form: OnnxForm) -> OptimisedForm:
    """What ONNX Runtime makes of a form; raises one of `REFUSALS` for what it cannot run."""
    try:
        return _optimised(form)
    except OSError as error:
        raise CompileError(
            "what ONNX Runtime makes of it cannot be written to a temporary file",
            got=str(error),
            remedy="set TMPDIR to a folder with room for the program's constants",
        ) from error


def _optimised(form: OnnxForm) -> OptimisedForm:
    with tempfile.TemporaryDirectory(prefix="stitch-") as name:
        folder = Path(name)
        write_optimised(form, str(folder / _MODEL), _CONSTANTS, EMBEDDED_NBYTES + 1)
        model = onnx.load(folder / _MODEL, load_external_data=False)
        if model.functions:
            raise CompileError("what ONNX Runtime makes of it has functions of its own")
        given, weights = dict(form.weights), {}
        initializers = model.graph.initializer
        for tensor in (t for t in initializers if _is_outside(t)):
            weights[tensor.name] = _read(tensor, folder, given.get(tensor.name))
        for tensor in _inner_tensors(model.graph):
            if _is_outside(tensor):
                tensor.CopyFrom(numpy_helper.from_array(_read(tensor, folder, None), tensor.name))
    kept = [tensor for tensor in initializers if tensor.name not in weights]
    del initializers[:]
    initializers.extend(kept)
    _make_outputs(model.graph, weights)
    return OptimisedForm(form, model.graph, weights, _opsets(model))


def plain_form(form: OnnxForm) -> OptimisedForm:
    """A form without large constants as it is, for one that is not optimised."""
    model = onnx.load_from_string(form.model)
    return OptimisedForm(form, model.graph, {}, _opsets(model))


def _opsets(model: onnx.ModelProto) -> dict[str, int]:
    """The versions of the domains that the model's nodes are of."""
    return {opset.domain: opset.version for opset in model.opset_import}


def _make_outputs(graph: onnx.GraphProto, weights: dict[str, Array]) -> None:
    """Nodes for those outputs that have become constants."""
    small = {tensor.name: tensor for tensor in graph.initializer}
    for name in [output.name for output in graph.output]:
        constant = f"{name}.constant"
        if name in weights:
            weights[constant] = weights.pop(name)
        elif name in small:
            small[name].name = constant
        else:
            continue
        for node in all_nodes(graph.node):
            node.input[:] = [constant if each == name else each for each in node.input]
        graph.node.append(helper.make_node("Identity", [constant], [name]))


def _is_outside(tensor: onnx.TensorProto) -> bool:
    return bool(tensor.data_location == onnx.TensorProto.EXTERNAL)


def _inner_tensors(graph: onnx.GraphProto) -> Iterator[onnx.TensorProto]:
    """The constants of bodies inside a graph."""
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                yield from attribute.g.initializer
                yield from _inner_tensors(attribute.g)


def _read(tensor: onnx.TensorProto, folder: Path, given: Array | None) -> Array:
    """The elements of a constant: the array that was given where it has the same bytes."""
    facts = {entry.key: entry.value for entry in tensor.external_data}
    dtype = helper.tensor_dtype_to_np_dtype(tensor.data_type)
    count, offset = int(np.prod(tensor.dims, dtype=np.int64)), int(facts.get("offset", 0))
    data = np.fromfile(folder / facts["location"], dtype, count, offset=offset)
    data = data.reshape(tuple(tensor.dims))
    alike = given is not None and (given.dtype, given.shape) == (data.dtype, data.shape)
    return given if given is not None and alike and _bytes_equal(given, data) else data


def _bytes_equal(one: Array, other: Array) -> bool:
    return np.array_equal(as_bytes(one), as_bytes(other))


# --------------------------------------------------------------------------------------------------
# The joined form of a linked program: the optimised forms of its parts, joined by their names.


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


# --------------------------------------------------------------------------------------------------
# On what terms programs may be joined to one session of ONNX Runtime, bit for bit.

#: Runs after which programs are joined. Optimising one takes as long as 1000 calls of a small
#: program, and each run then takes one call less for every program but one: what has run so often
#: is taken to run thousands of times more.
REPEATS = 100
#: Multiply-adds of a program, on average, from which on a call of 2 us is less than a hundredth.
WORTH_NOTHING = 16_000_000
#: Bytes of a program's constants beyond which its optimised form, which has them, is not made:
#: the form goes through a file of less than 2 GiB.
MOST_CONSTANTS = 1 << 30


def joining_terms(programs: Sequence[Program]) -> LinkTerms:
    """The terms for programs in run order."""
    masked = list(map(is_masked, programs))
    if has_effect() and any(masked) and not all(masked):
        yes, no = programs[masked.index(True)].name, programs[masked.index(False)].name
        return LinkTerms(f"{yes!r} takes denormal numbers as zero, {no!r} does not")
    for program in programs:
        obstacle = _obstacle(program)
        if obstacle:
            return LinkTerms(f"{program.name!r} {obstacle}")
    work = sum(multiply_adds(o, p.values, p.bodies) for p in programs for o in p.operations)
    gains = len(programs) > 1 and work < WORTH_NOTHING * len(programs)
    return LinkTerms(repeats=REPEATS if gains else None)


def _obstacle(program: Program) -> str:
    """What of one program stands in the way of joining it to others."""
    if any((o.domain, o.op) == EXPECT for o in program.operations):
        return "checks the values of an input, which could come from another program"
    if sum(constant.data.nbytes for constant in program.constants) > MOST_CONSTANTS:
        return f"has more than {MOST_CONSTANTS} bytes of constants"
    names = {slot.value: slot.name for slot in program.inputs}
    names |= {slot.value: slot.name for slot in program.outputs}
    stored = {v: program.values[v].desc.layout.data_type for v in names}
    for v, name in names.items():
        kind = program.values[v].type
        if stored[v].is_narrow:
            return f"has {name!r} as {stored[v].value}, to which ONNX Runtime converts nothing"
        if compute_type(kind) is not kind.data_type is not stored[v]:
            return f"stores {name!r}, which is {kind.data_type.value}, as {stored[v].value}"
    read = {v for operation in program.operations for v in operation.inputs}
    for slot in program.outputs:
        v = slot.value
        if v in read and stored[v] is not program.values[v].type.data_type:
            return f"reads its output {slot.name!r} before that is rounded to {stored[v].value}"
    return ""


class OnnxRuntimeExecutor(Executor):
    """Runs whole programs by ONNX Runtime's CPU kernels; `intra_op_threads` is the user's to set.

    The parts of a linked program are optimised each by itself, and so give the bits that they give
    apart; with `fuse_across_seams` the whole is optimised, which is a little faster and equal only
    within the tolerance. Raises `UsageError` for fewer than one thread.
    """

    name = "onnxruntime"
    supports_threads = True

    def __init__(self, intra_op_threads: int = 1, fuse_across_seams: bool = False) -> None:
        self.intra_op_threads = checked_threads(intra_op_threads)
        self.fuse_across_seams = fuse_across_seams

    def prepare(
        self, program: Program, machine: MachineShape, workspace: Workspace | None = None
    ) -> PreparedProgram:
        """Make a session; raises `CompileError` listing every operation that it cannot run."""
        program = expanded(program)
        if not program.outputs:
            return _Prepared(program, machine, None, self.intra_op_threads)
        try:
            is_whole = self.fuse_across_seams or not program.seams
            form = onnx_form(program) if is_whole else joined_form(program)
            session = Session(form, self.intra_op_threads)
        except REFUSALS as error:
            raise self._refusal(program, error) from error
        return _Prepared(program, machine, session, self.intra_op_threads)

    def check(self, program: Program, machine: MachineShape) -> None:
        """A session that is not optimised tells which operator has no kernel, in a quarter of the
        time; what that refuses, the optimised one decides."""
        super().check(program, machine)
        if not program.outputs:
            return
        try:
            check_kernels(onnx_form(expanded(program)))
        except REFUSALS:
            self.prepare(program, machine)

    def host_bytes(self, program: Program) -> ProgramBytes:
        """A bound for each operator of ONNX Runtime, and for its arena."""
        return program_bytes(expanded(program), session_bytes, in_sessions=True)

    def link_terms(self, programs: Sequence[Program]) -> LinkTerms:
        """The same bits: a linked program is computed by the forms of its parts."""
        return joining_terms([expanded(program) for program in programs])

    def takes_foreign(self) -> bool:
        """Always."""
        return True

    def _refusal(self, program: Program, error: Exception) -> CompileError:
        """Which operations are to blame: each is tried by itself."""
        reasons: dict[str, str] = {}
        for index, operation in enumerate(program.operations):
            name = operation.title
            where = operation.location or f"operation {index}"
            try:
                Session(operation_form(program, operation), self.intra_op_threads)
            except REFUSALS as refusal:
                kinds = ", ".join(program.values[v].type.text() for v in operation.inputs if v >= 0)
                reasons.setdefault(f"{name}({kinds}) at {where}", first_line(refusal))
        other = "auto" if program.foreign_operations() else "numpy"
        listed = "; ".join(f"{what}: {why}" for what, why in reasons.items())
        return CompileError(
            "the onnxruntime executor cannot run " + (listed or first_line(error)),
            where=f"program {program.name!r}",
            remedy=f"use the {other} executor for this program (executor={other!r})",
        )


class _Prepared(PreparedProgram):
    def __init__(
        self, program: Program, machine: MachineShape, session: Session | None, threads: int
    ) -> None:
        self.threads = threads
        self.program = program
        self.machine = machine
        self.session = session
        self.staging = StagingArrays(program, machine)
        self.apart = computed_apart(program)
        self.constants = program.constant_data()
        self.expectations = [o for o in program.operations if (o.domain, o.op) == EXPECT]
        self.repacked_nbytes = repacked_nbytes(program)

    def bind(
        self, inputs: tuple[Array, ...], outputs: tuple[Array, ...], scratch: Array | None
    ) -> BoundProgram:
        """One call between the steps of staging; or a call for each operation, where it must be
        seen by itself."""
        if self.session is None:
            return BoundProgram((), (), {}, 0)
        before: list[Thunk] = []
        after: list[Thunk] = []
        regions = StagedRegions(self.staging, inputs, outputs, scratch)
        checked = {o.inputs[1] for o in self.expectations}
        arrays = {
            v: regions.read(v, before) for v in dict.fromkeys((*self.session.form.inputs, *checked))
        }
        for operation in self.expectations:
            before += _check(operation, arrays, self.constants)
        for value in self.session.form.outputs:
            place = regions.place(value)
            arrays[value] = self.staging.array(value) if value in self.apart else place
            after += regions.write(value, arrays[value], read_back=False)
            if place is not arrays[value]:
                after.append(partial(np.copyto, place, arrays[value]))
        call = session_call(self.session, arrays, self.program)

        @cache
        def one_by_one() -> BoundProgram:
            return self._by_operation.bind_apart(inputs, outputs, scratch)

        steps = (*before, call, *after)
        staged = self.staging.nbytes + self.repacked_nbytes
        return BoundProgram(steps, (), arrays, staged, one_by_one)

    def on_thread(self, workspace: Workspace) -> PreparedProgram:
        """With staging of its own; a session may be run by several threads."""
        own = copy(self)
        own.staging = StagingArrays(self.program, self.machine)
        return own

    @cached_attribute
    def _by_operation(self) -> PreparedKernels:
        """What it cannot run by itself, such as a check of an input, NumPy's kernels compute."""
        every = range(len(self.program.operations))
        apart = partial(Sessions(self.threads).calls_apart, self.program, every)
        return PreparedKernels(self.program, self.machine, Workspace(), calls_apart=apart)


def _check(
    operation: Operation, arrays: dict[int, Array], constants: dict[int, Array]
) -> Sequence[Thunk]:
    """Steps that compare an input with the value that the program was compiled for."""
    nothing = np.empty(0, np.float32)
    wanted = constants[operation.inputs[2]]
    given = arrays[operation.inputs[1]]
    return bind(
        operation.op,
        [nothing, given, wanted.astype(given.dtype, copy=False)],
        [nothing],
        attributes=operation.attributes,
        domain=operation.domain,
    )
