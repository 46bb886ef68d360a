"""Any module that `stitch.compile` takes, as a computation graph.

Comes in: a graph, a path, a foreign module or a function, and its examples. Goes out: a
`ComputationGraph`. Front ends of optional extras are loaded when they are needed, and no sooner.
Must not know: machines, programs.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stitch.errors import CompileError, UsageError
from stitch.graph import ComputationGraph, trace
from stitch.program import Array
from stitch.report import Device

if TYPE_CHECKING:  # It loads with the package torch.
    from stitch.frontend.torch import CallStructure

#: What makes an object a module for the front end of torch.
_TORCH_MODULES = {
    ("torch.nn.modules.module", "Module"),
    ("torch.export.exported_program", "ExportedProgram"),
    ("torch.jit", "ScriptFunction"),
}


def read_graph(
    module: Any,
    examples: Sequence[Any] | Mapping[str, Any] = (),
    input_shapes: Mapping[str, Sequence[int]] | None = None,
    unroll: int | None = None,
) -> ComputationGraph:
    """The computation graph of anything that `compile` takes; raises what it raises."""
    return read_module(module, examples, input_shapes, unroll)[0]


def read_module(
    module: Any,
    examples: Sequence[Any] | Mapping[str, Any] = (),
    input_shapes: Mapping[str, Sequence[int]] | None = None,
    unroll: int | None = None,
) -> tuple[ComputationGraph, CallStructure | None]:
    """The computation graph of anything that `compile` takes, and how calls of the module are
    calls of its program, where that is not the same; raises what `compile` raises."""
    if is_torch(module) and not input_shapes and unroll is None:
        with _reading("torch modules", "torch"):
            from stitch.frontend.torch import captured_module
        return captured_module(module, examples)
    return _read_other(module, examples, input_shapes, unroll), None


def _read_other(
    module: Any,
    examples: Sequence[Any] | Mapping[str, Any],
    input_shapes: Mapping[str, Sequence[int]] | None,
    unroll: int | None,
) -> ComputationGraph:
    suffix = Path(module).suffix.lower() if isinstance(module, str | Path) else ""
    if suffix == ".onnx" or _is_onnx(module):
        with _reading("ONNX models", "onnx"):
            from stitch.frontend.onnx import from_onnx
        given = {} if unroll is None else {"unroll": unroll}
        return from_onnx(module, examples, input_shapes, **given)
    if unroll is not None:
        raise UsageError("loops are unrolled in ONNX models", got=f"unroll={unroll}")
    if input_shapes:
        raise UsageError("input shapes are for ONNX models", got=", ".join(input_shapes))
    if isinstance(module, ComputationGraph):
        return module
    if isinstance(module, str | Path):
        if suffix not in (".yaml", ".yml"):
            raise CompileError(
                f"no front end reads {str(module)!r}",
                expected="a module in YAML (.yaml, .yml) or ONNX (.onnx)",
                remedy="it is compiled: device.load(path)" if suffix == ".ttb" else None,
            )
        from stitch.frontend.yaml import load_module

        return load_module(module)
    if callable(module):
        return trace(module, *_by_position(module, examples))
    raise UsageError(
        "compile takes a computation graph, a path, a torch module or a function",
        got=type(module).__name__,
    )


def read_trainable(
    module: Any,
    examples: Sequence[Any] | Mapping[str, Any] = (),
    input_shapes: Mapping[str, Sequence[int]] | None = None,
    unroll: int | None = None,
) -> tuple[ComputationGraph, dict[str, Array], ComputationGraph | None]:
    """The graph of anything that `compile` takes, for training; values of its inputs by name; and
    the graph for evaluation where it is another one.

    A torch module (as it is: in training mode or not) gives its parameters and buffers as inputs;
    of other modules the weights are constants, and no values are given. Raises as `read_graph`.
    """
    if is_torch(module) and not input_shapes and unroll is None:
        with _reading("torch modules", "torch"):
            from stitch.frontend.torch import from_torch_for_training
        return from_torch_for_training(module, examples)
    return read_graph(module, examples, input_shapes, unroll), {}, None


def graph_of_torch_call(
    function: Callable[..., Any], arguments: Sequence[Any], named: Mapping[str, Any]
) -> ComputationGraph:
    """The graph of a call of a function of torch's; raises `CompileError`."""
    with _reading("functions of torch's", "torch"):
        from stitch.frontend.torch import graph_of_call
    return graph_of_call(function, arguments, named)


def torch_device(options: Mapping[str, Any] | None) -> Device:
    """The device of torch.compile with these options; `CompileError` where torch is missing."""
    with _reading("torch modules", "torch"):
        from stitch.frontend.torch import device_of
    return device_of(options)


def _by_position(
    function: Callable[..., Any], examples: Sequence[Any] | Mapping[str, Any]
) -> Sequence[Any]:
    """Examples in the order of a function's parameters; raises `UsageError` for other names."""
    if not isinstance(examples, Mapping):
        return examples
    names = list(inspect.signature(function).parameters)
    if set(names) != set(examples):
        raise UsageError(
            "examples by name are named like the function's parameters",
            expected=", ".join(names),
            got=", ".join(map(str, examples)),
        )
    return [examples[name] for name in names]


def _is_onnx(module: object) -> bool:
    """Whether this is an ONNX `ModelProto`, without loading the package to ask."""
    kind = type(module)
    return kind.__name__ == "ModelProto" and kind.__module__.partition(".")[0] == "onnx"


def is_torch(module: object) -> bool:
    """Whether this is a torch module or an exported program, without loading torch to ask."""
    bases = {(base.__module__, base.__name__) for base in type(module).__mro__}
    return not bases.isdisjoint(_TORCH_MODULES)


@contextmanager
def _reading(what: str, package: str) -> Iterator[None]:
    """Explains that the package is missing without which such modules cannot be read."""
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != package:
            raise
        raise CompileError(
            f"reading {what} needs the package {package}",
            remedy=f"pip install stitch-runtime[{package}]",
        ) from error
