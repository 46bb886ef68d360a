"""Random numbers that torch draws: the option `rng="torch"`.

Comes in: an fx graph with known sizes. Goes out: the same graph, which gets as arguments what its
random operators would draw, and the draws, in their order: torch makes them before each call, from
its own generator, as eager torch would. What is drawn by data (`bernoulli` of a tensor of
probabilities, `multinomial`) cannot be drawn before; it is left to torch, and so is all after it,
for the order decides who gets which number. Must not know: programs.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from stitch.frontend.torch.compile.graph_cut import is_random
from stitch.frontend.torch.compile.graph_program import boxed
from stitch.frontend.torch.eager_dropout import FACTORS, dropout_factors
from stitch.frontend.torch.lowering import KEEPING, LOWERINGS, REPLAYING

aten = torch.ops.aten
DRAWN_BY_DATA = 'rng="torch": it is drawn in its turn, by data or after what is'
#: Of their tensor they read the shape, strides and type.
_BY_SHAPE = frozenset(
    (
        FACTORS, aten.bernoulli.p, aten.rand_like.default, aten.randn_like.default,
        aten.randint_like.default, aten.randint_like.low_dtype, aten.uniform.default,
        aten.normal_functional.default, aten.exponential.default, aten.geometric.default,
        aten.log_normal.default, aten.cauchy.default, aten.random.default, aten.random.to,
        getattr(aten.random, "from"),
    )
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Draw:
    """One random operator: gives, for the graph's arguments, the values that it stands for."""

    values: Callable[[Sequence[Any]], Sequence[Any]]
    #: Which of the values the graph reads, in the order of its placeholders.
    read: tuple[int, ...]


def random_nodes(graph: Any) -> list[Any]:
    """The nodes of a graph that draw; attention, which may in torch, does not where it is whole."""
    return [
        node
        for node in graph.nodes
        if node.op == "call_function" and is_random(node) and node.target not in LOWERINGS
    ]


def take_draws(graph: Any) -> tuple[tuple[Draw, ...], list[Any]]:
    """Puts placeholders for what a graph draws behind its own; and the nodes that torch has to run
    because they cannot be drawn before."""
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    positions = {node: place for place, node in enumerate(placeholders)}
    random = random_nodes(graph)
    draws: list[Draw] = []
    in_turn: list[Any] = []
    for number, node in enumerate(random):
        values = _values_of(node, positions)
        if values is None:
            in_turn = random[number:]
            break
        draws.append(Draw(values, tuple(_replace(graph, node, placeholders))))
    if draws:
        graph.eliminate_dead_code()
    return tuple(draws), in_turn


def with_draws(run: Callable[[list[Any]], Any], draws: Sequence[Draw]) -> Callable[..., Any]:
    """A function of a graph's own arguments, of one that takes what is drawn behind them."""

    @boxed
    def drawing(arguments: list[Any]) -> Any:
        for draw in draws:
            values = draw.values(arguments)
            arguments += [values[place] for place in draw.read]
        return run(arguments)

    return drawing


def _values_of(
    node: Any, positions: dict[Any, int]
) -> Callable[[Sequence[Any]], Sequence[Any]] | None:
    """How a node is drawn from what the graph is given; None where that takes more."""
    if node.target is REPLAYING:
        state, target, *operands = node.args
        draw = _drawn_alone(target, operands, node.kwargs)
        place = positions.get(state)
        return None if draw is None or place is None else _replayed(draw, place)
    if node.target is KEEPING:
        target, *operands = node.args
        draw = _drawn_alone(target, operands, node.kwargs)
        return None if draw is None else _kept(draw)
    draw = _drawn_alone(node.target, node.args, node.kwargs)
    return None if draw is None else lambda _: (draw(),)


def _drawn_alone(target: Any, operands: Any, named: Any) -> Callable[[], Any] | None:
    """An operator with its operands, where of tensors only their shapes count."""
    tensors: list[Any] = []
    torch.fx.node.map_arg((operands, named), tensors.append)
    if (tensors and target not in _BY_SHAPE) or not all(map(_is_sized, tensors)):
        return None
    made, given = torch.fx.node.map_arg((tuple(operands), dict(named)), _like)
    if target is aten.bernoulli.p:
        # As `bernoulli_` draws, which is in the order of the bytes; the operator, which stands for
        # it in the graph, gives them in the order of the axes.
        shaped, p = made
        return lambda: torch.empty_like(shaped).bernoulli_(p).contiguous()
    function = dropout_factors if target is FACTORS else target
    return lambda: function(*made, **given)


def _is_sized(node: Any) -> bool:
    value = node.meta.get("val")
    return (
        isinstance(value, torch.Tensor)
        and value.layout is torch.strided
        and all(isinstance(size, int) for size in (*value.shape, *value.stride()))
    )


def _like(node: Any) -> Any:
    """A tensor of a node's shape, strides and type; nobody reads or writes its elements."""
    value = node.meta["val"]
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)


def _kept(draw: Callable[[], Any]) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """Of a forward pass under a checkpoint: the state, and what is drawn from it."""
    return lambda _: (torch.get_rng_state(), draw())


def _replayed(draw: Callable[[], Any], place: int) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """Of its backward pass: what is drawn from the state at a place of the arguments."""

    def replay(arguments: Sequence[Any]) -> Sequence[Any]:
        now = torch.get_rng_state()
        torch.set_rng_state(arguments[place])
        try:
            return (draw(),)
        finally:
            torch.set_rng_state(now)

    return replay


def _replace(graph: Any, node: Any, placeholders: list[Any]) -> list[int]:
    """Placeholders for the values of a node that are read; which ones those are."""
    picked = node.target is KEEPING
    users = list(node.users)
    readers = {user.args[1]: user for user in users if picked and user.target is operator.getitem}
    values = {place: (reader, reader.meta["val"]) for place, reader in readers.items()}
    if not picked and users:
        values = {0: (node, node.meta["val"])}
    for place, (reader, value) in sorted(values.items()):
        with graph.inserting_after(placeholders[-1]) if placeholders else _at_start(graph):
            drawn = graph.placeholder(f"{node.name}_{place}")
        drawn.meta["val"] = value
        reader.replace_all_uses_with(drawn)
        placeholders.append(drawn)
        if picked:
            graph.erase_node(reader)
    graph.erase_node(node)
    return sorted(values)


def _at_start(graph: Any) -> Any:
    return graph.inserting_before(next(iter(graph.nodes)))
