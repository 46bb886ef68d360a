"""Several devices used as one: machine specifications, placement, schedules, simulated time.

A placed task graph is cut into pieces, which each run on one device.
"""

from stitch.mesh.pieces import Piece, pieces_of

__all__ = ["Piece", "pieces_of"]
