"""What a caller may ask of the compiler, and what it gives back."""

from __future__ import annotations

from dataclasses import dataclass

from stitch.compiler.loops import LoopNote, check_executor, check_schedule
from stitch.graph import PlacementOption
from stitch.program import MathFidelity, Program, Role


@dataclass(frozen=True, slots=True)
class CompileOptions:
    """Choices of one compilation; the defaults suit a forward program.

    `placement` replace the graph's own placement options on the same field of the same slot. `name`
    renames the program. `fold_growth_nbytes` bounds by how much folding may make the constants grow
    in total. `alias_donated` lets outputs take the buffers of donated inputs wherever that is
    proved, also where no placement option asks for it. Without `optimize` the operations stay as
    they are written. `reassociate`: matrices are read as they lie and not transposed first, so sums
    may run in another order, and results agree to rounding only. `schedule`: how loops run wherever
    they can (`stitch.compiler.loops`), in place of what costs least. `executor`: by whose rates
    that is weighed (default: that of devices, `numpy`); any executor runs the program.
    `math_fidelity`: of its sums of products on a device; executors compute as before. Raises
    `UsageError` for an executor or a schedule that there is not.
    """

    placement: tuple[PlacementOption, ...] = ()
    name: str | None = None
    role: Role = Role.FORWARD
    fold_growth_nbytes: int = 1 << 20
    alias_donated: bool = True
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
    """Something legal that the caller probably did not want: a kind, the place, the facts."""

    kind: str
    where: str
    detail: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.where}: {self.detail} [{self.kind}]; try: {self.remedy}"


@dataclass(frozen=True, slots=True)
class Compilation:
    """A compiled program, the warnings that came up on the way, and how its loops run."""

    program: Program
    warnings: tuple[CompileWarning, ...] = ()
    loops: tuple[LoopNote, ...] = ()
