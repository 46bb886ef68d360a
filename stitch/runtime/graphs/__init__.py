"""Task graphs on a device, run in one call, and tensors that persist between such calls."""

from stitch.runtime.graphs.persistent_buffers import PersistentBuffers, StatefulExecutable
from stitch.runtime.graphs.pipeline import PreparedGraph, RuntimePipeline, chain_graph
from stitch.runtime.graphs.placed_graph import PlacedGraph
from stitch.runtime.graphs.replay import Replay

__all__ = [
    "PersistentBuffers", "PlacedGraph", "PreparedGraph", "Replay", "RuntimePipeline",
    "StatefulExecutable", "chain_graph",
]  # fmt: skip
