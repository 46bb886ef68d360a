"""Named sizes of torch modules: `stitch.Dim` and `torch.export.Dim` for torch.export, and the sizes
of its programs as ours.

torch.export assumes that no symbolic size is 0 or 1. What else it relies on is in its shape
environment and becomes our guards: it gets sizes as dynamic within their bounds, without names
(with names it refuses a module whose guards do not hold for all sizes).
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from stitch.errors import CompileError, UsageError, unknown
from stitch.frontend.torch.plain_values import Arguments
from stitch.frontend.torch.torch_internals import pytree
from stitch.program import COMMON_HINT, MAX_SIZE, Dim, Expression, SymbolicSizes

#: The smallest size that torch.export does not treat apart.
LEAST_OF_TORCH = 2
_EXAMPLE = '{0: stitch.Dim("batch", 1, 64)}'


@dataclass(frozen=True, slots=True)
class DynamicArguments:
    """Examples of a dynamic export.

    Attributes:
        arguments: The examples, with sizes of at least 2 where they are dynamic.
        shapes: The same structure with Dims.
        axes: For each leaf of the arguments, its Dims by axis.
    """

    arguments: Arguments
    shapes: Any
    axes: tuple[Mapping[int, Dim], ...]

    def at(self, sizes: Mapping[str, int]) -> DynamicArguments:
        """Return them with some of the Dims at static sizes."""
        leaves, tree = pytree.tree_flatten(self.arguments)
        resized = []
        for leaf, dims in zip(leaves, self.axes, strict=True):
            chosen = {axis: dim for axis, dim in dims.items() if dim.name in sizes}
            resized += at_hints([leaf], [chosen], sizes)
        shapes = pytree.tree_map(
            lambda dim: None if dim is not None and dim.name in sizes else dim, self.shapes
        )
        axes = [{i: d for i, d in dims.items() if d.name not in sizes} for dims in self.axes]
        return replace(self, arguments=tree.unflatten(resized), shapes=shapes, axes=tuple(axes))

    def shapes_of_torch(self) -> Any:
        """Return `shapes` as torch.export takes them."""

        def hint(dim: Dim | None) -> Any:
            if dim is None:
                return None
            most = None if dim.most == MAX_SIZE else dim.most
            return torch.export.Dim.DYNAMIC(min=max(dim.least, LEAST_OF_TORCH), max=most)

        return pytree.tree_map(hint, self.shapes)


def dynamic_arguments(module: Any, call: Arguments, dynamic_shapes: Any) -> DynamicArguments:
    """Return examples and Dims of a dynamic export.

    Args:
        module: The module.
        call: Its examples.
        dynamic_shapes: By name of an argument of forward, or in order: a mapping of axes to Dims
            for a tensor, containers of such mappings for a container.

    Raises:
        UsageError: It does not fit the arguments.
    """
    forward = module.forward if hasattr(module, "forward") else module.module().forward
    positional, named = call
    bound = inspect.signature(forward).bind(*positional, **named).arguments
    if isinstance(dynamic_shapes, Mapping):
        for name in dynamic_shapes:
            if name not in bound:
                raise unknown(f"dynamic_shapes= names {name!r}, which is no argument of forward",
                              str(name), bound, UsageError)  # fmt: skip
    elif len(dynamic_shapes) > len(bound):
        raise UsageError("dynamic_shapes= has more elements than forward has arguments",
                         expected=", ".join(bound), got=str(len(dynamic_shapes)))  # fmt: skip
    else:
        dynamic_shapes = dict(zip(bound, dynamic_shapes, strict=False))
    reader = _Reader({}, {}, {})
    shapes = {
        name: reader.read(name, value, dynamic_shapes.get(name)) for name, value in bound.items()
    }
    if not reader.dims:
        raise UsageError("dynamic_shapes= names no axis of a tensor", expected=_EXAMPLE,
                         got=repr(dynamic_shapes)[:80])  # fmt: skip
    leaves, tree = pytree.tree_flatten(call)
    axes = tuple(reader.axes.get(id(leaf), {}) for leaf in leaves)
    hints: dict[str, int] = {}
    for leaf, dims in zip(leaves, axes, strict=True):
        for axis, dim in dims.items():
            size = leaf.shape[axis]
            if size < LEAST_OF_TORCH:
                size = max(dim.least, min(dim.most, COMMON_HINT))
            hints.setdefault(dim.name, size)
    grown = tree.unflatten(at_hints(leaves, axes, hints))
    return DynamicArguments(grown, shapes, axes)


def at_hints(
    leaves: Sequence[Any], axes: Sequence[Mapping[int, Dim]], sizes: Mapping[str, int]
) -> list[Any]:
    """Return tensors whose dynamic axes have other sizes: elements repeat."""
    resized = []
    for leaf, dims in zip(leaves, axes, strict=True):
        for axis, dim in dims.items():
            size, before = sizes[dim.name], leaf.shape[axis]
            if size != before:
                rest = (*leaf.shape[:axis], size, *leaf.shape[axis + 1 :])
                leaf = (
                    leaf.index_select(axis, torch.arange(size) % before)
                    if before
                    else leaf.new_zeros(rest)
                )
        resized.append(leaf)
    return resized


@dataclass
class _Reader:
    """Reads `dynamic_shapes` beside the arguments."""

    #: By name.
    dims: dict[str, Dim]
    #: By the id of a tensor, its Dims by axis.
    axes: dict[int, dict[int, Dim]]
    #: Sizes of the examples by the names of Dims.
    sizes: dict[str, int]

    def read(self, where: str, value: Any, shapes: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self._axes(where, value, shapes)
        if shapes is None:
            return pytree.tree_map(lambda _: None, value)
        if isinstance(value, Mapping) and isinstance(shapes, Mapping) and {*shapes} <= {*value}:
            return {k: self.read(f"{where}[{k!r}]", v, shapes.get(k)) for k, v in value.items()}
        is_listed = isinstance(value, list | tuple) and isinstance(shapes, list | tuple)
        if is_listed and len(value) == len(shapes):
            parts = [
                self.read(f"{where}[{i}]", v, s)
                for i, (v, s) in enumerate(zip(value, shapes, strict=True))
            ]
            return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
        wanted = f"None, for an argument of type {type(value).__name__}"
        if isinstance(value, Mapping):
            wanted = f"a mapping with keys of {', '.join(map(repr, value))}"[:80]
        elif isinstance(value, list | tuple):
            wanted = f"a list or tuple of {len(value)}, an element for each of the argument"
        raise UsageError(f"dynamic_shapes= does not have the structure of argument {where!r}",
                         expected=wanted, got=repr(shapes)[:80])  # fmt: skip

    def _axes(self, where: str, tensor: Any, shapes: Any) -> Any:
        if shapes is None:
            return None
        if isinstance(shapes, list | tuple):
            shapes = dict(enumerate(shapes))
        if not isinstance(shapes, Mapping):
            raise UsageError(f"dynamic_shapes= gives the axes of {where!r} as a mapping of axes to "
                             "Dims", expected=_EXAMPLE, got=repr(shapes)[:80])  # fmt: skip
        rank, found = tensor.ndim, dict[int, Any]()
        for axis, given in shapes.items():
            if given is None or given is torch.export.Dim.STATIC:
                continue
            if not (type(axis) is int and -rank <= axis < rank):
                raise UsageError(
                    f"dynamic_shapes= names axis {axis!r} of {where!r}, which has {rank} axes",
                    expected=f"whole numbers of {-rank} to {rank - 1}",
                )
            if type(given) is int and given == tensor.shape[axis]:
                continue
            if axis % rank in found:
                raise UsageError(f"dynamic_shapes= names axis {axis} of {where!r} twice")
            dim = found[axis % rank] = self._dim(f"{where}, axis {axis}", given)
            size = tensor.shape[axis]
            if not dim.least <= size <= dim.most:
                raise UsageError(
                    f"the example's size of {dim.name!r} is out of bounds", where=where,
                    expected=f"{dim.least} to {dim.most}", got=str(size),
                )  # fmt: skip
            if self.sizes.setdefault(dim.name, size) != size:
                raise UsageError(
                    f"the examples have two sizes of {dim.name!r}", where=f"{where}, axis {axis}",
                    expected=str(self.sizes[dim.name]), got=str(size),
                    remedy="pass examples that agree, or Dims of different names",
                )  # fmt: skip
            self.axes.setdefault(id(tensor), {})[axis % rank] = dim
        return found or None

    def _dim(self, where: str, given: Any) -> Dim:
        if isinstance(given, Dim):
            dim = given
        elif type(given) is torch.export.Dim:
            most = given.max if isinstance(given.max, int) else MAX_SIZE
            dim = Dim(given.__name__, max(int(given.min), 1), min(most, MAX_SIZE))
        else:
            raise UsageError(
                "dynamic_shapes= takes Dims with a name and bounds, and sizes of the example",
                where=where,
                expected='stitch.Dim("batch", 1, 64) or torch.export.Dim("batch", min=1, max=64)',
                got=repr(given)[:80],
            )  # fmt: skip
        if dim.least == dim.most:
            raise UsageError(f"Dim {dim.name!r} has one size", where=where, got=str(dim),
                             remedy="leave the axis out of dynamic_shapes=")  # fmt: skip
        known = self.dims.setdefault(dim.name, dim)
        if known != dim:
            raise UsageError(f"two Dims called {dim.name!r} have different bounds",
                             expected=str(known), got=str(dim))  # fmt: skip
        return known


@dataclass
class TorchSizes:
    """Converts sizes of an exported program to symbolic sizes."""

    sizes: SymbolicSizes
    #: Names of sizes by torch's symbols.
    names: dict[Any, str]

    def shape(self, shape: Sequence[Any]) -> tuple[Any, ...]:
        """Return a shape of torch's graph."""
        return tuple([size if isinstance(size, int) else self.size(size) for size in shape])

    def size(self, size: Any) -> Any:
        """Return a size of torch's graph; an expression that has no equal here specialises."""
        expression = size.node.expr
        free = expression.free_symbols
        if not free <= self.names.keys():
            raise CompileError(
                "the shape of its result depends on data",
                remedy="use torch.where(mask, x, other), or torch.compile, which breaks the graph "
                "there",
            )
        converted = self._expression(expression)
        if isinstance(converted, Expression):
            return self.sizes.size(converted)
        at = {s: int(self.sizes.size(Expression.of_name(self.names[s]))) for s in free}
        number = expression.subs(at)
        return bool(number) if number.is_Boolean else int(number)

    def assume(self, environment: Any, replaced: Sequence[tuple[str, Any]]) -> None:
        """Record the guards of torch's shape environment that the bounds do not imply.

        Args:
            environment: The shape environment.
            replaced: Named sizes, and what torch replaces them by, which is equal.
        """
        for guard in environment.guards:
            line, condition = _line_of(guard.sloc), environment.simplify(guard.expr)
            self.sizes.locate = lambda line=line: line
            if condition == True:  # noqa: E712  # sympy's; a replacement follows from it
                self._equate(replaced)
            self._assume(condition)
        self._equate(replaced)

    def _equate(self, replaced: Sequence[tuple[str, Any]]) -> None:
        """Record that named sizes are equal to what replaces them."""
        for name, given in replaced:
            known = given.free_symbols <= self.names.keys()
            converted = self._expression(given) if known else None
            if converted is None:
                self.sizes.specialise(Expression.of_name(name))
            else:
                self.sizes.decide(Expression.of_name(name), "==", converted)

    def _assume(self, condition: Any) -> None:
        """Record a condition (of sympy); one that has no equal here specialises its sizes."""
        if not condition.free_symbols <= self.names.keys():
            return
        if type(condition).__name__ == "And":
            for part in condition.args:
                self._assume(part)
            return
        relation = getattr(condition, "rel_op", "")
        sides = [self._expression(side) for side in condition.args] if relation else []
        match sides[::-1] if relation.startswith(">") else sides:
            case [Expression() as left, Expression() as right]:
                self.sizes.decide(left, relation.replace(">", "<"), right)
            case _:
                for symbol in condition.free_symbols:
                    self.sizes.specialise(Expression.of_name(self.names[symbol]))

    def _expression(self, given: Any) -> Expression | None:
        """Return an expression of torch's (of sympy) as ours; None if it has no equal."""
        if given.is_Symbol:
            return Expression.of_name(self.names[given])
        if given.is_Integer:
            return Expression.of_int(int(given))
        kind = type(given).__name__
        if kind not in _COMBINE and kind not in _EXTREMES and not given.is_Pow:
            return None
        parts = [part for part in map(self._expression, given.args) if part is not None]
        if len(parts) < len(given.args):
            return None
        if kind in _EXTREMES:
            extreme = _EXTREMES[kind](parts, key=lambda part: part.at(self.sizes.hints))
            for part in parts:
                pair = (part, extreme) if kind == "Max" else (extreme, part)
                self.sizes.decide(pair[0], "<=", pair[1])
            return extreme
        one, *rest = parts
        if given.is_Pow:
            power = rest[0].constant
            if power is None or not 1 <= power <= MOST_POWER:
                return None
            return _power(one, power)
        for part in rest:
            one = _COMBINE[kind](self.sizes, one, part)
        return one


