"""`VisualizerFolder`: what a device does, as the folder that ttnn-visualizer opens.

It changes nothing. While the device works events are only kept, and made into rows in batches;
memory holds one batch.
"""

from __future__ import annotations

import json
from collections import deque
from pathlib import Path
from threading import Lock
from typing import NamedTuple, Self

from stitch.argument_kinds import PATH, takes
from stitch.files import OutputFiles, make_folder, resolved, write_added
from stitch.report.reported_device import DEVICE
from stitch.report.visualizer.report_tables import ReportTables
from stitch.report.visualizer.step_reports import ToldSteps
from stitch.runtime import Event, Lying, PlanRun, PlanStopped, RuntimeDevice, Written

DATABASE = "db.sqlite"
CONFIG = "config.json"

#: Events of a device after which rows are written.
BATCH = 256


class _Heard(NamedTuple):
    event: PlanRun | PlanStopped | Written
    lying: tuple[Lying, ...] | None


class VisualizerFolder:
    """Subscribes to a device until `close`, which writes the folder; use it as a context manager.

    An operation is a program run, a copy, a move, or a write of the host, with its simulated time;
    `buffers` is what lies in the spaces when it has run. Subscribe before programs are loaded, so
    that their constants are seen.
    """

    @takes(device=DEVICE, folder=PATH)
    def __init__(self, device: RuntimeDevice, folder: str | Path) -> None:
        """Raises `UsageError`."""
        self._device, self._folder = device, Path(folder)
        self._tables = ReportTables()
        self._steps = ToldSteps(self._tables)
        self._memory = device.watch_memory()
        self._seen: deque[_Heard] = deque()
        self._is_busy = Lock()
        self._unsubscribe = device.events.subscribe(self._on_event)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Listen no more, and write the folder. Raises `StitchError`."""
        write_added(self.add_to, self.forget)

    def forget(self) -> None:
        """Listen no more, and write nothing; twice does no harm."""
        self._unsubscribe()
        self._tables.close()

    def add_to(self, batch: OutputFiles) -> None:
        """Listen no more, and add the files to those that a batch is going to write; `forget` it
        when that has happened."""
        self._unsubscribe()
        self._write()
        name = resolved(self._folder).name
        self._tables.finish(name, self._device.machine)
        make_folder(self._folder)
        batch.add(self._folder / DATABASE, self._tables.pour)
        batch.add(self._folder / CONFIG, json.dumps(_config(name), indent=2) + "\n")

    def _on_event(self, event: Event) -> None:
        if not isinstance(event, PlanRun | PlanStopped | Written):
            return
        lying = self._memory.now() if isinstance(event, PlanRun) else None
        self._seen.append(_Heard(event, lying))
        if len(self._seen) >= BATCH:
            self._write()

    def _write(self) -> None:
        """Make rows of what was kept."""
        # Whoever comes in between, a signal handler of this thread perhaps, leaves it to this call.
        if not self._is_busy.acquire(blocking=False):
            return
        try:
            while self._seen:
                event, lying = self._seen.popleft()
                if isinstance(event, Written):
                    self._steps.written(event)
                else:
                    self._steps.plan(event, lying)
        finally:
            self._is_busy.release()


def _config(name: str) -> dict[str, object]:
    """What ttnn would have been told to report: what is in the folder, and what is not."""
    return {
        "report_name": name,
        "enable_logging": True,
        "enable_graph_report": False,
        "enable_detailed_buffer_report": False,
        "enable_detailed_tensor_report": False,
        "enable_comparison_mode": False,
    }
