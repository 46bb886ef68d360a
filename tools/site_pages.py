"""Parts of the documentation that are generated from the code: commands, errors, machines, fields.

A page in docs/reference/ has the line `<!-- generated: NAME -->` where the text of `PARTS[NAME]`
belongs; tools/site_hook.py puts it there.
"""

from __future__ import annotations

import inspect
import re
from argparse import SUPPRESS, Action, ArgumentParser
from collections.abc import Callable, Iterable, Sequence
from html import escape

import stitch.errors
from stitch.cli.parser import EXIT_CODES
from stitch.cli.stitch_command import MAINS
from stitch.graph import PLACEMENT_FIELDS, PlacementOption, Side
from stitch.machine import load_machine, machine_names

MARK = re.compile(r"^<!-- generated: (.+) -->$", re.MULTILINE)


def filled(page: str) -> str:
    """A page with its generated parts; raises `KeyError` for a part that does not exist."""
    return MARK.sub(lambda mark: PARTS[mark[1]](), page)


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(
        "| " + " | ".join(c.replace("|", "\\|") for c in line) + " |" for line in lines
    )


def commands() -> str:
    """Every option of every command, and the examples."""
    return "\n\n".join(_command(main.parser()) for main in MAINS.values())


def _command(parser: ArgumentParser) -> str:
    usage = parser._get_formatter()
    rows = [
        (_code(_spelled(action)), _escaped(usage._expand_help(action)))
        for action in parser._actions
        if action.help is not SUPPRESS
    ]
    examples = (parser.epilog or "").partition("examples:\n")[2].partition("\n\n")[0]
    return (
        f"## {parser.prog}\n\n{parser.description}\n\n"
        + table(("option", "what it does"), rows)
        + f"\n\nExamples:\n\n```console\n{inspect.cleandoc(examples)}\n```"
    )


def _spelled(action: Action) -> str:
    """An option as one writes it: its names, and what it takes."""
    value = action.metavar or ("|".join(map(str, action.choices)) if action.choices else "")
    if not value and action.nargs != 0:
        value = action.dest.upper()
    names = ", ".join(action.option_strings)
    return f"{names} {value}".strip()


def _code(text: str) -> str:
    """Code in a table, where backticks would show the backslash before a bar."""
    return f"<code>{escape(text).replace('|', '&#124;')}</code>"


def _escaped(text: str) -> str:
    return re.sub(r"([*_<\[\]])", r"\\\1", " ".join(text.split()))


def errors() -> str:
    """The public error classes, with the exit code of each."""
    classes = [
        cls
        for cls in vars(stitch.errors).values()
        if inspect.isclass(cls) and issubclass(cls, stitch.errors.StitchError)
    ]
    return table(
        ("error", "base", "exit code", "what it says"),
        [
            (
                f"`{cls.__name__}`",
                f"`{cls.__base__.__name__}`" if cls.__base__ else "",
                str(cls.exit_code),
                _escaped((inspect.getdoc(cls) or "").partition("\n\n")[0]),
            )
            for cls in classes
        ],
    )


def exit_codes() -> str:
    """The exit codes, as `--help` lists them."""
    words = " ".join(EXIT_CODES.partition("\n")[2].split())
    return table(("code", "meaning"), re.findall(r"(\d+) (.+?)(?= \d+ |$)", words))


def machines() -> str:
    """The shipped machines and the sizes of their spaces."""
    rows = []
    for name in machine_names():
        shape = load_machine(name).shape
        spaces = [
            (f"{space.banks} x {space.limit - space.base}" if space is not None else "none")
            for space in (shape.l1, shape.dram)
        ]
        rows.append((f"`{name}`", " x ".join(map(str, shape.core_grid)), *spaces))
    return table(("machine", "core grid", "L1: banks x bytes", "DRAM: banks x bytes"), rows)


def placement() -> str:
    """The fields of placement options and their values."""
    sides: dict[str, list[Side]] = {}
    for side, fields in PLACEMENT_FIELDS.items():
        for field in fields:
            sides.setdefault(field, []).append(side)
    return table(
        ("field", "of", "values"),
        [
            (f"`{field}`", " and ".join(f"{side}s" for side in of), _escaped(_values(of[0], field)))
            for field, of in sides.items()
        ],
    )


def _values(side: Side, field: str) -> str:
    """What a field takes, as the error for a wrong value says it."""
    try:
        PlacementOption(side, "x", field, "")
    except stitch.errors.UsageError as error:
        return error.expected or ""
    raise AssertionError(f"{field} takes an empty text")


PARTS: dict[str, Callable[[], str]] = {
    "commands": commands,
    "errors": errors,
    "exit codes": exit_codes,
    "machines": machines,
    "placement": placement,
}
