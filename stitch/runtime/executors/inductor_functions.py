"""Consecutive operations of a program as one function, which torch inductor compiles.

The kernels of PyTorch that compute the operations one by one are traced into a graph. Its results
are tensors that the caller gives, so they are written straight into planned places; what is
computed in between lies in inductor's memory. Inductor caches compiled code by the content of the
graph, also for other processes.
"""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Callable, Container, Hashable, Mapping, Sequence
from concurrent.futures import Future
from ctypes import c_ulong, py_object, pythonapi
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from threading import Lock, Thread
from typing import Any, TypeVar

import torch

from stitch.errors import UsageError
from stitch.program import ABSENT, Array, DataType, Operation, Program, Value
from stitch.runtime.executors.cuda_graphs import Launch
from stitch.runtime.executors.cuda_kernels import (
    KERNELS,
    PRODUCTS,
    VIEWS,
    TensorCall,
    takes_strides,
    views_of,
    with_precision,
)
from stitch.runtime.executors.executor import Thunk
from stitch.runtime.executors.torch_bytes import TORCH_TYPES
from stitch.runtime.executors.triton_kernels import TYPES, KernelWriter

#: Of inductor: each result is rounded to its type, as by kernels one by one.
OPTIONS = {"emulate_precision_casts": True}
#: A vector load of a card reads so many bytes at once.
ALIGNMENT = 16
#: On a processor inductor's code has a few digits of these near 0, and overflows early in `Acosh`.
_INEXACT = {("", op) for op in ("Erf", "Elu", "Selu", "Atanh", "Acosh")}
#: One thread compiles at a time.
_COMPILING = Lock()
Result = TypeVar("Result")


def check_compiler(device: torch.device) -> None:
    """Import inductor; raise `UsageError` if it lacks the compiler that it needs for a device."""
    from torch.utils._triton import has_triton

    if has_triton() if device.type == "cuda" else shutil.which(os.environ.get("CXX", "g++")):
        # In a thread that Ctrl-C does not end: half imported, packages cannot be imported again.
        importing = Thread(target=_import_inductor)
        importing.start()
        importing.join()
        return
    needed, remedy = "a C++ compiler", "install g++, or name another compiler in CXX"
    if device.type == "cuda":
        needed = "Triton, for a card of compute capability 7.0 or higher"
        remedy = "pip install triton, or PyTorch's CUDA wheel for Linux, which brings it"
    raise UsageError(
        f"inductor cannot compile for {str(device)!r}", expected=needed, got="none found",
        remedy=f"{remedy}; or open the device without inductor, and PyTorch's kernels compute",
    )  # fmt: skip


def _import_inductor() -> None:
    with warnings.catch_warnings(action="ignore"):  # Of its own modules.
        import_module("torch._inductor.compile_fx")


def functions_of(
    program: Program, attributes: Sequence[Mapping[str, Any]], known: Mapping[int, Array],
    device: torch.device, apart: Container[int] = (),
) -> dict[int, int]:  # fmt: skip
    """Return the consecutive operations that become functions, first to end; not those `apart`.

    The last product of a function is left out, as its kernel writes into its planned place, and
    inductor's would be copied there.
    """
    operations, functions = program.operations, dict[int, int]()
    first = 0
    with _fake_tensors():
        for index in range(len(operations) + 1):
            if index < len(operations) and index not in apart:
                one = operations[index], attributes[index]
                if _is_traceable(*one, program.values, known, device):
                    continue
            end = index
            while end > first and _key(operations[end - 1]) in (*VIEWS, *PRODUCTS):
                end -= 1
            if sum(_key(o) not in VIEWS for o in operations[first:end]) > 1:
                functions[first] = end
            first = index + 1
    return functions


def _key(operation: Operation) -> tuple[str, str]:
    return operation.domain, operation.op


