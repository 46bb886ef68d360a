"""`stitch schema`: the flatbuffer schema of `.ttb` files, JSON Schemas of forms of YAML files."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

from stitch.cli.command import EXIT_OK, Command, say_result, say_written
from stitch.cli.parser import make_parser
from stitch.errors import StitchError, UsageError, unknown

EXAMPLES = """\
  stitch schema ttb -o program.fbs && flatc --cpp program.fbs
  stitch schema module -o module.json"""
_PACKAGE = Path(__file__).resolve().parents[1]
#: Where `program.fbs` is: in the installed package, or in a checkout.
_TTB = (_PACKAGE / "schema" / "program.fbs", _PACKAGE.parent / "schema" / "program.fbs")


def _ttb() -> str:
    from stitch.files import read_text

    for path in _TTB:
        if path.is_file():
            return read_text(path)
    raise StitchError(
        "the schema of .ttb files is missing", where=str(_TTB[0]),
        remedy="install the package again",
    )  # fmt: skip


def _module() -> str:
    from stitch.frontend import module_json_schema

    return _json_text(module_json_schema())


def _pipeline() -> str:
    from stitch.documents import pipeline_json_schema

    return _json_text(pipeline_json_schema())


def _machine() -> str:
    from stitch.machine import machine_json_schema

    return _json_text(machine_json_schema())


def _mesh() -> str:
    from stitch.mesh import mesh_json_schema

    return _json_text(mesh_json_schema())


def _json_text(schema: dict[str, object]) -> str:
    return json.dumps(schema, indent=1) + "\n"


#: What is printed for each name; forms of YAML files are made from their readers.
SCHEMAS: dict[str, Callable[[], str]] = {
    "ttb": _ttb, "module": _module, "pipeline": _pipeline, "machine": _machine, "mesh": _mesh,
}  # fmt: skip


def command() -> Command:
    """Return `stitch schema` with its options."""
    parser = make_parser(
        "Print the flatbuffer schema of .ttb files (ttb), or the JSON Schema of a form of YAML "
        "files (module, pipeline, machine, mesh).",
        EXAMPLES,
    )
    parser.add_argument("name", nargs="?", metavar="NAME", help=", ".join(SCHEMAS))
    parser.add_argument("-o", "--output", metavar="FILE", help="write it, - for stdout")
    return Command(parser.read, _write)


def _write(options: argparse.Namespace) -> int:
    from stitch.cli.output_checks import SCHEMA, OutputChecks
    from stitch.files import write_files

    if options.name is None:
        raise UsageError("there is no schema to print", expected=", ".join(SCHEMAS),
                         remedy="stitch schema module")  # fmt: skip
    if options.name not in SCHEMAS:
        raise unknown(f"there is no schema {options.name!r}", options.name, SCHEMAS)
    text = SCHEMAS[options.name]()
    body = {"name": options.name, "file": options.output}
    if options.output is None:
        schema = text if options.name == "ttb" else json.loads(text)
        say_result(body | {"schema": schema}, lambda: [text.rstrip("\n")])
        return EXIT_OK
    OutputChecks().add(options.output, SCHEMA, "-o")
    say_written(write_files({options.output: text}))
    say_result(body, tuple)
    return EXIT_OK
