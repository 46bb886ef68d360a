"""Tracing: a Python function over symbolic tensors becomes a computation graph.

The function runs once: control flow that depends on data is an error, control flow that depends on
shapes is unrolled.
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
    instance_of,
    optional,
    several,
    takes,
)
from stitch.errors import CompileError
from stitch.graph import numpy_functions
from stitch.graph.computation_graph import ComputationGraph
from stitch.graph.emitter import TYPE_NAME, Given, TypeName, Written, data_type_of
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
    TensorDesc,
    ValueType,
    as_read_only,
)

# --------------------------------------------------------------------------------------------------
# `ComputationGraphBuilder`: writes a computation graph down, one operation at a time.


@final
class ComputationGraphBuilder(LayerMethods):
    """Builds one graph; `build` ends it.

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
        name=TEXT, shape=several("a list of whole numbers", WHOLE), data_type=TYPE_NAME,
        kind=instance_of(f"one of {', '.join(map(str, InputKind))}", InputKind),
        ownership=instance_of(f"one of {', '.join(map(str, Ownership))}", Ownership),
    )  # fmt: skip
    def input(
        self,
        name: str,
        shape: Sequence[int],
        data_type: TypeName,
        kind: InputKind = InputKind.ACTIVATION,
        ownership: Ownership = Ownership.BORROW,
    ) -> SymbolicTensor:
        """A named input; raises `CompileError` for a name that is taken or a block format."""
        if name in self._input_names:
            raise CompileError(f"two inputs are called {name!r}", where=self._where())
        wanted, dimensions = data_type_of(data_type), tuple(int(d) for d in shape)
        if wanted.is_block:
            raise CompileError(
                f"{wanted.value} is a way to store a tensor, not a type to compute in",
                where=f"input {name!r} at {self._where()}",
                remedy=f"declare it float32 and set input.{name}.data_type={wanted.value}",
            )
        if any(d < 0 for d in dimensions):
            raise CompileError(
                "a shape has no negative dimension",
                where=f"input {name!r} at {self._where()}",
                got=str(list(dimensions)),
            )
        tensor = self._value(name, ValueType(dimensions, wanted))
        self._input_names.add(name)
        self._inputs.append(InputSlot(name, tensor.index, kind, ownership))
        return tensor

    @takes(name=TEXT, aliases_input=optional(WHOLE))
    def output(self, name: str, tensor: Given, *, aliases_input: int | None = None) -> None:
        """Names an output; a value that is an input, a constant or an output gets an Identity.

        An output is a value of its own, made by the graph (the rule of `Program`).
        """
        if name in self._output_names:
            raise CompileError(f"two outputs are called {name!r}", where=self._where())
        value = self.tensor(tensor)
        # An output is no longer to be had: it is one already.
        if value.index not in self._made:
            value = self.identity(value)
        self._made.discard(value.index)
        self._output_names.add(name)
        self._outputs.append(OutputSlot(name, value.index, aliases_input))

    def begin_state(self, name: str, initial: Array) -> None:
        """Gives a state its initial value: an input of kind `state` with an output of its name."""
        self._initial_state[name] = as_read_only(initial)

    def place(self, *placement: PlacementOption) -> None:
        """Add placement options for slots of this graph."""
        for option in placement:
            instance_of("placement options (stitch.graph.PlacementOption)", PlacementOption).check(
                "option", "placement", option
            )
        self._placement.extend(placement)

    def build(self) -> ComputationGraph:
        """The graph; the builder takes no more operations after it."""
        if self._graph is None:
            graph = ComputationGraph(
                self.name,
                tuple(self._inputs),
                tuple(self._outputs),
                tuple(self._values),
                tuple(self._operations),
                self._constants.constants(),
                bodies=tuple(self._bodies.bodies),
                initial_state=self._initial_state,
            )
            self._graph = graph.with_placement(*self._placement)
        return self._graph

    @overload
    def op(
        self, op: str, *operands: Given, domain: str = "", outputs: Literal[1] = 1,
        **attributes: Written,
    ) -> SymbolicTensor: ...  # fmt: skip

    @overload
    def op(
        self, op: str, *operands: Given, domain: str = "", outputs: int | Sequence[str],
        **attributes: Written,
    ) -> SymbolicTensor | tuple[SymbolicTensor, ...]: ...  # fmt: skip

    def op(
        self,
        op: str,
        *operands: Given,
        domain: str = "",
        outputs: int | Sequence[str] = 1,
        **attributes: Written,
    ) -> SymbolicTensor | tuple[SymbolicTensor, ...]:
        """Applies an operator by its ONNX name; one tensor, or a tuple if there are several.

        Operands may be arrays, numbers (of the first tensor's type), lists of ints (int64) or None
        (absent); `outputs` is how many are wanted, or their names.
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
