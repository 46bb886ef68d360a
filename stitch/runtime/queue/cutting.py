"""Long windows that repeat run in pieces: what is planned and written for one runs all of them.

Comes in: a window that has left the queue. Goes out: a window for each piece, which was never
queued; they run one after the other, as if the queue had been run between them. Where one fails,
what depends on it in the others is cancelled, and only that. Must not know how one is planned.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from stitch.runtime.queue.failure import Queue, cancel, drop_dead, says_more
from stitch.runtime.recording import Window
from stitch.tasks import SHORTEST, Cut, Stretch, cuts_of

#: Stretches of which it is remembered how they are cut, the last ones.
MAX_STRETCHES = 16


class Cutting:
    """How the long windows of one device are cut."""

    def __init__(self) -> None:
        self._cuts: dict[Stretch, tuple[Cut, ...]] = {}

    def cuts(self, window: Window) -> tuple[Cut, ...]:
        """The pieces in which a window runs; () where it runs as a whole."""
        graph = window.graph
        if graph.length < SHORTEST:
            return ()
        cuts = self._cuts.get(graph)
        if cuts is None:
            cuts = self._cuts[graph] = cuts_of(graph, window.nothing)
            while len(self._cuts) > MAX_STRETCHES:
                del self._cuts[next(iter(self._cuts))]
        return cuts

    def keep_whole(self, window: Window) -> None:
        """Run such a window as a whole from now on: in pieces something had to give way, and who
        sees all of it chooses better what."""
        self._cuts[window.graph] = ()


def run_in_pieces(
    queue: Queue, window: Window, kept: Sequence[bool], cuts: Sequence[Cut],
    run: Callable[[Window, tuple[bool, ...]], object],
) -> None:  # fmt: skip
    """Run the pieces of a window by `run`; raises the first error at the end."""
    first: Exception | None = None
    try:
        for cut in cuts:
            piece, wanted = _piece(window, kept, cut)
            piece.reads_failed = window.reads_failed or first is not None
            try:
                run(piece, wanted)
            except Exception as problem:
                if says_more(problem, first):
                    first = problem
    except BaseException as problem:
        # An interrupt: nobody will run the rest, unless all of it goes back to the queue.
        if window.is_planned:
            cancel(window, problem)
            drop_dead(queue, window, kept)
        raise
    if first is not None:
        drop_dead(queue, window, kept)
        try:
            raise first
        finally:
            # Its traceback holds this frame.
            del first


def _piece(window: Window, kept: Sequence[bool], cut: Cut) -> tuple[Window, tuple[bool, ...]]:
    """A piece as a window, and which of its values are wanted: what later ones read, too."""
    piece, values = Window(window.number + cut.start, window.nothing), window.values
    piece.graph, piece.reads_exposed = cut.graph, window.reads_exposed
    piece.values = [values[number] for number in cut.numbers]
    piece.agents = window.agents[cut.start : cut.stop]
    wanted = [
        kept[number] or is_read for number, is_read in zip(cut.numbers, cut.read_later, strict=True)
    ]
    return piece, tuple(wanted)
