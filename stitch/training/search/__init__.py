"""The search: where the tensors between programs lie, and what backward computes again."""

from stitch.training.search.optimize import (
    ALGORITHMS,
    AlgorithmConfig,
    check_algorithm,
    optimize,
    place_inference,
)
from stitch.training.search.search_result import (
    CostValues,
    InferenceGraphs,
    SearchResult,
    SearchSolution,
)
from stitch.training.search.tensor_places import L1Candidate, best_set

__all__ = [
    "ALGORITHMS", "AlgorithmConfig", "CostValues", "InferenceGraphs",
    "L1Candidate", "SearchResult", "SearchSolution", "best_set", "check_algorithm",
    "optimize", "place_inference",
]  # fmt: skip
