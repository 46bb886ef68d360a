"""The ONNX Runtime executor: a program is one model, one session, and one call per run.

Dense inputs, outputs and constants are bound in place; others are staged. Types narrower than
float32 compute in float32 and round at casts, program outputs and a scan's carried states; results
in float32 agree with the NumPy executor's within a relative 1e-4. `docs/executor_differences.md`
lists where the two differ on NaN, infinities and extreme values. A linked program runs as the
merged optimised models of its parts and gives the bits of the separate programs (`merge_models`).
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
from stitch.ops import bind, onnx_code
from stitch.program import Array, Contents, Operation, Program, Seam
from stitch.runtime.executors.executor import (
    BoundProgram,
    Executor,
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
    OnnxModel,
    all_nodes,
    names_read,
    placeholder,
    value_info,
    value_name,
)
from stitch.runtime.executors.onnx.onnx_model import write_model, write_operation_model
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

# Optimised models

_MODEL, _CONSTANTS = "model.onnx", "constants"


@dataclass(frozen=True, slots=True, eq=False)
class OptimisedModel:
    """The graph that ONNX Runtime makes of `original`, its large constants by name, and its opsets.

    Inputs and outputs keep their names.
    """

    original: OnnxModel
    graph: onnx.GraphProto
    weights: Mapping[str, Array]
    opsets: Mapping[str, int]


def optimise_model(model: OnnxModel) -> OptimisedModel:
    """Optimise a model with ONNX Runtime, through a temporary file.

    Raises:
        CompileError, SESSION_ERRORS: ONNX Runtime cannot run the model, or the file cannot be
            written.
    """
    try:
        with tempfile.TemporaryDirectory(prefix="stitch-") as name:
            folder = Path(name)
            write_optimised(model, str(folder / _MODEL), _CONSTANTS, EMBEDDED_NBYTES + 1)
            proto = onnx.load(folder / _MODEL, load_external_data=False)
            weights = _load_weights(proto, folder, dict(model.weights))
    except OSError as error:
        raise CompileError(
            "cannot write the optimised ONNX model to a temporary file",
            got=str(error),
            remedy="set TMPDIR to a folder with free space for the program's constants",
        ) from error
    if proto.functions:
        raise CompileError("the model that ONNX Runtime optimised holds local functions")
    _add_constant_outputs(proto.graph, weights)
    return OptimisedModel(model, proto.graph, weights, _opsets(proto))


def _load_weights(
    proto: onnx.ModelProto, folder: Path, originals: Mapping[str, Array]
) -> dict[str, Array]:
    """Move external initializers out of the graph; embed those of inner graphs."""
    initializers = proto.graph.initializer
    weights = {
        tensor.name: _read(tensor, folder, originals.get(tensor.name))
        for tensor in initializers
        if _is_external(tensor)
    }
    for tensor in _inner_tensors(proto.graph):
        if _is_external(tensor):
            tensor.CopyFrom(numpy_helper.from_array(_read(tensor, folder, None), tensor.name))
    embedded = [tensor for tensor in initializers if tensor.name not in weights]
    del initializers[:]
    initializers.extend(embedded)
    return weights


def _opsets(proto: onnx.ModelProto) -> dict[str, int]:
    return {opset.domain: opset.version for opset in proto.opset_import}


def _add_constant_outputs(graph: onnx.GraphProto, weights: dict[str, Array]) -> None:
    """Add an Identity for each output that was folded into a constant."""
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


def _is_external(tensor: onnx.TensorProto) -> bool:
    return bool(tensor.data_location == onnx.TensorProto.EXTERNAL)


def _inner_tensors(graph: onnx.GraphProto) -> Iterator[onnx.TensorProto]:
    """Yield the initializers of inner graphs (bodies of Scan, Loop, If)."""
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                yield from attribute.g.initializer
                yield from _inner_tensors(attribute.g)


def _read(tensor: onnx.TensorProto, folder: Path, original: Array | None) -> Array:
    """Read an external tensor; return the original array instead if its bytes are equal."""
    facts = {entry.key: entry.value for entry in tensor.external_data}
    dtype = helper.tensor_dtype_to_np_dtype(tensor.data_type)
    count, offset = int(np.prod(tensor.dims, dtype=np.int64)), int(facts.get("offset", 0))
    data = np.fromfile(folder / facts["location"], dtype, count, offset=offset)
    data = data.reshape(tuple(tensor.dims))
    if original is None or (original.dtype, original.shape) != (data.dtype, data.shape):
        return data
    return original if np.array_equal(as_bytes(original), as_bytes(data)) else data


# Merged models


def merge_models(program: Program) -> OnnxModel:
    """Convert a linked program: optimise each part alone, then join the graphs.

    Optimising the parts separately preserves the bits of the separate programs; equal parts are
    optimised once. Raises one of `REFUSALS` if ONNX Runtime cannot run a part.
    """
    inputs = {slot.value for slot in program.inputs}
    for operation in program.operations:
        if (operation.domain, operation.op) == EXPECT and operation.inputs[1] not in inputs:
            raise CompileError("Expect compares program inputs with constants only")
    contents, optimised = Contents(), dict[tuple[object, ...], OptimisedModel]()
    merging, whole = _MergedModel(program), WholeProgram(program)
    for seam, operations in zip(program.seams or (Seam(0),), program.parts(), strict=True):
        part = PartOfProgram(whole, operations, frozenset(seam.held))
        model = write_model(part.program_of_part())
        if all(operation.op == "Cast" for operation in part.operations):
            # A wire's cast: optimising it gains nothing.
            proto = onnx.load_from_string(model.serialized)
            merging.add(part, OptimisedModel(model, proto.graph, {}, _opsets(proto)))
            continue
        weights = tuple([contents.number(data, data.dtype.str) for _, data in model.weights])
        key = model.serialized, weights, model.without
        if key not in optimised:
            optimised[key] = optimise_model(model)
        merging.add(part, optimised[key])
    return merging.finish()


class _MergedModel:
    """The merged model under construction: the nodes of all parts, renamed."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.nodes: list[onnx.NodeProto] = []
        self.initializers: list[onnx.TensorProto] = []
        self.contents = Contents()
        self.opsets = {"": OPSET}
        self.chunked: dict[int, tuple[int, ...]] = {}
        #: The name under which later parts read each value.
        self.names = {slot.value: value_name(slot.value) for slot in program.inputs}
        self.parts = 0

    def add(self, part: PartOfProgram, optimised: OptimisedModel) -> None:
        """Append a part whose inputs are program inputs or outputs of earlier parts."""
        values = {number: value for value, number in part.numbers.items()}
        model = optimised.original
        names = {value_name(n): self.names[values[n]] for n in model.inputs}
        names |= {value_name(n): value_name(values[n]) for n in model.outputs}
        names |= {name: self._weight(data) for name, data in optimised.weights.items()}
        renamed = onnx.GraphProto()
        renamed.CopyFrom(optimised.graph)
        _rename(renamed, _NewNames(names, f"p{self.parts}."))
        self.nodes += renamed.node
        self.initializers += renamed.initializer
        used = {node.domain for node in all_nodes(renamed.node)}
        for domain, version in optimised.opsets.items():
            if domain in used and self.opsets.setdefault(domain, version) != version:
                raise CompileError(
                    f"one model cannot import {domain} at opsets {self.opsets[domain]} and "
                    f"{version}, which its parts need"
                )
        rounded = {v for o in part.operations if o.op != "Cast" for v in o.outputs}
        for number in model.outputs:
            value = values[number]
            self.names[value] = self._boundary_name(
                value, model.chunked.get(number), number in rounded
            )
        self.parts += 1

    def finish(self) -> OnnxModel:
        """Build the model of the nodes that the program's outputs depend on."""
        program = self.program
        outputs = tuple(slot.value for slot in program.outputs)
        nodes = _live_nodes(self.nodes, map(value_name, outputs))
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
        return OnnxModel(
            model.SerializeToString(), inputs, outputs, tuple(weights), chunked, is_optimised=True
        )

    def _shape(self, value: int) -> tuple[int, ...]:
        return self.chunked.get(value, self.program.values[value].type.shape)

    def _weight(self, data: Array) -> str:
        return f"w{self.contents.number(data, (data.dtype.str, data.shape))}"

    def _boundary_name(self, value: int, chunks: tuple[int, ...] | None, is_rounded: bool) -> str:
        """Return the name that later parts read: a value in its own shape, rounded to its type."""
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


