"""Compile a function over nests into one program, for the lengths of an example.

Arrays in the function's closure become constants.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from stitch.argument_kinds import CALLABLE, PATH, TEXT, either, instance_of, optional, takes
from stitch.compiler import CompileOptions, LoopNote, compile_graph
from stitch.errors import UsageError
from stitch.fractal.fractal_tensor import FractalTensor
from stitch.fractal.programs import as_function, call_program
from stitch.fractal.structures import Structure
from stitch.fractal.tracing import GraphTracing, as_tuples
from stitch.graph import ComputationGraph, SymbolicTensor
from stitch.machine import Machine, load_machine
from stitch.runtime import LoadedProgram, RuntimeDevice
from stitch.ttb import Binary, save


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class CompiledNest:
    """A function over nests, compiled for the lengths of its example.

    Callable with nests of these lengths, on a device that the first call opens, or that `on`
    selects. `graph` is the traced function; `loops` are the schedules of its loops.
    """

    graph: ComputationGraph
    binary: Binary
    loops: tuple[LoopNote, ...]
    _takes: tuple[Structure, ...]
    _gives: Structure
    _machine: Machine
    _executor: str | None = None
    _loaded: list[LoadedProgram] = field(default_factory=list)

    def __repr__(self) -> str:
        program = self.binary.programs[0]
        return f"<CompiledNest {program.name!r}: {len(program.operations)} operations>"

    @takes(path=PATH)
    def save(self, path: str | Path) -> None:
        """Write the `.ttb` file atomically. A nest is one tensor there, with all leaves along axis
        0."""
        save(self.binary, path)

    def text(self) -> str:
        """Return the program as readable text."""
        return self.binary.programs[0].text()

    def explain(self) -> str:
        """Return the schedule of each loop, and the alternatives."""
        return "\n".join(note.text() for note in self.loops) or "no loops"

    @takes(device=instance_of("an open device", RuntimeDevice))
    def on(self, device: RuntimeDevice) -> LoadedProgram:
        """Load the program on a device and use it for later calls."""
        self._loaded[:] = [device.load(self.binary)]
        return self._loaded[0]

    def __call__(self, *arguments: Any) -> Any:
        """Run the program; raise `UsageError` for other lengths or structures than the
        example's."""
        if not self._loaded:
            words: dict[str, Any] = {} if self._executor is None else {"executor": self._executor}
            self.on(RuntimeDevice(self._machine, **words))
        if len(arguments) != len(self._takes):
            raise UsageError(
                "the compiled function was called with another number of arguments",
                expected=str(len(self._takes)), got=str(len(arguments)),
            )  # fmt: skip
        inputs: list[Any] = []
        for number, (argument, structure) in enumerate(zip(arguments, self._takes, strict=True)):
            inputs += _data(argument, structure, f"argument {number}")
        traced = next((g for g in inputs if isinstance(g, SymbolicTensor)), None)
        results = call_program(self._loaded[0], inputs, getattr(traced, "builder", None))
        return self._gives.value(iter(results if isinstance(results, tuple) else (results,)))


@takes(
    f=CALLABLE, target=either(TEXT, PATH, instance_of("a Machine", Machine)), name=optional(TEXT),
    schedule=optional(TEXT), executor=optional(TEXT),
)  # fmt: skip
def compile(
    f: Callable[..., Any],
    *example: Any,
    target: str | Path | Machine = "host",
    name: str | None = None,
    schedule: str | None = None,
    executor: str | None = None,
) -> CompiledNest:
    """Compile a function over nests for a machine, for nests of the lengths of the examples.

    Values in the function's closure become constants.

    Args:
        *example: FractalTensors, tuples of them, or arrays.
        schedule: A loop schedule to prefer over the cheapest one.
        executor: The executor whose rates decide schedules, and of the device that a call opens.

    Raises:
        CompileError: The function needs data during tracing; the text names the line.

    >>> from stitch import fractal as ops
    >>> sums = ops.compile(lambda xs: ops.scan(lambda s, x: s + x, xs), ops.FractalTensor([1., 2.]))
    >>> sums(ops.FractalTensor([3., 4.])).tolist()
    [3.0, 7.0]
    """
    options = CompileOptions(schedule=schedule, executor=executor)
    title = name or getattr(f, "__name__", "nest").strip("<>")
    tracing = GraphTracing(title)
    structures = tuple([Structure.of(as_tuples(each)) for each in example])
    as_inputs = [tracing.as_leaf_inputs(each) for each in example]
    function = as_function(f, tracing.builder)
    gives = tracing.trace(lambda _: function(*as_inputs))
    graph = tracing.graph()
    machine = load_machine(target)
    compiled = compile_graph(graph, machine, options)
    binary = Binary((compiled.program,), machine.shape, "fractal")
    return CompiledNest(graph, binary, compiled.loops, structures, gives, machine, executor)


def _data(value: Any, structure: Structure, where: str) -> Iterator[Any]:
    """Yield the program inputs for an argument: all leaves of a nest, in order."""
    value = as_tuples(value)
    if structure.parts is not None:
        if not isinstance(value, tuple) or len(value) != len(structure.parts):
            raise UsageError(
                "the function was compiled for a tuple here", where=where,
                expected=f"{len(structure.parts)} values", got=type(value).__name__,
            )  # fmt: skip
        for number, (part, inside) in enumerate(zip(value, structure.parts, strict=True)):
            yield from _data(part, inside, f"{where}[{number}]")
        return
    if structure.tree is not None and not isinstance(value, FractalTensor):
        raise UsageError(
            "the function was compiled for a FractalTensor here", where=where,
            expected=lengths_text(structure), got=type(value).__name__,
            remedy="pass FractalTensor(x)",
        )  # fmt: skip
    tree = value.index.tree if isinstance(value, FractalTensor) else None
    if tree != structure.tree:
        raise UsageError(
            "the function was compiled for other lengths", where=where,
            expected="a tensor" if structure.tree is None else lengths_text(structure),
            got="a tensor" if tree is None else lengths_text(Structure(tree)),
            remedy="compile it for an example of these lengths, or call the function itself",
        )  # fmt: skip
    if not isinstance(value, FractalTensor):
        written = value.written if isinstance(value, SymbolicTensor) else None
        yield value if written is None else written
    else:
        yield leaves_in_order(value)


def leaves_in_order(nest: FractalTensor) -> Any:
    """Return all leaves of a nest in order, without a copy if its data is in order."""
    data = nest.data
    is_whole = nest.numel == data.shape[0] and np.array_equal(
        nest.index.rows(), np.arange(nest.numel)
    )
    return data if is_whole else nest.leaves()


def lengths_text(structure: Structure) -> str:
    assert structure.tree is not None
    shown = [str(n) if isinstance(n, int) else str(n.tolist())[:40] for n in structure.tree.lengths]
    return f"a nest of depth {structure.tree.depth}, lengths {'; '.join(shown)}"
