"""Checkpoints: tensors and facts in files that another process goes on from.

Comes in: tensors by name, facts about a training as plain data. Goes out: files in the safetensors
format, in a folder that belongs to one training at a time; and back, checked. Must not know:
devices, what trains.
"""

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
