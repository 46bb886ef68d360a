"""A module that torch runs, and the optimizer that steps it, as JSON."""

from __future__ import annotations

import base64
import json
import math
import os
from collections.abc import Mapping
from dataclasses import replace
from functools import cache, partial
from io import StringIO
from pathlib import Path
from typing import IO, Any

import numpy as np

from stitch.argument_kinds import PATH, READABLE, either, takes
from stitch.errors import FormatError, Problem, UsageError
from stitch.files import atomic_write, text_of
from stitch.frontend import TrainableSource, loop_over
from stitch.graph import JsonObject, reject_duplicate_keys
from stitch.model import CompiledModel
from stitch.program import InputKind
from stitch.torch.shared_module import share, torch
from stitch.training import OPTIMIZERS, ModelReader, TorchOptimizer, parameter_names

KIND = "module"
VERSION = 1
#: What stands for a tensor, a tuple, and a mapping with keys that are no texts: JSON has none.
_TENSOR, _TUPLE, _ITEMS = "tensor", "tuple", "items"


def module_json(module: Any, optimizer: Any = None) -> str:
    """A module's tensors, and the state of its optimizer: the given one, else that of the options
    of torch.compile."""
    if optimizer is None:
        loop = loop_over(list(module.parameters()))
        optimizer = None if loop is None else loop.theirs
    body = {
        "stitch": KIND, "version": VERSION, "module": type(module).__name__,
        "tensors": {name: _out(tensor) for name, tensor in module.state_dict().items()},
        "optimizer": None if optimizer is None else {
            "kind": type(optimizer).__name__, "state": _out(optimizer.state_dict()),
        },
    }  # fmt: skip
    return json.dumps(body)


def restore_module(body: object, module: Any, optimizer: Any) -> None:
    """What `module_json` wrote, back into a module and an optimizer; nothing changes unless all of
    it fits. Raises `FormatError`, and `UsageError` for another module or optimizer."""
    problems: list[Problem] = []
    root = JsonObject(body, "module", problems)
    if root.get("version") != VERSION or isinstance(root.get("version"), bool):
        raise FormatError(
            "this JSON of a module is of a version that is not read here",
            expected=f"version {VERSION}", got=f"version {root.get('version')!r}"[:100],
            remedy="read it with the Stitch that wrote it, and dump it there for this one",
        )  # fmt: skip
    root.refuse_other_keys(("stitch", "version", "module", "tensors", "optimizer"))
    tensors = {name: _tensor_in(record) for name, record in root.named_records("tensors").items()}
    kept = None
    if root.get("optimizer") is not None or "optimizer" not in root:
        kept = root.record("optimizer")
        kept.refuse_other_keys(("kind", "state"))
        kind, state = kept.text("kind"), None
        try:
            state = _in(kept.get("state"), f"{kept.where}.state", problems)
        except RecursionError:
            kept.problem("too_deep", "state", "it is nested too deeply")
    if problems:
        raise FormatError("this is no JSON of a module: its fields are not those that dump writes",
                          problems=tuple(problems), remedy="write it with Module.dump")  # fmt: skip
    differences = _differences(tensors, module)
    if differences:
        raise UsageError("this is the JSON of another module: " + "; ".join(differences[:8]))
    if optimizer is not None:
        if kept is None or kind != type(optimizer).__name__:
            raise UsageError(
                "this JSON has no state for this optimizer", expected=type(optimizer).__name__,
                got="none" if kept is None else kind[:100],
            )  # fmt: skip
        _restore_optimizer(state, optimizer)
    with torch.no_grad():
        for name, tensor in module.state_dict().items():
            tensor.copy_(tensors[name])


def _restore_optimizer(state: Any, optimizer: Any) -> None:
    """Raises `UsageError`, and leaves the optimizer as it was, for a state that is not its own."""
    before = optimizer.state, optimizer.param_groups
    try:
        optimizer.load_state_dict(state)
        wrong = _states_of_another_shape(optimizer)
        if wrong:
            raise ValueError("; ".join(wrong[:8]))
    except (
        AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError
    ) as error:  # fmt: skip
        # It sets both before it looks into them.
        optimizer.state, optimizer.param_groups = before
        why = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        raise UsageError(f"this JSON has another optimizer's state: {why}"[:400],
                         expected=type(optimizer).__name__) from error  # fmt: skip


