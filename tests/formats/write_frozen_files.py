"""Write frozen files, once each: of the current format version when it is released, of a feature
when it is added.

    python -m tests.formats.write_frozen_files

Writes `v<major>.<minor>.ttb` and `feature_<name>.ttb` and the golden texts beside them, and refuses
to touch a frozen file that is already there. With `--text` only the golden texts are written again:
for when the text form of programs changes, never for when loading does.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

import stitch
from stitch.dynamic_model import DynamicModel
from stitch.ttb import CURRENT, Binary, SymbolicBinary, load_any, save
from tests.support.files.scanned_specimens import conditional_binary, foreign_binary, scanned_binary
from tests.support.files.specimens import rich_binary


def symbolic_binary() -> SymbolicBinary:
    """A program with two named sizes, an expression in each place that has one, and guards."""

    def joined(x: Any, y: Any) -> Any:
        rows, columns = x.shape
        both = np.concatenate([x, y])
        return both.reshape(2 * rows * columns)[columns:] if rows > columns // 2 else both

    batch, length = stitch.Dim("batch", 1, 64), stitch.Dim("length", 2, 32)
    model = stitch.compile(
        joined, (np.zeros((8, 4), np.float32), np.zeros((8, 4), np.float32)),
        dynamic_shapes={"x": {0: batch, 1: length}, "y": {0: batch, 1: length}}, target="tiny",
    )  # fmt: skip
    return replace(model.stored(), producer="specimens 1")


#: What is written under which name.
SPECIMENS: dict[str, Callable[[], Binary | SymbolicBinary]] = {
    f"v{CURRENT}.ttb": rich_binary, "feature_scans.ttb": scanned_binary,
    "feature_conditions.ttb": conditional_binary, "feature_foreign_operators.ttb": foreign_binary,
    "feature_symbolic_sizes.ttb": symbolic_binary,
}  # fmt: skip
HERE = Path(__file__).resolve().parent


def golden_text(binary: Binary | SymbolicBinary) -> str:
    """All that a reader sees of a binary, the constants' elements included."""
    if isinstance(binary, SymbolicBinary):
        model = DynamicModel.of(binary)
        lines = [
            f"{o.op} {o.inputs} {o.outputs} at {o.location!r}" for o in binary.graph.operations
        ]
        return "\n".join([binary.producer, model.text(), *lines]) + "\n"
    lines = [
        f"version {binary.version} opset {binary.opset} producer {binary.producer}",
        f"machine {binary.machine}",
    ]
    for program in binary.programs:
        lines.append(program.text())
        for constant in program.constants:
            name, elements = program.values[constant.value].name, constant.data.ravel().tolist()
            lines.append(f"{program.name}/{name} = {elements}")
        for index, body in enumerate(program.bodies):
            for constant in body.constants:
                name, elements = body.values[constant.value].name, constant.data.ravel().tolist()
                lines.append(f"{program.name}/body {index}/{name} = {elements}")
        lines += [f"{program.name}/{v.name}: {v.type.text()} {v.layout}" for v in program.values]
        lines += [f"{program.name}: {o.op} at {o.location!r}" for o in program.operations]
    return "\n".join(lines) + "\n"


def main() -> int:
    """Write what is missing; exit code 1 where every frozen file exists already."""
    if "--text" not in sys.argv:
        missing = [name for name in SPECIMENS if not (HERE / name).exists()]
        if not missing:
            print(f"all in {HERE} are frozen: they are never written again", file=sys.stderr)
            return 1
        for name in missing:
            save(SPECIMENS[name](), HERE / name)
    for path in sorted(HERE.glob("*.ttb")):
        path.with_suffix(".txt").write_text(golden_text(load_any(path, verify="full")))
    return 0


if __name__ == "__main__":
    sys.exit(main())
