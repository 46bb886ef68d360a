"""`stitch simulate`: the cost of one pass on machines, and on a machine with varied figures.

A pass is planned without data, as `stitch run --dry_run` does; a machine on which it cannot run is
a row with the reason.
"""

from __future__ import annotations

import argparse
import csv
import io
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import Any, TypeAlias

from stitch import documents
from stitch.budget import parse_nbytes
from stitch.cli.command import EXIT_OK, Command, say_result, say_written
from stitch.cli.module_files import known_machine, read_modules, with_unique_names
from stitch.cli.options import FUNCTION_OPTION, WIRE_OPTION
from stitch.cli.output_checks import PAGE, SWEEP, OutputChecks
from stitch.cli.parser import add_options, file_path, make_parser
from stitch.cli.phases import phase
from stitch.cli.rehearsal import Rehearsal, rehearse, rehearse_pipeline
from stitch.cli.tables import table_lines
from stitch.cli.wiring import wires_of
from stitch.errors import FormatError, StitchError, UsageError
from stitch.files import write_files
from stitch.machine import Machine, load_machine, varied_machine
from stitch.report import PageExtras, page_text, plan_peaks

FORM = "FIGURE=START:STOP:STEP or FIGURE=A,B,C, such as l1.bank_nbytes=256KiB:2MiB:64KiB"
#: Machines of one command.
MAX_POINTS = 1_000
#: Defects that make every value of a figure wrong; others are those of one machine.
_OF_THE_FIGURE = {"unknown_key", "wrong_type", "unknown_word", "missing_key", "misplaced_key"}


@dataclass(frozen=True, slots=True)
class Sweep:
    """A figure by its dotted name, and its values."""

    figure: str
    values: tuple[int | float, ...]


def parse_sweep(text: str) -> Sweep:
    """Parse a value of `--sweep`; raise `UsageError`.

    >>> parse_sweep("l1.bank_nbytes=256KiB:384KiB:64KiB").values
    (262144, 327680, 393216)
    >>> parse_sweep("noc.turns=0,0.5").values
    (0, 0.5)
    """
    figure, equals, values = text.partition("=")
    if not (figure and equals and values):
        raise UsageError(f"--sweep={text} names no values", expected=FORM)
    parts = values.split(":")
    if len(parts) == 1:
        return Sweep(figure, tuple(_number(word, text) for word in values.split(",")))
    if len(parts) != 3:
        raise UsageError(f"--sweep={text} is no range", expected=FORM)
    start, stop, step = (_number(part, text) for part in parts)
    if step <= 0 or stop < start:
        raise UsageError(
            f"--sweep={text} has no values", expected="START at most STOP, and STEP above 0",
            remedy=None,
        )  # fmt: skip
    count = math.floor((stop - start) / step + 1e-9) + 1
    if count > MAX_POINTS:
        raise _too_many(count)
    return Sweep(figure, tuple(start + at * step for at in range(count)))


def _number(word: str, text: str) -> int | float:
    for parse in (int, float, parse_nbytes):
        try:
            number: int | float = parse(word)
        except (ValueError, UsageError):
            continue
        if math.isfinite(number):
            return number
    raise UsageError(f"--sweep={text}: {word!r} is no number", expected=FORM)


def _too_many(count: int) -> UsageError:
    return UsageError(
        f"this sweep has {count:,} machines", expected=f"at most {MAX_POINTS:,}",
        remedy="take a larger STEP, or fewer figures",
    )  # fmt: skip


def points(sweeps: Sequence[Sweep]) -> Iterator[Mapping[str, int | float]]:
    """Yield every combination of the sweeps' values; raise `UsageError` for too many."""
    figures = [sweep.figure for sweep in sweeps]
    if len(set(figures)) < len(figures):
        raise UsageError("--sweep names a figure twice", got=", ".join(figures))
    count = math.prod(len(sweep.values) for sweep in sweeps)
    if count > MAX_POINTS:
        raise _too_many(count)
    for values in itertools.product(*(sweep.values for sweep in sweeps)):
        yield dict(zip(figures, values, strict=True))


def machine_at(base: str, point: Mapping[str, int | float]) -> Machine:
    """Return a machine with the figures of a point.

    Raises:
        UsageError: There is no such figure, or it is no number.
        FormatError: The machine is not sound with these values.
    """
    words = " ".join(f"{figure}={value}" for figure, value in point.items())
    try:
        return varied_machine(base, point, f"{base} {words}")
    except FormatError as error:
        details = [p.detail for p in error.problems if p.kind in _OF_THE_FIGURE]
        if not details:
            raise
        raise UsageError(
            f"--sweep={words} does not fit a machine: {'; '.join(details)}", where=base,
            expected=FORM, remedy=f"stitch machine {quote(base)} --sources",
        ) from error  # fmt: skip


