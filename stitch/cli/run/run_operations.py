"""What is asked of each operation of a run: `--expected_operations`, `--save_operations`.

Comes in: words, a device. Goes out: a table and a verdict, a file in a batch. Must not know: how
operations are watched, or arrays compared.
"""

from __future__ import annotations

import argparse
import io
from collections.abc import Sequence
from contextlib import ExitStack

from rich.console import Console
from rich.table import Table

from stitch.api import Device
from stitch.files import OutputFiles
from stitch.report import (
    OperationComparison,
    OperationLine,
    OperationStore,
    Tolerances,
    counted,
)

WORDS = ("expected_operations", "save_operations")
_COLUMNS = (
    ("program", "left"), ("operation", "left"), ("output", "left"), ("runs", "right"),
    ("PCC", "right"), ("difference", "right"), ("atol", "right"), ("rtol", "right"),
    ("", "left"), ("at", "left"),
)  # fmt: skip


class OperationsAsked:
    """What watches the operations of a run, if anything does."""

    def __init__(self) -> None:
        self.comparison: OperationComparison | None = None
        self._store: OperationStore | None = None

    def begin(self, words: argparse.Namespace, device: Device, stack: ExitStack) -> None:
        """Watch from now on, until the stack ends. Raises `UsageError`, `FormatError`."""
        if words.expected_operations is not None:
            how = Tolerances(words.atol, words.rtol, words.pcc)
            self.comparison = OperationComparison(device, words.expected_operations, how)
            stack.callback(self.comparison.close)
        if words.save_operations is not None:
            self._store = OperationStore(device, words.save_operations)
            stack.callback(self._store.forget)

    def next_pass(self) -> None:
        """A pass is over."""
        for watch in (self.comparison, self._store):
            if watch is not None:
                watch.next_pass()

    def add_to(self, batch: OutputFiles) -> None:
        """What is to be saved goes into the batch."""
        if self._store is not None:
            self._store.add_to(batch)

    @property
    def differ(self) -> bool:
        """Whether any result is not as expected."""
        return self.comparison is not None and self.comparison.first is not None

    def lines(self) -> list[str]:
        """A table, and the verdict; raises `UsageError` where expected operations did not run."""
        if self.comparison is None:
            return []
        self.comparison.check_complete()
        lines = self.comparison.lines
        if self.comparison.first is None:
            verdict = f"[SUCCESS] {counted(len(lines), 'result')} of operations as expected"
        else:
            many = counted(sum(not line.verdict.passed for line in lines), "result")
            first = self.comparison.first.text
            verdict = f"[FAILED] {many} of operations not as expected; the first: {first}"
        return [_table(lines), verdict]


def _table(lines: Sequence[OperationLine]) -> str:
    """A row for each result of each operation: how near it is to what it should be."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name, side in _COLUMNS:
        table.add_column(name, justify="right" if side == "right" else "left", overflow="fold")
    for line in lines:
        verdict = line.verdict
        figures = (verdict.pcc, verdict.max_abs_difference, verdict.atol, verdict.rtol)
        table.add_row(
            line.program, f"{line.index} {line.op}", f"{line.output} {verdict.name}",
            str(line.runs), *("-" if f is None else f"{f:.6g}" for f in figures),
            "ok" if verdict.passed else "FAILED", line.location,
        )  # fmt: skip
    stream = io.StringIO()
    Console(file=stream, width=240, color_system=None, markup=False, highlight=False).print(table)
    return "\n".join(line.rstrip() for line in stream.getvalue().splitlines())
