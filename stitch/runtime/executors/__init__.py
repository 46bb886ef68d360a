"""Executors: who computes. A new one is one file here and a run of the conformance suite.

Comes in: programs and regions of bytes. Goes out: steps to call. Must not know plans or devices.
"""

from stitch.errors import UsageError
from stitch.runtime.executors.executor import BoundProgram, Executor, PreparedProgram
from stitch.runtime.executors.null_executor import NullExecutor
from stitch.runtime.executors.numpy_executor import NumpyExecutor
from stitch.runtime.executors.staging import as_bytes, dense_view

EXECUTORS: dict[str, type[Executor]] = {
    NumpyExecutor.name: NumpyExecutor,
    NullExecutor.name: NullExecutor,
}


def make_executor(name: str | Executor) -> Executor:
    """An executor by name; raises `UsageError` listing the names."""
    if isinstance(name, Executor):
        return name
    found = EXECUTORS.get(name)
    if found is None:
        raise UsageError(f"unknown executor {name!r}", expected=" or ".join(EXECUTORS))
    return found()


__all__ = [
    "EXECUTORS", "BoundProgram", "Executor", "NullExecutor", "NumpyExecutor", "PreparedProgram",
    "as_bytes", "dense_view", "make_executor",
]  # fmt: skip
