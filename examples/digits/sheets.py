"""Sheets of paper with handwritten digits on them: draws them, knows what is where, writes PNGs.

Comes in: which digits of `digits.npz` may be used, a seed. Goes out: grey images, uint8 [192, 256],
uneven, ruled and noisy as scans are, and of each digit its label and its box in pixels: left, top,
right, bottom. Needs Pillow.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

HERE = Path(__file__).resolve().parent
#: Rows and columns of a sheet, how many digits are on one, and how large.
SHEET = (192, 256)
COUNTS = (6, 12)
SIDES = (22, 36)
#: Pixels between the boxes of two digits, at least.
GAP = 3

Pixels = NDArray[np.uint8]
Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Sheet:
    """An image, and the truth about it: boxes [digits, 4], labels [digits]."""

    image: Pixels
    boxes: Floats
    labels: Pixels


def digits_of(part: str) -> tuple[Pixels, Pixels]:
    """Images [n, 8, 8] from 0 to 16 and labels [n], of the part `train` or `held_out`."""
    with np.load(HERE / "digits.npz") as digits:
        rows = digits[part]
        return digits["images"][rows].reshape(-1, 8, 8), digits["labels"][rows]


def draw_sheets(part: str, count: int, seed: int) -> list[Sheet]:
    """As many sheets, with digits of a part of the data; the same for the same seed."""
    random = np.random.default_rng(seed)
    images, labels = digits_of(part)
    return [_draw(images, labels, random) for _ in range(count)]


def write_sheets(sheets: list[Sheet], folder: Path) -> list[Path]:
    """An image file for each sheet."""
    files = [folder / f"sheet{i}.png" for i in range(len(sheets))]
    for sheet, file in zip(sheets, files, strict=True):
        Image.fromarray(sheet.image).save(file)
    return files


def _draw(images: Pixels, labels: Pixels, random: np.random.Generator) -> Sheet:
    ink = np.zeros(SHEET, np.float32)
    boxes: list[tuple[int, int, int, int]] = []
    chosen: list[int] = []
    wanted = random.integers(*COUNTS, endpoint=True)
    while len(chosen) < wanted:
        side = int(random.integers(*SIDES, endpoint=True))
        top = int(random.integers(0, SHEET[0] - side, endpoint=True))
        left = int(random.integers(0, SHEET[1] - side, endpoint=True))
        box = (left, top, left + side, top + side)
        if any(_touch(box, other) for other in boxes):
            continue
        boxes.append(box)
        chosen.append(int(random.integers(len(images))))
        small = Image.fromarray(images[chosen[-1]] * np.uint8(15))
        large = np.asarray(small.resize((side, side), Image.Resampling.BICUBIC), np.float32) / 240
        ink[top : top + side, left : left + side] = large * random.uniform(0.7, 1)
    down, right = random.uniform(-20, 20, 2)
    shade = np.add.outer(np.linspace(-down, down, SHEET[0]), np.linspace(-right, right, SHEET[1]))
    paper = random.uniform(200, 235) + shade / 2
    paper[:: int(random.integers(30, 50))] -= 12  # Ruled.
    page = paper * (1 - 0.85 * ink) + random.normal(0, 3, SHEET)
    return Sheet(page.clip(0, 255).astype(np.uint8), np.array(boxes, np.float32), labels[chosen])


def _touch(one: tuple[int, int, int, int], other: tuple[int, int, int, int]) -> bool:
    return (
        one[0] < other[2] + GAP and other[0] < one[2] + GAP
        and one[1] < other[3] + GAP and other[1] < one[3] + GAP
    )  # fmt: skip