def _fake_tensors() -> Any:
    """Return a mode of tensors without memory. It refuses tensors with numbers, as indices that are
    known: in a function they would lie on the host, and a graph cannot read them there."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    # Without a `ShapeEnv` inductor caches nothing.
    return FakeTensorMode(shape_env=ShapeEnv(), static_shapes=True)


def _is_traceable(
    operation: Operation, attributes: Mapping[str, Any], values: Sequence[Value],
    known: Mapping[int, Array], device: torch.device,
) -> bool:  # fmt: skip
    """Whether an operation computes floating-point numbers and conditions by a kernel that needs
    nothing of the host, tried on tensors without memory."""
    if device.type == "cpu" and _key(operation) in _INEXACT:
        return False
    touched = {v for v in (*operation.inputs, *operation.outputs) if v != ABSENT and v not in known}
    for value in touched:
        layout = values[value].layout
        kinds = {values[value].type.data_type, layout and layout.data_type}
        if not kinds <= {*TYPES, None} or 0 in values[value].type.shape:
            return False
    if ABSENT in operation.outputs or not touched.intersection(operation.inputs):
        return False
    operands = [None if v == ABSENT else _new(values[v], device) for v in operation.inputs]
    try:
        traced(operation, attributes, operands, values, known)
    except Exception:  # Whatever PyTorch refuses.
        return False
    return True


def _compute(value: Value) -> torch.dtype:
    return TORCH_TYPES[DataType.from_dtype(value.type.data_type.compute_dtype)]


def _new(value: Value, device: torch.device) -> torch.Tensor:
    return torch.empty(value.type.shape, dtype=_compute(value), device=device)


def traced(
    operation: Operation, attributes: Mapping[str, Any], operands: Sequence[torch.Tensor | None],
    values: Sequence[Value], known: Mapping[int, Array],
) -> Sequence[torch.Tensor]:  # fmt: skip
    """Return the results of an operation as new tensors, rounded as they are stored.

    `operands` have the compute types; None: absent. Raises `LookupError` without a kernel that
    suits.
    """
    arrays = [known.get(v) for v in operation.inputs]
    x = operands[0]
    if x is not None and _key(operation) in VIEWS:
        shapes = [values[v].type.shape for v in operation.outputs]
        views = views_of(operation.op, x, shapes, attributes, arrays)
        if views is not None:
            return views
    read = [t if t is None or takes_strides(operation, t) else t.contiguous() for t in operands]
    (device,) = {t.device for t in read if t is not None}
    results = [_new(values[v], device) for v in operation.outputs]
    call = TensorCall(read, results, attributes, arrays, _cannot_flag)
    steps = KERNELS[_key(operation)](call)
    if steps is None:
        raise LookupError(operation.title)
    for step in steps:
        step()
    return [_rounded(t, values[v]) for t, v in zip(results, operation.outputs, strict=True)]


def _cannot_flag(indices: torch.Tensor, size: int) -> list[Thunk]:
    raise LookupError("indices that are known in a run only")


def _rounded(tensor: torch.Tensor, value: Value) -> torch.Tensor:
    """Return a result as its readers see it: in its own type, and in the type that is stored."""
    stored = value.type if value.layout is None else value.layout
    for kind in (value.type.data_type, stored.data_type):
        tensor = tensor.to(TORCH_TYPES[kind]).to(tensor.dtype)
    return tensor


@dataclass
class FunctionWriter(KernelWriter):
    """Collects what a function of consecutive operations reads and writes, and compiles it.

    `compiled` has the functions before, by operations and by where tensors are in memory.
    """

    precision: str = "ieee"
    compiled: dict[Hashable, Callable[..., Any]] = field(default_factory=dict)
    _read: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        operations = {id(o): (o, a) for o, a in self.makers.values()}
        self._operations = [*operations.values()]
        inputs = dict.fromkeys(v for o, _ in self._operations for v in o.inputs if v != ABSENT)
        self._read = [v for v in inputs if v not in self.makers]
        self.loads = [self.read(value) for value in self._read]

    def name(self, value: int, view: Any = ()) -> str:
        return str(value)

    def allows(self, target: torch.Tensor) -> bool:
        # Compilers assume that what a function writes is not what it reads.
        return not self.reads(target)

    def launch(self) -> Launch:
        tensors = [*self.loads, *(target for _, target in self.stores)]
        key = tuple(self.makers), tuple(name for name, _ in self.stores), *map(_place, tensors)
        if key not in self.compiled:
            self.compiled[key] = self._compiled(tensors)
        return Launch(_call, self.compiled[key], self.precision, tensors)

    def _compiled(self, tensors: Sequence[torch.Tensor]) -> Callable[..., Any]:
        from torch.fx.experimental.proxy_tensor import make_fx

        def made() -> Callable[..., Any]:
            with _fake_tensors():
                examples = [_like(tensor) for tensor in tensors]
                graph = make_fx(self._function)(*examples)
            return compiled_by_inductor(graph, examples)

        found = _in_own_thread(partial(_alone, self.precision, made))
        # Kernels are tuned in their first call, which must not be in a graph.
        written = [torch.empty_like(target) for _, target in self.stores]
        _call(found, self.precision, [*self.loads, *written])
        return found

    def _function(self, *tensors: torch.Tensor) -> None:
        made: dict[int, Any] = {ABSENT: None}
        for value, tensor in zip(self._read, tensors, strict=False):
            made[value] = tensor.to(_compute(self.values[value]))
        for operation, attributes in self._operations:
            operands = [made[v] for v in operation.inputs]
            results = traced(operation, attributes, operands, self.values, self.known)
            made |= zip(operation.outputs, results, strict=True)
        for (name, _), target in zip(self.stores, tensors[len(self._read) :], strict=True):
            target.copy_(made[int(name)])


def compiled_by_inductor(graph: Any, examples: Sequence[torch.Tensor]) -> Callable[..., Any]:
    """Return a graph compiled for tensors like the examples, or what was cached of it."""
    from torch._inductor import compile as compile_by_inductor

    # Processes that compile would outlive the compilation; the many kernels of a card need them.
    alone = {} if examples[0].is_cuda else {"compile_threads": 1}
    # What inductor says of its own code. Filters belong to the process: one thread sets them.
    with _COMPILING, warnings.catch_warnings(action="ignore"):
        made: Callable[..., Any] = compile_by_inductor(graph, examples, OPTIONS | alone)
    return made


def explained(error: Exception) -> str:
    """Return the first line of inductor's error, the first one of a compiler, and a remedy."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    first, *others = str(error).splitlines() or [type(error).__name__]
    found = next((f"; {line.strip()}" for line in others if "error: " in line), "")
    remedy = f"a process that was killed may have left a torn file in {cache_dir()}: delete it"
    return f"{first}{found}\n  try: {remedy}"


