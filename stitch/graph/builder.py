"""`ComputationGraphBuilder`: writes a computation graph down, one operation at a time.

Each operation is typed as it is added and remembers the line of the user's code that asked for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, final, overload

from stitch.argument_kinds import TEXT, WHOLE, instance_of, optional, several, takes
from stitch.errors import CompileError
from stitch.graph import numpy_functions
from stitch.graph.computation_graph import ComputationGraph
from stitch.graph.emitter import TYPE_NAME, Given, TypeName, Written, data_type_of
from stitch.graph.methods import LayerMethods
from stitch.graph.placement import PlacementOption
from stitch.graph.symbolic import SymbolicTensor
from stitch.program import (
    Array,
    InputKind,
    InputSlot,
    OutputSlot,
    Ownership,
    ValueType,
    as_read_only,
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
