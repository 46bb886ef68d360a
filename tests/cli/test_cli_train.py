"""`stitch-run train.yaml`: the whole way, in processes that are killed, interrupted and starved."""

from __future__ import annotations

import json
import os
import random
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.image import imread

import stitch
from stitch.cli import train_plot
from stitch.frontend.train_yaml import load_training
from stitch.frontend.yaml_forms import form_of_text
from stitch.program import Array
from stitch.training import TrainingInstance
from stitch.training.checkpoint_format import read_tensors, write_tensors
from stitch.training.checkpoints import read_checkpoint

Cli = Callable[..., Any]
DIGITS = Path(__file__).resolve().parents[2] / "examples" / "digits"
RUN = "import sys; from stitch.cli.run import main; sys.exit(main())"
SEED = int(os.environ.get("STITCH_SEED", random.randrange(2**30)))

NET = """\
name: net
inputs:
  x: {shape: [8, 4], type: float32}
parameters:
  w1: {shape: [4, 16], init: {kind: randn, seed: 1, scale: 0.7}}
  b1: {shape: [16], init: zeros}
  w2: {shape: [16, 3], init: {kind: randn, seed: 2, scale: 0.3}}
operations:
  - s = Gemm(x, w1, b1)
  - h = Relu(s)
  - y = MatMul(h, w2)
outputs: [y]
"""
TRAIN = """\
name: small
model: net.yaml
data:
  file: data.npz
  inputs: {x: xs}
  labels: ys
  validation: 0.2
  held_out: out
batch_size: 8
epochs: 6
seed: 4
loss: sparse_categorical_crossentropy
optimizer: {name: adamw, lr: 0.02}
schedule: {name: warmup, warmup_steps: 4, then: cosine}
metrics: [accuracy, loss]
target: tiny
"""


@pytest.fixture
def small(here: Path) -> Path:
    """A folder with a small training: 120 rows in three classes, 20 of them held out."""
    rng = np.random.default_rng(9)
    xs = rng.standard_normal((120, 4)).astype(np.float32)
    ys = np.argmax(xs[:, :3] + 0.1 * xs[:, 3:], axis=1).astype(np.int32)
    np.savez(
        "data.npz", xs=xs, ys=ys, out=np.arange(100, 120), bad=ys + 1, few=ys[:20], real=xs[:, 0]
    )
    (here / "net.yaml").write_text(NET)
    (here / "train.yaml").write_text(TRAIN)
    return here


def changed(*pairs: tuple[str, str], file: str = "train.yaml", text: str = TRAIN) -> None:
    """Write the training with some of its text replaced."""
    for old, new in pairs:
        assert old in text, old
        text = text.replace(old, new, 1)
    Path(file).write_text(text)


def lines(path: str | Path) -> list[dict[str, Any]]:
    """The lines of a result file."""
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def losses(path: str | Path) -> list[tuple[int, float]]:
    """Step and loss of each step in a result file."""
    return [(line["step"], line["loss"]) for line in lines(path) if line["kind"] == "step"]


def started(*words: str, **options: Any) -> subprocess.Popen[str]:
    """`stitch-run` in a process of its own."""
    return subprocess.Popen(
        [sys.executable, "-c", RUN, *words],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options,
    )  # fmt: skip


def ran(*words: str, **options: Any) -> tuple[int, str, str]:
    """Exit code, output and errors of `stitch-run` in a process of its own."""
    process = started(*words, **options)
    out, err = process.communicate(timeout=120)
    return process.returncode, out, err


def wait_for_step(process: subprocess.Popen[str], path: Path, step: int) -> None:
    """Return once a step has been noted, or the process has ended."""
    while process.poll() is None:
        if path.exists() and path.read_bytes().count(b'"kind": "step"') >= step:
            return
        time.sleep(0.002)


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
    found = load_training(DIGITS / "train.yaml")
    assert found.data.validation is not None and found.data.held_out is not None
    with np.load(DIGITS / "digits.npz") as arrays:
        assert not set(arrays["train"]) & set(arrays["held_out"])


