"""A training that is killed at any moment goes on from its JSON, bit for bit."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import stitch
from tests.support.training.killed_training import NAMES, main, trained

ROOT = Path(__file__).resolve().parents[2]
STEPS = 60


def begun(folder: Path) -> subprocess.Popen[str]:
    """A process that trains from what the folder holds."""
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", "-m", "tests.support.training.killed_training",
         str(folder), str(STEPS)],
        cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def kill(process: subprocess.Popen[str], how: str, folder: Path, rng: random.Random) -> None:
    """Kill a training at a random moment after its first step: while it writes, or at any time."""
    assert process.stdout is not None
    # Those of the dead are swept later.
    before = set(folder.glob(".*.part"))
    assert process.stdout.readline(), process.communicate()[1]
    time.sleep(rng.uniform(0, 0.3))
    if how == "while it writes":
        while process.poll() is None and before.issuperset(folder.glob(".*.part")):
            pass
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL, "it was killed before its end"


def steps_in(file: Path) -> int:
    training = stitch.CompiledModel.load(file).training
    assert training is not None
    return int(training.values["training.steps"])


@pytest.mark.parametrize(
    "kills",
    [
        ["while it writes"],
        pytest.param(
            ["while it writes", "at any time"] * 3, marks=pytest.mark.campaign("training")
        ),
    ],
    ids=len,
)
def test_a_training_that_is_killed_at_random_goes_on_bit_for_bit(
    kills: list[str], tmp_path: Path
) -> None:
    rng = random.Random(len(kills))
    for how in kills:
        kill(begun(tmp_path), how, tmp_path, rng)
        assert all(0 < steps_in(tmp_path / f"{name}.json") < STEPS for name in NAMES)
    assert main(tmp_path, STEPS) == 0
    for name in NAMES:
        found = stitch.CompiledModel.load(tmp_path / f"{name}.json").training
        assert found is not None
        wanted = trained(name, STEPS)
        assert found.values.keys() == wanted.keys()
        for tensor, array in wanted.items():
            np.testing.assert_array_equal(found.values[tensor], array, err_msg=tensor)
