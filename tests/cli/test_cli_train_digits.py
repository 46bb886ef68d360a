"""`stitch-run train.yaml` on handwritten digits: accuracy, copies, plans, killed runs."""

from __future__ import annotations

import random
import re
import signal
from pathlib import Path

import numpy as np
import pytest

from stitch.documents import read_training
from stitch.training.checkpoints.checkpoint_folder import read_checkpoint
from stitch.training.checkpoints.checkpoint_format import read_tensors
from tests.support.run_seed import SEED
from tests.support.training.commands import (
    DIGITS,
    lines,
    losses,
    ran,
    started,
    wait_for_step,
)

# -- the example -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example's training, run through without a break."""
    folder = tmp_path_factory.mktemp("digits")
    code, out, err = ran(
        str(DIGITS / "train.yaml"), f"--checkpoint_dir={folder / 'checkpoints'}",
        f"--result_file={folder / 'results.jsonl'}", "--explain", "--max_copies=0",
        f"--output={folder / 'digits.ttb'}", f"--output={folder / 'digits.safetensors'}",
    )  # fmt: skip
    (folder / "out.txt").write_text(out)
    assert code == 0 and err == "", err
    return folder


def test_digits_are_learned_from_scratch_to_97_percent_of_those_held_out(digits: Path) -> None:
    final = lines(digits / "results.jsonl")[-1]
    assert final["kind"] == "final" and final["result"] == "done"
    assert final["held_out"]["accuracy"] >= 0.97
    out = (digits / "out.txt").read_text()
    assert re.search(r"^held out +accuracy 0\.9[789]\d\d, loss \d", out, re.M)


def test_settings_were_chosen_without_the_held_out_digits() -> None:
    found = read_training(DIGITS / "train.yaml").file
    assert found is not None
    assert found.data.validation is not None and found.data.held_out is not None
    with np.load(DIGITS / "digits.npz") as arrays:
        assert not set(arrays["train"]) & set(arrays["held_out"])


def test_in_the_steady_state_only_batches_come_in_and_losses_go_out(digits: Path) -> None:
    out = (digits / "out.txt").read_text()
    kinds = r"copy|evict|move|bounce|aside|write|read"
    found = re.findall(rf"^  ({kinds}) +x(\d+) (\d+) B", out, re.M)
    # The batch, its labels, the learning rate; losses.
    assert [kind for kind, _, _ in found] == ["copy", "copy", "write", "read"]
    steps = {int(times) for _, times, _ in found}
    assert steps == {40}
    assert [int(nbytes) for _, _, nbytes in found] == [32 * 64 * 4, 32 * 8, 4, 40 * 4]


def test_what_is_explained_is_of_the_steps_that_it_names(digits: Path) -> None:
    out = (digits / "out.txt").read_text()
    final = lines(digits / "results.jsonl")[-1]
    last = final["step"]
    head = re.search(r"^\w+: (\d+) program runs, (\d+) copies, (\d+) B, .* \((.*)\)$", out, re.M)
    seen = re.search(r"^  the spaces saw (\d+) writes by copies and moves, (\d+) B$", out, re.M)
    assert head is not None and seen is not None
    assert head[4] == f"last 40 steps of {last}, {last - 39} to {last}"
    assert (head[1], head[2]) == (str(40 * 4), str(40 * 3)) and head.groups()[1:3] == seen.groups()
    totals = final["totals"]
    assert totals["period"] == "whole run" and totals["copies"] > 3 * last
    assert "copies      at most 0 in a step" in out


def test_nothing_is_planned_after_the_third_step(digits: Path) -> None:
    final = lines(digits / "results.jsonl")[-1]
    assert final["plans"] >= 1 and final["last_planned_step"] <= 3
    assert "(late: " not in (digits / "out.txt").read_text()


def test_the_trained_model_runs_as_a_module_and_is_as_good(digits: Path, tmp_path: Path) -> None:
    with np.load(DIGITS / "digits.npz") as arrays:
        rows = arrays["held_out"][:32]
        images, labels = arrays["images"][rows].astype(np.float32) / 16, arrays["labels"][rows]
    np.save(tmp_path / "x.npy", images)
    words = (f"--module={digits / 'digits.ttb'}", f"--input=@{tmp_path / 'x.npy'}")
    code, _, err = ran(*words, f"--output=@{tmp_path / 'y.npy'}")
    assert code == 0, err
    found = np.load(tmp_path / "y.npy").argmax(axis=1)
    assert np.mean(found == labels) >= 0.9


def test_weights_are_written_as_safetensors_and_are_those_of_the_last_step(digits: Path) -> None:
    found = read_tensors(digits / "digits.safetensors").tensors
    last = read_checkpoint(max((digits / "checkpoints").iterdir())).state
    assert set(found) == {"k1", "c1", "w2", "b2", "w3", "b3"}
    assert all(found[name].tobytes() == last[name].tobytes() for name in found)


@pytest.mark.campaign("training")
def test_killed_at_random_steps_and_resumed_it_ends_with_the_same_weights(
    digits: Path, tmp_path: Path
) -> None:
    chance = random.Random(SEED)
    results = tmp_path / "results.jsonl"
    words = (
        str(DIGITS / "train.yaml"), f"--checkpoint_dir={tmp_path / 'c'}", "--checkpoint_every=7",
        f"--result_file={results}", "--resume",
    )  # fmt: skip
    for step in sorted(chance.sample(range(1, 400), 3)):
        process = started(*words)
        wait_for_step(process, results, step)
        process.kill()
        process.communicate()
        assert process.returncode == -signal.SIGKILL
    code, _, err = ran(*words)
    assert code == 0 and "resumed after step" in err, err
    final = read_checkpoint(max((tmp_path / "c").iterdir()))
    expected = read_checkpoint(max((digits / "checkpoints").iterdir()))
    assert final.step == expected.step == 1200
    assert {n: a.tobytes() for n, a in final.state.items()} == {
        n: a.tobytes() for n, a in expected.state.items()
    }
    assert losses(results) == losses(digits / "results.jsonl")
    ends = [
        {k: line[k] for k in ("step", "epoch", "loss", "validation")}
        for path in (results, digits / "results.jsonl")
        for line in lines(path)
        if line["kind"] == "epoch"
    ]
    assert ends[:30] == ends[30:]
