"""The ONNX Runtime executor: a program is one model, one session, and one call per run.

Dense values are bound where they lie in the spaces: nothing is copied to enter or leave, and
constants are read from the file's mapping. Others are staged. Programs compute in float32 where
their types are narrower, and round at casts and at their outputs; so results agree with the NumPy
executor's within a relative 1e-4 in float32 (sums are taken in another order), and within one
rounding of the narrow type for every operation between an output and its inputs.

What ONNX leaves open, ONNX Runtime decides otherwise than NumPy, on NaN, infinities and other
values at the edges of their types: `docs/executor_differences.md` lists all of it.

Numbers below the smallest normal one (1.2e-38) count as zero in programs with a Softmax, where the
platform can be told so for one call: see `denormals`.

An output that takes the buffer of an input is computed apart and copied, but where every operation
of the program is one that ONNX Runtime itself declares safe in place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache, partial
from typing import Any

import numpy as np
import onnxruntime
from onnxruntime.capi import onnxruntime_pybind11_state as ort_errors

from stitch.errors import CompileError, TaskError, UsageError
from stitch.machine import MachineShape
from stitch.ops import bind
from stitch.program import Array, Operation, Program
from stitch.runtime.executors.executor import (
    BoundProgram,
    Executor,
    PreparedProgram,
    ProgramBytes,
    Thunk,
)
from stitch.runtime.executors.found_once import found_once
from stitch.runtime.executors.host.host_bytes import program_bytes, session_bytes
from stitch.runtime.executors.host.numpy_executor import PreparedKernels
from stitch.runtime.executors.host.staging import StagedRegions, StagingArrays
from stitch.runtime.executors.onnx.denormals import flushing
from stitch.runtime.executors.onnx.forks import keep_in_children
from stitch.runtime.executors.onnx.form_writer import OnnxForm, value_name
from stitch.runtime.executors.onnx.model_form import onnx_form, operation_form
from stitch.runtime.executors.workspace import Workspace

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


class OnnxRuntimeExecutor(Executor):
    """Runs whole programs by ONNX Runtime's CPU kernels; `intra_op_threads` is the user's to set.

    Raises `UsageError` for fewer than one thread.
    """

    name = "onnxruntime"

    def __init__(self, intra_op_threads: int = 1) -> None:
        if intra_op_threads < 1:
            raise UsageError("an executor needs at least one thread", got=str(intra_op_threads))
        self.intra_op_threads = intra_op_threads

    def prepare(
        self, program: Program, machine: MachineShape, workspace: Workspace | None = None
    ) -> PreparedProgram:
        """Make a session; raises `CompileError` listing every operation that it cannot run."""
        return _Prepared(program, machine, self._session_of(program))

    def host_bytes(self, program: Program) -> ProgramBytes:
        """A bound for each operator of ONNX Runtime, and for its arena."""
        return program_bytes(program, session_bytes, in_sessions=True)

    def _session_of(self, program: Program) -> Session | None:
        if not program.outputs:
            return None
        try:
            return Session(onnx_form(program), self.intra_op_threads)
        except REFUSALS as error:
            raise self._refusal(program, error) from error

    def _refusal(self, program: Program, error: Exception) -> CompileError:
        """Which operations are to blame: each is tried by itself."""
        reasons: dict[str, str] = {}
        for index, operation in enumerate(program.operations):
            name = f"{operation.domain}.{operation.op}" if operation.domain else operation.op
            where = operation.location or f"operation {index}"
            try:
                Session(operation_form(program, operation), self.intra_op_threads)
            except REFUSALS as found:
                kinds = ", ".join(program.values[v].type.text() for v in operation.inputs if v >= 0)
                reasons.setdefault(f"{name}({kinds}) at {where}", _first_line(found))
        listed = "; ".join(f"{what}: {why}" for what, why in reasons.items())
        return CompileError(
            "the onnxruntime executor cannot run " + (listed or _first_line(error)),
            where=f"program {program.name!r}",
            remedy="use the numpy executor for this program (executor='numpy')",
        )


def _first_line(error: Exception) -> str:
    text = error.what if isinstance(error, CompileError) else str(error)
    return text.strip().splitlines()[0] if text.strip() else type(error).__name__


class Session:
    """A session and what it refers to, for as long as it lives."""

    def __init__(self, form: OnnxForm, threads: int) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        options.inter_op_num_threads = 1
        options.use_deterministic_compute = True
        # One block for all values of a run, beside what the first run took: 5 MiB more for a small
        # transformer's training, and no faster.
        options.enable_mem_pattern = False
        _share_arena()
        options.add_session_config_entry("session.use_env_allocators", "1")
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL
        # Errors are raised; what it would print beside them helps nobody.
        options.log_severity_level = 4
        self.form = form
        self.held = [onnxruntime.OrtValue.ortvalue_from_numpy(a) for _, a in form.weights]
        if form.weights:
            options.add_external_initializers([name for name, _ in form.weights], self.held)
        self.session = onnxruntime.InferenceSession(
            form.model, options, providers=["CPUExecutionProvider"],
            disabled_optimizers=[*SLOWER_FUSIONS, *form.without],
        )  # fmt: skip
        keep_in_children(self.session)

    def bind(self, arrays: dict[int, Array]) -> Callable[[], object]:
        """A call that computes on these arrays, which must outlive it."""
        binding = self.session.io_binding()
        for values, point in (
            (self.form.inputs, binding.bind_input), (self.form.outputs, binding.bind_output)
        ):  # fmt: skip
            for value in values:
                array = arrays[value]
                where = array.ctypes.data
                shape = self.form.blocked.get(value, array.shape)
                point(value_name(value), "cpu", 0, array.dtype.type, shape, where)
        return bound_call(self.session, binding)


@cache
def _share_arena() -> None:
    """One arena for the sessions of this process, once: made here, or by somebody before.

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


