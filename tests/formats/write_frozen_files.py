"""Write the frozen file of the current format version, once, when the version is released.

    python -m tests.formats.write_frozen_files

Writes `v<major>.<minor>.ttb` and the golden text beside it, and refuses to touch a frozen file
that is already there. With `--text` only the golden texts are written again: for when the text
form of programs changes, never for when loading does.
"""

from __future__ import annotations

import sys
from pathlib import Path

from stitch.ttb import CURRENT, Binary, load, save
from tests.support.files.specimens import rich_binary

HERE = Path(__file__).resolve().parent


def golden_text(binary: Binary) -> str:
    """All that a reader sees of a binary, the constants' elements included."""
    lines = [
        f"version {binary.version} opset {binary.opset} producer {binary.producer}",
        f"machine {binary.machine}",
    ]
    for program in binary.programs:
        lines.append(program.text())
        for constant in program.constants:
            name, elements = program.values[constant.value].name, constant.data.ravel().tolist()
            lines.append(f"{program.name}/{name} = {elements}")
        lines += [f"{program.name}/{v.name}: {v.type.text()} {v.layout}" for v in program.values]
        lines += [f"{program.name}: {o.op} at {o.location!r}" for o in program.operations]
    return "\n".join(lines) + "\n"


def main() -> int:
    """Write what is missing; exit code 1 where the frozen file exists already."""
    if "--text" not in sys.argv:
        path = HERE / f"v{CURRENT}.ttb"
        if path.exists():
            print(f"{path} is frozen: it is never written again", file=sys.stderr)
            return 1
        save(rich_binary(), path)
    for path in sorted(HERE.glob("v*.ttb")):
        path.with_suffix(".txt").write_text(golden_text(load(path, verify="full")))
    return 0


if __name__ == "__main__":
    sys.exit(main())
