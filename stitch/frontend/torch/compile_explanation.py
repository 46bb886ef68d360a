"""`explain(function)(*arguments)`: what torch.compile with Stitch makes of a function.

Importing this module needs the package torch (an optional extra).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

import torch
from torch._dynamo import output_graph
from torch._functorch import config as autograd_config

from stitch.frontend.torch.compile import (
    CompileSettings,
    Counts,
    GraphReport,
    compiled_graph,
    shared_storage_of,
)

#: Lines of source that one line of the text names.
MAX_PLACES = 4


@dataclass(frozen=True, slots=True)
class GraphBreak:
    """Where torch.compile ended one graph and began another, and why."""

    where: str
    reason: str


@dataclass(frozen=True, slots=True)
class FallbackSummary:
    """An operator that torch runs for one reason: how often it stands in graphs, and where."""

    operator: str
    count: int
    reason: str
    places: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Explanation:
    """What became of a function: its graphs as aot_autograd makes them, and the breaks between.

    `copied_nbytes`: bytes that programs got as copies in the call that was made.
    """

    graphs: tuple[GraphReport, ...]
    breaks: tuple[GraphBreak, ...]
    copied_nbytes: int

    @property
    def programs(self) -> int:
        """How many programs run the graphs."""
        return sum(graph.programs for graph in self.graphs)

    @property
    def by_stitch(self) -> dict[str, int]:
        """Operators that programs run, with their number."""
        return self._operators("by_stitch")

    @property
    def by_torch(self) -> dict[str, int]:
        """Operators that torch runs, with their number."""
        return self._operators("by_torch")

    @property
    def to_programs_nbytes(self) -> int:
        """Bytes of torch's tensors that programs read, when each graph is called once."""
        return sum(graph.to_programs_nbytes for graph in self.graphs)

    @property
    def to_torch_nbytes(self) -> int:
        """Bytes of results that programs give to torch, when each graph is called once."""
        return sum(graph.to_torch_nbytes for graph in self.graphs)

    @property
    def fallbacks(self) -> tuple[FallbackSummary, ...]:
        """What torch runs, by operator and reason; the most frequent first."""
        places: dict[tuple[str, str], Counter[str]] = {}
        for graph in self.graphs:
            for fallback in graph.fallbacks:
                key = fallback.operator, fallback.reason
                places.setdefault(key, Counter())[fallback.where] += 1
        rows = [
            FallbackSummary(operator, found.total(), reason, tuple(found))
            for (operator, reason), found in places.items()
        ]
        return tuple(sorted(rows, key=lambda row: -row.count))

    def _operators(self, who: str) -> dict[str, int]:
        total: Counter[str] = Counter()
        for graph in self.graphs:
            total.update(dict(getattr(graph, who)))
        return dict(total.most_common())

    def __str__(self) -> str:
        mine, theirs = sum(self.by_stitch.values()), sum(self.by_torch.values())
        lines = [
            f"{_many(len(self.graphs), 'graph')}, {_many(self.programs, 'program')}: "
            f"{_many(mine, 'operator')} run by Stitch, {theirs} by torch",
            *(_line_of_graph(graph) for graph in self.graphs),
        ]
        if self.fallbacks:
            lines += ["left to torch:", *map(_line_of_fallback, self.fallbacks)]
        if self.breaks:
            lines += ["graph breaks:", *(f"  {b.where}: {b.reason}" for b in self.breaks)]
        lines.append(
            f"bytes a call: {self.to_programs_nbytes:,} of torch's read by programs, "
            f"{self.to_torch_nbytes:,} given to torch; {self.copied_nbytes:,} copied in this one"
        )
        return "\n".join(lines)


def explain(
    function: Callable[..., Any],
    *,
    options: Mapping[str, Any] | None = None,
    dynamic: bool | None = None,
) -> Callable[..., Explanation]:
    """A function that calls `function`, compiled anew by Stitch with these options, and tells what
    became of it. Like `torch._dynamo.explain` it forgets what torch.compile has compiled before.
    """
    settings = CompileSettings.of(options)
    original = _original(function)

    def explained(*arguments: Any, **named: Any) -> Explanation:
        torch._dynamo.reset()
        graphs: list[GraphReport] = []

        def backend(module: Any, examples: Sequence[Any]) -> Callable[..., Any]:
            return compiled_graph(module, examples, settings, graphs.append)

        before, first = shared_storage_of(settings).copied_nbytes, len(_reasons())
        try:
            # Else the graph of gradients is compiled when it is first called.
            with autograd_config.patch(force_non_lazy_backward_lowering=True):
                torch.compile(original, backend=backend, dynamic=dynamic)(*arguments, **named)
            copied = shared_storage_of(settings).copied_nbytes - before
            return Explanation(tuple(graphs), _breaks(_reasons()[first:]), copied)
        finally:
            torch._dynamo.reset()

    return explained


def graph_counts(options: Mapping[str, Any] | None = None) -> Counts:
    """What became of all graphs compiled so far for the device of these options."""
    return shared_storage_of(CompileSettings.of(options)).counts


def _original(function: Any) -> Any:
    """What was compiled, of something that torch.compile gave."""
    if isinstance(function, torch._dynamo.OptimizedModule):
        return function._orig_mod
    return getattr(function, "_torchdynamo_orig_callable", function)


def _reasons() -> list[Any]:
    reasons: list[Any] = output_graph.graph_break_reasons
    return reasons


def _breaks(reasons: Sequence[Any]) -> tuple[GraphBreak, ...]:
    found = dict.fromkeys(
        GraphBreak(_place(each.user_stack), str(each.reason).strip().partition("\n")[0])
        for each in reasons
    )
    return tuple(found)


def _place(stack: Sequence[Any]) -> str:
    if not stack:
        return "somewhere"
    return f"{PurePath(stack[-1].filename).name}:{stack[-1].lineno}"


def _line_of_graph(graph: GraphReport) -> str:
    mine, theirs = (sum(dict(who).values()) for who in (graph.by_stitch, graph.by_torch))
    programs = _many(graph.programs, "program")
    return f"  {graph.name}: {programs}, {mine} by Stitch, {theirs} by torch"


def _line_of_fallback(row: FallbackSummary) -> str:
    more = len(row.places) - MAX_PLACES
    places = ", ".join(row.places[:MAX_PLACES]) + (f" and {more} more" if more > 0 else "")
    return f"  {row.count} x {row.operator} ({places}): {row.reason}"


def _many(count: int, noun: str) -> str:
    return f"{count} {noun}" + ("" if count == 1 else "s")
