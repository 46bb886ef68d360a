"""`examples/digits/train.py` learns the digits; killed and resumed, it ends with the same bytes."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import stitch

DIGITS = Path(__file__).resolve().parents[2] / "examples" / "digits"


def started(folder: Path, *words: str) -> subprocess.Popen[str]:
    """The example in a process of its own, with its checkpoints in a folder."""
    return subprocess.Popen(
        [sys.executable, str(DIGITS / "train.py"), f"--checkpoints={folder}", *words],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def ended(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """Exit code, output and errors."""
    out, err = process.communicate()
    return process.returncode, out, err


def test_a_training_killed_in_its_second_epoch_resumes_to_the_same_bytes(tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert ended(started(whole, "--epochs=3"))[0] == 0
    first = started(killed, "--epochs=3")
    assert first.stdout is not None
    assert first.stdout.readline().startswith("epoch 1: loss ")
    first.send_signal(signal.SIGSTOP)  # Amid its second epoch, with the folder's lock.
    refused = ended(started(killed, "--epochs=3", "--resume"))
    assert refused[0] == 1 and f"process {first.pid} on " in refused[2], refused
    assert "Traceback" not in refused[2]
    first.kill()
    assert ended(first)[0] == -9
    saved = sorted(path.name for path in killed.glob("step-*"))
    assert saved and saved[-1] != "step-00000132.safetensors"
    without = ended(started(killed, "--epochs=3"))
    assert without[0] == 2 and "has checkpoints: --resume" in without[2]
    again = ended(started(killed, "--epochs=3", "--resume"))
    assert again[0] == 0 and "epoch 1:" not in again[1], again
    final = "step-00000132.safetensors"
    assert (killed / final).read_bytes() == (whole / final).read_bytes()
    assert {path.suffix for path in killed.iterdir()} == {".safetensors"}


@pytest.mark.campaign("training")
def test_digits_are_learned_from_scratch_and_the_model_runs_alone(tmp_path: Path) -> None:
    code, out, err = ended(started(tmp_path / "c", f"--output={tmp_path / 'digits.ttb'}"))
    assert code == 0, err
    accuracy = float(out.splitlines()[-1].split()[2])
    assert accuracy >= 0.97, out
    with np.load(DIGITS / "digits.npz") as digits:
        rows = digits["held_out"][:32]
        images, labels = digits["images"][rows] / np.float32(16), digits["labels"][rows]
    with stitch.open_device("wormhole_n150") as device:
        scores = np.asarray(device.load(tmp_path / "digits.ttb")(images))
    assert np.mean(scores.argmax(1) == labels) >= 0.95
