"""Save and load a torch module and its optimizer as JSON."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from io import StringIO
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple

import numpy as np

from stitch.argument_kinds import PATH, READABLE, either, takes
from stitch.errors import FormatError, UsageError
from stitch.files import atomic_write, text_of
from stitch.frontend import TrainableSource, loop_over
from stitch.frozen_json import (
    MAX_CHARACTERS,
    MAX_DEPTH,
    check_format,
    from_plain,
    read_json,
    to_plain,
)
from stitch.model import CompiledModel
from stitch.program import InputKind
from stitch.torch.shared_module import share_module, torch
from stitch.training import OPTIMIZERS, ModelReader, TorchOptimizer, parameter_names

KIND = "module"
VERSION = 1
#: Keys of the objects for tensors, tuples and mappings, which JSON lacks.
_TENSOR, _TUPLE, _ITEMS = "tensor", "tuple", "items"
#: By their names, without aliases.
_DTYPES = {
    str(kind).removeprefix("torch."): kind
    for kind in vars(torch).values() if isinstance(kind, torch.dtype)
}  # fmt: skip


class _Tensor(NamedTuple):
    tensor: bytes
    shape: tuple[int, ...]
    dtype: str


class _Optimizer(NamedTuple):
    kind: str
    state: Any


class _Module(NamedTuple):
    stitch: Literal["module"]
    version: Literal[1]
    module: str
    tensors: Mapping[str, _Tensor]
    optimizer: _Optimizer | None


def module_json(module: Any, optimizer: Any = None) -> str:
    """Return a module's tensors and the state of its optimizer as JSON; by default the optimizer
    is that of torch.compile's options."""
    if optimizer is None:
        loop = loop_over(list(module.parameters()))
        optimizer = None if loop is None else loop.theirs
    body = {
        "stitch": KIND, "version": VERSION, "module": type(module).__name__,
        "tensors": {name: _encoded(tensor) for name, tensor in module.state_dict().items()},
        "optimizer": None if optimizer is None else {
            "kind": type(optimizer).__name__, "state": _encoded(optimizer.state_dict()),
        },
    }  # fmt: skip
    return json.dumps(body)


def restore_module(body: Any, module: Any, optimizer: Any) -> None:
    """Restore a module and an optimizer from the JSON of `module_json`; nothing changes unless all
    of it fits. Raises `FormatError`, and `UsageError` for another module or optimizer."""
    check_format(
        body, "module", "load it with the version of Stitch that wrote it, and dump it again",
        stitch=KIND, version=VERSION,
    )  # fmt: skip
    form = from_plain(_Module, body, "module")
    tensors = {name: _tensor(one, f"module.tensors.{name}") for name, one in form.tensors.items()}
    saved = form.optimizer
    state = None if saved is None else _decoded(saved.state, "module.optimizer.state")
    differences = _differences(tensors, module)
    if differences:
        raise UsageError("this is the JSON of another module: " + "; ".join(differences[:8]))
    if optimizer is not None:
        if saved is None or saved.kind != type(optimizer).__name__:
            raise UsageError(
                "this JSON has no state for this optimizer", expected=type(optimizer).__name__,
                got="none" if saved is None else saved.kind[:100],
            )  # fmt: skip
        _restore_optimizer(state, optimizer)
    with torch.no_grad():
        for name, tensor in module.state_dict().items():
            tensor.copy_(tensors[name])


def _restore_optimizer(state: Any, optimizer: Any) -> None:
    """Load an optimizer's state; for another optimizer's state raise `UsageError` without
    changes."""
    before = optimizer.state, optimizer.param_groups
    try:
        optimizer.load_state_dict(state)
        wrong = _states_of_another_shape(optimizer)
        if wrong:
            raise ValueError("; ".join(wrong[:8]))
    except (
        AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError
    ) as error:  # fmt: skip
        # load_state_dict sets both before it checks them.
        optimizer.state, optimizer.param_groups = before
        why = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        raise UsageError(f"this JSON has another optimizer's state: {why}"[:400],
                         expected=type(optimizer).__name__) from error  # fmt: skip


