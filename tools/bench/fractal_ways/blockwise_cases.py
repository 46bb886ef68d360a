"""Networks over blocks of matrices, with peers: two matrix products back to back, flash attention,
BigBird's sparse attention.

No whole matrix of what lies between is written down in any of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from fractal_ways.cases import Case, Peer, RatioGoal, Run
from fractal_ways.recurrent_cases import eager_goals, loop_peers, normal
from stitch import fractal as ops
from stitch.fractal import FractalTensor
from stitch.program import Array

#: Queries, and keys, of a block of flash attention; fewer where that leaves fewer than four.
FLASH_BLOCK = 64
HEADS = 2
#: Best of ours / PyTorch's fused attention.
ATTENTION_GOAL = 1.2
#: Blocks that each block looks at by chance, beside its window and the global one.
BY_CHANCE = 2
#: Rows and columns of blocks of the two products.
ROWS, INNER, COLUMNS = 8, 4, 8


def two_products(block: int, compiled: bool, small: bool = True) -> Case:
    """(A @ B) @ C of A as [rows][inner] and B as [columns][inner] of blocks, C as [columns]."""
    scale = (INNER * block) ** -0.5
    a = normal(ROWS, INNER, block, block)
    b = normal(COLUMNS, INNER, block, block, scale=scale, seed=1)
    c = normal(COLUMNS, block, block, scale=(COLUMNS * block) ** -0.5)
    zero = np.zeros((block, block), np.float32)

    def first(state: Any, left: Any, right: Any) -> Any:
        return state + left @ right

    def second(state: Any, column: Any, last: Any, *, row: Any) -> Any:
        return state + ops.fold(first, ops.zip(row, column), zero) @ last

    def rows(row: Any, *, columns: Any, lasts: Any) -> Any:
        return ops.fold(second, ops.zip(columns, lasts), zero, row=row)

    def whole() -> Any:
        from fractal_ways import torch_peers

        return torch_peers.whole_products(a, b, c)

    nests = [FractalTensor([list(each) for each in blocks]) for blocks in (a, b)]
    return Case(
        "two products back to back",
        f"{ROWS}x{INNER} and {INNER}x{COLUMNS} blocks of {block}x{block}",
        lambda left, right, last: ops.map(rows, left, columns=right, lasts=last),
        (*nests, FractalTensor(c)),
        (
            *loop_peers("two_products", a, b, c, compiled=compiled),
            Peer("torch, whole matrices", whole),
        ),
        eager_goals(), two_products(4, False, False) if small else None,
    )  # fmt: skip


def flash_attention(length: int, width: int, compiled: bool, small: bool = True) -> Case:
    """Queries, keys, values [heads][blocks] of [block, width]; what each block sees."""
    block = _block_of(length)
    blocks = length // block
    q, k, v = _heads(blocks, blocks, block, block, width)
    return Case(
        f"flash attention, length {blocks * block}",
        f"{HEADS} heads, {blocks} blocks of {block}, width {width}",
        _attention(block, width),
        _nests(q, k, v),
        (
            *loop_peers("flash_attention", q, k, v, compiled=compiled),
            Peer("torch scaled_dot_product_attention", lambda: _at_once(q, k, v)),
        ),
        (*eager_goals(),
         RatioGoal("ATTENTION_GOAL", "torch scaled_dot_product_attention", ATTENTION_GOAL)),
        flash_attention(8, 4, False, False) if small else None,
    )  # fmt: skip


def attention_by_size(length: int, width: int, queries: int, keys: int) -> Case:
    """The same in blocks of so many queries and so many keys: with one query each nobody has
    written how many are computed at a time."""
    q, k, v = _heads(length // queries, length // keys, queries, keys, width)
    words = length // queries * queries
    of_queries = "queries one by one" if queries == 1 else f"blocks of {queries} queries"
    of_keys = "keys one by one" if keys == 1 else f"blocks of {keys} keys"
    return Case(
        f"flash attention, length {words}, {of_queries}, {of_keys}",
        f"{HEADS} heads, width {width}",
        _attention(queries, width),
        _nests(q, k, v),
        (Peer("torch scaled_dot_product_attention", lambda: _at_once(q, k, v)),),
        (RatioGoal("ATTENTION_GOAL", "torch scaled_dot_product_attention", ATTENTION_GOAL),)
        if keys > 1 else (),
        too_slow=("rounds",) if queries == 1 else (),
    )  # fmt: skip


def _block_of(length: int) -> int:
    return max(1, min(FLASH_BLOCK, length // 4))


def _heads(
    query_blocks: int, key_blocks: int, queries: int, keys: int, width: int
) -> tuple[Array, Array, Array]:
    """Queries, keys, values, in blocks of these sizes."""
    q = normal(HEADS, query_blocks, queries, width, seed=0)
    k, v = (normal(HEADS, key_blocks, keys, width, seed=seed) for seed in (1, 2))
    return q, k, v


def _nests(*arrays: Array) -> tuple[FractalTensor, ...]:
    return tuple([FractalTensor([list(each) for each in array]) for array in arrays])


def _at_once(q: Array, k: Array, v: Array) -> Run:
    from fractal_ways import torch_peers

    return torch_peers.attention(q, k, v)


def _attention(block: int, width: int) -> Callable[..., Any]:
    """A map over blocks of queries, in it a fold over blocks of keys and values."""
    scale = np.float32(width**-0.5)
    lowest, nothing = np.full((block, 1), -1e30, np.float32), np.zeros((block, 1), np.float32)
    start = lowest, nothing, np.zeros((block, width), np.float32)

    def step(state: Any, key: Any, value: Any, *, query: Any) -> Any:
        largest, total, weighed = state
        scores = query @ key.T * scale
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


def bigbird(blocks: int, block: int, width: int, compiled: bool, small: bool = True) -> Case:
    """Queries, keys, values [blocks] of [block, width]: what the first block sees, which is global,
    and what each other one does."""
    q, k, v = (normal(blocks, block, width, seed=seed) for seed in range(3))
    random, others = np.random.default_rng(0), blocks - 1
    chance = [
        [
            1 + (n + by) % others
            for by in random.choice(np.arange(2, others - 1), BY_CHANCE, replace=False)
        ]
        for n in range(others)
    ]
    scale = np.float32(width**-0.5)

    def attend(query: Any, keys: Any, values: Any) -> Any:
        scores = query @ ops.flatten(keys).T * scale
        return ops.softmax(scores) @ ops.flatten(values)

    def looked_at(xs: Any) -> Any:
        chosen = ops.gather(xs, [number for numbers in chance for number in numbers])
        return ops.shifted_slide(xs[1:], 3), ops.split(chosen, others)

    def sparse(query: Any, *parts: Any, first_key: Any, first_value: Any) -> Any:
        near_keys, keys, near_values, values = parts
        return attend(
            query, ops.cat(first_key, near_keys, keys), ops.cat(first_value, near_values, values)
        )

    def network(queries: Any, keys: Any, values: Any) -> Any:
        seen = ops.map(
            sparse, ops.zip(queries[1:], *looked_at(keys), *looked_at(values)),
            first_key=keys[:1], first_value=values[:1],
        )  # fmt: skip
        return ops.map(attend, queries[:1], keys, values), seen

    # Block n of the others, its neighbours round the end, and those by chance; the global one.
    table = [
        [0, *[1 + (n + by) % others for by in (-1, 0, 1)], *chance[n]] for n in range(others)
    ]  # fmt: skip

    def at_once() -> Any:
        from fractal_ways import torch_peers

        return torch_peers.gathered_attention(q, k, v, table)

    return Case(
        "BigBird", f"{blocks} blocks of {block}, width {width}, {4 + BY_CHANCE} looked at",
        network, tuple(map(FractalTensor, (q, k, v))),
        (
            *loop_peers("bigbird", q, k, v, table, compiled=compiled),
            Peer("torch scaled_dot_product_attention of gathered blocks", at_once),
        ),
        eager_goals(), bigbird(7, 2, 4, False, False) if small else None,
    )  # fmt: skip
