"""FractalTensor: nested lists of tensors, and access to parts of them.

Comes in: nested lists, arrays, tensors. Goes out: nests, which are views of one another. Must not
know front ends, or training.

>>> from stitch import fractal as ops
>>> ops.slide(ops.FractalTensor([0, 1, 2, 3]), 2).tolist()
[[0, 1], [1, 2], [2, 3]]
"""

from stitch.fractal.access import (
    dilate,
    enumerate,
    gather,
    head,
    join,
    last,
    product,
    repeat,
    shifted_slide,
    shifted_window,
    slide,
    split,
    tail,
    unbind,
    window,
)
from stitch.fractal.fractal_tensor import FractalTensor
from stitch.fractal.zipped import Zipped, zip

__all__ = [
    "FractalTensor", "Zipped", "dilate", "enumerate", "gather", "head", "join", "last", "product",
    "repeat", "shifted_slide", "shifted_window", "slide", "split", "tail", "unbind", "window",
    "zip",
]  # fmt: skip
