"""`RuntimePipeline`: a fixed chain of loaded programs, called in one go."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from stitch.argument_kinds import BOOL
from stitch.errors import LinkError, UsageError
from stitch.linker import Wire, chain_wires, handed_on
from stitch.on_demand import late_import
from stitch.runtime.graphs import PreparedGraph, Slot, chain_graph
from stitch.runtime.loaded import LoadedProgram
from stitch.tasks import TaskTable
from stitch.ttb import Binary


class RuntimePipeline(PreparedGraph):
    """Loaded programs chained by position: `pipeline(x)` is `c(b(a(x)))` with one plan.

    If the numbers of outputs and inputs differ, outputs feed activations of the same name
    (`chain_wires`), and may skip programs. Inputs of later programs that no output feeds are inputs
    of the pipeline.

    Args:
        programs: The programs, in the order in which they run.
        link: Link the programs into one, which is loaded beside them, with bit-identical results.
        fuse: As `link`, and let the executor fuse operations across programs: the last bits of
            results may differ.

    Raises:
        UsageError: There is no program, or the programs are on several devices.
        LinkError: An output does not match the input that it feeds; the programs cannot be linked,
            or the executor does not promise that they then give the same bits.
        OutOfMemoryError: The linked program does not fit.
    """

    def __init__(
        self, programs: Iterable[LoadedProgram], *, link: bool = False, fuse: bool = False
    ) -> None:
        BOOL.check("Pipeline", "link", link)
        BOOL.check("Pipeline", "fuse", fuse)
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
        wires = chain_wires(
            [loaded.program for loaded in self.programs], strict_types=device.strict_types
        )
        for wire in wires:
            feeds[wire.consumer][wire.input] = (wire.producer, wire.output)
        results = _results_of(self.programs)
        graph, _ = chain_graph(self.programs, feeds, "pipeline", results)
        if link or fuse:
            linked = _linked(self.programs, wires, results, graph.table(), fuse)
            self.programs = (linked,)
            graph, _ = chain_graph(self.programs, [{}], "pipeline")
        super().__init__(device, graph.table(), title="the pipeline")


def _linked(
    programs: Sequence[LoadedProgram], wires: Sequence[Wire], results: Sequence[Slot],
    table: TaskTable, fuse: bool,
) -> LoadedProgram:  # fmt: skip
    """Link the programs of a pipeline and load the whole, with the slots that `table` has."""
    device, parts = programs[0].device, [loaded.program for loaded in programs]
    for loaded in programs:
        device.check_program(loaded)
        # The whole has their constants, which are not verified again.
        loaded.verify()
    obstacle = "" if fuse else device.backend.executor.link_obstacle(parts)
    if obstacle:
        raise LinkError(
            "linked into one, the programs of this pipeline would not give the same bits",
            expected="programs of which the executor promises equal bits",
            got=obstacle,
            remedy="Pipeline(programs, fuse=True) links them, and the last bits may differ; "
            "Pipeline(programs) runs them one after the other",
        )
    with late_import():
        from stitch.linker import link_programs
    kept, machine = sorted(results), device.machine.shape
    whole = link_programs(
        parts, wires, machine=machine, keep=kept, strict_types=device.strict_types
    )
    inputs = zip(whole.inputs, table.inputs, strict=True)
    outputs = zip([whole.outputs[kept.index(slot)] for slot in results], table.outputs, strict=True)
    whole = replace(
        whole,
        inputs=tuple([replace(slot, name=named.name) for slot, named in inputs]),
        outputs=tuple([replace(slot, name=named.name) for slot, named in outputs]),
    )
    linked: LoadedProgram = device.load(Binary((whole,), machine, "linked by a pipeline"))
    return linked


def _results_of(programs: Sequence[LoadedProgram]) -> list[Slot]:
    """Return the outputs of a pipeline: those of the last program, then states of the others."""
    *others, last = programs
    results = [(len(others), at) for at in range(len(last.outputs))]
    for number, loaded in enumerate(others):
        own = {*handed_on(loaded.program)}
        results += [(number, at) for at in range(len(loaded.outputs)) if at not in own]
    return results
