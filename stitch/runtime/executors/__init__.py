"""Executors compute programs. A new one needs one module here and the conformance suite."""

from importlib import import_module
from typing import Any

from stitch import plugins
from stitch.errors import UsageError, closest
from stitch.on_demand import late_import
from stitch.option_values import INDUCTOR, is_torch_device
from stitch.runtime.executors.executor import (
    BoundProgram,
    CallBox,
    CallKernel,
    Executor,
    FunctionCall,
    PreparedProgram,
    ProgramBytes,
    Workspace,
    cached_attribute,
    call_in_turn,
    ignore_errors,
    prepared_context_run,
    with_fp_errors_ignored,
)
from stitch.runtime.executors.host import (
    OperationReferences,
    as_bytes,
    committed_nbytes,
    dense_view,
    program_peak,
)
from stitch.runtime.executors.prices import (
    LIBRARY_PRICES,
    Curve,
    Prices,
    PriceTable,
    least_copy_microseconds,
    least_microseconds,
    load_prices,
    parse_prices,
    price_names,
    processor_name,
    this_processor,
)

#: Executors by name: module and class; the module is imported on first use.
EXECUTORS: dict[str, tuple[str, str]] = {
    "numpy": ("stitch.runtime.executors.host", "NumpyExecutor"),
    "onnxruntime": ("stitch.runtime.executors.onnx", "OnnxRuntimeExecutor"),
    "auto": ("stitch.runtime.executors.automatic", "AutomaticExecutor"),
    "torch": ("stitch.runtime.executors.torch_executor", "TorchExecutor"),
    "null": ("stitch.runtime.executors.executor", "NullExecutor"),
}
#: Executors that take a number of threads.
THREADED = ("onnxruntime", "auto")
#: Executors that choose kernels by a price table.
PRICED = ("auto", "torch")
_THREADS_ELSEWHERE = {
    "numpy": "NumPy's threads are set before it is loaded, as in OMP_NUM_THREADS=4",
    "torch": "PyTorch's threads are those of torch.set_num_threads, or of OMP_NUM_THREADS",
}


def is_own(executor: Executor) -> bool:
    """Whether an executor is one of Stitch's, whose steps call no user code."""
    return type(executor).__module__.startswith(f"{__name__}.")


def make_executor(
    name: str | Executor,
    threads: int | None = None,
    *,
    prices: Prices | None = None,
    tf32: bool = False,
) -> Executor:
    """Create an executor.

    Args:
        name: A name of `EXECUTORS` or of a plugin; a PyTorch device, `torch:cpu` or `cuda:0`, in
            whose memory all spaces but the host's lie then (with `-inductor` behind it, inductor
            compiles its operations); or an executor, which is returned as it is.
        threads: Threads per operation; 1 by default.
        prices: The price table, see `load_prices`; by default that of this processor's family.
        tf32: Whether a card may round operands of products to TF32.

    Raises:
        UsageError: Unknown name, missing package or compiler, fewer threads than one, or an
            argument that the executor does not take.
    """
    if tf32 and not is_torch_device(name):
        raise UsageError(
            f"the executor {name!r} has no TF32", expected="a device of PyTorch, as cuda:0",
            remedy="leave tf32 out",
        )  # fmt: skip
    if not isinstance(name, Executor) and name not in EXECUTORS:
        name = _of_device(name, tf32) if is_torch_device(name) else _of_plugin(name)
    called = name if isinstance(name, str) else name.name
    if threads is not None and name not in THREADED:
        raise UsageError(
            f"the executor {called!r} takes no number of threads",
            expected=" or ".join(THREADED),
            remedy=_THREADS_ELSEWHERE.get(called),
        )
    if prices is not None and name not in PRICED:
        raise UsageError(
            f"the executor {called!r} takes no prices: it has nothing to choose",
            expected=" or ".join(PRICED),
        )
    if isinstance(name, Executor):
        return name
    module, class_name = EXECUTORS[name]
    options: dict[str, Any] = {} if threads is None else {"intra_op_threads": threads}
    if prices is not None:
        options["prices"] = prices
    try:
        with late_import():
            executor = getattr(import_module(module), class_name)(**options)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("stitch"):
            raise
        raise UsageError(
            f"the executor {name!r} needs {error.name!r}, which is not installed",
            remedy=f"pip install 'stitch-runtime[{'torch' if name == 'torch' else 'onnx'}]'",
        ) from error
    assert isinstance(executor, Executor)
    return executor


def known_executors() -> tuple[str, ...]:
    """Return the names that `make_executor` takes: shipped ones, then those of plugins."""
    return (*EXECUTORS, *plugins.names("executors"))


def _of_plugin(name: str) -> Executor:
    make = plugins.find("executors", name)
    if make is None:
        raise UsageError(
            f"unknown executor {name!r}",
            expected=" or ".join(known_executors()),
            remedy="open_device('cuda:0', executor='cuda-inductor') or 'torch:cpu': its memory is "
            "that of a PyTorch device"
            if name == f"cuda{INDUCTOR}"
            else closest(str(name), known_executors()) or None,
        )
    made = plugins.called("executors", name, make) if callable(make) else make
    if not isinstance(made, Executor):
        raise plugins.wrong("executors", name, made)
    return made


def _of_device(name: str, tf32: bool) -> Executor:
    """Return the executor of a PyTorch device, `torch:cpu` or `cuda:N`."""
    try:
        with late_import():
            cuda = import_module("stitch.runtime.executors.cuda_executor")
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise UsageError(
            f"the device {name!r} needs 'torch', which is not installed",
            remedy="pip install 'stitch-runtime[torch]'",
        ) from error
    device = cuda.torch_device_of(name.removesuffix(INDUCTOR))
    made = cuda.CudaExecutor(device, tf32=tf32, inductor=name.endswith(INDUCTOR))
    assert isinstance(made, Executor)
    return made


__all__ = [
    "EXECUTORS", "LIBRARY_PRICES", "BoundProgram", "CallBox", "CallKernel", "Curve", "Executor",
    "FunctionCall",
    "OperationReferences", "PreparedProgram", "PriceTable", "Prices", "ProgramBytes",
    "Workspace",
    "as_bytes", "call_in_turn", "committed_nbytes", "dense_view", "cached_attribute",
    "ignore_errors", "is_own", "known_executors",
    "least_copy_microseconds", "least_microseconds", "load_prices", "make_executor",
    "parse_prices", "prepared_context_run", "price_names", "processor_name", "program_peak",

    "this_processor", "with_fp_errors_ignored",
]  # fmt: skip
