"""A training step, forward, loss, backward and AdamW: an MLP, and four layers of an encoder.

PyTorch's are eager, and the model through torch.compile (`reduce-overhead`) with the eager
optimizer. Stitch's also copies the batch in, and reads the loss. Losses of the first steps are
compared.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn

import stitch
from cuda_ways.measuring import Bench, Run
from cuda_ways.networks import Block, graph_of

#: Of eager PyTorch: MLP, encoder layers; of torch.compile: encoder layers.
MLP_GOAL, LAYERS_GOAL, COMPILED_GOAL = 0.2, 0.25, 0.4
RATE, COMPARED = 1e-3, 4
EAGER, COMPILED = "torch, eager, AdamW", "torch.compile, reduce-overhead, eager AdamW"


def mlp(small: bool) -> tuple[Any, Any, Any]:
    """784-512-512-10 for 64 images, and their classes."""
    wide, rows, hidden = (16, 4, 8) if small else (784, 64, 512)
    net = nn.Sequential(
        nn.Linear(wide, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(),
        nn.Linear(hidden, 10),
    )  # fmt: skip
    return net, torch.randn(rows, wide), torch.randint(0, 10, (rows,))


def layers(small: bool) -> tuple[Any, Any, Any]:
    """Four layers of an encoder for 8 sentences of 64 words, and a class of each word."""
    width, batch, words, count = (64, 2, 8, 2) if small else (256, 8, 64, 4)
    net = nn.Sequential(*[Block(width, False) for _ in range(count)], nn.Linear(width, 64))
    # Words side by side: a loss takes rows of classes.
    net.append(nn.Flatten(0, 1))
    return net, torch.randn(batch, words, width), torch.randint(0, 64, (batch * words,))


def torch_step(net: Any, forward: Callable[[Any], Any], x: Any, y: Any) -> Run:
    """A step of PyTorch."""
    optimizer = torch.optim.AdamW(net.parameters(), lr=RATE)

    def step() -> Any:
        with torch.enable_grad():
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(forward(x), y)
            loss.backward()
            optimizer.step()
        return loss.detach()

    return step


def our_step(device: Any, net: Any, x: Any, y: Any) -> tuple[Any, Run]:
    """The training, whose state lies on the device, and a step of it."""
    compiled = stitch.compile(
        graph_of(net, "net", x), target="cuda", optimizer=stitch.AdamW(lr=RATE, weight_decay=0.01),
        loss=stitch.losses.CrossEntropyLoss(),
    )  # fmt: skip
    assert compiled.training is not None
    instance = compiled.training.start(device)
    batch = x.numpy(), y.numpy()

    return instance, lambda: np.array(instance.step([batch]))


def beside(
    bench: Bench, case: str, made: tuple[Any, Any, Any]
) -> tuple[float | None, float | None, float | None]:
    """Microseconds of a step: Stitch's, eager, through torch.compile."""
    net, x, y = made
    state = {name: value.clone() for name, value in net.state_dict().items()}
    net.to(bench.place)
    there, classes = x.to(bench.place), y.to(bench.place)

    def fresh(forward: Any) -> Run:
        net.load_state_dict(state)
        return torch_step(net, forward, there, classes)

    run = fresh(net)
    losses = np.array([float(run()) for _ in range(COMPARED)])
    eager = bench.measure(case, EAGER, lambda: fresh(net))
    compiled = None
    if bench.peers:
        torch.compiler.reset()
        words: dict[str, Any] = {"mode": "reduce-overhead", "dynamic": False}
        compiled = bench.measure(case, COMPILED, lambda: fresh(torch.compile(net, **words)))
    net.load_state_dict(state)
    net.to("cpu")
    with bench.device() as device:
        instance, step = our_step(device, net, x, y)
        with instance:
            first = [np.concatenate([step() for _ in range(COMPARED)])]
            before = device.account().total.copies
            # The losses that are compared, then steps.
            mine = bench.measure(
                case, "stitch, step", lambda: lambda: first.pop() if first else step(), losses
            )
            copies = device.account().total.copies - before
            left = ", ".join(sorted(device.backend.executor.left_to_numpy)) or "nothing"
            bench.note(case, "stitch, copies", f"{copies}; by way of the host: {left}")
    return mine, eager, compiled


def measured(bench: Bench, *, small: bool) -> None:
    """Measure both."""
    torch.manual_seed(0)
    with bench.guarded(case := "MLP 784-512-512-10, batch 64"):
        mine, eager, _ = beside(bench, case, mlp(small))
        bench.ratio("5", f"{case}: / eager", mine, eager, MLP_GOAL)
    with bench.guarded(case := "4 encoder layers, 8x64"):
        mine, eager, compiled = beside(bench, case, layers(small))
        bench.ratio("5", f"{case}: / eager", mine, eager, LAYERS_GOAL)
        bench.ratio("5", f"{case}: / torch.compile", mine, compiled, COMPILED_GOAL)