class _NewNames(dict[str, str]):
    """New names by old names; a name that is not listed gets the part's prefix."""

    def __init__(self, names: Mapping[str, str], prefix: str) -> None:
        super().__init__(names)
        self._prefix = prefix

    def __missing__(self, name: str) -> str:
        return f"{self._prefix}{name}" if name else ""


def _rename(graph: onnx.GraphProto, names: _NewNames) -> None:
    """Rename the values of a graph and its inner graphs, and clear node names."""
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


def _live_nodes(nodes: Sequence[onnx.NodeProto], outputs: Iterable[str]) -> list[onnx.NodeProto]:
    """Return the nodes that outputs depend on, in their order."""
    makers = {name: i for i, node in enumerate(nodes) for name in node.output if name}
    pending, live = list(outputs), set[int]()
    while pending:
        index = makers.get(pending.pop())
        if index is not None and index not in live:
            live.add(index)
            pending += names_read(nodes[index])
    return [node for i, node in enumerate(nodes) if i in live]


#: Bytes of constants above which a part is not optimised by itself: its optimised model goes
#: through a file of less than 2 GiB.
MAX_CONSTANT_NBYTES = 1 << 30


def merge_obstacle(programs: Sequence[Program]) -> str:
    """Return why the merged programs would not give the same bits; empty if they would."""
    masked = list(map(is_masked, programs))
    if has_effect() and any(masked) and not all(masked):
        yes, no = programs[masked.index(True)].name, programs[masked.index(False)].name
        return f"{yes!r} takes denormal numbers as zero, {no!r} does not"
    obstacles = ((program.name, _obstacle(program)) for program in programs)
    return next((f"{name!r} {obstacle}" for name, obstacle in obstacles if obstacle), "")


