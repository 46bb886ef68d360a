"""Documents: YAML files that say what to run.

A pipeline's file is read into a checked, frozen description that can be called; other files are
recognised by their keys. Names are loaded when they are asked for.
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
        form_of,
        form_of_text,
    )
else:
    __getattr__, __dir__ = names_on_demand(
        __name__,
        {
            "pipelines": "CheckedPipeline PipelineFile YamlPipeline load_pipeline read_pipeline",
            "recognition": "MACHINE MODULE PIPELINE form_of form_of_text",
        },
    )

__all__ = [
    "MACHINE", "MODULE", "PIPELINE", "CheckedPipeline", "PipelineFile", "YamlPipeline", "form_of",
    "form_of_text", "load_pipeline", "read_pipeline",
]  # fmt: skip
