"""What is left of a training: the model for inference, its weights, a picture of its loss.

Comes in: a model in training, paths. Goes out: files, each whole or not at all. Must not know: how
it was trained.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from stitch import api
from stitch.cli.output_checks import (
    LINES,
    TTB,
    OutputChecks,
    model_kind,
    picture_kind,
    trace_kind,
)
from stitch.cli.train.trained_model import TrainModel
from stitch.documents import OUTPUTS, TrainFile
from stitch.errors import StitchError, UsageError
from stitch.files import FileBatch, resolved
from stitch.program import Array, InputKind
from stitch.training import TrainingInstance, graph_of, is_checkpoint, with_weights, write_tensors
from stitch.ttb import content_of


def output_paths(file: TrainFile, words: Sequence[str]) -> tuple[str | Path, ...]:
    """The files to write: those of the command line, else the file's; raises `UsageError`.

    `-`, for the model, is standard output.
    """
    if not words:
        return file.outputs
    paths = tuple(word if word == "-" else Path(word.removeprefix("@")) for word in words)
    for path in paths:
        if path != "-" and Path(path).suffix.lower() not in OUTPUTS:
            raise UsageError(
                "a training writes the model for inference (.ttb) or its weights (.safetensors)",
                got=f"--output={path}",
            )
    return paths


def check_outputs(
    checks: OutputChecks, words: argparse.Namespace, file: TrainFile, outputs: Sequence[str | Path]
) -> None:
    """Refuse outputs that would do harm: of the words, and of the file. Raises `UsageError`."""
    checks.add_folder(words.checkpoint_dir or ".", "--checkpoint_dir")
    folder = words.checkpoint_dir or file.checkpoints.folder
    if words.result_file is not None:
        checks.add(words.result_file, LINES, "--result_file", own_folder=folder)
    if words.plot is not None:
        kind = picture_kind("-.png" if words.plot == "-" else words.plot)
        checks.add(words.plot, kind, "--plot", own_folder=folder)
    if words.trace is not None:
        checks.add(words.trace, trace_kind(words.trace), "--trace", own_folder=folder)
    for path in outputs:
        checks.add(
            path, model_kind(path), "--output" if words.output else "output", own_folder=folder
        )
    for path in (words.result_file, words.plot, words.trace, *outputs):
        if path is not None and folder is not None and is_checkpoint(resolved(path), Path(folder)):
            raise UsageError(
                "this is the name of a checkpoint, in their folder", where=str(path),
                remedy="choose another name, or another folder",
            )  # fmt: skip
    checks.reads(file.sources)


def weights_of(instance: TrainingInstance) -> dict[str, Array]:
    """Parameters and buffers by name; float32 where programs compute in another type."""
    state = [s.name for s in instance.programs.forward.inputs if s.kind is InputKind.STATE]
    return instance.parameters() | {name: instance.get_tensor(name) for name in state}


def add_outputs(
    batch: FileBatch, paths: Sequence[str | Path], model: TrainModel, instance: TrainingInstance
) -> None:
    """Adds the trained model to what is written at the end."""
    for path in paths:
        if model_kind(path) == TTB:
            batch.add(path, content_of(trained_model(model, instance).binary))
        else:
            batch.add(path, partial(write_tensors, tensors=weights_of(instance)))


def trained_model(model: TrainModel, instance: TrainingInstance) -> api.CompiledModel:
    """The model for inference, its weights inside: for `stitch-run --module`."""
    graph = with_weights(graph_of(model.programs.evaluation), weights_of(instance))
    return api.compile(graph, target=model.target)


@dataclass(slots=True)
class LossPicture:
    """A picture of the loss: (step, loss) of every step, and of the validation part."""

    path: str | Path
    losses: list[tuple[int, float]] = field(default_factory=list)
    validation: list[tuple[int, float]] = field(default_factory=list)

    @staticmethod
    def of(word: str | None) -> LossPicture | None:
        """The picture that was asked for; raises `UsageError` where it cannot be drawn."""
        if word is None:
            return None
        try:
            from stitch.cli.train import loss_picture
        except ImportError as error:
            raise UsageError(
                "drawing a picture needs matplotlib, which is not installed",
                where=f"--plot={word}", remedy="pip install stitch-runtime[plot]",
            ) from error  # fmt: skip
        if word == "-":
            return LossPicture(word)
        path = Path(word)
        known = loss_picture.kinds()
        if path.suffix.lower().removeprefix(".") not in known:
            raise UsageError("there are no such pictures", where=f"--plot={word}",
                             expected="." + ", .".join(known))  # fmt: skip
        return LossPicture(path)

    def remember(self, lines: Sequence[Mapping[str, Any]]) -> None:
        """Take over the losses of a run that this one goes on from, out of its result lines."""
        for line in lines:
            looked = line.get("validation")
            if line["kind"] == "step":
                self.losses.append((line["step"], line["loss"]))
            elif looked and "loss" in looked:
                self.validation.append((line["step"], looked["loss"]))

    def add(self, batch: FileBatch, title: str) -> None:
        """Draw it, for what is written at the end; raises `StitchError`."""
        from stitch.cli.train import loss_picture

        kind = Path(self.path).suffix.lower().removeprefix(".") or "png"
        try:
            data = loss_picture.drawn(title, kind, self.losses, self.validation)
        except (ValueError, RuntimeError) as error:
            raise StitchError(f"the picture cannot be drawn: {error}") from error
        batch.add(self.path, data)
