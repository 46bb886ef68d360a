"""Programs, layouts and operations: the data that all packages share."""

from stitch.program.bodies import (
    MAX_EXPANSION,
    MAX_SCAN_DEPTH,
    Body,
    BodyPool,
    holds_foreign,
    name_of,
    result_types,
)
from stitch.program.contents import (
    Array,
    Contents,
    as_read_only,
    can_change,
    dense_bytes,
    same_bytes,
)
from stitch.program.data_type import BLOCK_ELEMENTS, DataType
from stitch.program.expression_rows import ExpressionRows, expressions_of
from stitch.program.expression_rows import Row as ExpressionRow
from stitch.program.facts import Facts, operation_forms
from stitch.program.layout import (
    MAX_RANK,
    TILE_SHAPE,
    Layout,
    MemoryLayout,
    Orientation,
    ShardSpec,
    Space,
    TensorDesc,
    host_layout,
    link_problem,
)
from stitch.program.operation import (
    ABSENT,
    INITIAL_STATE,
    NO_ATTRIBUTES,
    OPAQUE_DOMAIN,
    AttributeValue,
    Constant,
    InputKind,
    InputSlot,
    MathFidelity,
    Operation,
    OutputSlot,
    Ownership,
    Value,
    ValueType,
)
from stitch.program.program import (
    FreeNames,
    OperationList,
    Program,
    Role,
    Scratch,
    Seam,
    body_lines,
    structure_problems,
    summary,
)
from stitch.program.scans import CONDITION, MAX_ROUNDS, SCAN, ScanForm, is_scan
from stitch.program.size_expressions import Expression
from stitch.program.symbolic_data import (
    DeferredData,
    SymbolicData,
    elements_text,
    has_symbols,
    int64_array,
    integers_of,
    is_deferred,
    same_integers,
)
from stitch.program.symbolic_sizes import (
    COMMON_HINT,
    MAX_SIZE,
    Dim,
    Guard,
    SizeNeeded,
    SymbolicSize,
    SymbolicSizes,
    at_sizes,
    is_same_size,
    is_symbolic,
    names_in,
    same_shape,
    size_of,
    slice_bounds,
)

__all__ = [
    "ABSENT", "Array", "AttributeValue", "BLOCK_ELEMENTS", "Body", "BodyPool", "COMMON_HINT",
    "CONDITION", "Constant", "Contents", "DataType", "DeferredData", "Dim", "Expression",
    "ExpressionRow", "ExpressionRows", "Facts", "FreeNames", "Guard", "INITIAL_STATE", "InputKind",
    "InputSlot", "Layout", "MAX_EXPANSION", "MAX_RANK", "MAX_ROUNDS", "MAX_SCAN_DEPTH",
    "MAX_SIZE", "MathFidelity", "MemoryLayout", "NO_ATTRIBUTES", "OPAQUE_DOMAIN", "Operation",
    "OperationList", "Orientation", "OutputSlot", "Ownership", "Program", "Role", "SCAN",
    "ScanForm", "Scratch", "Seam", "ShardSpec", "SizeNeeded", "Space",
    "SymbolicData", "SymbolicSize", "SymbolicSizes", "TILE_SHAPE", "TensorDesc", "Value",
    "ValueType",
    "as_read_only", "at_sizes", "body_lines", "can_change", "dense_bytes", "elements_text",
    "expressions_of",
    "has_symbols", "holds_foreign", "host_layout", "int64_array", "integers_of", "is_deferred",
    "is_same_size", "is_scan", "is_symbolic", "link_problem", "name_of", "result_types",
    "names_in", "operation_forms", "same_bytes", "same_integers", "same_shape", "size_of",
    "slice_bounds", "structure_problems", "summary",
]  # fmt: skip
