"""Checkpoints of a training from the shell: when they are made, and going on from one.

Comes in: words, a training file, a model in training. Goes out: checkpoints, and a training that
goes on as if it had never stopped. Must not know: how steps are done.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stitch.cli.command import say_aside
from stitch.cli.train.trained_model import TrainModel
from stitch.cli.train.training_loop import Course
from stitch.documents import Every, TrainData, TrainFile
from stitch.errors import UsageError
from stitch.graph import ComputationGraph
from stitch.program import ABSENT
from stitch.training import (
    Checkpoint,
    CheckpointFolder,
    TrainingInstance,
    differences,
    graph_of,
    refuse_other,
)


@dataclass(frozen=True, slots=True)
class TrainingFacts:
    """What a checkpoint says of its training; see `Checkpoint`."""

    identity: Mapping[str, Any]
    settings: Mapping[str, Any]


def facts_of(
    file: TrainFile, model: TrainModel, data: TrainData, course: Course,
    instance: TrainingInstance,
) -> TrainingFacts:  # fmt: skip
    """The facts of this training."""
    optimizer = dict(instance.optimizer.config())
    identity = {
        "loss": dict(instance.loss_fn.config()),
        "optimizer": optimizer.pop("optimizer"),
        "trained": [parameter.name for parameter in model.programs.parameters],
        "precision": file.options.precision.value,
        "batch_size": course.batch_size,
        "accumulation_steps": course.batches_per_step,
        "seed": course.seed,
        "shuffle": course.shuffle,
        "rows to train on": len(data.train),
        "checksum of these rows": data.train.checksum(),
        **{f"tensor {n}": f"{a.dtype}{list(a.shape)}" for n, a in instance.state_dict().items()},
        **{
            f"operation {i}": text
            for i, text in enumerate(_operations(graph_of(model.programs.evaluation)))
        },
    }
    settings = {
        **{f"optimizer's {name}": value for name, value in optimizer.items()},
        "clip_grad_norm": file.options.clip_grad_norm,
        "recompute": file.options.recompute,
        "algorithm": file.algorithm,
        "epochs": course.epochs,
        "target": model.target,
        "executor": instance.device.executor,
    }
    return TrainingFacts(identity, settings)


def _operations(graph: ComputationGraph) -> list[str]:
    """One line for each operation: `h = Gemm(x, w, b){transB=1}`."""
    lines = []
    for operation in graph.operations:
        names = [
            [graph.values[v].name if v != ABSENT else "_" for v in side]
            for side in (operation.outputs, operation.inputs)
        ]
        settings = ", ".join(f"{k}={v}" for k, v in sorted(operation.attributes.items()))
        word = f"{operation.domain}.{operation.op}" if operation.domain else operation.op
        lines.append(f"{', '.join(names[0])} = {word}({', '.join(names[1])}){{{settings}}}")
    return lines


class Keeper:
    """Saves checkpoints where, and as often as, it was asked to; else does nothing."""

    def __init__(self, folder: CheckpointFolder | None, every: Every, facts: TrainingFacts) -> None:
        self.folder = folder
        self.every = every
        self.facts = facts
        #: The newest checkpoint of this run.
        self.saved: Path | None = None

    @staticmethod
    def of(words: argparse.Namespace, file: TrainFile, facts: TrainingFacts) -> Keeper:
        """As the words say, else the file; raises `UsageError` for `--resume` without a folder."""
        entry = file.checkpoints
        place = entry.folder if words.checkpoint_dir is None else Path(words.checkpoint_dir)
        folder = None
        if place is not None:
            folder = CheckpointFolder(place, words.keep_checkpoints or entry.keep)
        elif words.resume or words.checkpoint_every or words.keep_checkpoints:
            raise UsageError("there is no folder for checkpoints", remedy="--checkpoint_dir=FOLDER")
        return Keeper(folder, words.checkpoint_every or entry.every, facts)

    def resume(self, instance: TrainingInstance, *, wanted: bool) -> Mapping[str, Any]:
        """Bring the training to where it was; gives the checkpoint's `progress`.

        Raises `UsageError` where checkpoints would be mixed up, `IncompatibleError` for those of
        another training.
        """
        if self.folder is None:
            return {}
        missing = self.folder.prepare()
        if missing is not None:
            say_aside(
                f"stitch-run: note: {self.folder.folder} cannot be locked ({missing}): see to it "
                "that no other training saves there"
            )
        if not wanted:
            if self.folder.files:
                raise UsageError(
                    "the folder holds checkpoints of an earlier run",
                    where=str(self.folder.folder),
                    remedy="--resume to go on from them, or another --checkpoint_dir",
                )
            return {}
        latest = self.folder.newest(lambda told: say_aside(f"stitch-run: warning: {told}"))
        if latest is None:
            say_aside(f"stitch-run: note: no checkpoint in {self.folder.folder}: from the start")
            return {}
        path, checkpoint = latest
        refuse_other(checkpoint, self.facts.identity, path)
        for told in differences(checkpoint.settings, self.facts.settings):
            say_aside(f"stitch-run: note: {told}")
        instance.load_state_dict(checkpoint.state)
        say_aside(f"stitch-run: note: resumed after step {checkpoint.step} ({path.name})")
        self.saved = path
        return checkpoint.progress

    def close(self) -> None:
        """Let other trainings have the folder."""
        if self.folder is not None:
            self.folder.close()

    def is_due(self, step: int, course: Course) -> bool:
        """Whether a checkpoint is to be made after this step."""
        unit = course.steps_per_epoch if self.every.unit == "epoch" else 1
        return step % (self.every.count * unit) == 0

    def save(self, instance: TrainingInstance, progress: Mapping[str, Any]) -> None:
        """Make a checkpoint now; raises `StitchError` where there is no room."""
        if self.folder is not None:
            facts = self.facts
            self.saved = self.folder.save(
                Checkpoint(
                    instance.steps, instance.state_dict(), facts.identity, facts.settings, progress
                )
            )

    def told(self) -> str:
        """Where it can go on, for the message at the end."""
        return "" if self.saved is None else f"; --resume goes on from {self.saved}"
