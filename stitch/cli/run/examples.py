"""The examples that came with the package, written out to be looked at, changed and run.

Comes in: the name of an example and a folder. Goes out: its files, there, and what to run. In a
wheel the examples lie in the package (`setup.py` puts them there), in a checkout beside it. Must
not know: what an example does.
"""

from __future__ import annotations

import re
import shutil
import tempfile
from pathlib import Path

from stitch.errors import StitchError, UsageError, closest

_PACKAGE = Path(__file__).resolve().parents[2]
_LEFT_OUT = shutil.ignore_patterns("__pycache__", "*.pyc")


def example_names() -> tuple[str, ...]:
    """The names that `write_example` takes: folders, and scripts without their ending."""
    return tuple(sorted(_sources()))


def write_example(name: str, folder: str | Path = ".") -> tuple[Path, str]:
    """Write an example into a folder; gives its place there, and the commands that run it.

    Raises `UsageError` for a name that no example has, and where its place is taken.
    """
    sources = _sources()
    if name not in sources:
        raise UsageError(
            f"there is no example {name!r}",
            expected=", ".join(example_names()),
            remedy=closest(name, example_names()) or None,
        )
    source = sources[name]
    target = Path(folder) / source.name
    if target.exists() or target.is_symlink():
        raise UsageError(
            f"{str(target)!r} exists already",
            remedy="remove it, or write the example from another folder",
        )
    # Whole or not at all: a folder half written would be refused at the next attempt.
    with tempfile.TemporaryDirectory(prefix=f".{name}.", suffix=".part", dir=folder) as part:
        copy = Path(part) / source.name
        if source.is_dir():
            shutil.copytree(source, copy, ignore=_LEFT_OUT)
        else:
            shutil.copyfile(source, copy)
        copy.rename(target)
    return target, _how_to_run(target)


def _sources() -> dict[str, Path]:
    inside = _PACKAGE / "examples"
    folder = inside if inside.is_dir() else _PACKAGE.parent / "examples"
    if not folder.is_dir():
        raise StitchError(
            "the examples are not here", where=str(folder), remedy="install the package again"
        )
    scripts = {p.stem: p for p in folder.glob("*.py")}
    return scripts | {p.name: p for p in folder.iterdir() if (p / "README.md").is_file()}


def _how_to_run(target: Path) -> str:
    """A script runs by itself; a folder's page says it, in its first block of commands."""
    if target.is_file():
        return f"python {target}"
    text = (target / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```sh\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
    return f"cd {target}\n{blocks[0].rstrip()}" if blocks else f"see {target / 'README.md'}"
