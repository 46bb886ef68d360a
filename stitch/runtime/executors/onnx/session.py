"""Create a session of ONNX Runtime from a model, bind it to arrays, and run it; infer result types.

A forked child has none of its parent's threads. A session with several threads joins them when it
is destroyed, which crashes a forked child; since version 1.29 the library itself waits at exit for
a thread of its own, forever. So a child keeps inherited sessions until it ends, and its exit skips
the handlers that the parent had registered with the C library, as multiprocessing's children do.
Sessions created in the child work as usual.
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from itertools import chain
from typing import Any

import numpy as np
import onnxruntime
from onnx import TensorProto, helper, numpy_helper
from onnxruntime.capi import onnxruntime_pybind11_state as ort_errors

from stitch.errors import CompileError, TaskError
from stitch.live_objects import LiveObjects
from stitch.ops import data_type_of_code, onnx_code
from stitch.program import Array, DataType, Operation, Program, ValueType
from stitch.runtime.executors.executor import Thunk
from stitch.runtime.executors.onnx.model_writer import (
    IR_VERSION,
    OPSET,
    OnnxForm,
    attribute_protos,
    value_name,
)

#: What sessions raise, when they are made and when they run.
SESSION_ERRORS: tuple[type[Exception], ...] = (
    ort_errors.Fail, ort_errors.InvalidArgument, ort_errors.InvalidGraph,
    ort_errors.InvalidProtobuf, ort_errors.NotImplemented, ort_errors.RuntimeException,
    ort_errors.EPFail, ort_errors.EngineError, ort_errors.NoSuchFile, RuntimeError,
)  # fmt: skip
REFUSALS: tuple[type[Exception], ...] = (CompileError, *SESSION_ERRORS)
#: Its kernels for these may write over an operand (`MayInplace`), and no fusion joins them to one
#: that may not.
SAFE_IN_PLACE = frozenset({"Add", "Sub", "Mul", "Div"})

#: Its check is a step of its own; the model only passes its data on.
EXPECT = ("stitch", "Expect")
#: Operators whose kernels make denormal numbers of masked scores.
MASKED = frozenset({"Attention", "Softmax"})
#: Fusions whose kernel is slower than what it stands for: an addition and a normalisation of
#: 64x256 numbers take 25 us apart and 95 us as one (1.31).
SLOWER_FUSIONS = ("SkipLayerNormFusion",)

_sessions: LiveObjects[Any] = LiveObjects()
_c_library = ctypes.CDLL(None)


class Session:
    """A session and what it refers to, for as long as it lives."""

    def __init__(self, form: OnnxForm, threads: int) -> None:
        self.form = form
        self.held = [onnxruntime.OrtValue.ortvalue_from_numpy(a) for _, a in form.weights]
        self.session = _load(form, self.held, _options(threads, form.is_optimised))

    def bind(self, arrays: dict[int, Array]) -> Callable[[], object]:
        """A call that computes on these arrays, which must outlive it."""
        binding = self.session.io_binding()
        for values, point in (
            (self.form.inputs, binding.bind_input), (self.form.outputs, binding.bind_output)
        ):  # fmt: skip
            for value in values:
                array = arrays[value]
                where = array.ctypes.data
                shape = self.form.chunked.get(value, array.shape)
                point(value_name(value), "cpu", 0, array.dtype.type, shape, where)
        return bound_call(self.session, binding)


def check_kernels(form: OnnxForm) -> None:
    """Raise one of `SESSION_ERRORS` where a node of a form has no kernel; nothing is optimised."""
    options = _options(1, is_optimised=True)
    options.add_session_config_entry("session.disable_prepacking", "1")
    _load(form, [onnxruntime.OrtValue.ortvalue_from_numpy(a) for _, a in form.weights], options)


def write_optimised(form: OnnxForm, path: str, constants: str, least: int) -> None:
    """What ONNX Runtime makes of a form, as a file; its constants of at least so many bytes as
    another file beside it. Raises one of `SESSION_ERRORS`."""
    options = _options(1, is_optimised=False)
    options.optimized_model_filepath = path
    for key, word in (
        ("session.optimized_model_external_initializers_file_name", constants),
        ("session.optimized_model_external_initializers_min_size_in_bytes", str(least)),
        # Nothing is run: its kernels need not arrange their weights.
        ("session.disable_prepacking", "1"),
    ):
        options.add_session_config_entry(key, word)
    _load(form, [onnxruntime.OrtValue.ortvalue_from_numpy(a) for _, a in form.weights], options)


def tried(model: bytes, **arrays: Array) -> list[Array]:
    """What a model gives, run once; raises one of `SESSION_ERRORS`."""
    session = onnxruntime.InferenceSession(
        model, _options(1, is_optimised=True), providers=["CPUExecutionProvider"]
    )
    found: list[Array] = session.run(None, arrays)
    return found


def declared_outputs(model: bytes) -> list[tuple[str, Sequence[object]]]:
    """The type and the shape that ONNX Runtime infers for each output of a model; raises one of
    `SESSION_ERRORS`."""
    session = onnxruntime.InferenceSession(
        model, _options(1, is_optimised=True), providers=["CPUExecutionProvider"]
    )
    return [(output.type, output.shape) for output in session.get_outputs()]


def _options(threads: int, is_optimised: bool) -> Any:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.use_deterministic_compute = True
    # One allocation for all values of a run, beside what the first run took: 5 MiB more for a
    # small transformer's training, and no faster.
    options.enable_mem_pattern = False
    _share_arena()
    options.add_session_config_entry("session.use_env_allocators", "1")
    level = onnxruntime.GraphOptimizationLevel
    options.graph_optimization_level = (
        level.ORT_DISABLE_ALL if is_optimised else level.ORT_ENABLE_ALL
    )
    # Errors are raised; what it would print beside them helps no further.
    options.log_severity_level = 4
    return options


def _load(form: OnnxForm, weights: list[Any], options: Any) -> Any:
    if form.weights:
        options.add_external_initializers([name for name, _ in form.weights], weights)
    session = onnxruntime.InferenceSession(
        form.model, options, providers=["CPUExecutionProvider"],
        disabled_optimizers=[*SLOWER_FUSIONS, *form.without],
    )  # fmt: skip
    _sessions.add(session)
    return session


@cache
def _share_arena() -> None:
    """One arena for the sessions of this process, once: made here, or by the process before.

    Programs run one after the other, so the same bytes, still in the caches, serve the values
    inside all of them.
    """
    where = onnxruntime.OrtMemoryInfo(
        "Cpu", onnxruntime.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, onnxruntime.OrtMemType.DEFAULT
    )
    with suppress(*SESSION_ERRORS):
        onnxruntime.create_and_register_allocator(where, None)


def bound_call(session: Any, binding: Any) -> Callable[[], object]:
    """The fastest call of a binding.

    The session's public method makes new run options every time and takes half as long again for
    a small program, so the object beneath it is called where it is as it was (1.31).
    """
    beneath, bound = getattr(session, "_sess", None), getattr(binding, "_iobinding", None)
    if beneath is None or bound is None or not hasattr(beneath, "run_with_iobinding"):
        return partial(session.run_with_iobinding, binding)
    return partial(beneath.run_with_iobinding, bound, onnxruntime.RunOptions())


def session_call(session: Session, arrays: dict[int, Array], program: Program) -> Thunk:
    """A step that runs a program's session on arrays; raises `TaskError` naming the program."""
    call = session.bind(arrays)
    if is_masked(program):
        call = flushing(call)

    def run() -> None:
        try:
            call()
        except SESSION_ERRORS as error:
            raise TaskError(
                "ONNX Runtime stopped: " + first_line(error), where=f"program {program.name!r}"
            ) from error

    # It may be called again after a failure unless it writes what it reads.
    read = {arrays[value].ctypes.data for value in session.form.inputs}
    is_repeatable = read.isdisjoint([arrays[value].ctypes.data for value in session.form.outputs])
    vars(run)["is_repeatable"] = is_repeatable
    return run


