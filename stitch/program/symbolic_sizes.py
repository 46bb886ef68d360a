"""Sizes that are symbols while a module is traced and compiled, and what the compiler relied on.

A `SymbolicSize` stands where a shape has an integer, with a hint: the value that it has in this
compilation. It is no `int`: C code cannot take its value silently. Arithmetic gives expressions. A
comparison that bounds and normal form do not decide is decided by the hints and recorded as a
guard; anything else that needs a number specialises: it records the guard `size == hint`.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Number
from pathlib import PurePath
from typing import Any, NoReturn, TypeVar, cast

import numpy as np

from stitch.errors import CompileError, UsageError, unknown
from stitch.program.size_expressions import Bounds, Expression

Result = TypeVar("Result")

#: The largest size of an axis.
MAX_SIZE = 1 << 48
#: Stands for the line of a guard against a size at which a module was exported with another graph.
OTHER_GRAPH = "the module has, or may have, another graph there"
#: The hint of a size whose example is 0 or 1, if it is within bounds.
COMMON_HINT = 7


@dataclass(frozen=True, slots=True, init=False)
class Dim:
    """A named size with inclusive bounds, for `dynamic_shapes=` of `stitch.compile`.

    `min` and `max` are other words for the bounds, as `torch.export.Dim` has them.

    Raises:
        UsageError: The name is no identifier, or the bounds contain no size.

    >>> Dim("batch", 1, 64)
    Dim(name='batch', least=1, most=64)
    >>> Dim("batch", max=64) == Dim("batch", 1, 64)
    True
    """

    name: str
    least: int
    most: int

    def __init__(
        self, name: str, least: int | None = None, most: int | None = None, *,
        min: int | None = None, max: int | None = None,
    ) -> None:  # fmt: skip
        if (least is not None and min is not None) or (most is not None and max is not None):
            raise UsageError(
                f"Dim {name!r} has a bound twice", expected="least and most, or min= and max="
            )
        low, high = (least if min is None else min), (most if max is None else max)
        object.__setattr__(self, "name", name)
        object.__setattr__(self, "least", 1 if low is None else low)
        object.__setattr__(self, "most", MAX_SIZE if high is None else high)
        self._check()

    def _check(self) -> None:
        if not (isinstance(self.name, str) and self.name.isidentifier()):
            raise UsageError("the name of a Dim must be an identifier", got=repr(self.name))
        ends = (self.least, self.most)
        if not all(isinstance(end, Integral) and not isinstance(end, bool) for end in ends):
            raise UsageError("the bounds of a Dim must be whole numbers", got=str(ends))
        if not 0 <= self.least <= self.most <= MAX_SIZE:
            raise UsageError(f"Dim {self.name!r} has no sizes within its bounds",
                             expected=f"0 <= least <= most <= {MAX_SIZE}",
                             got=f"{self.least} to {self.most}")  # fmt: skip


#: The relations of guards to their functions.
RELATIONS: Mapping[str, Callable[[int, int], bool]] = {
    "==": operator.eq, "!=": operator.ne, "<": operator.lt, "<=": operator.le,
}  # fmt: skip
_NEGATED = {"==": ("!=", False), "!=": ("==", False), "<": ("<=", True), "<=": ("<", True)}


@dataclass(frozen=True, slots=True)
class Guard:
    """A relation between sizes that a compilation relied on.

    `line` is the line of the user's module, `relied` that of the compiler; `is_specialised` tells
    that a number was needed rather than a comparison.
    """

    left: Expression
    relation: str
    right: Expression
    line: str
    relied: str
    is_specialised: bool

    def holds(self, sizes: Mapping[str, int]) -> bool:
        """Return whether the relation holds for some sizes; not where it divides by zero."""
        try:
            return RELATIONS[self.relation](self.left.at(sizes), self.right.at(sizes))
        except ZeroDivisionError:
            return False

    def condition(self, sizes: Mapping[str, int]) -> frozenset[Hashable]:
        """Return what the guard says where some sizes are numbers, equal for equal conditions.

        Raises:
            ZeroDivisionError: It divides by zero there.
        """
        left, right = self.left.partly_at(sizes), self.right.partly_at(sizes)
        if self.relation in ("==", "!="):
            return frozenset({(left - right, self.relation), (right - left, self.relation)})
        return frozenset({left + 1 - right if self.relation == "<" else left - right})

    def text(self) -> str:
        """Return the relation with its lines."""
        lines = " by ".join(filter(None, (self.line, self.relied)))
        return f"{self.left} {self.relation} {self.right} ({lines})"


class SizeNeeded(Exception):
    """A guard is needed where none may be recorded."""


class SymbolicSizes:
    """The named sizes of one compilation, their hints, and the guards recorded so far."""

    def __init__(self, dynamic_shapes: Mapping[str, Mapping[int, Dim]]) -> None:
        """`dynamic_shapes` are the symbolic axes of inputs, by the inputs' names.

        Raises:
            UsageError: It is no such mapping.
        """
        for name, axes in dynamic_shapes.items():
            by_axis = axes.items() if isinstance(axes, Mapping) else [(None, axes)]
            for axis, dim in by_axis:
                if not (type(axis) is int and isinstance(dim, Dim)):
                    raise UsageError(
                        f"dynamic_shapes= gives the axes of input {name!r} as a mapping of axes to "
                        "Dims", expected='{0: stitch.Dim("batch", 1, 64)}', got=repr(axes)[:80],
                    )  # fmt: skip
        self._axes = {name: dict(axes) for name, axes in dynamic_shapes.items()}
        #: Where sizes are read when a program is called: input, axis and name.
        self.sources: list[tuple[str, int, str]] = []
        self.dims: dict[str, Dim] = {}
        self.hints: dict[str, int] = {}
        self._guards: dict[tuple[Expression, str, Expression], Guard] = {}
        #: Whether comparisons are still recorded; afterwards sizes give no numbers.
        self.is_open = True
        #: Whether `SizeNeeded` is raised where a guard would be recorded.
        self.is_strict = False
        #: Returns what is translated now, for guards; None: the nearest line of the user.
        self.locate: Callable[[], str] | None = None

    @classmethod
    def restored(
        cls, dims: Sequence[Dim], hints: Mapping[str, int], guards: Sequence[Guard]
    ) -> SymbolicSizes:
        """Return the sizes of a compilation that has ended; `sources` are to be added.

        Raises:
            UsageError: Two sizes have one name, or a hint is out of bounds.
        """
        sizes = cls({})
        for dim in dims:
            if dim.name in sizes.dims:
                raise UsageError(f"two sizes are called {dim.name!r}")
            if not dim.least <= hints[dim.name] <= dim.most:
                raise UsageError(f"the example of size {dim.name!r} is out of its bounds",
                                 expected=f"{dim.least} to {dim.most}",
                                 got=str(hints[dim.name]))  # fmt: skip
            sizes.dims[dim.name] = dim
        sizes.hints.update(hints)
        sizes._guards = {(g.left, g.relation, g.right): g for g in guards}
        sizes.is_open = False
        return sizes

    @property
    def guards(self) -> tuple[Guard, ...]:
        """The guards in the order in which they were first needed."""
        return tuple(self._guards.values())

    def reset(self, guards: Sequence[Guard]) -> None:
        """Forget all guards but these."""
        self._guards = {(g.left, g.relation, g.right): g for g in guards}

    def without_guards(self, compute: Callable[[], Result]) -> Result | None:
        """Return what `compute` returns, None if it needs a guard that is not recorded yet."""
        before = self.is_open, self.is_strict
        self.is_open = self.is_strict = True
        try:
            return compute()
        except SizeNeeded:
            return None
        finally:
            self.is_open, self.is_strict = before

    @property
    def bounds(self) -> dict[str, Bounds]:
        return {name: (dim.least, dim.most) for name, dim in self.dims.items()}

    def quotient(self, dividend: Expression, divisor: Expression) -> Expression:
        """Return the floor division of two expressions of these sizes."""
        low, high = divisor.bounds(self.bounds)
        return dividend.quotient(divisor, low > 0 or high < 0)

    def shape_of(self, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of an input with symbolic sizes on its dynamic axes.

        Args:
            name: The input.
            shape: The shape of its example.

        Raises:
            UsageError: An axis does not exist, two Dims of one name differ, or the example is out
                of bounds or contradicts another input.
        """
        sizes: list[Any] = list(shape)
        for axis, dim in self._axes.pop(name, {}).items():
            if not -len(shape) <= axis < len(shape):
                raise UsageError(
                    f"dynamic_shapes= names axis {axis} of input {name!r}, which has "
                    f"{len(shape)} axes",
                )  # fmt: skip
            axis %= len(shape)
            if is_symbolic(sizes[axis]):
                raise UsageError(f"dynamic_shapes= names axis {axis} of input {name!r} twice")
            sizes[axis] = self._size(dim, sizes[axis], f"{name}.shape[{axis}]")
            self.sources.append((name, axis, dim.name))
        return tuple(sizes)

    def check_inputs(self, names: Sequence[str]) -> None:
        """Raise `UsageError` if `dynamic_shapes=` names an input that is not one of `names`."""
        for name in self._axes:
            raise unknown(f"dynamic_shapes= names {name!r}, which is no input", name, names,
                          UsageError)  # fmt: skip

    def _size(self, dim: Dim, example: int, where: str) -> SymbolicSize | int:
        if self.dims.setdefault(dim.name, dim) != dim:
            raise UsageError(
                f"two Dims called {dim.name!r} have different bounds",
                expected=str(self.dims[dim.name]), got=str(dim),
            )  # fmt: skip
        if not dim.least <= example <= dim.most:
            raise UsageError(f"the example's size of {dim.name!r} is out of bounds", where=where,
                             expected=f"{dim.least} to {dim.most}", got=str(example))  # fmt: skip
        # 0 and 1 are special in many comparisons (broadcasting): not what other sizes do.
        hint = example if example > 1 else max(dim.least, min(dim.most, COMMON_HINT))
        if self.hints.setdefault(dim.name, hint) != hint:
            raise UsageError(f"two examples disagree about {dim.name!r}", where=where,
                             expected=str(self.hints[dim.name]), got=str(example))  # fmt: skip
        return SymbolicSize(Expression.of_name(dim.name), self)

    def size(self, expression: Expression) -> SymbolicSize | int:
        """Return an expression of these sizes as a size: an `int` if it is constant."""
        number = expression.constant
        return SymbolicSize(expression, self) if number is None else number

    def exclude(self, name: str, size: int) -> None:
        """Record a guard against a number at which the module may have another graph."""
        left, right = Expression.of_name(name), Expression.of_int(size)
        self._guards[left, "!=", right] = Guard(left, "!=", right, OTHER_GRAPH, "", False)

    def check(self, sizes: Mapping[str, int], what: str) -> dict[str, int]:
        """Return sizes by name after checking names, bounds and guards.

        Raises:
            UsageError: A size is missing, unknown or out of bounds.
            CompileError: A guard does not hold.
        """
        for name in sizes:
            if name not in self.dims:
                raise unknown(f"{what} has no size {name!r}", name, self.dims, UsageError)
        checked: dict[str, int] = {}
        for name, dim in self.dims.items():
            given = sizes.get(name)
            bounds = f"{dim.least} to {dim.most}"
            axes = ", ".join(f"{n}.shape[{axis}]" for n, axis, d in self.sources if d == name)
            if not isinstance(given, Integral) or isinstance(given, bool):
                raise UsageError(
                    f"{what} needs a whole number as size {name!r}", where=axes, expected=bounds,
                    got=repr(given) if name in sizes else "nothing",
                    remedy=f"model.at({', '.join(f'{n}={h}' for n, h in self.hints.items())})",
                )  # fmt: skip
            if not dim.least <= given <= dim.most:
                least, most = min(dim.least, given), max(dim.most, given)
                wider = f'Dim("{name}", {least}, {most}) ({name}:{least}..{most} in --input_shape)'
                raise UsageError(
                    f"size {name!r} of {what} is out of bounds", where=axes, expected=bounds,
                    got=str(given), remedy=f"compile it with {wider}" if given >= 0 else None,
                )  # fmt: skip
            checked[name] = int(given)
        for guard in self._guards.values():
            if not guard.holds(checked):
                got = ", ".join(f"{name}={size}" for name, size in checked.items())
                lines = " by ".join(filter(None, (guard.line, guard.relied)))
                start = "change that line so that it works for any size"
                # The name is the left side: see `exclude`; files may have others of this line.
                named = self.dims.get(str(guard.left))
                if guard.line == OTHER_GRAPH and named is not None:
                    least = checked[named.name] + 1
                    start = f'compile it with Dim("{named.name}", {least}, {named.most})'
                raise CompileError(
                    f"{what} was compiled for sizes with {guard.left} {guard.relation} "
                    f"{guard.right}", where=lines, got=got,
                    remedy=f"{start}, or compile the module at this size by itself",
                )  # fmt: skip
        return checked

    def decide(self, left: Expression, relation: str, right: Expression) -> bool:
        """Decide a relation by normal form or bounds, else by hints and with a guard."""
        low, high = (left - right).bounds(self.bounds)
        if relation in ("==", "!="):
            if low == high == 0:
                return relation == "=="
            if low > 0 or high < 0:
                return relation == "!="
        else:
            limit = -1 if relation == "<" else 0
            if high <= limit:
                return True
            if low > limit:
                return False
        holds = RELATIONS[relation](left.at(self.hints), right.at(self.hints))
        if not holds:
            relation, is_swapped = _NEGATED[relation]
            left, right = (right, left) if is_swapped else (left, right)
        self._record(left, relation, right, False)
        return holds

    def specialise(self, expression: Expression) -> int:
        """Return the value of an expression in this compilation, and record that it is needed."""
        hint = expression.at(self.hints)
        low, high = expression.bounds(self.bounds)
        if not low == high == hint:
            self._record(expression, "==", Expression.of_int(hint), True)
        return hint

    def _record(self, left: Expression, relation: str, right: Expression, special: bool) -> None:
        if not self.is_open:
            raise UsageError(
                f"a symbolic size was used after its compilation: {left} {relation} {right}",
                remedy="read sizes of the arrays that a call returns",
            )
        if (left, relation, right) not in self._guards:
            if self.is_strict:
                raise SizeNeeded
            line, relied = _lines()
            line = line if self.locate is None else self.locate()
            guard = Guard(left, relation, right, line, relied, special)
            self._guards[left, relation, right] = guard


