"""PyTorch's training step of `torch.nn.LSTM`, with our weights."""

from __future__ import annotations

from collections.abc import Callable

import torch

from fractal_ways.torch_peers import as_lstm_module, tensors
from stitch.program import Array


def step(
    xs: Array, wanted: Array, ws: Array, us: Array, bs: Array, *, rate: float
) -> Callable[[], float]:
    """Forward, mean squared error, backward, SGD; the loss as a number."""
    module = as_lstm_module(ws, us, bs)
    for name, parameter in module.named_parameters():
        # It has two biases where the nest has one: both trained would be twice the rate.
        parameter.requires_grad_(not name.startswith("bias_hh"))
    stepper = torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=rate)
    compute_loss, given, target = torch.nn.MSELoss(), tensors(xs), tensors(wanted)

    def run() -> float:
        stepper.zero_grad()
        loss = compute_loss(module(given)[0], target)
        loss.backward()
        stepper.step()
        return float(loss.item())

    return run
