"""PyTorch: the nests as loops, eager and through torch.compile, and what it has for them whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn import functional
from torch.nn.utils import rnn

from fractal_ways.cases import NotAvailableError, Run
from stitch.program import Array

#: Makes a part of a network faster, or leaves it as it is.
Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]


def tensors(value: Any) -> Any:
    """Arrays as tensors, also in lists."""
    if isinstance(value, list) and value and not isinstance(value[0], int | list):
        return [tensors(each) for each in value]
    return value if isinstance(value, list | tuple) else torch.from_numpy(value.copy())


def without_gradients(f: Callable[[], Any]) -> Run:
    """A run for inference."""

    def run() -> Any:
        with torch.inference_mode():
            return f()

    return run


def loops(function: str, arguments: Sequence[Any], *, is_compiled: bool) -> Run:
    """The nest of this name; raises `NotAvailableError` where inductor cannot compile it."""
    wrap: Wrap = lambda part: part  # noqa: E731
    if is_compiled:
        # Each case keeps its own compiled forms only.
        torch.compiler.reset()
        wrap = lambda part: torch.compile(part, dynamic=False)  # noqa: E731
    run = without_gradients(_NETWORKS[function](wrap, *[tensors(each) for each in arguments]))
    if is_compiled:
        try:
            run()
        except RuntimeError as error:  # All that dynamo and inductor raise is one.
            raise NotAvailableError(str(error).strip().partition("\n")[0]) from error
    return run


def _stacked_lstm(wrap: Wrap, xs: Any, ws: Any, us: Any, bs: Any) -> Run:
    zero = torch.zeros(xs.shape[1:])

    def layer(words: Any, w: Any, u: Any, b: Any) -> Any:
        said = kept = zero
        states = []
        for x in words.unbind():
            i, f, o, new = torch.chunk(x @ w + said @ u + b, 4, 1)
            kept = torch.sigmoid(f) * kept + torch.sigmoid(i) * torch.tanh(new)
            said = torch.sigmoid(o) * torch.tanh(kept)
            states.append(said)
        return torch.stack(states)

    part = wrap(layer)

    def run() -> Any:
        words = xs
        for weights in zip(ws, us, bs, strict=True):
            words = part(words, *weights)
        return words

    return run


def _dilated_rnn(wrap: Wrap, xs: Any, ws: Any, us: Any, dilations: Sequence[int]) -> Run:
    zero = torch.zeros(xs.shape[1:])

    def layer(words: Any, w: Any, u: Any, dilation: int) -> Any:
        states: list[Any] = []
        for t, x in enumerate(words.unbind()):
            before = states[t - dilation] if t >= dilation else zero
            states.append(torch.tanh(x @ w + before @ u))
        return torch.stack(states)

    part = wrap(layer)

    def run() -> Any:
        words = xs
        for dilation, w, u in zip(dilations, ws, us, strict=True):
            words = part(words, w, u, dilation)
        return words

    return run


def _grid_rnn(
    wrap: Wrap, sources: Any, targets: Any, wxs: Any, uxs: Any, wys: Any, uys: Any
) -> Run:
    zero, side = torch.zeros(sources.shape[1:]), len(sources)

    def row(above: Any, xs: Any, ys: Any, wx: Any, ux: Any, wy: Any, uy: Any) -> Any:
        across, along = [], []
        before = zero
        for up, x, y in zip(above.unbind(), xs.unbind(), ys.unbind(), strict=True):
            both = torch.cat([up, before], 1)
            before = torch.tanh(y @ wy + both @ uy)
            across.append(torch.tanh(x @ wx + both @ ux))
            along.append(before)
        return torch.stack(across), torch.stack(along)

    part = wrap(row)

    def run() -> Any:
        # As `product` has it: a row for each of the second nest.
        xss = [sources for _ in range(side)]
        yss = [targets[j].expand(side, *zero.shape) for j in range(side)]
        for weights in zip(wxs, uxs, wys, uys, strict=True):
            above = torch.zeros(side, *zero.shape)
            for j in range(side):
                above, yss[j] = part(above, xss[j], yss[j], *weights)
                xss[j] = above
        return xss, yss

    return run


def _ragged_products(wrap: Wrap, lists: list[Any]) -> Run:
    identity = torch.eye(lists[0].shape[1])

    def product(state: Any, matrix: Any) -> Any:
        return state @ matrix

    # Lists differ in length: of one form is a step.
    part = wrap(product)

    def run() -> Any:
        found = []
        for matrices in lists:
            state = identity
            for matrix in matrices.unbind():
                state = part(state, matrix)
                found.append(state)
        return found

    return run


def _two_products(wrap: Wrap, a: Any, b: Any, c: Any) -> Run:
    zero = torch.zeros(c.shape[1:])

    def row(blocks: Any) -> Any:
        state = zero
        for column, last in zip(b.unbind(), c.unbind(), strict=True):
            product = zero
            for left, right in zip(blocks.unbind(), column.unbind(), strict=True):
                product = product + left @ right
            state = state + product @ last
        return state

    part = wrap(row)
    return lambda: [part(blocks) for blocks in a]


def _flash_attention(wrap: Wrap, q: Any, k: Any, v: Any) -> Run:
    *_, block, width = q.shape
    lowest, nothing = torch.full((block, 1), -1e30), torch.zeros(block, 1)

    def step(largest: Any, total: Any, weighed: Any, query: Any, key: Any, value: Any) -> Any:
        scores = query @ key.T * width**-0.5
        new = torch.maximum(largest, scores.amax(1, keepdim=True))
        before, powers = torch.exp(largest - new), torch.exp(scores - new)
        total = total * before + powers.sum(1, keepdim=True)
        return new, total, weighed * before + powers @ value

    part = wrap(step)

    def run() -> Any:
        found = []
        for queries, keys, values in zip(q, k, v, strict=True):
            for query in queries:
                state = lowest, nothing, torch.zeros(block, width)
                for key, value in zip(keys, values, strict=True):
                    state = part(*state, query, key, value)
                found.append(state[2] / state[1])
        return found

    return run


def _bigbird(wrap: Wrap, q: Any, k: Any, v: Any, table: list[list[int]]) -> Run:
    width = q.shape[2]

    def attend(query: Any, keys: Any, values: Any) -> Any:
        scores = query @ keys.reshape(-1, width).T * width**-0.5
        return torch.softmax(scores, 1) @ values.reshape(-1, width)

    part = wrap(attend)
    chosen = torch.tensor(table)

    def run() -> Any:
        seen = [
            part(query, k[numbers], v[numbers])
            for query, numbers in zip(q[1:], chosen, strict=True)
        ]
        return [attend(q[0], k, v), *seen]

    return run


def _sentences(wrap: Wrap, sentences: list[Any], w: Any, u: Any, b: Any) -> Run:
    zero = torch.zeros(1, u.shape[0])

    def cell(said: Any, kept: Any, x: Any) -> Any:
        i, f, o, new = torch.chunk(x @ w + said @ u + b, 4, 1)
        kept = torch.sigmoid(f) * kept + torch.sigmoid(i) * torch.tanh(new)
        return torch.sigmoid(o) * torch.tanh(kept), kept

    part = wrap(cell)  # As of lists: of one form is a step.

    def run() -> Any:
        found = []
        for words in sentences:
            said = kept = zero
            for x in words.unbind():
                said, kept = part(said, kept, x)
                found.append(said)
        return found

    return run


_NETWORKS: dict[str, Callable[..., Run]] = {
    network.__name__.removeprefix("_"): network
    for network in (
        _stacked_lstm, _dilated_rnn, _grid_rnn, _ragged_products, _two_products, _flash_attention,
        _bigbird, _sentences,
    )
}  # fmt: skip


# What PyTorch has for them whole -----------------------------------------------------------------


def as_lstm_module(ws: Array, us: Array, bs: Array) -> torch.nn.LSTM:
    """`torch.nn.LSTM` with our weights: its gates are input, forget, new, output."""
    depth, hidden, _ = ws.shape
    module = torch.nn.LSTM(hidden, hidden, depth)

    def turned(block: Array) -> Any:
        i, f, o, new = torch.from_numpy(block).chunk(4, 1)
        return torch.cat([i, f, new, o], 1).T

    with torch.no_grad():
        for layer in range(depth):
            getattr(module, f"weight_ih_l{layer}").copy_(turned(ws[layer]))
            getattr(module, f"weight_hh_l{layer}").copy_(turned(us[layer]))
            getattr(module, f"bias_ih_l{layer}").copy_(turned(bs[layer])[:, 0])
            getattr(module, f"bias_hh_l{layer}").zero_()
    return module


def lstm_module(xs: Array, ws: Array, us: Array, bs: Array) -> Run:
    """`torch.nn.LSTM`."""
    module, given = as_lstm_module(ws, us, bs).eval(), tensors(xs)
    return without_gradients(lambda: module(given)[0])


def packed_lstm(sentences: list[Array], ws: Array, us: Array, bs: Array, *, is_packed: bool) -> Run:
    """`torch.nn.LSTM` over sentences of different lengths, packed beforehand or in each run."""
    module = as_lstm_module(ws, us, bs).eval()
    given = [each[:, 0] for each in tensors(sentences)]
    lengths = torch.tensor([len(each) for each in given])
    padded = rnn.pad_sequence(given)

    def pack() -> Any:
        return rnn.pack_padded_sequence(padded, lengths, enforce_sorted=False)

    before = pack()

    def run() -> Any:
        said, _ = module(before if is_packed else pack())
        whole, _ = rnn.pad_packed_sequence(said)
        return [whole[:n, i] for i, n in enumerate(lengths)]

    return without_gradients(run)


def whole_products(a: Array, b: Array, c: Array) -> Run:
    """The matrices that the blocks are of."""
    block = c.shape[1]
    left = tensors(a).permute(0, 2, 1, 3).reshape(-1, a.shape[1] * block)
    right = tensors(b).permute(1, 2, 0, 3).reshape(left.shape[1], -1)
    last = tensors(c).reshape(-1, block)
    return without_gradients(lambda: left @ right @ last)


def attention(q: Array, k: Array, v: Array) -> Run:
    """All blocks of each head at once."""
    heads, _, _, width = q.shape
    given = [tensors(each).reshape(1, heads, -1, width) for each in (q, k, v)]
    return without_gradients(lambda: functional.scaled_dot_product_attention(*given))


def gathered_attention(q: Array, k: Array, v: Array, table: list[list[int]]) -> Run:
    """All blocks but the first at once, on copies of what they look at."""
    blocks, _, width = q.shape
    queries, keys, values = (tensors(each) for each in (q, k, v))
    chosen = torch.tensor(table)
    attend = functional.scaled_dot_product_attention

    def run() -> Any:
        first = attend(
            queries[None, :1], keys.reshape(1, 1, -1, width), values.reshape(1, 1, -1, width)
        )
        near = [each[chosen].reshape(1, blocks - 1, -1, width) for each in (keys, values)]
        return first, attend(queries[None, 1:], *near)

    return without_gradients(run)
