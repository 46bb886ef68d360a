"""Two small convolutional networks that read sheets, and what goes in and comes out of them.

The detector takes sheets shrunk to half, float32 [batch, 1, 96, 128], 0 is paper, more is ink. It
gives maps [batch, 4, 24, 32], one cell for 8 x 8 pixels of the sheet. The first map is a hill of
height 1 at the middle of each digit; the others are, times that hill, how far the middle lies right
of and below the cell's middle, and the side of the digit's box, all three in cells.

The classifier takes what is in boxes, float32 [batch, 144], 12 x 12 pixels from 0 (paper) to 1
(ink), and gives probabilities of the ten digits, or scores while it is trained. Needs Pillow.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

import stitch
from stitch.graph import ComputationGraph

WEIGHTS = Path(__file__).resolve().parent / "sheets.npz"
#: Pixels of a sheet that a cell of the maps stands for, each way; the cells of a sheet.
CELL = 8
CELLS = (24, 32)
#: How wide a hill is, in cells, and the least height of one.
WIDTH = 0.8
LEAST = 0.4
#: Pixels of what the classifier looks at, each way.
CUT = 12
#: Of each layer: channels that come in and go out, the kernel's side. Those of `f` are matrices.
DETECTOR = {
    "d1": (1, 8, 3),
    "d2": (8, 16, 3),
    "d3": (16, 24, 3),
    "d4": (24, 24, 3),
    "d5": (24, 4, 1),
}
CLASSIFIER = {"k1": (1, 16, 3), "k2": (16, 32, 3), "f3": (288, 32, 1), "f4": (32, 10, 1)}

Pixels = NDArray[np.uint8]
Floats = NDArray[np.float32]
Weights = Mapping[str, Floats]


def initial_weights(layers: Mapping[str, tuple[int, int, int]], seed: int) -> dict[str, Floats]:
    """He initialisation: of each layer a weight, by its name, and a bias, `bias.` and its name."""
    random = np.random.default_rng(seed)
    weights = {}
    for name, (before, after, side) in layers.items():
        shape = (after, before, side, side) if name[0] != "f" else (after, before)
        scale = np.sqrt(2 / (before * side**2))
        weights[name] = (random.standard_normal(shape) * scale).astype(np.float32)
        weights[f"bias.{name}"] = np.zeros(after, np.float32)
    return weights


def detector(weights: Weights, batch: int) -> ComputationGraph:
    """The network that finds, with these weights, for so many sheets at a time."""
    b = stitch.ComputationGraphBuilder("detector")
    x = b.input("sheet", (batch, 1, 96, 128), "float32")
    for layer in DETECTOR:
        w, c = (b.parameter(n, weights[n]) for n in (layer, f"bias.{layer}"))
        if layer == "d5":
            b.output("maps", b.conv2d(x, w, c))
        else:
            stride = 2 if layer in ("d1", "d2") else 1
            x = b.relu(b.conv2d(x, w, c, stride=stride, padding=1))
    return b.build()


def classifier(weights: Weights, batch: int, *, scores: bool = False) -> ComputationGraph:
    """The network that reads, with these weights, for so many boxes at a time."""
    b = stitch.ComputationGraphBuilder("classifier")
    x = b.reshape(b.input("cuts", (batch, CUT * CUT), "float32"), (batch, 1, CUT, CUT))
    for layer in CLASSIFIER:
        w, c = (b.parameter(n, weights[n]) for n in (layer, f"bias.{layer}"))
        if layer[0] == "k":
            x = b.pool2d(b.relu(b.conv2d(x, w, c, padding=1)), 2)
        elif layer == "f3":
            x = b.relu(b.linear(b.reshape(x, (batch, 288)), w, c))
        else:
            x = b.linear(x, w, c)
    b.output("scores" if scores else "probabilities", x if scores else b.softmax(x))
    return b.build()


# -- what goes in --------------------------------------------------------------------------------


def shrunk(image: Pixels) -> Floats:
    """A sheet as the detector takes it: [1, 1, 96, 128]."""
    rows, columns = image.shape
    small = Image.fromarray(image).resize((columns // 2, rows // 2), Image.Resampling.BOX)
    grey = np.asarray(small, np.float32)
    return ((np.median(grey) - grey) / np.float32(255))[None, None].astype(np.float32)


def cuts_of(image: Pixels, boxes: Floats) -> Floats:
    """What is in boxes [n, 4] of a sheet, as the classifier takes it: [n, 144]."""
    page, height, width = Image.fromarray(image), *image.shape
    cuts = np.zeros((len(boxes), CUT * CUT), np.float32)
    for cut, box in zip(cuts, boxes.clip(0, (width, height) * 2), strict=True):
        inside = page.resize((CUT, CUT), Image.Resampling.BOX, tuple(box.tolist()))
        ink = 255 - np.asarray(inside, np.float32).ravel()
        least, most = np.percentile(ink, (20, 98))
        cut[:] = ((ink - least) / max(most - least, 1)).clip(0, 1)
    return cuts


# -- what comes out ------------------------------------------------------------------------------


def maps_of(boxes: Floats) -> Floats:
    """What the detector is to say of a sheet with boxes [n, 4]: [4, 24, 32]."""
    rows, columns = np.mgrid[0.5 : CELLS[0], 0.5 : CELLS[1]].astype(np.float32)
    maps = np.zeros((4, *CELLS), np.float32)
    for left, top, right, bottom in boxes / np.float32(CELL):
        dx, dy = (left + right) / 2 - columns, (top + bottom) / 2 - rows
        hill = np.exp(-(dx**2 + dy**2) / (2 * WIDTH**2))
        values = hill * np.stack([np.ones_like(dx), dx, dy, np.full_like(dx, right - left)])
        # Where two digits are near, a cell tells of the nearer one.
        maps = np.where(hill > maps[0], values, maps)
    return maps


def boxes_on(maps: Floats, most: int) -> Floats:
    """The boxes that maps [4, 24, 32] tell of, the surest first: [at most `most`, 4], in pixels."""
    hill = np.pad(maps[0], 1)
    (rows, columns), (height, width) = np.mgrid[:3, :3].reshape(2, 9), CELLS
    around = [hill[r : r + height, c : c + width] for r, c in zip(rows, columns, strict=True)]
    rows, columns = np.nonzero((maps[0] >= np.max(around, axis=0)) & (maps[0] > LEAST))
    surest = np.argsort(-maps[0, rows, columns], kind="stable")[:most]
    rows, columns = rows[surest], columns[surest]
    top, dx, dy, side = maps[:, rows, columns]
    x, y, half = columns + 0.5 + dx / top, rows + 0.5 + dy / top, side / top / 2
    return (np.stack([x - half, y - half, x + half, y + half], axis=1) * CELL).astype(np.float32)