def _states_of_another_shape(optimizer: Any) -> list[str]:
    """The states that have one value per element of a parameter, but not its shape."""
    elementwise = {state for kind in OPTIMIZERS for state in kind.states}
    elementwise -= {state for kind in OPTIMIZERS for state in kind.scalar_states}
    return [
        f"{name} of a parameter {list(parameter.shape)} is "
        + (f"{list(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)[:40])
        for parameter, states in optimizer.state.items()
        if isinstance(parameter, torch.Tensor)
        for name, value in states.items()
        if name in elementwise and value is not None
        and (not isinstance(value, torch.Tensor) or value.shape != parameter.shape)
    ]  # fmt: skip


def _differences(tensors: Mapping[str, Any], module: Any) -> list[str]:
    have = module.state_dict()
    problems = [f"{name} is missing" for name in have.keys() - tensors.keys()]
    problems += [f"{name} is unknown" for name in tensors.keys() - have.keys()]
    for name in have.keys() & tensors.keys():
        here, there = have[name], tensors[name]
        if here.shape != there.shape or here.dtype is not there.dtype:
            problems.append(
                f"{name} is {there.dtype}{list(there.shape)}, expected {here.dtype}"
                f"{list(here.shape)}"
            )
    return sorted(problems)


def _encoded(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        dense = value.detach().cpu().contiguous()
        raw = dense.reshape(-1).view(torch.uint8).numpy().tobytes() if dense.numel() else b""
        name = str(dense.dtype).removeprefix("torch.")
        return to_plain(_Tensor(raw, tuple(dense.shape), name))
    if isinstance(value, tuple):
        return {_TUPLE: [_encoded(item) for item in value]}
    if isinstance(value, list):
        return [_encoded(item) for item in value]
    if isinstance(value, Mapping):
        return {_ITEMS: [[key, _encoded(item)] for key, item in value.items()]}
    return value.item() if isinstance(value, np.generic) else value


def _decoded(value: Any, where: str, depth: int = 0) -> Any:
    """The inverse of `_encoded`; raises `FormatError` for other values."""
    if depth > MAX_DEPTH:
        raise FormatError("it is nested too deeply", where=where[:MAX_CHARACTERS])
    if isinstance(value, list):
        return [_decoded(item, f"{where}[{i}]", depth + 1) for i, item in enumerate(value)]
    if not isinstance(value, dict):
        return value
    if _TENSOR in value:
        return _tensor(from_plain(_Tensor, value, where), where)
    if value.keys() == {_TUPLE}:
        return tuple(_decoded(from_plain(tuple[Any, ...], value[_TUPLE], where), where, depth + 1))
    if value.keys() != {_ITEMS}:
        raise FormatError(
            "no part of an optimizer's state", where=where[:MAX_CHARACTERS],
            expected=" or ".join((_TENSOR, _TUPLE, _ITEMS)), got=", ".join(value)[:80],
        )  # fmt: skip
    items: dict[Any, Any] = {}
    for key, item in from_plain(tuple[tuple[Any, Any], ...], value[_ITEMS], where):
        if not isinstance(key, str | int):
            raise FormatError(
                "no key of a mapping", where=where[:MAX_CHARACTERS], got=f"{key!r:.80}"
            )
        items[key] = _decoded(item, f"{where}.{key}", depth + 1)
    return items


def _tensor(form: _Tensor, where: str) -> Any:
    dtype = _DTYPES.get(form.dtype)
    if dtype is None:
        raise FormatError("unknown data type", where=where[:MAX_CHARACTERS], got=form.dtype[:80])
    wanted = math.prod(form.shape) * dtype.itemsize
    if min(form.shape, default=0) < 0 or len(form.tensor) != wanted:
        raise FormatError(
            f"{list(form.shape)} of {form.dtype} is not {len(form.tensor)} bytes"[:400],
            where=where[:MAX_CHARACTERS],
        )
    data = bytearray(form.tensor)
    flat = torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)
    return flat.reshape(form.shape)


def write_text(file: str | Path | IO[str], text: str) -> None:
    """Write a text to a path, atomically, or to an open file."""
    if isinstance(file, str | os.PathLike):
        atomic_write(Path(file), text.encode())
    else:
        file.write(text)


# Loading ------------------------------------------------------------------------------------------


@takes(file=either(PATH, READABLE))
def load(file: str | Path | IO[str], module: Any = None, optimizer: Any = None) -> Any:
    """Load a file of `dump`, of a model or of a `stitch.torch.nn.Module`.

    Args:
        file: A path or an open text file.
        module: The torch module: required for the file of a module; for a model, the module that
            shares its tensors with the training.
        optimizer: An optimizer over the module's parameters that steps the model, with its own
            settings; for the file of a module, it gets the saved state.

    Returns:
        A `CompiledModel`, or the module with the saved tensors.

    Raises:
        FormatError: the file is damaged or of another kind.
        UsageError: the file is of another module or optimizer.
    """
    # torch.compile wraps modules.
    inside = getattr(module, "_orig_mod", module)
    text = text_of(file)
    body = read_json(text, "JSON of a model or module")
    if isinstance(body, dict) and body.get("stitch") == KIND:
        if module is None:
            raise UsageError("this file has the tensors of a torch module, which was not given",
                             remedy="load(file, module, optimizer)")  # fmt: skip
        restore_module(body, inside, optimizer)
        return module
    model = CompiledModel.load(StringIO(text))
    return model if optimizer is None else _stepped_by(model, inside, optimizer)


def _stepped_by(model: CompiledModel, module: Any, optimizer: Any) -> CompiledModel:
    training = model.training
    if training is None:
        raise UsageError("an optimizer was given, but the model is not for training",
                         remedy="load(file)")  # fmt: skip
    names = [parameter.name for parameter in training.programs.parameters]
    own = dict(module.named_parameters(remove_duplicate=False))
    absent = [name for name in names if name not in own]
    if absent:
        raise UsageError(
            f"the module has no parameter {absent[0]!r}: the file is of another module",
            expected=", ".join(names[:8]), got=", ".join([*own][:8]),
            remedy="load it with the module that was compiled, or one with the same parameters",
        )  # fmt: skip
    theirs = TorchOptimizer(optimizer, parameter_names(module, names))
    saved, given = training.optimizer.config(), theirs.native.config()
    if _without_rates(saved) != _without_rates(given):
        raise UsageError(
            "the model was trained by another optimizer", expected=repr(training.optimizer),
            got=repr(theirs.native),
        )  # fmt: skip
    theirs.set_previous_steps(int(training.values.get("training.steps", 0)))
    graph = model.graph
    examples = {
        slot.name: graph.input_type(i)
        for i, slot in enumerate(graph.inputs) if slot.kind is InputKind.ACTIVATION
    }  # fmt: skip
    # For programs for batches of other sizes.
    source = TrainableSource(graph, module, examples)
    stepped = replace(
        training, optimizer=theirs.native, watchers=(partial(share_module, module),),
        reader=ModelReader(source, model.placement, frozenset(names)),
    )  # fmt: skip
    return replace(model, training=stepped)


def _without_rates(config: dict[str, Any]) -> dict[str, Any]:
    """An optimizer's settings without learning rates and schedules."""
    groups = [_without_rates(group) for group in config.get("groups", ())]
    others = {key: v for key, v in config.items() if key not in ("lr", "schedule", "groups")}
    return others | {"groups": groups}