class _FilesOfLibraries(set[str]):
    """Contains the files of PyTorch and of Stitch."""

    _FOLDERS = tuple(
        f"{folder}{os.sep}" for folder in (Path(torch.__file__).parent, Path(__file__).parents[2])
    )

    def __contains__(self, file: object) -> bool:
        return super().__contains__(file) or str(file).startswith(self._FOLDERS)


@contextmanager
def lines_of_modules() -> Iterator[None]:
    """While a module is exported: guards have lines of the module, not those of torch's operators,
    of which torch takes some for the module's."""
    # Loading it takes a second.
    from torch.fx.experimental import symbolic_shapes

    before = symbolic_shapes.uninteresting_files
    files = _FilesOfLibraries(before())
    symbolic_shapes.uninteresting_files = lambda: files
    try:
        yield
    finally:
        symbolic_shapes.uninteresting_files = before


def _line_of(location: Any) -> str:
    """The line of the module on which a guard of torch relies, or the one of torch."""
    frame = location.framework_loc
    if location.maybe_user_loc or not hasattr(frame, "lineno"):
        return location.maybe_user_loc or "torch"
    # The last part alone may be `__init__.py`.
    _, package, rest = Path(frame.filename).as_posix().rpartition("/torch/")
    return f"{f'torch/{rest}' if package else Path(rest).name}:{frame.lineno}"


