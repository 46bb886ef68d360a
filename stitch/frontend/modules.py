"""Any module that `stitch.compile` takes, as a computation graph.

A graph, a path, a foreign module or a function, with its examples, becomes a `ComputationGraph`; a
`TrainableSource` reads one again at other shapes. Front ends of optional extras are loaded when
they are needed, and no sooner. No machines or programs here.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from stitch import plugins
from stitch.errors import CompileError, UsageError, unknown
from stitch.graph import ComputationGraph, trace
from stitch.program import (
    Array,
    Constant,
    InputKind,
    SymbolicSizes,
    TensorDesc,
    ValueType,
    is_symbolic,
)
from stitch.report import Device

if TYPE_CHECKING:  # It loads with the package torch.
    from stitch.frontend.torch import CallStructure, StaticCapture

#: Suffixes of the files that Stitch's own front ends read, and of other files that it has.
SUFFIXES = ("yaml", "yml", "onnx", "pt2", "ttb", "ttnn", "ttsys", "json", "py")
#: What makes an object a module for the front end of torch.
_TORCH_MODULES = {
    ("torch.nn.modules.module", "Module"),
    ("torch.export.exported_program", "ExportedProgram"),
    ("torch.jit", "ScriptFunction"),
}


def opened(module: Any) -> Any:
    """The module itself, or the `ExportedProgram` in an archive (`.pt2`) of `torch.export.save`.

    Raises:
        CompileError: The package torch is missing.
        FormatError: The file is no such archive.
    """
    if not (isinstance(module, str | Path) and Path(module).suffix.lower() == ".pt2"):
        return module
    with _reading("archives of torch.export", "torch"):
        from stitch.frontend.torch import load_archive
    return load_archive(Path(module))


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
    if _is_of_onnx(module):
        with _reading("ONNX models", "onnx"):
            from stitch.frontend.onnx import from_onnx
        given = {} if unroll is None else {"unroll": unroll}
        return from_onnx(module, examples, input_shapes, **given)
    if suffix[1:] and suffix[1:] not in SUFFIXES:
        read = plugins.find("frontends", suffix[1:])
        if read is not None:
            return _read_by_plugin(suffix[1:], read, Path(module), examples, input_shapes)
    if unroll is not None:
        raise UsageError("loops are unrolled in ONNX models", got=f"unroll={unroll}")
    if input_shapes:
        raise UsageError("input shapes are for ONNX models", got=", ".join(input_shapes),
                         remedy="pass examples of these shapes")  # fmt: skip
    if isinstance(module, ComputationGraph):
        return module
    if isinstance(module, str | Path):
        if suffix not in (".yaml", ".yml"):
            raise CompileError(
                f"no front end reads {str(module)!r}",
                expected="a module in YAML (.yaml, .yml) or ONNX (.onnx), or a program of "
                "torch.export.save (.pt2)",
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


def onnx_dimensions(path: str | Path) -> dict[str, tuple[int | str | None, ...]]:
    """Return the dimensions of the tensors that an ONNX model needs, by input: a number, the name
    of a size, or None.

    Raises:
        CompileError: The package onnx is missing.
        FormatError: The file is no such model.
    """
    with _reading("ONNX models", "onnx"):
        from stitch.frontend.onnx import input_dimensions
    return input_dimensions(path)


class DynamicModule(NamedTuple):
    """A module whose inputs have symbolic sizes.

    Attributes:
        graph: Its graph.
        sizes: The sizes.
        structure: How calls of a torch module are calls of its program, if they differ.
        static: Converts a torch module with some of its Dims at static sizes; None: the graph needs
            no check.
    """

    graph: ComputationGraph
    sizes: SymbolicSizes
    structure: CallStructure | None = None
    static: StaticCapture | None = None


def read_dynamic(
    module: Any, examples: Sequence[Any] | Mapping[str, Any],
    dynamic_shapes: Mapping[str, Any] | Sequence[Any],
    input_shapes: Mapping[str, Sequence[int | None]] | None = None,
) -> DynamicModule:  # fmt: skip
    """Read a function, ONNX model or torch module whose inputs have symbolic sizes.

    Raises:
        UsageError: The module is of another kind, or `dynamic_shapes` does not fit its inputs.
        CompileError: As for `compile`.
    """
    if _is_of_onnx(module) and isinstance(dynamic_shapes, Mapping):
        with _reading("ONNX models", "onnx"):
            from stitch.frontend.onnx import from_onnx_dynamic
        return DynamicModule(*from_onnx_dynamic(module, examples, dynamic_shapes, input_shapes))
    read = _read_dynamic_by_examples(module, examples, dynamic_shapes)
    _check_shapes(read.graph, input_shapes or {})
    return read


def _read_dynamic_by_examples(
    module: Any, examples: Sequence[Any] | Mapping[str, Any],
    dynamic_shapes: Mapping[str, Any] | Sequence[Any],
) -> DynamicModule:  # fmt: skip
    if is_torch(module):
        with _reading("torch modules", "torch"):
            from stitch.frontend.torch import captured_dynamic_module
        return DynamicModule(*captured_dynamic_module(module, examples, dynamic_shapes))
    if not isinstance(dynamic_shapes, Mapping):
        raise UsageError("dynamic_shapes= in order of the arguments is for torch modules",
                         expected="a mapping of inputs to their axes",
                         got=type(dynamic_shapes).__name__)  # fmt: skip
    if isinstance(module, str | Path | ComputationGraph) or not callable(module):
        raise UsageError(
            "dynamic_shapes= is supported for Python functions, ONNX models and torch modules only",
            got=type(module).__name__,
            remedy="compile the module without it, once for each size",
        )
    sizes = SymbolicSizes(dynamic_shapes)
    return DynamicModule(trace(module, *_by_position(module, examples), sizes=sizes), sizes)


def _check_shapes(graph: ComputationGraph, shapes: Mapping[str, Sequence[int | None]]) -> None:
    """Raise `UsageError` where examples gave other sizes than those asked for; None is any."""
    kinds = {slot.name: graph.values[slot.value].type for slot in graph.inputs}
    for name, shape in shapes.items():
        if name not in kinds:
            raise unknown(f"the module has no input {name!r}", name, kinds, UsageError)
        found = kinds[name].shape
        if len(found) != len(shape) or any(
            asked is not None and not is_symbolic(size) and asked != size
            for asked, size in zip(shape, found, strict=False)
        ):
            raise UsageError(
                f"the example of input {name!r} has another shape",
                expected="x".join("?" if size is None else str(size) for size in shape),
                got="x".join("?" if is_symbolic(size) else str(size) for size in found),
            )


def _read_by_plugin(
    suffix: str, read: Any, path: Path,
    examples: Sequence[Any] | Mapping[str, Any],
    input_shapes: Mapping[str, Sequence[int]] | None,
) -> ComputationGraph:  # fmt: skip
    graph = plugins.called("frontends", suffix, read, path, examples, input_shapes or {})
    if not isinstance(graph, ComputationGraph):
        raise plugins.wrong("frontends", suffix, graph)
    return graph


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


class TrainableSource:
    """A module that was compiled for training, to be read again at other shapes of its inputs.

    It is read in the modes that its parts have now, and with the frozen tensors of `graph`: what
    was read first.
    """

    def __init__(
        self, graph: ComputationGraph, module: Any,
        examples: Sequence[Any] | Mapping[str, Any] = (),
        input_shapes: Mapping[str, Sequence[int]] | None = None, unroll: int | None = None,
    ) -> None:  # fmt: skip
        self._module, self._input_shapes, self._unroll = module, input_shapes or {}, unroll
        by_name_or_position = isinstance(examples, Mapping | list | tuple)
        # Only their shapes and types are wanted: batches are large.
        self._examples = _with_leaves(examples if by_name_or_position else (examples,), _hollow)
        self._states = {s.name for s in graph.inputs if s.kind is InputKind.STATE}
        tensors: set[str] = set()
        self._modes: list[tuple[Any, bool]] = []
        if is_torch(module) and hasattr(module, "modules"):
            self._modes = [(part, part.training) for part in module.modules()]
            tensors = {name for name, _ in module.named_parameters(remove_duplicate=False)}
            tensors |= {name for name, _ in module.named_buffers(remove_duplicate=False)}
        constants = {graph.values[c.value].name: c.data for c in graph.constants}
        self._frozen = {name: data for name, data in constants.items() if name in tensors}

    def read(
        self, shapes: Mapping[str, tuple[int, ...]]
    ) -> tuple[ComputationGraph, dict[str, Array], ComputationGraph | None]:
        """As `read_trainable`, with inputs of these shapes; raises `UsageError` where the module
        has them of others only, and what `compile` raises."""
        examples: Any = self._at(shapes) if callable(self._module) else ()
        given = {**self._input_shapes, **shapes} if _is_of_onnx(self._module) else None
        with self._modes_of_then():
            graph, values, twin = read_trainable(self._module, examples, given, self._unroll)
        graph = self._checked(graph, shapes)
        return graph, values, None if twin is None else self._checked(twin, shapes)

    def read_evaluation(self, shapes: Mapping[str, tuple[int, ...]]) -> ComputationGraph | None:
        """The graph for evaluation of a torch module, with inputs of these shapes; None of others,
        whose graph for training has it inside. Raises as `read`."""
        if not is_torch(self._module):
            return None
        with _reading("torch modules", "torch"):
            from stitch.frontend.torch import evaluation_from_torch
        with self._modes_of_then():
            graph = evaluation_from_torch(self._module, self._at(shapes), self._states)
        return self._checked(graph, shapes)

    def _at(self, shapes: Mapping[str, tuple[int, ...]]) -> Any:
        """The examples with these shapes in the places of theirs."""
        examples = self._examples
        if isinstance(examples, Mapping) and shapes.keys() <= examples.keys():
            return {n: _of_shape(e, shapes[n]) if n in shapes else e for n, e in examples.items()}
        rest = iter(shapes.values())
        count = 0

        def resized(example: Any) -> Any:
            nonlocal count
            count += 1
            return _of_shape(example, next(rest, ()))

        given = _with_leaves(examples, resized)
        if count != len(shapes):
            raise UsageError(
                "the examples do not say which of them are inputs of the program",
                expected=f"{len(shapes)} arrays: {', '.join(shapes)}", got=str(count),
            )  # fmt: skip
        return given

    def _checked(
        self, graph: ComputationGraph, shapes: Mapping[str, tuple[int, ...]]
    ) -> ComputationGraph:
        """The graph with the frozen tensors of then; raises `UsageError` for other inputs."""
        has = {
            slot.name: graph.input_type(i).shape
            for i, slot in enumerate(graph.inputs) if slot.kind is InputKind.ACTIVATION
        }  # fmt: skip
        if not has.items() <= shapes.items():
            raise UsageError("the module has inputs of fixed shapes")
        frozen = self._frozen
        constants = tuple(
            Constant(c.value, frozen.get(graph.values[c.value].name, c.data))
            for c in graph.constants
        )
        return replace(graph, constants=constants)

    @contextmanager
    def _modes_of_then(self) -> Iterator[None]:
        """The parts of a torch module in the modes that they had when it was compiled."""
        before = [(part, part.training) for part, _ in self._modes]
        try:
            for part, training in self._modes:
                part.training = training
            yield
        finally:
            for part, training in before:
                part.training = training


def _with_leaves(value: Any, change: Callable[[Any], Any]) -> Any:
    """What lies in nested containers, with what has a shape changed, in order."""
    if isinstance(value, Mapping):
        return {key: _with_leaves(one, change) for key, one in value.items()}
    if isinstance(value, list | tuple):
        items = [_with_leaves(one, change) for one in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return change(value) if hasattr(value, "shape") else value


def _of_shape(example: Any, shape: tuple[int, ...]) -> Any:
    """An example like another one, of another shape."""
    if isinstance(example, TensorDesc | ValueType):
        return replace(example, shape=shape)
    is_torchs = hasattr(example, "new_zeros")
    return example.new_zeros(shape) if is_torchs else np.zeros(shape, example.dtype)


def _hollow(example: Any) -> Any:
    """An example of the same shape and type on the bytes of one element."""
    if isinstance(example, TensorDesc | ValueType):
        return example
    one = _of_shape(example, ())
    if hasattr(one, "expand"):
        return one.expand(example.shape)
    return np.broadcast_to(one, example.shape)


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


def _is_of_onnx(module: object) -> bool:
    """Whether this is the path of an ONNX model, or a `ModelProto`, without loading the package to
    ask."""
    if isinstance(module, str | Path):
        return Path(module).suffix.lower() == ".onnx"
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
            remedy=f"pip install 'stitch-runtime[{package}]'",
        ) from error
