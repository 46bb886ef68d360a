"""A compiled model and the device that it opens: programs, their graph, their form as JSON.

Comes in: graphs, what `dump` wrote. Goes out: `CompiledModel`, callable, and `Device`. Must not
know: front ends. The public face re-exports both.
"""

from stitch.model.binary_model import MACHINE, ModelOfBinary, open_device
from stitch.model.compiled_model import PRODUCER, CompiledModel, compiled

__all__ = ["MACHINE", "PRODUCER", "CompiledModel", "ModelOfBinary", "compiled", "open_device"]
