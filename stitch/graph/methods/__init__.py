"""The builder's methods, a class for each family of operators, each class on top of the one before.

Comes in: symbolic tensors, arrays and numbers. Goes out: operations, written by an `Emitter`, which
is all that the families know of a builder. The builder is their sum, `LayerMethods`.
"""

from stitch.graph.methods.layer_methods import LayerMethods

__all__ = ["LayerMethods"]
