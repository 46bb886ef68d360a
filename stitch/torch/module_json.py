"""A module that torch runs, and the optimizer that steps it, as JSON.

Comes in: a module, perhaps one whose optimizer is that of torch.compile's options. Goes out: text
with every tensor and every setting to the bit; the same put back into a module and an optimizer
that are alike. Must not know: compiled models.
"""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np

from stitch.errors import FormatError, UsageError
from stitch.files import write_file
from stitch.frontend import loop_over
from stitch.torch.module_tensors import torch

KIND = "module"
VERSION = 1
#: What stands for a tensor, and for a tuple, which JSON has not.
_TENSOR, _TUPLE = "tensor", "tuple"


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


def restore_module(body: Mapping[str, Any], module: Any, optimizer: Any) -> None:
    """What `module_json` wrote, back into a module and an optimizer; nothing changes unless all of
    it fits. Raises `FormatError`, and `UsageError` for another module or optimizer."""
    if body.get("version") != VERSION:
        raise FormatError(
            "this JSON of a module is of a version that is not read here",
            expected=f"version {VERSION}", got=f"version {body.get('version')!r}"[:100],
        )  # fmt: skip
    try:
        tensors = {name: _in(data) for name, data in body["tensors"].items()}
        kept = body["optimizer"]
        state = None if kept is None else _in(kept["state"])
    except (AttributeError, KeyError, TypeError, ValueError, RuntimeError) as error:
        raise FormatError(f"this is no JSON of a module: {error}",
                          remedy="write it with Module.dump") from error  # fmt: skip
    problems = _differences(tensors, module)
    if problems:
        raise UsageError("this is the JSON of another module: " + "; ".join(problems[:8]))
    if optimizer is not None:
        if kept is None or kept["kind"] != type(optimizer).__name__:
            raise UsageError(
                "this JSON has no state for this optimizer", expected=type(optimizer).__name__,
                got="none" if kept is None else str(kept["kind"]),
            )  # fmt: skip
        # It checks the groups before it changes anything.
        try:
            optimizer.load_state_dict(state)
        except (KeyError, TypeError, ValueError) as error:
            raise UsageError(f"this JSON has another optimizer's state: {error}") from error
    with torch.no_grad():
        for name, tensor in module.state_dict().items():
            tensor.copy_(tensors[name])


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
        return {"items": [[key, _out(item)] for key, item in value.items()]}
    return value.item() if isinstance(value, np.generic) else value


def _in(value: Any) -> Any:
    if isinstance(value, list):
        return [_in(item) for item in value]
    if not isinstance(value, dict):
        return value
    if _TUPLE in value:
        return tuple(_in(item) for item in value[_TUPLE])
    if _TENSOR in value:
        dtype = getattr(torch, value["dtype"])
        raw = bytearray(base64.b64decode(value[_TENSOR], validate=True))
        flat = torch.frombuffer(raw, dtype=dtype) if raw else torch.empty(0, dtype=dtype)
        return flat.reshape(value["shape"])
    return {key: _in(item) for key, item in value["items"]}


def written(file: str | Path | IO[str], text: str) -> None:
    """Write a text to a path, whole or not at all, or into an open file."""
    if isinstance(file, str | os.PathLike):
        write_file(Path(file), text.encode())
    else:
        file.write(text)
