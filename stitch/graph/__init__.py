"""Computation graphs: operators and logical tensors, before anything is placed."""

from stitch.graph.builder import ComputationGraphBuilder
from stitch.graph.computation_graph import ComputationGraph, check_types
from stitch.graph.conditions import choose, repeat_while
from stitch.graph.constant_pool import array_of
from stitch.graph.emitter import Given, Written
from stitch.graph.json_form import as_data, as_json, from_json
from stitch.graph.json_reader import JsonObject, objects_without_duplicates, shortened
from stitch.graph.known_values import MAX_KNOWN_ELEMENTS, KnownValues
from stitch.graph.lifting import Lifted, LiftedValue, Operations, Unliftable, lift
from stitch.graph.loops import BodyBuilder, scan, scan_in_body, scan_of, trace_body
from stitch.graph.methods import LayerMethods
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
from stitch.graph.tracing import trace

__all__ = [
    "LAYOUT_FIELDS", "MAX_KNOWN_ELEMENTS", "PLACEMENT_FIELDS", "BodyBuilder", "ComputationGraph",
    "ComputationGraphBuilder", "Given", "JsonObject", "KnownValues", "LayerMethods", "Lifted",
    "LiftedValue", "NoDataError", "Operations", "Side", "PlacementError", "PlacementOption",
    "SymbolicTensor", "Unliftable",
    "PlacementValue", "Written", "array_of", "as_data", "as_json", "call_function",
    "call_ufunc", "check_types", "choose",
    "from_json", "lift", "objects_without_duplicates", "parse_placement", "repeat_while", "scan",
    "scan_in_body",
    "scan_of", "shortened", "trace", "trace_body", "user_location", "requested_layout",
    "placement_between", "placement_of",
]  # fmt: skip