def test_in_the_steady_state_only_batches_come_in_and_losses_go_out(digits: Path) -> None:
    out = (digits / "out.txt").read_text()
    found = re.findall(r"^  (copy|evict|move|bounce|aside|read) +x(\d+) (\d+) B", out, re.M)
    assert [kind for kind, _, _ in found] == ["copy", "copy", "read"]
    steps = {int(times) for _, times, _ in found}
    assert steps == {40}
    assert [int(nbytes) for _, _, nbytes in found] == [32 * 64 * 4, 32 * 8, 40 * 4]
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


def test_killed_at_random_steps_and_resumed_it_ends_with_the_same_weights(
    digits: Path, tmp_path: Path
) -> None:
    print(f"STITCH_SEED={SEED}")
    chance = random.Random(SEED)
    results = tmp_path / "results.jsonl"
    words = (
        str(DIGITS / "train.yaml"), f"--checkpoint_dir={tmp_path / 'c'}", "--checkpoint_every=7",
        f"--result_file={results}", "--resume",
    )  # fmt: skip
    for step in sorted(chance.sample(range(1, 800), 3)):
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


def test_every_kept_checkpoint_is_whole_after_a_kill(tmp_path: Path) -> None:
    print(f"STITCH_SEED={SEED}")
    chance, results = random.Random(SEED + 1), tmp_path / "r.jsonl"
    words = (str(DIGITS / "train.yaml"), f"--checkpoint_dir={tmp_path / 'c'}",
             "--checkpoint_every=1", f"--result_file={results}")  # fmt: skip
    process = started(*words)
    wait_for_step(process, results, chance.randrange(5, 200))
    process.kill()
    process.communicate()
    kept = [p for p in (tmp_path / "c").iterdir() if not p.name.startswith(".")]
    assert 1 <= len(kept) <= 4
    assert all(read_checkpoint(path).step == int(path.stem[5:]) for path in kept)


# -- stopping --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_finishes_the_step_saves_and_ends_with_a_code_of_its_own(
    small: Path, number: int, code: int
) -> None:
    changed(("epochs: 6", "epochs: 100000"))
    process = started("train.yaml", "--checkpoint_dir=c", "--result_file=r.jsonl",
                      "--checkpoint_every=1000000", "--output=never.ttb")  # fmt: skip
    wait_for_step(process, small / "r.jsonl", 20)
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert process.returncode == code, err
    final = lines("r.jsonl")[-1]
    assert (final["result"], final["exit_code"]) == ("interrupted", code)
    (saved,) = (small / "c").iterdir()
    assert read_checkpoint(saved).step == final["step"] == losses("r.jsonl")[-1][0] >= 20
    assert f"interrupted after step {final['step']}" in err and "--resume" in err
    assert "Traceback" not in err and "training    small" in out
    assert not (small / "never.ttb").exists()


