"""Modules into exported programs of core ATen operators, with the failures explained."""

from __future__ import annotations

import functools
import inspect
import io
import logging
import sys
import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch._export.utils import _special_op_to_preserve_cia
from torch.export.exported_program import (
    _decompose_exported_program,
    _disable_prexisiting_fake_mode,
    _split_decomp_table_to_cia_and_python_decomp,
)
from torch.utils import _pytree as pytree

from stitch.errors import CompileError, FormatError, StitchError, UsageError
from stitch.files import open_file, unreadable
from stitch.frontend.torch.aten_call import check_dense, torch_type_of
from stitch.frontend.torch.decompositions import or_whole
from stitch.frontend.torch.lowering import KEPT_WHOLE
from stitch.frontend.torch.plain_values import Arguments, with_plain_values
from stitch.frontend.torch.refused_nodes import failure_location
from stitch.program import TensorDesc, ValueType

Examples = Sequence[Any] | Mapping[str, Any]
_BY_POSITION = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_DEPENDS_ON_DATA = ("data-dependent", "data dependent", "unbacked", "GuardOnDataDependent")


@dataclass(frozen=True, slots=True)
class Capture:
    """An `ExportedProgram` of core ATen operators, the arguments of the call that was captured,
    and what that gave, with torch's traced tensors."""

    program: Any
    arguments: Arguments
    results: Any


def exported(module: Any, examples: Examples) -> Capture:
    """Capture a module: its operators, weights beside them.

    Raises `CompileError` naming the line where its control flow depends on data, and for what
    torch has scripted or traced.
    """
    _refuse_scripts(module)
    _refuse_cumulative_averages(module)
    with warnings.catch_warnings(), _quiet():
        # torch warns of its own deprecated parts here; the user can do nothing about them.
        warnings.filterwarnings("ignore", category=FutureWarning)
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        warnings.filterwarnings("ignore", category=UserWarning)
        # What forward keeps in an attribute no program carries from call to call.
        warnings.filterwarnings("default", message=r"(?s).*assigned during export")
        warnings.filterwarnings("default", message=r"(?s).*changed in forward")
        # Recurrent layers of torch list their own parameters anew.
        warnings.filterwarnings("ignore", message=r"(?s).*_flat_weights.*assigned during export")
        _load_exporter()
        try:
            with _containers_kept(module):
                capture = _captured(module, examples)
            return replace(capture, program=_decomposed(capture.program))
        except StitchError:
            raise
        except Exception as error:
            shared = _shared_bytes(module) if isinstance(error, AssertionError) else ()
            if shared:
                raise refused_sharing(shared, type(module).__name__) from error
            _check_weights(module)
            raise _explained(error, module) from error


def _check_weights(module: Any) -> None:
    """Raise `CompileError` for a parameter or buffer that programs cannot hold."""
    if isinstance(module, torch.nn.Module):
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            check_dense(tensor, f"tensor {name!r} of {type(module).__name__}")


@contextmanager
def _containers_kept(module: Any) -> Iterator[None]:
    """Lists and dictionaries of a module hold afterwards what they held before: a capture puts
    tensors without data into them, where forward appends to them."""
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
    """The error for a written buffer whose bytes have another name."""
    first, second, *_ = names
    return CompileError(
        f"the module writes to a buffer that has two names: {first!r} and {second!r} lie on the "
        "same bytes",
        where=title,
        expected="one buffer under one name, or buffers apart",
        remedy="use one of the two names, or clone one of the two buffers",
    )


def _shared_bytes(module: Any) -> tuple[str, ...]:
    """The names of two tensors of a module on the same bytes, parameters apart; torch.export fails
    for them in an assertion where they are written."""
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
    """Without what torch logs and prints of a failure that it raises as well."""
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
        "TorchScript cannot be compiled: the Python code that it was made from is not in it",
        where=getattr(module, "original_name", type(module).__name__),
        expected="an nn.Module, a GraphModule or an ExportedProgram",
        remedy="give the module that was scripted or traced; where only its file is left, "
        "torch._export.converter.TS2EPConverter(torch.jit.load(file), (x,)).convert() makes an "
        "ExportedProgram of it",
    )


def _captured(module: Any, examples: Examples) -> Capture:
    given = _arguments(examples)
    if isinstance(module, torch.export.ExportedProgram):
        if not len(examples) and module.example_inputs is not None:
            given = module.example_inputs
        program = module
        if module.range_constraints:
            with torch.no_grad():
                program = torch.export.export(module.module(), *given)
        spec = program.call_spec.out_spec
        outputs = next(reversed(program.graph.nodes)).args[0]
        traced = outputs[len(outputs) - spec.num_leaves :]
        leaves = [node.meta["val"] if isinstance(node, torch.fx.Node) else node for node in traced]
        return Capture(program, given, spec.unflatten(leaves))
    twin, (arguments, named), calls = with_plain_values(module, given)
    with torch.no_grad():
        program = torch.export.export(twin, arguments, named)
    _warn_of_numbers(calls.changed_numbers, type(module).__name__)
    return Capture(program, given, calls.results)


