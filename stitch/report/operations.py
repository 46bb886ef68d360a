"""Results of each operation of a run: stored in a file, or compared with expected results.

Arrays are stored in the types that operations compute in, rounded to those of their values; memory
holds the results of one operation at a time. The reference computes each operation from the
operands of this run, so it finds the operation that is wrong, without accumulated differences; a
saved run shows the accumulated differences.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self
from urllib.parse import quote

import numpy as np

from stitch.argument_kinds import PATH, either, instance_of, optional, takes
from stitch.errors import FormatError, UsageError
from stitch.files import OutputFiles, write_added
from stitch.forms import NpzWriter, archived_arrays
from stitch.linker import expanded
from stitch.program import ABSENT, Array, DataType, Operation, Program, holds_foreign
from stitch.report.device import DEVICE
from stitch.report.temporary_output import TemporaryOutput
from stitch.runtime import HookContext, OperationReferences, RuntimeDevice

# Comparison of arrays.

#: |actual - expected| <= atol + rtol * |expected|, by the type that a result is stored in.
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
    """What the user asked for; None: the default. `pcc` alone replaces the elementwise rule."""

    atol: float | None = None
    rtol: float | None = None
    pcc: float | None = None


@dataclass(frozen=True, slots=True)
class ComparedResult:
    """What is compared: `stored` is the type that it is stored in, which decides how exact it can
    be."""

    name: str
    data_type: DataType
    stored: DataType


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a result is as expected; `detail` says how it is not."""

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
    """Compare a result. NaN equals NaN, an infinity itself; integers and bits are exact.

    `correlate`: find the correlation where it decides nothing as well.
    """
    name, is_floating = result.name, result.data_type.is_floating
    if actual.shape != expected.shape:
        got = f"its shape is {list(actual.shape)}, expected {list(expected.shape)}"
        return Verdict(name, False, got)
    expected_type = DataType.from_dtype(expected.dtype)
    if is_floating is not expected_type.is_floating:
        got = f"its type is {result.data_type.value}, expected {expected_type.value}"
        return Verdict(name, False, got)
    atol = how.atol
    if atol is None:
        atol = DEFAULT_ATOL.get(result.stored, 1e-4) if is_floating else 0.0
    rtol = how.rtol
    if rtol is None:
        rtol = default_rtol if is_floating else 0.0
    is_wanted = correlate or how.pcc is not None
    correlated = correlation(actual, expected) if is_wanted else None
    problems: list[str] = []
    if how.pcc is not None and correlated is not None and not correlated >= how.pcc:
        problems.append(f"PCC is {correlated:.6g}, at least {how.pcc:g} was asked for")
    elementwise = how.pcc is None or how.atol is not None or how.rtol is not None
    wrong, largest = differences(actual, expected, atol, rtol)
    if elementwise and wrong is not None:
        problems.append(f"{wrong} (allowed: {atol:g} + {rtol:g} * |expected|)")
    return Verdict(name, not problems, "; ".join(problems), largest, correlated, atol, rtol)


def differences(
    actual: Array, expected: Array, atol: float, rtol: float
) -> tuple[str | None, float]:
    """What differs in words (None: nothing does), and the largest finite difference."""
    if actual.size == 0:
        return None, 0.0
    with np.errstate(all="ignore"):
        one, two = _widened(actual), _widened(expected)
        same = (one == two) | ((one != one) & (two != two))
        # Without a width of its own, the difference of the extremes of int64 would wrap.
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
    # Where a difference is no number at all, that is the place to look.
    weight = np.where(bad, np.where(np.isfinite(gap), gap, np.inf), -1.0)
    at = np.unravel_index(int(weight.argmax()), actual.shape)
    place = f"[{', '.join(str(int(i)) for i in at)}]"
    share = f"{count} of {actual.size} elements differ"
    worst = float(gap[at])
    return (
        f"{share}; largest difference {worst:.6g} at {place}: "
        f"{_number(one[at])}, expected {_number(two[at])}"
    ), largest


