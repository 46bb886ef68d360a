"""Gradients' cases: recurrent layers, against their equations written in torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tests.support.gradients.running import Case, case

H = 3


def _rnn(share: Any, h: Any, _: Any, r: Any, b: Any, relu: bool = False) -> tuple[Any, Any]:
    made = share + h @ r.T + b
    return (made.relu() if relu else made.tanh()), None


def _gru(share: Any, h: Any, _: Any, r: Any, b: Any, linear: bool = False) -> tuple[Any, Any]:
    both = (share[:, : 2 * H] + h @ r[: 2 * H].T + b[: 2 * H]).sigmoid()
    z, reset = both.chunk(2, 1)
    last, bias = r[2 * H :].T, b[2 * H :]
    inner = reset * (h @ last + bias) if linear else (reset * h) @ last + bias
    return (1 - z) * (share[:, 2 * H :] + inner).tanh() + z * h, None


def _lstm(share: Any, h: Any, c: Any, r: Any, b: Any) -> tuple[Any, Any]:
    i, o, f, g = (share + h @ r.T + b).chunk(4, 1)
    c = f.sigmoid() * c + i.sigmoid() * g.tanh()
    return o.sigmoid() * c.tanh(), c


def _layer(step: Callable[..., Any], turns: tuple[bool, ...] = (False,), **more: bool) -> Any:
    """Y [steps, directions, batch, H] and last states, of operands in ONNX's order."""

    def function(x: Any, w: Any, r: Any, *rest: Any) -> Any:
        b = rest[0] if rest else x.new_zeros(w.shape[0], 2 * w.shape[1])
        first = rest[1] if len(rest) > 1 else x.new_zeros(len(turns), x.shape[1], H)
        cell = rest[2] if len(rest) > 2 else torch.zeros_like(first)
        seen, states, cells = [], [], []
        for d, turned in enumerate(turns):
            h, c, ys = first[d], cell[d], []
            half = w.shape[1]
            for one in x.flip(0) if turned else x:
                h, c = step(one @ w[d].T + b[d, :half], h, c, r[d], b[d, half:], **more)
                ys.append(h)
            seen.append(torch.stack(ys[::-1] if turned else ys))
            states.append(h)
            cells.append(c)
        made = (torch.stack(seen, 1), torch.stack(states))
        return made if step is not _lstm else (*made, torch.stack(cells))

    return function


def _specs(gates: int, directions: int, *states: str, steps: int = 4) -> list[Any]:
    rows = gates * H
    weights = [f"f64[{directions},{rows},2]1", f"f64[{directions},{rows},{H}]1"]
    bias = [f"f64[{directions},{2 * rows}]"]
    given = [None, *(f"f64[{directions},2,{H}]" for _ in states)] if states else []
    return [f"f64[{steps},2,2]", *weights, *bias, *given]


BOTH = (False, True)
ROWS: list[Case] = [
    case("RNN", _specs(1, 1), _layer(_rnn), 2, hidden_size=H),
    case("RNN", _specs(1, 2, "h"), _layer(_rnn, BOTH), 2, direction="bidirectional"),
    case("RNN", _specs(1, 1)[:3], _layer(_rnn, relu=True), 2, activations=("Relu",)),
    case("GRU", _specs(3, 1, "h"), _layer(_gru), 2),
    case("GRU", _specs(3, 1)[:3], _layer(_gru, (True,)), 1, direction="reverse"),
    case("GRU", _specs(3, 2, "h"), _layer(_gru, BOTH, linear=True), 2,
         direction="bidirectional", linear_before_reset=1),
    case("LSTM", _specs(4, 1, "h", "c"), _layer(_lstm), 3),
    case("LSTM", _specs(4, 1, steps=1)[:3], _layer(_lstm), 1),
    case("LSTM", _specs(4, 2, "h", "c"), _layer(_lstm, BOTH), 3, direction="bidirectional"),
    case("LSTM", ["f64[2,3,2]", "f64[2,12,2]1", "f64[2,12,3]1", "f64[2,24]", None,
                  "f64[2,2,3]", "f64[2,2,3]"], None, 3, direction="bidirectional", layout=1),
]  # fmt: skip
