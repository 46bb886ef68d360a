"""Metrics on data that is not trained on: accuracy and loss.

Comes in: a model in training, a part of the data. Goes out: numbers by name. The predictions run
on the training's own device, from its weights in place; the loss is the loss's own graph over all
predictions at once. Must not know: the order of training, files.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from stitch import api
from stitch.cli.train.trained_model import TrainModel
from stitch.documents import DataPart
from stitch.machine import load_machine
from stitch.program import Array, DataType, ValueType
from stitch.training import TrainingInstance


class Evaluation:
    """Measures a model in training on parts of the data."""

    def __init__(
        self, model: TrainModel, instance: TrainingInstance, metrics: Sequence[str]
    ) -> None:
        self._model = model
        self._instance = instance
        self._metrics = tuple(metrics)
        self._losses: dict[int, api.CompiledModel] = {}

    def measure(self, part: DataPart) -> dict[str, float]:
        """The metrics of one part, by name."""
        if not self._metrics:
            return {}
        predicted = self.predict(part)
        measures = {"accuracy": _accuracy, "loss": self._loss}
        return {name: measures[name](predicted, part.labels) for name in self._metrics}

    def predict(self, part: DataPart) -> Array:
        """The predictions for all rows; the last batch is filled up and cut."""
        size, predictions = self._model.batch_size, []
        for start in range(0, len(part), size):
            which = np.minimum(np.arange(start, start + size), len(part) - 1)
            batch = {name: array[which] for name, array in part.inputs.items()}
            predictions.append(self._instance.predict(**batch).numpy())
        return np.concatenate(predictions)[: len(part)].astype(np.float32)

    def _loss(self, predicted: Array, labels: Array) -> float:
        count = len(predicted)
        if count not in self._losses:
            loss = self._model.training.loss
            graph = loss.graph(ValueType(predicted.shape, DataType.FLOAT32))
            self._losses[count] = api.compile(graph, target=load_machine("host"))
        wanted = self._losses[count].graph.input_type(1)
        if not wanted.shape:  # A loss that does not look at its label.
            labels = np.zeros((), wanted.data_type.dtype)
        return float(np.asarray(self._losses[count](predicted, labels)))


def _accuracy(predicted: Array, labels: Array) -> float:
    """The share of right answers: the largest logit, or the sign of a single one."""
    if labels.shape != predicted.shape:
        return float(np.mean(predicted.argmax(axis=1) == labels))
    if predicted.ndim > 1 and predicted.shape[1] > 1 and labels.dtype.kind == "f":
        return float(np.mean(predicted.argmax(axis=1) == labels.argmax(axis=1)))
    return float(np.mean((predicted > 0) == (labels > 0.5)))
