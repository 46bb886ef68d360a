"""CUDA graphs: what a binding launches between two calls of the host becomes one launch.

Kernels and copies on the device are `Launch`, copies of host arrays that enter are `Entry`; all
other steps run on the host and end a graph. Entries stay where the plan has them, since their place
may hold another value before: only the host array itself is written before the graph is launched,
to bytes outside the plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import groupby, pairwise
from typing import Any

import torch

from stitch.memory import Arrivals
from stitch.program import Array
from stitch.runtime.executors.executor import Thunk

#: A shorter sequence is launched call by call.
LEAST_LAUNCHES = 2


class Launch(partial[object]):
    """A call that reads and writes memory of the device only, by work on PyTorch's stream."""


class Wait(partial[object]):
    """A call that waits until the graphs launched so far have read their host arrays."""


class Entry(partial[object]):
    """A copy of a host array to the device, `region.copy_` of `host`; it returns when it is done.

    Attributes:
        array: The host array, which the step before writes.
    """

    array: Array

    def launched(self) -> Thunk:
        """Return the copy as work on the stream: it may return before the copy is done."""
        return partial(self.func, *self.args, non_blocking=True)


def entry(region: torch.Tensor, dtype: Any, shape: tuple[int, ...]) -> Entry:
    """Return the copy to a region of elements that the host writes first, to pinned memory."""
    pinned = region.device.type == "cuda"
    # The device is named: the caller may have set another default.
    host = torch.empty(len(region), dtype=torch.uint8, device="cpu", pin_memory=pinned)
    made = Entry(region.copy_, host)
    made.array = host.numpy().view(dtype).reshape(shape)
    return made


class Graphs:
    """Stands in for graphs on the processor: a graph is its calls."""

    #: Called before a host array is written that a graph may still read.
    waits: tuple[Wait, ...] = ()

    def finish(self) -> None:
        """Wait until all that was launched is done."""

    def capture(self, launches: Sequence[Thunk], *, has_entries: bool) -> Sequence[Thunk]:
        """Capture calls, without running them.

        Args:
            launches: The calls.
            has_entries: Whether host arrays enter.

        Returns:
            Calls that do the work; none runs Python code.
        """
        return launches


class CardGraphs(Graphs):
    """Captures CUDA graphs on a card.

    They share a memory pool: nothing in it outlives a replay, and replays follow one another.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)
        # Methods of the base classes are C code: no interrupt comes between two of them.
        event: Any = super(torch.cuda.Event, torch.cuda.Event())
        self._event = event
        self.waits = (Wait(event.synchronize),)

    def finish(self) -> None:
        torch.cuda.synchronize(self._device)

    def capture(self, launches: Sequence[Thunk], *, has_entries: bool) -> Sequence[Thunk]:
        graph: Any = torch.cuda.CUDAGraph()
        here = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(here)
        with torch.cuda.stream(self._stream):
            graph.capture_begin(self._pool, "thread_local")
            try:
                for launch in launches:
                    launch()
            finally:
                graph.capture_end()
        # The tensors that it uses live as long as the graph.
        graph.launches = launches
        base: Any = super(torch.cuda.CUDAGraph, graph)
        return [base.replay, *([partial(self._event.record, here)] if has_entries else [])]


def with_graphs(
    steps: Sequence[Sequence[Thunk]], graphs: Graphs
) -> tuple[list[tuple[Thunk, ...]], list[Exception | None]]:
    """Return the steps with their launches captured, and for each graph None or what its capture
    raised: its launches stay single calls then.

    The thunks of a graph move to the step in which it begins: they are complete together.
    """
    done: list[list[Thunk]] = [[] for _ in steps]
    errors: list[Exception | None] = []
    flat = [(index, thunk) for index, step in enumerate(steps) for thunk in step]
    stages = {
        at
        for at, ((_, thunk), (_, after)) in enumerate(pairwise(flat))
        if isinstance(after, Entry) and getattr(thunk, "args", (None,))[0] is after.array
    }

    def is_inside(at: int) -> bool:
        return at in stages or isinstance(flat[at][1], Launch | Entry | Wait | Arrivals)

    for inside, places in groupby(range(len(flat)), is_inside):
        among = [*places]
        thunks = [flat[at][1] for at in among]
        launches = [each for each in thunks if isinstance(each, Launch | Entry)]
        calls = None
        if inside and len(launches) >= LEAST_LAUNCHES:
            work = [each.launched() if isinstance(each, Entry) else each for each in launches]
            has_entries = any(isinstance(each, Entry) for each in launches)
            try:
                calls = graphs.capture(work, has_entries=has_entries)
                errors.append(None)
            except Exception as error:  # Whatever PyTorch or the driver refuses.
                errors.append(error)
        if calls is None:
            for at in among:
                done[flat[at][0]].append(flat[at][1])
            continue
        # The host waits and writes before, and counts after.
        waits = [each for each in thunks if isinstance(each, Wait)][-1:]
        written = [flat[at][1] for at in among if at in stages]
        counted = [each for each in thunks if isinstance(each, Arrivals)]
        done[flat[among[0]][0]] += [*waits, *written, *calls, *counted]
    return [tuple(step) for step in done], errors
