"""Pipeline files: separately compiled binaries, and how data flows through them."""

from stitch.documents.pipelines.pipeline_form import PIPELINE_KEYS, PipelineFile, load_pipeline
from stitch.documents.pipelines.yaml_pipeline import CheckedPipeline, YamlPipeline, read_pipeline

__all__ = [
    "PIPELINE_KEYS", "CheckedPipeline", "PipelineFile", "YamlPipeline", "load_pipeline",
    "read_pipeline",
]  # fmt: skip
