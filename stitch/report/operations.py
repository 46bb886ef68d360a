"""Compare results: of a run with expected arrays, of each operation with NumPy's kernels.

NumPy computes each operation from the operands of the same run, which finds the wrong operation;
its results are rounded to the types of the values. Memory holds those of one operation at a time.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import Self

import numpy as np

from stitch.argument_kinds import instance_of, optional, takes
from stitch.errors import UsageError
from stitch.linker import expanded
from stitch.program import ABSENT, Array, DataType, Program, holds_foreign
from stitch.report.device import DEVICE
from stitch.runtime import HookContext, OperationReferences, RuntimeDevice

# Comparison of arrays.

#: |actual - expected| <= atol + rtol * |expected|, by the storage type of a result.
DEFAULT_ATOL = {
    DataType.FLOAT64: 1e-4,
    DataType.FLOAT32: 1e-4,
    DataType.FLOAT16: 1e-3,
    DataType.BFLOAT16: 1e-2,
    DataType.BFP8: 5e-2,
    DataType.BFP4: 5e-1,
}
DEFAULT_RTOL = 1e-5


@dataclass(frozen=True, slots=True)
class Tolerances:
    """Tolerances; None is the default. `pcc` alone replaces the elementwise comparison."""

    atol: float | None = None
    rtol: float | None = None
    pcc: float | None = None


@dataclass(frozen=True, slots=True)
class ComparedResult:
    """A result; `stored`, its type in device memory, decides the default tolerance."""

    name: str
    data_type: DataType
    stored: DataType


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a result is as expected; `detail` describes the difference."""

    name: str
    passed: bool
    detail: str
    max_abs_difference: float | None = None
    pcc: float | None = None
    atol: float | None = None
    rtol: float | None = None


def compare(
    result: ComparedResult, actual: Array, expected: Array, how: Tolerances, *,
    default_rtol: float = DEFAULT_RTOL, correlate: bool = False,
) -> Verdict:  # fmt: skip
    """Compare a result. NaN equals NaN; integers and bits are exact.

    Args:
        result: Its name and types.
        actual: The result.
        expected: The expected array.
        how: The tolerances.
        default_rtol: Of floats without a tolerance.
        correlate: Compute the correlation also without a `pcc`.
    """
    name, is_floating = result.name, result.data_type.is_floating
    if actual.shape != expected.shape:
        detail = f"its shape is {list(actual.shape)}, expected {list(expected.shape)}"
        return Verdict(name, False, detail)
    expected_type = DataType.from_dtype(expected.dtype)
    if is_floating is not expected_type.is_floating:
        detail = f"its type is {result.data_type.value}, expected {expected_type.value}"
        return Verdict(name, False, detail)
    atol = how.atol
    if atol is None:
        atol = DEFAULT_ATOL.get(result.stored, 1e-4) if is_floating else 0.0
    rtol = how.rtol
    if rtol is None:
        rtol = default_rtol if is_floating else 0.0
    pcc = correlation(actual, expected) if correlate or how.pcc is not None else None
    problems: list[str] = []
    if how.pcc is not None and pcc is not None and not pcc >= how.pcc:
        problems.append(f"PCC is {pcc:.6g}, expected at least {how.pcc:g}")
    elementwise = how.pcc is None or how.atol is not None or how.rtol is not None
    wrong, largest = differences(actual, expected, atol, rtol)
    if elementwise and wrong is not None:
        problems.append(f"{wrong} (allowed: {atol:g} + {rtol:g} * |expected|)")
    return Verdict(name, not problems, "; ".join(problems), largest, pcc, atol, rtol)


def differences(
    actual: Array, expected: Array, atol: float, rtol: float
) -> tuple[str | None, float]:
    """Describe the differences beyond the tolerances (or None); return the largest finite one."""
    if actual.size == 0:
        return None, 0.0
    with np.errstate(all="ignore"):
        one, two = _widened(actual), _widened(expected)
        same = (one == two) | ((one != one) & (two != two))
        # float64: the difference of int64 extremes would overflow.
        gap = np.where(same, 0.0, np.abs(one.astype(np.float64) - two.astype(np.float64)))
        near = gap <= atol + rtol * np.abs(two.astype(np.float64))
        if atol == 0 and rtol == 0:
            near = same
        bad = ~(same | (near & np.isfinite(gap)))
    finite = gap[np.isfinite(gap)]
    largest = float(finite.max()) if finite.size else 0.0
    count = int(bad.sum())
    if not count:
        return None, largest
    # NaN and infinite differences come first.
    weight = np.where(bad, np.where(np.isfinite(gap), gap, np.inf), -1.0)
    at = np.unravel_index(int(weight.argmax()), actual.shape)
    index = f"[{', '.join(str(int(i)) for i in at)}]"
    return (
        f"{count} of {actual.size} elements differ; largest difference {float(gap[at]):.6g} at "
        f"{index}: {_number(one[at])}, expected {_number(two[at])}"
    ), largest


def _number(value: object) -> str:
    return f"{value:.9g}" if isinstance(value, float) else str(value)


def _widened(array: Array) -> Array:
    """Convert floats to float64, so that comparisons do not round."""
    return array.astype(np.float64) if DataType.from_dtype(array.dtype).is_floating else array


