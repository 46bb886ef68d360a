"""`stitch pack`: offsets for buffers with known lifetimes, in MiniMalloc's CSV."""

from __future__ import annotations

import argparse
from shlex import quote

from stitch.budget import parse_nbytes
from stitch.cli.buffers_csv import Buffers, read_buffers
from stitch.cli.command import (
    EXIT_OK,
    Command,
    prog,
    say_aside,
    say_result,
    say_written,
)
from stitch.cli.output_checks import BUFFERS, OutputChecks
from stitch.cli.parser import count, file_path, make_parser, size
from stitch.cli.phases import phase
from stitch.errors import OutOfMemoryError, UsageError
from stitch.files import write_files
from stitch.packing import Packing, pack_intervals
from stitch.report import counted

EXAMPLES = """\
  stitch pack A.csv
  stitch pack A.csv --capacity=1MiB -o out.csv
  stitch pack A.csv -o - --placements=1500000"""

#: Placements of the search by default: about half a second.
PLACEMENTS = 150_000


def command() -> Command:
    """Return `stitch pack` with its options."""
    parser = make_parser(
        "Find offsets for buffers with known lifetimes, such that the arena is small.", EXAMPLES
    )
    parser.add_argument("file", nargs="?", metavar="FILE", help="CSV in MiniMalloc's form, with "
                        "the columns id,lower,upper,size and perhaps alignment")  # fmt: skip
    parser.add_argument("-o", "--output", metavar="FILE", type=file_path, help="write the file "
                        "with a column of offsets; - for standard output")  # fmt: skip
    parser.add_argument("--capacity", metavar="SIZE", type=size, help="the arena, such as 1MiB: "
                        "exit code 5 if the buffers do not fit, and no file")  # fmt: skip
    parser.add_argument("--placements", metavar="N", type=count, default=PLACEMENTS, help="limit "
                        "of the search (default: %(default)s, about half a second); 0: greedy "
                        "orders only")  # fmt: skip
    return Command(parser.read, _pack)


def _pack(options: argparse.Namespace) -> int:
    if options.file is None:
        raise UsageError("there is no file of buffers", expected="FILE, a CSV with the columns "
                         "id,lower,upper,size")  # fmt: skip
    checks = OutputChecks()
    checks.reads([options.file])
    if options.output is not None:
        checks.add(options.output, BUFFERS, "-o")
    buffers = read_buffers(options.file)
    capacity = None if options.capacity is None else parse_nbytes(options.capacity)
    if buffers.has_offsets:
        say_aside(f"{prog()}: note: the offsets of {options.file} are replaced")
    with phase("packing"):
        packing = pack_intervals(buffers.intervals, placements=options.placements)
    if capacity is not None and packing.peak_nbytes > capacity:
        raise _too_large(options, packing, capacity)
    if options.output is not None:
        text = buffers.with_offsets(packing.offsets)
        say_written(write_files({options.output: text}))
    _report(buffers, packing, capacity)
    return EXIT_OK


def _report(buffers: Buffers, packing: Packing, capacity: int | None) -> None:
    peak, bound = packing.peak_nbytes, packing.bound_nbytes
    many = counted(len(buffers.rows), "buffer")
    room = "" if capacity is None else f" of {capacity} B"
    proved = "no packing is smaller" if peak == bound else f"no packing is below {bound} B"
    body = {
        "buffers": len(buffers.rows), "peak_nbytes": peak, "bound_nbytes": bound,
        "capacity_nbytes": capacity, "alignment": buffers.alignment,
        "placements": packing.placements, "offsets": list(packing.offsets),
    }  # fmt: skip
    say_result(body, lambda: [f"{many}: {peak} B{room}; {proved}"])


def _too_large(options: argparse.Namespace, packing: Packing, capacity: int) -> OutOfMemoryError:
    """Return the error for buffers that exceed the capacity: proved, or not found."""
    proved = packing.bound_nbytes > capacity
    more = max(options.placements * 10, PLACEMENTS)
    got = f"{packing.bound_nbytes} B are live at one moment" if proved else (
        f"{packing.peak_nbytes} B, the least found in {packing.placements} placements; "
        f"no packing is below {packing.bound_nbytes} B; --placements={more} searches longer"
    )  # fmt: skip
    least = packing.bound_nbytes if proved else packing.peak_nbytes
    return OutOfMemoryError(
        "the buffers do not fit" if proved else "no packing that fits was found",
        where=options.file, expected=f"at most {capacity} B", got=got,
        remedy=f"stitch pack {quote(options.file)} --capacity={least}",
    )  # fmt: skip
