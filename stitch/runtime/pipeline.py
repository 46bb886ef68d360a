"""`RuntimePipeline`: a fixed chain of loaded programs, called in one go."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from stitch.errors import UsageError
from stitch.linker import chain_wires, handed_on
from stitch.runtime.graphs import PreparedGraph, Slot, chain_graph
from stitch.runtime.loaded import LoadedProgram


class RuntimePipeline(PreparedGraph):
    """Loaded programs chained by position: `pipeline(x)` is `c(b(a(x)))` with one plan.

    If the numbers of outputs and inputs differ, outputs feed activations of the same name
    (`chain_wires`), and may skip programs. Inputs of later programs that no output feeds are inputs
    of the pipeline.

    Raises:
        UsageError: There is no program, or the programs are on several devices.
        LinkError: An output does not match the input that it feeds.
    """

    def __init__(self, programs: Iterable[LoadedProgram]) -> None:
        self.programs = tuple(programs) if isinstance(programs, Iterable) else ()
        strangers = [p for p in self.programs if not isinstance(p, LoadedProgram)]
        if not self.programs or strangers:
            got = strangers[0] if strangers else programs
            raise UsageError(
                "a pipeline needs at least one program that is loaded on a device",
                expected="programs: a list of results of device.load",
                got=f"{type(got).__name__}: {' '.join(repr(got).split())[:60]}",
                remedy="load files or models first: Pipeline([device.load(one) for one in (a, b)])",
            )
        device = self.programs[0].device
        feeds: list[dict[int, tuple[int, int]]] = [{} for _ in self.programs]
        for wire in chain_wires([loaded.program for loaded in self.programs]):
            feeds[wire.consumer][wire.input] = (wire.producer, wire.output)
        table, _ = chain_graph(self.programs, feeds, "pipeline", _results_of(self.programs))
        super().__init__(device, table, title="the pipeline")


def _results_of(programs: Sequence[LoadedProgram]) -> list[Slot]:
    """Return the outputs of a pipeline: those of the last program, then states of the others."""
    *others, last = programs
    results = [(len(others), at) for at in range(len(last.outputs))]
    for number, loaded in enumerate(others):
        own = {*handed_on(loaded.program)}
        results += [(number, at) for at in range(len(loaded.outputs)) if at not in own]
    return results
