"""Random ATen operators: an explicit key, and a hash of it with a counter.

The generator is SplitMix64 (Steele, Lea and Flood, 2014) on (key, counter), written in operators of
ONNX, so that every executor draws the same numbers. Its stream is not torch's.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from stitch.frontend.torch.aten_call import Call, Row, Value
from stitch.frontend.torch.lowering.ordered_elements import places_in
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


def _bits(
    call: Call, key: SymbolicTensor, number: int, shape: tuple[int, ...], keep: int
) -> SymbolicTensor:
    """Whole numbers of that many random bits; `number` tells the random operators of a graph
    apart."""
    b, count = call.builder, math.prod(shape)
    counters = np.arange(1, count + 1, dtype=np.uint64) + np.uint64(number * _COUNTERS)
    steps = (counters * np.uint64(_GOLDEN)).astype(np.int64).reshape(shape)
    # The key has one element, and an axis.
    z = b.reshape(b.add(b.constant(steps), key), shape)
    for bits, factor in ((30, _FIRST), (27, _SECOND), (31, None)):
        z = _stirred(call, z, bits, factor)
    shift = b.constant(np.asarray(64 - keep, np.uint64))
    return b.cast(b.op("BitShift", z, shift, direction="RIGHT"), DataType.INT64)


def _uniform(
    call: Call, key: SymbolicTensor, number: int, shape: tuple[int, ...]
) -> SymbolicTensor:
    """float32 in [0, 1), 24 bits each."""
    whole = call.builder.cast(_bits(call, key, number, shape, 24), DataType.FLOAT32)
    return call.builder.mul(whole, np.float32(2.0**-24))


def _dropout(
    call: Call, x: SymbolicTensor, p: float, key: SymbolicTensor, number: int
) -> tuple[SymbolicTensor, SymbolicTensor]:
    b = call.builder
    mask = b.less(_uniform(call, key, number, x.shape), np.float32(1.0 - p))
    factor = 0.0 if p >= 1 else 1.0 / (1.0 - p)
    return b.mul(b.mul(x, b.cast(mask, x.data_type)), factor), mask


def _made_uniform(
    call: Call, key: SymbolicTensor, number: int, low: float = 0.0, high: float = 1.0
) -> SymbolicTensor:
    return call.cast(_moved(call, _uniform(call, key, number, call.shape), low, high - low))


def _moved(call: Call, drawn: SymbolicTensor, start: Value, width: Value) -> SymbolicTensor:
    """Draws in float32 times a width, from a start on."""
    b = call.builder
    if isinstance(width, SymbolicTensor) or width != 1:
        drawn = b.mul(drawn, call.cast(width, DataType.FLOAT32))
    if isinstance(start, SymbolicTensor) or start != 0:
        drawn = b.add(drawn, call.cast(start, DataType.FLOAT32))
    return drawn


def _made_normal(
    call: Call, key: SymbolicTensor, number: int, mean: Value = 0.0, deviation: Value = 1.0
) -> SymbolicTensor:
    """The method of Box and Muller on two uniform numbers."""
    b, shape = call.builder, call.shape
    both = _uniform(call, key, number, (2, *shape))
    first, second = (b.reshape(part, shape) for part in b.split(both, 1, 0))
    radius = b.sqrt(b.mul(b.log(b.sub(np.float32(1.0), first)), np.float32(-2.0)))
    drawn = b.mul(radius, b.cos(b.mul(second, np.float32(2.0 * math.pi))))
    return call.cast(_moved(call, drawn, mean, deviation))


def _made_bernoulli(
    call: Call, p: SymbolicTensor | float, key: SymbolicTensor, number: int
) -> SymbolicTensor:
    b = call.builder
    drawn = _uniform(call, key, number, call.shape)
    limit = b.cast(p, DataType.FLOAT32) if isinstance(p, SymbolicTensor) else np.float32(p)
    return call.cast(b.less(drawn, limit))


def _made_integers(
    call: Call, key: SymbolicTensor, number: int, low: int, high: int
) -> SymbolicTensor:
    """Whole numbers from low up to high: of 63 bits the rest of a division."""
    b = call.builder
    rest = b.mod(_bits(call, key, number, call.shape, 63), np.int64(high - low))
    return call.cast(b.add(rest, np.int64(low)))


def _made_permutation(call: Call, key: SymbolicTensor, number: int) -> SymbolicTensor:
    """The order of as many random numbers of 63 bits."""
    count = call.shape[0]
    return call.cast(call.builder.topk(_bits(call, key, number, (count,), 63), count, 0, False)[1])


def _made_choices(
    call: Call, weights: SymbolicTensor, replaces: bool, key: SymbolicTensor, number: int
) -> SymbolicTensor:
    """Places of a row by their weights; without replacement those whose exponential waiting times
    are the shortest."""
    b, count = call.builder, weights.shape[-1]
    wide = b.cast(weights, DataType.FLOAT64)
    if not replaces:
        drawn = b.cast(_uniform(call, key, number, weights.shape), DataType.FLOAT64)
        waits = b.neg(b.log(b.sub(1.0, drawn)))
        # One draw in 2^24 is zero: what waits for nothing comes first, whatever its weight.
        return b.topk(b.div(wide, b.op("Max", waits, 2.0**-26)), call.shape[-1], -1)[1]
    sums = b.op("CumSum", wide, b.constant(len(weights.shape) - 1))
    total = b.gather(sums, np.asarray([count - 1], np.int64), -1)
    drawn = b.cast(_uniform(call, key, number, call.shape), DataType.FLOAT64)
    # float64 keeps what is below the total below it: no place without weight is taken.
    return places_in(call, sums, b.mul(drawn, total), right=True)


def _leaked(
    call: Call, x: SymbolicTensor, low: float, high: float, key: SymbolicTensor, number: int
) -> tuple[SymbolicTensor, SymbolicTensor]:
    """Negative elements times random slopes, and the factors."""
    b = call.builder
    drawn = b.cast(_uniform(call, key, number, x.shape), x.data_type)
    slopes = b.add(b.mul(drawn, high - low), low)
    factors = b.where(b.less_or_equal(x, 0), slopes, 1.0)
    return b.mul(x, factors), factors


def _derived(call: Call, key: SymbolicTensor, number: int) -> SymbolicTensor:
    """A key of its own for one operator, which its backward pass may need again."""
    return call.builder.add(key, np.asarray(_signed(number * _BETWEEN_KEYS), np.int64))


# What stands in the graph for a random operator; the graph is lowered, these are never called.


def _keyed(name: str) -> Any:
    def stand_in(*_: Any) -> Any:
        raise AssertionError(f"{name} is lowered, not called")

    stand_in.__name__ = stand_in.__qualname__ = name
    return stand_in


DROPOUT, UNIFORM, NORMAL, BERNOULLI, INTEGERS, PERMUTATION, CHOICES, LEAKED = (
    _keyed(f"keyed_{name}") for name in (
        "dropout", "uniform", "normal", "bernoulli", "integers", "permutation", "choices", "rrelu",
    )
)  # fmt: skip
DERIVED = _keyed("derived_key")
#: With these a checkpoint has a forward pass give torch's state to a backward pass.
KEEPING = torch._prims.rng_prims.run_and_save_rng_state
REPLAYING = torch._prims.rng_prims.run_with_rng_state
LOWERINGS: dict[Any, Row] = {
    DERIVED: _derived, DROPOUT: _dropout, UNIFORM: _made_uniform, NORMAL: _made_normal,
    BERNOULLI: _made_bernoulli, INTEGERS: _made_integers, PERMUTATION: _made_permutation,
    CHOICES: _made_choices, LEAKED: _leaked,
}  # fmt: skip


def give_key(graph: Any) -> bool:
    """Rewrites the random operators of a graph to take a key; whether it needs one of its own.

    Checkpointing has forward passes give torch's state to backward passes: here that is a key.
    """
    for node in graph.nodes:
        if node.target is REPLAYING:
            state, operator, *operands = node.args
            state.meta["val"] = torch.empty(1, dtype=torch.int64)
            node.target, node.args = operator, tuple(operands)
            _rewrite(node, state, 0)
    drawing = [n for n in graph.nodes if n.target is KEEPING or _rewritten(n, None, 0) is not None]
    if not drawing:
        return False
    with graph.inserting_before(next(iter(graph.nodes))):
        key = graph.placeholder(KEY_NAME)
    key.meta["val"] = torch.empty(1, dtype=torch.int64)
    for number, node in enumerate(drawing, 1):
        if node.target is KEEPING:
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
    """What a node becomes with a key; None for one that draws nothing."""
    rewrite = KEYED.get(node.target) if node.op == "call_function" else None
    return None if rewrite is None else rewrite(node.args, key, number)


def _keyed_dropout(args: Any, key: Any, number: int) -> Any:
    x, p, train = args
    return (DROPOUT, (x, p, key, number)) if p > 0 and train is not False else None


def _keyed_leaks(args: Any, key: Any, number: int) -> Any:
    trains = len(args) > 4 and args[4]
    return (LEAKED, (args[0], args[2], args[3], key, number)) if trains else None


def _keyed_integers(between: Callable[..., tuple[int, int]]) -> Any:
    """From and up to which number, by the operands of the schema."""
    return lambda args, key, number: (INTEGERS, (key, number, *between(*args)))


#: What takes a key, and what it becomes then, by its operands; a rule gives None where these draw
#: nothing. Where torch draws, and the front end gives no key, such an operator is refused.
KEYED: dict[Any, Callable[[Any, Any, int], tuple[Any, tuple[Any, ...]] | None]] = {
    aten.native_dropout.default: _keyed_dropout,
    aten.rrelu_with_noise_functional.default: _keyed_leaks,
    **dict.fromkeys(
        (aten.rand.default, aten.rand_like.default), lambda _, key, n: (UNIFORM, (key, n)),
    ),
    **dict.fromkeys(
        (aten.randn.default, aten.randn_like.default), lambda _, key, n: (NORMAL, (key, n)),
    ),
    # Of a mean and a deviation, either of which may be a tensor.
    **dict.fromkeys(
        (
            aten.normal.Tensor_float, aten.normal.float_Tensor, aten.normal.Tensor_Tensor,
            aten.normal.float_float,
        ),
        lambda args, key, n: (NORMAL, (key, n, *args[:2])),
    ),
    aten.normal_functional.default: lambda args, key, n: (NORMAL, (key, n, *args[1:3])),
    aten.uniform.default: lambda args, key, n: (UNIFORM, (key, n, *args[1:3])),
    aten.bernoulli.default: lambda args, key, n: (BERNOULLI, (args[0], key, n)),
    **dict.fromkeys(
        (aten.bernoulli.p, aten.bernoulli.Tensor),
        lambda args, key, n: (BERNOULLI, (args[1], key, n)),
    ),
    aten.randint.default: _keyed_integers(lambda high, *_: (0, high)),
    aten.randint.low: _keyed_integers(lambda low, high, *_: (low, high)),
    aten.randint_like.default: _keyed_integers(lambda _, high: (0, high)),
    aten.randint_like.low_dtype: _keyed_integers(lambda _, low, high: (low, high)),
    aten.randperm.default: lambda _, key, n: (PERMUTATION, (key, n)),
    aten.multinomial.default: lambda args, key, n: (
        CHOICES, (args[0], len(args) > 2 and args[2], key, n)
    ),
}  # fmt: skip
