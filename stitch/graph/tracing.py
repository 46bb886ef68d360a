"""Tracing: a Python function over symbolic tensors becomes a computation graph.

The function runs once: control flow that depends on data is an error, control flow that depends on
shapes is unrolled.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping

import numpy as np

from stitch.argument_kinds import CALLABLE, MAPPING, TEXT, optional, takes
from stitch.errors import CompileError
from stitch.graph.builder import ComputationGraphBuilder
from stitch.graph.computation_graph import ComputationGraph
from stitch.graph.placement import PlacementOption, placement_of
from stitch.graph.symbolic import SymbolicTensor
from stitch.program import Array, DataType, InputKind, TensorDesc, ValueType

Described = TensorDesc | ValueType | Array
Traceable = Callable[..., object]


@takes(f=CALLABLE, name=optional(TEXT), kinds=optional(MAPPING))
def trace(
    f: Traceable,
    *descs: Described,
    name: str | None = None,
    kinds: Mapping[str, InputKind] | None = None,
) -> ComputationGraph:
    """The graph of `f` for arguments described by descs, types or example arrays.

    Inputs are called like f's parameters (`x_0`, `x_1`, ... for `*x`). A single result is the
    output `output`, a tuple gives `output_0`, ..., a mapping or named tuple its own names. A desc
    that is not a plain host layout becomes placement options. Raises `CompileError`.

    >>> import numpy as np
    >>> trace(lambda x: np.tanh(x), np.zeros((2, 3), np.float32)).output_type(0).text()
    '2x3xf32'
    """
    title = name if name is not None else _name_of(f)
    builder = ComputationGraphBuilder(title)
    names = _argument_names(f, len(descs), title)
    unknown = sorted(set(kinds or {}) - set(names))
    if unknown:
        raise CompileError(
            f"no argument of {title!r} is called {unknown[0]!r}", expected=", ".join(names)
        )
    arguments = []
    for argument, desc in zip(names, descs, strict=True):
        kind, placement = _described(argument, desc, title)
        role = (kinds or {}).get(argument, InputKind.ACTIVATION)
        arguments.append(builder.input(argument, kind.shape, kind.data_type, role))
        builder.place(*placement)
    for output, value in _results(f(*arguments), title):
        builder.output(output, value)
    return builder.build()


def _described(
    name: str, desc: object, title: str
) -> tuple[ValueType, tuple[PlacementOption, ...]]:
    if isinstance(desc, ValueType):
        return desc, ()
    if isinstance(desc, TensorDesc):
        kind = ValueType(desc.shape, desc.layout.data_type.in_arrays)
        return kind, placement_of("input", name, desc)
    if isinstance(desc, np.ndarray | np.generic | bool | int | float):
        example = np.asarray(desc)
        return ValueType(example.shape, DataType.from_dtype(example.dtype)), ()
    raise CompileError(
        f"argument {name!r} is described by a {type(desc).__name__}",
        where=f"trace of {title!r}",
        expected="a TensorDesc, a ValueType or an example array",
    )


def _argument_names(f: Traceable, count: int, title: str) -> list[str]:
    try:
        parameters = inspect.signature(f).parameters.values()
    except (TypeError, ValueError):
        return [f"x_{i}" for i in range(count)]
    names: list[str] = []
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    for parameter in parameters:
        if parameter.kind is parameter.VAR_POSITIONAL:
            names += [f"{parameter.name}_{i}" for i in range(count - len(names))]
        elif parameter.kind in positional and (
            len(names) < count or parameter.default is parameter.empty
        ):
            names.append(parameter.name)
    if len(names) != count:
        raise CompileError(
            f"{title!r} is described by {count} arguments",
            where=f"trace of {title!r}",
            expected=f"{len(names)}: {', '.join(names)}" if names else "no arguments",
            remedy="give one desc or example array per argument",
        )
    return names


def _results(returned: object, title: str) -> Iterator[tuple[str, SymbolicTensor | Array]]:
    if isinstance(returned, Mapping):
        results = [(str(key), value) for key, value in returned.items()]
    elif isinstance(returned, tuple | list):
        fields = getattr(returned, "_fields", None)
        names = fields or [f"output_{i}" for i in range(len(returned))]
        results = list(zip(names, returned, strict=True))
    else:
        results = [("output", returned)]
    if not results:
        raise CompileError(f"{title!r} returns nothing", where=f"trace of {title!r}")
    for name, value in results:
        if not isinstance(value, SymbolicTensor | np.ndarray | np.generic | bool | int | float):
            raise CompileError(
                f"{title!r} returns a {type(value).__name__} as {name!r}",
                where=f"trace of {title!r}",
                expected="tensors: one, a tuple, or a mapping by name",
                remedy="return the tensor itself; a function that returns nothing has no graph",
            )
        yield name, value if isinstance(value, SymbolicTensor) else np.asarray(value)


def _name_of(f: Traceable) -> str:
    name = getattr(f, "__name__", type(f).__name__)
    return "traced" if name == "<lambda>" else str(name)