def is_masked(program: Program) -> bool:
    """Whether a program is computed with denormal numbers as zero, where that can be had."""
    bodies = (o for body in program.bodies for o in body.operations)
    return any(not o.domain and o.op in MASKED for o in chain(program.operations, bodies))


def first_line(error: Exception) -> str:
    """What an error says, in short."""
    text = error.what if isinstance(error, CompileError) else str(error)
    return text.strip().splitlines()[0] if text.strip() else type(error).__name__


def computed_apart(program: Program) -> frozenset[int]:
    """The outputs that take an input's buffer and cannot be proved safe in place.

    Proved are those in programs of nothing but `SAFE_IN_PLACE` operations, where the operation
    that writes the output is the only one that reads the input.
    """
    safe = all(o.op in SAFE_IN_PLACE and not o.domain for o in program.operations)
    apart = set()
    for slot in program.outputs:
        if slot.aliases_input is None:
            continue
        source = program.inputs[slot.aliases_input].value
        readers = [o for o in program.operations if source in o.inputs]
        if not (safe and len(readers) == 1 and slot.value in readers[0].outputs):
            apart.add(slot.value)
    return frozenset(apart)


def _keep_in_child() -> None:
    """Never destroy the sessions that this process inherited, nor wait for their threads."""
    for session in tuple(_sessions):
        # One reference that is never given back.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(session))
    # Called first of all that the child inherits, with the exit code. Only glibc has it.
    on_exit = getattr(_c_library, "on_exit", None)
    if on_exit is not None:
        on_exit(_c_library._exit, None)


