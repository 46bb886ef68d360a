"""`ChromeTrace`: a device's work as a Chrome trace, for Perfetto and chrome://tracing.

Observes only. Events are kept while the device works, and turned into trace lines when requested or
in batches that go to the file; so memory holds one batch, or the latest events.
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
from stitch.files import OutputFiles, Sink, write_added
from stitch.report.device import DEVICE
from stitch.report.explanation import totals_json
from stitch.report.temporary_output import TemporaryOutput
from stitch.report.trace_events import Heard, Line, TraceLines
from stitch.runtime import Event, PlanRun, PlanStopped, RuntimeDevice

#: Steps of plans and other events that are kept where there is no file; beyond this the oldest go.
MAX_STEPS = 200_000
#: Events of a device after which old ones go, or are written.
BATCH = 1024


class ChromeTrace:
    """Subscribes to a device until `close`.

    With a `path` the trace is written there when it is closed, compressed where the name ends with
    `.gz`, whole; use it as a context manager. Without one `as_json` gives what was seen so far.
    Subscribe before programs are loaded, so that their constants are seen.
    """

    @takes(device=DEVICE, path=optional(PATH))
    def __init__(self, device: RuntimeDevice, path: str | Path | None = None) -> None:
        """Raises `UsageError`, `StitchError` where the file cannot be begun."""
        self._device = device
        self._period = device.history.period_from_now()
        self._seen: deque[Heard] = deque()
        #: How many steps are kept, how many events these are, how many steps came before them.
        self._steps = self._counted = self._left_out = 0
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
        """Listen no more; what has a path is written. Twice does no harm. Raises `StitchError`."""
        if self._output is None or not self._is_open:
            self._unsubscribe()
            return
        write_added(self.add_to, self.forget)

    def forget(self) -> None:
        """Listen no more, and write nothing; twice does no harm."""
        self._unsubscribe()
        self._is_open = False
        if self._output is not None:
            self._output.close()

    def add_to(self, batch: OutputFiles) -> None:
        """Listen no more, and add the file to those that a batch is going to write; `forget` it
        when that has happened."""
        assert self._output is not None
        assert self._path is not None
        self._unsubscribe()
        self._is_open = False
        self._write()
        if not self._device.is_closed:
            self._output.write(_text(self._lines.rest(self._memory.now())))
        body = json.dumps({"displayTimeUnit": "ns", "otherData": self._other(self._lines, 0)})
        self._output.write(b"\n], " + body[1:].encode() + b"\n")
        batch.add(self._path, self._poured)

    def _poured(self, sink: Sink) -> None:
        assert self._output is not None
        self._output.copy_to(sink)

    def as_json(self) -> dict[str, Any]:
        """The trace in the JSON object form; times in microseconds.

        `otherData` adds up all copies since it began, those of events that are gone as well. Raises
        `UsageError` for a trace that goes to a file.
        """
        if self._output is not None:
            raise UsageError("this trace goes to its file", where=str(self._path),
                             remedy="close it and read the file, or give no path")  # fmt: skip
        seen, lines = tuple(self._seen), self._lines.twin()
        told = lines.names()
        for heard in seen:
            told += lines.add(heard)
        other = self._other(lines, self._left_out)
        return {"traceEvents": told, "displayTimeUnit": "ns", "otherData": other}

    def _other(self, lines: TraceLines, left_out: int) -> dict[str, Any]:
        return totals_json(self._period, lines.total) | {"older_steps_left_out": left_out}

    # -- listening ---------------------------------------------------------------------------------

    def _on_event(self, event: Event) -> None:
        lying = self._memory.now() if isinstance(event, PlanRun) else None
        self._seen.append(Heard(event, lying, get_ident(), perf_counter()))
        if len(self._seen) - self._counted < BATCH:
            return
        if self._output is None:
            self._let_go()
        else:
            self._write()

    def _let_go(self) -> None:
        """Drop the oldest of too many."""
        seen = self._seen
        self._steps += sum(_count(seen[-i]) for i in range(1, len(seen) - self._counted + 1))
        while seen and self._steps - _count(seen[0]) >= MAX_STEPS:
            count = _count(seen[0])
            self._steps -= count
            self._left_out += count
            self._lines.skip(seen.popleft())
        self._counted = len(seen)

    def _write(self) -> None:
        """Write the lines of what was kept."""
        # Whoever comes in between, a signal handler of this thread perhaps, leaves it to this call.
        if self._output is None or not self._is_busy.acquire(blocking=False):
            return
        try:
            while self._seen:
                self._output.write(_text(self._lines.add(self._seen.popleft())))
        finally:
            self._is_busy.release()


def _count(heard: Heard) -> int:
    """How many steps an event is."""
    event = heard.event
    if isinstance(event, PlanRun):
        return 1 + len(event.plan.steps)
    return 1 + event.steps_done if isinstance(event, PlanStopped) else 1


def _text(lines: Iterable[Line]) -> bytes:
    """Lines behind others; all in one go, as that takes half the time."""
    body = json.dumps(list(lines))[1:-1]
    return f",\n{body}".encode() if body else b""
