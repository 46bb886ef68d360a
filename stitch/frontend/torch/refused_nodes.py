"""Collect the nodes of a graph that cannot be compiled, and report them in one error."""

from __future__ import annotations

import re
import traceback
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Any

import torch

from stitch.errors import CompileError, StitchError

_SELF = r"^L\['self'\]\.?"
_FRAME = re.compile(r'^\s*File "(?P<file>[^"]+)", line (?P<line>\d+)', re.MULTILINE)
_LIBRARIES = (str(Path(torch.__file__).parent), str(Path(__file__).parents[2]))
#: Maximum number of lines in one message; the rest is counted.
MAX_LINES = 60
COMPILE_REMEDY = "use torch.compile, which breaks the graph there and leaves the code to torch"
EVAL_REMEDY = "call .eval() on the module if it is in training mode"


def operator_of(node: Any) -> Any:
    """The operator of a node, also inside torch's wrapper that orders side effects."""
    if node.target is torch.ops.higher_order.with_effects:
        return node.args[1]
    return node.target


def name_of(node: Any) -> str:
    """The name of a node's operator, such as `aten.add.Tensor`."""
    return str(operator_of(node))


def location_of(node: Any) -> str:
    """`file:line` of the user's code that a node comes from; else its layer, or its name."""
    for match in reversed(list(_FRAME.finditer(node.meta.get("stack_trace") or ""))):
        if _is_users(match["file"]):
            return f"{PurePath(match['file']).name}:{match['line']}"
    layers = list((node.meta.get("nn_module_stack") or {}).values())
    path = next((path for path, _ in reversed(layers) if path), "")
    # torch.export writes L['self'] before the path.
    return f"layer {re.sub(_SELF, '', path)}" if path else f"node {node.name}"


def failure_location(error: BaseException) -> str | None:
    """`file:line` of the innermost frame of user code in a traceback."""
    frames = traceback.extract_tb(error.__traceback__)
    for frame in reversed(frames):
        if _is_users(frame.filename):
            return f"{PurePath(frame.filename).name}:{frame.lineno}"
    return None


def _is_users(file: str) -> bool:
    generated = file.startswith("<")
    return (
        not generated
        and not file.startswith(_LIBRARIES)
        and "/lib/python" not in (file if "site-packages" not in file else "")
    )


def briefly(error: StitchError) -> str:
    """The message of an error on one line."""
    return error.brief() + (f" (got {error.got})" if error.got else "")


@dataclass(frozen=True, slots=True)
class Refusal:
    """A node that is not compiled, and the reason."""

    node: Any
    operator: str
    where: str
    reason: str


@dataclass
class RefusedNodes:
    """Collects refused nodes; `raise_any` raises one error for all of them."""

    title: str
    remedy: str = COMPILE_REMEDY
    each: list[Refusal] = field(default_factory=list)
    _places: dict[str, list[str]] = field(default_factory=dict)
    _errors: list[tuple[str, StitchError]] = field(default_factory=list)
    _random: bool = False

    def unsupported(self, node: Any, where: str, reason: str = "") -> None:
        """Add an operator without a lowering; `reason` follows its name in the message."""
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
        """Add an operator whose lowering raised an error."""
        self.note(node, where, briefly(error))
        self._errors.append((where, error))

    def note(self, node: Any, where: str, reason: str) -> None:
        """Add a node that is not compiled; `raise_any` does not report it."""
        self.each.append(Refusal(node, name_of(node), where, reason))

    def raise_any(self) -> None:
        """Raise one `CompileError` for all unsupported and failed operators, if there are any."""
        lines = [
            f"operator {name} is not supported: {', '.join(places)}"
            for name, places in self._places.items()
        ]
        lines += [f"{where}: {error.sentence()}" for where, error in self._errors]
        if not lines:
            return
        more = [f"and {len(lines) - MAX_LINES} more"] if len(lines) > MAX_LINES else []
        # Under torch.compile `remedy` is another one.
        eval_first = self._random and self.remedy == COMPILE_REMEDY
        remedies = [EVAL_REMEDY, f"otherwise {COMPILE_REMEDY}"] if eval_first else []
        remedies += [error.remedy for _, error in self._errors if error.remedy]
        raise CompileError(
            "the module cannot be compiled:\n  - " + "\n  - ".join([*lines[:MAX_LINES], *more]),
            where=self.title,
            remedy="; ".join(dict.fromkeys(remedies)) or self.remedy,
        )
