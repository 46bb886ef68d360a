"""Parallel computation graphs, and the search for a plan of a training on several devices."""

from stitch.parallel.costs import SegmentCosts, StageCost
from stitch.parallel.division import TensorMapping, TensorPlacement, replicated
from stitch.parallel.lowering import lower
from stitch.parallel.parallel_graph import ParallelComputationGraph, ParallelShape
from stitch.parallel.plan_search import Candidate, ModelCompilationResult, SearchResult, optimize
from stitch.parallel.plans import Plan
from stitch.parallel.simulated_steps import simulate_plan
from stitch.parallel.tensor_graph import divided_graph
from stitch.parallel.tensor_training import divided_stages

__all__ = [
    "Candidate", "ModelCompilationResult", "ParallelComputationGraph", "ParallelShape", "Plan",
    "SearchResult", "SegmentCosts", "StageCost", "TensorMapping", "TensorPlacement",
    "divided_graph", "divided_stages", "lower", "optimize", "replicated",
    "simulate_plan",
]  # fmt: skip
