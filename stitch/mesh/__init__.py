"""Several devices used as one: specifications, placement, pieces, device servers, carriers.

Names are imported on first use.
"""

from typing import TYPE_CHECKING

from stitch.on_demand import names_on_demand

if TYPE_CHECKING:
    from stitch.mesh.mesh import Mesh, MeshGraph, RemoteTensor, open_mesh
    from stitch.mesh.pieces import Piece, pieces_of
    from stitch.mesh.specification import MachineSpecification, specification_of
else:
    __getattr__, __dir__ = names_on_demand(
        __name__,
        {
            "mesh": "Mesh MeshGraph RemoteTensor open_mesh",
            "pieces": "Piece pieces_of",
            "specification": "MachineSpecification specification_of",
        },
    )

__all__ = [
    "MachineSpecification", "Mesh", "MeshGraph", "Piece", "RemoteTensor", "open_mesh", "pieces_of",
    "specification_of",
]  # fmt: skip
