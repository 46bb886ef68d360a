"""Export modules to programs of core ATen operators, and explain why an export failed."""

from __future__ import annotations

import copy
import functools
import inspect
import io
import logging
import operator
import os
import re
import sys
import threading
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, redirect_stderr
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from stitch.errors import CompileError, FormatError, StitchError, UsageError
from stitch.files import open_file, unreadable
from stitch.frontend.torch.aten_call import check_dense, torch_type_of
from stitch.frontend.torch.decompositions import EXPORTED_DECOMPOSITIONS, or_whole
from stitch.frontend.torch.lowering import KEPT_WHOLE
from stitch.frontend.torch.plain_values import Arguments, with_plain_values
from stitch.frontend.torch.refused_nodes import failure_location, location_of, name_of
from stitch.frontend.torch.symbolic_export import (
    DynamicArguments,
    dynamic_arguments,
    lines_of_modules,
)
from stitch.frontend.torch.tensor_bytes import tensor_on
from stitch.frontend.torch.torch_internals import (
    EXPORT_TRACER,
    TORCHSCRIPT_CONVERTER,
    decompose_exported_program,
    disable_fake_mode,
    keep_whole,
    lazy_graph_modules,
    pytree,
    split_decompositions,
)
from stitch.program import TensorDesc, ValueType

Examples = Sequence[Any] | Mapping[str, Any]
_BY_POSITION = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_DETACH = torch.ops.aten.detach.default
# Views with the type that they have: a node that decomposing keeps, through which no gradient
# flows. An alias that torch makes anew after a write in place does not say where it comes from.
_DETACHED = torch.ops.aten.view.dtype
_SETS_GRAD = torch.ops.higher_order.wrap_with_set_grad_enabled
_BAGS = (torch.ops.aten.embedding_bag.default, torch.ops.aten.embedding_bag.padding_idx)
_DEPENDS_ON_DATA = ("data-dependent", "data dependent", "unbacked", "GuardOnDataDependent")


@dataclass(frozen=True, slots=True)
class Capture:
    """An `ExportedProgram` of core ATen operators, with the arguments of the captured call and
    its results (torch's traced tensors)."""

    program: Any
    arguments: Arguments
    results: Any
    #: The examples of a dynamic export, and the Dims of their axes.
    dynamic: DynamicArguments | None = None


#: torch.export changes modes of the process: two at once leave them broken for all later ones.
_exporting = threading.RLock()


def _in_child() -> None:
    """Replace the lock in a forked child, because another thread may have held it."""
    global _exporting
    _exporting = threading.RLock()


os.register_at_fork(after_in_child=_in_child)


def exported(
    module: Any, examples: Examples, dynamic_shapes: Any = None, *, trains: bool = False
) -> Capture:
    """Export a module; `dynamic_shapes` has the named sizes of its arguments.

    With `trains`, aliases that `stops_gradient` knows are what forward detaches, or computes
    without gradients.

    Raises:
        CompileError: its control flow depends on data (the error names the line), torch cannot
            export it, or it is a TorchScript module.
        UsageError: forward does not accept the examples.
    """
    _refuse_scripts(module)
    # Torch makes many modules of graphs that nothing runs: none is written as Python.
    with _exporting, warnings.catch_warnings(), _quiet(), lazy_graph_modules(True):
        # torch warns of its own deprecated parts; the user can do nothing about them.
        warnings.filterwarnings("ignore", category=FutureWarning)
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        warnings.filterwarnings("ignore", category=UserWarning)
        # A program does not carry attributes that forward sets from call to call.
        warnings.filterwarnings("default", message=r"(?s).*assigned during export")
        warnings.filterwarnings("default", message=r"(?s).*changed in forward")
        # Recurrent layers of torch reassign the list of their own parameters.
        warnings.filterwarnings("ignore", message=r"(?s).*_flat_weights.*assigned during export")
        _load_exporter()
        try:
            with _containers_restored(module):
                capture = _captured(module, examples, dynamic_shapes, trains)
            with _operands_detached(capture.program) if trains else nullcontext():
                return replace(capture, program=_with_aliases(_decomposed(capture.program)))
        except StitchError:
            raise
        except Exception as error:
            shared = _shared_bytes(module) if isinstance(error, AssertionError) else ()
            if shared:
                raise refused_sharing(shared, type(module).__name__) from error
            _check_weights(module)
            refused = _refused_by_module(error, module, examples)
            raise refused or _explained(error, module, dynamic_shapes is not None) from error


