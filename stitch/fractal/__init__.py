"""FractalTensor: nested lists of tensors, access functions, and functions over them.

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
from stitch.fractal.compiled_nest import CompiledNest, compile
from stitch.fractal.fractal_tensor import FractalTensor, Leaf
from stitch.fractal.functions import (
    filter,
    filterall,
    fold,
    foldl,
    foldr,
    forall,
    map,
    reduce,
    scan,
    scanl,
    scanr,
)
from stitch.fractal.modes import mode
from stitch.fractal.primitives import cat, exp, flatten, relu, sigmoid, softmax, stack, tanh
from stitch.fractal.zipped import Zipped, zip

__all__ = [
    "CompiledNest", "FractalTensor", "Leaf", "Zipped", "cat", "compile", "dilate", "enumerate",
    "exp", "filter", "filterall", "flatten", "fold", "foldl", "foldr", "forall", "gather",
    "head",
    "join", "last", "map", "mode", "product", "reduce", "relu", "repeat", "scan", "scanl",
    "scanr", "shifted_slide", "shifted_window", "sigmoid", "slide", "softmax", "split", "stack",
    "tail", "tanh", "unbind", "window", "zip",
]  # fmt: skip