def _warn_of_numbers(changed: Mapping[str, tuple[Any, Any]], title: str) -> None:
    """Warn of Python numbers that forward changes: a program has their values as constants."""
    for name, (before, after) in sorted(changed.items()):
        warnings.warn(
            f"attribute self.{name} of {title} is changed in forward, from {str(before)[:60]} to "
            f"{str(after)[:60]}: the program computes every call as the one that was captured. To "
            f"keep it from call to call, register it as a buffer: "
            f"self.register_buffer({name.rpartition('.')[2]!r}, torch.tensor(...))",
            UserWarning, stacklevel=2,
        )  # fmt: skip


@functools.cache
def _load_exporter() -> None:
    """Import what torch loads at its first export, on the stack of a thread.

    That import keeps the frames that it runs under, and with them the locals of every caller: a
    compiled model would not end with its last reference.
    """
    thread = threading.Thread(target=import_module, args=("torch.export._trace",))
    thread.start()
    thread.join()


def _decomposed(program: Any) -> Any:
    """As `ExportedProgram.run_decompositions`, which registers for each of seven hundred operators
    that are made of others what it is made of anyway: at every call, in 0.2 s."""
    whole, table = _decompositions()
    return _disable_prexisiting_fake_mode(_decompose_exported_program)(
        program, cia_to_decomp=whole, python_decomp_table=dict(table),
        joint_loss_index=None, decompose_custom_triton_ops=False,
    )  # fmt: skip


@functools.cache
def _decompositions() -> tuple[dict[Any, Any], dict[Any, Any]]:
    """Of the operators that are made of others, those that stay whole; how the rest that is not
    core ATen is taken apart. Built once."""
    table = torch.export.default_decompositions()
    for kept in KEPT_WHOLE:
        table.pop(kept, None)
    made_of_others, rest = _split_decomp_table_to_cia_and_python_decomp(table.materialize())
    whole = {op: how for op, how in made_of_others.items() if how is _special_op_to_preserve_cia}
    return whole, or_whole(rest)


def _arguments(examples: Examples) -> Arguments:
    if isinstance(examples, Mapping):
        return (), {str(name): _example(value) for name, value in examples.items()}
    if isinstance(examples, torch.Tensor | np.ndarray):
        return (_example(examples),), {}
    return tuple(_example(value) for value in examples), {}


def _example(value: Any) -> Any:
    """An example as torch takes it: arrays become tensors, descriptors tensors of zeros."""
    return pytree.tree_map(_example_leaf, value)


def _example_leaf(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return torch.from_numpy(np.array(value))
    if isinstance(value, TensorDesc):
        data_type = value.layout.data_type
        return torch.zeros(value.shape, dtype=torch_type_of(data_type))
    if isinstance(value, ValueType):
        return torch.zeros(value.shape, dtype=torch_type_of(value.data_type))
    if not isinstance(value, torch.Tensor):
        return value
    check_dense(value, "an example")
    # Two examples that share memory would be taken for one tensor and its view.
    return value.detach().clone()


def _refuse_cumulative_averages(module: Any) -> None:
    parts = module.named_modules() if isinstance(module, torch.nn.Module) else ()
    for name, part in parts:
        if (
            isinstance(part, torch.nn.modules.batchnorm._BatchNorm)
            and part.training and part.track_running_stats and part.momentum is None
        ):  # fmt: skip
            raise CompileError(
                f"{type(part).__name__} with momentum=None in training mode weighs a batch by "
                "how many there were, which torch reads out of a tensor",
                where=f"{type(module).__name__}.{name}" if name else type(module).__name__,
                remedy='a number as momentum; .eval(); or torch.compile(module, backend="stitch")',
            )


def _example_call(module: Any) -> str:
    """How `compile` is called with an example for each argument that forward needs."""
    try:
        arguments = inspect.signature(module.forward).parameters.values()
    except (AttributeError, TypeError, ValueError):
        return "stitch.compile(module, (x,))"
    names = [a.name for a in arguments if a.default is a.empty and a.kind in _BY_POSITION]
    return f"stitch.compile(module, ({', '.join(names) or 'x'},)), each a tensor or an array"


def _explained(error: Exception, module: Any) -> StitchError:
    name = type(module).__name__
    text = f"{type(error).__name__}: {error}"
    line = failure_location(error)
    first = str(error).strip().partition("\n")[0]
    if any(sign in text for sign in _DEPENDS_ON_DATA):
        return CompileError(
            "the module's control flow depends on data",
            where=f"{name}, {line}" if line else name,
            expected="the same operations whatever the data",
            got=first,
            remedy="torch.where for a choice between values, or torch.compile(module, "
            'backend="stitch"), which breaks the graph there',
        )
    if isinstance(error, TypeError) and line is None:
        return UsageError(
            f"the module cannot be called with these examples: {first}",
            where=name,
            remedy=f"one example for each argument, in a tuple: {_example_call(module)}",
        )
    return CompileError(
        f"torch.export cannot capture the module: {first}",
        where=f"{name}, {line}" if line else name,
        remedy='torch.compile(module, backend="stitch") breaks the graph where it has to',
    )
