"""Nests written for elements: a stacked LSTM, dilated and grid RNN, attention as a fold, BigBird.

The same networks as in `tools/bench/fractal.py`; those whose goals are of half precision are
written here for any type. Peers lie on the card, in a CUDA graph that is made by hand where that is
said.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from fractal_ways import blockwise_cases, recurrent_cases, torch_peers

import stitch
from cuda_ways.measuring import Bench, Run
from stitch import fractal as ops
from stitch.fractal import FractalTensor

#: Depth, length, batch, hidden and type of a stacked LSTM, and the most of `nn.LSTM` in a graph.
LSTMS = (
    (32, 64, 256, 256, "float16", 0.5), (32, 64, 256, 512, "float16", 0.65),
    (32, 64, 256, 1024, "float16", 0.9), (8, 64, 16, 64, "float32", 1.5),
    (8, 64, 16, 64, "float16", 0.8),
)  # fmt: skip
SMALL_LSTMS = ((2, 4, 2, 8, "float32", 1.5), (2, 4, 2, 8, "float16", 0.8))
#: Of eager loops; of PyTorch's attention; of its attention over gathered blocks.
LOOPS_GOAL, FLASH_GOAL, BIGBIRD_GOAL = 0.1, 1.3, 1.0
#: Relative errors that types may have.
TOLERANCES = {"float32": 1e-3, "float16": 2e-2}
#: Below every score, also in half precision.
LOWEST = -6e4
LOOPS, LSTM = "torch eager loops", "torch.nn.LSTM"
ATTENTION = "torch scaled_dot_product_attention"


def lstm_network(weights: Any, batch: int, hidden: int, dtype: str) -> Callable[[Any], Any]:
    """A fold over layers around a scan over words."""
    zero = np.zeros((batch, hidden), dtype)

    def layer(xs: Any, parts: Any) -> Any:
        w, u, b = parts
        said, _ = ops.scan(recurrent_cases.lstm_cell, xs, (zero, zero), w=w, u=u, b=b)
        return said

    return lambda xs: ops.fold(layer, ops.zip(*map(FractalTensor, weights)), xs)


def attention_network(block: int, width: int, dtype: str) -> Callable[..., Any]:
    """A map over blocks of queries, in it a fold over blocks of keys and values."""
    number = np.dtype(dtype).type
    start = (
        np.full((block, 1), LOWEST, dtype), np.zeros((block, 1), dtype),
        np.zeros((block, width), dtype),
    )  # fmt: skip

    def step(state: Any, key: Any, value: Any, *, query: Any) -> Any:
        largest, total, weighed = state
        scores = query @ key.T * number(width**-0.5)
        new = np.maximum(largest, scores.max(axis=1, keepdims=True))
        before, powers = np.exp(largest - new), np.exp(scores - new)
        total = total * before + powers.sum(axis=1, keepdims=True)
        return new, total, weighed * before + powers @ value

    def seen(query: Any, *, keys: Any, values: Any) -> Any:
        _, total, weighed = ops.fold(step, ops.zip(keys, values), start, query=query)
        return weighed / total

    def head(queries: Any, keys: Any, values: Any) -> Any:
        return ops.map(seen, queries, keys=keys, values=values)

    return lambda queries, keys, values: ops.map(head, ops.zip(queries, keys, values))


def ours(
    bench: Bench, case: str, network: Any, given: Any, expected: Any, dtype: str = "float32"
) -> float | None:
    """A nest compiled for `cuda`, its inputs on the device."""
    with bench.device() as device:
        notes: list[str] = []

        def make() -> Run:
            nest = ops.compile(network, *given, target="cuda")
            notes.append(", ".join(dict.fromkeys(n.schedule for n in nest.loops)) or "no loops")
            pipe = stitch.Pipeline([device.load(nest.binary)])
            inputs = [device.tensor(bench.tensor(each.leaves()), borrow=True) for each in given]
            return lambda: pipe(*inputs)

        spent = bench.measure(case, "stitch", make, expected, TOLERANCES[dtype])
        left = ", ".join(sorted(device.backend.executor.left_to_numpy)) or "nothing"
        text = f"schedules: {''.join(notes) or 'none'}; by way of the host: {left}"
        bench.note(case, "stitch, loops", text)
    return spent


def lstms(bench: Bench, sizes: Any) -> None:
    """Stacked LSTMs beside `torch.nn.LSTM`."""
    for depth, length, batch, hidden, dtype, most in sizes:
        case = f"LSTM {depth}x{length}x{batch}x{hidden}, {dtype}"
        weights, xs = (
            recurrent_cases.lstm_weights(depth, hidden),
            recurrent_cases.normal(length, batch, hidden),
        )
        kind = getattr(torch, dtype)
        module = torch_peers.as_lstm_module(*weights).to(bench.place, kind).eval()
        x = bench.tensor(xs).to(kind)
        with torch.no_grad():
            expected = module(x)[0].float().cpu().numpy()
        run = _first_of(module, x)
        bench.measure(case, LSTM, partial(_itself, run))
        theirs = bench.measure(
            case, f"{LSTM}, CUDA graph by hand", partial(bench.by_hand, run), expected,
            TOLERANCES[dtype],
        )  # fmt: skip
        network = lstm_network([w.astype(dtype) for w in weights], batch, hidden, dtype)
        mine = ours(bench, case, network, (FractalTensor(xs.astype(dtype)),), expected, dtype)
        bench.ratio("4", f"{case}: / {LSTM}, graph", mine, theirs, most)


def cases(bench: Bench, *, small: bool) -> None:
    """Nests in float32 beside eager loops, or what PyTorch has for them whole."""
    few = recurrent_cases.SMALL[1:]
    made = (
        (recurrent_cases.dilated_rnn(*(few if small else (64, 16, 64)), False, False), LOOPS,
         LOOPS_GOAL),
        (recurrent_cases.grid_rnn(*((3, 2, 8) if small else (16, 16, 64)), False, False), LOOPS,
         LOOPS_GOAL),
        (blockwise_cases.bigbird(*((7, 2, 4) if small else (64, 16, 64)), False, False),
         f"{ATTENTION} of gathered blocks", BIGBIRD_GOAL),
    )  # fmt: skip
    for case, peer, most in made:
        make = next(each.make for each in case.peers if each.name.startswith(peer[:40]))
        with _peers_on(bench):
            run = make()
            expected = run()
            theirs = bench.measure(case.name, peer, partial(_itself, run))
            mine = ours(bench, case.name, case.network, case.given, expected)
        bench.ratio("4", f"{case.name}: / {peer}", mine, theirs, most)


def flash(bench: Bench, length: int, width: int) -> None:
    """Attention as a fold over blocks, in half precision."""
    block = min(blockwise_cases.FLASH_BLOCK, length // 4)
    shape = blockwise_cases.HEADS, length // block, block, width
    arrays = [recurrent_cases.normal(*shape, seed=seed).astype(np.float16) for seed in range(3)]
    q, k, v = (bench.tensor(each).reshape(1, shape[0], length, width) for each in arrays)
    attend = torch.nn.functional.scaled_dot_product_attention
    with torch.no_grad():
        expected = attend(q.float(), k.float(), v.float()).reshape(shape)
    case = f"attention as a fold, {shape[0]}x{length}x{width}, float16"
    theirs = bench.measure(case, ATTENTION, lambda: lambda: attend(q, k, v), expected, 2e-2)
    given = [FractalTensor([list(each) for each in array]) for array in arrays]
    mine = ours(bench, case, attention_network(block, width, "float16"), given, expected, "float16")
    bench.ratio("4", f"{case}: / {ATTENTION}", mine, theirs, FLASH_GOAL)


def _first_of(module: Any, x: Any) -> Run:
    """What a recurrent module says, without its states."""
    return lambda: module(x)[0]


def _itself(run: Run) -> Run:
    return run


class _There:
    """PyTorch, whose new tensors lie on a device. (As a mode it would slow every call.)"""

    def __init__(self, place: torch.device) -> None:
        for name in ("zeros", "full", "eye", "tensor"):
            setattr(self, name, partial(getattr(torch, name), device=place))

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


@contextmanager
def _peers_on(bench: Bench) -> Iterator[None]:
    """Within the block, peers make their tensors on the device of the benchmark."""
    peers: Any = torch_peers
    before = peers.torch, peers.tensors

    def tensors(value: Any) -> Any:
        if isinstance(value, list) and value and not isinstance(value[0], int | list):
            return [tensors(each) for each in value]
        return value if isinstance(value, list | tuple) else bench.tensor(value)

    try:
        peers.torch, peers.tensors = _There(bench.place), tensors
        yield
    finally:
        peers.torch, peers.tensors = before


def measured(bench: Bench, *, small: bool) -> None:
    """Measure all of them, those with the least time first."""
    with bench.guarded("nests in float32"):
        cases(bench, small=small)
    with bench.guarded("attention as a fold"):
        flash(bench, 32 if small else 4096, 8 if small else 64)
    for sizes in SMALL_LSTMS if small else LSTMS[::-1]:
        with bench.guarded(f"LSTM {sizes}"):
            lstms(bench, (sizes,))
