"""`explain(function)(*arguments)`: report how torch.compile with Stitch compiles a function."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from stitch.frontend.torch.compile import (
    CompileSettings,
    Counts,
    GraphReport,
    compiled_graph,
    shared_storage_of,
)
from stitch.frontend.torch.torch_internals import OptimizedModule, functorch_config

#: Source lines listed in one line of the text.
MAX_PLACES = 4


@dataclass(frozen=True, slots=True)
class FallbackSummary:
    """An operator that torch runs for one reason, with its number of nodes and source lines."""

    operator: str
    count: int
    reason: str
    places: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Explanation:
    """The graphs that aot_autograd makes of a function.

    `copied_nbytes`: bytes of arguments and results that the explained call copied.
    """

    graphs: tuple[GraphReport, ...]
    copied_nbytes: int

    @property
    def programs(self) -> int:
        """Number of programs of all graphs."""
        return sum(graph.programs for graph in self.graphs)

    @property
    def by_stitch(self) -> dict[str, int]:
        """Number of nodes of each operator that programs run."""
        return self._operators("by_stitch")

    @property
    def by_torch(self) -> dict[str, int]:
        """Number of nodes of each operator that torch runs."""
        return self._operators("by_torch")

    @property
    def to_programs_nbytes(self) -> int:
        """Bytes of torch tensors that programs read in one call of each graph."""
        return sum(graph.to_programs_nbytes for graph in self.graphs)

    @property
    def to_torch_nbytes(self) -> int:
        """Bytes of results that programs return to torch in one call of each graph."""
        return sum(graph.to_torch_nbytes for graph in self.graphs)

    @property
    def fallbacks(self) -> tuple[FallbackSummary, ...]:
        """Operators that torch runs, by operator and reason; the most frequent first."""
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

    def _operators(self, field: str) -> dict[str, int]:
        total: Counter[str] = Counter()
        for graph in self.graphs:
            total.update(dict(getattr(graph, field)))
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
        lines.append(
            f"bytes a call: {self.to_programs_nbytes:,} of torch's read by programs, "
            f"{self.to_torch_nbytes:,} given to torch; {self.copied_nbytes:,} copied in this one"
        )
        return "\n".join(lines)


def explain(
    function: Callable[..., Any], *, options: Mapping[str, Any] | None = None,
    dynamic: bool | None = None,
) -> Callable[..., Explanation]:  # fmt: skip
    """Return a function that compiles `function`, calls it once, and returns an `Explanation`.

    `torch._dynamo.explain` lists graph breaks; like it, this clears the compile cache.
    """
    settings = CompileSettings.of(options)
    original = _original(function)

    def explained(*arguments: Any, **named: Any) -> Explanation:
        torch.compiler.reset()
        graphs: list[GraphReport] = []

        def backend(module: Any, examples: Sequence[Any]) -> Callable[..., Any]:
            return compiled_graph(module, examples, settings, graphs.append)

        before = shared_storage_of(settings).copied_nbytes
        try:
            # Otherwise the backward graph would be compiled at its first call.
            with functorch_config.patch(force_non_lazy_backward_lowering=True):
                torch.compile(original, backend=backend, dynamic=dynamic)(*arguments, **named)
            copied = shared_storage_of(settings).copied_nbytes - before
            return Explanation(tuple(graphs), copied)
        finally:
            torch.compiler.reset()

    return explained


def graph_counts(options: Mapping[str, Any] | None = None) -> Counts:
    """Return the totals of all graphs compiled so far for the device of these options."""
    return shared_storage_of(CompileSettings.of(options)).counts


def _original(function: Any) -> Any:
    """The function or module that torch.compile was given."""
    if isinstance(function, OptimizedModule):
        return function._orig_mod
    return getattr(function, "_torchdynamo_orig_callable", function)


def _line_of_graph(graph: GraphReport) -> str:
    mine, theirs = (sum(dict(part).values()) for part in (graph.by_stitch, graph.by_torch))
    programs = _many(graph.programs, "program")
    again = "".join(f"\n    compiled again for other sizes: {why}" for why in graph.recompiles)
    return f"  {graph.name}: {programs}, {mine} by Stitch, {theirs} by torch{again}"


def _line_of_fallback(row: FallbackSummary) -> str:
    more = len(row.places) - MAX_PLACES
    places = ", ".join(row.places[:MAX_PLACES]) + (f" and {more} more" if more > 0 else "")
    return f"  {row.count} x {row.operator} ({places}): {row.reason}"


def _many(count: int, noun: str) -> str:
    return f"{count} {noun}" + ("" if count == 1 else "s")
