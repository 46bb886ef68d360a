"""The outputs of a graph of aot_autograd: which of them a program makes, and how torch sees
them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch


@dataclass(frozen=True, slots=True)
class Argument:
    """An output that is an argument, at this position."""

    position: int


@dataclass(frozen=True, slots=True)
class ArgumentView:
    """An output that is a view of an argument, which was traced with `strides_of_argument`.

    Where sizes are symbols, aot_autograd makes the user's view with these strides and offset.
    `offset` is from the first element of the argument on.
    """

    position: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    strides_of_argument: tuple[int, ...]

    def of(self, argument: Any) -> Any:
        """The view."""
        base = restrided(argument, self.strides_of_argument)
        return base.as_strided(self.shape, self.strides, base.storage_offset() + self.offset)


@dataclass(frozen=True, slots=True)
class Known:
    """An output that is a number or None."""

    value: Any


@dataclass(frozen=True, slots=True)
class Result:
    """An output of the program; `strides` where they are not those of a dense row-major tensor;
    `may_be_copied`: torch's code reads it, and no backward pass."""

    index: int
    dtype: Any
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    may_be_copied: bool
    #: One entry for each tensor that torch holds as a view of our bytes.
    views: set[int] = field(default_factory=set)
    nbytes: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "nbytes", math.prod(self.shape) * self.dtype.itemsize)


@dataclass(frozen=True, slots=True)
class View:
    """An output that shares the bytes of a result with others: what torch writes to one shows."""

    result: Result
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int


@dataclass(frozen=True, slots=True)
class Same:
    """An output that is an earlier one, at this place."""

    place: int


Output = Argument | ArgumentView | Known | Result | View | Same
Made = TypeVar("Made")


def shown(
    outputs: Sequence[Output],
    arguments: Sequence[Any],
    results: Sequence[Made],
    show: Callable[[Made, Result], Any],
) -> list[Any]:
    """The outputs as torch tensors; `show` makes one of a program's result, dense and row-major."""
    tensors: list[Any] = []
    shared: dict[int, Any] = {}
    for output in outputs:
        if isinstance(output, Result):
            tensor = show(results[output.index], output)
            tensors.append(tensor if output.strides is None else _strided(tensor, output))
        elif isinstance(output, View):
            index = output.result.index
            if index not in shared:
                shared[index] = _strided(show(results[index], output.result), output.result)
            tensors.append(shared[index].as_strided(output.shape, output.strides, output.offset))
        elif isinstance(output, Argument):
            tensors.append(arguments[output.position])
        elif isinstance(output, ArgumentView):
            tensors.append(output.of(arguments[output.position]))
        else:
            tensors.append(tensors[output.place] if isinstance(output, Same) else output.value)
    return tensors


def without_views(outputs: Sequence[Output]) -> tuple[Output, ...]:
    """Outputs as they were when torch held none: what was read from a file."""
    for result in results_of(outputs):
        result.views.clear()
    return tuple(outputs)


def results_of(outputs: Sequence[Output]) -> list[Result]:
    """What a program makes of these outputs."""
    made = [output.result if isinstance(output, View) else output for output in outputs]
    return [result for result in made if isinstance(result, Result)]


def _strided(tensor: Any, output: Result) -> Any:
    """The bytes of a tensor in the strides of eager torch.

    No view in torch's sense: autograd forbids writing to those of a function's outputs.
    """
    if output.strides is None:
        return tensor
    empty = torch.empty(0, dtype=output.dtype, device="cpu")
    return empty.set_(tensor.untyped_storage(), 0, output.shape, output.strides)


def sorted_outputs(
    graph: Any, positions: Mapping[str, int], exact: int, *, share: bool, may_copy: bool = False
) -> tuple[tuple[Result, ...], tuple[Output, ...]]:
    """What a program has to make, which is what the graph gives then; and what each output is.

    The user sees the first `exact` outputs. With `share`, those of them that are views of one
    value in eager torch share its bytes; where there are gradients, aot_autograd makes the user's
    views of that value with the strides and offsets of these.
    """
    end = next(node for node in graph.nodes if node.op == "output")
    arguments = {storage_of(n): n for n in graph.nodes if n.op == "placeholder" and _is_tensor(n)}
    arguments.pop(None, None)
    sources = _sources(graph, end.args[0][:exact]) if share else {}
    sorting = _Sorting(positions, sources, arguments, may_copy)
    for place, value in enumerate(end.args[0]):
        sorting.add(place, value, is_exact=place < exact)
    end.args = (tuple(sorting.wanted),)
    return tuple(sorting.results), tuple(sorting.outputs)


def _is_tensor(node: Any) -> bool:
    return isinstance(node, torch.fx.Node) and isinstance(node.meta.get("val"), torch.Tensor)