def _states_of_another_shape(optimizer: Any) -> list[str]:
    """What is kept beside each element of a parameter, and has not its shape."""
    beside = {state for kind in OPTIMIZERS for state in kind.states}
    beside -= {state for kind in OPTIMIZERS for state in kind.scalar_states}
    return [
        f"{name} of a parameter {list(parameter.shape)} is "
        + (f"{list(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)[:40])
        for parameter, states in optimizer.state.items()
        if isinstance(parameter, torch.Tensor)
        for name, value in states.items()
        if name in beside and value is not None
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


def _out(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        dense = value.detach().cpu().contiguous()
        raw = dense.reshape(-1).view(torch.uint8).numpy().tobytes() if dense.numel() else b""
        return {
            _TENSOR: base64.b64encode(raw).decode("ascii"), "shape": list(dense.shape),
            "dtype": str(dense.dtype).removeprefix("torch."),
        }  # fmt: skip
    if isinstance(value, tuple):
        return {_TUPLE: [_out(item) for item in value]}
    if isinstance(value, list):
        return [_out(item) for item in value]
    if isinstance(value, Mapping):
        return {_ITEMS: [[key, _out(item)] for key, item in value.items()]}
    return value.item() if isinstance(value, np.generic) else value


def _in(value: Any, where: str, problems: list[Problem]) -> Any:
    """What `_out` wrote; defects are noted, with None in their places."""
    if isinstance(value, list):
        return [_in(item, f"{where}[{i}]", problems) for i, item in enumerate(value)]
    if not isinstance(value, dict):
        return value
    record = JsonObject(value, where, problems)
    if _TENSOR in value:
        return _tensor_in(record)
    if _TUPLE in value:
        record.refuse_other_keys((_TUPLE,))
        return tuple(_in(list(record.items(_TUPLE)), where, problems))
    record.refuse_other_keys((_ITEMS,))
    items: dict[Any, Any] = {}
    for i, pair in enumerate(record.items(_ITEMS)):
        if isinstance(pair, list) and len(pair) == 2 and isinstance(pair[0], str | int):
            items[pair[0]] = _in(pair[1], f"{where}.{pair[0]}", problems)
        else:
            record.bad_value(f"{_ITEMS}[{i}]", "a pair of a key and a value", pair)
    return items


def _tensor_in(record: JsonObject) -> Any:
    """A tensor; None where a defect was noted."""
    record.refuse_other_keys((_TENSOR, "shape", "dtype"))
    shape, raw = record.integers("shape"), record.data(_TENSOR)
    dtype = record.choice("dtype", _dtypes(), None)
    if raw is None or dtype is None:
        return None
    wanted = math.prod(shape) * dtype.itemsize
    if min(shape, default=0) < 0 or len(raw) != wanted:
        text = f"{list(shape)} of {record.get('dtype')} is {wanted} bytes, not {len(raw)}"
        record.problem("bad_length", _TENSOR, text)
        return None
    data = bytearray(raw)
    flat = torch.frombuffer(data, dtype=dtype) if raw else torch.empty(0, dtype=dtype)
    return flat.reshape(shape)


@cache
def _dtypes() -> dict[str, Any]:
    """The types of torch by name, each by its own name alone."""
    kinds = {str(kind) for kind in vars(torch).values() if isinstance(kind, torch.dtype)}
    names = (kind.removeprefix("torch.") for kind in sorted(kinds))
    return {name: getattr(torch, name) for name in names}


def written(file: str | Path | IO[str], text: str) -> None:
    """Write a text to a path, whole or not at all, or into an open file."""
    if isinstance(file, str | os.PathLike):
        atomic_write(Path(file), text.encode())
    else:
        file.write(text)


# --------------------------------------------------------------------------------------------------
# Loading


@takes(file=either(PATH, READABLE))
def load(file: str | Path | IO[str], module: Any = None, optimizer: Any = None) -> Any:
    """Go on from what `dump` of a model, or of a `stitch.torch.nn.Module`, wrote.

    A model comes back as a `CompiledModel`; `optimizer`, over the parameters of `module`, steps it
    from then on, with the settings that it has itself, and the module's tensors are those of the
    training from its first call on. A module that torch runs gets its tensors
    back, `optimizer` its state, and the module is returned. Raises `FormatError`, `UsageError`.
    """
    # Of what torch.compile gives for a module, that module.
    inside = getattr(module, "_orig_mod", module)
    text = text_of(file)
    try:
        body = json.loads(text, object_pairs_hook=reject_duplicate_keys)
    except (RecursionError, ValueError):
        body = None
    if isinstance(body, dict) and body.get("stitch") == KIND:
        if module is None:
            raise UsageError("this is the JSON of a module that torch runs",
                             remedy="load(file, module, optimizer)")  # fmt: skip
        restore_module(body, inside, optimizer)
        return module
    model = CompiledModel.load(StringIO(text))
    return model if optimizer is None else _stepped_by(model, inside, optimizer)


def _stepped_by(model: CompiledModel, module: Any, optimizer: Any) -> CompiledModel:
    training = model.training
    if training is None:
        raise UsageError("this model is for inference: no optimizer steps it")
    names = [parameter.name for parameter in training.programs.parameters]
    theirs = TorchOptimizer(optimizer, parameter_names(module, names))
    known, given = training.optimizer.config(), theirs.native.config()
    if _without_rates(known) != _without_rates(given):
        raise UsageError(
            "this model is trained by another optimizer", expected=repr(training.optimizer),
            got=repr(theirs.native),
        )  # fmt: skip
    theirs.set_previous_steps(int(training.values.get("training.steps", 0)))
    graph = model.graph
    examples = {
        slot.name: graph.input_type(i)
        for i, slot in enumerate(graph.inputs) if slot.kind is InputKind.ACTIVATION
    }  # fmt: skip
    # The module gives the programs for batches of another size.
    source = TrainableSource(graph, module, examples)
    stepped = replace(
        training, optimizer=theirs.native, watchers=(partial(share, module),),
        reader=ModelReader(source, model.placement, frozenset(names)),
    )  # fmt: skip
    return replace(model, training=stepped)


def _without_rates(config: dict[str, Any]) -> dict[str, Any]:
    """An optimizer's settings, but for what is no part of the update."""
    groups = [_without_rates(group) for group in config.get("groups", ())]
    kept = {word: v for word, v in config.items() if word not in ("lr", "schedule", "groups")}
    return kept | {"groups": groups}
