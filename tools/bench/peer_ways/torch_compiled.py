"""torch.compile: a module per program, compiled apart by inductor for its one shape."""

from __future__ import annotations

from contextlib import ExitStack

import torch

from peer_ways.cases import Case, NotAvailableError, Way
from peer_ways.torch_modules import chained, prepare


def make_ways(case: Case, stack: ExitStack) -> list[Way]:
    """Compiled modules; raises `NotAvailableError` where inductor finds no C++ compiler."""
    # Cases share their modules' code, and each keeps its own compiled form only.
    torch.compiler.reset()
    run = chained([torch.compile(m, dynamic=False) for m in prepare(case, stack)])
    x = torch.from_numpy(case.x)
    try:
        run(x)
    except RuntimeError as error:  # All that dynamo and inductor raise is one.
        raise NotAvailableError(str(error).strip().partition("\n")[0]) from error
    return [Way("torch.compile", run, x, lambda found: found.numpy())]
