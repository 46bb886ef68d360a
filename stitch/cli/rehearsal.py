"""Compile advice: slot layouts that save copies, found by planning the changed programs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeAlias

from stitch import api
from stitch.cli.chain import Runnable
from stitch.cli.device_costs import check_device_capacity, copies_inside
from stitch.cli.run_inputs import gather_inputs
from stitch.compiler import with_layouts
from stitch.errors import StitchError
from stitch.graph import LAYOUT_FIELDS, ComputationGraph, PlacementOption, placement_between
from stitch.machine import Machine
from stitch.planner import (
    MOST_CHANGES,
    MOST_TRIALS,
    Cost,
    Plan,
    Slot,
    SlotChange,
    best_changes,
    possible_changes,
)
from stitch.program import Array, Layout, Program
from stitch.report import CopyLine
from stitch.runtime import DEFAULT_WINDOW

#: Maximum number of program runs that are planned for one piece of advice.
MOST_RUNS = 20_000

#: Loads a run on a device, with some programs replaced (by index).
Load: TypeAlias = Callable[[api.Device, Mapping[int, Program]], Runnable]


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """One pass, planned without data.

    Args:
        cost: Its cost, with the copies of host arrays.
        plans: Its plans, and how often each ran.
        copies: Its copies, without those of host arrays.
        programs: The programs that it ran.
        firsts: For each program the index of the first program of the same file.
        keys: Key of a transformation → index of its program.
        runs: The number of program runs.
    """

    cost: Cost
    plans: tuple[tuple[Plan, int], ...]
    copies: tuple[CopyLine, ...]
    programs: tuple[Program, ...]
    firsts: tuple[int, ...]
    keys: Mapping[int, int]
    runs: int


def rehearse(
    machine: Machine, load: Load, programs: Mapping[int, Program], arrays: Sequence[Array] | None,
    *, window: int = DEFAULT_WINDOW, strict_types: bool = False,
) -> Rehearsal:  # fmt: skip
    """Plan one pass without data, as `--dry_run` does."""
    with api.open_device(
        machine, executor="null", window=window, strict_types=strict_types
    ) as device:
        runnable = load(device, programs)
        check_device_capacity(device, runnable)
        if arrays is None:
            arrays = gather_inputs(runnable.inputs, (), init=None, seed=0, without_data=True)
        results = runnable.run(arrays)
        device.flush()
        account = device.account()
        del results
        firsts = tuple(map(runnable.files.index, runnable.files))
        loaded = runnable.programs
        total = account.total
        return Rehearsal(
            Cost(total.copies, total.nbytes, total.seconds, total.program_seconds),
            account.plans, copies_inside(device),
            tuple(one.program for one in loaded), firsts,
            {one.transformation.key: n for one, n in zip(loaded, firsts, strict=True)},
            runnable.runs,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Advice:
    """Changes, their texts by program, and the costs of one pass now and with them."""

    changes: tuple[SlotChange, ...]
    texts: tuple[str, ...]
    now: Cost
    then: Cost

    @property
    def lines(self) -> tuple[str, ...]:
        """Return a line for each change; the last one names the saving."""
        firsts = ("compile", *["and"] * (len(self.texts) - 1))
        together = "together " if len(self.texts) > 1 else ""
        lines = [f"{first} {word}" for first, word in zip(firsts, self.texts, strict=True)]
        saved = f"{difference_text(self.then - self.now)} a pass"
        return (*lines[:-1], f"{lines[-1]}: {together}{saved}")


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
    machine: Machine, load: Load, arrays: Sequence[Array] | None, now: Rehearsal | None = None,
    *, most: int = MOST_CHANGES, window: int = DEFAULT_WINDOW, strict_types: bool = False,
) -> Advice | None:  # fmt: skip
    """Search for a few changes of slot layouts of compiled programs that save copies.

    Args:
        machine: The machine.
        load: Loads the run.
        arrays: The inputs; None: only their shapes matter.
        now: The unchanged pass, if it is planned already.
        most: Maximum number of changes.
        window: As of the device.
        strict_types: As of the device.

    Returns:
        None if nothing is saved, or a pass is too long to plan it several times.
    """
    plan = partial(rehearse, machine, load, arrays=arrays, window=window, strict_types=strict_types)
    unchanged = now or plan(programs={})

    def price(changes: Sequence[SlotChange]) -> Cost | None:
        if not changes:
            return unchanged.cost
        changed = {}
        for number in {change.slot.program for change in changes}:
            layouts = {(c.slot.side, c.slot.index): c.layout for c in changes
                       if c.slot.program == number}  # fmt: skip
            changed[number] = with_layouts(unchanged.programs[number], layouts, machine.shape)
        replaced = {
            k: changed[first] for k, first in enumerate(unchanged.firsts) if first in changed
        }
        return plan(programs=replaced).cost

    return best_advice(unchanged, price, most=most)


def best_advice(
    now: Rehearsal, price: Callable[[Sequence[SlotChange]], Cost | None], *,
    most: int = MOST_CHANGES, allowed: Callable[[Slot], bool] = lambda slot: True,
) -> Advice | None:  # fmt: skip
    """Return the advice of `best_changes` among changes that can be compiled and planned."""

    def priced(changes: Sequence[SlotChange]) -> Cost | None:
        try:
            return price(changes)
        except (StitchError, MemoryError):
            return None

    trials = min(MOST_TRIALS, MOST_RUNS // max(1, now.runs))
    changes = [c for c in possible_changes(now.plans, now.keys) if allowed(c.slot)]
    best = best_changes(changes, priced, most=most, trials=trials)
    if best is None:
        return None
    by_program: dict[int, list[SlotChange]] = {}
    for change in best[0]:
        by_program.setdefault(change.slot.program, []).append(change)
    texts = tuple(_change_text(now.programs[k], changes) for k, changes in by_program.items())
    return Advice(best[0], texts, best[1], best[2])


def _change_text(program: Program, changes: Sequence[SlotChange]) -> str:
    """Describe changes by `--set` options (which cannot remove an address), or by layout."""
    if program.is_opaque:
        wanted = [f"{c.slot.side} {_name(program, c.slot)} in {c.layout.text()}" for c in changes]
        return f"{program.name} with {', '.join(wanted)}"
    sets, freed = [], []
    for change in changes:
        side, name = change.slot.side, _name(program, change.slot)
        have, want = _own_layout(program, change.slot), change.layout
        sets += [f"--set {option.text()}" for option in placement_between(side, name, have, want)]
        if have.address is not None and want.address is None:
            freed.append(f"{side}.{name}")
    parts = [f"with {' '.join(sets)}"] if sets else []
    parts += [f"without its placement option for {slot}.address" for slot in freed]
    return f"{program.name} {' and '.join(parts)}"


def _name(program: Program, slot: Slot) -> str | int:
    """Return the name of a slot in placement options; a name of digits would be an index."""
    name = (program.inputs if slot.side == "input" else program.outputs)[slot.index].name
    return slot.index if name.isdecimal() else name


def _own_layout(program: Program, slot: Slot) -> Layout:
    of = program.input_desc if slot.side == "input" else program.output_desc
    return of(slot.index).layout


def with_change(graph: ComputationGraph, change: SlotChange) -> ComputationGraph:
    """Replace the placement options of a slot by those of the change's layout."""
    slot, layout = change.slot, change.layout
    kind = (graph.input_type if slot.side == "input" else graph.output_type)(slot.index)
    plain = Layout(kind.data_type, layout.space)
    placement = (
        PlacementOption(slot.side, slot.index, "space", layout.space),
        *placement_between(slot.side, slot.index, plain, layout),
    )
    others = [
        option for option in graph.placement
        if (option.side, graph.slot_index(option)) != (slot.side, slot.index)
        or option.field not in LAYOUT_FIELDS
    ]  # fmt: skip
    return replace(graph, placement=tuple(others)).with_placement(*placement)
