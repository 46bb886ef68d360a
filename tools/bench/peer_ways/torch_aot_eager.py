"""torch.compile without a compiler: what dynamo and aot_autograd take, and ATen's kernels."""

from __future__ import annotations

from contextlib import ExitStack

from peer_ways.cases import Case, Way
from peer_ways.torch_compiled import compiled_by


def make_ways(case: Case, stack: ExitStack) -> list[Way]:
    """Modules compiled by `aot_eager`."""
    return [compiled_by("aot_eager", "torch.compile aot_eager", case, stack)]
