"""`stitch examples`: list the examples, or copy one into a folder."""

from __future__ import annotations

import argparse
import re
import shutil
import tempfile
from pathlib import Path

from stitch.cli.command import EXIT_OK, Command, say_result, say_written
from stitch.cli.parser import file_path, make_parser
from stitch.errors import StitchError, UsageError, unknown

_PACKAGE = Path(__file__).resolve().parents[1]
_SCHEMAS = re.compile(rb"\$schema=(?:\.\./)+stitch/schemas/")
_IGNORED = shutil.ignore_patterns("__pycache__", "*.pyc")


def example_names() -> tuple[str, ...]:
    """Return the names that `write_example` takes: folders, and scripts without suffix."""
    return tuple(sorted(_sources()))


def example_summaries() -> dict[str, str]:
    """Return the first sentence of each example's text, by name."""
    summaries = {}
    for name, source in sorted(_sources().items()):
        file = source if source.is_file() else source / "README.md"
        summaries[name] = _first_sentence(file.read_text(encoding="utf-8"))
    return summaries


def _first_sentence(text: str) -> str:
    """Return the first sentence of a docstring, or of Markdown below its heading.

    >>> _first_sentence("# A title\\n\\nIt shows [a link](b.md)\\nand: more. Then this.")
    'It shows a link and: more'
    """
    paragraphs = re.split(r"\n\s*\n", text.strip())
    first = next(part for part in paragraphs if not part.startswith("#"))
    flat = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", " ".join(first.strip('" ').split()))
    return re.split(r"\.(?: |\"|$)|:(?:\"|$)", flat)[0]


def write_example(name: str, folder: str | Path = ".") -> tuple[Path, str]:
    """Copy an example into a folder; return its path there and the commands that run it.

    Raises `UsageError` for an unknown name, or if the path exists.
    """
    sources = _sources()
    if name not in sources:
        raise unknown(f"there is no example {name!r}", name, example_names())
    source = sources[name]
    target = Path(folder) / source.name
    if not Path(folder).is_dir():
        raise UsageError(
            f"there is no folder {str(folder)!r}", remedy="create it, or choose another"
        )
    if target.exists() or target.is_symlink():
        raise UsageError(
            f"{str(target)!r} exists already",
            remedy="remove it, or write the example from another folder",
        )
    # Atomic: an incomplete folder would be refused at the next attempt.
    with tempfile.TemporaryDirectory(prefix=f".{name}.", suffix=".part", dir=folder) as part:
        copy = Path(part) / source.name
        if source.is_dir():
            shutil.copytree(source, copy, ignore=_IGNORED)
        else:
            shutil.copyfile(source, copy)
        for document in copy.rglob("*.yaml"):
            _point_to_schemas(document)
        copy.rename(target)
    return target, _how_to_run(target)


def _point_to_schemas(document: Path) -> None:
    """Replace the path of the JSON Schema in a YAML file's first line by that of this package."""
    text = document.read_bytes()
    written = _SCHEMAS.sub(f"$schema={_PACKAGE.as_posix()}/schemas/".encode(), text, count=1)
    if written != text:
        document.write_bytes(written)


def _sources() -> dict[str, Path]:
    inside = _PACKAGE / "examples"
    folder = inside if inside.is_dir() else _PACKAGE.parent / "examples"
    if not folder.is_dir():
        raise StitchError(
            "the examples are missing", where=str(folder), remedy="install the package again"
        )
    scripts = {p.stem: p for p in folder.glob("*.py")}
    return scripts | {p.name: p for p in folder.iterdir() if (p / "README.md").is_file()}


def _how_to_run(target: Path) -> str:
    """Return the commands that run an example: the script, or the first block of its README."""
    if target.is_file():
        return f"python {target}"
    text = (target / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```sh\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
    return f"cd {target}\n{blocks[0].rstrip()}" if blocks else f"see {target / 'README.md'}"


EXAMPLES = """\
  stitch examples
  stitch examples digits
  stitch examples full_l1 --into=scratch"""


def command() -> Command:
    """Return `stitch examples` with its options."""
    parser = make_parser("List the examples, or copy one into a folder.", EXAMPLES)
    parser.add_argument("name", nargs="?", metavar="NAME",
                        help="the example to copy (default: list all)")  # fmt: skip
    parser.add_argument("--into", metavar="FOLDER", type=file_path, default=".",
                        help="an existing folder (default: this one)")  # fmt: skip
    return Command(parser.read, _examples)


def _examples(options: argparse.Namespace) -> int:
    if options.name is None:
        summaries = example_summaries()
        say_result(summaries, lambda: [f"{name}: {text}" for name, text in summaries.items()])
        return EXIT_OK
    target, how = write_example(options.name, options.into)
    say_written([target])
    say_result({"wrote": str(target), "run": how}, lambda: ["to run it:", how])
    return EXIT_OK
