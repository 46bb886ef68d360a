"""`explain`: every copy that a device made, with bytes, simulated time and reason."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from stitch.planner import Copy, Execute, Plan, Relocate
from stitch.program import Space
from stitch.report.memory import host_memory_line
from stitch.runtime import Device


@dataclass(frozen=True, slots=True)
class CopyLine:
    """One copy of a plan: what carried bytes, from where to where, how often, and why."""

    kind: str  # copy, evict, move, bounce
    source: str
    target: str
    nbytes: int
    seconds: float
    times: int
    reason: str
    certificate: str | None


def copy_lines(plans: Iterable[tuple[Plan, int]]) -> tuple[CopyLine, ...]:
    """The copies of plans in order; the same copy in several plans is one line."""
    found: dict[tuple[Any, ...], CopyLine] = {}
    for plan, times in plans:
        for step in plan.copies:
            line = _line(step, times)
            key = (line.kind, line.source, line.target, line.nbytes, line.reason, line.certificate)
            earlier = found.get(key)
            total = times + (earlier.times if earlier else 0)
            found[key] = CopyLine(
                line.kind, line.source, line.target, line.nbytes, line.seconds, total,
                line.reason, line.certificate,
            )  # fmt: skip
    return tuple(found.values())


def _line(step: Copy | Relocate, times: int) -> CopyLine:
    certificate = step.certificate
    proof: str | None = None
    if certificate is not None:
        proof = str(certificate.kind)
        if certificate.gaps:
            proof += f": {sum(certificate.pieces)} B per bank into {sum(certificate.gaps)} B"
    if isinstance(step, Copy):
        source, target = step.source.desc.text(), step.target.desc.text()
        return CopyLine(step.kind, source, target, step.nbytes, step.seconds, times,
                        step.reason, proof)  # fmt: skip
    kind = "bounce" if step.stage is not None else "move"
    where = step.space.value
    return CopyLine(kind, where, where, step.nbytes, step.seconds, times, step.reason, proof)


def explain(device: Device) -> str:
    """The device's copies as text; runs the queue first.

    One line per distinct copy: kind, how often, bytes and simulated microseconds of one, from → to,
    and the reason below it. Kernel staging (forms that only the executor wanted) is listed apart.
    """
    device.flush()
    plans = device.history.plans
    lines = copy_lines(plans)
    earlier, moves = device.history.earlier, device.history.moves
    copies = earlier.copies + sum(line.times for line in lines)
    copies += sum(times for _, times, _ in moves)
    nbytes = earlier.nbytes + sum(line.times * line.nbytes for line in lines)
    nbytes += sum(total for _, _, total in moves)
    seconds = earlier.seconds + sum(line.times * line.seconds for line in lines)
    seconds += sum(_move_seconds(device, *move) for move in moves)
    programs = earlier.programs
    programs += sum(t * sum(isinstance(s, Execute) for s in p.steps) for p, t in plans)
    out = [
        f"{device.machine.name}: {counted(programs, 'program run')}, "
        f"{counted(copies, 'copy', 'copies')}, {nbytes} B, {seconds * 1e6:.1f} us simulated"
    ]
    if earlier.copies:
        out.append(f"  {counted(earlier.copies, 'copy', 'copies')} of older plans, not listed")
    for line in lines:
        proof = f" [{line.certificate}]" if line.certificate else ""
        out.append(
            f"  {line.kind:6} x{line.times} {line.nbytes} B {line.seconds * 1e6:.1f} us  "
            f"{line.source} -> {line.target}{proof}"
        )
        out.append(f"         {line.reason}")
    for space, times, total in moves:
        out.append(f"  aside  x{times} {total} B in all  {space.value} -> {space.value}")
        out.append("         an earlier result lay where a plan that runs again writes")
    for desc, times, total in device.history.reads:
        out.append(f"  read   x{times} {total} B in all  {desc.text()} -> host")
    staged = max(device.history.staging, default=0)
    if staged:
        out.append(f"  kernel staging: at most {staged} B held by the executor (no copies)")
    writes, written = device.backend.write_counts()
    out.append(f"  the spaces saw {writes} writes by copies and moves, {written} B")
    out.append(f"  {host_memory_line(device)}")
    return "\n".join(out)


def _move_seconds(device: Device, space: Space, times: int, nbytes: int) -> float:
    if device.machine.path(space, space) is None:
        return 0.0
    return times * device.machine.seconds(space, space, nbytes // times, nbytes // times)


def counted(number: int, one: str, many: str | None = None) -> str:
    """A number with its noun.

    >>> counted(1, "copy", "copies"), counted(2, "run")
    ('1 copy', '2 runs')
    """
    return f"{number} {one if number == 1 else many or one + 's'}"


def plan_json(plan: Plan) -> dict[str, Any]:
    """A plan's copies as plain data, for programs to read."""
    return {
        "seconds": plan.seconds,
        "tasks": [task.transformation.name for task in plan.request.tasks],
        "copies": [
            {
                "kind": line.kind,
                "source": line.source,
                "target": line.target,
                "nbytes": line.nbytes,
                "seconds": line.seconds,
                "reason": line.reason,
                "certificate": line.certificate,
            }
            for line in copy_lines([(plan, 1)])
        ],
    }
