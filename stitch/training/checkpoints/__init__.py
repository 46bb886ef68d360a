"""Checkpoints: tensors and facts in files that another process goes on from."""

from stitch.training.checkpoints.checkpoint_folder import (
    Checkpoint,
    CheckpointFolder,
    differences,
    read_checkpoint,
    refuse_other,
)
from stitch.training.checkpoints.checkpoint_format import read_tensors, write_tensors

__all__ = [
    "Checkpoint", "CheckpointFolder", "differences", "read_checkpoint",
    "read_tensors", "refuse_other", "write_tensors",
]  # fmt: skip