def exported_call(module: Any, call: Arguments, dynamic: DynamicArguments | None = None) -> Capture:
    """Export a module at the shapes of a call, which has tensors of torch, or for Dims."""
    with _exporting, _containers_restored(module), lazy_graph_modules(True):
        twin, (arguments, named), calls = with_plain_values(module, call)
        with torch.no_grad(), warnings.catch_warnings(), _quiet():
            warnings.simplefilter("ignore")
            shapes = None if dynamic is None else dynamic.shapes_of_torch()
            with lines_of_modules():
                program = torch.export.export(twin, arguments, named, dynamic_shapes=shapes)
            program = _decomposed(program)
    return Capture(program, call, calls.results, dynamic)


def _check_weights(module: Any) -> None:
    """Raise `CompileError` for a parameter or buffer that programs cannot hold."""
    if isinstance(module, torch.nn.Module):
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            check_dense(tensor, f"tensor {name!r} of {type(module).__name__}")


@contextmanager
def _containers_restored(module: Any) -> Iterator[None]:
    """Restore lists and dictionaries of a module: a forward that appends to them appends traced
    tensors, which have no data."""
    parts = module.modules() if isinstance(module, torch.nn.Module) else ()
    held = [value for part in parts for key, value in vars(part).items()
            if type(value) in (list, dict) and not key.startswith("_")]  # fmt: skip
    before = [value.copy() for value in held]
    try:
        yield
    finally:
        for value, items in zip(held, before, strict=True):
            if type(value) is list:
                value[:] = items
            else:
                value.clear()
                value.update(items)


def refused_sharing(names: Sequence[str], title: str) -> CompileError:
    """The error for a mutated buffer that shares memory with another tensor."""
    first, second, *_ = names
    return CompileError(
        f"the module writes to a buffer that has two names: {first!r} and {second!r} share memory",
        where=title,
        expected="buffers that do not share memory",
        remedy="use one of the two names, or clone one of the two buffers",
    )


def _shared_bytes(module: Any) -> tuple[str, ...]:
    """The names of two tensors of a module, not parameters, that share memory: torch.export fails
    with an assertion if one of them is written."""
    by_storage: dict[int, str] = {}
    parts = module.named_modules() if isinstance(module, torch.nn.Module) else ()
    for prefix, part in parts:
        for key, tensor in {**vars(part).get("_buffers", {}), **vars(part)}.items():
            if isinstance(tensor, torch.Tensor) and tensor.numel():
                name = f"{prefix}.{key}" if prefix else key
                other = by_storage.setdefault(tensor.untyped_storage().data_ptr(), name)
                if other != name:
                    return other, name
    return ()