os.register_at_fork(after_in_child=_keep_in_child)


#: Bytes of glibc's `fenv_t`, and where MXCSR lies in it.
_FENV_NBYTES = 32
_MXCSR = 28
#: MXCSR's bits for denormal results and operands as zero.
_FLUSH = 0x8040


def flushing(call: Callable[[], object]) -> Callable[[], object]:
    """The call with denormal numbers as zero; the call itself where that cannot be had.

    The calling thread's floating-point unit is set before and put back after it. Why: exponentials
    of masked scores are the smallest numbers that there are, and x86 takes a hundred times as long
    over each of them; a masked Softmax takes six times as long, and so do products of what it
    gives. Only the thread that calls is touched, and only on Linux on x86-64 with glibc, whose
    `fenv_t` holds the register for it (MXCSR) after 28 bytes; elsewhere, or where a trial shows no
    effect, calls stay as they are. It costs 0.6 us.
    """
    return _flushing(call) if has_effect() else call


def _flushing(call: Callable[[], object]) -> Callable[[], object]:
    usual, flush = (ctypes.create_string_buffer(_FENV_NBYTES) for _ in range(2))
    # PyDLL: releasing the interpreter's lock would cost more than the call.
    library = ctypes.PyDLL(None)
    get, put = library.fegetenv, library.fesetenv
    get(flush)
    (register,) = struct.unpack_from("<I", flush.raw, _MXCSR)
    struct.pack_into("<I", flush, _MXCSR, register | _FLUSH)

    def run() -> None:
        get(usual)
        try:
            put(flush)
            call()
        finally:
            put(usual)

    return run


@cache
def has_effect() -> bool:
    """Whether denormals vanish within a call and are there again after it."""
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        return False
    if platform.libc_ver()[0] != "glibc":
        return False
    smallest = 5e-324
    products: list[float] = []

    def multiply() -> None:
        products.append(smallest * float(len(products) + 1))

    try:
        _flushing(multiply)()
    except (AttributeError, OSError):
        # No math functions in the process: nothing was called.
        return False
    return products == [0.0] and smallest * 1.0 > 0.0


# Result types of operators that Stitch does not define


@dataclass(frozen=True, slots=True)
class InferredType:
    """What ONNX Runtime says of one result; None where it does not say it: the type of its
    elements, its dimensions, each of them. `kind` is its own word (`tensor(float)`)."""

    kind: str
    data_type: DataType | None
    shape: tuple[int | None, ...] | None