def correlation(actual: Array, expected: Array) -> float:
    """Return Pearson's correlation; 1 for equal arrays, 0 if it is undefined otherwise."""
    one, two = (a.astype(np.float64).reshape(-1) for a in (actual, expected))
    if np.array_equal(one, two, equal_nan=True):
        return 1.0
    if not (np.isfinite(one) == np.isfinite(two)).all():
        return 0.0
    keep = np.isfinite(one)
    one, two = one[keep], two[keep]
    if one.size < 2:
        return 0.0
    one, two = one - one.mean(), two - two.mean()
    norm = float(np.sqrt((one * one).sum() * (two * two).sum()))
    return float((one * two).sum()) / norm if norm else 0.0


# Comparison of operations.

#: Relative distance of neighbouring numbers: nearly equal results may round to neighbours.
ROUNDING_STEP = {
    DataType.FLOAT16: 2.0**-10,
    DataType.BFLOAT16: 2.0**-7,
    DataType.BFP8: 2.0**-6,
    DataType.BFP4: 2.0**-2,
}


@dataclass(frozen=True, slots=True)
class OperationLine:
    """One output of an operation in all runs so far.

    `verdict`, of the program's `run`-th run (from 1), is the first failure, or the largest
    difference.
    """

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
        """Describe the result and its difference."""
        at = f" at {self.location}" if self.location else ""
        of = f"program {self.program!r}, operation {self.index} ({self.op}){at}"
        name, detail, pcc = self.verdict.name, self.verdict.detail, self.verdict.pcc
        text = f"{of}, output {self.output} ({name!r}), run {self.run}: {detail}"
        return text if pcc is None else f"{text}; PCC {pcc:.6g}"


class OperationComparison:
    """Compares every operation's results with NumPy's kernels until `close`; a context manager.

    Programs run one operation at a time, as with any hook.

    Args:
        device: The device.
        how: The tolerances, by default by the storage type of a value, with one step of rounding
            more for types narrower than float32.

    Raises:
        UsageError: The device computes nothing; during a run: its executor has no hooks of
            operations.
    """

    @takes(device=DEVICE, how=optional(instance_of("tolerances", Tolerances)))
    def __init__(self, device: RuntimeDevice, how: Tolerances | None = None) -> None:
        if not device.computes:
            raise UsageError(
                "this device computes no operations that could be observed",
                where=f"device {device.machine.name!r}, executor {device.executor!r}",
                remedy="choose another executor; opaque programs, as of .ttnn files, have no "
                "operations",
            )
        self._device = device
        self._how = how or Tolerances()
        self._runs: Counter[str] = Counter()
        self._has_operations = False
        self._references: dict[int, tuple[Program, OperationReferences]] = {}
        self._wanted: tuple[Array, ...] = ()
        self._lines: dict[tuple[str, int, int], OperationLine] = {}
        #: The first result that differed.
        self.first: OperationLine | None = None
        self.close = device.hooks.register(
            before_program=self._begin,
            after_program=self._end,
            before_operation=self._before,
            after_operation=self._after,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def lines(self) -> tuple[OperationLine, ...]:
        """Return a line for each output of each operation, in the order of first runs."""
        return tuple(self._lines.values())

    def _begin(self, context: HookContext) -> None:
        self._runs[context.program.name] += 1
        self._has_operations = False

    def _end(self, context: HookContext) -> None:
        if not self._has_operations and expanded(context.program).operations:
            raise UsageError(
                "the executor runs whole programs, without hooks of operations",
                where=f"program {context.program.name!r}, executor {self._device.executor!r}",
                remedy="choose one of Stitch's own executors",
            )

    def _of(self, program: Program) -> OperationReferences:
        entry = self._references.get(id(program))
        if entry is None:
            entry = program, OperationReferences(program, self._device.machine.shape)
            # The entry holds the program, so its id is not reused.
            self._references[id(program)] = entry
        return entry[1]

    def _before(self, context: HookContext) -> None:
        """Compute the expected results first, because the operation may overwrite its operands."""
        assert context.operation is not None and context.index is not None
        self._has_operations = True
        self._wanted = ()  # Foreign operators have no reference.
        if not holds_foreign(context.operation, expanded(context.program).bodies):
            self._wanted = self._of(context.program).results(context.index, context.inputs)

    def _after(self, context: HookContext) -> None:
        """Compare the results."""
        assert context.operation is not None
        wanted, self._wanted = self._wanted, ()
        if not wanted:
            return
        results = [value for value in context.operation.outputs if value != ABSENT]
        for output, value in enumerate(results):
            described = expanded(context.program).values[value]
            stored = described.desc.layout.data_type
            verdict = compare(
                ComparedResult(described.name, described.type.data_type, stored),
                self._of(context.program).kept(value, context.outputs[output]),
                wanted[output], self._how,
                default_rtol=max(
                    DEFAULT_RTOL,
                    *(ROUNDING_STEP.get(kind, 0.0) for kind in (stored, described.type.data_type)),
                ),
                correlate=True,
            )  # fmt: skip
            self._add(context, output, verdict)

    def _add(self, context: HookContext, output: int, verdict: Verdict) -> None:
        operation, name = context.operation, context.program.name
        assert operation is not None and context.index is not None
        key = name, context.index, output
        new = OperationLine(
            name, context.index, operation.op, operation.location, output, 1, self._runs[name],
            verdict,
        )  # fmt: skip
        old = self._lines.get(key)
        if old is None:
            self._lines[key] = new
        else:
            is_worse = old.verdict.passed and (
                not verdict.passed or _gap(verdict) > _gap(old.verdict)
            )
            self._lines[key] = replace(new if is_worse else old, runs=old.runs + 1)
        if self.first is None and not verdict.passed:
            self.first = new


def _gap(verdict: Verdict) -> float:
    return verdict.max_abs_difference or 0.0
