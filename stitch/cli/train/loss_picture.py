"""A picture of the loss, drawn with matplotlib (an optional extra: importing this fails without).

Comes in: losses by step, validation losses by step. Goes out: the bytes of a picture. Must not
know: where they come from.
"""

from __future__ import annotations

import io
from collections.abc import Sequence

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

Points = Sequence[tuple[int, float]]


def kinds() -> tuple[str, ...]:
    """Suffixes of the pictures that can be drawn, without their dot."""
    return tuple(sorted(FigureCanvasAgg(Figure()).get_supported_filetypes()))


def drawn(title: str, kind: str, losses: Points, validation: Points) -> bytes:
    """The loss of every step, and of the validation part where there is one."""
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    if losses:
        axes.plot(*zip(*losses, strict=True), linewidth=0.8, label="batch")
    if validation:
        axes.plot(*zip(*validation, strict=True), marker=".", label="validation")
    if all(loss > 0 for _, loss in (*losses, *validation)):
        axes.set_yscale("log")
    axes.set(title=title, xlabel="step", ylabel="loss")
    if losses or validation:
        axes.legend()
    stream = io.BytesIO()
    figure.savefig(stream, format=kind)
    return stream.getvalue()
