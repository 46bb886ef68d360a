"""`stitch-run train.yaml --resume`: processes that are killed, interrupted and starved."""

from __future__ import annotations

import random
import re
import resource
import signal
from pathlib import Path
from typing import Any

import pytest

from stitch.training import TrainingInstance
from stitch.training.checkpoints.checkpoint_folder import read_checkpoint
from stitch.training.checkpoints.checkpoint_format import read_tensors
from tests.support.run_seed import SEED
from tests.support.training.commands import (
    DIGITS,
    RANDOM_NET,
    Cli,
    changed,
    lines,
    losses,
    ran,
    started,
    wait_for_step,
)

VARIANTS = {
    "plain": (),
    "momentum": (("adamw, lr: 0.02", "sgd, lr: 0.05, momentum: 0.9, nesterov: true"),),
    "micro-batches": (("target: tiny", "accumulation_steps: 2\nclip_grad_norm: 1"),),
    "bfloat16": (("target: tiny", "precision: bfloat16\nrecompute: all"),),
    "in order": (("target: tiny", "shuffle: false\nalgorithm: greedy\ntarget: tiny"),),
    "onnxruntime": (("target: tiny", "executor: onnxruntime"),),
    "dropout": (("net.yaml", "random_net:make"), ("{x: xs}", "xs")),
}


def test_every_kept_checkpoint_is_whole_after_a_kill(tmp_path: Path) -> None:
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
    out, err = process.communicate(timeout=200)
    assert process.returncode == code, err
    final = lines("r.jsonl")[-1]
    assert (final["result"], final["exit_code"]) == ("interrupted", code)
    (saved,) = (small / "c").iterdir()
    assert read_checkpoint(saved).step == final["step"] == losses("r.jsonl")[-1][0] >= 20
    assert f"interrupted after step {final['step']}" in err and "--resume" in err
    assert "Traceback" not in err and "training    small" in out
    assert not (small / "never.ttb").exists()


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
    assert code == 6 and "step-00000020.safetensors" in err and "File too large" in err, err
    assert err.count("error:") == 1 and "Traceback" not in err
    assert {path.name: path.read_bytes() for path in (small / "c").iterdir()} == before


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
    assert done.code == 6 and "1 copy in one step, at most 0 allowed" in done.err


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
    assert done.code == 2 and "got: the results of a run" in done.err
    assert Path("r.json").read_text() == '{"result": "pass"}\n'