def _obstacle(program: Program) -> str:
    """Return why a program, merged with others, would not give the same bits; empty if it would."""
    if any((o.domain, o.op) == EXPECT for o in program.operations):
        return "checks the values of an input, which another program could compute"
    if sum(constant.data.nbytes for constant in program.constants) > MAX_CONSTANT_NBYTES:
        return f"has more than {MAX_CONSTANT_NBYTES} bytes of constants"
    names = {slot.value: slot.name for slot in program.inputs}
    names |= {slot.value: slot.name for slot in program.outputs}
    stored = {v: program.values[v].desc.layout.data_type for v in names}
    for v, name in names.items():
        kind = program.values[v].type
        if stored[v].is_narrow:
            return f"stores {name!r} as {stored[v].value}, to which ONNX Runtime cannot convert"
        if compute_type(kind) is not kind.data_type is not stored[v]:
            return f"stores {name!r}, which is {kind.data_type.value}, as {stored[v].value}"
    read = {v for operation in program.operations for v in operation.inputs}
    for slot in program.outputs:
        v = slot.value
        if v in read and stored[v] is not program.values[v].type.data_type:
            return f"reads its output {slot.name!r} before rounding it to {stored[v].value}"
    return ""


class OnnxRuntimeExecutor(Executor):
    """Runs whole programs by ONNX Runtime's CPU kernels.

    Args:
        intra_op_threads: Threads per session; `UsageError` below 1.
    """

    name = "onnxruntime"
    supports_threads = True

    def __init__(self, intra_op_threads: int = 1) -> None:
        self.intra_op_threads = checked_threads(intra_op_threads)

    def prepare(
        self, program: Program, machine: MachineShape, workspace: Workspace | None = None
    ) -> PreparedProgram:
        """Create the session; raises `CompileError` naming every operation that it cannot run."""
        program = expanded(program)
        if not program.outputs:
            return _PreparedSession(program, machine, None, self.intra_op_threads)
        try:
            model = merge_models(program) if program.seams else write_model(program)
            session = Session(model, self.intra_op_threads)
        except REFUSALS as error:
            raise self._refusal(program, error) from error
        return _PreparedSession(program, machine, session, self.intra_op_threads)

    def check(self, program: Program, machine: MachineShape) -> None:
        super().check(program, machine)
        if not program.outputs:
            return
        # A session without optimisation finds missing kernels in a quarter of the time; it may
        # refuse what an optimised one can run.
        try:
            check_kernels(write_model(expanded(program)))
        except REFUSALS:
            self.prepare(program, machine)

    def host_bytes(self, program: Program) -> ProgramBytes:
        return program_bytes(expanded(program), session_bytes, in_sessions=True)

    def link_obstacle(self, programs: Sequence[Program]) -> str:
        return merge_obstacle([expanded(program) for program in programs])

    def takes_foreign(self) -> bool:
        return True

    def _refusal(self, program: Program, error: Exception) -> CompileError:
        """Return the error that names each operation that ONNX Runtime refuses when tried alone."""
        reasons: dict[str, str] = {}
        for index, operation in enumerate(program.operations):
            name = operation.title
            where = operation.location or f"operation {index}"
            try:
                Session(write_operation_model(program, operation), self.intra_op_threads)
            except REFUSALS as refusal:
                kinds = ", ".join(program.values[v].type.text() for v in operation.inputs if v >= 0)
                reasons.setdefault(f"{name}({kinds}) at {where}", first_line(refusal))
        other = "auto" if program.foreign_operations() else "numpy"
        listed = "; ".join(f"{what}: {why}" for what, why in reasons.items())
        return CompileError(
            "the onnxruntime executor cannot run "
            + (listed or f"this program: {first_line(error)}"),
            where=f"program {program.name!r}",
            remedy=f"use the {other} executor for this program (executor={other!r})",
        )


