"""Tracing: a Python function of symbolic tensors becomes a computation graph.

The function is called once: control flow on shapes is unrolled, control flow on data is an error.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal, final, overload

import numpy as np

from stitch.argument_kinds import (
    CALLABLE,
    MAPPING,
    TEXT,
    WHOLE,
    either,
    instance_of,
    optional,
    several,
    takes,
)
from stitch.errors import CompileError
from stitch.graph import numpy_functions
from stitch.graph.computation_graph import ComputationGraph
from stitch.graph.emitter import TYPE_NAME, AttributeLike, DataTypeLike, OperandLike, data_type_of
from stitch.graph.layer_methods import LayerMethods
from stitch.graph.placement import PlacementOption, placement_of
from stitch.graph.symbolic import SymbolicTensor
from stitch.program import (
    Array,
    DataType,
    InputKind,
    InputSlot,
    OutputSlot,
    Ownership,
    SymbolicSize,
    SymbolicSizes,
    TensorDesc,
    ValueType,
    as_read_only,
    size_of,
)

_SYMBOLIC = instance_of("a symbolic size", SymbolicSize)


@final
class ComputationGraphBuilder(LayerMethods):
    """Builds one graph; `build` returns it.

    >>> b = ComputationGraphBuilder("double")
    >>> x = b.input("x", (2, 3), "float32")
    >>> b.output("y", x + x)
    >>> print(b.build().text().splitlines()[2])
      %add = Add(%x, %x) : 2x3xf32
    """

    __slots__ = (
        "_initial_state", "_input_names", "_inputs", "_output_names", "_outputs", "_placement",
    )  # fmt: skip

    @takes(name=TEXT)
    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._inputs: list[InputSlot] = []
        self._outputs: list[OutputSlot] = []
        self._placement: list[PlacementOption] = []
        self._initial_state: dict[str, Array] = {}
        self._input_names: set[str] = set()
        self._output_names: set[str] = set()

    @takes(
        name=TEXT, data_type=TYPE_NAME,
        shape=several("a list of whole numbers", either(WHOLE, _SYMBOLIC)),
        kind=instance_of(f"one of {', '.join(map(str, InputKind))}", InputKind),
        ownership=instance_of(f"one of {', '.join(map(str, Ownership))}", Ownership),
    )  # fmt: skip
    def input(
        self,
        name: str,
        shape: Sequence[int],
        data_type: DataTypeLike,
        kind: InputKind = InputKind.ACTIVATION,
        ownership: Ownership = Ownership.BORROW,
    ) -> SymbolicTensor:
        """Add a named input; raise `CompileError` if the name is taken or `data_type` is a block
        format."""
        if name in self._input_names:
            raise CompileError(f"two inputs are called {name!r}", where=self._where())
        wanted, dimensions = data_type_of(data_type), tuple(size_of(d) for d in shape)
        if wanted.is_block:
            raise CompileError(
                f"{wanted.value} is a storage format and cannot be computed in",
                where=f"input {name!r} at {self._where()}",
                remedy=f"declare it float32 and set input.{name}.data_type={wanted.value}",
            )
        if any(d < 0 for d in dimensions):
            raise CompileError(
                "a shape must not have a negative dimension",
                where=f"input {name!r} at {self._where()}", got=str(list(dimensions)),
            )  # fmt: skip
        tensor = self._value(name, ValueType(dimensions, wanted))
        self._input_names.add(name)
        self._inputs.append(InputSlot(name, tensor.index, kind, ownership))
        return tensor

    @takes(name=TEXT, aliases_input=optional(WHOLE))
    def output(self, name: str, tensor: OperandLike, *, aliases_input: int | None = None) -> None:
        """Add a named output.

        An `Identity` is inserted if the value is an input, a constant or an output already: each
        output is a value of its own.
        """
        if name in self._output_names:
            raise CompileError(f"two outputs are called {name!r}", where=self._where())
        value = self.tensor(tensor)
        # Only results that are no outputs yet are in `_made`.
        if value.index not in self._made:
            value = self.identity(value)
        self._made.discard(value.index)
        self._output_names.add(name)
        self._outputs.append(OutputSlot(name, value.index, aliases_input))

    def begin_state(self, name: str, initial: Array) -> None:
        """Set the initial value of a state: an input of kind `state` and an output of its name."""
        self._initial_state[name] = as_read_only(initial)

    def place(self, *placement: PlacementOption) -> None:
        """Add placement options for slots of this graph."""
        for option in placement:
            instance_of("placement options (stitch.graph.PlacementOption)", PlacementOption).check(
                "option", "placement", option
            )
        self._placement.extend(placement)

    def build(self) -> ComputationGraph:
        """Return the graph; afterwards the builder accepts no more operations."""
        if self._graph is None:
            graph = ComputationGraph(
                self.name, tuple(self._inputs), tuple(self._outputs), tuple(self._values),
                tuple(self._operations), self._constants.constants(),
                bodies=tuple(self._bodies.bodies), initial_state=self._initial_state,
            )  # fmt: skip
            self._graph = graph.with_placement(*self._placement)
        return self._graph

    @overload
    def op(
        self, op: str, *operands: OperandLike, domain: str = "", outputs: Literal[1] = 1,
        **attributes: AttributeLike,
    ) -> SymbolicTensor: ...  # fmt: skip

    @overload
    def op(
        self, op: str, *operands: OperandLike, domain: str = "", outputs: int | Sequence[str],
        **attributes: AttributeLike,
    ) -> SymbolicTensor | tuple[SymbolicTensor, ...]: ...  # fmt: skip

    def op(
        self, op: str, *operands: OperandLike, domain: str = "", outputs: int | Sequence[str] = 1,
        **attributes: AttributeLike,
    ) -> SymbolicTensor | tuple[SymbolicTensor, ...]:  # fmt: skip
        """Apply an operator by its ONNX name.

        Args:
            op: The operator.
            *operands: Tensors, arrays, numbers (of the first tensor's type), lists of ints (int64),
                or None if absent.
            domain: Empty for ONNX.
            outputs: The number of results, or their names.
            **attributes: Its attributes.

        Returns:
            One tensor, or a tuple if there are several results.
        """
        results = self.apply(op, operands, outputs, attributes, domain)
        return results[0] if len(results) == 1 else results

    numpy_ufunc = numpy_functions.call_ufunc
    numpy_function = numpy_functions.call_function


Described = TensorDesc | ValueType | Array
Traceable = Callable[..., object]


@takes(f=CALLABLE, name=optional(TEXT), kinds=optional(MAPPING))
def trace(
    f: Traceable,
    *descs: Described,
    name: str | None = None,
    kinds: Mapping[str, InputKind] | None = None,
    sizes: SymbolicSizes | None = None,
) -> ComputationGraph:
    """Trace `f` for arguments described by descriptors, types or example arrays.

    Inputs are named like the parameters of `f` (`x_0`, `x_1`, ... for `*x`), outputs `output`, or
    `output_0`, ... for a tuple, or by the keys of a mapping or named tuple. A `TensorDesc` other
    than a row-major host layout becomes placement options. `sizes` gives the symbolic sizes of
    inputs; comparisons of them are recorded there.

    Raises:
        CompileError: `f` returns no tensors, or does not fit `descs`.

    >>> import numpy as np
    >>> trace(lambda x: np.tanh(x), np.zeros((2, 3), np.float32)).output_type(0).text()
    '2x3xf32'
    """
    title = name if name is not None else _name_of(f)
    builder = ComputationGraphBuilder(title)
    names = _argument_names(f, len(descs), title)
    unknown = sorted(set(kinds or {}) - set(names))
    if unknown:
        raise CompileError(f"{title!r} has no argument {unknown[0]!r}", expected=", ".join(names))
    arguments = []
    for argument, desc in zip(names, descs, strict=True):
        kind, placement = _described(argument, desc, title)
        role = (kinds or {}).get(argument, InputKind.ACTIVATION)
        shape = kind.shape if sizes is None else sizes.shape_of(argument, kind.shape)
        arguments.append(builder.input(argument, shape, kind.data_type, role))
        builder.place(*placement)
    if sizes is not None:
        sizes.check_inputs(names)
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
            f"{count} arguments are described for {title!r}",
            where=f"trace of {title!r}",
            expected=f"{len(names)}: {', '.join(names)}" if names else "no arguments",
            remedy="pass one descriptor or example array per argument",
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
        raise CompileError(
            f"{title!r} returned no tensor, expected at least one", where=f"trace of {title!r}"
        )
    for name, value in results:
        if not isinstance(value, SymbolicTensor | np.ndarray | np.generic | bool | int | float):
            raise CompileError(
                f"{title!r} returned a {type(value).__name__} as {name!r}",
                where=f"trace of {title!r}",
                expected="tensors: one, a tuple, or a mapping by name",
                remedy="return the tensor itself; a function that returns nothing has no graph",
            )
        yield name, value if isinstance(value, SymbolicTensor) else np.asarray(value)


def _name_of(f: Traceable) -> str:
    name = getattr(f, "__name__", type(f).__name__)
    return "traced" if name == "<lambda>" else str(name)
