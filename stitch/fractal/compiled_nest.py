"""A whole function over nests as one program, for the lengths of an example: saved as a `.ttb`
file, or called.

Arrays that the function closes over are constants.
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
from stitch.fractal.programs import as_function, called
from stitch.fractal.tracing import GraphTracing, as_values
from stitch.fractal.value_forms import ValueForm
from stitch.graph import ComputationGraph, SymbolicTensor
from stitch.machine import Machine, load_machine
from stitch.runtime import LoadedProgram, RuntimeDevice
from stitch.ttb import Binary, save


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class CompiledNest:
    """A function over nests, compiled for the lengths of its example.

    `graph` is what was traced; `loops` says how its loops run. Callable with nests of these
    lengths, on a device of its own that the first call opens, or one that was given.
    """

    graph: ComputationGraph
    binary: Binary
    loops: tuple[LoopNote, ...]
    _takes: tuple[ValueForm, ...]
    _gives: ValueForm
    _machine: Machine
    _executor: str | None = None
    _loaded: list[LoadedProgram] = field(default_factory=list)

    def __repr__(self) -> str:
        program = self.binary.programs[0]
        return f"<CompiledNest {program.name!r}: {len(program.operations)} operations>"

    @takes(path=PATH)
    def save(self, path: str | Path) -> None:
        """Write the `.ttb` file, whole or not at all. Nests are tensors there, all leaves along the
        first axis."""
        save(self.binary, path)

    def text(self) -> str:
        """The program as readable text."""
        return self.binary.programs[0].text()

    def explain(self) -> str:
        """How each loop runs, and what was not taken."""
        return "\n".join(note.text() for note in self.loops) or "no loops"

    @takes(device=instance_of("an open device", RuntimeDevice))
    def on(self, device: RuntimeDevice) -> LoadedProgram:
        """The program on a device, which calls go to from now on."""
        self._loaded[:] = [device.load(self.binary)]
        return self._loaded[0]

    def __call__(self, *arguments: Any) -> Any:
        """The function's value; raises `UsageError` for other lengths or forms than those of the
        example."""
        if not self._loaded:
            words: dict[str, Any] = {} if self._executor is None else {"executor": self._executor}
            self.on(RuntimeDevice(self._machine, **words))
        if len(arguments) != len(self._takes):
            raise UsageError(
                f"this nest was compiled for {len(self._takes)} arguments", got=str(len(arguments))
            )
        given: list[Any] = []
        for number, (argument, form) in enumerate(zip(arguments, self._takes, strict=True)):
            given += _data(argument, form, f"argument {number}")
        traced = next((g for g in given if isinstance(g, SymbolicTensor)), None)
        found = called(self._loaded[0], given, getattr(traced, "builder", None))
        return self._gives.value(iter(found if isinstance(found, tuple) else (found,)))


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
    """A function over nests as a program for a machine, for nests of the lengths of the examples.

    `example`: FractalTensors, tuples of such, arrays. What the function closes over is constant.
    `schedule`: how loops run wherever they can, in place of what costs least. `executor`: by whom
    that is weighed, and computed where a call opens the device (default: `numpy`). Raises
    `CompileError` for a function that asks for data, naming the line, `UsageError` for an unknown
    schedule or executor.

    >>> from stitch import fractal as ops
    >>> sums = ops.compile(lambda xs: ops.scan(lambda s, x: s + x, xs), ops.FractalTensor([1., 2.]))
    >>> sums(ops.FractalTensor([3., 4.])).tolist()
    [3.0, 7.0]
    """
    options = CompileOptions(schedule=schedule, executor=executor)
    title = name or getattr(f, "__name__", "nest").strip("<>")
    tracing = GraphTracing(title)
    forms = tuple([ValueForm.of(as_values(each)) for each in example])
    brought = [tracing.rearranged(each) for each in example]
    function = as_function(f, tracing.builder)
    gives = tracing.written(lambda _: function(*brought))
    graph = tracing.graph()
    machine = load_machine(target)
    compiled = compile_graph(graph, machine, options)
    binary = Binary((compiled.program,), machine.shape, "fractal")
    return CompiledNest(graph, binary, compiled.loops, forms, gives, machine, executor)


def _data(value: Any, form: ValueForm, where: str) -> Iterator[Any]:
    """What is given for the inputs of an argument: all leaves of a nest, in order."""
    value = as_values(value)
    if form.parts is not None:
        if not isinstance(value, tuple) or len(value) != len(form.parts):
            raise UsageError(
                "this nest was compiled for several values here", where=where,
                expected=f"{len(form.parts)} values", got=type(value).__name__,
            )  # fmt: skip
        for number, (part, inside) in enumerate(zip(value, form.parts, strict=True)):
            yield from _data(part, inside, f"{where}[{number}]")
        return
    if form.tree is not None and not isinstance(value, FractalTensor):
        raise UsageError(
            "this nest was compiled for a FractalTensor here", where=where,
            expected=lengths_text(form), got=type(value).__name__,
            remedy="make one of it: FractalTensor(x)",
        )  # fmt: skip
    tree = value.index.tree if isinstance(value, FractalTensor) else None
    if tree != form.tree:
        raise UsageError(
            "this nest was compiled for other lengths", where=where,
            expected="a tensor" if form.tree is None else lengths_text(form),
            got="a tensor" if tree is None else lengths_text(ValueForm(tree)),
            remedy="compile it for an example of these lengths, or call the function itself",
        )  # fmt: skip
    if not isinstance(value, FractalTensor):
        written = value.written if isinstance(value, SymbolicTensor) else None
        yield value if written is None else written
    else:
        yield whole_data(value)


def whole_data(nest: FractalTensor) -> Any:
    """All leaves of a nest with data, in order: its data itself where they lie so."""
    data = nest.data
    is_whole = nest.numel == data.shape[0] and np.array_equal(
        nest.index.rows(), np.arange(nest.numel)
    )
    return data if is_whole else nest.leaves()


def lengths_text(form: ValueForm) -> str:
    """The lengths of a nest, by depth."""
    assert form.tree is not None
    shown = [str(n) if isinstance(n, int) else str(n.tolist())[:40] for n in form.tree.lengths]
    return f"a nest of depth {form.tree.depth}, lengths {'; '.join(shown)}"
