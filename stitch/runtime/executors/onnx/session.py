"""Create sessions of ONNX Runtime, bind them to arrays and run them; infer result types.

A forked child lacks its parent's threads: destroying an inherited session crashes, and since ONNX
Runtime 1.29 exit handlers wait forever. So a child never destroys inherited sessions, and its exit
skips the C library's handlers, as multiprocessing does. Sessions created in the child are normal.
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
    OnnxModel,
    attribute_protos,
    value_name,
)

#: Errors of creating and of running a session.
SESSION_ERRORS: tuple[type[Exception], ...] = (
    ort_errors.Fail, ort_errors.InvalidArgument, ort_errors.InvalidGraph,
    ort_errors.InvalidProtobuf, ort_errors.NotImplemented, ort_errors.RuntimeException,
    ort_errors.EPFail, ort_errors.EngineError, ort_errors.NoSuchFile, RuntimeError,
)  # fmt: skip
REFUSALS: tuple[type[Exception], ...] = (CompileError, *SESSION_ERRORS)
#: Operators whose kernels may overwrite an operand (`MayInplace`) and are never fused with others.
SAFE_IN_PLACE = frozenset({"Add", "Sub", "Mul", "Div"})

#: Checked by a step before the call; the model passes its data on.
EXPECT = ("stitch", "Expect")
#: Operators whose kernels produce denormal numbers from masked scores.
MASKED = frozenset({"Attention", "Softmax"})
#: Fusions whose kernel is slower than its parts (Add and LayerNormalization of 64x256: 95 us fused,
#: 25 us separate, ORT 1.31).
SLOWER_FUSIONS = ("SkipLayerNormFusion",)

_sessions: LiveObjects[Any] = LiveObjects()
_c_library = ctypes.CDLL(None)


class Session:
    """A session, its model, and the weights that it refers to."""

    def __init__(self, model: OnnxModel, threads: int) -> None:
        self.model = model
        self.held = [onnxruntime.OrtValue.ortvalue_from_numpy(a) for _, a in model.weights]
        self.session = _load(model, self.held, _options(threads))

    def bind(self, arrays: dict[int, Array]) -> Callable[[], object]:
        """Return a call that computes on these arrays, which must outlive it."""
        binding = self.session.io_binding()
        for values, point in (
            (self.model.inputs, binding.bind_input), (self.model.outputs, binding.bind_output)
        ):  # fmt: skip
            for value in values:
                array = arrays[value]
                where = array.ctypes.data
                shape = self.model.chunked.get(value, array.shape)
                point(value_name(value), "cpu", 0, array.dtype.type, shape, where)
        return bound_call(self.session, binding)


def check_kernels(model: OnnxModel) -> None:
    """Raise one of `SESSION_ERRORS` if a node has no kernel, without optimising the model."""
    options = _options(1, optimises=False)
    options.add_session_config_entry("session.disable_prepacking", "1")
    _load(model, [onnxruntime.OrtValue.ortvalue_from_numpy(a) for _, a in model.weights], options)


def tried(model: bytes, **arrays: Array) -> list[Array]:
    """Run a model once and return its results; raises one of `SESSION_ERRORS`."""
    found: list[Array] = _plain_session(model).run(None, arrays)
    return found


def _plain_session(model: bytes) -> Any:
    return onnxruntime.InferenceSession(
        model, _options(1, optimises=False), providers=["CPUExecutionProvider"]
    )


def _options(threads: int, *, optimises: bool = True) -> Any:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.use_deterministic_compute = True
    # Memory patterns take 5 MiB more for training a small transformer, and are no faster.
    options.enable_mem_pattern = False
    _share_arena()
    options.add_session_config_entry("session.use_env_allocators", "1")
    level = onnxruntime.GraphOptimizationLevel
    options.graph_optimization_level = level.ORT_ENABLE_ALL if optimises else level.ORT_DISABLE_ALL
    # Errors are raised; do not print them too.
    options.log_severity_level = 4
    return options


def _load(model: OnnxModel, weights: list[Any], options: Any) -> Any:
    if model.weights:
        options.add_external_initializers([name for name, _ in model.weights], weights)
    session = onnxruntime.InferenceSession(
        model.serialized, options, providers=["CPUExecutionProvider"],
        disabled_optimizers=[*SLOWER_FUSIONS, *model.without],
    )  # fmt: skip
    _sessions.add(session)
    return session


@cache
def _share_arena() -> None:
    """Register one arena for all sessions of the process: programs run in turn and reuse its bytes,
    which are still in the caches."""
    where = onnxruntime.OrtMemoryInfo(
        "Cpu", onnxruntime.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, onnxruntime.OrtMemType.DEFAULT
    )
    with suppress(*SESSION_ERRORS):
        onnxruntime.create_and_register_allocator(where, None)


def bound_call(session: Any, binding: Any) -> Callable[[], object]:
    """Return the fastest call of a binding.

    The public method creates run options per call, which takes half as long again for a small
    program; so call the private object (as of ORT 1.31) where it exists.
    """
    beneath, bound = getattr(session, "_sess", None), getattr(binding, "_iobinding", None)
    if beneath is None or bound is None or not hasattr(beneath, "run_with_iobinding"):
        return partial(session.run_with_iobinding, binding)
    return partial(beneath.run_with_iobinding, bound, onnxruntime.RunOptions())


def session_call(session: Session, arrays: dict[int, Array], program: Program, name: str) -> Thunk:
    """Return a step that runs a program's session on arrays; on failure it raises `TaskError` with
    the name, which is another one for each program that shares the session."""
    call = session.bind(arrays)
    if is_masked(program):
        call = flushing(call)

    def run() -> None:
        try:
            call()
        except SESSION_ERRORS as error:
            raise TaskError(
                "ONNX Runtime stopped: " + first_line(error), where=f"program {name!r}"
            ) from error

    # It can be retried after a failure unless it overwrites its inputs.
    read = {arrays[value].ctypes.data for value in session.model.inputs}
    is_repeatable = read.isdisjoint([arrays[value].ctypes.data for value in session.model.outputs])
    vars(run)["is_repeatable"] = is_repeatable
    return run


def is_masked(program: Program) -> bool:
    """Whether a program runs with denormal numbers flushed to zero, where `has_effect`."""
    bodies = (o for body in program.bodies for o in body.operations)
    return any(not o.domain and o.op in MASKED for o in chain(program.operations, bodies))


def first_line(error: Exception) -> str:
    """Return the first line of an error's text."""
    text = error.what if isinstance(error, CompileError) else str(error)
    return text.strip().splitlines()[0] if text.strip() else type(error).__name__


