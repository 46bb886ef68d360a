"""Executors: who computes. A new one is one file here and a run of the conformance suite.

Comes in: programs and regions of bytes. Goes out: steps to call. Must not know plans or devices.
"""

from importlib import import_module

from stitch.errors import UsageError
from stitch.runtime.executors.executor import BoundProgram, Executor, PreparedProgram
from stitch.runtime.executors.null_executor import NullExecutor
from stitch.runtime.executors.numpy_executor import NumpyExecutor
from stitch.runtime.executors.staging import as_bytes, dense_view

#: Executors by name: the module and the class in it; a module is imported when it is asked for.
EXECUTORS: dict[str, tuple[str, str]] = {
    "numpy": ("stitch.runtime.executors.numpy_executor", "NumpyExecutor"),
    "onnxruntime": ("stitch.runtime.executors.onnxruntime", "OnnxRuntimeExecutor"),
    "auto": ("stitch.runtime.executors.automatic", "AutomaticExecutor"),
    "null": ("stitch.runtime.executors.null_executor", "NullExecutor"),
}


def make_executor(name: str | Executor) -> Executor:
    """An executor by name.

    Raises `UsageError` listing the names, or naming the extra to install.
    """
    if isinstance(name, Executor):
        return name
    if name not in EXECUTORS:
        raise UsageError(f"unknown executor {name!r}", expected=" or ".join(EXECUTORS))
    module, found = EXECUTORS[name]
    try:
        made = getattr(import_module(module), found)()
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("stitch"):
            raise
        raise UsageError(
            f"the executor {name!r} needs {error.name!r}, which is not installed",
            remedy="pip install stitch-runtime[onnx]",
        ) from error
    assert isinstance(made, Executor)
    return made


__all__ = [
    "EXECUTORS", "BoundProgram", "Executor", "NullExecutor", "NumpyExecutor", "PreparedProgram",
    "as_bytes", "dense_view", "make_executor",
]  # fmt: skip