def _lines() -> tuple[str, str]:
    """Return the nearest line outside Stitch and NumPy, and the nearest line of Stitch's own."""
    frame = sys._getframe(1)
    relied = ""
    while frame is not None:
        module = str(frame.f_globals.get("__name__", ""))
        package = module.partition(".")[0]
        if package not in ("stitch", "numpy"):
            return f"{PurePath(frame.f_code.co_filename).name}:{frame.f_lineno}", relied
        if package == "stitch" and not relied and module not in _INNER:
            relied = f"{module.replace('.', '/')}.py:{frame.f_lineno}"
        if frame.f_back is None:
            break
        frame = frame.f_back
    return "", relied


_INNER = (
    __name__, "stitch.program.symbolic_data", "stitch.program.operation",
    "stitch.ops.symbolic_evaluation",
)  # fmt: skip


def _operator(
    compute: Callable[[SymbolicSize, Expression, Expression], Expression],
    by_number: Callable[[Any, Any], Any],
) -> tuple[Callable[[SymbolicSize, Any], Any], Callable[[SymbolicSize, Any], Any]]:
    """Return an operator for sizes and integers, which other numbers specialise, and its
    reflection."""

    def forward(self: SymbolicSize, other: Any) -> Any:
        right = self._expression_of(other)
        if right is NotImplemented:
            return by_number(int(self), other) if isinstance(other, Number) else right
        return self.sizes.size(compute(self, self.expression, right))

    def reflected(self: SymbolicSize, other: Any) -> Any:
        left = self._expression_of(other)
        if left is NotImplemented:
            return by_number(other, int(self)) if isinstance(other, Number) else left
        return self.sizes.size(compute(self, left, self.expression))

    return forward, reflected


