"""`ChromeTrace`: a device's work as a Chrome trace, for Perfetto and chrome://tracing."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from time import perf_counter
from typing import Any, final

from stitch.argument_kinds import PATH, optional, takes
from stitch.errors import UsageError
from stitch.files import OutputFiles
from stitch.report.device import DEVICE
from stitch.report.event_report import EventRecord, EventReport, TemporaryOutput
from stitch.report.explanation import totals_json
from stitch.report.trace_events import Line, TraceLines
from stitch.runtime import RuntimeDevice


@final
class ChromeTrace(EventReport):
    """Traces a device until `close`; a context manager.

    Create it before programs are loaded, so that the trace has their constants.

    Args:
        device: The device.
        path: The file that `close` writes, compressed if it ends with `.gz`. Without it the lines
            are kept in memory, for `as_json`.

    Raises:
        StitchError: The folder of the file is not writable.
    """

    batch = 1024

    @takes(device=DEVICE, path=optional(PATH))
    def __init__(self, device: RuntimeDevice, path: str | Path | None = None) -> None:
        self._period = device.history.period_from_now()
        #: The origin of the wall clock, in seconds of `perf_counter`.
        self.began = perf_counter()
        self._lines = TraceLines(device.machine, self.began, device.inter_op_threads)
        self._path = path
        self._kept = self._lines.names()
        self._output = None if path is None else TemporaryOutput(path)
        if self._output is not None:
            self._output.write(b'{"traceEvents": [\n' + _text(self._kept)[2:])
        super().__init__(device)

    def as_json(self) -> dict[str, Any]:
        """Return the trace so far as a JSON object, with times in microseconds.

        Raises `UsageError` for a trace with a path.
        """
        if self._output is not None:
            raise UsageError("this trace is written to a file", where=str(self._path),
                             remedy="close it and read the file, or pass no path")  # fmt: skip
        self._convert_seen()
        return {"traceEvents": [*self._kept], "displayTimeUnit": "ns", "otherData": self._totals()}

    def _totals(self) -> dict[str, Any]:
        return totals_json(self._period, self._lines.total)

    def _convert(self, record: EventRecord) -> None:
        lines = self._lines.add(record)
        if self._output is None:
            self._kept += lines
        else:
            self._output.write(_text(lines))

    def _add_files(self, files: OutputFiles) -> None:
        if self._output is None or self._path is None:
            return
        if not self._device.is_closed:
            self._output.write(_text(self._lines.rest(self._memory.now())))
        body = json.dumps({"displayTimeUnit": "ns", "otherData": self._totals()})
        self._output.write(b"\n], " + body[1:].encode() + b"\n")
        files[self._path] = self._output.copy_to

    def _discard(self) -> None:
        if self._output is not None:
            self._output.close()


def _text(lines: Iterable[Line]) -> bytes:
    """Encode lines that follow others; one call of `dumps` takes half the time."""
    body = json.dumps(list(lines))[1:-1]
    return f",\n{body}".encode() if body else b""
