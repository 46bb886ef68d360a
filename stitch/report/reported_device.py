"""The `Device` that users open: the runtime's, with what it has to say of itself."""

from __future__ import annotations

from typing import Any

from stitch.argument_kinds import instance_of
from stitch.machine import Machine
from stitch.on_demand import late_import
from stitch.runtime import LoadedProgram, PreparedGraph, RuntimeDevice
from stitch.tasks import TaskGraph
from stitch.ttb import Binary

#: What listeners take.
DEVICE = instance_of("a device", RuntimeDevice)
#: Programs that `submit` keeps loaded on a device.
MAX_SUBMITTED = 64


class Device(RuntimeDevice):
    """A simulated machine, opened: load programs, call them, look at results; see `open_device`."""

    def __init__(self, machine: str | Machine, **options: Any) -> None:
        super().__init__(machine, **options)
        self._submitted: dict[tuple[int, int | str], tuple[Binary, LoadedProgram]] = {}

    def _let_go(self) -> None:
        self._submitted.clear()
        super()._let_go()

    def loaded(self, source: Any, program: int | str) -> LoadedProgram:
        """A program of a binary, loaded at most once: for callers that submit it over and over.

        The last `MAX_SUBMITTED` stay loaded until the device closes. Raises what `load` raises.
        """
        if isinstance(source, LoadedProgram):
            return source
        binary = getattr(source, "binary", source)
        if not isinstance(binary, Binary):
            return self.load(binary, program)
        key = (id(binary), program)
        entry = self._submitted.get(key)
        if entry is None:
            with self.lock:
                # Another thread may have loaded it meanwhile.
                entry = self._submitted.get(key) or (binary, self._load(binary, program))
        with self.queue_lock:
            # The entry holds the binary, so its id stays its own. The last used comes last.
            self._submitted.pop(key, None)
            self._submitted[key] = entry
            while len(self._submitted) > MAX_SUBMITTED:
                del self._submitted[next(iter(self._submitted))]
        return entry[1]

    def prepare(self, graph: TaskGraph) -> PreparedGraph:
        """A task graph as a callable: with arrays or tensors for its inputs, by position or name,
        it gives its outputs, ready.

        Programs that are not loaded here yet are. Raises `TaskError` with all that is wrong with
        the graph, `UsageError` for programs of another device, and what loading raises.
        """
        instance_of("a task graph", TaskGraph).check("device.prepare", "graph", graph)
        self.check_open()
        return PreparedGraph(self, graph.table())

    def explain(self) -> str:
        """Every copy so far, with bytes, simulated time and reason."""
        with late_import():
            from stitch.report.explanation import explain

        return explain(self)

    def memory_report(self) -> str:
        """What each space holds, in bytes per bank, and what the host's memory gave."""
        with late_import():
            from stitch.report.explanation import memory_report

        return memory_report(self)

    def memory_views(self) -> dict[str, dict[str, Any]]:
        """The memory report as data, with tt-metal's keys."""
        with late_import():
            from stitch.report.explanation import memory_views

        return memory_views(self)
