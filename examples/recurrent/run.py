"""A pipeline file with repeats: a recurrent network, its state carried from round to round in L1.

Compiles `cell.yaml` and `readout.yaml` apart, runs `pipeline.yaml` by the command, and compares
what it wrote with a loop in NumPy.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path

import numpy as np

import stitch
from stitch.cli import compile_main as stitch_compile
from stitch.cli import run_main as stitch_run
from stitch.program import Array

HERE = Path(__file__).resolve().parent
TARGET = "wormhole_n150"


def reference(xs: Array, state: Array) -> tuple[Array, Array]:
    """The same loop in NumPy, with the constants out of the compiled programs: y, all states."""
    constants: dict[str, Array] = {}
    for name in ("cell", "readout"):
        (program,) = stitch.compile(HERE / f"{name}.yaml", target=TARGET).binary.programs
        data = program.constant_data()
        constants |= {program.values[number].name: array for number, array in data.items()}
    states = []
    for x in xs:
        state = np.tanh(x @ constants["wx"] + constants["bias"] + state @ constants["wh"])
        states.append(state)
    return state @ constants["w"], np.stack(states)


def main() -> int:
    """Compile, run, compare; the exit code is that of the first command that fails."""
    random = np.random.default_rng(0)
    xs = random.standard_normal((12, 8, 16), dtype=np.float32)
    state = np.zeros((8, 32), np.float32)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        shutil.copy(HERE / "pipeline.yaml", folder)
        np.save(folder / "xs.npy", xs)
        np.save(folder / "state.npy", state)
        for module in ("cell", "readout"):
            source, target = str(HERE / f"{module}.yaml"), str(folder / f"{module}.ttb")
            if code := stitch_compile([source, "-o", target, "--target", TARGET]):
                return code
        words = [
            str(folder / "pipeline.yaml"), f"--input=xs=@{folder / 'xs.npy'}",
            f"--input=state=@{folder / 'state.npy'}", f"--output=y=@{folder / 'y.npy'}",
            f"--output=states=@{folder / 'states.npy'}", "--explain",
        ]  # fmt: skip
        if code := stitch_run(words):
            return code
        found = (np.load(folder / f"{name}.npy") for name in ("y", "states"))
        pairs = zip(found, reference(xs, state), strict=True)
        difference = max(float(np.abs(ours - theirs).max()) for ours, theirs in pairs)
    print(f"largest difference from a loop in NumPy: {difference:.1e}")
    return 0 if difference <= 1e-5 else 1


if __name__ == "__main__":
    sys.exit(main())
