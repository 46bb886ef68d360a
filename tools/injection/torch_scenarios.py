"""The run of torch.compile that is stopped. Needs the package torch."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch
from torch._dynamo.eval_frame import skip_code

import stitch
from injection.faults import TRACING
from injection.model import Array, Case
from stitch.frontend.torch.compile import stitch_backend

OPTIONS = {"target": "tiny"}

STITCH = f"{Path(stitch.__file__).parent}/"


def _is_in_stitch() -> bool:
    """Whether a call of Stitch is under way."""
    frame = sys._getframe()
    while not frame.f_code.co_filename.startswith(STITCH):
        if frame.f_back is None:
            return False
        frame = frame.f_back
    return True


# While a compiled function runs, dynamo looks at every frame that begins: these are none of its.
for _function in (*TRACING, _is_in_stitch):
    skip_code(_function.__code__)


def _same_bytes(found: Array, expected: Array) -> None:
    if found.tobytes() != expected.tobytes():
        raise AssertionError("other bytes than expected")


def torch_compile_call() -> Case:
    """A call of a small network that torch.compile has compiled. Expensive, so used again."""
    torch.set_num_threads(1)
    torch._dynamo.reset()
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
    compiled = torch.compile(net, backend=stitch_backend, options=OPTIONS)
    x = torch.randn(8, 16)
    with torch.no_grad():
        expected = compiled(x).numpy().copy()
    device = stitch.device_of(OPTIONS)
    array = np.arange(16, dtype=np.float32)
    held = device.tensor(array)

    def act() -> None:
        with torch.no_grad():
            _same_bytes(compiled(x).numpy(), expected)

    def probe() -> None:
        _same_bytes(device.tensor(array + 1).numpy(), array + 1)

    def call() -> None:
        # Not among torch's guards: it holds a mutex over them that is not recursive
        # (RootGuardManager, torch 2.13), so a handler that calls the same function there waits for
        # itself for ever, with backend="eager" as well.
        if _is_in_stitch():
            act()

    for _ in range(4):
        act()
    return Case(
        (act,), probe, device.close, {"a tensor": (held.numpy, array)},
        views=device.memory_views, reusable=True,
        # Where dynamo begins a call, it would compile what they do with NumPy as well.
        visits=lambda: tuple(map(torch.compiler.disable, (
            lambda: _same_bytes(held.numpy(), array), device.explain, device.wait, probe, call,
        ))),
    )  # fmt: skip
