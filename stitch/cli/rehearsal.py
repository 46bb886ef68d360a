"""The cost of one pass over several modules, and the slot layout that would reduce it most.

Both are planned without data, as `stitch-run --dry_run` does.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from stitch import api
from stitch.cli.chain import Chain, PipelineRunnable, Runnable
from stitch.cli.device_costs import check_device_capacity, copies_inside
from stitch.cli.module_files import ModuleFile, with_program
from stitch.cli.run_inputs import gather_inputs
from stitch.compiler import with_layouts
from stitch.errors import StitchError
from stitch.graph import placement_between
from stitch.linker import Wire
from stitch.machine import Machine
from stitch.planner import Cost, Plan, SlotChange, possible_changes
from stitch.program import Program
from stitch.report import CopyLine

if TYPE_CHECKING:
    from stitch.documents import CheckedPipeline

#: Changes that are planned, those of the values with the most seconds of copies first.
MOST_TRIALS = 64


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """One pass, planned without data.

    Args:
        cost: Its cost, with the copies of host arrays.
        plans: Its plans, and how often each ran.
        copies: Its copies, without those of host arrays.
        modules: Key of a transformation → index of the first module with its program.
    """

    cost: Cost
    plans: tuple[tuple[Plan, int], ...]
    copies: tuple[CopyLine, ...]
    modules: Mapping[int, int]


def rehearse(modules: Sequence[ModuleFile], wires: Sequence[Wire], machine: Machine) -> Rehearsal:
    """Plan one pass; raise `LinkError` or `OutOfMemoryError` if it cannot run."""
    sources = [module.source for module in modules]
    return _rehearse(machine, lambda device: Chain(device, modules, wires), sources)


def rehearse_pipeline(checked: CheckedPipeline, machine: Machine) -> Rehearsal:
    """Plan one pass of a pipeline file; raise `OutOfMemoryError` if it cannot run."""
    sources = list(checked.programs)
    return _rehearse(machine, lambda device: PipelineRunnable(device, checked), sources)


def _rehearse(
    machine: Machine, load: Callable[[api.Device], Runnable], sources: Sequence[Hashable]
) -> Rehearsal:
    """Plan one pass; `sources` identifies the source of each program of the runnable."""
    with api.open_device(machine, executor="null") as device:
        runnable = load(device)
        check_device_capacity(device, runnable)
        arrays = gather_inputs(runnable.inputs, (), init=None, seed=0, without_data=True)
        results = runnable.run(arrays)
        device.flush()
        account = device.account()
        del results
        total = account.total
        firsts = {source: at for at, source in reversed([*enumerate(sources)])}
        return Rehearsal(
            Cost(total.copies, total.nbytes, total.seconds, total.program_seconds),
            account.plans, copies_inside(device),
            {
                loaded.transformation.key: firsts[source]
                for loaded, source in zip(runnable.programs, sources, strict=True)
            },
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Advice:
    """A change of one slot's layout, as text, and the cost that it adds to a pass."""

    change: str
    adds: Cost

    @property
    def line(self) -> str:
        """Return the change and its saving."""
        return f"compile {self.change}: {difference_text(self.adds)} a pass"


def difference_text(more: Cost) -> str:
    """Describe an added (or negative, saved) cost.

    >>> difference_text(Cost(1, 32, 1e-6) - Cost(3, 96, 2e-6))
    '-2 copies, -64 B, -1.0 us'
    """
    noun = "copy" if abs(more.copies) == 1 else "copies"
    parts = [f"{more.copies:+d} {noun}", f"{more.nbytes:+d} B", f"{more.seconds * 1e6:+.1f} us"]
    if abs(more.program_seconds) >= 0.05e-6:
        parts.append(f"{more.program_seconds * 1e6:+.1f} us of programs")
    return ", ".join(parts)


def advise(
    modules: Sequence[ModuleFile], wires: Sequence[Wire], machine: Machine, now: Rehearsal
) -> Advice | None:
    """Return the change of one slot's layout that saves most; None if none saves anything."""
    best, advice = now.cost, None
    for change in possible_changes(now.plans, now.modules)[:MOST_TRIALS]:
        module = modules[change.slot.program]
        layouts = {(change.slot.side, change.slot.index): change.layout}
        try:
            changed = with_layouts(module.program, layouts, machine.shape)
            cost = rehearse(
                [with_program(m, changed) if m.source == module.source else m for m in modules],
                wires, machine,
            ).cost  # fmt: skip
        except (StitchError, MemoryError):
            continue  # Such a program cannot be compiled, linked or planned.
        if cost.order < best.order:
            best, advice = cost, Advice(_change_text(module.program, change), cost - now.cost)
    return advice


def _change_text(program: Program, change: SlotChange) -> str:
    """Describe a change by `--set` options (which cannot remove an address), or by layout."""
    side, index, want = change.slot.side, change.slot.index, change.layout
    name = (program.inputs if side == "input" else program.outputs)[index].name
    if program.is_opaque:
        return f"{program.name} with {side} {name} in {want.text()}"
    have = (program.input_desc if side == "input" else program.output_desc)(index).layout
    # A name of digits would be an index.
    slot = index if name.isdecimal() else name
    sets = [f"--set {option.text()}" for option in placement_between(side, slot, have, want)]
    parts = [f"with {' '.join(sets)}"] if sets else []
    if have.address is not None and want.address is None:
        parts.append(f"without its placement option for {side}.{slot}.address")
    return f"{program.name} {' and '.join(parts)}"