RANDOM_NET = """\
import torch
def make():
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.BatchNorm1d(16),
                              torch.nn.ReLU(), torch.nn.Dropout(0.3), torch.nn.Linear(16, 3))
    return net.train(), (torch.zeros(8, 4),)
"""
VARIANTS = {
    "plain": (),
    "momentum": (("adamw, lr: 0.02", "sgd, lr: 0.05, momentum: 0.9, nesterov: true"),),
    "micro-batches": (("target: tiny", "accumulation_steps: 2\nclip_grad_norm: 1"),),
    "bfloat16": (("target: tiny", "precision: bfloat16\nrecompute: all"),),
    "in order": (("target: tiny", "shuffle: false\nalgorithm: greedy\ntarget: tiny"),),
    "onnxruntime": (("target: tiny", "executor: onnxruntime"),),
    "dropout": (("net.yaml", "random_net:make"), ("{x: xs}", "xs")),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_resumed_training_goes_on_in_the_middle_of_an_epoch(
    cli: Cli, small: Path, variant: str
) -> None:
    (small / "random_net.py").write_text(RANDOM_NET)
    changed(*VARIANTS[variant])
    every = ("--checkpoint_every=7", "--keep_checkpoints=99")
    assert cli("run", "train.yaml", "--checkpoint_dir=w", "--result_file=w.jsonl").code == 0
    begun = cli("run", "train.yaml", "--checkpoint_dir=c", "--result_file=r.jsonl", *every)
    assert begun.code == 0, begun.err
    for path in (small / "c").iterdir():
        if int(path.stem[5:]) > 14:
            path.unlink()
    done = cli("run", "train.yaml", "--checkpoint_dir=c", "--resume", "--result_file=r.jsonl")
    assert done.code == 0 and "resumed after step 14" in done.err
    assert losses("r.jsonl") == losses("w.jsonl")
    last = max((small / "w").iterdir())
    found, expected = read_tensors(small / "c" / last.name), read_tensors(last)
    assert found.metadata == expected.metadata
    assert (small / "c" / last.name).read_bytes() == last.read_bytes()


def test_resuming_a_training_that_is_done_only_judges_it(cli: Cli, small: Path) -> None:
    first = cli("run", "train.yaml", "--checkpoint_dir=c", "--result_file=r.jsonl")
    again = cli("run", "train.yaml", "--checkpoint_dir=c", "--resume", "--output=m.ttb")
    assert first.code == again.code == 0
    told = [re.search(r"^held out.*$", done.out, re.M) for done in (first, again)]
    assert told[0] and told[1] and told[0][0] == told[1][0]
    assert Path("m.ttb").exists()


def test_without_a_checkpoint_resume_begins_at_the_start_and_says_so(cli: Cli, small: Path) -> None:
    done = cli("run", "train.yaml", "--checkpoint_dir=c", "--resume", "--epochs=1")
    assert done.code == 0 and "no checkpoint in c: from the start" in done.err


def test_checkpoints_of_an_earlier_run_are_not_mixed_with_new_ones(cli: Cli, small: Path) -> None:
    assert cli("run", "train.yaml", "--checkpoint_dir=c", "--epochs=1").code == 0
    done = cli("run", "train.yaml", "--checkpoint_dir=c", "--epochs=1")
    assert done.code == 2 and "checkpoints of an earlier run" in done.err


@pytest.mark.parametrize(
    ("old", "new", "file", "told"),
    [
        ("[16, 3]", "[16, 3]", "net.yaml", None),
        ("  - h = Relu(s)", "  - h = Tanh(s)", "net.yaml",
         "operation 1: h = Relu(s){} in the checkpoint, h = Tanh(s){} here"),
        ("  b1: {shape: [16], init: zeros}\n", "  b2: {shape: [16], init: zeros}\n", "net.yaml",
         "tensor b1: only in the checkpoint"),
        ("seed: 4", "seed: 5", "train.yaml", "seed: 4 in the checkpoint, 5 here"),
        ("adamw", "adam", "train.yaml", "optimizer: adamw in the checkpoint, adam here"),
        ("validation: 0.2", "validation: 0.3", "train.yaml", "rows to train on: 80"),
        ("x: xs", "x: {array: xs, scale: 2}", "train.yaml", "checksum of these rows"),
    ],
)  # fmt: skip
def test_the_checkpoint_of_another_training_is_refused_with_what_differs(
    cli: Cli, small: Path, old: str, new: str, file: str, told: str | None
) -> None:
    assert cli("run", "train.yaml", "--checkpoint_dir=c", "--epochs=1").code == 0
    text = (small / file).read_text()
    if "b2" in new:
        text = text.replace("w1, b1)", "w1, b2)")
    changed((old, new), file=file, text=text)
    done = cli("run", "train.yaml", "--checkpoint_dir=c", "--resume", "--epochs=1")
    if told is None:
        assert done.code == 0, done.err
        return
    assert done.code == 4 and "another training" in done.err, done.err
    assert told in done.err and "step-00000010.safetensors" in done.err


def test_settings_may_change_and_are_told_of(cli: Cli, small: Path) -> None:
    assert cli("run", "train.yaml", "--checkpoint_dir=c", "--epochs=1").code == 0
    changed(("lr: 0.02", "lr: 0.01"))
    done = cli("run", "train.yaml", "--checkpoint_dir=c", "--resume", "--epochs=2")
    assert done.code == 0 and "optimizer's lr: 0.02 in the checkpoint, 0.01 here" in done.err


def test_a_full_disk_leaves_the_older_checkpoint_and_gives_one_error(small: Path) -> None:
    changed(("epochs: 6", "epochs: 2"))
    assert ran("train.yaml", "--checkpoint_dir=c", "--epochs=1")[0] == 0
    before = {path.name: path.read_bytes() for path in (small / "c").iterdir()}
    size = max(map(len, before.values())) - 100

    def no_room() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))

    code, _, err = ran("train.yaml", "--checkpoint_dir=c", "--resume", preexec_fn=no_room)
    assert code == 6 and "cannot save step-00000020.safetensors: File too large" in err, err
    assert err.count("error:") == 1 and "Traceback" not in err
    assert {path.name: path.read_bytes() for path in (small / "c").iterdir()} == before


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
        ("epochs: 6", "epochs: many", 10, "a number"),
        ("seed: 4", "seed: 1.5", 11, "whole number"),
        ("seed: 4", "shuffle: 3", 11, "true or false"),
        ("loss: sparse", "loss: spars", 12, "there is no loss"),
        ("adamw", "adamx", 13, "did you mean 'adam'"),
        ("lr: 0.02", "lr: -1", 13, "lr of AdamW is a number of at least 0"),
        ("lr: 0.02", "lr: fast", 13, "lr"),
        ("lr: 0.02", "lr: .nan", 13, "lr must be a number"),
        ("lr: 0.02", "lr: 0.02, momentum: 1", 13, "no key 'momentum'"),
        ("then: cosine", "then: cosin", 14, "did you mean 'cosine'"),
        ("warmup_steps: 4", "warmup_steps: 0", 14, "at least 1 step"),
        ("[accuracy, loss]", "[accuracies]", 15, "no metric 'accuracies'"),
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


