"""`stitch-run train.yaml`: a training from its file to its weights.

Comes in: parsed words. Goes out: `run_training`, which writes checkpoints, results and the trained
model, and gives an exit code; the words that trainings add to `stitch-run`, and the refusal of
those that do not go with a form of run. Must not know: chains, pipelines.
"""

from typing import TYPE_CHECKING

from stitch.on_demand import names_on_demand

if TYPE_CHECKING:
    from stitch.cli.train.train_command import run_training
    from stitch.cli.train.training_words import add_training_words, refuse_strangers
else:
    __getattr__, __dir__ = names_on_demand(
        __name__,
        {"train_command": "run_training", "training_words": "add_training_words refuse_strangers"},
    )

__all__ = ["add_training_words", "refuse_strangers", "run_training"]
