"""`stitch-run train.yaml`: mistakes in files and words are named, and nothing is lost."""

from __future__ import annotations

import random
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import stitch
from stitch.documents import form_of_text
from stitch.training.checkpoints.checkpoint_folder import read_checkpoint
from tests.support.run_seed import SEED
from tests.support.training.commands import (
    NET,
    TRAIN,
    Cli,
    changed,
    lines,
    npz_of,
)

JUNK = (
    "", "~", "-1", "0", "1e400", ".nan", "true", "[]", "{}", "[1, 2]", "{a: 1}", "'", "&a", "*a",
    "!!python/object:x", "99999999999999999999", "\0", "net.yaml", "..", "a:b",
)  # fmt: skip


# -- what goes wrong -------------------------------------------------------------------------------


def test_a_loss_that_is_no_number_names_step_and_operator_and_keeps_the_weights(
    cli: Cli, small: Path
) -> None:
    assert cli("run", "train.yaml", "--checkpoint_dir=sound", "--checkpoint_every=1",
               "--keep_checkpoints=99").code == 0  # fmt: skip
    text = TRAIN.replace("adamw, lr: 0.02", "sgd, lr: 1.0e+25")
    changed(("schedule: {name: warmup, warmup_steps: 4, then: cosine}\n", ""), text=text)
    done = cli("run", "train.yaml", "--checkpoint_dir=c", "--checkpoint_every=1",
               "--keep_checkpoints=9", "--result_file=r.jsonl", "--output=never.ttb")  # fmt: skip
    assert done.code == 6 and "Traceback" not in done.err
    found = re.search(r"the loss of step (\d+) is (nan|inf|-inf)", done.err)
    assert found is not None, done.err
    assert re.search(r"where: \w+ -> '\w+' of 'net(_loss)?' at ", done.err), done.err
    final = lines("r.jsonl")[-1]
    assert final["result"] == "error" and final["step"] == int(found[1]) - 1
    last = read_checkpoint(max((small / "c").iterdir()))
    assert last.step == int(found[1]) - 1
    assert all(np.isfinite(array).all() for array in last.state.values())
    assert not (small / "never.ttb").exists()


@pytest.mark.parametrize(
    ("old", "new", "line", "said"),
    [
        ("labels: ys", "labels: bad", 6, "a label is out of range; expected: 0 to 2"),
        ("labels: ys", "labels: real", 6, "labels are class indices"),
        ("labels: ys", "labels: xs", 6, "class indices"),
        ("labels: ys", "labels: few", 5, "input x has 120 rows, labels have 20"),
        ("labels: ys", "labels: yss", 6, "did you mean 'ys'"),
        ("inputs: {x: xs}", "inputs: {z: xs}", 5, "has no input 'z'"),
        ("inputs: {x: xs}", "inputs: {x: ys}", 5, "takes rows of [4]"),
        ("inputs: {x: xs}", "inputs: {x: {array: xs, scal: 2}}", 5, "did you mean 'scale'"),
        ("file: data.npz", "file: dota.npz", 5, "there is no file dota.npz"),
        ("held_out: out", "held_out: ys", 8, "has a row twice"),
        ("held_out: out", "held_out: 1.5", 8, "a share between 0 and 1"),
        ("held_out: out", "held_out: out\n  train: out", 9, "belongs to train and to another"),
        ("model: net.yaml", "modle: net.yaml", 2, "did you mean 'model'"),
        ("model: net.yaml", "model: gone.yaml", 2, "gone.yaml"),
        ("model: net.yaml", "model: nowhere.mod:make", 2, "cannot import"),
        ("batch_size: 8", "batch_size: 9", 9, "expected: 8"),
        ("batch_size: 8", "batch_size: -1", 9, "a whole number from 1"),
        ("epochs: 6", "epochs: many", 10, "a whole number from 1"),
        ("seed: 4", "seed: 1.5", 11, "whole number"),
        ("seed: 4", "shuffle: 3", 11, "true or false"),
        ("loss: sparse", "loss: spars", 12, "did you mean 'sparse_cat"),
        ("adamw", "adamx", 13, "did you mean 'adam'"),
        ("lr: 0.02", "lr: -1", 13, "lr of AdamW is a number of at least 0"),
        ("lr: 0.02", "lr: fast", 13, "lr"),
        ("lr: 0.02", "lr: .nan", 13, "lr must be a number"),
        ("lr: 0.02", "lr: 0.02, momentum: 1", 13, "no key 'momentum'"),
        ("then: cosine", "then: cosin", 14, "did you mean 'cosine'"),
        ("warmup_steps: 4", "warmup_steps: 0", 14, "at least 1 step"),
        ("[accuracy, loss]", "[accuracies]", 15, "did you mean 'accuracy'"),
        ("target: tiny", "executor: null_", 16, "one of numpy, onnxruntime, auto"),
        ("target: tiny", "recompute: some", 16, "recompute is none, cheap or all"),
        ("target: tiny", "clip_grad_norm: 0", 16, "norm above 0"),
        ("target: tiny", "accumulation_steps: 0", 16, "a whole number from 1"),
        ("target: tiny", "precision: int8", 16, "floating type"),
        ("target: tiny", "checkpoints: {folder: c, every: often}", 16, "50 steps or 2 epochs"),
        ("target: tiny", "output: model.onnx", 16, ".ttb or .safetensors"),
        ("target: tiny", "accumulation_steps: 99", 3, "less data than one step takes"),
    ],
)
def test_a_mistake_is_named_with_its_line_before_the_first_step(
    cli: Cli, small: Path, old: str, new: str, line: int, said: str
) -> None:
    changed((old, new))
    done = cli("run", "train.yaml", "--result_file=r.jsonl")
    assert done.code in (2, 3) and said in done.err, done.err
    assert f"train.yaml:{line}" in done.err, done.err
    assert "Traceback" not in done.err and not Path("r.jsonl").exists()


