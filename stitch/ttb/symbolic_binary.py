"""`SymbolicBinary`: a program before placement whose sizes are symbols, as a file holds it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from stitch.errors import IncompatibleError
from stitch.machine import MachineShape
from stitch.program import MathFidelity, OperationList, Role, SymbolicData, SymbolicSizes
from stitch.ttb.binary import CURRENT, OPSET, SegmentRow, Version

if TYPE_CHECKING:
    from stitch.graph import ComputationGraph

#: The schema's names of the relations of guards.
RELATION_NAMES: Mapping[str, str] = {
    "EQUAL": "==", "NOT_EQUAL": "!=", "LESS": "<", "LESS_OR_EQUAL": "<=",
}  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class SymbolicBinary:
    """What a `.ttb` file with named sizes holds: it is placed once they are numbers.

    `rows` are the segments of a file that was loaded; their checksums have been tested.
    """

    graph: ComputationGraph
    sizes: SymbolicSizes
    machine: MachineShape
    producer: str
    role: Role = Role.FORWARD
    math_fidelity: MathFidelity = MathFidelity.BY_TYPE
    opset: int = OPSET
    version: Version = CURRENT
    rows: tuple[SegmentRow, ...] = ()
    #: False in files of earlier writers, on whose graphs the passes have run; they may run again.
    needs_passes: bool = True

    def __repr__(self) -> str:
        names = ", ".join(self.sizes.dims)
        return (
            f"<SymbolicBinary {self.version} for {self.machine.name}: {self.graph.name} ({names})>"
        )

    @property
    def requires(self) -> tuple[str, ...]:
        """The features that a reader must know; `symbolic_sizes` includes those before it."""
        is_numbered = any(value.is_numbered for value in self.graph.values)
        return (*(["numbered_values"] if is_numbered else []), "symbolic_sizes")

    def stored_constants(self) -> OperationList:
        """Return the constants that have segments, with the values."""
        kept = [c for c in self.graph.constants if not isinstance(c.data, SymbolicData)]
        return OperationList(self.graph.name, (), (), self.graph.values, (), tuple(kept))

    def needs_sizes(self, where: str) -> IncompatibleError:
        """Return the error for a use that takes placed programs only."""
        chosen = [f"{name}={self.sizes.hints[name]}" for name in self.sizes.dims]
        return IncompatibleError(
            f"program {self.graph.name!r} has named sizes: it is placed once they are numbers",
            where=where,
            expected="a file without named sizes",
            got=", ".join(f"{d.name}: {d.least} to {d.most}" for d in self.sizes.dims.values()),
            remedy=f"choose them: stitch.load(path).at({', '.join(chosen)}) is a model to load or "
            f"to save; stitch-run --at={','.join(chosen)} runs the file; stitch-compile without "
            "named sizes writes one for all commands",
        )