EXAMPLES = """\
  stitch simulate a.ttb b.ttb
  stitch simulate chain.yaml --sweep l1.bank_nbytes=256KiB:2MiB:64KiB -o sweep.csv
  stitch simulate a.ttb b.ttb --sweep noc.clock_hz=8e8:1.2e9:1e8 --report=sweep.html
  stitch simulate a.ttb b.ttb --device=wormhole_n150 --device=mine.yaml
  stitch simulate a.ttb --sweep paths.host.dram.bytes_per_second=4e9,8e9,16e9 --json"""

_KINDS = ("copy", "evict", "move", "bounce")
#: Plans one pass on a machine.
_Rehearse: TypeAlias = Callable[[Machine], Rehearsal]


@dataclass(frozen=True, slots=True)
class Row:
    """One machine: the figures that distinguish it, and the cost of a pass or why none runs."""

    machine: str
    point: Mapping[str, int | float]
    cost: Mapping[str, int | float]
    error: str = ""


def command() -> Command:
    """Return `stitch simulate` with its options."""
    parser = make_parser("Plan one pass on machines, also with varied figures.", EXAMPLES)
    parser.add_argument("files", nargs="*", metavar="FILE",
                        help="modules in run order (.ttb), or one pipeline (.yaml)")  # fmt: skip
    add_options(
        parser,
        FUNCTION_OPTION,
        WIRE_OPTION,
        ("--device", {"action": "append", "default": [], "metavar": "NAME|machine.yaml|.ttsys",
                      "help": "a machine; repeat it to compare several (default: the pipeline's, "
                      "or the one that the first module was compiled for)"}),
        ("--sweep", {"action": "append", "default": [], "metavar": "FIGURE=VALUES",
                     "help": f"vary a figure of the machine: {FORM}; repeat it for every "
                     "combination. Figures have the names of a description's keys "
                     "(`python -m pydoc stitch.machine.description`)"}),
    )  # fmt: skip
    parser.add_argument("-o", "--output", metavar="FILE", type=file_path,
                        help="write the table as CSV; - for standard output")  # fmt: skip
    parser.add_argument("--report", metavar="FILE.html", type=file_path,
                        help="write a page with the curves of one swept figure")  # fmt: skip
    return Command(parser.read, _simulate)


def _simulate(options: argparse.Namespace) -> int:
    checks = OutputChecks()
    checks.reads(options.files)
    sweeps = [parse_sweep(text) for text in options.sweep]
    combinations = list(points(sweeps)) if sweeps else [{}]
    if options.output is not None:
        checks.add(options.output, SWEEP, "--output")
    if options.report is not None:
        checks.add(options.report, PAGE, "--report")
        if len(sweeps) != 1:
            raise UsageError(
                "--report shows curves over one figure", got=f"{len(sweeps)} options --sweep",
                expected=f"--sweep {FORM}",
            )  # fmt: skip
    rehearse, own = _read(options)
    bases = options.device or [own]
    with phase("simulating", len(bases) * len(combinations)) as tick:
        rows, errors = _rows(rehearse, bases, combinations, tick)
    if len(errors) == len(rows):
        raise errors[0]
    texts = {}
    if options.output is not None:
        texts[options.output] = _csv(rows)
    if options.report is not None:
        texts[options.report] = _page(rows, sweeps[0].figure)
    if texts:
        say_written(write_files(texts))
    say_result([_flat(row) for row in rows], lambda: _lines(rows))
    return EXIT_OK


def _read(options: argparse.Namespace) -> tuple[_Rehearse, str | Machine]:
    """Read the files; return what plans a pass of them, and their own machine."""
    pipelines = [path for path in options.files if Path(path).suffix.lower() in (".yaml", ".yml")]
    if not options.files:
        raise UsageError(
            "there is nothing to simulate", expected="modules (.ttb), or a pipeline.yaml"
        )
    if pipelines:
        if len(options.files) > 1 or options.wire or options.function:
            raise UsageError(
                "a pipeline is simulated alone: its file names the modules and their connections",
                got=", ".join(options.files), remedy=f"stitch simulate {quote(pipelines[0])}",
            )  # fmt: skip
        checked = documents.read_pipeline(pipelines[0])
        return lambda machine: rehearse_pipeline(checked, machine), checked.machine
    modules = with_unique_names(read_modules(options.files, options.function))
    wires = wires_of(modules, options.wire)
    own: str | Machine
    if modules[0].binary.origin is not None:
        own = modules[0].binary.origin.machine
    elif options.device:
        own = options.device[0]
    else:
        own = known_machine(modules[0].binary.machine.name, modules[0].path)
    return lambda machine: rehearse(modules, wires, machine), own