def load_archive(path: Path) -> Any:
    """Load the `ExportedProgram` that `torch.export.save` wrote.

    torch reads parts of it with pickle: like a Python file, an archive may run code.

    Raises:
        FormatError: The file is missing, or torch cannot read it.
    """
    try:
        with open_file(path) as file, warnings.catch_warnings(), _quiet():
            warnings.simplefilter("ignore")
            return torch.export.load(file)
    except OSError as error:
        raise unreadable(path, error) from error
    except StitchError:
        raise
    except Exception as error:
        raise FormatError(
            f"torch {torch.__version__} cannot load it: {type(error).__name__}: {error}"[:300],
            where=str(path),
            expected="an archive that torch.export.save wrote, with one program named 'model'",
            remedy="save it again with this version of torch: torch.export.save(program, path)",
        ) from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress what torch logs and prints about failures that it also raises."""
    before, printed = logging.root.manager.disable, io.StringIO()
    try:
        logging.disable(max(before, logging.ERROR))
        with redirect_stderr(printed):
            yield
    finally:
        logging.disable(before)
    sys.stderr.write(printed.getvalue())


def _refuse_scripts(module: Any) -> None:
    if not isinstance(module, torch.jit.ScriptModule | torch.jit.ScriptFunction):
        return
    raise CompileError(
        "TorchScript cannot be compiled: it does not contain the module's Python code",
        where=getattr(module, "original_name", type(module).__name__),
        expected="an nn.Module, a GraphModule or an ExportedProgram",
        remedy="pass the module that was scripted or traced; to convert a TorchScript file to an "
        f"ExportedProgram: {TORCHSCRIPT_CONVERTER}(torch.jit.load(file), (x,)).convert()",
    )


def _captured(module: Any, examples: Examples, dynamic_shapes: Any, trains: bool) -> Capture:
    call = _arguments(examples)
    if dynamic_shapes is not None:
        if isinstance(module, torch.export.ExportedProgram):
            if not len(examples) and module.example_inputs is not None:
                call = module.example_inputs
            module = module.module()
        dynamic = dynamic_arguments(module, call, dynamic_shapes)
        twin, (arguments, named), calls = with_plain_values(module, dynamic.arguments)
        with torch.no_grad(), lines_of_modules():
            shapes = dynamic.shapes_of_torch()
            program = torch.export.export(twin, arguments, named, dynamic_shapes=shapes)
        _warn_of_numbers(calls.changed_numbers, type(module).__name__)
        return Capture(program, dynamic.arguments, calls.results, dynamic)
    if isinstance(module, torch.export.ExportedProgram):
        if not len(examples) and module.example_inputs is not None:
            call = module.example_inputs
        program = module
        if module.range_constraints:
            with torch.no_grad():
                program = torch.export.export(module.module(), *call)
        spec = program.call_spec.out_spec
        outputs = program.graph.output_node().args[0]
        traced = outputs[len(outputs) - spec.num_leaves :]
        leaves = [node.meta["val"] if isinstance(node, torch.fx.Node) else node for node in traced]
        return Capture(program, call, spec.unflatten(leaves))
    twin, (arguments, named), calls = with_plain_values(module, call)
    with torch.set_grad_enabled(trains), _OwnGradients() if trains else nullcontext():
        program = torch.export.export(twin, arguments, named)
    _warn_of_numbers(calls.changed_numbers, type(module).__name__)
    return Capture(program, call, calls.results)


class _OwnGradients(TorchFunctionMode):  # type: ignore[misc]  # untyped
    """Refuses functions with a `backward` of their own: torch exports their `forward` only."""

    def __torch_function__(
        self, function: Any, types: Any, arguments: Any = (), named: Any = None
    ) -> Any:
        if not torch.is_grad_enabled() and any(
            getattr(value, "requires_grad", False) for value in pytree.tree_leaves(arguments)
        ):
            forwards, frame = _forwards_of_functions(), sys._getframe(1).f_back
            while frame is not None and frame.f_code not in forwards:
                frame = frame.f_back
            if frame is not None:
                raise CompileError(
                    "torch.export does not see the backward of a torch.autograd.Function",
                    where=forwards[frame.f_code],
                    remedy="torch.compile(module, backend='stitch'), which does; or "
                    "x + (y - x).detach(); or checkpoint(use_reentrant=False)",
                )
        return function(*arguments, **(named or {}))


def _forwards_of_functions() -> dict[Any, str]:
    """Return the code of the `forward` of each torch.autograd.Function, with the class's name."""
    classes = [torch.autograd.Function]
    for each in classes:
        classes += each.__subclasses__()
    return {getattr(each.forward, "__code__", None): each.__name__ for each in classes}


#: Operators whose gradient is not that of their decomposition, and what to write instead.
_UNTRAINED = {
    torch.ops.aten.detach_: "x = x.detach()",
    torch.ops.aten.fake_quantize_per_tensor_affine: "x + (fake_quantize(x) - x).detach()",
    torch.ops.aten.fake_quantize_per_channel_affine: "x + (fake_quantize(x) - x).detach()",
    torch.ops.aten.embedding_bag: "scale_grad_by_freq=False",
}


