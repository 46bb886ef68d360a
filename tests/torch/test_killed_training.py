"""A training that is killed at any moment goes on from its JSON, bit for bit."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import stitch
from tests.support.run_seed import SEED
from tests.support.training.killed_training import NAMES, train, trained

ROOT = Path(__file__).resolve().parents[2]


def begun(folder: Path) -> subprocess.Popen[str]:
    """A process that trains from what the folder holds, without an end."""
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", "-m", "tests.support.training.killed_training",
         str(folder)],
        cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def kill(process: subprocess.Popen[str], how: str, folder: Path, rng: random.Random) -> None:
    """Kill a training after a random number of steps: while it writes, or beside its next steps."""
    assert process.stdout is not None
    # Those of the dead are swept later.
    before = set(folder.glob(".*.part"))
    for _ in range(rng.randrange(1, 12)):
        assert process.stdout.readline(), process.communicate()[1]
    if how == "while it writes":
        while process.poll() is None and before.issuperset(folder.glob(".*.part")):
            pass
    process.send_signal(signal.SIGKILL)
    assert not process.communicate()[1]
    assert process.returncode == -signal.SIGKILL


def steps_in(file: Path) -> int:
    training = stitch.CompiledModel.load(file).training
    assert training is not None
    return int(training.values["training.steps"])


@pytest.mark.campaign("training")
def test_a_training_that_is_killed_at_random_goes_on_bit_for_bit(tmp_path: Path) -> None:
    rng = random.Random(SEED)
    for how in ["while it writes", "at any time"] * 3:
        kill(begun(tmp_path), how, tmp_path, rng)
    files = {name: tmp_path / f"{name}.json" for name in NAMES}
    assert all(steps_in(file) > 0 for file in files.values())
    steps = max(map(steps_in, files.values())) + 20
    train(tmp_path, range(steps))
    for name in NAMES:
        found = stitch.CompiledModel.load(files[name]).training
        assert found is not None
        wanted = trained(name, steps)
        assert found.values.keys() == wanted.keys()
        for tensor, array in wanted.items():
            np.testing.assert_array_equal(found.values[tensor], array, err_msg=tensor)
