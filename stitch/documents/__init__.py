"""Pipeline files in YAML: read, check and run them. Names are imported on first use."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stitch.on_demand import names_on_demand

if TYPE_CHECKING:
    from stitch.documents.pipeline_form import (
        PIPELINE_KEYS,
        PipelineFile,
        load_pipeline,
        pipeline_json_schema,
    )
    from stitch.documents.recognition import MACHINE, MODULE, kind_of
    from stitch.documents.yaml_pipeline import CheckedPipeline, YamlPipeline, read_pipeline
else:
    __getattr__, __dir__ = names_on_demand(
        __name__,
        {
            "pipeline_form": "PIPELINE_KEYS PipelineFile load_pipeline pipeline_json_schema",
            "recognition": "MACHINE MODULE kind_of",
            "yaml_pipeline": "CheckedPipeline YamlPipeline read_pipeline",
        },
    )

__all__ = [
    "MACHINE", "MODULE", "PIPELINE_KEYS", "CheckedPipeline", "PipelineFile",
    "YamlPipeline", "kind_of", "load_pipeline", "pipeline_json_schema", "read_pipeline",
]  # fmt: skip
