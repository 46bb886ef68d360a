"""Results of each operation of a run: stored in a file, or compared with expected results.

Arrays have the types in which operations compute, rounded to those of their values; memory holds
the results of one operation at a time. The reference computes each operation from the operands of
this run, which finds the wrong operation; a saved run shows accumulated differences.
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
from stitch.files import OutputFiles
from stitch.forms import NpzWriter, archived_arrays
from stitch.linker import expanded
from stitch.program import ABSENT, Array, DataType, Operation, Program, holds_foreign
from stitch.report.device import DEVICE
from stitch.report.temporary_output import TemporaryOutput, write_and_close
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


# Observing operations.


@dataclass(frozen=True, slots=True, eq=False)
class SeenOperation:
    """An operation in the `run`-th run (from 1) of programs of that name."""

    program: Program
    run: int
    index: int
    operation: Operation
    inputs: tuple[Array | None, ...]
    outputs: tuple[Array, ...]

    @property
    def results(self) -> tuple[int, ...]:
        """Return the indices of the output values, in order."""
        return tuple(value for value in self.operation.outputs if value != ABSENT)

    @property
    def name(self) -> str:
        """Return a description for errors."""
        where = f" at {self.operation.location}" if self.operation.location else ""
        return (
            f"operation {self.index} ({self.operation.op}){where} of program "
            f"{self.program.name!r}, run {self.run}"
        )


class OperationWatch(ABC):
    """Observes every operation until `close`; a context manager.

    Programs run one operation at a time, as with any hook. Raises `UsageError` for a device that
    computes nothing, and during a run for an executor without hooks of operations.
    """

    def __init__(self, device: RuntimeDevice) -> None:
        if not device.computes:
            raise UsageError(
                "this device computes no operations that could be observed",
                where=f"device {device.machine.name!r}, executor {device.executor!r}",
                remedy="choose another executor; opaque programs, as of .ttnn files, have no "
                "operations",
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
        """Called before an operation runs."""

    @abstractmethod
    def after(self, seen: SeenOperation) -> None:
        """Called after an operation has run."""

    def next_pass(self) -> None:
        """Restart the count of runs, for another pass of the same work."""
        self._runs.clear()

    def references(self, program: Program) -> OperationReferences:
        """Return NumPy's kernels for the operations of a program."""
        entry = self._references.get(id(program))
        if entry is None:
            entry = program, OperationReferences(program, self._device.machine.shape)
            # The entry holds the program, so its id is not reused.
            self._references[id(program)] = entry
        return entry[1]

    def _on_program(self, context: HookContext) -> None:
        self._runs[context.program.name] += 1
        self._seen = 0

    def _on_end(self, context: HookContext) -> None:
        if not self._seen and expanded(context.program).operations:
            raise UsageError(
                "the executor runs whole programs, without hooks of operations",
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

#: Characters of a program's name in the names of arrays.
_NAME_LENGTH = 60


class _Names:
    """The names of stored arrays; programs are numbered in the order of their first runs."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}

    def of(self, seen: SeenOperation, output: int) -> str:
        name = seen.program.name
        number = self._numbers.setdefault(name, len(self._numbers))
        program = f"{number}-{quote(name, safe='')[:_NAME_LENGTH]}"
        return f"{program}/{seen.run}/{seen.index}/{output}.{quote(seen.operation.op, safe='')}"


class OperationStore(OperationWatch):
    """Stores the results of every operation of one pass; `close` writes the `.npz` file.

    `next_pass` ends the pass. Raises `UsageError` for a path of another type, `StitchError` if its
    folder is not writable.
    """

    @takes(device=DEVICE, path=PATH)
    def __init__(self, device: RuntimeDevice, path: str | Path) -> None:
        if Path(path).suffix.lower() != ".npz":
            raise UsageError(
                "results of operations need a .npz file", expected="FILE.npz", got=str(path)
            )
        self._path, self._names, self._is_over = path, _Names(), False
        #: Whether no exception has interrupted the storing of a result.
        self._is_complete = True
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
        """Do nothing."""

    def after(self, seen: SeenOperation) -> None:
        """Store the results."""
        if self._is_over:
            return
        self._is_complete = False
        references = self.references(seen.program)
        for output, (value, array) in enumerate(zip(seen.results, seen.outputs, strict=True)):
            self._archive.add(self._names.of(seen, output), references.kept(value, array))
        self._is_complete = True

    def next_pass(self) -> None:
        """Store nothing from now on."""
        self._is_over = True

    def add_to(self, files: OutputFiles) -> None:
        """Stop and add the file to `files`, unless a result is incomplete after an exception.

        Call `forget` after they are written.
        """
        self._unregister()
        if not self._is_complete:
            return
        self._archive.close()
        files[self._path] = self._output.copy_to

    def forget(self) -> None:
        """Stop without writing; may be called twice."""
        self._unregister()
        self._output.close()

    def _close(self) -> None:
        write_and_close(self.add_to, self.forget)


class SavedOperations:
    """A file of `OperationStore`; raises `FormatError` for any other."""

    def __init__(self, path: str | Path) -> None:
        self.path, self._names = str(path), _Names()
        arrays = archived_arrays(Path(path))
        self._arrays: Mapping[str | None, Array] = arrays
        self._read: set[str] = set()
        self._all = tuple(map(str, arrays))
        foreign = [name for name in self._all if name.count("/") != 3 or "." not in name]
        if foreign or not self._all:
            raise FormatError(
                "the file has no results of operations", where=self.path,
                expected="a file of --save_operations or OperationStore",
                got=repr(foreign[0]) if foreign else "no array",
            )  # fmt: skip

    def results(self, seen: SeenOperation) -> tuple[Array, ...]:
        """Return the results of an operation in the saved run; raise `UsageError` without any."""
        names = [self._names.of(seen, output) for output in range(len(seen.outputs))]
        for name in names:
            if name not in self._arrays:
                raise UsageError(
                    "the saved run has no result of this operation",
                    where=f"{self.path}: {name!r}", got=seen.name,
                    remedy="save a run of the same programs with the same number of calls",
                )  # fmt: skip
        self._read.update(names)
        return tuple(self._arrays[name] for name in names)

    def check_all_read(self) -> None:
        """Raise `UsageError` for operations of the saved run that have not run."""
        missing = [name for name in self._all if name not in self._read]
        if missing:
            raise UsageError(
                "the saved run has operations that did not run now",
                where=self.path, got=f"{len(missing)}, the first of them {missing[0]!r}",
                remedy="save a run of the same programs with the same number of calls",
            )  # fmt: skip


# Comparison of all operations.

#: Compare with NumPy's kernels on the same operands.
REFERENCE = "reference"
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

    `verdict`, of run `run`, is the first failure, or the largest difference.
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


class OperationComparison(OperationWatch):
    """Compares every operation's results until `close`.

    Args:
        device: The device.
        expected: `REFERENCE`, a saved run, or the path of its file.
        how: The tolerances, by default by the storage type of a value, with one step of rounding
            more for types narrower than float32.
    """

    @takes(
        device=DEVICE, how=optional(instance_of("tolerances", Tolerances)),
        expected=either(PATH, instance_of("a saved run", SavedOperations)),
    )  # fmt: skip
    def __init__(
        self, device: RuntimeDevice, expected: str | Path | SavedOperations = REFERENCE,
        how: Tolerances | None = None,
    ) -> None:  # fmt: skip
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
        """Return a line for each output of each operation, in the order of first runs."""
        return tuple(self._lines.values())

    def check_complete(self) -> None:
        """Raise `UsageError` if the saved run has operations that have not run."""
        if isinstance(self._saved, SavedOperations):
            self._saved.check_all_read()

    def before(self, seen: SeenOperation) -> None:
        """Compute the expected results first, because the operation may overwrite its operands."""
        if isinstance(self._saved, SavedOperations):
            self._wanted = self._saved.results(seen)
        elif holds_foreign(seen.operation, expanded(seen.program).bodies):
            self._wanted = ()  # Foreign operators have no reference.
        else:
            self._wanted = self.references(seen.program).results(seen.index, seen.inputs)

    def after(self, seen: SeenOperation) -> None:
        """Compare the results."""
        wanted, self._wanted = self._wanted, ()
        if not wanted:
            return
        references = self.references(seen.program)
        for output, value in enumerate(seen.results):
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
