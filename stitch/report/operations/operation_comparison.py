"""Every operation's results beside what they should be: which differ first, and a line for each.

The reference computes each operation from the operands that this run gave it, so it finds the
operation that is wrong, not what has added up before; a saved run finds what has added up. Memory
holds the results of one operation at a time.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from stitch.argument_kinds import PATH, either, instance_of, optional, takes
from stitch.linker import expanded
from stitch.program import Array, DataType, holds_foreign
from stitch.report.operations.array_comparison import (
    DEFAULT_RTOL,
    ComparedResult,
    Tolerances,
    Verdict,
    compare,
)
from stitch.report.operations.operation_watch import OperationWatch, SeenOperation
from stitch.report.operations.saved_operations import SavedOperations
from stitch.report.reported_device import DEVICE
from stitch.runtime import RuntimeDevice

#: What results are compared with where they are computed again, by NumPy's kernels.
REFERENCE = "reference"
#: Two results that are near each other may be rounded to neighbours: how far these lie apart.
ROUNDING_STEP = {
    DataType.FLOAT16: 2.0**-10,
    DataType.BFLOAT16: 2.0**-7,
    DataType.BFP8: 2.0**-6,
    DataType.BFP4: 2.0**-2,
}


@dataclass(frozen=True, slots=True)
class OperationLine:
    """One output of an operation, in all runs so far: the worst of its verdicts (the first that
    failed, else the one of the largest difference), and the run that it is of."""

    program: str
    index: int
    op: str
    location: str
    output: int
    runs: int
    run: int
    verdict: Verdict

    @property
    def text(self) -> str:
        """Which result it is, and how it differs."""
        at = f" at {self.location}" if self.location else ""
        of = f"program {self.program!r}, operation {self.index} ({self.op}){at}"
        known = self.verdict
        told = f"{of}, output {self.output} ({known.name!r}), run {self.run}: {known.detail}"
        return told if known.pcc is None else f"{told}; PCC {known.pcc:.6g}"


class OperationComparison(OperationWatch):
    """Compares every operation's results with `expected` until `close`.

    `expected`: `REFERENCE`, or a saved run. Without tolerances those of results hold, by the type
    that a value is stored in; for types narrower than float32 a step of rounding more.
    """

    @takes(
        device=DEVICE, how=optional(instance_of("tolerances", Tolerances)),
        expected=either(PATH, instance_of("a saved run", SavedOperations)),
    )  # fmt: skip
    def __init__(
        self, device: RuntimeDevice, expected: str | Path | SavedOperations = REFERENCE,
        how: Tolerances | None = None,
    ) -> None:  # fmt: skip
        """`expected` is also the path of a file. Raises `UsageError`, `FormatError`."""
        self._saved = (
            expected
            if expected == REFERENCE or isinstance(expected, SavedOperations)
            else SavedOperations(expected)
        )
        self._how = how or Tolerances()
        self._wanted: tuple[Array, ...] = ()
        self._lines: dict[tuple[str, int, int], OperationLine] = {}
        #: The first result that differed.
        self.first: OperationLine | None = None
        super().__init__(device)

    @property
    def lines(self) -> tuple[OperationLine, ...]:
        """A line for each output of each operation, in the order of first runs."""
        return tuple(self._lines.values())

    def check_complete(self) -> None:
        """Raise `UsageError` where the saved run has operations that have not run."""
        if isinstance(self._saved, SavedOperations):
            self._saved.check_all_met()

    def before(self, seen: SeenOperation) -> None:
        """What it should make; now, as it may write over its operands."""
        if isinstance(self._saved, SavedOperations):
            self._wanted = self._saved.results(seen)
        elif holds_foreign(seen.operation, expanded(seen.program).bodies):
            self._wanted = ()  # It has no reference.
        else:
            self._wanted = self.references(seen.program).results(seen.index, seen.inputs)

    def after(self, seen: SeenOperation) -> None:
        """Compare what it made."""
        wanted, self._wanted = self._wanted, ()
        if not wanted:
            return
        references = self.references(seen.program)
        for output, value in enumerate(seen.made):
            described = expanded(seen.program).values[value]
            stored = described.desc.layout.data_type
            verdict = compare(
                ComparedResult(described.name, described.type.data_type, stored),
                references.kept(value, seen.outputs[output]), wanted[output], self._how,
                default_rtol=max(
                    DEFAULT_RTOL,
                    *(ROUNDING_STEP.get(kind, 0.0) for kind in (stored, described.type.data_type)),
                ),
                correlate=True,
            )  # fmt: skip
            self._add(seen, output, verdict)

    def _add(self, seen: SeenOperation, output: int, verdict: Verdict) -> None:
        key = seen.program.name, seen.index, output
        operation = seen.operation
        new = OperationLine(
            seen.program.name, seen.index, operation.op, operation.location, output, 1, seen.run,
            verdict,
        )  # fmt: skip
        known = self._lines.get(key)
        if known is None:
            self._lines[key] = new
        else:
            worse = known.verdict.passed and (
                not verdict.passed or _gap(verdict) > _gap(known.verdict)
            )
            self._lines[key] = replace(new if worse else known, runs=known.runs + 1)
        if self.first is None and not verdict.passed:
            self.first = new


def _gap(verdict: Verdict) -> float:
    return verdict.max_abs_difference or 0.0
