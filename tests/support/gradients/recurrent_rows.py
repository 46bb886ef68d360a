"""Gradients' cases: recurrent layers."""

from __future__ import annotations

from typing import Any

from tests.support.gradients.running import Case, case

H = 3


def _specs(gates: int, directions: int, *states: str, steps: int = 4) -> list[Any]:
    rows = gates * H
    weights = [f"f64[{directions},{rows},2]1", f"f64[{directions},{rows},{H}]1"]
    bias = [f"f64[{directions},{2 * rows}]"]
    given = [None, *(f"f64[{directions},2,{H}]" for _ in states)] if states else []
    return [f"f64[{steps},2,2]", *weights, *bias, *given]


ROWS: list[Case] = [
    case("RNN", _specs(1, 1), outputs=2, hidden_size=H),
    case("RNN", _specs(1, 2, "h"), outputs=2, direction="bidirectional"),
    case("RNN", _specs(1, 1)[:3], outputs=2, activations=("Relu",)),
    case("GRU", _specs(3, 1, "h"), outputs=2),
    case("GRU", _specs(3, 1)[:3], outputs=1, direction="reverse"),
    case("GRU", _specs(3, 2, "h"), outputs=2, direction="bidirectional", linear_before_reset=1),
    case("LSTM", _specs(4, 1, "h", "c"), outputs=3),
    case("LSTM", _specs(4, 1, steps=1)[:3], outputs=1),
    case("LSTM", _specs(4, 2, "h", "c"), outputs=3, direction="bidirectional"),
    case("LSTM", ["f64[2,3,2]", "f64[2,12,2]1", "f64[2,12,3]1", "f64[2,24]", None,
                  "f64[2,2,3]", "f64[2,2,3]"],
         outputs=3, direction="bidirectional", layout=1),
]  # fmt: skip
