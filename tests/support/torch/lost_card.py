"""A stand-in for a card whose context is lost: CUDA refuses all work from then on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from tests.support.torch.late_graphs import LateGraphs

#: As CUDA says it, with PyTorch's advice.
MESSAGE = "CUDA error: an illegal memory access was encountered"
#: Calls that put work on a stream, beside those with `out=`; views only compute addresses.
_WORK = ("copy_", "clone", "zero_", "fill_")


class LostCard(LateGraphs):
    """Computes until `is_lost` is set; `dies_at`: the replay that sets it in its middle."""

    def __init__(self, *, dies_at: int = -1) -> None:
        super().__init__()
        self.is_lost, self.dies_at = False, dies_at

    def _check(self) -> None:
        if self.is_lost:
            advice = "CUDA kernel errors might be asynchronously reported at some other API call"
            raise torch.AcceleratorError(f"{MESSAGE}\n{advice}")

    def finish(self) -> None:
        self._check()
        super().finish()

    def replay(self, launches: Sequence[Callable[[], object]]) -> None:
        if self.replays == self.dies_at:
            self.finish()
            for launch in launches[: len(launches) // 2 + 1]:
                launch()
            self.is_lost = True
        self._check()
        super().replay(launches)

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:  # PyTorch's own names
        name = getattr(func, "__name__", "")
        if name in _WORK or "out" in (kwargs or {}):
            self._check()
        # What only computes addresses works on a lost card too.
        elif self.is_lost:
            return func(*args, **(kwargs or {}))
        return super().__torch_function__(func, types, args, kwargs)
