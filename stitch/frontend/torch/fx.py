"""PyTorch modules: an nn.Module, an fx GraphModule or an ExportedProgram as a computation graph.

Comes in: the module and example inputs (a tuple, or a dict by name). Goes out: a
`ComputationGraph`: weights and buffers as constants named as in the module's state dict, tied ones
once, user's lines as locations. Graphs of modules and functions (`symbolic_trace`) are captured
again by torch.export, so one table of ATen operators (`lowering`) serves all. Importing this
module needs the package torch (an optional extra). Must not know: machines.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree

from stitch.errors import CompileError
from stitch.frontend.torch.aten_call import (
    ComplexTensor,
    array_of,
    data_type_of,
    in_pairs,
    is_complex,
)
from stitch.frontend.torch.aten_walk import lower_graph
from stitch.frontend.torch.export import Examples, exported
from stitch.frontend.torch.refused_nodes import EVAL_REMEDY
from stitch.graph import ComputationGraph, ComputationGraphBuilder, SymbolicTensor

_INPUT = torch.export.graph_signature.InputKind
_OUTPUT = torch.export.graph_signature.OutputKind


def from_fx(
    module: Any, example_inputs: Examples = (), name: str | None = None
) -> ComputationGraph:
    """The graph of a torch module at the shapes of its examples.

    `example_inputs`: tensors, arrays or descriptors, by position or by name; an exported program
    needs none. Raises `CompileError` with every unsupported operator and its source line, or with
    the line whose control flow depends on data.
    """
    title = name or _title(module)
    program = exported(module, example_inputs)
    _refuse_mutation(program, title)
    builder = ComputationGraphBuilder(title)
    constants = _Constants(builder)
    bindings: dict[str, Callable[[], Any]] = {}
    placeholders = [node for node in program.graph.nodes if node.op == "placeholder"]
    for spec, node in zip(program.graph_signature.input_specs, placeholders, strict=True):
        bindings[node.name] = _binding(program, spec, node, builder, constants)
    outputs = lower_graph(
        program.graph, builder, bindings, lambda target: _attribute(program, constants, target),
        title,
    )  # fmt: skip
    _declare_outputs(builder, program, outputs, title)
    return builder.build()


def _title(module: Any) -> str:
    if isinstance(module, torch.export.ExportedProgram):
        return str(type(module.graph_module).__name__)
    return type(module).__name__


class _Constants:
    """Tensors of the module as constants of the graph: the same memory, the same constant."""

    def __init__(self, builder: ComputationGraphBuilder) -> None:
        self._builder = builder
        self._made: dict[Any, SymbolicTensor | ComplexTensor] = {}
        # Keys are addresses: their tensors must stay alive.
        self._held: list[Any] = []

    def __call__(self, name: str, tensor: Any) -> SymbolicTensor | ComplexTensor:
        view = (tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.storage_offset())
        memory = tensor.untyped_storage().data_ptr()
        key = (memory, *view) if memory else (name, *view)
        if key not in self._made:
            self._held.append(tensor)
            with self._builder.at(f"tensor {name}"):
                constant = self._builder.parameter(name, array_of(in_pairs(tensor)))
            self._made[key] = ComplexTensor(constant) if is_complex(tensor) else constant
        return self._made[key]


def _binding(
    program: Any, spec: Any, node: Any, builder: ComputationGraphBuilder, constants: _Constants
) -> Callable[[], Any]:
    """What a placeholder stands for; inputs are declared at once, constants when they are read."""
    if spec.kind is _INPUT.USER_INPUT:
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor):
            return lambda: value
        with builder.at(f"input {node.name}"):
            slot = builder.input(node.name, tuple(value.shape), data_type_of(value.dtype))
        return lambda: slot
    if spec.target in program.state_dict:
        return lambda: constants(spec.target, program.state_dict[spec.target])
    return lambda: _constant(program, constants, spec.target)


def _constant(program: Any, constants: _Constants, target: str) -> SymbolicTensor | ComplexTensor:
    tensor = program.constants.get(target)
    if not isinstance(tensor, torch.Tensor):
        raise CompileError(
            f"the module passes {target!r} into its graph, which is no tensor",
            got=type(tensor).__name__,
        )
    return constants(target, tensor)


def _attribute(program: Any, constants: _Constants, target: str) -> Any:
    value = attrgetter(target)(program.graph_module)
    return constants(target, value) if isinstance(value, torch.Tensor) else value


def _refuse_mutation(program: Any, title: str) -> None:
    """A program gives what it computes; it has no way to change the module's buffers."""
    changes = (_OUTPUT.BUFFER_MUTATION, _OUTPUT.PARAMETER_MUTATION, _OUTPUT.USER_INPUT_MUTATION)
    changed = [spec for spec in program.graph_signature.output_specs if spec.kind in changes]
    if changed:
        listed = ", ".join(str(spec.target) for spec in changed)
        raise CompileError(
            f"the module changes its buffers or inputs when it is called: {listed}",
            where=title,
            remedy=f'{EVAL_REMEDY}, or use torch.compile(module, backend="stitch")',
        )


def _declare_outputs(
    builder: ComputationGraphBuilder, program: Any, outputs: Any, title: str
) -> None:
    names = _output_names(program, len(outputs))
    declared = 0
    for name, value in zip(names, outputs, strict=True):
        if value is None:
            continue
        if isinstance(value, ComplexTensor):
            raise CompileError(
                "the module returns complex numbers, which programs lack",
                where=f"{title}, {name}",
                remedy="return torch.view_as_real(x), or use "
                'torch.compile(module, backend="stitch")',
            )
        kept = value if isinstance(value, SymbolicTensor) else builder.constant(np.asarray(value))
        builder.output(name, kept)
        declared += 1
    if not declared:
        raise CompileError("the module returns no tensor", where=title)


def _output_names(program: Any, count: int) -> list[str]:
    """`output` for one, `output_0` … for several, keys where the module returns a dictionary."""
    tree = pytree.tree_unflatten(list(range(count)), program.call_spec.out_spec)
    paths, _ = pytree.tree_flatten_with_path(tree)
    names = ["_".join(_key_text(key) for key in path) for path, _ in paths]
    named = [f"output_{text}" if text.isdigit() else text for text in names]
    named = [f"output_{text}" if text and text[0].isdigit() else text for text in named]
    return [text or "output" for text in named]


def _key_text(key: Any) -> str:
    for field in ("key", "name", "idx"):
        part = getattr(key, field, None)
        if part is not None:
            return str(part)
    return str(key)
