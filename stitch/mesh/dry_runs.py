"""What a placed task graph will cost, before anything starts: pieces, traffic, memory, time.

The pieces run on device servers that compute nothing, so that memory and time are those of a real
run. Calls of the graph are then simulated: every device takes the pieces of one micro-batch after
those of the micro-batch before, with at most `in_flight` micro-batches under way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from stitch.errors import UsageError
from stitch.mesh.mesh import MeshGraph
from stitch.mesh.pieces import Piece
from stitch.mesh.simulation import Step, Timeline, simulate
from stitch.mesh.specification import MachineSpecification
from stitch.mesh.task_costs import sent_nbytes
from stitch.program import Array
from stitch.report import counted
from stitch.tasks import TaskTable

#: Tasks of a piece that a line names.
MAX_NAMES = 4


@dataclass(frozen=True, slots=True)
class DryRun:
    """The plan of a placed task graph.

    Attributes:
        specification: The devices and links.
        pieces: The pieces.
        seconds: Simulated seconds of each piece for one micro-batch: programs and copies.
        traffic: Values and their bytes that cross each link in one micro-batch, by (source,
            target); the source None is the client.
        peaks: The most bytes per bank that each device uses, by space.
        micro_batches: Their number.
        timeline: The simulated run of (piece, micro-batch).
    """

    specification: MachineSpecification
    pieces: tuple[Piece, ...]
    seconds: tuple[float, ...]
    traffic: Mapping[tuple[str | None, str], tuple[tuple[int, int], ...]]
    peaks: Mapping[str, Mapping[str, int]]
    micro_batches: int
    timeline: Timeline[tuple[int, int]]

    def text(self) -> str:
        """Return it as lines."""
        whole, busy = self.timeline.makespan, self.timeline.busy
        out = [
            f"{self.specification.name}: {counted(len(self.pieces), 'piece')} on "
            f"{counted(len(self.peaks), 'device')}, "
            f"{counted(self.micro_batches, 'micro-batch', 'micro-batches')}: "
            f"{_text(whole)} simulated, devices wait {self.timeline.bubble_share:.1%} of it"
        ]
        for piece, seconds in zip(self.pieces, self.seconds, strict=True):
            names = [task.agent.name for task in piece.table.tasks]
            more = f", {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
            out.append(
                f"  piece {piece.number} on {piece.device}: {_text(seconds)}, "
                f"{counted(len(names), 'task')} ({', '.join(names[:MAX_NAMES])}{more})"
            )
        for (source, target), values in self.traffic.items():
            nbytes = sum(size for _, size in values)
            line = f"{counted(len(values), 'value')}, {nbytes} B a micro-batch"
            if source is None:
                out.append(f"  client -> {target}: {line}, not in the time")
                continue
            link = self.specification.link(source, target)
            taken = sum(link.seconds(size) for _, size in values)
            where = f" ({link.provenance})" if link.provenance else ""
            out.append(f"  {source} -> {target}: {line}, {_text(taken)}{where}")
        for device, peaks in self.peaks.items():
            shape = self.specification.entry(device).machine.shape
            spaces = [
                f"{space.value} {peaks[space.value]} of {shape.space(space).capacity} B per bank"
                for space in shape.spaces if space.value in peaks
            ]  # fmt: skip
            out.append(
                f"  {device} ({shape.name}): busy {_text(busy.get(device, 0.0))}; "
                f"at most {', '.join(spaces) or 'nothing'}"
            )
        return "\n".join(out)


def _text(seconds: float) -> str:
    return f"{seconds * 1e6:.1f} us"


def dry_run(run: MeshGraph, micro_batches: int = 1) -> DryRun:
    """Plan a graph that a mesh without data has prepared, and simulate calls of it.

    Args:
        run: A prepared graph of `open_mesh(..., executor="null")`; it is called twice.
        micro_batches: The number of calls.

    Raises:
        UsageError: There are no micro-batches, or the mesh computes.
        OutOfMemoryError: A device cannot hold a piece.
    """
    mesh, table = run.mesh, run.table
    if micro_batches < 1:
        raise UsageError(f"a dry run of {micro_batches} micro-batches", expected="1 or more")
    if mesh.computes:
        raise UsageError("a dry run needs a mesh that computes nothing",
                         remedy="open_mesh(..., executor='null')")  # fmt: skip
    run.write(**{name: _no_data(table, before) for name, (before, _) in run.carried.items()})
    inputs = {name: _no_data(table, n) for name, n in table.inputs if name not in run.carried}
    for _ in range(2):  # The first call also brings the constants.
        results = run(**inputs)
        for result in results if isinstance(results, tuple) else (results,):
            result.settle()
    seconds = tuple([record.simulated_seconds for record in run.last_records()])
    used = dict.fromkeys(piece.device for piece in run.pieces)
    devices = mesh.statistics()["devices"]
    return DryRun(
        mesh.specification, run.pieces, seconds, _traffic(run),
        {name: devices[name]["peak_bytes_per_bank"] for name in used}, micro_batches,
        simulate(_steps(run, seconds, micro_batches), mesh.specification),
    )  # fmt: skip


def _no_data(table: TaskTable, number: int) -> Array:
    """Return an array of a value's type that takes no memory."""
    desc = table.descs[number]
    return np.broadcast_to(np.zeros((), desc.layout.data_type.in_arrays.dtype), desc.shape)


def _sizes(pieces: Sequence[Piece]) -> dict[int, int]:
    """Return the bytes of each value that enters or leaves a piece."""
    sizes: dict[int, int] = {}
    for piece in pieces:
        own = piece.table
        for number, (_, inner) in zip(
            (*piece.inputs, *piece.outputs), (*own.inputs, *own.outputs), strict=True
        ):
            sizes[number] = sent_nbytes(own.descs[inner])
    return sizes


def _traffic(run: MeshGraph) -> dict[tuple[str | None, str], tuple[tuple[int, int], ...]]:
    """Return the values that cross in one micro-batch, each once to a device."""
    sizes, carried = _sizes(run.pieces), dict(run.carried.values())
    made_on = {number: piece.device for piece in run.pieces for number in piece.outputs}
    crossing: dict[tuple[str | None, str], dict[int, int]] = {}
    for piece in run.pieces:
        for number in piece.inputs:
            source = made_on.get(carried.get(number, number))
            if source != piece.device:
                crossing.setdefault((source, piece.device), {})[number] = sizes[number]
    return {ends: tuple(values.items()) for ends, values in crossing.items()}


def _steps(
    run: MeshGraph, seconds: Sequence[float], micro_batches: int
) -> dict[str, list[Step[tuple[int, int]]]]:
    """Return the steps of each device: the pieces of a micro-batch, then those of the next."""
    sizes = _sizes(run.pieces)
    carried = dict(run.carried.values())
    steps: dict[str, list[Step[tuple[int, int]]]] = {piece.device: [] for piece in run.pieces}
    for micro_batch in range(micro_batches):
        # A call begins when at most `in_flight` - 1 calls are under way.
        earlier = micro_batch - run.mesh.in_flight
        settled = [(piece.number, earlier) for piece in run.pieces if earlier >= 0]

        def read(number: int, micro_batch: int = micro_batch) -> tuple[int, int]:
            after = carried.get(number)
            return (number, micro_batch) if after is None else (after, micro_batch - 1)

        for piece, taken in zip(run.pieces, seconds, strict=True):
            made = tuple([((number, micro_batch), sizes[number]) for number in piece.outputs])
            reads = tuple(map(read, piece.inputs))
            steps[piece.device].append(
                Step((piece.number, micro_batch), taken, reads, made, tuple(settled))
            )
    return steps