class _Prepared(PreparedProgram):
    def __init__(self, program: Program, machine: MachineShape, session: Session | None) -> None:
        self.program = program
        self.machine = machine
        self.session = session
        self.staging = StagingArrays(program, machine)
        self.apart = computed_apart(program)
        self.constants = program.constant_data()
        self.expectations = [o for o in program.operations if (o.domain, o.op) == EXPECT]
        self.masked = any(not o.domain and o.op in MASKED for o in program.operations)
        self.repacked_nbytes = _repacked_nbytes(program)

    def bind(
        self, inputs: tuple[Array, ...], outputs: tuple[Array, ...], scratch: Array | None
    ) -> BoundProgram:
        """One call between the steps of staging; operation by operation by NumPy's kernels."""
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
        call = session_call(self.session, arrays, self.program.name, masked=self.masked)

        @cache
        def one_by_one() -> BoundProgram:
            return self._by_operation.bind_plainly(inputs, outputs, scratch)

        steps = (*before, call, *after)
        staged = self.staging.nbytes + self.repacked_nbytes
        return BoundProgram(steps, (), arrays, staged, one_by_one)

    @found_once
    def _by_operation(self) -> PreparedKernels:
        return PreparedKernels(self.program, self.machine, Workspace())


def _check(
    operation: Operation, arrays: dict[int, Array], constants: dict[int, Array]
) -> Sequence[Thunk]:
    """Steps that compare an input with the value that the program was compiled for."""
    nothing = np.empty(0, np.float32)
    wanted = constants[operation.inputs[2]]
    found = arrays[operation.inputs[1]]
    return bind(
        operation.op,
        [nothing, found, wanted.astype(found.dtype, copy=False)],
        [nothing],
        attributes=operation.attributes,
        domain=operation.domain,
    )


def session_call(session: Session, arrays: dict[int, Array], name: str, *, masked: bool) -> Thunk:
    """A step that runs a session on arrays; raises `TaskError` naming the program.

    `masked` says that it holds operators whose kernels make denormal numbers.
    """
    call = session.bind(arrays)
    if masked:
        call = flushing(call)

    def run() -> None:
        try:
            call()
        except SESSION_ERRORS as error:
            raise TaskError(
                "ONNX Runtime stopped: " + _first_line(error), where=f"program {name!r}"
            ) from error

    return run


def computed_apart(program: Program) -> frozenset[int]:
    """The outputs that take an input's buffer and cannot be proved safe in place.

    Proved are those in programs of nothing but `SAFE_IN_PLACE` operations, where the operation
    that writes the output is the only one that reads the input.
    """
    safe = all(o.op in SAFE_IN_PLACE and not o.domain for o in program.operations)
    found = set()
    for slot in program.outputs:
        if slot.aliases_input is None:
            continue
        source = program.inputs[slot.aliases_input].value
        readers = [o for o in program.operations if source in o.inputs]
        if not (safe and len(readers) == 1 and slot.value in readers[0].outputs):
            found.add(slot.value)
    return frozenset(found)


def _repacked_nbytes(program: Program) -> int:
    """Bytes of weights of which it keeps a rearranged copy, at most.

    Measured for Gemm, where a session grows by all of them; convolutions are assumed to do so."""
    weights = {o.inputs[1] for o in program.operations if o.op in ("MatMul", "Gemm", "Conv")}
    return sum(c.data.nbytes for c in program.constants if c.value in weights)
