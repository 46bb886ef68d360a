"""Random ATen operators, computed from an explicit key.

The generator is SplitMix64 (Steele, Lea and Flood, 2014) of (key, counter) in operators of ONNX, so
all executors draw the same numbers. They are not torch's numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from stitch.frontend.torch.aten_call import Call, Row, Value
from stitch.frontend.torch.lowering.ordered_elements import sorted_positions
from stitch.frontend.torch.torch_internals import rng_prims
from stitch.graph import SymbolicTensor
from stitch.program import DataType, int64_array

aten = torch.ops.aten
KEY_NAME = "stitch_key"
#: Keys are drawn below this by torch's generator, so they follow from `torch.manual_seed`.
KEY_LIMIT = 1 << 62

_GOLDEN, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_BETWEEN_KEYS = 0xD1342543DE82EF95
#: Number of counters of one operator.
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
    """Integers of `keep` random bits; `number` is that of the random operator in its graph."""
    b, count = call.builder, int64_array([math.prod(shape)], ())
    # No constant, whose elements would be as many as those that are drawn, also of named sizes.
    steps = b.mul(b.op("Range", np.int64(0), count, np.int64(1)), np.int64(_signed(_GOLDEN)))
    first = b.add(key, np.int64(_signed((number * _COUNTERS + 1) * _GOLDEN)))
    # The key has shape [1].
    z = b.reshape(b.add(steps, first), shape)
    for bits, factor in ((30, _FIRST), (27, _SECOND), (31, None)):
        z = _stirred(call, z, bits, factor)
    shift = b.constant(np.asarray(64 - keep, np.uint64))
    return b.cast(b.op("BitShift", z, shift, direction="RIGHT"), DataType.INT64)


def _uniform(
    call: Call, key: SymbolicTensor, number: int, shape: tuple[int, ...]
) -> SymbolicTensor:
    """float32 in [0, 1) of 24 random bits."""
    whole = call.builder.cast(_bits(call, key, number, shape, 24), DataType.FLOAT32)
    return call.builder.mul(whole, np.float32(2.0**-24))


def _dropout(
    call: Call, x: SymbolicTensor, p: float, key: SymbolicTensor, number: int
) -> tuple[SymbolicTensor, SymbolicTensor]:
    b = call.builder
    mask = b.less(_uniform(call, key, number, x.shape), np.float32(1.0 - p))
    factor = 0.0 if p >= 1 else 1.0 / (1.0 - p)
    return b.mul(b.mul(x, b.cast(mask, x.data_type)), factor), mask


def _uniform_between(
    call: Call, key: SymbolicTensor, number: int, low: float = 0.0, high: float = 1.0
) -> SymbolicTensor:
    """Numbers in [low, high), also after rounding to the type of the result."""
    drawn = _scaled(call, _uniform(call, key, number, call.shape), low, high - low)
    wide = call.data_type in (DataType.FLOAT32, DataType.FLOAT64)
    if not wide or (low, high) != (0.0, 1.0):
        kind = (DataType.FLOAT32 if wide else call.data_type).dtype.type
        most = np.nextafter(kind(high), kind(low))
        drawn = call.builder.op("Min", drawn, np.float32(most))
    return call.cast(drawn)


def _scaled(call: Call, drawn: SymbolicTensor, start: Value, width: Value) -> SymbolicTensor:
    """start + width * drawn in float32."""
    b = call.builder
    if isinstance(width, SymbolicTensor) or width != 1:
        drawn = b.mul(drawn, call.cast(width, DataType.FLOAT32))
    if isinstance(start, SymbolicTensor) or start != 0:
        drawn = b.add(drawn, call.cast(start, DataType.FLOAT32))
    return drawn


def _normal(
    call: Call, key: SymbolicTensor, number: int, mean: Value = 0.0, deviation: Value = 1.0
) -> SymbolicTensor:
    """Normal numbers by the method of Box and Muller."""
    b, shape = call.builder, call.shape
    both = _uniform(call, key, number, (2, *shape))
    first, second = (b.reshape(part, shape) for part in b.split(both, 1, 0))
    radius = b.sqrt(b.mul(b.log(b.sub(np.float32(1.0), first)), np.float32(-2.0)))
    drawn = b.mul(radius, b.cos(b.mul(second, np.float32(2.0 * math.pi))))
    return call.cast(_scaled(call, drawn, mean, deviation))


def _bernoulli(
    call: Call, p: SymbolicTensor | float, key: SymbolicTensor, number: int
) -> SymbolicTensor:
    b = call.builder
    drawn = _uniform(call, key, number, call.shape)
    limit = b.cast(p, DataType.FLOAT32) if isinstance(p, SymbolicTensor) else np.float32(p)
    return call.cast(b.less(drawn, limit))


def _integers(call: Call, key: SymbolicTensor, number: int, low: int, high: int) -> SymbolicTensor:
    """Integers in [low, high): 63 random bits modulo the length."""
    b = call.builder
    rest = b.mod(_bits(call, key, number, call.shape, 63), np.int64(high - low))
    return call.cast(b.add(rest, np.int64(low)))


def _permutation(call: Call, key: SymbolicTensor, number: int) -> SymbolicTensor:
    """The order of random numbers of 63 bits."""
    count = call.shape[0]
    return call.cast(call.builder.topk(_bits(call, key, number, (count,), 63), count, 0, False)[1])


def _choices(
    call: Call, weights: SymbolicTensor, replaces: bool, key: SymbolicTensor, number: int
) -> SymbolicTensor:
    """Indices drawn by weight; without replacement, those of the shortest exponential waiting
    times."""
    b, count = call.builder, weights.shape[-1]
    wide = b.cast(weights, DataType.FLOAT64)
    if not replaces:
        drawn = b.cast(_uniform(call, key, number, weights.shape), DataType.FLOAT64)
        waits = b.neg(b.log(b.sub(1.0, drawn)))
        # One draw in 2^24 is zero: limit the quotient.
        return b.topk(b.div(wide, b.op("Max", waits, 2.0**-26)), call.shape[-1], -1)[1]
    sums = b.op("CumSum", wide, b.constant(len(weights.shape) - 1))
    total = b.gather(sums, np.asarray([count - 1], np.int64), -1)
    drawn = b.cast(_uniform(call, key, number, call.shape), DataType.FLOAT64)
    # In float64 a product below the total stays below it: no index of weight zero is drawn.
    return sorted_positions(call, sums, b.mul(drawn, total), right=True)


def _derived(call: Call, key: SymbolicTensor, number: int) -> SymbolicTensor:
    """A key for one operator, which its backward pass may need again."""
    return call.builder.add(key, np.asarray(_signed(number * _BETWEEN_KEYS), np.int64))


def _keyed(name: str) -> Any:
    """The target of a random operator with a key: graphs with it are lowered, not called."""

    def stand_in(*_: Any) -> Any:
        raise AssertionError(f"{name} is lowered, not called")

    stand_in.__name__ = stand_in.__qualname__ = name
    return stand_in


DROPOUT, UNIFORM, NORMAL, BERNOULLI, INTEGERS, PERMUTATION, CHOICES = (
    _keyed(f"keyed_{name}") for name in (
        "dropout", "uniform", "normal", "bernoulli", "integers", "permutation", "choices",
    )
)  # fmt: skip
DERIVED = _keyed("derived_key")
#: By these, checkpoints pass torch's random state from forward to backward passes.
SAVE_STATE = rng_prims.run_and_save_rng_state
RESTORE_STATE = rng_prims.run_with_rng_state
LOWERINGS: dict[Any, Row] = {
    DERIVED: _derived, DROPOUT: _dropout, UNIFORM: _uniform_between, NORMAL: _normal,
    BERNOULLI: _bernoulli, INTEGERS: _integers, PERMUTATION: _permutation, CHOICES: _choices,
}  # fmt: skip


def give_key(graph: Any) -> bool:
    """Rewrite the random operators of a graph to take a key; return whether the key is a new input.

    A random state that a checkpoint passes from a forward to a backward pass becomes a key.
    """
    for node in graph.nodes:
        if node.target is RESTORE_STATE:
            state, operator, *operands = node.args
            state.meta["val"] = torch.empty(1, dtype=torch.int64)
            node.target, node.args = operator, tuple(operands)
            _rewrite(node, state, 0)
    drawing = [
        node for node in graph.nodes
        if node.target is SAVE_STATE or _rewritten(node, None, 0) is not None
    ]  # fmt: skip
    if not drawing:
        return False
    with graph.inserting_before(next(iter(graph.nodes))):
        key = graph.placeholder(KEY_NAME)
    key.meta["val"] = torch.empty(1, dtype=torch.int64)
    for number, node in enumerate(drawing, 1):
        if node.target is SAVE_STATE:
            _save_key(graph, node, key, number)
        else:
            _rewrite(node, key, number)
    return True


def _save_key(graph: Any, node: Any, key: Any, number: int) -> None:
    """Replace the results (state, result) of an operator by (derived key, result)."""
    (_, promised), (operator, *operands) = node.meta["val"], node.args
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
    """Target and arguments of a node with a key; None for a node that draws nothing."""
    rewrite = KEYED.get(node.target) if node.op == "call_function" else None
    return None if rewrite is None else rewrite(node.args, key, number)


def _keyed_dropout(args: Any, key: Any, number: int) -> Any:
    x, p, train = args
    return (DROPOUT, (x, p, key, number)) if p > 0 and train is not False else None


def _keyed_integers(bounds: Callable[..., tuple[int, int]]) -> Any:
    """A rule; `bounds` gives low and high from the operands of the schema."""
    return lambda args, key, number: (INTEGERS, (key, number, *bounds(*args)))


#: By random operator, a rule from operands to target and arguments with a key; None if nothing is
#: drawn. Without a key such operators are refused.
KEYED: dict[Any, Callable[[Any, Any, int], tuple[Any, tuple[Any, ...]] | None]] = {
    aten.native_dropout.default: _keyed_dropout,
    **dict.fromkeys(
        (aten.rand.default, aten.rand_like.default), lambda _, key, n: (UNIFORM, (key, n)),
    ),
    **dict.fromkeys(
        (aten.randn.default, aten.randn_like.default), lambda _, key, n: (NORMAL, (key, n)),
    ),
    # Mean and deviation may be tensors.
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
