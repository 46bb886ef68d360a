"""`stitch-link`: several `.ttb` modules → one module with one program, the same to the last bit."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from stitch import api
from stitch.cli.command import EXIT_OK, Command, say
from stitch.cli.module_files import Module, read_modules
from stitch.cli.output_checks import TTB, OutputChecks
from stitch.cli.parser import add_options, make_parser
from stitch.cli.wire_words import FUNCTION_WORD, WIRE_WORD, free_outputs, output_port, wires_of
from stitch.errors import IncompatibleError, UsageError
from stitch.files import write_file
from stitch.linker import Port, Wire, link_programs
from stitch.model import PRODUCER
from stitch.report import counted
from stitch.ttb import Binary, content_of

EXAMPLES = """\
  stitch-link a.ttb b.ttb -o ab.ttb
  stitch-link a.ttb b.ttb c.ttb -o abc.ttb --wire a.y=b.x --wire a.z=c.x --name=whole
  stitch-link a.ttb b.ttb -o ab.ttb --keep=a.y"""


def command() -> Command:
    """`stitch-link`, with its words."""
    parser = make_parser("stitch-link", "Join .ttb modules into one.", EXAMPLES)
    parser.add_argument("modules", nargs="+", metavar="FILE", help=".ttb files, in run order")
    parser.add_argument("-o", "--output", required=True, metavar="FILE",
                        help="the .ttb file, - for stdout")  # fmt: skip
    add_options(
        parser,
        FUNCTION_WORD,
        WIRE_WORD,
        ("--keep", {"action": "append", "default": [], "metavar": "A.Y",
                    "help": "an output that stays an output although it feeds a wire"}),
        ("--name", {"help": "the new program's name (default: the names joined by _)"}),
        ("--strict_types", {"action": "store_true",
                            "help": "links may not change the floating storage type"}),
    )  # fmt: skip
    return Command(parser.read, _link)


def _link(words: argparse.Namespace) -> int:
    if len(words.modules) < 2:
        raise UsageError("linking takes at least two modules", got=f"{len(words.modules)}")
    checks = OutputChecks()
    checks.reads(words.modules)
    checks.add(words.output, TTB, "-o")
    modules = read_modules(words.modules, words.function, verify="full")
    checks.refuse_sources()
    _check_machines(modules)
    wires = wires_of(modules, words.wire, strict_types=words.strict_types)
    name = words.name if words.name is not None else "_".join(m.program.name for m in modules)
    program = link_programs(
        [module.program for module in modules],
        wires,
        machine=modules[0].binary.machine,
        name=name,
        keep=_kept(modules, wires, words.keep),
        strict_types=words.strict_types,
    )
    binary = Binary((program,), modules[0].binary.machine, PRODUCER)
    facts = f"{counted(len(modules), 'program')} linked into {name!r}, "
    facts += counted(len(program.operations), "operation")
    write_file(words.output, content_of(binary))
    where = "standard output" if words.output == "-" else words.output
    say(f"{where}: {api.inspect_sizes(binary).total} bytes, {facts}")
    return EXIT_OK


def _kept(
    modules: Sequence[Module], wires: Sequence[Wire], words: Sequence[str]
) -> set[Port] | None:
    """The outputs that stay: those that feed no input, and those that were asked for."""
    if not words:
        return None
    return {*free_outputs(modules, wires), *(output_port(modules, word) for word in words)}


def _check_machines(modules: Sequence[Module]) -> None:
    first = modules[0].binary.machine
    for module in modules[1:]:
        missing = tuple(first.shortcomings(module.binary.machine))
        if missing:
            raise IncompatibleError(
                f"{module.path} was compiled for {module.binary.machine.name!r}, "
                f"{modules[0].path} for {first.name!r}: " + "; ".join(missing),
                remedy="compile both for the same machine",
            )
