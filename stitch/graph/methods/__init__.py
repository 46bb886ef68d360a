"""The builder's methods, a class for each family of operators, each class on top of the one before.

The builder is their sum, `LayerMethods`.
"""

from stitch.graph.methods.layer_methods import LayerMethods

__all__ = ["LayerMethods"]
