"""The demo: two modules, compiled apart, stitched at run time, recognise handwritten digits.

`stitch-compile` runs twice, each time knowing one module only. The runtime then loads both files,
and the features stay in L1 between them. Exit code 1 if fewer than 95 % of the held-out digits are
recognised, or if the result differs from plain NumPy by more than 1e-5.
"""

from __future__ import annotations

import argparse
import shutil
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
LEAST_ACCURACY = 0.95
SHADES = " .:-=+*#%@"

Floats = NDArray[np.float32]
Labels = NDArray[np.uint8]


def compile_apart(folder: Path) -> tuple[Path, Path]:
    """Two compilers, two files: neither knows what its program will be stitched to."""
    beside = Path(sys.executable).parent / "stitch-compile"
    compiler = beside if beside.exists() else shutil.which("stitch-compile")
    if compiler is None:
        sys.exit("stitch-compile is not installed: run tools/demo, or pip install -e .")
    made = []
    for name in ("features", "classifier"):
        target = folder / f"{name}.ttb"
        print(f"$ stitch-compile {name}.yaml -o {name}.ttb --target {MACHINE}", flush=True)
        source = HERE / f"{name}.yaml"
        words = [str(w) for w in (compiler, source, "-o", target, "--target", MACHINE)]
        done = subprocess.run(words, check=False, stdout=subprocess.DEVNULL)
        if done.returncode:
            sys.exit(done.returncode)  # The compiler has said why.
        print(f"  {target.stat().st_size} bytes")
        made.append(target)
    return made[0], made[1]


def run_stitched(files: tuple[Path, Path], x: Floats) -> Floats:
    """Probabilities [N, 10], and everything that the runtime has to say about them."""
    with stitch.open_device(MACHINE) as device:
        features, classifier = (device.load(file) for file in files)
        hidden = features(x)
        with stitch.forbid_copies(device):  # Any copy between the two would raise.
            probabilities = classifier(hidden)
        # Each has one output, and so gives a tensor: several come as a tuple.
        assert isinstance(hidden, stitch.Tensor) and isinstance(probabilities, stitch.Tensor)
        result: Floats = probabilities.numpy()
        section("Between the programs")
        print(f"features leaves    {hidden.layout.text()}")
        print(f"classifier wants   {classifier.input_layout('features').text()}")
        print("so nothing is copied between them: copies were forbidden there, and none was missed")
        section("Every copy, and why")
        print(device.explain())
        section("Memory while both handles are alive")
        print(device.memory_report())
    return result


def reference(x: Floats) -> Floats:
    """The same network in plain NumPy, float32: probabilities [N, 10]."""
    with np.load(HERE / "weights.npz") as w:
        hidden = np.maximum(x @ w["w1"] + w["b1"], 0)
        hidden = np.maximum(hidden @ w["w2"] + w["b2"], 0)
        scores = hidden @ w["w3"] + w["b3"]
    powers = np.exp(scores - scores.max(axis=1, keepdims=True))
    probabilities: Floats = powers / powers.sum(axis=1, keepdims=True)
    return probabilities


def held_out_digits() -> tuple[Floats, Labels]:
    """Images [360, 64] from 0 to 1, and labels [360], that training never saw."""
    with np.load(HERE / "digits.npz") as digits:
        rows = digits["held_out"]
        return digits["images"][rows].astype(np.float32) / 16, digits["labels"][rows]


def section(title: str) -> None:
    """Start a part of the output."""
    print(f"\n-- {title} {'-' * (92 - len(title))}")


def show_digits(x: Floats, answers: NDArray[np.intp], labels: Labels, count: int = 8) -> None:
    """Draw the first digits side by side, with what was recognised below."""
    section("The first held-out digits, and what they were taken for")
    for row in range(8):
        shades = (x[:count].reshape(count, 8, 8)[:, row] * (len(SHADES) - 1)).astype(int)
        print("   ".join("".join(SHADES[shade] for shade in image) for image in shades).rstrip())
    pairs = zip(answers[:count], labels[:count], strict=True)
    words = [f"{got}" if got == label else f"{got} (is {label})" for got, label in pairs]
    print("   ".join(word.center(8) for word in words).rstrip())


def main() -> int:
    """Compile, stitch, compare, explain; the exit code says whether the result is right."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.parse_args()
    x, labels = held_out_digits()
    with tempfile.TemporaryDirectory() as folder:
        result = run_stitched(compile_apart(Path(folder)), x)
    answers = result.argmax(axis=1)
    right = int((answers == labels).sum())
    difference = float(np.abs(result - reference(x)).max())
    show_digits(x, answers, labels)
    section("Result")
    print(
        f"accuracy    {right / len(x):.4f}: {right} of {len(x)} held-out digits recognised", end=""
    )
    print(f" (at least {LEAST_ACCURACY})")
    print(f"difference  {difference:.1e} at most from plain NumPy (allowed: {TOLERANCE:.0e})")
    failures = []
    if not right >= LEAST_ACCURACY * len(x):
        failures.append("too few digits are recognised")
    if not difference <= TOLERANCE:
        failures.append("the stitched result is not that of plain NumPy")
    for failure in failures:
        print(f"FAILED: {failure}", file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