def _quotient(self: SymbolicSize, left: Expression, right: Expression) -> Expression:
    return self.sizes.quotient(left, right)


def _comparison(relation: str, is_swapped: bool = False) -> Callable[[SymbolicSize, Any], Any]:
    def compare(self: SymbolicSize, other: Any) -> Any:
        right = self._expression_of(other)
        if right is NotImplemented:
            if not isinstance(other, Number):
                return right
            numbers: Any = (other, int(self)) if is_swapped else (int(self), other)
            return RELATIONS[relation](*numbers)
        pair = (right, self.expression) if is_swapped else (self.expression, right)
        return self.sizes.decide(pair[0], relation, pair[1])

    return compare


def _by_hint(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the method that specialises, and applies a function to the number."""

    def method(self: SymbolicSize, *arguments: Any) -> Any:
        return function(self.sizes.specialise(self.expression), *arguments)

    return method


class SymbolicSize:
    """An integer expression of named sizes, in place of an `int` while a module is compiled."""

    __slots__ = ("expression", "sizes")

    def __init__(self, expression: Expression, sizes: SymbolicSizes) -> None:
        self.expression = expression
        self.sizes = sizes

    @property  # type: ignore[misc]  # of `object` it can be set
    def __class__(self) -> type:
        # So that `isinstance(n, int)` takes the branch that it takes at any size.
        return int

    def bit_length(self) -> int:
        """As of `int`; a number is needed."""
        return int(self).bit_length()

    def _expression_of(self, other: Any) -> Any:
        if isinstance(other, SymbolicSize):
            if other.sizes is not self.sizes:
                raise UsageError("two symbolic sizes are of different compilations")
            return other.expression
        if isinstance(other, Integral):
            return Expression.of_int(int(other))
        return NotImplemented

    __add__, __radd__ = _operator(lambda self, a, b: a + b, operator.add)
    __sub__, __rsub__ = _operator(lambda self, a, b: a - b, operator.sub)
    __mul__, __rmul__ = _operator(lambda self, a, b: a * b, operator.mul)
    __floordiv__, __rfloordiv__ = _operator(_quotient, operator.floordiv)
    __mod__, __rmod__ = _operator(lambda self, a, b: a - _quotient(self, a, b) * b, operator.mod)

    def __neg__(self) -> SymbolicSize | int:
        return self.sizes.size(self.expression * -1)

    def __pos__(self) -> SymbolicSize:
        return self

    def __divmod__(self, other: Any) -> Any:
        return self // other, self % other

    def __rdivmod__(self, other: Any) -> Any:
        return other // self, other % self

    __eq__ = _comparison("==")
    __ne__ = _comparison("!=")
    __lt__ = _comparison("<")
    __le__ = _comparison("<=")
    __gt__ = _comparison("<", True)
    __ge__ = _comparison("<=", True)

    def __bool__(self) -> bool:
        return self.sizes.decide(self.expression, "!=", Expression.of_int(0))

    # What needs a number.
    __hash__ = _by_hint(hash)
    __index__ = _by_hint(int)
    __int__ = _by_hint(int)
    __float__ = _by_hint(float)
    __abs__ = _by_hint(abs)
    __str__ = _by_hint(str)
    __format__ = _by_hint(format)
    __truediv__, __rtruediv__ = _by_hint(operator.truediv), _by_hint(lambda n, o: o / n)
    __pow__, __rpow__ = _by_hint(pow), _by_hint(lambda n, o: o**n)
    __lshift__, __rlshift__ = _by_hint(operator.lshift), _by_hint(lambda n, o: o << n)
    __rshift__, __rrshift__ = _by_hint(operator.rshift), _by_hint(lambda n, o: o >> n)
    __and__, __rand__ = _by_hint(operator.and_), _by_hint(lambda n, o: o & n)
    __or__, __ror__ = _by_hint(operator.or_), _by_hint(lambda n, o: o | n)
    __xor__, __rxor__ = _by_hint(operator.xor), _by_hint(lambda n, o: o ^ n)
    __invert__, __round__ = _by_hint(operator.invert), _by_hint(round)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        return np.array(int(self), dtype)

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **words: Any) -> Any:
        # As Python's integers, whose type NumPy adapts to that of the other operand.
        numbers = [int(i) if isinstance(i, SymbolicSize) else i for i in inputs]
        return getattr(ufunc, method)(*numbers, **words)

    def __repr__(self) -> str:
        # The text of lists and tuples; after the compilation no number is relied on any more.
        return str(self) if self.sizes.is_open else f"<symbolic {self.expression}>"

    def __reduce__(self) -> NoReturn:
        raise UsageError(f"the symbolic size {self.expression} cannot be pickled")


def is_symbolic(size: object) -> bool:
    """Return whether an integer of a shape is symbolic."""
    return isinstance(size, SymbolicSize)


def size_of(given: Any) -> int:
    """Return an integer of a shape as it is if it is symbolic, else as an `int`."""
    return cast(int, given) if isinstance(given, SymbolicSize) else int(given)


def is_same_size(one: Any, other: Any) -> bool:
    """Return whether two integers of shapes are equal at every size; records nothing."""
    difference = one - other
    if isinstance(difference, SymbolicSize):
        return difference.expression.bounds(difference.sizes.bounds) == (0, 0)
    return bool(difference == 0)


def same_shape(one: Sequence[Any], other: Sequence[Any]) -> bool:
    """Return whether two shapes are equal at every size; records nothing."""
    return len(one) == len(other) and all(map(is_same_size, one, other))


def names_in(sizes: Sequence[Any]) -> frozenset[str]:
    """Return the names of the named sizes that symbolic sizes depend on."""
    found = [size.expression.names for size in sizes if isinstance(size, SymbolicSize)]
    return frozenset[str]().union(*found)


def slice_bounds(part: slice, length: int) -> tuple[int, int, int, int]:
    """Return start, stop, step and the number of elements of a slice of an axis.

    Symbolic sizes stay symbolic if the step is 1, or the slice is the axis reversed.
    """
    if part.step in (None, 1) and any(map(is_symbolic, (part.start, part.stop, length))):
        start = _clamped(part.start, 0, length)
        stop = _clamped(part.stop, length, length)
        return start, stop, 1, stop - start if start < stop else 0
    is_last = part.start is None or is_same_size(part.start, length - 1)
    if part.step == -1 and part.stop is None and is_last:
        return length - 1, -1, -1, length
    start, stop, step = part.indices(length)
    return start, stop, step, len(range(start, stop, step))


def _clamped(bound: int | None, default: int, length: int) -> int:
    if bound is None:
        return default
    if bound < 0:
        bound += length
        return bound if bound >= 0 else 0
    return bound if bound <= length else length


def size_text(size: object, as_factor: bool = False) -> str:
    """Return the text of a number, or the expression of a symbolic size."""
    return size.expression.text(as_factor) if isinstance(size, SymbolicSize) else str(size)


def at_sizes(shape: Sequence[Any], sizes: Mapping[str, int]) -> tuple[int, ...]:
    """Return a shape with its symbolic sizes replaced by numbers."""
    return tuple([
        size.expression.at(sizes) if isinstance(size, SymbolicSize) else size for size in shape
    ])  # fmt: skip


Integral.register(SymbolicSize)
