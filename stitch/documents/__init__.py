"""YAML files that say what to run.

A pipeline file is read into a checked, frozen description that can be called; other kinds of files
are recognised by their keys. Names are loaded on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from stitch.on_demand import names_on_demand

if TYPE_CHECKING:
    from stitch.documents.pipeline_form import PIPELINE_KEYS, PipelineFile, load_pipeline
    from stitch.documents.recognition import (
        MACHINE,
        MODULE,
        PIPELINE,
        form_of,
        form_of_text,
    )
    from stitch.documents.yaml_pipeline import CheckedPipeline, YamlPipeline, read_pipeline
else:
    __getattr__, __dir__ = names_on_demand(
        __name__,
        {
            "pipeline_form": "PIPELINE_KEYS PipelineFile load_pipeline",
            "recognition": "MACHINE MODULE PIPELINE form_of form_of_text",
            "yaml_pipeline": "CheckedPipeline YamlPipeline read_pipeline",
        },
    )

__all__ = [
    "MACHINE", "MODULE", "PIPELINE", "PIPELINE_KEYS", "CheckedPipeline", "PipelineFile",
    "YamlPipeline", "form_of", "form_of_text", "load_pipeline", "read_pipeline",
]  # fmt: skip
