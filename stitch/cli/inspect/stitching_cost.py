"""`stitch-inspect a.ttb b.ttb`: can they be stitched, and at what cost, and how would it cost less?

Comes in: modules and wires. Goes out: a plan made without data, the copies it needs with bytes,
simulated time and reason, and the few changes that would save most of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from stitch import api
from stitch.cli.chain import Chain
from stitch.cli.device_costs import peaks
from stitch.cli.module_files import ModuleFile, lacking_lines, with_program
from stitch.cli.rehearsal import Advice, advise, rehearse
from stitch.linker import LinkReport, Wire, check_link
from stitch.machine import Machine
from stitch.planner import Plan
from stitch.program import Program
from stitch.report import CopyLine, counted


@dataclass(frozen=True, slots=True)
class Stitching:
    """What stitching modules takes: links, the plan's copies, advice, and the plans themselves;
    what of the modules has no counterpart here."""

    machine: str
    links: tuple[LinkReport, ...]
    copies: tuple[CopyLine, ...]
    advice: Advice | None
    peaks: tuple[tuple[str, int], ...]
    plans: tuple[Plan, ...]
    lacking: tuple[str, ...] = ()

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


def stitching(modules: Sequence[ModuleFile], wires: Sequence[Wire], machine: Machine) -> Stitching:
    """Plan one pass on a device without data, and what it would be with slots compiled otherwise.

    Raises `LinkError` where the modules do not fit, `OutOfMemoryError` where there is no room.
    """
    reports = tuple(_report(modules, one) for one in wires)

    def load(device: api.Device, programs: Mapping[int, Program]) -> Chain:
        placed = [with_program(one, programs.get(at)) for at, one in enumerate(modules)]
        return Chain(device, placed, wires)

    now = rehearse(machine, load, {}, None)
    plans = tuple(plan for plan, _ in now.plans)
    most = tuple((space.value, size) for space, size in peaks(plans).items())
    advice = advise(machine, load, None, now)
    lacking = tuple(lacking_lines(modules))
    return Stitching(machine.name, reports, now.copies, advice, most, plans, lacking)


def _report(modules: Sequence[ModuleFile], one: Wire) -> LinkReport:
    producer, consumer = modules[one.producer].program, modules[one.consumer].program
    return check_link(
        producer.output_desc(one.output),
        consumer.input_desc(one.input),
        output=f"{producer.name}.{producer.outputs[one.output].name}",
        input=f"{consumer.name}.{consumer.inputs[one.input].name}",
    )


def stitching_json(result: Stitching) -> dict[str, Any]:
    """The same as plain data."""
    advice = result.advice
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
        "advice": [] if advice is None else list(advice.lines),
        "advice_adds": None if advice is None else asdict(advice.then - advice.now),
        "lacking": list(result.lacking),
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
    if result.advice is not None:
        out += [f"  advice: {line}" for line in result.advice.lines]
    out += [f"  shown otherwise: {line}" for line in result.lacking]
    return out