@pytest.mark.parametrize("word", ["--module=a.ttb", "--input=x=@x.npy", "--loops=2", "--dry_run"])
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


# -- what it can do --------------------------------------------------------------------------------


def test_the_result_file_has_a_line_for_each_step_each_epoch_and_the_end(
    cli: Cli, small: Path
) -> None:
    done = cli("run", "train.yaml", "--result_file=r.jsonl")
    assert done.code == 0 and done.err == ""
    found = lines("r.jsonl")
    kinds = [line["kind"] for line in found]
    assert kinds.count("step") == 60 and kinds.count("epoch") == 6 and kinds[-1] == "final"
    assert set(found[0]) == {"kind", "step", "epoch", "loss", "rate", "seconds"}
    assert [line["step"] for line in found if line["kind"] == "step"] == list(range(1, 61))
    rates = [line["rate"] for line in found if line["kind"] == "step"]
    assert rates[:4] == pytest.approx([0.005, 0.01, 0.015, 0.02])
    assert rates[-1] < 1e-4
    assert set(found[-2]["validation"]) == {"accuracy", "loss"}
    assert found[-1]["held_out"]["accuracy"] > 0.6


@pytest.mark.parametrize("executor", ["numpy", "onnxruntime", "torch"])
@pytest.mark.parametrize("recompute", ["none", "all"])
def test_accumulation_clipping_and_recomputation_train_on_all_executors(
    cli: Cli, small: Path, executor: str, recompute: str
) -> None:
    changed(("target: tiny", f"executor: {executor}\nrecompute: {recompute}\nclip_grad_norm: 1\n"
             "accumulation_steps: 2\ntarget: tiny"))  # fmt: skip
    done = cli("run", "train.yaml", "--result_file=r.jsonl", "--max_copies=9")
    assert done.code == 0, done.err
    found = losses("r.jsonl")
    assert len(found) == 30 and found[-1][1] < found[0][1]
    assert lines("r.jsonl")[-1]["last_planned_step"] <= 3


def npz_of(values: Mapping[str, Array]) -> None:
    np.savez("start.npz", **values)  # type: ignore[arg-type]