@contextmanager
def _operands_detached(program: Any) -> Iterator[None]:
    """Detach what the parts of a program under `torch.no_grad` read; the program may be the
    user's. Raises `CompileError` for what cannot be trained."""
    graph, parameters = program.graph, program.graph_signature.inputs_to_parameters
    dependent = {node for node in graph.nodes if node.name in parameters}
    added: list[Any] = []
    detached = [node for node in _all_nodes(program) if node.target is _DETACH]
    try:
        for node in detached:
            node.target, node.args = _DETACHED, (node.args[0], node.meta["val"].dtype)
        for node in list(graph.nodes):
            if node.target is _SETS_GRAD and not node.args[0]:
                for operand in node.all_input_nodes:
                    is_read = operand.op == "placeholder" and operand.name not in parameters
                    if torch.is_tensor(operand.meta.get("val")) and not is_read:
                        with graph.inserting_before(node):
                            arguments = operand, operand.meta["val"].dtype
                            added.append(graph.call_function(_DETACHED, arguments))
                        added[-1].meta = dict(operand.meta)
                        node.replace_input_with(operand, added[-1])
            elif node.target is not _DETACHED and not dependent.isdisjoint(node.all_input_nodes):
                remedy = _UNTRAINED.get(getattr(node.target, "overloadpacket", None))
                if remedy is not None and not (node.target in _BAGS and node.args[3:4] != (True,)):
                    raise CompileError(f"{node.target} cannot be trained", where=location_of(node),
                                       remedy=remedy)  # fmt: skip
                dependent.add(node)
        _refuse_detached_writes(program.graph_module, dependent, {})
        yield
    finally:
        for node in detached:
            node.target, node.args = _DETACH, node.args[:1]
        for node in added:
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)


def _refuse_detached_writes(
    module: Any, dependent: Collection[Any], operands: Mapping[Any, Any]
) -> None:
    """Refuse writes to a tensor with gradients by an alias without: torch changes the elements and
    keeps the gradient, a program would lose it. `operands` are those of placeholders of a part
    under `torch.no_grad`."""
    for node in module.graph.nodes:
        schema = getattr(node.target, "_schema", None)
        if node.target is _SETS_GRAD and not node.args[0]:
            part = getattr(module, node.args[1].target)
            inner = [n for n in part.graph.nodes if n.op == "placeholder"]
            bases = [_base_of(operand, operands)[0] for operand in node.args[2:]]
            _refuse_detached_writes(part, dependent, dict(zip(inner, bases, strict=True)))
        elif schema is not None and schema.is_mutable and schema.arguments[0].is_write:
            base, is_detached = _base_of(node.args[0], operands)
            if is_detached and base in dependent:
                raise CompileError(
                    "forward writes to a tensor with gradients without them (under torch.no_grad, "
                    "or by detach)", where=location_of(node), got=name_of(node),
                    remedy="x = x + (y - x).detach(), where y is what it writes",
                )  # fmt: skip


def _base_of(node: Any, operands: Mapping[Any, Any]) -> tuple[Any, bool]:
    """The tensor of which a node is an alias, and whether gradients stop between them."""
    is_detached = False
    while node not in operands:
        schema = getattr(node.target, "_schema", None)
        is_view = schema is not None and schema.arguments and schema.arguments[0].alias_info
        if not is_view and node.target is not operator.getitem:
            return node, is_detached
        is_detached |= node.target is _DETACHED
        node = node.args[0]
    return operands[node], True


def _all_nodes(program: Any) -> list[Any]:
    """The nodes of a program and of its bodies, such as what is computed without gradients."""
    parts = program.graph_module.modules()
    return [node for part in parts for node in getattr(part, "graph", torch.fx.Graph()).nodes]


def _with_aliases(program: Any) -> Any:
    """A decomposed program whose detached tensors are aliases that `stops_gradient` knows."""
    for node in _all_nodes(program):
        if node.target is _DETACHED and node.args[0].meta["val"].dtype == node.args[1]:
            node.target, node.args = torch.ops.aten.alias.default, node.args[:1]
            node.meta["is_detached"] = True
    return program


def stops_gradient(node: Any) -> bool:
    """Whether a node of a program that trains is a detached tensor."""
    return "is_detached" in node.meta


