"""Task graphs on a device: prepared once, called in one go.

Comes in: tables of task graphs, or programs and what feeds them. Goes out: callables. Must not know
what calls them.
"""

from stitch.runtime.graphs.chain_graph import Slot, chain_graph
from stitch.runtime.graphs.once_more import Repeat
from stitch.runtime.graphs.placed_graph import PlacedGraph
from stitch.runtime.graphs.prepared import PreparedGraph

__all__ = ["PlacedGraph", "PreparedGraph", "Repeat", "Slot", "chain_graph"]
