"""Ours as users of torch have it: `torch.compile(module, backend="stitch")`."""

from __future__ import annotations

from contextlib import ExitStack

from peer_ways.cases import Case, Way
from peer_ways.torch_compiled import compiled_by


def make_ways(case: Case, stack: ExitStack) -> list[Way]:
    """Modules compiled by our backend, with its usual options."""
    return [compiled_by("stitch", "torch.compile stitch", case, stack)]
