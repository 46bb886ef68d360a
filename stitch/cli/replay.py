"""`stitch-run --replay`: the allocator events of a recorded run, again, every address checked."""

from __future__ import annotations

from stitch.cli.command import EXIT_OK, say
from stitch.files import read_text, unreadable
from stitch.report.replay import replay


def replay_file(path: str) -> int:
    """Replay a recording; raises `FormatError` for a bad file, `TaskError` at a difference."""
    try:
        text = read_text(path, errors="surrogateescape")
    except OSError as error:
        raise unreadable(path, error) from error
    done = replay(text)
    say(
        f"[SUCCESS] {done.events} events replayed on {done.machine}: {done.runs} plan runs, "
        f"{done.allocations} allocations, {done.frees} frees, {done.moves} moves; "
        "every address as recorded"
    )
    return EXIT_OK
