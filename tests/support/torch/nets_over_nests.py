"""The networks of `examples/fractal` in plain PyTorch: functions of tensors, which have gradients.

Each takes what the example's `inputs` names: a nest whose lists are equally long as one tensor, a
ragged one as lists of such. It gives what the example's `network` gives, in the same form.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.nn import functional


def _recurrent(words: Iterable[Any], w: Any, u: Any, b: Any = 0) -> list[Any]:
    states: list[Any] = []
    for x in words:
        before = states[-1] if states else torch.zeros(1, u.shape[0])
        states.append(torch.tanh(x @ w + before @ u + b))
    return states


def stacked_rnn(sentences: Any, ws: Any, us: Any, bs: Any) -> Any:
    found = []
    for words in sentences:
        layers = []
        for w, u, b in zip(ws, us, bs, strict=True):
            words = _recurrent(words, w, u, b)
            layers.append(words)
        found.append(layers)
    return found


def stacked_lstm(xs: Any, ws: Any, us: Any, bs: Any) -> Any:
    layers = []
    for w, u, b in zip(ws, us, bs, strict=True):
        said = kept = torch.zeros(xs[0].shape)
        states = []
        for x in xs:
            gates = x @ w + said @ u + b
            i, f, o, new = gates.chunk(4, dim=1)
            kept = torch.sigmoid(f) * kept + torch.sigmoid(i) * torch.tanh(new)
            said = torch.sigmoid(o) * torch.tanh(kept)
            states.append(said)
        xs = states
        layers.append(states)
    return layers


def shrinking_batch(places: Any, ws: Any, us: Any) -> Any:
    for w, u in zip(ws, us, strict=True):
        sentences = [
            _recurrent([words[n] for words in places if len(words) > n], w, u)
            for n in range(len(places[0]))
        ]
        places = [[s[t] for s in sentences if len(s) > t] for t in range(len(places))]
    return places


def bidirectional(sentences: Any, w_left: Any, u_left: Any, w_right: Any, u_right: Any) -> Any:
    found = []
    for words in sentences:
        left = _recurrent(words, w_left, u_left)
        right = _recurrent(list(words)[::-1], w_right, u_right)[::-1]
        found.append([torch.cat(both, dim=1) for both in zip(left, right, strict=True)])
    return found


def dilated_rnn(sentences: Any, ws: Any, us: Any) -> Any:
    found = []
    for words in sentences:
        for k, (w, u) in enumerate(zip(ws, us, strict=True)):
            states: list[Any] = []
            for t, x in enumerate(words):
                before = states[t - 2**k] if t >= 2**k else torch.zeros(x.shape)
                states.append(torch.tanh(x @ w + before @ u))
            words = states
        found.append(list(words))
    return found


def grid_rnn(sources: Any, targets: Any, wxs: Any, uxs: Any, wys: Any, uys: Any) -> Any:
    found = []
    for source, target in zip(sources, targets, strict=True):
        xss = [list(source) for _ in target]
        yss = [[y for _ in source] for y in target]
        for wx, ux, wy, uy in zip(wxs, uxs, wys, uys, strict=True):
            for j, (xs, ys) in enumerate(zip(xss, yss, strict=True)):
                for i, (x, y) in enumerate(zip(xs, ys, strict=True)):
                    zero = torch.zeros(x.shape)
                    both = torch.cat(
                        [xss[j - 1][i] if j else zero, yss[j][i - 1] if i else zero], dim=1
                    )
                    xs[i], ys[i] = torch.tanh(x @ wx + both @ ux), torch.tanh(y @ wy + both @ uy)
        found.append((xss, yss))
    return tuple([list(part) for part in zip(*found, strict=True)])


def attention(
    sources: Any, targets: Any, w_read: Any, u_read: Any, w: Any, u: Any, by_read: Any,
    by_state: Any, to_score: Any,
) -> Any:  # fmt: skip
    found = []
    for source, target in zip(sources, targets, strict=True):
        reads = torch.cat(_recurrent(source, w_read, u_read))
        state, states = torch.zeros(1, u.shape[0]), []
        for word in target:
            state = torch.tanh(word @ w + state @ u)
            scores = torch.tanh(reads @ by_read + state @ by_state) @ to_score
            state = state + torch.softmax(scores, dim=0).T @ reads
            states.append(state)
        found.append(states)
    return found


def flash_attention(queries: Any, keys: Any, values: Any) -> Any:
    heads, _, _, width = queries.shape
    q, k, v = [each.reshape(heads, -1, width) for each in (queries, keys, values)]
    return functional.scaled_dot_product_attention(q, k, v).reshape(queries.shape)


def multi_head_attention(
    sentences: Any, w_queries: Any, w_keys: Any, w_values: Any, w_out: Any
) -> Any:
    q, k, v = [torch.einsum("btd,hdw->bhtw", sentences, w) for w in (w_queries, w_keys, w_values)]
    seen = functional.scaled_dot_product_attention(q, k, v)
    return seen.transpose(1, 2).flatten(2) @ w_out


#: The blocks that each block after the first looks at by chance, as the example has them.
_BY_CHANCE = ((3, 4), (4, 5), (5, 1), (6, 2), (1, 3), (2, 4))


def bigbird(queries: Any, keys: Any, values: Any) -> Any:
    """All scores at once, of which a mask leaves some."""
    blocks, block, width = queries.shape
    mask = torch.zeros(blocks, blocks, dtype=torch.bool)
    mask[0] = mask[:, 0] = True
    for n in range(1, blocks):
        others = blocks - 1
        mask[n, [(n - 1 + apart) % others + 1 for apart in (-1, 0, 1)]] = True
        mask[n, list(_BY_CHANCE[n - 1])] = True
    mask = mask.repeat_interleave(block, 0).repeat_interleave(block, 1)
    q, k, v = [each.reshape(-1, width) for each in (queries, keys, values)]
    seen = functional.scaled_dot_product_attention(q[None], k[None], v[None], attn_mask=mask)
    seen = seen.reshape(queries.shape)
    return seen[:1], seen[1:]


def sparse_attention(queries: Any, keys: Any, values: Any) -> Any:
    """As BigBird's: by masks."""
    found = []
    for q, k, v in zip(queries, keys, values, strict=True):
        seen = []
        for apart in (1, 3):
            mask = torch.zeros(len(q), len(q), dtype=torch.bool)
            for n in range(len(q)):
                mask[n, [(n + by) % len(q) for by in (-apart, 0, apart)]] = True
            seen.append(functional.scaled_dot_product_attention(q[None], k[None], v[None], mask)[0])
        found.append(seen)
    return tuple([list(part) for part in zip(*found, strict=True)])


