"""Options and results of a compilation."""

from __future__ import annotations

from dataclasses import dataclass

from stitch.compiler.loops import LoopNote, check_executor, check_schedule
from stitch.graph import PlacementOption
from stitch.program import MathFidelity, Program, Role


@dataclass(frozen=True, slots=True)
class CompileOptions:
    """Options of one compilation.

    Attributes:
        placement: Added to the graph's placement options; replaces them on the same slot and field.
        name: Name of the program; the graph's by default.
        role: What the program is for (forward, backward, ...).
        optimize: Run the passes; otherwise operations stay as they are written.
        reassociate: Absorb transposes into matrix products. Sums may run in another order, so
            results agree up to rounding.
        schedule: Schedule for all loops to which it applies; the cheapest by default.
        executor: Executor whose rates are used to choose schedules (default `numpy`).
        math_fidelity: Fidelity of matrix products on a device; executors compute as before.

    Raises:
        UsageError: Unknown executor or schedule.
    """

    placement: tuple[PlacementOption, ...] = ()
    name: str | None = None
    role: Role = Role.FORWARD
    optimize: bool = True
    reassociate: bool = False
    schedule: str | None = None
    executor: str | None = None
    math_fidelity: MathFidelity = MathFidelity.BY_TYPE

    def __post_init__(self) -> None:
        check_schedule(self.schedule)
        check_executor(self.executor)


@dataclass(frozen=True, slots=True)
class CompileWarning:
    """A legal but probably unintended property of the graph, its location and a remedy."""

    kind: str
    where: str
    detail: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.where}: {self.detail} [{self.kind}]; try: {self.remedy}"


@dataclass(frozen=True, slots=True)
class Compilation:
    """A compiled program, its warnings, and the schedules of its loops."""

    program: Program
    warnings: tuple[CompileWarning, ...] = ()
    loops: tuple[LoopNote, ...] = ()
