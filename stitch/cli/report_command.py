"""`stitch report`: write the page of a recorded run, or of two with their difference.

The record is replayed first, so a file that was changed after the run is refused, and the error
names the event or the step.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict
from shlex import join
from typing import TYPE_CHECKING

from stitch.cli.command import EXIT_OK, Command, say_result, say_written
from stitch.cli.parser import make_parser
from stitch.errors import UsageError

if TYPE_CHECKING:
    from stitch.report import RunCopies, RunRecord

EXAMPLES = """\
  stitch run a.ttb b.ttb --init=ones --record=run.json
  stitch report run.json -o run.html
  stitch report new.json old.json -o change.html"""


def command() -> Command:
    """Return `stitch report` with its options."""
    parser = make_parser(
        "Write a page about a recorded run: memory map, links, copies with their reasons.", EXAMPLES
    )
    parser.add_argument(
        "files", nargs="*", metavar="FILE",
        help="a record of `stitch run --record=FILE`; then, to compare, that of an older run",
    )  # fmt: skip
    parser.add_argument("-o", "--output", metavar="FILE.html", help="the page, - for stdout")
    return Command(parser.read, _report)


def _report(options: argparse.Namespace) -> int:
    from stitch.cli.module_files import read_document
    from stitch.cli.output_checks import PAGE, OutputChecks
    from stitch.files import write_files
    from stitch.report import PageExtras, difference, page_text

    if not 1 <= len(options.files) <= 2:
        raise UsageError(
            "a page is of one record, or of two",
            got=", ".join(options.files) or "no file",
            remedy="stitch report run.json -o run.html",
        )
    if options.output is None:
        raise UsageError("there is no file to write", expected="-o FILE.html",
                         remedy=f"stitch report {join(options.files)} -o run.html")  # fmt: skip
    checks = OutputChecks()
    checks.reads(options.files)
    checks.add(options.output, PAGE, "-o")
    read = [(path, *read_document(path, _checked)) for path in options.files]
    change = difference(read[1][2], read[0][2]) if len(read) == 2 else None
    # Two paths may be one.
    records = {f"{path} ({'older' if at else 'new'})" if change else path: record
               for at, (path, record, _) in enumerate(read)}  # fmt: skip
    extras = PageExtras(_explained(read[0][2]), difference=change)
    title = f"Stitch report: {' and '.join(options.files)}"
    say_written(write_files({options.output: page_text(records, extras, title)}))
    body = {"file": options.output, "records": options.files,
            "difference": None if change is None else asdict(change)}  # fmt: skip
    say_result(body, tuple)
    return EXIT_OK


def _checked(text: str) -> tuple[RunRecord, RunCopies]:
    """Return a record and its copies; raise `FormatError` or `TaskError` for a changed record."""
    from stitch.report import read_copies, read_record, replay_record

    record = read_record(text)
    copies = read_copies(text)
    replay_record(record)
    return record, copies


def _explained(copies: RunCopies) -> str:
    """Return the copies of a record in the form of `explain`."""
    cost = copies.cost
    lines = [
        f"{copies.machine}: {sum(copies.runs.values())} program runs, {cost.copies} copies, "
        f"{cost.nbytes} B, {cost.seconds * 1e6:.1f} us simulated"
    ]
    for line in copies.lines:
        lines += [f"  {line.text(6)}", f"         {line.reason}"]
    return "\n".join(lines)
