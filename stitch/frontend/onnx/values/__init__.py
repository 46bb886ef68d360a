"""What the names of a model stand for: tensors, lists of tensors, nothing."""

from stitch.frontend.onnx.values.lists import (
    LIST_OPERATORS,
    ListCall,
    is_listed,
    kind_of,
    lower_list,
)
from stitch.frontend.onnx.values.scope import (
    FAILED,
    NOTHING,
    Bound,
    Dependencies,
    Failed,
    Given,
    Scope,
    TensorList,
    asked_operand,
)

__all__ = [
    "FAILED", "LIST_OPERATORS", "NOTHING", "Bound", "Dependencies", "Failed", "Given",
    "ListCall", "Scope", "TensorList", "asked_operand", "is_listed", "kind_of", "lower_list",
]  # fmt: skip
