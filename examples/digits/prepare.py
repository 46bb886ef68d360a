"""Makes `digits.npz` from the digits that scikit-learn bundles. Needs the `dev` extra; run once.

Goes out: `images` (uint8 [1797, 64], 0 to 16), `labels` (uint8 [1797]), and the row numbers of a
stratified split, `train` and `held_out` (uint16): of each digit, 20 % is held out, seed 0.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

HERE = Path(__file__).resolve().parent
HELD_OUT_SHARE = 0.2
SEED = 0


def main() -> None:
    """Write `digits.npz` beside this file."""
    digits = load_digits()
    images = digits.data.astype(np.uint8)
    labels = digits.target.astype(np.uint8)
    train, held_out = train_test_split(
        np.arange(len(labels), dtype=np.uint16),
        test_size=HELD_OUT_SHARE,
        stratify=labels,
        random_state=SEED,
    )
    np.savez_compressed(
        HERE / "digits.npz", images=images, labels=labels, train=train, held_out=held_out
    )
    print(f"{len(train)} digits to train on, {len(held_out)} held out")


if __name__ == "__main__":
    main()
