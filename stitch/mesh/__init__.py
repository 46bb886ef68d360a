"""Several devices used as one: specifications, placement, pieces, device servers, carriers.

Names are imported on first use.
"""

from typing import TYPE_CHECKING

from stitch.on_demand import names_on_demand

if TYPE_CHECKING:
    from stitch.mesh.divided_stages import DividedStages, Shards
    from stitch.mesh.dry_runs import DryRun, dry_run
    from stitch.mesh.mesh import Mesh, MeshGraph, RemoteTensor, open_mesh
    from stitch.mesh.pieces import Piece, pieces_of
    from stitch.mesh.schedules import schedule
    from stitch.mesh.simulation import Step, Timeline, simulate
    from stitch.mesh.specification import (
        MachineSpecification,
        mesh_json_schema,
        specification_of,
    )
    from stitch.mesh.staged_training import (
        CompiledStages,
        ParallelOptions,
        StagedTraining,
        compile_stages,
    )
    from stitch.mesh.trace import trace_bytes, wall_tracks
else:
    __getattr__, __dir__ = names_on_demand(
        __name__,
        {
            "divided_stages": "DividedStages Shards",
            "dry_runs": "DryRun dry_run",
            "mesh": "Mesh MeshGraph RemoteTensor open_mesh",
            "pieces": "Piece pieces_of",
            "schedules": "schedule",
            "simulation": "Step Timeline simulate",
            "specification": "MachineSpecification mesh_json_schema specification_of",
            "trace": "trace_bytes wall_tracks",
            "staged_training": "CompiledStages ParallelOptions StagedTraining compile_stages",
        },
    )

__all__ = [
    "CompiledStages", "DividedStages", "DryRun", "MachineSpecification", "Mesh", "MeshGraph",
    "ParallelOptions", "Piece", "RemoteTensor", "Shards", "StagedTraining", "Step", "Timeline",
    "compile_stages", "dry_run", "mesh_json_schema", "open_mesh", "pieces_of", "schedule",
    "simulate", "specification_of", "trace_bytes", "wall_tracks",
]  # fmt: skip
