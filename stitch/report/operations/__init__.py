"""What each operation of a run makes: stored, or compared with what it should be."""

from stitch.report.operations.array_comparison import (
    ComparedResult,
    Tolerances,
    Verdict,
    compare,
)
from stitch.report.operations.operation_comparison import (
    REFERENCE,
    OperationComparison,
    OperationLine,
)
from stitch.report.operations.saved_operations import OperationStore, SavedOperations

__all__ = [
    "REFERENCE", "ComparedResult", "OperationComparison", "OperationLine", "OperationStore",
    "SavedOperations", "Tolerances", "Verdict", "compare",
]  # fmt: skip
