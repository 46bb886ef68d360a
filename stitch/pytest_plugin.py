"""The pytest plugin of Stitch: the fixture `stitch_plan` plans one pass, to check its copies.

    def test_the_chain_needs_no_copy(stitch_plan):
        plan = stitch_plan("a.ttb", "b.ttb")
        plan.assert_fits()
        plan.assert_copies(at_most=0)
        plan.assert_matches("chain")

pytest loads this module in every session, through its entry point; the rest of Stitch is imported
when the fixture is used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from stitch.cli import PlannedPass

#: The folder of snapshots, beside the file of the test.
SNAPSHOTS = "stitch_snapshots"
_UPDATE = "--stitch-update"


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    """Add the options of the plugin, and import the modules of Stitch without rewriting them.

    pytest rewrites the assertions of each module of a distribution that has a plugin, which takes
    0.7 s where no bytecode is cached, as in CI. It has no public switch for that.
    """
    getattr(pluginmanager.rewrite_hook, "_must_rewrite", set()).discard("stitch")
    parser.getgroup("stitch").addoption(
        _UPDATE, action="store_true",
        help="write the snapshots that assert_matches() compares with, instead of comparing",
    )  # fmt: skip


@pytest.fixture
def stitch_plan(request: pytest.FixtureRequest) -> Callable[..., PlannedPass]:
    """Return a function that plans one pass over modules, as `stitch run --dry_run` does.

    It takes modules in run order, or one pipeline file, and these options:

    * `target`: the machine (name, path or `Machine`), by default that of the first module. Modules
      that are no `.ttb` files (`.yaml`, `.onnx`) are compiled for it.
    * `wires`: connections by name (`a.y=b.x`), as `--wire` takes them.
    """
    folder = request.path.parent / SNAPSHOTS
    update: bool = request.config.getoption(_UPDATE)

    def plan(*modules: Any, target: Any = None, wires: Sequence[str] = ()) -> PlannedPass:
        from stitch.cli import plan_pass

        return plan_pass(modules, target, wires, snapshots=folder, update=update)

    return plan
