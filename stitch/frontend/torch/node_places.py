"""Which operator a node of torch's graph calls, and which line of the user's code asked for it."""

from __future__ import annotations

import re
import traceback
from pathlib import Path, PurePath
from typing import Any

import torch

_FRAME = re.compile(r'^\s*File "(?P<file>[^"]+)", line (?P<line>\d+)', re.MULTILINE)
_NOT_THE_USERS = (str(Path(torch.__file__).parent), str(Path(__file__).parents[2]))


def operator_of(node: Any) -> Any:
    """The operator of a node, also of one that torch keeps in order because it may raise."""
    if node.target is torch.ops.higher_order.with_effects:
        return node.args[1]
    return node.target


def name_of(node: Any) -> str:
    """The name of a node's operator, as torch writes it."""
    return str(operator_of(node))


def location_of(node: Any) -> str:
    """`file:line` of the user's code that asked for a node."""
    for match in reversed(list(_FRAME.finditer(node.meta.get("stack_trace") or ""))):
        if _is_users(match["file"]):
            return f"{PurePath(match['file']).name}:{match['line']}"
    layers = list((node.meta.get("nn_module_stack") or {}).values())
    path = next((path for path, _ in reversed(layers) if path), "")
    return f"layer {_plain(path)}" if path else f"node {node.name}"


def failure_location(error: BaseException) -> str | None:
    """`file:line` of the innermost of the user's frames that an exception came through."""
    frames = traceback.extract_tb(error.__traceback__)
    for frame in reversed(frames):
        if _is_users(frame.filename):
            return f"{PurePath(frame.filename).name}:{frame.lineno}"
    return None


def _is_users(file: str) -> bool:
    generated = file.startswith("<")
    return (
        not generated
        and not file.startswith(_NOT_THE_USERS)
        and "/lib/python" not in (file if "site-packages" not in file else "")
    )


def _plain(path: str) -> str:
    """A layer's path as its owner writes it, without what export puts before it."""
    return re.sub(r"^L\['self'\]\.?", "", path)