def _warn_of_numbers(changed: Mapping[str, tuple[Any, Any]], title: str) -> None:
    """Warn of Python numbers that forward changes: they are constants of the program."""
    for name, (before, after) in sorted(changed.items()):
        warnings.warn(
            f"attribute self.{name} of {title} is changed in forward, from {str(before)[:60]} to "
            f"{str(after)[:60]}: the program uses its value at the captured call in every call. To "
            f"update it from call to call, register it as a buffer: "
            f"self.register_buffer({name.rpartition('.')[2]!r}, torch.tensor(...))",
            UserWarning, stacklevel=2,
        )  # fmt: skip


@functools.cache
def _load_exporter() -> None:
    """Import torch's tracer in a thread: the import keeps the frames below it alive, and with them
    the caller's locals, such as a compiled model."""
    thread = threading.Thread(target=import_module, args=(EXPORT_TRACER,))
    thread.start()
    thread.join()


def _decomposed(program: Any) -> Any:
    """As `ExportedProgram.run_decompositions`, without registering seven hundred decompositions
    at each call, which takes 0.2 s."""
    whole, table = _decompositions()
    return disable_fake_mode(decompose_exported_program)(
        program, cia_to_decomp=whole, python_decomp_table=dict(table),
        joint_loss_index=None, decompose_custom_triton_ops=False,
    )  # fmt: skip


@functools.cache
def _decompositions() -> tuple[dict[Any, Any], dict[Any, Any]]:
    """The composite operators that stay whole, and the decompositions of the others."""
    table = torch.export.default_decompositions()
    for kept in KEPT_WHOLE:
        table.pop(kept, None)
    composite, rest = split_decompositions(table.materialize())
    whole = {op: rule for op, rule in composite.items() if rule is keep_whole}
    return whole, or_whole(rest | EXPORTED_DECOMPOSITIONS)


def tensor_of(program: Any, spec: Any) -> Any:
    """The parameter, buffer or constant of an input of an exported program.

    Raises `CompileError` if it is no tensor.
    """
    tensor = program.state_dict.get(spec.target)
    if tensor is None:
        tensor = program.constants.get(spec.target)
    if not isinstance(tensor, torch.Tensor):
        raise CompileError(
            f"input {spec.target!r} of the module's graph is not a tensor",
            expected="a parameter, a buffer or a constant tensor",
            got=type(tensor).__name__,
        )
    return tensor


def _arguments(examples: Examples) -> Arguments:
    if isinstance(examples, Mapping):
        return (), {str(name): _example(value) for name, value in examples.items()}
    if isinstance(examples, torch.Tensor | np.ndarray):
        return (_example(examples),), {}
    return tuple(_example(value) for value in examples), {}


def _example(value: Any) -> Any:
    """An example as torch tensors: arrays are copied, descriptors become tensors of zeros."""
    return pytree.tree_map(_example_leaf, value)