def _number(value: object) -> str:
    return f"{value:.9g}" if isinstance(value, float) else str(value)


def _widened(array: Array) -> Array:
    """Floats as float64, the rest as they are: comparisons must not round."""
    return array.astype(np.float64) if DataType.from_dtype(array.dtype).is_floating else array


def correlation(actual: Array, expected: Array) -> float:
    """Pearson's correlation; 1 for equal arrays, 0 where it is not defined otherwise."""
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


# Observing operations.


@dataclass(frozen=True, slots=True, eq=False)
class SeenOperation:
    """An operation of a program in the `run`-th run of programs of that name, counted from 1."""

    program: Program
    run: int
    index: int
    operation: Operation
    inputs: tuple[Array | None, ...]
    outputs: tuple[Array, ...]

    @property
    def made(self) -> tuple[int, ...]:
        """The values of the outputs, in their order."""
        return tuple(value for value in self.operation.outputs if value != ABSENT)

    @property
    def name(self) -> str:
        """What the operation is called in messages."""
        where = f" at {self.operation.location}" if self.operation.location else ""
        return (
            f"operation {self.index} ({self.operation.op}){where} of program "
            f"{self.program.name!r}, run {self.run}"
        )


class OperationWatch(ABC):
    """Sees every operation from now on until `close`; use it as a context manager.

    While it watches, programs run one operation at a time, as with any hook. Raises `UsageError`
    for a device that computes nothing; and, in a run, for an executor that shows no operations.
    """

    def __init__(self, device: RuntimeDevice) -> None:
        if not device.computes:
            raise UsageError(
                "operations are seen where they are computed, and this device computes nothing",
                where=f"device {device.machine.name!r}, executor {device.executor!r}",
                remedy="choose an executor that computes; programs that are only planned, such as "
                "those of a .ttnn file, have no operations to be seen",
            )
        self._device = device
        self._runs: Counter[str] = Counter()
        self._seen = 0
        self._references: dict[int, tuple[Program, OperationReferences]] = {}
        self.close = device.hooks.register(
            before_program=self._on_program,
            after_program=self._on_end,
            before_operation=lambda context: self.before(self._operation(context)),
            after_operation=lambda context: self.after(self._operation(context)),
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @abstractmethod
    def before(self, seen: SeenOperation) -> None:
        """It is about to run."""

    @abstractmethod
    def after(self, seen: SeenOperation) -> None:
        """It has run."""

    def next_pass(self) -> None:
        """The same work comes once more: runs of programs are counted anew."""
        self._runs.clear()

    def references(self, program: Program) -> OperationReferences:
        """NumPy's kernels for the operations of a program."""
        known = self._references.get(id(program))
        if known is None:
            known = program, OperationReferences(program, self._device.machine.shape)
            # With the program, so that its id stays its own.
            self._references[id(program)] = known
        return known[1]

    def _on_program(self, context: HookContext) -> None:
        self._runs[context.program.name] += 1
        self._seen = 0

    def _on_end(self, context: HookContext) -> None:
        if not self._seen and expanded(context.program).operations:
            raise UsageError(
                "the executor runs programs as a whole, and shows none of their operations",
                where=f"program {context.program.name!r}, executor {self._device.executor!r}",
                remedy="choose one of Stitch's own executors",
            )

    def _operation(self, context: HookContext) -> SeenOperation:
        assert context.operation is not None
        assert context.index is not None
        self._seen += 1
        return SeenOperation(
            context.program, self._runs[context.program.name], context.index, context.operation,
            context.inputs, context.outputs,
        )  # fmt: skip


# Storing results.

#: Of a program's name in the names of arrays; its number tells it apart.
_NAME_LENGTH = 60


class _Names:
    """What arrays are called: programs are numbered by their names, in the order of first runs."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}

    def of(self, seen: SeenOperation, output: int) -> str:
        name = seen.program.name
        number = self._numbers.setdefault(name, len(self._numbers))
        program = f"{number}-{quote(name, safe='')[:_NAME_LENGTH]}"
        return f"{program}/{seen.run}/{seen.index}/{output}.{quote(seen.operation.op, safe='')}"


class OperationStore(OperationWatch):
    """Keeps what every operation makes, for the file at `path`, until `close`, which writes it.

    `next_pass` ends what is kept: a file holds one pass. Raises `UsageError` for a path that is not
    that of a `.npz` file, `StitchError` where the file cannot be begun.
    """

    @takes(device=DEVICE, path=PATH)
    def __init__(self, device: RuntimeDevice, path: str | Path) -> None:
        if Path(path).suffix.lower() != ".npz":
            raise UsageError("results of operations are written to a .npz file", got=str(path))
        self._path, self._names, self._is_over = path, _Names(), False
        #: Whether nothing has stopped it while it kept a result.
        self._is_whole = True
        super().__init__(device)
        self._unregister = self.close
        self.close = self._close
        try:
            self._output = TemporaryOutput(path)
        except BaseException:
            self._unregister()
            raise
        self._archive = NpzWriter(self._output.write)

    def before(self, seen: SeenOperation) -> None:
        """Nothing yet."""

    def after(self, seen: SeenOperation) -> None:
        """Keep what it made."""
        if self._is_over:
            return
        self._is_whole = False
        references = self.references(seen.program)
        for output, (value, array) in enumerate(zip(seen.made, seen.outputs, strict=True)):
            self._archive.add(self._names.of(seen, output), references.kept(value, array))
        self._is_whole = True

    def next_pass(self) -> None:
        """What comes now is not kept."""
        self._is_over = True

    def add_to(self, batch: OutputFiles) -> None:
        """Watch no more, and add the file to those that a batch is going to write; `forget` it when
        that has happened. Nothing is added where an interrupt or a full disk, which was raised, has
        left half of a result."""
        self._unregister()
        if not self._is_whole:
            return
        self._archive.close()
        batch.add(self._path, self._output.copy_to)

    def forget(self) -> None:
        """Watch no more, and write nothing; twice does no harm."""
        self._unregister()
        self._output.close()

    def _close(self) -> None:
        write_added(self.add_to, self.forget)


class SavedOperations:
    """A file of `OperationStore`; raises `FormatError` for any other."""

    def __init__(self, path: str | Path) -> None:
        self.path, self._names = str(path), _Names()
        arrays = archived_arrays(Path(path))
        self._arrays: Mapping[str | None, Array] = arrays
        self._met: set[str] = set()
        self._all = tuple(map(str, arrays))
        strange = [name for name in self._all if name.count("/") != 3 or "." not in name]
        if strange or not self._all:
            raise FormatError(
                "the file holds no results of operations", where=self.path,
                expected="what --save_operations or OperationStore wrote",
                got=repr(strange[0]) if strange else "no array",
            )  # fmt: skip

    def results(self, seen: SeenOperation) -> tuple[Array, ...]:
        """What the operation made in the run that was saved; raises `UsageError` if it did not
        run there."""
        names = [self._names.of(seen, output) for output in range(len(seen.outputs))]
        for name in names:
            if name not in self._arrays:
                raise UsageError(
                    "the saved run has no result of an operation that runs now",
                    where=f"{self.path}: {name!r}", got=seen.name,
                    remedy="save a run of the same programs, called as often",
                )  # fmt: skip
        self._met.update(names)
        return tuple(self._arrays[name] for name in names)

    def check_all_met(self) -> None:
        """Raise `UsageError` for an operation of the saved run that has not run since."""
        left = [name for name in self._all if name not in self._met]
        if left:
            raise UsageError(
                "the saved run has operations that did not run now",
                where=self.path, got=f"{len(left)}, the first of them {left[0]!r}",
                remedy="save a run of the same programs, called as often",
            )  # fmt: skip


# Comparison of all operations.

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
