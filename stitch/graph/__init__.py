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
from stitch.graph.source_location import user_location
from stitch.graph.symbolic import NoDataError, SymbolicTensor
from stitch.graph.tracing import trace
from stitch.graph.wish import (
    LAYOUT_FIELDS,
    WISH_FIELDS,
    Side,
    Wish,
    WishError,
    WishValue,
    parse_wish,
    wished_layout,
    wishes_between,
    wishes_of,
)

__all__ = [
    "LAYOUT_FIELDS", "MAX_KNOWN_ELEMENTS", "WISH_FIELDS", "BodyBuilder", "ComputationGraph",
    "ComputationGraphBuilder", "Given", "JsonObject", "KnownValues", "LayerMethods", "Lifted",
    "LiftedValue", "NoDataError", "Operations", "Side", "SymbolicTensor", "Unliftable", "Wish",
    "WishError", "WishValue", "Written", "array_of", "as_data", "as_json", "call_function",
    "call_ufunc", "check_types", "choose",
    "from_json", "lift", "objects_without_duplicates", "parse_wish", "repeat_while", "scan",
    "scan_in_body",
    "scan_of", "shortened", "trace", "trace_body", "user_location", "wished_layout",
    "wishes_between", "wishes_of",
]  # fmt: skip