def storage_of(node: Any) -> int | None:
    """The identity of the bytes that a node's tensor lies in, if it lies in any."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return None
    return int(value.untyped_storage()._cdata)


def _sources(graph: Any, outputs: Sequence[Any]) -> dict[Any, Any]:
    """For outputs that share bytes with others, the node that made those bytes."""
    makers: dict[int, Any] = {}
    for node in graph.nodes:
        storage = None if node.op == "output" else storage_of(node)
        if storage is not None:
            makers.setdefault(storage, node)
    nodes = [node for node in outputs if _is_tensor(node) and storage_of(node) is not None]
    count = Counter(map(storage_of, nodes))
    sources = {}
    for node in nodes:
        storage = storage_of(node)
        assert storage is not None, "those without are left out"
        maker = makers[storage]
        kind = maker.meta["val"]
        whole = kind.is_contiguous() or unusual_strides(kind) is not None
        same_type = _bits(kind) == _bits(node.meta["val"])
        if count[storage] > 1 and maker.op == "call_function" and whole and same_type:
            sources[node] = maker
    return sources


def _bits(kind: Any) -> tuple[Any, ...]:
    """How torch reads the bytes of a tensor: those that are read alike may be shared."""
    return kind.dtype, kind.is_neg(), kind.is_conj()


class _Sorting:
    """One walk over the outputs of a graph."""

    def __init__(
        self, positions: Mapping[str, int], sources: Mapping[Any, Any],
        arguments: Mapping[Any, Any], may_copy: bool,
    ) -> None:  # fmt: skip
        self.positions, self.sources, self.arguments = positions, sources, arguments
        self.may_copy = may_copy
        self.outputs: list[Output] = []
        self.wanted: list[Any] = []
        self.results: list[Result] = []
        self._places: dict[Any, int] = {}
        self._shared: dict[Any, Result] = {}

    def add(self, place: int, value: Any, *, is_exact: bool) -> None:
        """One output more."""
        if not _is_tensor(value):
            self.outputs.append(Known(value.meta["val"] if hasattr(value, "meta") else value))
        elif value.op == "placeholder":
            self.outputs.append(Argument(self.positions[value.name]))
        elif is_exact and (view := self._view_of_argument(value)) is not None:
            self.outputs.append(view)
        elif value in self.sources:
            self.outputs.append(self._view(value))
        elif not is_exact and value in self._places:
            self.outputs.append(Same(self._places[value]))
        else:
            result = self._result(value, is_exact)
            if result.strides is None:
                self._places[value] = place
            self.outputs.append(result)

    def _view_of_argument(self, value: Any) -> ArgumentView | None:
        argument, kind = self.arguments.get(storage_of(value)), value.meta["val"]
        if argument is None or argument.name not in self.positions:
            return None
        whole = argument.meta["val"]
        if _bits(kind) != _bits(whole):
            return None
        offset = int(kind.storage_offset()) - int(whole.storage_offset())
        if offset < 0:
            # Of what lies before the argument in its storage the next one may have nothing.
            return None
        return ArgumentView(
            self.positions[argument.name], tuple(kind.shape), tuple(kind.stride()), offset,
            tuple(whole.stride()),
        )  # fmt: skip

    def _view(self, value: Any) -> View:
        source, kind = self.sources[value], value.meta["val"]
        if source not in self._shared:
            self._shared[source] = self._result(source, True)
        offset = int(kind.storage_offset()) - int(source.meta["val"].storage_offset())
        return View(self._shared[source], tuple(kind.shape), tuple(kind.stride()), offset)

    def _result(self, value: Any, is_exact: bool) -> Result:
        kind = value.meta["val"]
        strides = unusual_strides(kind) if is_exact else None
        result = Result(len(self.wanted), kind.dtype, tuple(kind.shape), strides, self.may_copy)
        self.wanted.append(value)
        self.results.append(result)
        return result


def restrided(tensor: Any, strides: tuple[int, ...]) -> Any:
    """A tensor in these strides; the same, if it has them."""
    if tensor.stride() == strides:
        return tensor
    made = torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device="cpu")
    once = tuple(slice(0, 1) if stride == 0 else slice(None) for stride in strides)
    made[once].copy_(tensor[once])
    return made


def unusual_strides(kind: Any) -> tuple[int, ...] | None:
    """The strides that a tensor has in eager torch, where it is dense in another order of axes."""
    if kind.layout is not torch.strided or kind.is_contiguous() or kind.numel() == 0:
        return None
    strides = tuple(int(s) for s in kind.stride())
    step = 1
    for axis in reversed(axes_in_memory(strides)):
        if kind.shape[axis] != 1 and strides[axis] != step:
            return None
        step *= kind.shape[axis]
    return strides


def axes_in_memory(strides: Sequence[int]) -> tuple[int, ...]:
    """Axes from the largest stride to the smallest: the order in which the elements lie."""
    return tuple(sorted(range(len(strides)), key=lambda axis: (-strides[axis], axis)))