def torch_sizes(program: Any, dynamic: DynamicArguments) -> TorchSizes:
    """Return the sizes of an exported program: torch's symbols have the names of the Dims.

    Raises:
        CompileError: torch has made a size of a Dim static.
    """
    nodes = [node for node in program.graph.nodes if node.op == "placeholder"]
    specs = zip(program.graph_signature.input_specs, nodes, strict=True)
    user_nodes = [
        node for spec, node in specs
        if spec.kind is torch.export.graph_signature.InputKind.USER_INPUT
    ]  # fmt: skip
    axes: dict[str, Mapping[int, Dim]] = {}
    names: dict[Any, str] = {}
    #: Names whose size torch replaces by what is equal, of others.
    replaced: list[tuple[str, Any]] = []
    for node, dims in zip(user_nodes, dynamic.axes, strict=True):
        for axis, dim in dims.items():
            size = node.meta["val"].shape[axis]
            if isinstance(size, int):
                raise CompileError(f"torch.export makes size {dim.name!r} static",
                                   where=f"{node.name}, axis {axis}", got=str(size))  # fmt: skip
            given = size.node.expr
            if not given.is_Symbol or names.setdefault(given, dim.name) != dim.name:
                replaced.append((dim.name, given))
        if dims:
            axes[node.name] = dims
    sizes = SymbolicSizes(axes)
    for node in user_nodes:
        if node.name in axes:
            shape = node.meta["val"].shape
            hints = tuple([s if isinstance(s, int) else int(s.node.hint) for s in shape])
            sizes.shape_of(node.name, hints)
    result = TorchSizes(sizes, names)
    environments = [
        node.meta["val"].fake_mode.shape_env for node in user_nodes if node.name in axes
    ]
    if environments:
        result.assume(environments[0], replaced)
    return result


#: Higher powers of a size have no equal.
MOST_POWER = 8


def _power(base: Expression, power: int) -> Expression:
    result = base
    for _ in range(power - 1):
        result = result * base
    return result


def _remainder(sizes: SymbolicSizes, dividend: Expression, divisor: Expression) -> Expression:
    return dividend - sizes.quotient(dividend, divisor) * divisor


#: By the names of sympy's and torch's classes.
_COMBINE: Mapping[str, Callable[[SymbolicSizes, Expression, Expression], Expression]] = {
    "Add": lambda _, a, b: a + b, "Mul": lambda _, a, b: a * b,
    "FloorDiv": SymbolicSizes.quotient, "CleanDiv": SymbolicSizes.quotient,
    "Mod": _remainder, "PythonMod": _remainder,
}  # fmt: skip
#: Which of several sizes an expression is, is decided by a guard.
_EXTREMES: Mapping[str, Callable[..., Expression]] = {"Max": max, "Min": min}