def _place(tensor: torch.Tensor) -> Hashable:
    """Return what a function is compiled for."""
    shift = tensor.data_ptr() % ALIGNMENT
    return tensor.shape, tensor.stride(), tensor.dtype, shift


def _like(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor with memory of its own that lies in it as another one does in its own."""
    ends = zip(tensor.shape, tensor.stride(), strict=True)
    start = tensor.data_ptr() % ALIGNMENT // tensor.itemsize
    length = start + 1 + sum((size - 1) * stride for size, stride in ends)
    flat = torch.empty(length, dtype=tensor.dtype, device=tensor.device)
    return flat.as_strided(tensor.shape, tensor.stride(), start)


def _in_own_thread(call: Callable[[], Result]) -> Result:
    """Return what a call returns in a thread of its own: modes of PyTorch are those of a thread,
    and the call may be inside of torch.compile, which compiles nothing then.

    An exception that interrupts the caller, as Ctrl-C does, ends the thread too, not waited for.
    """
    future = Future[Result]()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    thread = Thread(target=run, name="stitch-inductor")
    thread.start()
    try:
        return future.result()
    finally:
        if not future.done():
            pythonapi.PyThreadState_SetAsyncExc(c_ulong(thread.ident or 0), py_object(SystemExit))


def _alone(precision: str, call: Callable[[], Result]) -> Result:
    """Return what a call returns whatever types and gradients the caller has chosen."""
    cpu, cuda = (torch.autocast(kind, enabled=False) for kind in ("cpu", "cuda"))
    found = list[Result]()
    with torch.inference_mode(False), torch.no_grad(), cpu, cuda:
        with_precision(precision, lambda: found.append(call()))
    return found[0]


def _call(function: Callable[..., Any], precision: str, tensors: Sequence[torch.Tensor]) -> None:
    _alone(precision, partial(function, *tensors))
