"""`EventReport`: files of a device's events, converted in batches while the device works."""

from __future__ import annotations

import gzip
import os
import tempfile
from abc import ABC, abstractmethod
from collections import deque
from pathlib import Path
from threading import Lock, get_ident
from time import perf_counter
from typing import IO, NamedTuple, Self, final

from stitch.errors import StitchError
from stitch.files import Data, OutputFiles, Sink, naming, resolved, write_files
from stitch.runtime import Event, Lying, PlanRun, RuntimeDevice


class EventRecord(NamedTuple):
    """An event with the memory contents after it (None: unknown), its thread, and its time.

    `at` is in seconds of `perf_counter`.
    """

    event: Event
    contents: tuple[Lying, ...] | None
    thread: int
    at: float


class EventReport(ABC):
    """Observes a device until `close`, which writes the files; a context manager.

    Only observes: events are kept while the device works, and converted in batches. Subclasses
    must be complete before they call `__init__`, which subscribes to the events.
    """

    #: Events after which they are converted.
    batch: int

    def __init__(self, device: RuntimeDevice) -> None:
        self._device = device
        self._memory = device.watch_memory()
        self._seen: deque[EventRecord] = deque()
        self._is_busy = Lock()
        self._is_open = True
        self._unsubscribe = device.events.subscribe(self._on_event)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop, and write the files; may be called twice."""
        if not self._is_open:
            return
        files: OutputFiles = {}
        try:
            self.add_to(files)
            write_files(files)
        finally:
            self.forget()

    def forget(self) -> None:
        """Stop without writing; may be called twice."""
        self._unsubscribe()
        self._is_open = False
        self._discard()

    def add_to(self, files: OutputFiles) -> None:
        """Stop and add the files to `files`; call `forget` after they are written."""
        self._unsubscribe()
        self._convert_seen()
        self._is_open = False
        self._add_files(files)

    def _on_event(self, event: Event) -> None:
        contents = self._memory.now() if isinstance(event, PlanRun) else None
        self._seen.append(EventRecord(event, contents, get_ident(), perf_counter()))
        if len(self._seen) >= self.batch:
            self._convert_seen()

    def _convert_seen(self) -> None:
        # A call that interrupts this one (a signal handler) leaves its events to this one.
        if not self._is_busy.acquire(blocking=False):
            return
        try:
            while self._seen:
                self._convert(self._seen.popleft())
        finally:
            self._is_busy.release()

    @abstractmethod
    def _convert(self, record: EventRecord) -> None:
        """Convert one event."""

    @abstractmethod
    def _add_files(self, files: OutputFiles) -> None:
        """Add the files, after the last event was converted."""

    @abstractmethod
    def _discard(self) -> None:
        """Remove temporary files; may be called twice."""


# Temporary contents.

_PIECE_NBYTES = 1 << 20
COMPRESSED = ".gz"


@final
class TemporaryOutput:
    """Collects the bytes of the file at `path`, compressed if its name ends with `.gz`.

    The temporary file has no name: the system removes it with the process. Raises `StitchError` if
    the disk is full.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        folder = resolved(self.path).parent
        beside = folder.is_dir() and os.access(folder, os.W_OK)
        with naming(self.path):
            # Stays open until `close`.
            self._file: IO[bytes] = tempfile.TemporaryFile(  # noqa: SIM115
                dir=folder if beside else None
            )
        self._into: IO[bytes] = self._file
        if is_compressed(self.path):
            # Without name and time, equal contents give equal bytes.
            packed = gzip.GzipFile("", "wb", compresslevel=6, fileobj=self._file, mtime=0)
            self._into = packed  # type: ignore[assignment]  # It writes bytes all the same.

    def write(self, data: Data) -> None:
        """Append one piece."""
        with naming(self.path):
            self._into.write(data)

    def copy_to(self, sink: Sink) -> None:
        """Write all pieces to `sink`; none can be appended afterwards."""
        if self._file.closed:
            raise StitchError("the temporary contents were closed", where=str(self.path))
        if self._into is not self._file:
            self._into.close()
        self._file.seek(0)
        while piece := self._file.read(_PIECE_NBYTES):
            sink.write(piece)

    def close(self) -> None:
        """Discard the contents; may be called twice."""
        self._into.close()
        self._file.close()


def is_compressed(path: str | Path) -> bool:
    """Return whether a file's name ends with `.gz`."""
    return Path(path).suffix.lower() == COMPRESSED
