"""The demo: two modules, compiled apart, stitched at run time, recognise handwritten digits.

`stitch-compile` runs twice, each time knowing one module only. The runtime then loads both files,
and the features stay in L1 between them. The result is compared with plain NumPy; exit code 1
if it differs by more than 1e-5.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

import stitch

HERE = Path(__file__).resolve().parent
MACHINE = "wormhole_n150"
TOLERANCE = 1e-5

Floats = NDArray[np.float32]


def compile_apart(folder: Path) -> tuple[Path, Path]:
    """Two compilers, two files: neither knows what its program will be stitched to."""
    made = []
    for name in ("features", "classifier"):
        target = folder / f"{name}.ttb"
        compiler = Path(sys.executable).parent / "stitch-compile"
        command = [
            str(part)
            for part in (compiler, HERE / f"{name}.yaml", "-o", target, "--target", MACHINE)
        ]
        print("$", " ".join(["stitch-compile", f"{name}.yaml", "-o", target.name]), flush=True)
        if code := subprocess.run(command, check=False).returncode:
            sys.exit(code)  # The compiler has said why.
        made.append(target)
    return made[0], made[1]


def reference(x: Floats) -> Floats:
    """The same network in plain NumPy, float32: probabilities [N, 10]."""
    with np.load(HERE / "weights.npz") as w:
        hidden = np.maximum(x @ w["w1"] + w["b1"], 0)
        hidden = np.maximum(hidden @ w["w2"] + w["b2"], 0)
        scores = hidden @ w["w3"] + w["b3"]
    powers = np.exp(scores - scores.max(axis=1, keepdims=True))
    probabilities: Floats = powers / powers.sum(axis=1, keepdims=True)
    return probabilities


def held_out_digits() -> tuple[Floats, NDArray[np.uint8]]:
    """Images [360, 64] from 0 to 1, and labels [360], that training never saw."""
    with np.load(HERE / "digits.npz") as digits:
        rows = digits["held_out"]
        return digits["images"][rows].astype(np.float32) / 16, digits["labels"][rows]


def main() -> int:
    """Compile, stitch, compare, explain; the exit code says whether the result is right."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.parse_args()
    x, labels = held_out_digits()
    with tempfile.TemporaryDirectory() as folder:
        files = compile_apart(Path(folder))
        with stitch.open_device(MACHINE) as device:
            features, classifier = (device.load(file) for file in files)
            hidden = features(x)
            result = classifier(hidden).numpy()
            print(f"\nfeatures lie in {hidden.space.value} at address {hidden.address:#x}\n")
            print(device.explain())
            print()
            print(device.memory_report())
    recognised = (result.argmax(axis=1) == labels).mean()
    difference = float(np.abs(result - reference(x)).max())
    print(f"\n{recognised:.1%} of {len(x)} held-out digits recognised")
    print(f"largest difference from plain NumPy: {difference:.2e} (allowed: {TOLERANCE:.0e})")
    if difference > TOLERANCE:
        print("FAILED: the stitched result is not that of plain NumPy", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
