"""Curves of growth as a page of HTML, drawn with plotly (an optional extra: importing this fails
without it).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from plotly import graph_objects
from plotly.subplots import make_subplots

from fractal_ways.growth import Point

COLOURS = ("#4c72b0", "#dd8452", "#55a868", "#c44e52", "#8172b3", "#937860")


def draw(points: Sequence[Point], path: Path) -> None:
    """Milliseconds and rounds over depth, a curve for each schedule, a row for each hidden size."""
    hiddens = list(dict.fromkeys(point.hidden for point in points))
    schedules = list(dict.fromkeys(point.schedule for point in points))
    titles = [f"hidden {h}: {what}" for h in hiddens for what in ("milliseconds", "rounds")]
    figure = make_subplots(rows=len(hiddens), cols=2, subplot_titles=titles)
    named: set[str] = set()
    for row, hidden in enumerate(hiddens, 1):
        for number, schedule in enumerate(schedules):
            mine = [p for p in points if (p.hidden, p.schedule) == (hidden, schedule)]
            for column, values in ((1, [p.clock_ms for p in mine]), (2, [p.rounds for p in mine])):
                figure.add_trace(
                    graph_objects.Scatter(
                        x=[p.depth for p in mine], y=values, name=schedule, mode="lines+markers",
                        legendgroup=schedule, showlegend=schedule not in named,
                        line={"color": COLOURS[number % len(COLOURS)]},
                    ),
                    row=row, col=column,
                )  # fmt: skip
                named.add(schedule)
    figure.update_xaxes(title_text="depth", type="log")
    figure.update_yaxes(rangemode="tozero")
    figure.update_layout(title="Stacked LSTM by depth", height=360 * len(hiddens))
    figure.write_html(path, include_plotlyjs=True)
