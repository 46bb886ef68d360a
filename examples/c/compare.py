"""Train the network of `train_digits.c` in Python; compare its weights with those of C.

`python compare.py trained.json` ends with an error if a bit differs.
"""

from __future__ import annotations

import sys

import numpy as np
from digits_file import digits

import stitch

BATCH, EPOCHS = 32, 10


def trained() -> dict[str, np.ndarray]:
    """Return the weights after the same steps, from Python."""
    b = stitch.ComputationGraphBuilder("digits")
    x = b.flat(b.input("image", (BATCH, 8, 8), "float32"))
    x = b.relu(b.dense(x, 96))
    x = b.relu(b.dense(x, 48))
    b.output("scores", b.dense(x, 10))
    loss = stitch.losses.CrossEntropyLoss()
    model = stitch.compile(b.build(), optimizer=stitch.Adam(lr=0.002), loss=loss, target="host")
    images, labels = digits()
    with model.start() as training:
        for _ in range(EPOCHS):
            for row in range(0, len(images) - BATCH + 1, BATCH):
                loss(model(images[row : row + BATCH]), labels[row : row + BATCH]).backward()
                training.update()
                training.zero_grad()
        return training.parameters()


if __name__ == "__main__":
    model = stitch.CompiledModel.load(sys.argv[1])
    for name, weights in trained().items():
        other = model.get_tensor(name)
        if weights.tobytes() != other.tobytes():
            raise SystemExit(f"{name} differs by up to {np.abs(weights - other).max()}")
        print(f"{name}: {weights.size} equal elements")
