"""A compiled model: programs, their graph, their form as JSON.

Comes in: graphs, what `dump` wrote. Goes out: `CompiledModel`, callable. Must not know: front ends.
"""

from stitch.model.binary_model import ModelOfBinary, ModelSession
from stitch.model.compiled_model import PRODUCER, CompiledModel, compiled

__all__ = ["PRODUCER", "CompiledModel", "ModelOfBinary", "ModelSession", "compiled"]