def said_by(done: Any) -> list[tuple[int, str]]:
    """Line and sentence of each defect that was listed."""
    found = re.findall(r"^  - train\.yaml:(\d+): (.*) \[\w+\]$", done.err, re.MULTILINE)
    return [(int(line), text) for line, text in found]


def test_defects_of_form_machine_weights_model_and_data_are_listed_at_once(
    cli: Cli, small: Path
) -> None:
    changed(
        ("model: net.yaml", "model: nett.yaml\nweights: gone.npz"),
        ("labels: ys", "labels: yss"),
        ("held_out: out", "held_out: 1.5"),
        ("epochs: 6", "epochs: many"),
        ("adamw", "adamx"),
        ("[accuracy, loss]", "[accuracies]"),
        ("target: tiny", "target: tinny"),
    )
    done = cli("run", "train.yaml", "--result_file=r.jsonl")
    assert done.code == 3 and "Traceback" not in done.err and not Path("r.jsonl").exists()
    assert "train.yaml is not a sound training: 7 defects" in done.err
    lines_said = said_by(done)
    assert [line for line, _ in lines_said] == [2, 3, 9, 11, 14, 16, 17]
    wanted = ("nett.yaml", "gone.npz", "1.5", "many", "adamx", "accuracies", "'tiny'")
    for (_, text), part in zip(lines_said, wanted, strict=True):
        assert part in text, done.err


def test_defects_of_a_model_and_of_the_data_are_listed_at_once(cli: Cli, small: Path) -> None:
    (small / "net.yaml").write_text(NET.replace("Relu(s)", "Reluu(s)"))
    changed(("labels: ys", "labels: yss"), ("inputs: {x: xs}", "inputs: {x: few}"),
            ("held_out: out", "held_out: real"))  # fmt: skip
    done = cli("run", "train.yaml")
    assert done.code == 3
    assert [line for line, _ in said_by(done)] == [2, 6, 8], done.err
    assert said_by(done)[0][1].startswith("net.yaml:10: unknown operator 'Reluu'"), done.err
    assert "did you mean 'ys'" in done.err and "not a list of row numbers" in done.err


def test_the_defects_of_a_model_alone_are_told_as_the_module_tells_them(
    cli: Cli, small: Path
) -> None:
    (small / "net.yaml").write_text(NET.replace("Relu(s)", "Reluu(s)").replace("Gemm", "Gem"))
    done = cli("run", "train.yaml")
    assert done.code == 3 and "net.yaml is not a sound module: 2 defects" in done.err
    assert "not a sound training" not in done.err


def test_a_file_of_arrays_that_is_not_there_is_one_defect(cli: Cli, small: Path) -> None:
    changed(("file: data.npz", "file: dota.npz"), ("target: tiny", "target: tinny"))
    assert [line for line, _ in said_by(cli("run", "train.yaml"))] == [5, 16]


def test_a_machine_of_the_command_line_is_its_own_mistake(cli: Cli, small: Path) -> None:
    done = cli("run", "train.yaml", "--device=tinny")
    assert done.code == 2 and "did you mean 'tiny'" in done.err and "train.yaml" not in done.err


