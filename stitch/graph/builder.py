"""`ComputationGraphBuilder`: writes a computation graph down, one operation at a time.

Comes in: inputs, parameters, and operators applied to tensors, arrays and numbers. Goes out: a
checked `ComputationGraph`. Each operation is typed as it is added and remembers the line of the
user's code that asked for it. Must not know: front ends, layouts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, final, overload

import numpy as np

from stitch import ops
from stitch.argument_kinds import TEXT, WHOLE, instance_of, several, takes
from stitch.errors import CompileError
from stitch.graph import numpy_functions
from stitch.graph.computation_graph import ComputationGraph
from stitch.graph.constant_pool import ConstantPool, array_of
from stitch.graph.emitter import TYPE_NAME, Given, TypeName, Written, data_type_of
from stitch.graph.known_values import KnownValues
from stitch.graph.methods import LayerMethods
from stitch.graph.source_location import mistake, user_location
from stitch.graph.symbolic import SymbolicTensor
from stitch.graph.wish import Wish
from stitch.program import (
    ABSENT,
    Array,
    AttributeValue,
    DataType,
    InputKind,
    InputSlot,
    Operation,
    OutputSlot,
    Ownership,
    Value,
    ValueType,
)


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
        "_constants", "_graph", "_input_names", "_inputs", "_known", "_location", "_made", "_names",
        "_operations", "_output_names", "_outputs", "_values", "_wishes", "name",
    )  # fmt: skip

    @takes(name=TEXT)
    def __init__(self, name: str) -> None:
        self.name = name
        self._inputs: list[InputSlot] = []
        self._outputs: list[OutputSlot] = []
        self._values: list[Value] = []
        self._operations: list[Operation] = []
        self._wishes: list[Wish] = []
        self._constants = ConstantPool()
        self._known = KnownValues()
        self._names: dict[str, int] = {}
        #: Values that operations made and that are no outputs yet.
        self._made: set[int] = set()
        self._input_names: set[str] = set()
        self._output_names: set[str] = set()
        self._location = ""
        self._graph: ComputationGraph | None = None

    # Slots and constants -----------------------------------------------------------------------

    @takes(
        name=TEXT, shape=several("a list of whole numbers", WHOLE), data_type=TYPE_NAME,
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
                remedy=f"declare it float32 and wish for input.{name}.data_type={wanted.value}",
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

    def parameter(self, name: str, array: object) -> SymbolicTensor:
        """A named constant; a writable array is copied, a read-only one is kept as it is."""
        return self._constant(name, array_of(array, self._where()))

    def constant(self, array: object) -> SymbolicTensor:
        """An unnamed constant; equal small arrays share one value."""
        data = array_of(array, self._where())
        known = self._constants.find(data)
        if known is not None:
            return SymbolicTensor(self, known)
        return self._constant("constant", data)

    def _constant(self, name: str, data: Array) -> SymbolicTensor:
        self._check_open()
        kind = ValueType(data.shape, data_type_of(data.dtype))
        tensor = self._value(name, kind)
        kept = self._constants.add(tensor.index, data)
        self._known.add_constant(tensor.index, kept)
        return tensor

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

    def wish(self, *wishes: Wish) -> None:
        """Asks something of placement for a slot of this graph."""
        for wish in wishes:
            instance_of("wishes (stitch.graph.Wish)", Wish).check("wish", "wishes", wish)
        self._wishes.extend(wishes)

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
            )
            self._graph = graph.with_wishes(*self._wishes)
        return self._graph

    # Operations --------------------------------------------------------------------------------

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

    def apply(
        self,
        op: str,
        operands: Sequence[Given],
        outputs: int | Sequence[str],
        attributes: Mapping[str, Written],
        domain: str = "",
    ) -> tuple[SymbolicTensor, ...]:
        """See `op`; always a tuple."""
        self._check_open()
        TEXT.check("ComputationGraphBuilder.op", "op", op)
        domain = "" if domain == "ai.onnx" else domain
        like = next((o for o in operands if isinstance(o, SymbolicTensor)), None)
        tensors = [None if o is None else self.tensor(o, like) for o in operands]
        while tensors and tensors[-1] is None:
            tensors.pop()
        names = [op.lower()] * outputs if isinstance(outputs, int) else list(outputs)
        written = self._attributes(op, domain, attributes)
        indices = tuple(ABSENT if t is None else t.index for t in tensors)
        types = [None if t is None else t.type for t in tensors]
        draft = Operation(op, indices, (), written, domain, self._where())
        inferred = ops.infer_types(
            op,
            types,
            domain=domain,
            constants=self._known.operands(draft),
            attributes=written,
            outputs=len(names),
            location=draft.location,
        )
        results = tuple(self._value(n, kind) for n, kind in zip(names, inferred, strict=True))
        numbers = tuple(t.index for t in results)
        operation = Operation(op, indices, numbers, written, domain, draft.location)
        self._operations.append(operation)
        self._known.add_operation(operation, types)
        self._made.update(numbers)
        return results

    def tensor(self, given: Given, like: SymbolicTensor | None = None) -> SymbolicTensor:
        """A tensor of this builder; see `Emitter.tensor`. Raises `CompileError` for another's."""
        if isinstance(given, SymbolicTensor):
            if given.builder is not self:
                raise CompileError(
                    f"{given!r} belongs to another graph ({given.builder.graph_name!r})",
                    where=f"graph {self.name!r} at {self._where()}",
                    remedy="pass it as an input, or build both parts with one builder",
                )
            return given
        kind = None if like is None else like.data_type
        return self.constant(array_of(given, self._where(), kind))

    @contextmanager
    def at(self, location: str) -> Iterator[None]:
        """Records this location for the operations made within: a line of a foreign module."""
        before, self._location = self._location, location
        try:
            yield
        finally:
            self._location = before

    # What tensors ask --------------------------------------------------------------------------

    @property
    def graph_name(self) -> str:
        """The graph's name."""
        return self.name

    @property
    def operations(self) -> Sequence[Operation]:
        """The operations so far, in run order: to look at, not to change."""
        return self._operations

    def type_of(self, index: int) -> ValueType:
        """The type of a value."""
        return self._values[index].type

    def name_of(self, index: int) -> str:
        """The name of a value."""
        return self._values[index].name

    def known_data(self, tensor: SymbolicTensor) -> Array | None:
        """The data of a tensor where it is small and known already (read-only), else None."""
        return self._known.get(self.tensor(tensor).index)

    def numpy_ufunc(
        self, ufunc: np.ufunc, method: str, inputs: tuple[object, ...], arguments: dict[str, object]
    ) -> object:
        """What a NumPy ufunc means on symbolic tensors."""
        return numpy_functions.call_ufunc(self, ufunc, method, inputs, arguments)

    def numpy_function(
        self,
        function: Callable[..., object],
        inputs: tuple[object, ...],
        arguments: dict[str, object],
    ) -> object:
        """What a NumPy function means on symbolic tensors."""
        return numpy_functions.call_function(self, function, inputs, arguments)

    # Inner -------------------------------------------------------------------------------------

    def _value(self, name: str, kind: ValueType) -> SymbolicTensor:
        self._check_open()
        times = self._names.get(name, 0)
        unique = name
        while times and unique in self._names:
            unique = f"{name}_{times}"
            times += 1
        self._names[name] = max(times, 1)
        self._names.setdefault(unique, 1)
        self._values.append(Value(unique, kind))
        return SymbolicTensor(self, len(self._values) - 1)

    def _attributes(
        self, op: str, domain: str, attributes: Mapping[str, Written]
    ) -> dict[str, AttributeValue]:
        declared = ops.lookup(op, domain).attributes
        written: dict[str, AttributeValue] = {}
        for name, value in attributes.items():
            if value is None:
                continue
            kind = declared[name].kind if name in declared else ""
            written[name] = attribute_of(value, kind)
        return written

    def _where(self) -> str:
        return self._location or user_location()

    def _check_open(self) -> None:
        if self._graph is not None:
            raise CompileError(
                f"the graph {self.name!r} is built already: a tensor escaped from it",
                where=self._where(),
                remedy="use its tensors only inside the traced function, before build()",
            )


def attribute_of(value: Written, kind: str = "") -> AttributeValue:
    """An attribute as graphs hold it: tuples for lists, ints for booleans and data types."""
    if isinstance(value, DataType):
        return ops.onnx_code(value)
    if isinstance(value, str):
        return value
    if isinstance(value, bool | int | float | np.number):
        number = value.item() if isinstance(value, np.number) else value
        return (
            float(number)
            if kind == "float"
            else (number if isinstance(number, float) else int(number))
        )
    items: list[Any] = list(value or ())
    if items and all(isinstance(item, str) for item in items):
        return tuple(items)
    if not all(isinstance(item, bool | int | float | np.number) for item in items):
        raise mistake(
            "an attribute is a number, a string, or a list of either", got=repr(value)[:80]
        )
    if kind == "floats" or any(isinstance(item, float | np.floating) for item in items):
        return tuple(float(item) for item in items)
    return tuple(int(item) for item in items)
