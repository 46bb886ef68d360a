"""Train the network of `network.yaml` on handwritten digits; a killed run resumes, bit for bit.

`python train.py` saves a checkpoint after each epoch. `--resume` continues from the newest one and
ends with the same weights as a run that was never stopped.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import Progress

import stitch
from stitch.training import Checkpoint, CheckpointFolder, graph_of, refuse_other, with_weights

HERE = Path(__file__).resolve().parent
BATCH, SEED, WARMUP = 32, 0, 40


def main() -> None:
    """Train, save a checkpoint after each epoch, measure on the held-out digits."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--checkpoints", type=Path, default=Path("checkpoints"), metavar="FOLDER")
    parser.add_argument("--resume", action="store_true", help="continue from the newest checkpoint")
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--output", metavar="FILE.ttb", help="write the trained model")
    words = parser.parse_args()
    folder = CheckpointFolder(words.checkpoints)
    folder.prepare()  # From here on no other training can save there.
    if folder.files and not words.resume:
        parser.error(f"{words.checkpoints} has checkpoints: --resume, or another --checkpoints")

    with np.load(HERE / "digits.npz") as digits:
        images, labels = digits["images"] / np.float32(16), digits["labels"].astype(np.int64)
        train, held_out = digits["train"], digits["held_out"]
    epoch_steps = len(train) // BATCH
    steps = words.epochs * epoch_steps
    cosine = stitch.schedules.CosineAnnealingLR(max(1, steps - WARMUP))
    schedule = stitch.schedules.WarmupLR(WARMUP, cosine)
    loss_fn = stitch.losses.CrossEntropyLoss()
    optimizer = stitch.AdamW(lr=0.006, weight_decay=0.1, schedule=schedule)
    model = stitch.compile(HERE / "network.yaml", optimizer=optimizer, loss=loss_fn)
    identity = {"batch": BATCH, "seed": SEED, "epochs": words.epochs}

    console = Console(stderr=True)
    with model.start(seed=SEED) as instance, Progress(console=console, transient=True) as progress:
        found = folder.newest(console.print)
        if found is not None:
            refuse_other(found[1], identity, found[0])
            instance.load_state_dict(found[1].state)
        bar = progress.add_task("training", total=steps, completed=instance.steps)
        for step in range(instance.steps, steps):
            epoch, index = divmod(step, epoch_steps)
            order = np.random.default_rng((SEED, epoch)).permutation(train)
            rows = order[index * BATCH : (index + 1) * BATCH]
            (loss,) = instance.step([(images[rows], labels[rows])])
            progress.update(bar, completed=step + 1)
            if index == epoch_steps - 1:
                path = folder.save(Checkpoint(step + 1, instance.state_dict(), identity))
                print(f"epoch {epoch + 1}: loss {loss:.4f}, saved {path}", flush=True)
        padded = np.resize(held_out, -(-len(held_out) // BATCH) * BATCH).reshape(-1, BATCH)
        scores = np.concatenate([instance.predict(images[rows]).numpy() for rows in padded])
        right = np.mean(scores[: len(held_out)].argmax(1) == labels[held_out])
        print(f"held out: {right:.4f} of {len(held_out)} recognised")
        if words.output:
            trained = graph_of(instance.programs.evaluation)
            stitch.compile(with_weights(trained, instance.parameters())).save(words.output)


if __name__ == "__main__":
    try:
        main()
    except stitch.StitchError as error:
        raise SystemExit(f"train.py: error: {error}") from None
