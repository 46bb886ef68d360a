"""`stitch-link`: link several `.ttb` modules into one program with bit-identical results."""

from __future__ import annotations

import argparse

from stitch import api
from stitch.cli.command import EXIT_OK, Command, say_result, say_written
from stitch.cli.module_files import read_modules
from stitch.cli.options import FUNCTION_OPTION, WIRE_OPTION
from stitch.cli.output_checks import TTB, OutputChecks
from stitch.cli.parser import add_options, make_parser
from stitch.cli.phases import phase
from stitch.cli.wiring import names_of, wires_of
from stitch.errors import UsageError
from stitch.files import write_files
from stitch.linking import LinkPart, link_parts
from stitch.report import counted
from stitch.ttb import content_of

EXAMPLES = """\
  stitch-link a.ttb b.ttb -o ab.ttb
  stitch-link a.ttb b.ttb c.ttb -o abc.ttb --wire a.y=b.x --wire a.z=c.x --name=whole
  stitch-link a.ttb b.ttb -o ab.ttb --keep=a.y"""


def command() -> Command:
    """Return `stitch-link` with its options."""
    parser = make_parser("Link .ttb modules into one program.", EXAMPLES)
    parser.add_argument("modules", nargs="*", metavar="FILE", help=".ttb files, in run order")
    parser.add_argument("-o", "--output", metavar="FILE", help="the .ttb file, - for stdout")
    add_options(
        parser,
        FUNCTION_OPTION,
        WIRE_OPTION,
        ("--keep", {"action": "append", "default": [], "metavar": "A.Y",
                    "help": "keep an output (MODULE.OUTPUT) that feeds a wire as an output"}),
        ("--name", {"help": "the new program's name (default: the names joined by _)"}),
        ("--strict_types", {"action": "store_true",
                            "help": "refuse links that change the floating-point type"}),
    )  # fmt: skip
    return Command(parser.read, _link)


def _link(options: argparse.Namespace) -> int:
    with phase("reading modules"):
        modules = read_modules(options.modules, options.function, verify="full")
    if len(modules) < 2:
        raise UsageError(
            "linking takes at least two modules",
            got=f"only {options.modules[0]}" if options.modules else "none",
            remedy="stitch-link a.ttb b.ttb -o both.ttb",
        )
    if options.output is None:
        raise UsageError("there is no file to write", expected="-o FILE, - for standard output")
    OutputChecks().add(options.output, TTB, "-o")
    parts = [LinkPart(m.program, m.binary.machine, m.label, m.path) for m in modules]
    wires = wires_of(modules, options.wire, strict_types=options.strict_types)
    names = names_of(modules)
    keep = [names.port(word, "output", f"--keep={word}") for word in options.keep]
    with phase("linking"):
        model = link_parts(
            parts, wires, name=options.name, keep=keep, strict_types=options.strict_types
        )
    facts = f"{counted(len(modules), 'program')} linked into {model.program.name!r}, "
    facts += counted(len(model.program.operations), "operation")
    with phase("writing"):
        say_written(write_files({options.output: content_of(model.binary)}))
    where = "standard output" if options.output == "-" else options.output
    nbytes = api.inspect_sizes(model.binary).total
    say_result(
        {"file": where, "nbytes": nbytes, "name": model.program.name,
         "programs": [part.program.name for part in parts],
         "operations": len(model.program.operations)},
        lambda: [f"{where}: {nbytes} bytes, {facts}"],
    )  # fmt: skip
    return EXIT_OK
