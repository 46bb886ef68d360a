"""Write the digits that `train_digits.c` trains on: images from 0 to 1, then labels.

`python digits_file.py digits.bin` reads `digits.npz` of the example `digits`.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

import stitch

#: The folders of examples: beside this one, or in the installed package.
EXAMPLES = (Path(__file__).resolve().parent.parent, Path(stitch.__file__).parent / "examples")


def digits() -> tuple[np.ndarray, np.ndarray]:
    """Return the images to train on, float32 [1437, 8, 8], and their labels, int64."""
    found = [folder / "digits" / "digits.npz" for folder in EXAMPLES]
    with np.load(next(file for file in found if file.exists())) as data:
        rows = data["train"]
        images = data["images"][rows].reshape(-1, 8, 8) / np.float32(16)
        return images, data["labels"][rows].astype(np.int64)


if __name__ == "__main__":
    images, labels = digits()
    Path(sys.argv[1]).write_bytes(images.tobytes() + labels.tobytes())
