"""What of a graph cannot be compiled: collected node by node, told in one error."""

from __future__ import annotations

import re
import traceback
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Any

import torch

from stitch.errors import CompileError, StitchError

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


#: Lines of one message; what goes beyond is counted.
MAX_LINES = 60
COMPILE_REMEDY = "torch.compile, which breaks the graph where code is left to torch"
EVAL_REMEDY = "call .eval() on the module if it is in training mode"


def briefly(error: StitchError) -> str:
    """What an error says, in one line."""
    return error.brief() + (f" (got {error.got})" if error.got else "")


@dataclass(frozen=True, slots=True)
class Refusal:
    """A node that is not compiled, and why."""

    node: Any
    operator: str
    where: str
    reason: str


@dataclass
class RefusedNodes:
    """Collects what cannot be compiled; `raise_any` ends it with one error for all."""

    title: str
    remedy: str = COMPILE_REMEDY
    each: list[Refusal] = field(default_factory=list)
    _places: dict[str, list[str]] = field(default_factory=dict)
    _errors: list[tuple[str, StitchError]] = field(default_factory=list)
    _random: bool = False

    def unsupported(self, node: Any, where: str, reason: str = "") -> None:
        """An operator without a lowering; `reason` says for what it has none."""
        target = operator_of(node)
        tags = getattr(target, "tags", ())
        if torch.Tag.nondeterministic_seeded in tags:
            reason, self._random = " (its result is random)", True
        elif torch.Tag.dynamic_output_shape in tags or torch.Tag.data_dependent_output in tags:
            reason = " (its result's shape depends on data)"
        self.note(node, where, f"no lowering{reason}")
        places = self._places.setdefault(f"{target}{reason}", [])
        if where not in places:
            places.append(where)

    def failed(self, node: Any, where: str, error: StitchError) -> None:
        """An operator whose operands its lowering refuses."""
        self.note(node, where, briefly(error))
        self._errors.append((where, error))

    def note(self, node: Any, where: str, reason: str) -> None:
        """A node that is not compiled for a reason, which alone is no error."""
        self.each.append(Refusal(node, name_of(node), where, reason))

    def raise_any(self) -> None:
        """Raises one `CompileError` for all that was collected; nothing if that is nothing."""
        lines = [
            f"operator {name} is not supported: {', '.join(places)}"
            for name, places in self._places.items()
        ]
        lines += [f"{where}: {error.sentence()}" for where, error in self._errors]
        if not lines:
            return
        more = [f"and {len(lines) - MAX_LINES} more"] if len(lines) > MAX_LINES else []
        # Who has torch.compile already is told what helps there.
        remedies = [EVAL_REMEDY] if self._random and self.remedy == COMPILE_REMEDY else []
        remedies += [error.remedy for _, error in self._errors if error.remedy]
        raise CompileError(
            "the module cannot be compiled:\n  - " + "\n  - ".join([*lines[:MAX_LINES], *more]),
            where=self.title,
            remedy="; ".join(dict.fromkeys(remedies)) or self.remedy,
        )