def convolution(images: Any, kernels: Any) -> Any:
    rows, size, out = kernels.shape
    filters = kernels.reshape(rows, 3, size // 3, out).permute(3, 2, 0, 1)
    return functional.conv2d(images.permute(0, 3, 1, 2), filters, padding=1).permute(0, 2, 3, 1)


def two_products(a: Any, b: Any, c: Any) -> Any:
    rows, inner, size, _ = a.shape
    whole_a = a.permute(0, 2, 1, 3).reshape(rows * size, inner * size)
    whole_b = b.permute(1, 2, 0, 3).reshape(inner * size, -1)
    return (whole_a @ whole_b @ c.reshape(-1, c.shape[2])).reshape(rows, size, -1)


def transformer(
    sentences: Any, w_queries: Any, w_keys: Any, w_values: Any, scale1: Any, shift1: Any,
    w_out: Any, scale2: Any, shift2: Any, up: Any, down: Any,
) -> Any:  # fmt: skip
    found = []
    for words in sentences:
        x = words[:, 0] if isinstance(words, torch.Tensor) else torch.cat(list(words))
        y = functional.layer_norm(x, x.shape[1:], scale1[0], shift1[0])
        seen = functional.scaled_dot_product_attention(y @ w_queries, y @ w_keys, y @ w_values)
        x = x + seen.transpose(0, 1).flatten(1) @ w_out
        y = functional.layer_norm(x, x.shape[1:], scale2[0], shift2[0])
        found.append((x + torch.relu(y @ up) @ down)[:, None])
    return found


def selective_state_space(
    words: Any, w_in: Any, kernel: Any, a: Any, w_step: Any, b_step: Any, w_put: Any, w_read: Any,
    skip: Any, w_out: Any,
) -> Any:  # fmt: skip
    x, gate = (words @ w_in).chunk(2, dim=1)
    padded = functional.pad(x.T[None], (len(kernel) - 1, 0))
    x = functional.silu(functional.conv1d(padded, kernel.T[:, None], groups=kernel.shape[1])[0].T)
    size = functional.softplus(x @ w_step + b_step)
    state, said = torch.zeros(a.shape), []
    for t in range(len(words)):
        put = torch.outer(size[t] * x[t], x[t] @ w_put)
        state = torch.exp(size[t][:, None] * a) * state + put
        said.append(state @ (x[t] @ w_read) + skip * x[t])
    return torch.stack(said) * functional.silu(gate) @ w_out


#: By the name of the example.
NETWORKS: dict[str, Callable[..., Any]] = {
    network.__name__: network
    for network in (
        attention, bidirectional, bigbird, convolution, dilated_rnn, flash_attention, grid_rnn,
        multi_head_attention, selective_state_space, shrinking_batch, sparse_attention,
        stacked_lstm, stacked_rnn, transformer, two_products,
    )
}  # fmt: skip
