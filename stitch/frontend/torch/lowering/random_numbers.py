"""Random ATen operators: an explicit key, and a hash of it with a counter.

Comes in: an fx graph in which torch draws numbers from hidden state. Goes out: the same graph with
a placeholder `KEY_NAME` more, from which all random numbers follow; and the lowerings of what then
stands in it. The generator is SplitMix64 (Steele, Lea and Flood, 2014) on (key, counter), written
in operators of ONNX, so that every executor draws the same numbers. Its stream is not torch's.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from stitch.frontend.torch.aten_call import Call, Row
from stitch.graph import SymbolicTensor
from stitch.program import DataType

aten = torch.ops.aten
KEY_NAME = "stitch_key"
#: Keys are drawn below this from torch's own generator, so `torch.manual_seed` decides them.
KEY_LIMIT = 1 << 62

_GOLDEN, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_BETWEEN_KEYS = 0xD1342543DE82EF95
#: Counters of one operator; those of the next follow.
_COUNTERS = 1 << 40


def _signed(number: int) -> int:
    """The int64 with the bits of an unsigned number."""
    return int(np.uint64(number & (1 << 64) - 1).astype(np.int64))


def _stirred(call: Call, z: SymbolicTensor, bits: int, factor: int | None) -> SymbolicTensor:
    """(z ^ (z >> bits)) * factor, modulo 2^64."""
    b = call.builder
    plain = b.cast(z, DataType.UINT64)
    shift = b.constant(np.asarray(bits, np.uint64))
    mixed = b.op("BitwiseXor", plain, b.op("BitShift", plain, shift, direction="RIGHT"))
    if factor is None:
        return mixed
    return b.mul(b.cast(mixed, DataType.INT64), b.constant(np.asarray(_signed(factor), np.int64)))


def _uniform(
    call: Call, key: SymbolicTensor, number: int, shape: tuple[int, ...]
) -> SymbolicTensor:
    """float32 in [0, 1), 24 bits each; `number` tells the random operators of a graph apart."""
    b, count = call.builder, math.prod(shape)
    counters = np.arange(1, count + 1, dtype=np.uint64) + np.uint64(number * _COUNTERS)
    steps = (counters * np.uint64(_GOLDEN)).astype(np.int64).reshape(shape)
    z = b.add(b.constant(steps), key)
    for bits, factor in ((30, _FIRST), (27, _SECOND), (31, None)):
        z = _stirred(call, z, bits, factor)
    top = b.op("BitShift", z, b.constant(np.asarray(40, np.uint64)), direction="RIGHT")
    whole = b.cast(b.cast(top, DataType.INT64), DataType.FLOAT32)
    return b.mul(whole, np.float32(2.0**-24))


def _dropout(
    call: Call, x: SymbolicTensor, p: float, key: SymbolicTensor, number: int
) -> tuple[SymbolicTensor, SymbolicTensor]:
    b = call.builder
    mask = b.less(_uniform(call, key, number, x.shape), np.float32(1.0 - p))
    factor = 0.0 if p >= 1 else 1.0 / (1.0 - p)
    return b.mul(b.mul(x, b.cast(mask, x.data_type)), factor), mask


def _made_uniform(call: Call, key: SymbolicTensor, number: int) -> SymbolicTensor:
    return call.cast(_uniform(call, key, number, call.shape))


def _made_normal(call: Call, key: SymbolicTensor, number: int) -> SymbolicTensor:
    """The method of Box and Muller on two uniform numbers."""
    b, shape = call.builder, call.shape
    both = _uniform(call, key, number, (2, *shape))
    first, second = (b.reshape(part, shape) for part in b.split(both, 1, 0))
    radius = b.sqrt(b.mul(b.log(b.sub(np.float32(1.0), first)), np.float32(-2.0)))
    return call.cast(b.mul(radius, b.cos(b.mul(second, np.float32(2.0 * math.pi)))))


def _made_bernoulli(
    call: Call, p: SymbolicTensor | float, key: SymbolicTensor, number: int
) -> SymbolicTensor:
    b = call.builder
    drawn = _uniform(call, key, number, call.shape)
    limit = b.cast(p, DataType.FLOAT32) if isinstance(p, SymbolicTensor) else np.float32(p)
    return call.cast(b.less(drawn, limit))


def _derived(call: Call, key: SymbolicTensor, number: int) -> SymbolicTensor:
    """A key of its own for one operator, which its backward pass may need again."""
    return call.builder.add(key, np.asarray(_signed(number * _BETWEEN_KEYS), np.int64))


# What stands in the graph for a random operator; the graph is lowered, these are never called.


def _keyed(name: str) -> Any:
    def stand_in(*_: Any) -> Any:
        raise AssertionError(f"{name} is lowered, not called")

    stand_in.__name__ = stand_in.__qualname__ = name
    return stand_in


DROPOUT, UNIFORM, NORMAL, BERNOULLI = map(
    _keyed, ("keyed_dropout", "keyed_uniform", "keyed_normal", "keyed_bernoulli")
)
DERIVED = _keyed("derived_key")
_KEEPING = torch._prims.rng_prims.run_and_save_rng_state
_REPLAYING = torch._prims.rng_prims.run_with_rng_state
_UNIFORM = (aten.rand.default, aten.rand_like.default)
_NORMAL = (aten.randn.default, aten.randn_like.default)
LOWERINGS: dict[Any, Row] = {
    DERIVED: _derived, DROPOUT: _dropout, UNIFORM: _made_uniform, NORMAL: _made_normal,
    BERNOULLI: _made_bernoulli,
}  # fmt: skip


def give_key(graph: Any) -> bool:
    """Rewrites the random operators of a graph to take a key; whether it needs one of its own.

    Checkpointing has forward passes give torch's state to backward passes: here that is a key.
    """
    for node in graph.nodes:
        if node.target is _REPLAYING:
            state, operator, *operands = node.args
            state.meta["val"] = torch.empty(1, dtype=torch.int64)
            node.target, node.args = operator, tuple(operands)
            _rewrite(node, state, 0)
    drawing = [n for n in graph.nodes if n.target is _KEEPING or _rewritten(n, None, 0) is not None]
    if not drawing:
        return False
    with graph.inserting_before(next(iter(graph.nodes))):
        key = graph.placeholder(KEY_NAME)
    key.meta["val"] = torch.empty(1, dtype=torch.int64)
    for number, node in enumerate(drawing, 1):
        if node.target is _KEEPING:
            _keep_key(graph, node, key, number)
        else:
            _rewrite(node, key, number)
    return True


def _keep_key(graph: Any, node: Any, key: Any, number: int) -> None:
    """(state, result) of an operator becomes (key of its own, result)."""
    (state, promised), (operator, *operands) = node.meta["val"], node.args
    del state
    with graph.inserting_before(node):
        own = graph.call_function(DERIVED, (key, number))
        result = graph.call_function(operator, tuple(operands), dict(node.kwargs))
    own.meta = {**node.meta, "val": key.meta["val"]}
    result.meta = {**node.meta, "val": promised}
    _rewrite(result, own, 0)
    for user in list(node.users):
        user.replace_all_uses_with(result if user.args[1] else own)
        graph.erase_node(user)
    graph.erase_node(node)


def _rewrite(node: Any, key: Any, number: int) -> None:
    rewritten = _rewritten(node, key, number)
    if rewritten is not None:
        node.target, node.args = rewritten
        node.kwargs = {}


def _rewritten(node: Any, key: Any, number: int) -> tuple[Any, tuple[Any, ...]] | None:
    if node.op != "call_function":
        return None
    target, args = node.target, node.args
    if target is aten.native_dropout.default and args[1] > 0 and args[2] is not False:
        return DROPOUT, (args[0], args[1], key, number)
    if target in _UNIFORM:
        return UNIFORM, (key, number)
    if target in _NORMAL:
        return NORMAL, (key, number)
    if target is aten.bernoulli.default:
        return BERNOULLI, (args[0], key, number)
    if target in (aten.bernoulli.p, aten.bernoulli.Tensor):
        return BERNOULLI, (args[1], key, number)
    return None
