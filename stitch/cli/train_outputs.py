"""What is left of a training: the model for inference, its weights, a picture of its loss.

Comes in: a model in training, paths. Goes out: files, each whole or not at all. Must not know: how
it was trained.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from stitch import api
from stitch.cli.train_model import TrainModel
from stitch.errors import StitchError, UsageError
from stitch.files import FileBatch, write_file
from stitch.frontend.train_yaml import OUTPUTS, TrainFile
from stitch.program import Array, InputKind
from stitch.training import TrainingInstance
from stitch.training.checkpoint_format import write_tensors
from stitch.training.inference import graph_of, with_weights


def output_paths(file: TrainFile, words: Sequence[str]) -> tuple[Path, ...]:
    """The files to write: those of the command line, else the file's; raises `UsageError`."""
    if not words:
        return file.outputs
    paths = tuple(Path(word.removeprefix("@")) for word in words)
    for path in paths:
        if path.suffix.lower() not in OUTPUTS:
            raise UsageError(
                "a training writes the model for inference (.ttb) or its weights (.safetensors)",
                got=f"--output={path}",
            )
    return paths


def weights_of(instance: TrainingInstance) -> dict[str, Array]:
    """Parameters and buffers by name; float32 where programs compute in another type."""
    state = [s.name for s in instance.programs.forward.inputs if s.kind is InputKind.STATE]
    return instance.parameters() | {name: instance.get_tensor(name) for name in state}


def write_outputs(paths: Sequence[Path], model: TrainModel, instance: TrainingInstance) -> None:
    """Write the trained model, all files or none; raises `StitchError`."""
    batch = FileBatch()
    for path in paths:
        if path.suffix.lower() == ".ttb":
            batch.add(path, trained_model(model, instance).encode())
        else:
            batch.add(path, partial(write_tensors, tensors=weights_of(instance)))
    batch.commit()


def trained_model(model: TrainModel, instance: TrainingInstance) -> api.CompiledModel:
    """The model for inference, its weights inside: for `stitch-run --module`."""
    graph = with_weights(graph_of(model.programs.evaluation), weights_of(instance))
    return api.compile(graph, target=model.target)


@dataclass(slots=True)
class Picture:
    """A picture of the loss: (step, loss) of every step, and of the validation part."""

    path: Path
    losses: list[tuple[int, float]] = field(default_factory=list)
    validation: list[tuple[int, float]] = field(default_factory=list)

    @staticmethod
    def of(word: str | None) -> Picture | None:
        """The picture that was asked for; raises `UsageError` where it cannot be drawn."""
        if word is None:
            return None
        try:
            from stitch.cli import train_plot
        except ImportError as error:
            raise UsageError(
                "drawing a picture needs matplotlib, which is not installed",
                where=f"--plot={word}", remedy="pip install stitch-runtime[plot]",
            ) from error  # fmt: skip
        path = Path(word)
        known = train_plot.kinds()
        if path.suffix.lower().removeprefix(".") not in known:
            raise UsageError("there are no such pictures", where=f"--plot={word}",
                             expected="." + ", .".join(known))  # fmt: skip
        return Picture(path)

    def remember(self, lines: Sequence[Mapping[str, Any]]) -> None:
        """Take over the losses of a run that this one goes on from, out of its result lines."""
        for line in lines:
            looked = line.get("validation")
            if line["kind"] == "step":
                self.losses.append((line["step"], line["loss"]))
            elif looked and "loss" in looked:
                self.validation.append((line["step"], looked["loss"]))

    def write(self, title: str) -> None:
        """Draw it; raises `StitchError` where it cannot be written."""
        from stitch.cli import train_plot

        kind = self.path.suffix.lower().removeprefix(".")
        try:
            data = train_plot.drawn(title, kind, self.losses, self.validation)
        except (ValueError, RuntimeError) as error:
            raise StitchError(f"the picture cannot be drawn: {error}") from error
        write_file(self.path, data)
