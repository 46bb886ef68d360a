"""A compiled model: programs, their graph, their form as JSON."""

from stitch.model.binary_model import ModelOfBinary, ModelSession
from stitch.model.compiled_model import PRODUCER, CompiledModel, compiled

__all__ = ["PRODUCER", "CompiledModel", "ModelOfBinary", "ModelSession", "compiled"]