class _PreparedSession(PreparedProgram):
    """A program as one session; without outputs there is none."""

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
        """Return one call between the staging steps; `one_by_one` calls each operation alone."""
        if self.session is None:
            return BoundProgram((), (), {}, 0)
        before: list[Thunk] = []
        after: list[Thunk] = []
        regions, model = StagedRegions(self.staging, inputs, outputs, scratch), self.session.model
        checked = {o.inputs[1] for o in self.expectations}
        arrays = {v: regions.read(v, before) for v in dict.fromkeys((*model.inputs, *checked))}
        for operation in self.expectations:
            before += _check(operation, arrays, self.constants)
        for value in model.outputs:
            output = regions.output(value)
            arrays[value] = self.staging.array(value) if value in self.apart else output
            after += regions.write(value, arrays[value], read_back=False)
            if output is not arrays[value]:
                after.append(partial(np.copyto, output, arrays[value]))
        call = session_call(self.session, arrays, self.program)

        @cache
        def one_by_one() -> BoundProgram:
            return self._by_operation.bind_apart(inputs, outputs, scratch)

        steps = (*before, call, *after)
        staged = self.staging.nbytes + self.repacked_nbytes
        return BoundProgram(steps, (), arrays, staged, one_by_one)

    def on_thread(self, workspace: Workspace) -> PreparedProgram:
        """Return a copy with its own staging; several threads may run one session."""
        own = copy(self)
        own.staging = StagingArrays(self.program, self.machine)
        return own

    @cached_attribute
    def _by_operation(self) -> PreparedKernels:
        """One session per operation; NumPy's kernels compute what has none, such as Expect."""
        every = range(len(self.program.operations))
        apart = partial(Sessions(self.threads).calls_apart, self.program, every)
        return PreparedKernels(self.program, self.machine, Workspace(), calls_apart=apart)


def _check(
    operation: Operation, arrays: dict[int, Array], constants: dict[int, Array]
) -> Sequence[Thunk]:
    """Return the steps that compare an input with the constant that the program expects."""
    nothing = np.empty(0, np.float32)
    actual = arrays[operation.inputs[1]]
    expected = constants[operation.inputs[2]].astype(actual.dtype, copy=False)
    return bind(
        operation.op, [nothing, actual, expected], [nothing],
        attributes=operation.attributes, domain=operation.domain,
    )  # fmt: skip