def test_the_same_network_from_four_forms_of_file_trains_alike(cli: Cli, small: Path) -> None:
    plain = TRAIN.replace("schedule: {name: warmup, warmup_steps: 4, then: cosine}\n", "")
    changed(text=plain)
    assert cli("run", "train.yaml", "--result_file=yaml.jsonl").code == 0
    model = stitch.compile("net.yaml", optimizer=stitch.AdamW(lr=0.5), target="tiny",
                           loss="sparse_categorical_crossentropy")  # fmt: skip
    with Path("net.json").open("w") as file:
        model.dump(file)
    model.save_programs("programs")
    assert model.training is not None
    npz_of(model.training.values)
    (small / "nets.py").write_text(
        "from pathlib import Path\nfrom stitch.frontend.yaml_module import load_module\n"
        "def make():\n    return load_module(Path(__file__).parent / 'net.yaml')\n"
    )
    listed = ", ".join(f"programs/{r}.ttb" for r in ("forward", "loss", "backward", "update"))
    forms = {
        "json": "model: net.json",
        "python": "model: nets.py:make",
        "programs": f"model: [{listed}]\nweights: start.npz",
    }
    for name, text in forms.items():
        changed(("model: net.yaml", text), text=plain)
        done = cli("run", "train.yaml", f"--result_file={name}.jsonl")
        assert done.code == 0, done.err
        assert losses(f"{name}.jsonl") == losses("yaml.jsonl"), name
        assert lines(f"{name}.jsonl")[-1]["held_out"] == lines("yaml.jsonl")[-1]["held_out"]


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


def test_torch_modules_and_onnx_models_with_a_symbolic_batch_train(cli: Cli, small: Path) -> None:
    (small / "torch_net.py").write_text(RANDOM_NET)
    text = TRAIN.replace("inputs: {x: xs}", "inputs: xs")
    changed(("model: net.yaml", "model: torch_net:make"), text=text)
    done = cli("run", "train.yaml", "--result_file=t.jsonl", "--output=t.ttb")
    assert done.code == 0, done.err
    assert lines("t.jsonl")[-1]["held_out"]["accuracy"] > 0.6
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    rng = np.random.default_rng(0)
    weights = {"w1": rng.standard_normal((4, 16)), "w2": rng.standard_normal((16, 3))}
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w1"], ["s"]), helper.make_node("Relu", ["s"], ["h"]),
         helper.make_node("MatMul", ["h", "w2"], ["y"])],
        "net", [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 4])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 3])],
        [numpy_helper.from_array(a.astype(np.float32), n) for n, a in weights.items()],
    )  # fmt: skip
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)],
                                ir_version=10), "net.onnx")  # fmt: skip
    changed(("model: net.yaml", "model: net.onnx"))
    done = cli("run", "train.yaml", "--result_file=o.jsonl")
    assert done.code == 0, done.err
    assert lines("o.jsonl")[-1]["held_out"]["accuracy"] > 0.6


TWO_INPUTS = """\
name: two
inputs:
  word: {shape: [8], type: int64}
  x: {shape: [8, 4], type: float32}
parameters:
  table: {shape: [5, 4], init: {kind: randn, seed: 1}}
  w: {shape: [4, 3], init: {kind: randn, seed: 2}}
operations:
  - e = Gather(table, word)
  - s = Add(e, x)
  - y = MatMul(s, w)
outputs: [y]
"""


def test_several_inputs_come_from_files_of_several_kinds(cli: Cli, small: Path) -> None:
    with np.load("data.npz") as arrays:
        xs, ys = arrays["xs"], arrays["ys"]
    rows = np.arange(120)
    np.save("words.npy", (rows % 5).astype(np.uint8))
    with Path("more.safetensors").open("wb") as file:
        write_tensors(file, {"pixels": (xs * 100).astype(np.int16), "other": xs})
    (small / "net.yaml").write_text(TWO_INPUTS)
    pixels = "{array: pixels, file: more.safetensors, scale: 0.01, shift: -0.5}"
    test = "{file: test.npz, inputs: {word: w, x: x}, labels: y}"
    np.savez("test.npz", w=rows[:30] % 5, x=xs[:30] - 0.5, y=ys[:30])
    changed(
        ("{x: xs}", f"{{x: {pixels}, word: words.npy}}"), ("held_out: out", f"held_out: {test}")
    )
    done = cli("run", "train.yaml", "--result_file=r.jsonl", "--epochs=20")
    assert done.code == 0, done.err
    found = losses("r.jsonl")
    assert len(found) == 20 * 12 and found[-1][1] < found[0][1]
    assert lines("r.jsonl")[-1]["held_out"]["accuracy"] > 0.7
    changed(("{x: xs}", f"{{x: {pixels}}}"))
    assert "the model also needs word" in cli("run", "train.yaml").err
    changed(("{x: xs}", f"{{x: {pixels}, word: {{array: pixels, file: more.safetensors}}}}"))
    assert "input word takes rows of []" in cli("run", "train.yaml").err
    changed(("{x: xs}", f"{{x: {pixels}, word: {{array: words.npy, scale: 2}}}}"))
    assert "takes int64: scale and shift cannot be" in cli("run", "train.yaml").err