def _example_leaf(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return tensor_on(np.array(value))
    if isinstance(value, TensorDesc):
        data_type = value.layout.data_type
        return torch.zeros(value.shape, dtype=torch_type_of(data_type))
    if isinstance(value, ValueType):
        return torch.zeros(value.shape, dtype=torch_type_of(value.data_type))
    if not isinstance(value, torch.Tensor):
        return value
    check_dense(value, "an example")
    # torch.export treats two examples that share memory as a tensor and its view.
    return value.detach().clone()


def _example_call(module: Any) -> str:
    """A call of `compile` with an example for each required argument of forward."""
    try:
        arguments = inspect.signature(module.forward).parameters.values()
    except (AttributeError, TypeError, ValueError):
        return "stitch.compile(module, (x,))"
    names = [a.name for a in arguments if a.default is a.empty and a.kind in _BY_POSITION]
    return f"stitch.compile(module, ({', '.join(names) or 'x'},))"


@contextmanager
def blaming_examples(module: Any, examples: Examples) -> Iterator[None]:
    """Replace a `CompileError` of the lowering if torch refuses the examples, too: fake tensors do
    not check all types."""
    try:
        yield
    except CompileError as error:
        refused = _refused_by_module(error, module, examples) if "data type" in error.what else None
        if refused is None:
            raise
        raise refused from error


def _refused_by_module(failure: Exception, module: Any, examples: Examples) -> CompileError | None:
    """Return the error for examples that a copy of the module refuses in torch too, else None.

    A module that failed elsewhere in torch refuses values, not shapes or types.
    """
    if not isinstance(module, torch.nn.Module):
        return None
    try:
        arguments, named = _arguments(examples)
        given = inspect.signature(module.forward).bind(*arguments, **named).arguments
        twin = copy.deepcopy(module)
    except Exception:  # User code: `_explained` describes the error of the export.
        return None
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=()):
            twin(*arguments, **named)
    except (RuntimeError, ValueError, IndexError) as error:
        layers, line = [], failure_location(error)
        if failure_location(failure) not in (None, line):
            return None
        trace = error.__traceback__
        while trace is not None:
            layers.append(trace.tb_frame.f_locals.get("self"))
            trace = trace.tb_next
        layer = next((e for e in reversed(layers) if isinstance(e, torch.nn.Module)), twin)
        name, what = type(module).__name__, str(error).strip().partition("\n")[0]
        weights = list(layer.parameters(recurse=False))
        fitting = "the operations of forward" if layer is twin else " ".join(repr(layer).split())
        remedy = (
            "pass shapes for which module(...) runs; inputs that belong together have the "
            "same batch size"
        )
        if "type" in what and weights:
            kind = str(weights[0].dtype).removeprefix("torch.")
            remedy = f"convert to {kind}: array.astype({kind!r}), tensor.to(torch.{kind})"
        return CompileError(
            f"the module refuses these examples, in torch as well: {what}",
            where=f"{name}, {line}" if line else name,
            expected=f"inputs for {fitting[:120]}"
            + (f" with parameters {', '.join(map(_type_text, weights))}" if weights else ""),
            got=", ".join(f"{word}: {_type_text(value)}" for word, value in given.items()),
            remedy=remedy,
        )  # fmt: skip
    except Exception:
        return None
    return None


def _type_text(value: Any) -> str:
    """Return type and shape of a tensor, else the name of its class."""
    if not isinstance(value, torch.Tensor):
        return type(value).__name__
    return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"


def _in_our_words(violated: str) -> str:
    """Return a constraint of torch.export without its names and options."""
    constant = r"You marked (\S+) as dynamic but .* specialized it to be a constant \((\d+)\).*"
    text = re.sub(constant, r"it is captured for \1 = \2 alone", violated.strip(" -"))
    return re.sub(r"L\[('[^']*')\]\.size\(\)\[(\d+)\]", r"axis \2 of \1", text)


def _explained(error: Exception, module: Any, is_dynamic: bool) -> StitchError:
    name = type(module).__name__
    text = f"{type(error).__name__}: {error}"
    line = failure_location(error)
    first = str(error).strip().partition("\n")[0] or type(error).__name__
    violated = [_in_our_words(p) for p in str(error).splitlines() if p.startswith("  - ")]
    if is_dynamic and violated:
        remedy = (
            "leave the axis out of dynamic_shapes=, or change the module so that it does not fix "
            "the size"
        )
        if isinstance(module, torch.export.ExportedProgram):
            remedy = "torch.export.export(..., dynamic_shapes=...) with these bounds"
        return CompileError(
            "the module is not the same for all sizes within the bounds: " + "; ".join(violated),
            where=f"{name}, {line}" if line else name, remedy=remedy,
        )  # fmt: skip
    if any(sign in text for sign in _DEPENDS_ON_DATA):
        return CompileError(
            "the module's control flow depends on data",
            where=f"{name}, {line}" if line else name,
            expected="the same operations for all data",
            got=first,
            remedy="choose between values with torch.where, or use torch.compile(module, "
            'backend="stitch"), which breaks the graph there',
        )
    if isinstance(error, TypeError) and line is None:
        return UsageError(
            f"the module cannot be called with these examples: {first}",
            where=name,
            remedy=f"pass one tensor or array for each argument: {_example_call(module)}",
        )
    return CompileError(
        f"torch.export cannot capture the module: {first}",
        where=f"{name}, {line}" if line else name,
        remedy='use torch.compile(module, backend="stitch"), which breaks the graph there',
    )
