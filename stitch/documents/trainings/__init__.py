"""Training files: which model, on which data, towards which loss, by which steps.

Comes in: the path of a YAML file. Goes out: a `TrainFile` and the data it names, or every defect
with its line. Must not know: commands, devices.
"""

from stitch.documents.trainings.choices import completed_schedule
from stitch.documents.trainings.training_data import (
    DataPart,
    ModelTypes,
    TrainData,
    data_defects,
    read_data,
    shuffled,
)
from stitch.documents.trainings.training_form import (
    OUTPUTS,
    TRAINING_KEYS,
    Every,
    TrainDraft,
    TrainFile,
    parse_every,
    read_training,
)

__all__ = [
    "OUTPUTS", "TRAINING_KEYS", "DataPart", "Every", "ModelTypes", "TrainData", "TrainDraft",
    "TrainFile", "completed_schedule", "data_defects", "parse_every", "read_data",
    "read_training", "shuffled",
]  # fmt: skip
