"""What a training says: a bar while it runs, lines of JSON in a file, a table at the end.

Comes in: results of steps and epochs. Goes out: text. The bar is on standard error, and only where
that is a terminal. Must not know: how steps are done.
"""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from stitch.cli.train.training_loop import STEADY, StepResult
from stitch.errors import FormatError
from stitch.files import STANDARD_OUTPUT, LineFile, naming, read_text


class Bar:
    """A progress bar with loss, learning rate and steps per second; nothing without a terminal."""

    def __init__(self, progress: Progress | None, total: int, done: int) -> None:
        self._progress = progress
        self._metrics = ""
        if progress is not None:
            self._task = progress.add_task("training", total=total, completed=done, told="")

    def stepped(self, result: StepResult) -> None:
        """Move on by one step."""
        if self._progress is not None:
            speed = 1 / max(result.seconds, 1e-9)
            told = f"epoch {result.epoch}  loss {result.loss:.4f}  lr {result.rate:.2e}"
            told += f"  {speed:.0f} steps/s{self._metrics}"
            self._progress.update(self._task, completed=result.step, told=told)

    def measured(self, metrics: Mapping[str, float]) -> None:
        """Show metrics of the last epoch from now on."""
        self._metrics = f"  validation: {metrics_text(metrics)}" if metrics else ""

    def close(self) -> None:
        """Give the terminal back."""
        if self._progress is not None:
            self._progress.stop()


@contextmanager
def progress_bar(total: int, done: int) -> Iterator[Bar]:
    """A bar for `total` steps, of which some are done."""
    if not sys.stderr.isatty():
        yield Bar(None, total, done)
        return
    columns = (
        TextColumn("{task.description}"), BarColumn(None), MofNCompleteColumn(),
        TextColumn("{task.fields[told]}"), TimeRemainingColumn(),
    )  # fmt: skip
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        yield Bar(progress, total, done)


class ResultLines:
    """A file with one line of JSON for each step and epoch, and a last one; no file, no lines.

    Lines are written as they are made. `kept`: steps before a resume, whose lines stay.
    """

    def __init__(self, path: str | None, kept: int) -> None:
        self._file: LineFile | None = None
        #: The lines that stay, as they were written.
        self.earlier: list[dict[str, Any]] = []
        if path is None:
            return
        is_there = path != STANDARD_OUTPUT and Path(path).is_file()
        self.earlier = _lines_until(Path(path), kept) if kept and is_there else []
        self._file = LineFile(path, map(json.dumps, self.earlier))

    def add(self, kind: str, **facts: Any) -> None:
        """Write a line; raises `StitchError` where there is no room."""
        if self._file is not None:
            self._file.add(json.dumps({"kind": kind, **facts}))

    def close(self) -> None:
        """No more lines."""
        if self._file is not None:
            self._file.close()


def _lines_until(path: Path, step: int) -> list[dict[str, Any]]:
    """The lines of steps and epochs up to a step; a killed run may have left half a line."""
    kept = []
    with naming(path):
        text = read_text(path, errors="replace")
    for line in text.splitlines():
        try:
            facts = json.loads(line)
        except ValueError:
            continue
        if not isinstance(facts, dict) or type(facts.get("step")) is not int:
            raise FormatError(
                "these are not the results of a training", where=str(path),
                remedy="give --result_file another name, or remove this file",
            )  # fmt: skip
        if facts["step"] <= step and facts.get("kind") in ("step", "epoch"):
            kept.append(facts)
    return kept


def plans_text(plans: Sequence[tuple[int, int]], before: int) -> str:
    """How many plans were made in which steps, (step, plans); the run began after step `before`.

    >>> plans_text([(8, 2), (9, 1)], 7)
    '3, none after step 9'
    >>> plans_text([(8, 2), (19, 1)], 7)
    '3, none after step 19 (late: step 19)'
    """
    if not plans:
        return "none"
    total, last = sum(count for _, count in plans), plans[-1][0]
    late = [step for step, _ in plans if step > before + STEADY]
    told = f"{total}, none after step {last}"
    return told if not late else f"{told} (late: step {', '.join(map(str, late[:8]))})"


def table_text(rows: Sequence[tuple[str, str]]) -> str:
    """Two columns, aligned."""
    table = Table(show_header=False, box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(name, value)
    stream = io.StringIO()
    Console(file=stream, width=200, color_system=None, markup=False, highlight=False).print(table)
    return "\n".join(line.rstrip() for line in stream.getvalue().splitlines())


def metrics_text(metrics: Mapping[str, float]) -> str:
    """`accuracy 0.9750, loss 0.1203`."""
    return ", ".join(f"{name} {value:.4f}" for name, value in metrics.items())
