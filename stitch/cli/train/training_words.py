"""The words of `stitch-run` that are for trainings, and which words go with which form of run.

Comes in: a parser, parsed words. Goes out: options, or `UsageError` naming a word that would be
ignored. Must not know: models, devices.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from stitch.cli.parser import add_options, positive
from stitch.errors import UsageError

if TYPE_CHECKING:
    from stitch.documents import Every

#: Words of all kinds of runs that a training takes as well; `output` has another form there.
SHARED = (
    "pipeline", "files", "debug", "max_memory", "device", "list_devices", "executor", "threads",
    "window",
    "check_memory", "max_copies", "explain", "memory", "result_file", "output",
)  # fmt: skip
TRAINING = (
    "checkpoint_dir", "checkpoint_every", "keep_checkpoints", "resume", "epochs", "plot",
)  # fmt: skip


def add_training_words(parser: argparse.ArgumentParser) -> None:
    """Adds the options that only trainings have."""
    group = parser.add_argument_group(
        "training (stitch-run train.yaml)",
        "The form of the file: docstring of stitch/documents/trainings/training_form.py. "
        "--output=FILE.ttb writes the trained model for inference, --output=FILE.safetensors its "
        "weights; --result_file is written as JSON lines; --max_copies counts for each step after "
        "the third. Ctrl-C finishes the step, saves, and ends with exit code 130 (SIGTERM: 143).",
    )
    add_options(
        group,
        ("--checkpoint_dir", {"metavar": "FOLDER", "help": "save checkpoints there"}),
        ("--checkpoint_every", {"type": _every, "metavar": "N[steps|epochs]",
                                "help": "how often (default: 1epoch)"}),
        ("--keep_checkpoints", {"type": positive, "metavar": "N",
                                "help": "how many of the newest stay (default: 3)"}),
        ("--resume", {"action": "store_true",
                      "help": "go on from the newest checkpoint, bit for bit; from the start if "
                      "there is none"}),
        ("--epochs", {"type": positive, "metavar": "N", "help": "instead of the file's"}),
        ("--plot", {"metavar": "FILE", "help": "a picture of the loss, such as loss.png (needs "
                    "matplotlib: the extra plot)"}),
    )  # fmt: skip


def refuse_strangers(parser: argparse.ArgumentParser, words: argparse.Namespace, form: str) -> None:
    """Raise `UsageError` for words that mean nothing in this form of run."""
    for word, value in vars(words).items():
        given = value != parser.get_default(word)
        if given and form == "training" and word not in (*SHARED, *TRAINING):
            raise UsageError(f"--{word} has no meaning for a training", where=words.pipeline)
        if given and form != "training" and word in TRAINING:
            raise UsageError(
                f"--{word} is for trainings", remedy="stitch-run train.yaml", where=words.pipeline
            )


def _every(text: str) -> Every:
    from stitch.documents import parse_every

    every = parse_every(text)
    if every is None:
        raise argparse.ArgumentTypeError(
            f"takes a number of steps or epochs such as 50, 50steps or 2epochs, not {text!r}"
        )
    return every
