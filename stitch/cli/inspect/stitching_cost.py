"""`stitch-inspect a.ttb b.ttb`: can they be stitched, and at what cost, and how would it cost less?

Comes in: modules and wires. Goes out: a plan made without data, the copies it needs with bytes,
simulated time and reason, and for each link the options that would spare its copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from stitch import api
from stitch.cli.chain import Chain
from stitch.cli.device_costs import check_room, copies_inside, peaks
from stitch.cli.module_files import Module
from stitch.cli.run_inputs import gather_inputs
from stitch.linker import LinkReport, Wire, check_link
from stitch.machine import Machine
from stitch.planner import Plan
from stitch.program import TensorDesc
from stitch.report import CopyLine, counted


@dataclass(frozen=True, slots=True)
class Stitching:
    """What stitching modules takes: links, the plan's copies, advice, and the plans themselves."""

    machine: str
    links: tuple[LinkReport, ...]
    copies: tuple[CopyLine, ...]
    advice: tuple[str, ...]
    peaks: tuple[tuple[str, int], ...]
    plans: tuple[Plan, ...]

    @property
    def count(self) -> int:
        """Copies in one pass."""
        return sum(line.times for line in self.copies)

    @property
    def nbytes(self) -> int:
        """Bytes that these copies carry."""
        return sum(line.times * line.nbytes for line in self.copies)

    @property
    def seconds(self) -> float:
        """Their simulated seconds."""
        return sum(line.times * line.seconds for line in self.copies)


def stitching(modules: Sequence[Module], wires: Sequence[Wire], machine: Machine) -> Stitching:
    """Plan one pass on a device without data.

    Raises `LinkError` where the modules do not fit, `OutOfMemoryError` where there is no room.
    """
    reports = tuple(_report(modules, one) for one in wires)
    with api.open_device(machine, executor="null") as device:
        chain = Chain(device, modules, wires)
        check_room(device, chain)
        arrays = gather_inputs(chain.inputs, (), init=None, seed=0, without_data=True)
        chain.run(arrays)
        device.flush()
        plans = tuple(plan for plan, _ in device.history.plans)
        copies = copies_inside(device)
    advice = tuple(
        line
        for one, report in zip(wires, reports, strict=True)
        for line in _advice(modules, one, report, machine)
    )
    most = tuple((space.value, size) for space, size in peaks(plans).items())
    return Stitching(machine.name, reports, copies, advice, most, plans)


def _report(modules: Sequence[Module], one: Wire) -> LinkReport:
    producer, consumer = modules[one.producer].program, modules[one.consumer].program
    return check_link(
        producer.output_desc(one.output),
        consumer.input_desc(one.input),
        output=f"{producer.name}.{producer.outputs[one.output].name}",
        input=f"{consumer.name}.{consumer.inputs[one.input].name}",
    )


def _advice(
    modules: Sequence[Module], one: Wire, report: LinkReport, machine: Machine
) -> list[str]:
    """How to compile either side so that the link needs no copy."""
    if not report.conversions:
        return []
    producer, consumer = modules[one.producer].program, modules[one.consumer].program
    source, target = producer.output_desc(one.output), consumer.input_desc(one.input)
    here = wish_words(target, source, f"input.{consumer.inputs[one.input].name}")
    there = wish_words(source, target, f"output.{producer.outputs[one.output].name}")
    spared = f"saves the copy {report.output} -> {report.input}"
    return [
        f"compile {consumer.name} with {here}: {spared}",
        f"or compile {producer.name} with {there}: {spared}",
    ]


def wish_words(have: TensorDesc, want: TensorDesc, slot: str) -> str:
    """The `--set` words that turn one descriptor into the other."""
    a, b = have.layout, want.layout
    words = []
    if a.space is not b.space:
        words.append(f"space={b.space.value}")
    if a.data_type is not b.data_type:
        words.append(f"data_type={b.data_type.value}")
    if a.is_tiled is not b.is_tiled:
        words.append(f"layout={'tile' if b.is_tiled else 'row_major'}")
    if a.memory_layout is not b.memory_layout:
        words.append(f"memory_layout={b.memory_layout.value}")
    if b.shard_spec is not None and a.shard_spec != b.shard_spec:
        spec = b.shard_spec
        grid, shape = spec.core_grid, spec.shape
        order = "" if spec.orientation.value == "row_major" else f",{spec.orientation.value}"
        words.append(f"shard_spec={grid[0]}x{grid[1]},{shape[0]}x{shape[1]}{order}")
    if a.address != b.address and b.address is not None:
        words.append(f"address={b.address:#x}")
    if a.address is not None and b.address is None:
        words.append("no fixed address")
    return " ".join(f"--set {slot}.{word}" if "=" in word else word for word in words)


def stitching_json(result: Stitching) -> dict[str, Any]:
    """The same as plain data."""
    return {
        "machine": result.machine,
        "can_be_stitched": True,
        "links": [
            {"output": r.output, "input": r.input, "conversions": list(r.conversions),
             "changes_type": r.changes_type}
            for r in result.links
        ],
        "copies": [asdict(copy) for copy in result.copies],
        "copy_count": result.count,
        "copy_nbytes": result.nbytes,
        "copy_seconds": result.seconds,
        "peak_bytes_per_bank": dict(result.peaks),
        "advice": list(result.advice),
    }  # fmt: skip


def stitching_lines(result: Stitching) -> list[str]:
    """The same as text."""
    out = [
        f"can be stitched on {result.machine}: {counted(result.count, 'copy', 'copies')}, "
        f"{result.nbytes} B, {result.seconds * 1e6:.1f} us simulated in one pass"
    ]
    out += [f"  link {report.text()}" for report in result.links]
    for line in result.copies:
        proof = f" [{line.certificate}]" if line.certificate else ""
        out.append(
            f"  {line.kind} x{line.times} {line.nbytes} B {line.seconds * 1e6:.1f} us  "
            f"{line.source} -> {line.target}{proof}"
        )
        out.append(f"    {line.reason}")
    out += [f"  peak {space}: {size} B per bank" for space, size in result.peaks]
    out += [f"  advice: {line}" for line in result.advice]
    return out