def test_a_trained_batch_normalization_uses_its_running_statistics(cli: Cli, small: Path) -> None:
    line = "  - n, m_next, v_next = BatchNormalization(s, g, b1, m, v, training_mode=1)\n"
    text = NET.replace("  - h = Relu(s)", line + "  - h = Relu(n)")
    text = text.replace("  w2:", "  g: {shape: [16], init: ones}\n  w2:", 1)
    state = "  m: {shape: [16], type: float32, kind: state}\n"
    text = text.replace("parameters:", state + state.replace("m:", "v:") + "parameters:", 1)
    text = text.replace("outputs: [y]", "outputs: {y: {}, m: {value: m_next}, v: {value: v_next}}")
    (small / "net.yaml").write_text(text)
    npz_of({"m": np.zeros(16, np.float32), "v": np.ones(16, np.float32)})
    changed(("model: net.yaml", "model: net.yaml\nweights: start.npz"))
    done = cli("run", "train.yaml", "--output=m.ttb", "--output=m.safetensors", "--epochs=3")
    assert done.code == 0, done.err
    weights = read_tensors("m.safetensors").tensors
    assert set(weights) == {"w1", "b1", "g", "w2", "m", "v"} and weights["m"].any()
    with np.load("data.npz") as arrays:
        x = arrays["xs"][:8]
    with stitch.open_device("tiny") as device:
        found = device.load("m.ttb")(x).numpy()
    s = x @ weights["w1"] + weights["b1"]
    n = (s - weights["m"]) / np.sqrt(weights["v"] + 1e-5) * weights["g"] + weights["b1"]
    np.testing.assert_allclose(found, np.maximum(n, 0) @ weights["w2"], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("loss", "metrics", "labels"),
    [("mse", "[loss]", "real2"), ("bce_with_logits", "[accuracy, loss]", "hot"),
     ("categorical_crossentropy", "[accuracy, loss]", "hot"), ("identity", "[]", "ys")],
)  # fmt: skip
def test_each_loss_trains_and_its_metrics_are_those_of_numpy(
    cli: Cli, small: Path, loss: str, metrics: str, labels: str
) -> None:
    with np.load("data.npz") as arrays:
        held = dict(arrays)
    held["hot"] = np.eye(3, dtype=np.float32)[held["ys"]]
    held["real2"] = np.tanh(held["xs"][:, :3])
    np.savez("data.npz", **held)
    lr = "lr: 0.0" if loss == "identity" else "lr: 0.02"
    changed(("sparse_categorical_crossentropy", loss), ("[accuracy, loss]", metrics),
            ("labels: ys", f"labels: {labels}"), ("lr: 0.02", lr))  # fmt: skip
    done = cli("run", "train.yaml", "--result_file=r.jsonl", "--output=w.safetensors")
    assert done.code == 0, done.err
    final = lines("r.jsonl")[-1]["held_out"]
    w, x, y = read_tensors("w.safetensors").tensors, held["xs"][100:], held[labels][100:]
    pred = np.maximum(x @ w["w1"] + w["b1"], 0) @ w["w2"]
    shifted = pred - pred.max(axis=1, keepdims=True)
    log = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    expected = {
        "mse": lambda: np.mean((pred - y) ** 2),
        "bce_with_logits": lambda: np.mean(np.logaddexp(0, pred) - pred * y),
        "categorical_crossentropy": lambda: -np.mean((log * y).sum(axis=1)),
    }
    assert final == {} or final["loss"] == pytest.approx(expected[loss](), rel=1e-4)
    assert (final == {}) == (loss == "identity")