def inferred_results(
    operation: Operation,
    operands: Sequence[ValueType | None],
    known: Sequence[Array | None],
    wanted: Sequence[bool],
) -> list[InferredType | None]:
    """The types of an operation's results, None for those that are not wanted.

    Args:
        operation: Its operator, attributes and version count.
        operands: Their types, None where one is absent.
        known: The data of each operand that is known.
        wanted: Which results to ask for.

    Raises:
        CompileError: ONNX Runtime refuses the operation, and why.
    """
    model = _model(operation, operands, known, wanted, with_ranks=True)
    try:
        found = iter(declared_outputs(model))
    except SESSION_ERRORS as error:
        raise CompileError(first_line(error)) from error
    return [_inferred(next(found), next(found)) if each else None for each in wanted]


def computed_results(
    operation: Operation, operands: Sequence[Array | None], wanted: Sequence[bool]
) -> list[Array | None] | None:
    """The results of an operation on known data; None where ONNX Runtime does not give arrays."""
    types = [
        None if a is None else ValueType(a.shape, DataType.from_dtype(a.dtype)) for a in operands
    ]
    if any(kind is not None and kind.data_type.is_narrow for kind in types):
        return None
    try:
        results = iter(tried(_model(operation, types, operands, wanted)))
    except SESSION_ERRORS:
        return None
    arrays = [next(results) if each else None for each in wanted]
    plain = all(a is None or (isinstance(a, np.ndarray) and a.dtype.kind in "biuf") for a in arrays)
    return arrays if plain else None


def _model(
    operation: Operation,
    operands: Sequence[ValueType | None],
    known: Sequence[Array | None],
    wanted: Sequence[bool],
    *,
    with_ranks: bool = False,
) -> bytes:
    """A model of the operation alone, its known operands initializers; results have no types.

    `with_ranks`: behind each result its shape is an output too, whose one dimension is the rank: a
    session says `[]` of a number and of what it knows no rank of.
    """
    names = ["" if kind is None else f"x{i}" for i, kind in enumerate(operands)]
    results = [f"y{i}" if each else "" for i, each in enumerate(wanted)]
    node = helper.make_node(operation.op, names, results, domain=operation.domain)
    node.attribute.extend(attribute_protos(operation))
    inputs, initializers = [], []
    for name, kind, data in zip(names, operands, known, strict=True):
        if data is not None and name:
            initializers.append(numpy_helper.from_array(np.array(data, order="C"), name))
        elif kind is not None:
            code = onnx_code(kind.data_type)
            inputs.append(helper.make_tensor_value_info(name, code, kind.shape))
    nodes, given = [node], [name for name in results if name]
    if with_ranks:
        nodes += [helper.make_node("Shape", [name], [f"{name}.shape"]) for name in given]
        given = [each for name in given for each in (name, f"{name}.shape")]
    outputs = [helper.make_empty_tensor_value_info(name) for name in given]
    versions: Mapping[str, int] = {"": OPSET} | (
        {operation.domain: operation.opset} if operation.domain else {}
    )
    opsets = [helper.make_opsetid(domain, version) for domain, version in versions.items()]
    graph = helper.make_graph(nodes, "one_operation", inputs, outputs, initializers)
    model = helper.make_model(graph, opset_imports=opsets, ir_version=IR_VERSION)
    data_of_model: bytes = model.SerializeToString()
    return data_of_model


def _inferred(
    result: tuple[str, Sequence[object]], rank: tuple[str, Sequence[object]]
) -> InferredType:
    """What the words of a session for a result and for its shape say."""
    kind, dims = result
    name = kind.removeprefix("tensor(").removesuffix(")").upper()
    data_type = None
    if kind.startswith("tensor("):
        with suppress(CompileError, ValueError):  # strings, types that onnx does not know
            data_type = data_type_of_code(TensorProto.DataType.Value(name))
    has_rank = [isinstance(length, int) for length in rank[1]] == [True]
    shape = tuple([d if isinstance(d, int) else None for d in dims]) if has_rank else None
    return InferredType(kind, data_type, shape)
