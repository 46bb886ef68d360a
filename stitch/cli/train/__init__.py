"""`stitch-run train.yaml`: a training from its file to its weights.

Comes in: parsed words. Goes out: `run_training`, which writes checkpoints, results and the trained
model, and gives an exit code. Must not know: chains, pipelines.
"""

from stitch.cli.train.train_command import run_training

__all__ = ["run_training"]