def _keep_in_child() -> None:
    """Leak inherited sessions and skip inherited exit handlers."""
    for session in tuple(_sessions):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(session))
    # Runs before all inherited handlers, with the exit code. Only glibc has it.
    on_exit = getattr(_c_library, "on_exit", None)
    if on_exit is not None:
        on_exit(_c_library._exit, None)


os.register_at_fork(after_in_child=_keep_in_child)


#: Bytes of glibc's `fenv_t`, and the offset of MXCSR in it.
_FENV_NBYTES = 32
_MXCSR = 28
#: MXCSR's flush-to-zero and denormals-are-zero bits.
_FLUSH = 0x8040


def flushing(call: Callable[[], object]) -> Callable[[], object]:
    """Wrap a call to flush denormal numbers to zero; return it as it is where not `has_effect`.

    Exponentials of masked scores are denormal, and x86 takes a hundred times as long for each: a
    masked Softmax and products with its result take six times as long. Only the calling thread is
    affected (MXCSR in glibc's `fenv_t`, Linux x86-64); setting it costs 0.6 us.
    """
    return _flushing(call) if has_effect() else call


def _flushing(call: Callable[[], object]) -> Callable[[], object]:
    usual, flush = (ctypes.create_string_buffer(_FENV_NBYTES) for _ in range(2))
    # PyDLL keeps the GIL: releasing it would cost more than the call.
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
    """Whether this platform flushes denormals within a call and restores them after it."""
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
        return False
    return products == [0.0] and smallest * 1.0 > 0.0


# Result types of operators that Stitch does not define


@dataclass(frozen=True, slots=True)
class InferredType:
    """The type that ONNX Runtime infers for a result; None for what it does not infer.

    `kind` is its own text, such as `tensor(float)`.
    """

    kind: str
    data_type: DataType | None
    shape: tuple[int | None, ...] | None


def inferred_results(
    operation: Operation,
    operands: Sequence[ValueType | None],
    known: Sequence[Array | None],
    wanted: Sequence[bool],
) -> list[InferredType | None]:
    """Infer the types of an operation's results; None for those that are not wanted.

    Args:
        operation: The operation; its operator, attributes and opset are used.
        operands: The operands' types; None for an absent operand.
        known: The data of constant operands.
        wanted: Which results to infer.

    Raises:
        CompileError: ONNX Runtime refuses the operation.
    """
    model = _model(operation, operands, known, wanted, with_ranks=True)
    try:
        outputs = _plain_session(model).get_outputs()
    except SESSION_ERRORS as error:
        raise CompileError(first_line(error)) from error
    found = iter([(output.type, output.shape) for output in outputs])
    return [_inferred(next(found), next(found)) if each else None for each in wanted]


def _model(
    operation: Operation,
    operands: Sequence[ValueType | None],
    known: Sequence[Array | None],
    wanted: Sequence[bool],
    *,
    with_ranks: bool = False,
) -> bytes:
    """Return a model of the operation alone, with constants as initializers and untyped results.

    `with_ranks` adds the shape of each result as an output, whose length is the rank: a session
    reports `[]` both for a scalar and for an unknown rank.
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
    kind, dims = result
    name = kind.removeprefix("tensor(").removesuffix(")").upper()
    data_type = None
    if kind.startswith("tensor("):
        with suppress(CompileError, ValueError):  # strings, types that onnx does not know
            data_type = data_type_of_code(TensorProto.DataType.Value(name))
    has_rank = [isinstance(length, int) for length in rank[1]] == [True]
    shape = tuple([d if isinstance(d, int) else None for d in dims]) if has_rank else None
    return InferredType(kind, data_type, shape)
