"""A stand-in for a card: graphs run late, when something else is asked of PyTorch or waited for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

import stitch
from stitch.runtime.executors.cuda_executor import CudaExecutor
from stitch.runtime.executors.cuda_graphs import Graphs, Wait

Thunk = Callable[[], object]


class LateGraphs(TorchFunctionMode, Graphs):  # type: ignore[misc]  # torch has no types here
    """Keeps replays until PyTorch is used outside of graphs: what the host writes too early shows.

    `waits`: whether a graph waits before its host arrays are written again. `fails_at`: the replay
    that raises in its middle.
    """

    def __init__(self, *, waits: bool = True, fails_at: int = -1) -> None:
        super().__init__()
        self.waits = (Wait(self.finish),) if waits else ()
        self.fails_at = fails_at
        self.replays, self._is_running = 0, False
        self._pending: list[Sequence[Thunk]] = []

    def capture(self, launches: Sequence[Thunk], *, has_entries: bool) -> Sequence[Thunk]:
        return [_Replay(self, launches).run]

    def replay(self, launches: Sequence[Thunk]) -> None:
        """Run later, or fail in the middle."""
        self.replays += 1
        if self.replays == self.fails_at + 1:
            self.finish()
            for launch in launches[: len(launches) // 2 + 1]:
                launch()
            raise RuntimeError("the device failed")
        self._pending.append(launches)

    def finish(self) -> None:
        """Run what is pending, in order: launches come back here."""
        if self._is_running:
            return
        self._is_running = True
        try:
            while self._pending:
                for launch in self._pending.pop(0):
                    launch()
        finally:
            self._is_running = False

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:  # PyTorch's own names
        self.finish()
        return func(*args, **(kwargs or {}))


class _Replay:
    """The replay of one graph: as on a card, no `partial`, which would be called again."""

    def __init__(self, graphs: LateGraphs, launches: Sequence[Thunk]) -> None:
        self._graphs, self._launches = graphs, launches

    def run(self) -> None:
        self._graphs.replay(self._launches)


@contextmanager
def late_device(
    machine: str = "cuda", *, graphs: LateGraphs, **options: Any
) -> Iterator[stitch.Device]:
    """Open a device on the processor whose graphs run late."""
    executor = CudaExecutor(torch.device("cpu"))
    executor.graphs = graphs
    with graphs, stitch.open_device(machine, executor=executor, **options) as device:
        yield device
