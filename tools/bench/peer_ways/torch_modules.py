"""PyTorch: a module per program, in inference mode, on a tensor that exists before."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch

from peer_ways.chains import Case, Layer, Way


def make_module(layers: Sequence[Layer]) -> Any:
    """Linear and ReLU for every layer."""
    steps: list[Any] = []
    for w, b in layers:
        linear = torch.nn.Linear(*w.shape)
        with torch.no_grad():
            linear.weight.copy_(torch.from_numpy(w.T.copy()))
            linear.bias.copy_(torch.from_numpy(b))
        steps += [linear, torch.nn.ReLU()]
    return torch.nn.Sequential(*steps).eval()


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
    modules = [make_module(layers) for layers in case.programs]
    stack.enter_context(torch.inference_mode())
    return modules


def make_ways(case: Case, stack: ExitStack) -> list[Way]:
    """Eager modules."""
    run = chained(prepare(case, stack))
    return [Way("torch eager", run, torch.from_numpy(case.x), lambda found: found.numpy())]
