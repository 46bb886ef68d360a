"""Documents: files that say what to run, a pipeline or a training.

Comes in: paths of YAML files. Goes out: frozen descriptions of what they say, checked; a pipeline
that can be called, the data of a training. Must not know: commands. Names are loaded when they are
asked for: a pipeline needs no trainings.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from stitch.on_demand import names_on_demand

if TYPE_CHECKING:
    from stitch.documents.pipelines import (
        CheckedPipeline,
        PipelineFile,
        YamlPipeline,
        load_pipeline,
        read_pipeline,
    )
    from stitch.documents.recognition import (
        MACHINE,
        MODULE,
        PIPELINE,
        TRAINING,
        form_of,
        form_of_text,
    )
    from stitch.documents.trainings import (
        OUTPUTS,
        DataPart,
        Every,
        ModelTypes,
        TrainData,
        TrainDraft,
        TrainFile,
        completed_schedule,
        data_defects,
        parse_every,
        read_data,
        read_training,
        shuffled,
    )
else:
    __getattr__, __dir__ = names_on_demand(
        __name__,
        {
            "pipelines": "CheckedPipeline PipelineFile YamlPipeline load_pipeline read_pipeline",
            "recognition": "MACHINE MODULE PIPELINE TRAINING form_of form_of_text",
            "trainings": "OUTPUTS DataPart Every ModelTypes TrainData TrainDraft TrainFile "
            "completed_schedule data_defects parse_every read_data read_training "
            "shuffled",
        },
    )

__all__ = [
    "MACHINE", "MODULE", "OUTPUTS", "PIPELINE", "TRAINING", "CheckedPipeline", "DataPart",
    "Every", "ModelTypes", "PipelineFile", "TrainData", "TrainDraft", "TrainFile",
    "YamlPipeline", "completed_schedule", "data_defects", "form_of", "form_of_text",
    "load_pipeline", "parse_every", "read_data", "read_pipeline",
    "read_training", "shuffled",
]  # fmt: skip
