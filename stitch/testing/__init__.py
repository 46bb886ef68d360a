"""Conformance suites for extensions: inherit a class, name the extension, and run pytest.

The repository's own executors, operators, machines and allocators pass the same classes. The
suites need the package pytest; `import stitch` does not load this package.
"""

from typing import TYPE_CHECKING

from stitch.on_demand import names_on_demand

if TYPE_CHECKING:
    from stitch.testing.executors import LAYOUTS, ExecutorSuite, PlacementSuite
    from stitch.testing.machines import MachineSuite
    from stitch.testing.operators import (
        OperatorCase,
        OperatorSuite,
        backward_feeds,
        check_gradients,
        evaluate_graph,
        seeds_of,
    )
    from stitch.testing.policies import AllocatorSuite, ResidencySuite, holes_of
    from stitch.testing.small_models import integers, model, one, several, tiny
else:
    __getattr__, __dir__ = names_on_demand(
        __name__,
        {
            "executors": "LAYOUTS ExecutorSuite PlacementSuite",
            "machines": "MachineSuite",
            "operators": "OperatorCase OperatorSuite backward_feeds check_gradients "
            "evaluate_graph seeds_of",
            "policies": "AllocatorSuite ResidencySuite holes_of",
            "small_models": "integers model one several tiny",
        },
    )

__all__ = [
    "LAYOUTS", "AllocatorSuite", "ExecutorSuite", "MachineSuite", "OperatorCase", "OperatorSuite",
    "PlacementSuite", "ResidencySuite", "backward_feeds", "check_gradients", "evaluate_graph",
    "holes_of", "integers", "model", "one", "seeds_of", "several", "tiny",
]  # fmt: skip
