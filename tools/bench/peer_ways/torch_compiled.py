"""torch.compile: a module per program, compiled apart for its one shape, by inductor or another
backend (`torch_aot_eager` and `torch_stitch` are such)."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from types import FunctionType
from typing import Any

import torch

from peer_ways.cases import Case, NotAvailableError, Way
from peer_ways.torch_modules import chained, prepare


def make_ways(case: Case, stack: ExitStack) -> list[Way]:
    """Compiled modules; raises `NotAvailableError` where inductor finds no C++ compiler."""
    return [compiled_by("inductor", "torch.compile", case, stack)]


def compiled_by(backend: str, name: str, case: Case, stack: ExitStack) -> Way:
    """Modules compiled by a backend; raises `NotAvailableError` where it cannot."""
    run = chained([compiled(module, backend) for module in prepare(case, stack)])
    x = torch.from_numpy(case.x)
    try:
        run(x)
    except RuntimeError as error:  # All that dynamo and inductor raise is one.
        raise NotAvailableError(str(error).strip().partition("\n")[0]) from error
    return Way(name, run, x, lambda found: found.numpy())


def compiled(module: Any, backend: str) -> Callable[[Any], Any]:
    """A module as a compiled function with a code of its own: dynamo keeps what it compiled by
    code, and would look through that of other cases and backends at every call."""

    def call(x: Any) -> Any:
        return module(x)

    alone = FunctionType(call.__code__.replace(), globals(), closure=call.__closure__)
    return torch.compile(alone, backend=backend, dynamic=False)  # type: ignore[no-any-return]
