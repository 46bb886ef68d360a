"""`ChromeTrace`: a device's work as a Chrome trace, for Perfetto and chrome://tracing.

Events become trace lines in batches that are written to the file, or on request: memory holds one
batch, or the latest events.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from threading import Lock, get_ident
from time import perf_counter
from typing import Any, Self

from stitch.argument_kinds import PATH, optional, takes
from stitch.errors import UsageError
from stitch.files import OutputFiles
from stitch.report.device import DEVICE
from stitch.report.explanation import totals_json
from stitch.report.temporary_output import TemporaryOutput, write_and_close
from stitch.report.trace_events import EventRecord, Line, TraceLines
from stitch.runtime import Event, PlanRun, PlanStopped, RuntimeDevice

#: Steps and other events that are kept without a file; beyond it the oldest are dropped.
MAX_STEPS = 200_000
#: Events after which old ones are dropped or written.
BATCH = 1024


class ChromeTrace:
    """Traces a device until `close`; a context manager.

    Create it before programs are loaded, so that the trace has their constants.

    Args:
        device: The device.
        path: The file that `close` writes, compressed if it ends with `.gz`. Without it `as_json`
            returns the latest events.

    Raises:
        StitchError: The folder of the file is not writable.
    """

    @takes(device=DEVICE, path=optional(PATH))
    def __init__(self, device: RuntimeDevice, path: str | Path | None = None) -> None:
        self._device = device
        self._period = device.history.period_from_now()
        self._seen: deque[EventRecord] = deque()
        #: Kept steps, events of these, and dropped steps.
        self._steps = self._counted = self._dropped = 0
        self._lines = TraceLines(device.machine, perf_counter(), device.inter_op_threads)
        self._memory = device.watch_memory()
        self._is_busy = Lock()
        self._path = path
        self._output = None if path is None else TemporaryOutput(path)
        self._is_open = True
        if self._output is not None:
            self._output.write(b'{"traceEvents": [\n' + _text(self._lines.names())[2:])
        self._unsubscribe = device.events.subscribe(self._on_event)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop, and write the file if there is a path; may be called twice."""
        if self._output is None or not self._is_open:
            self._unsubscribe()
            return
        write_and_close(self.add_to, self.forget)

    def forget(self) -> None:
        """Stop without writing; may be called twice."""
        self._unsubscribe()
        self._is_open = False
        if self._output is not None:
            self._output.close()

    def add_to(self, files: OutputFiles) -> None:
        """Stop and add the file to `files`; call `forget` after they are written."""
        assert self._output is not None
        assert self._path is not None
        self._unsubscribe()
        self._is_open = False
        self._write()
        if not self._device.is_closed:
            self._output.write(_text(self._lines.rest(self._memory.now())))
        body = json.dumps({"displayTimeUnit": "ns", "otherData": self._other(self._lines, 0)})
        self._output.write(b"\n], " + body[1:].encode() + b"\n")
        files[self._path] = self._output.copy_to

    def as_json(self) -> dict[str, Any]:
        """Return the trace as a JSON object, with times in microseconds.

        `otherData` has the totals of all copies, also of dropped events. Raises `UsageError` for a
        trace with a path.
        """
        if self._output is not None:
            raise UsageError("this trace is written to a file", where=str(self._path),
                             remedy="close it and read the file, or pass no path")  # fmt: skip
        seen, lines = tuple(self._seen), self._lines.copy()
        out = lines.names()
        for record in seen:
            out += lines.add(record)
        other = self._other(lines, self._dropped)
        return {"traceEvents": out, "displayTimeUnit": "ns", "otherData": other}

    def _other(self, lines: TraceLines, dropped: int) -> dict[str, Any]:
        return totals_json(self._period, lines.total) | {"older_steps_left_out": dropped}

    def _on_event(self, event: Event) -> None:
        contents = self._memory.now() if isinstance(event, PlanRun) else None
        self._seen.append(EventRecord(event, contents, get_ident(), perf_counter()))
        if len(self._seen) - self._counted < BATCH:
            return
        if self._output is None:
            self._drop_oldest()
        else:
            self._write()

    def _drop_oldest(self) -> None:
        """Drop the oldest events beyond `MAX_STEPS`."""
        seen = self._seen
        self._steps += sum(_count(seen[-i]) for i in range(1, len(seen) - self._counted + 1))
        while seen and self._steps - _count(seen[0]) >= MAX_STEPS:
            count = _count(seen[0])
            self._steps -= count
            self._dropped += count
            self._lines.skip(seen.popleft())
        self._counted = len(seen)

    def _write(self) -> None:
        # A call that interrupts this one (a signal handler) leaves its events to this one.
        if self._output is None or not self._is_busy.acquire(blocking=False):
            return
        try:
            while self._seen:
                self._output.write(_text(self._lines.add(self._seen.popleft())))
        finally:
            self._is_busy.release()


def _count(record: EventRecord) -> int:
    """Return the number of steps of an event."""
    event = record.event
    if isinstance(event, PlanRun):
        return 1 + len(event.plan.steps)
    return 1 + event.steps_done if isinstance(event, PlanStopped) else 1


def _text(lines: Iterable[Line]) -> bytes:
    """Encode lines that follow others; one call of `dumps` takes half the time."""
    body = json.dumps(list(lines))[1:-1]
    return f",\n{body}".encode() if body else b""
