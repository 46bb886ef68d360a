"""Task graphs on a device: prepared once, run in one call."""

from stitch.runtime.graphs.chain_graph import Slot, chain_graph
from stitch.runtime.graphs.placed_graph import PlacedGraph
from stitch.runtime.graphs.prepared import PreparedGraph
from stitch.runtime.graphs.replay import Replay

__all__ = ["PlacedGraph", "PreparedGraph", "Replay", "Slot", "chain_graph"]