def _rows(
    rehearse: _Rehearse, bases: Sequence[str | Machine],
    combinations: Sequence[Mapping[str, int | float]], tick: Callable[[], None],
) -> tuple[list[Row], list[StitchError]]:  # fmt: skip
    """Return a row for each machine, and the errors of those on which no pass runs.

    Raises `UsageError` for a machine or a figure that does not exist.
    """
    rows, errors = list[Row](), list[StitchError]()
    for base in bases:
        load_machine(base)
        name = base.name if isinstance(base, Machine) else base
        for point in combinations:
            if point and isinstance(base, Machine):
                raise UsageError(
                    "the figures of a binary's own machine cannot be varied", got=name,
                    expected="--device=NAME or --device=machine.yaml",
                )  # fmt: skip
            try:
                machine = machine_at(str(base), point) if point else load_machine(base)
                rows.append(Row(name, point, _cost(rehearse(machine))))
            except UsageError:
                raise
            except StitchError as error:
                problems = error.problems if isinstance(error, FormatError) else ()
                why = problems[0].detail if problems else error.brief()
                rows.append(Row(name, point, {}, why))
                errors.append(error)
            tick()
    return rows, errors


def _cost(planned: Rehearsal) -> dict[str, int | float]:
    """Return the cost of a pass as numbers, by the name of the column."""
    cost = planned.cost
    kinds = Counter[str]()
    for line in planned.copies:
        kinds[line.kind] += line.times
    peaks = plan_peaks([plan for plan, _ in planned.plans])
    return {
        "us": (cost.seconds + cost.program_seconds) * 1e6,
        "copies_us": cost.seconds * 1e6,
        "programs_us": cost.program_seconds * 1e6,
        "copies": cost.copies,
        "bytes": cost.nbytes,
        **{f"{kind}s": kinds[kind] for kind in _KINDS if kind != "copy"},
        **{f"peak_{space.value}": nbytes for space, nbytes in peaks.items()},
    }  # fmt: skip


def _flat(row: Row) -> dict[str, Any]:
    return {"machine": row.machine, **row.point, **row.cost, "error": row.error or None}


def _columns(rows: Sequence[Row]) -> list[str]:
    """Return the columns of a table: the machine if there are several, figures, costs, errors."""
    names = dict.fromkeys(name for row in rows for name in (*row.point, *row.cost))
    machine = ["machine"] if len({row.machine for row in rows}) > 1 or not rows[0].point else []
    return [*machine, *names, *(["error"] if any(row.error for row in rows) else [])]


def _csv(rows: Sequence[Row]) -> str:
    text = io.StringIO()
    table = csv.DictWriter(text, _columns(rows), extrasaction="ignore", lineterminator="\n")
    table.writeheader()
    table.writerows(map(_flat, rows))
    return text.getvalue()


def _page(rows: Sequence[Row], figure: str) -> str:
    """Return a page with a curve for each cost that varies, of each machine."""
    machines = dict.fromkeys(row.machine for row in rows)
    sweep: dict[str, list[float | None]] = {}
    for machine in machines:
        mine = [row for row in rows if row.machine == machine]
        sweep[figure] = [row.point[figure] for row in mine]
        for name in dict.fromkeys(name for row in mine for name in row.cost):
            title = name if len(machines) == 1 else f"{name} on {machine}"
            values = [row.cost.get(name) for row in mine]
            if name == "us" or len(set(values)) > 1:
                sweep[title] = values
    table = "\n".join(_lines(rows))
    return page_text({}, PageExtras(table, sweep=sweep), f"Stitch: one pass over {figure}")


def _lines(rows: Sequence[Row]) -> Iterator[str]:
    """Yield the table as text, and the machine of the least time."""
    columns = _columns(rows)
    cells = [[_cell(_flat(row).get(column)) for column in columns] for row in rows]
    yield from table_lines(columns, cells, {"machine", "error"})
    best = min((row for row in rows if row.cost), key=lambda row: row.cost["us"])
    if len(rows) > 1:
        where = ", ".join([best.machine, *(f"{key}={value}" for key, value in best.point.items())])
        yield f"least time: {best.cost['us']:.1f} us on {where}"


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.1f}" if abs(value) < 1e6 else f"{value:g}"
    return "" if value is None else str(value)
