"""`stitch-run --replay`: the allocator events of a recorded run, again, every address checked."""

from __future__ import annotations

from stitch.cli.command import EXIT_OK, say
from stitch.errors import FormatError
from stitch.files import read_text, unreadable
from stitch.report.explain import counted
from stitch.report.replay import replay


def replay_file(path: str) -> int:
    """Replay a recording; raises `FormatError` for a bad file, `TaskError` at a difference."""
    try:
        text = read_text(path, errors="surrogateescape")
    except OSError as error:
        raise unreadable(path, error) from error
    try:
        done = replay(text)
    except FormatError as error:
        error.where = ", ".join(filter(None, (path, error.where)))
        raise
    numbers = (
        counted(done.runs, "plan run"),
        counted(done.allocations, "allocation"),
        counted(done.frees, "free"),
        counted(done.moves, "move"),
    )
    say(
        f"[SUCCESS] {counted(done.events, 'event')} replayed on {done.machine}: "
        f"{', '.join(numbers)}; every address as recorded"
    )
    return EXIT_OK
