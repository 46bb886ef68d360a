"""torch.compile with our backend, beside aot_eager: two layers, nothing to win by computing."""

from __future__ import annotations

import importlib
import importlib.util
import tomllib
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import stitch
from steady_ways.measuring import Effort, Pass, Row, absent, interleaved, passes_of, ratio
from steady_ways.subjects import WIDTH

GOAL = 1.25
NAME = "torch.compile of two layers ÷ aot_eager"


def rows(effort: Effort) -> Iterator[Row]:
    """The one row."""
    if importlib.util.find_spec("torch") is None:
        yield absent(NAME, GOAL, "torch is not installed")
        return
    times = interleaved(ways(), passes_of(2, effort), effort)
    yield ratio(NAME, times["stitch"], times["aot_eager"], GOAL)


def ways() -> dict[str, Pass]:
    """Both backends on one module."""
    import torch  # A peer, and an extra.

    torch.set_num_threads(1)
    torch.manual_seed(0)
    module = torch.nn.Sequential(
        torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU(), torch.nn.Linear(WIDTH, WIDTH)
    )
    x = torch.randn(1, WIDTH)
    found: dict[str, Pass] = {}
    with warnings.catch_warnings():
        # What torch says of its own internals.
        warnings.simplefilter("ignore")
        for name, backend in (("stitch", our_backend()), ("aot_eager", "aot_eager")):
            torch._dynamo.reset()
            found[name] = way(torch, torch.compile(module, backend=backend), x)
            torch.testing.assert_close(found[name](), module(x))
    return found


def our_backend() -> Any:
    """The function that the measured tree names: what is installed may name another tree's."""
    project = Path(stitch.__file__).parents[1] / "pyproject.toml"
    if not project.exists():
        return "stitch"
    points = tomllib.loads(project.read_text())["project"]["entry-points"]
    module, name = points["torch_dynamo_backends"]["stitch"].split(":")
    return getattr(importlib.import_module(module), name)


def way(torch: Any, call: Any, x: Any) -> Pass:
    """A call without gradients."""

    def run() -> object:
        with torch.no_grad():
            return call(x)

    return run