def test_nan_in_the_data_is_named_with_its_row(cli: Cli, small: Path) -> None:
    with np.load("data.npz") as arrays:
        held = dict(arrays)
    held["xs"][7, 2] = np.nan
    np.savez("data.npz", **held)
    done = cli("run", "train.yaml")
    assert done.code == 3 and "'xs' holds NaN, first in row 7" in done.err


def test_an_operator_without_a_gradient_is_named_at_compile_time(cli: Cli, small: Path) -> None:
    lines = "  - m = Reshape(h, [8, 4, 4])\n  - d = Det(m)\n  - c = Reshape(d, [8, 1])\n"
    text = NET.replace("  - y = MatMul(h, w2)", lines + "  - r = MatMul(h, w2)\n  - y = Mul(r, c)")
    (small / "net.yaml").write_text(text)
    done = cli("run", "train.yaml")
    assert done.code == 3 and "no gradient for Det at net.yaml:12" in done.err, done.err
    assert "train.yaml:2" in done.err


def test_a_training_runs_without_modules(cli: Cli, small: Path) -> None:
    done = cli("run", "train.yaml", "--module=a.ttb")
    assert done.code == 2 and "a training runs alone" in done.err


@pytest.mark.parametrize("word", ["--input=x=@x.npy", "--loops=2", "--dry_run"])
def test_words_that_a_training_would_ignore_are_refused(cli: Cli, small: Path, word: str) -> None:
    done = cli("run", "train.yaml", word)
    assert done.code == 2 and f"{word.split('=')[0]} has no meaning for a training" in done.err


def test_words_of_trainings_are_refused_elsewhere(cli: Cli, small: Path) -> None:
    done = cli("run", "--module=a.ttb", "--init=ones", "--resume")
    assert done.code == 2 and "--resume is for trainings" in done.err
    assert cli("run", "train.yaml", "--resume").code == 2


def test_a_file_is_of_the_form_that_knows_most_of_its_keys() -> None:
    assert form_of_text(TRAIN, "t.yaml") == "training"
    assert form_of_text("modules: {}\nsteps: []\nname: x", "t.yaml") == "pipeline"
    assert form_of_text("name: x", "t.yaml") == "pipeline"
    assert form_of_text("modle: x\nepochs: 3", "t.yaml") == "training"


def test_programs_compiled_for_another_optimizer_are_refused(cli: Cli, small: Path) -> None:
    model = stitch.compile("net.yaml", optimizer=stitch.AdamW(lr=0.5, weight_decay=0.3),
                           target="tiny", loss="sparse_categorical_crossentropy")  # fmt: skip
    model.save_programs(".")
    assert model.training is not None
    npz_of(model.training.values)
    changed(("model: net.yaml", "model: [forward.ttb, loss.ttb, backward.ttb, update.ttb]"))
    missing = cli("run", "train.yaml")
    assert missing.code == 2 and "hold no weights" in missing.err
    changed(("model: net.yaml", "model: [forward.ttb, loss.ttb, backward.ttb, update.ttb]\n"
             "weights: start.npz"))  # fmt: skip
    done = cli("run", "train.yaml")
    assert done.code == 2 and "another optimizer, or other settings" in done.err
    assert "train.yaml:14" in done.err


@pytest.mark.parametrize("count", [40, pytest.param(120, marks=pytest.mark.campaign("hostile"))])
def test_mutated_trainings_run_or_are_refused_in_words(cli: Cli, small: Path, count: int) -> None:
    chance = random.Random(SEED)
    text = TRAIN + "checkpoints: {folder: c, every: 9 epochs, keep: 2}\ntrainable: [w1, b1]\n"
    words = [found.span() for found in re.finditer(r"[\w.]+", text)]
    codes = set()
    for _ in range(count):
        start, end = chance.choice(words)
        Path("m.yaml").write_text(text[:start] + chance.choice(JUNK) + text[end:])
        done = cli("run", "m.yaml", "--epochs=1", "--checkpoint_dir=c", "--resume")
        codes.add(done.code)
        # A learning rate that is drawn may be one that no loss survives.
        diverged = done.code == 6 and "the loss of step" in done.err
        assert done.code in (0, 2, 3, 4) or diverged, done.err
        if diverged:
            # What it saved cannot be gone on from: no later one would run.
            shutil.rmtree("c", ignore_errors=True)
        assert "internal error" not in done.err and "Traceback" not in done.err
    assert codes >= {0, 3}