def test_a_picture_needs_matplotlib_and_says_which_extra_brings_it(
    cli: Cli, small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.delitem(sys.modules, "stitch.cli.train_plot")
    monkeypatch.delattr("stitch.cli.train_plot")
    done = cli("run", "train.yaml", "--plot=loss.png")
    assert done.code == 2 and "pip install stitch-runtime[plot]" in done.err


def test_a_picture_shows_the_losses_of_all_steps_also_those_before_a_resume(
    cli: Cli, small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: dict[str, Any] = {}
    draw = train_plot.drawn

    def noted(title: str, kind: str, losses: Any, validation: Any) -> bytes:
        drawn.update(batch=list(losses), validation=list(validation))
        return draw(title, kind, losses, validation)

    monkeypatch.setattr(train_plot, "drawn", noted)
    words = ("--checkpoint_dir=c", "--result_file=r.jsonl")
    assert cli("run", "train.yaml", "--epochs=2", *words).code == 0
    done = cli("run", "train.yaml", *words, "--resume", "--plot=loss.png")
    assert done.code == 0, done.err
    assert drawn["batch"] == losses("r.jsonl") and len(drawn["batch"]) == 60
    assert [step for step, _ in drawn["validation"]] == [10, 20, 30, 40, 50, 60]
    picture = imread("loss.png")
    assert picture.shape[:2] == (450, 800) and np.ptp(picture) > 0.5
    done = cli("run", "train.yaml", "--plot=loss.doc")
    assert done.code == 2 and ".png," in done.err and ".svg" in done.err


def test_more_copies_than_allowed_are_an_error(
    cli: Cli, small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert cli("run", "train.yaml", "--max_copies=0").code == 0
    # As if a program moved weights about: one more write in every step.
    plain = TrainingInstance.update

    def moving(instance: TrainingInstance) -> Any:
        instance.set_tensor("w1", instance.get_tensor("w1"))
        return plain(instance)

    monkeypatch.setattr(TrainingInstance, "update", moving)
    done = cli("run", "train.yaml", "--max_copies=0")
    assert done.code == 6 and "1 copies in one step, at most 0 allowed" in done.err


def test_results_that_cannot_be_written_end_the_run_and_keep_what_was_learned(
    small: Path,
) -> None:
    code, _, err = ran("train.yaml", "--checkpoint_dir=c", "--checkpoint_every=1000",
                       "--result_file=/dev/full")  # fmt: skip
    assert code == 6 and "No space left on device" in err and err.count("error:") == 1
    assert [path.name for path in (small / "c").iterdir()] == ["step-00000001.safetensors"]


def test_results_of_something_else_are_not_written_over_by_a_resumed_run(
    cli: Cli, small: Path
) -> None:
    assert cli("run", "train.yaml", "--checkpoint_dir=c", "--epochs=1").code == 0
    Path("r.json").write_text('{"result": "pass"}\n')
    words = ("--checkpoint_dir=c", "--resume", "--result_file=r.json")
    done = cli("run", "train.yaml", *words)
    assert done.code == 3 and "not the results of a training" in done.err
    assert Path("r.json").read_text() == '{"result": "pass"}\n'


JUNK = (
    "", "~", "-1", "0", "1e400", ".nan", "true", "[]", "{}", "[1, 2]", "{a: 1}", "'", "&a", "*a",
    "!!python/object:x", "99999999999999999999", "\0", "net.yaml", "..", "a:b",
)  # fmt: skip


def test_mutated_trainings_run_or_are_refused_in_words(cli: Cli, small: Path) -> None:
    print(f"STITCH_SEED={SEED}")
    chance = random.Random(SEED)
    text = TRAIN + "checkpoints: {folder: c, every: 9 epochs, keep: 2}\ntrainable: [w1, b1]\n"
    words = [found.span() for found in re.finditer(r"[\w.]+", text)]
    codes = set()
    for _ in range(120):
        start, end = chance.choice(words)
        Path("m.yaml").write_text(text[:start] + chance.choice(JUNK) + text[end:])
        done = cli("run", "m.yaml", "--epochs=1", "--checkpoint_dir=c", "--resume")
        codes.add(done.code)
        assert done.code in (0, 2, 3, 4), done.err
        assert "internal error" not in done.err and "Traceback" not in done.err
    assert codes >= {0, 3}
