"""PyTorch: a module per program, in inference mode, on a tensor that exists before."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch

from peer_ways.cases import Case, Way


def chained(modules: Sequence[Callable[[Any], Any]]) -> Callable[[Any], Any]:
    """One module after another."""

    def run(x: Any) -> Any:
        for module in modules:
            x = module(x)
        return x

    return run


def prepare(case: Case, stack: ExitStack) -> list[Any]:
    """Modules of a case, one thread, and inference mode until the stack is left."""
    torch.set_num_threads(1)
    modules = [program.torch_module() for program in case.programs]
    stack.enter_context(torch.inference_mode())
    return modules


def make_ways(case: Case, stack: ExitStack) -> list[Way]:
    """Eager modules."""
    run = chained(prepare(case, stack))
    return [Way("torch eager", run, torch.from_numpy(case.x), lambda found: found.numpy())]
