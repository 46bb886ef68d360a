"""Computation graphs: operators and logical tensors, before anything is placed."""

from stitch.graph.batching import BatchedValue, VmapResult, WriteUnbatched, inline, vmap
from stitch.graph.computation_graph import ComputationGraph, check_types
from stitch.graph.constant_pool import array_of
from stitch.graph.control_flow import (
    BodyBuilder,
    choose,
    repeat_while,
    scan,
    scan_in_body,
    scan_of,
    trace_body,
)
from stitch.graph.emitter import AttributeLike, OperandLike
from stitch.graph.graph_json import array_of_bytes, as_data, as_json, from_data, from_json
from stitch.graph.known_values import MAX_KNOWN_ELEMENTS, KnownValues
from stitch.graph.layer_methods import LayerMethods
from stitch.graph.numpy_functions import call_function, call_ufunc
from stitch.graph.placement import (
    LAYOUT_FIELDS,
    PLACEMENT_FIELDS,
    PlacementError,
    PlacementOption,
    PlacementValue,
    Side,
    parse_placement,
    placement_between,
    placement_of,
    requested_layout,
)
from stitch.graph.source_location import user_location
from stitch.graph.symbolic import NoDataError, SymbolicTensor
from stitch.graph.tracing import ComputationGraphBuilder, trace

__all__ = [
    "array_of", "array_of_bytes", "as_data", "as_json", "AttributeLike", "BatchedValue",
    "BodyBuilder", "call_function", "call_ufunc", "check_types", "choose", "ComputationGraph",
    "ComputationGraphBuilder", "from_data", "from_json", "inline", "KnownValues", "LayerMethods",
    "LAYOUT_FIELDS", "MAX_KNOWN_ELEMENTS", "NoDataError", "OperandLike",
    "parse_placement", "placement_between", "PLACEMENT_FIELDS", "placement_of", "PlacementError",
    "PlacementOption", "PlacementValue", "repeat_while",
    "requested_layout", "scan", "scan_in_body", "scan_of", "Side", "SymbolicTensor",
    "trace", "trace_body", "user_location", "vmap", "VmapResult", "WriteUnbatched",
]  # fmt: skip
