"""The compiler: computation graph → program, for one machine.

Passes are functions from graph to graph. Differentiation, splitting and changes of layouts are
imported on demand.
"""

from typing import TYPE_CHECKING

from stitch.compiler.body_graphs import add_output_identities, rewrite_graph, write_graph
from stitch.compiler.compile_graph import compile_graph, optimize
from stitch.compiler.loops import (
    RATED_EXECUTORS,
    SCHEDULES,
    LoopNote,
    check_schedule,
    rated_executor,
)
from stitch.compiler.options import Compilation, CompileOptions, CompileWarning
from stitch.on_demand import names_on_demand

if TYPE_CHECKING:
    from stitch.compiler.changed_slots import with_layouts
    from stitch.compiler.dynamic_program import DynamicProgram, compile_dynamic
    from stitch.compiler.gradients import (
        Differentiated,
        Recompute,
        check_recompute,
        differentiate,
        differentiate_parts,
        prepare_for_parts,
    )
    from stitch.compiler.split import cut_names, cuttable, node_ends, split_graph
else:
    __getattr__, __dir__ = names_on_demand(
        __name__,
        {
            "changed_slots": "with_layouts",
            "dynamic_program": "DynamicProgram compile_dynamic",
            "gradients": "Differentiated Recompute check_recompute differentiate "
            "differentiate_parts prepare_for_parts",
            "split": "cut_names cuttable node_ends split_graph",
        },
    )

__all__ = [
    "Compilation", "CompileOptions", "CompileWarning", "Differentiated", "DynamicProgram",
    "LoopNote", "RATED_EXECUTORS", "Recompute", "SCHEDULES", "add_output_identities",
    "check_recompute", "check_schedule", "compile_dynamic", "compile_graph", "cut_names",
    "cuttable", "differentiate", "differentiate_parts", "node_ends", "optimize",
    "prepare_for_parts", "rated_executor", "rewrite_graph", "split_graph",
    "with_layouts", "write_graph",
]  # fmt: skip
