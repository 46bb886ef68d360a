"""`DynamicModel`: a module compiled once with named sizes; each call runs the static model of its
arguments' shapes."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from stitch.argument_kinds import PATH, arranged, takes
from stitch.compiler import CompileOptions, DynamicProgram, compile_dynamic
from stitch.errors import LinkError, UsageError
from stitch.graph import ComputationGraph
from stitch.machine import Machine
from stitch.model import PRODUCER, CompiledModel
from stitch.program import SymbolicSizes
from stitch.runtime import as_array
from stitch.ttb import Binary, SymbolicBinary, encode, save

if TYPE_CHECKING:
    from stitch.frontend import CallStructure

#: Static models that are kept; the oldest one is dropped first.
MAX_MODELS = 256


def _only_static(name: str) -> property:
    """Return a property whose error tells that static models have it."""

    def refuse(self: DynamicModel) -> NoReturn:
        sizes = ", ".join(f"{size}=..." for size in self.program.sizes.dims)
        raise UsageError(
            f"a model with named sizes has no {name}: its static models have",
            remedy=f"choose sizes: model.at({sizes}).{name}",
        )

    return property(refuse)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class DynamicModel:
    """A compiled module with named sizes, from `stitch.compile(..., dynamic_shapes=...)`.

    `model(x)` reads the sizes from the shapes of its arguments and calls the static model at them,
    which is made once. `at` returns that model, to save it or to load it on a device.

    Attributes:
        program: The program with named sizes; it has their guards.
        target: The machine that calls open.
        models: The static models so far, by their sizes in the order of the names.
        structure: How calls of a torch module are calls of its program, if they differ.
    """

    program: DynamicProgram
    target: str
    models: dict[tuple[int, ...], CompiledModel] = field(default_factory=dict)
    structure: CallStructure | None = None
    #: The same by the shapes of the arguments that have all sizes; see `_key_of`.
    _by_key: dict[Hashable, CompiledModel] = field(default_factory=dict)
    #: These arguments by name, and by position: the first, the second and further ones.
    _names: tuple[str, ...] = field(init=False)
    _first: int = field(init=False)
    _second: int | None = field(init=False)
    _others: tuple[int, ...] = field(init=False)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        sized = _inputs_with_sizes(self.program)
        if not sized:
            raise UsageError(
                f"no input of program {self.program.graph.name!r} has an axis of a named size",
                expected='dynamic_shapes={"x": {0: stitch.Dim("batch", 1, 64)}}',
            )
        first, second, *others = (*[position for position, _ in sized], None)
        object.__setattr__(self, "_names", tuple([name for _, name in sized]))
        object.__setattr__(self, "_first", first)
        object.__setattr__(self, "_second", second)
        object.__setattr__(self, "_others", tuple(others[:-1]))

    def __repr__(self) -> str:
        return f"<DynamicModel for {self.target}: {self.program.text()}>"

    # Properties, since `__getattr__` makes each attribute of a call slower.
    binary = _only_static("binary")
    dump = _only_static("dump")
    get_tensor = _only_static("get_tensor")
    program_at = _only_static("program_at")

    @classmethod
    def of(cls, binary: SymbolicBinary) -> DynamicModel:
        """Return the model of a file with named sizes."""
        options = CompileOptions(role=binary.role, math_fidelity=binary.math_fidelity)
        program = DynamicProgram(binary.graph, binary.sizes, binary.machine, options)
        return cls(program, binary.machine.name)

    def stored(self) -> SymbolicBinary:
        """Return what `save` writes."""
        program = self.program
        options, graph = program.options, program.graph
        return SymbolicBinary(
            replace(graph, name=options.name or graph.name),
            program.sizes,
            program.machine,
            PRODUCER,
            options.role,
            options.math_fidelity,
        )

    @takes(path=PATH)
    def save(self, path: str | Path) -> None:
        """Write the `.ttb` file of the program with named sizes, which `stitch.load` reads."""
        save(self.stored(), path)

    def encode(self) -> bytes:
        """Return the bytes that `save` writes."""
        return encode(self.stored())

    def text(self) -> str:
        """Return sizes, guards and slots as readable text."""
        return self.program.text()

    def at(self, **sizes: int) -> CompiledModel:
        """Return the static model at some sizes: what compiling the module at them gives.

        Args:
            **sizes: A number for each named size.

        Raises:
            UsageError: A size is missing, unknown or out of its bounds.
            CompileError: The module or the compiler relied on a relation that does not hold; the
                error names the line.
            OutOfMemoryError: The program does not fit the machine at these sizes.
        """
        key = tuple([sizes.get(name, -1) for name in self.program.sizes.dims])
        # 3.0 and True would find the model of 3 and of 1.
        is_plain = len(sizes) == len(key) and all(type(size) is int for size in key)
        model = self.models.get(key) if is_plain else None
        if model is None:
            graph, compilation = self.program.compilation_at(sizes)
            options, shape = self.program.options, self.program.machine
            model = CompiledModel(
                graph, Binary((compilation.program,), shape, PRODUCER), self.target,
                options.placement, compilation.warnings, executor=options.executor,
                math_fidelity=options.math_fidelity, structure=self.structure,
            )  # fmt: skip
            with self._lock:
                if len(self.models) >= MAX_MODELS:
                    dropped = self.models.pop(next(iter(self.models)))
                    for one, found in list(self._by_key.items()):
                        if found is dropped:
                            del self._by_key[one]
                model = self.models.setdefault(key, model)
        return model

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """Run the static model of the arguments' shapes.

        Raises:
            UsageError: Two arguments disagree about a size, an argument has another rank, or a
                size is out of bounds.
            CompileError: A guard does not hold at these sizes.
        """
        structure = self.structure
        if structure is None and not named:
            try:
                # `_key_of` by position: written out, since its call takes a third of the time.
                key = arguments[self._first].shape
                if self._second is not None:
                    key = key + arguments[self._second].shape
                    for position in self._others:
                        key = key + arguments[position].shape
                model = self._by_key[key]
            except (AttributeError, IndexError, KeyError, TypeError, ValueError):
                pass  # A new size, a list, or an error that `_model_for` raises.
            else:
                try:
                    # Not through its session, which keeps states: it has none.
                    return model.session.loaded_for(model, arguments, named)(*arguments)
                except LinkError:
                    self._model_for(arguments, named)  # Raises if they disagree about a size.
                    raise
        slots = None if structure is None else structure.inputs_of(arguments, named)
        if slots is None:
            return self._model_for(arguments, named)(*arguments, **named)
        try:
            model = self._by_key[self._key_of(slots)]
        except (AttributeError, KeyError, TypeError, ValueError):
            model = self._model_for((), slots)
        try:
            return model.call_slots(slots)
        except LinkError:
            self._model_for((), slots)
            raise

    def sizes_of(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, int]:
        """Return the sizes that shapes of inputs have, some of them if inputs are left out.

        Raises:
            UsageError: Two shapes disagree about a size, or one has another rank.
        """
        graph = self.program.graph
        types = {slot.name: graph.input_type(i) for i, slot in enumerate(graph.inputs)}
        found: dict[str, tuple[int, str]] = {}
        for name, axis, dim in self.program.sizes.sources:
            if name not in shapes:
                continue
            shape, where = shapes[name], f"{name}.shape[{axis}]"
            if len(shape) != len(types[name].shape):
                raise UsageError(f"input {name!r} has another number of axes",
                                 expected=types[name].text(),
                                 got=str(list(shape)))  # fmt: skip
            size, first = found.setdefault(dim, (shape[axis], where))
            if size != shape[axis]:
                raise UsageError(
                    f"two inputs disagree about size {dim!r}", expected=f"{first} = {size}",
                    got=f"{where} = {shape[axis]}", remedy="pass inputs of one size, or declare "
                    "two Dims with different names",
                )  # fmt: skip
        return {name: size for name, (size, _) in found.items()}

    def _key_of(self, inputs: Mapping[str, Any]) -> Any:
        """Return the shapes of the inputs that have all sizes, one after the other."""
        first, *others = self._names
        key = inputs[first].shape
        for name in others:
            key = key + inputs[name].shape
        return key

    def _model_for(self, arguments: tuple[Any, ...], named: Mapping[str, Any]) -> CompiledModel:
        graph = self.program.graph
        types = [(s.name, graph.input_type(i).text()) for i, s in enumerate(graph.inputs)]
        inputs = arranged(f"model {graph.name!r}", types, arguments, named)
        by_name = {
            name: value
            if isinstance(getattr(value, "shape", None), tuple)
            else as_array(value, f"input {name!r}")
            for (name, _), value in zip(types, inputs, strict=True)
        }
        model = self.at(**self.sizes_of({name: value.shape for name, value in by_name.items()}))
        if len(self._by_key) >= MAX_MODELS:  # Also shapes that the model will refuse are in it.
            self._by_key.clear()
        self._by_key[self._key_of(by_name)] = model
        return model


#: Of more named sizes none may be 0 or 1: each combination is compiled.
MOST_SMALL = 3


def exclude_small_sizes(
    program: DynamicProgram,
    static: Callable[[Mapping[str, int]], tuple[ComputationGraph, SymbolicSizes]],
    machine: Machine,
) -> None:
    """Record guards against sizes of 0 and 1 at which the module has, or may have, another graph.

    For each combination of small sizes, the module with these sizes static and the others symbolic
    must compile to the operations that the program has there.

    Args:
        program: A program whose tracer assumed that no size is 0 or 1.
        static: Returns the graph of the module at some sizes, and the sizes that stay symbolic.
        machine: The machine that it is compiled for.
    """
    sizes = program.sizes
    small = {
        name: [size for size in (0, 1) if dim.least <= size <= dim.most]
        for name, dim in sizes.dims.items()
    }
    checked = [name for name in small if small[name]][:MOST_SMALL]
    for name in [name for name in small if small[name] and name not in checked]:
        for size in small[name]:
            sizes.exclude(name, size)
    for choice in product(*((None, *small[name]) for name in checked)):
        chosen = {n: size for n, size in zip(checked, choice, strict=True) if size is not None}
        points = [
            point for point in _points(sizes, chosen)
            if all(guard.holds(point) for guard in sizes.guards)
        ]  # fmt: skip
        if not chosen or not points:
            continue
        try:
            known: dict[Hashable, int] = {}
            graph, others = static(chosen)
            expected = compile_dynamic(graph, others, machine, program.options)
            relied = {guard.condition(chosen) for guard in sizes.guards}
            is_same = relied.issuperset(guard.condition({}) for guard in others.guards) and all(
                program.results_at(point, known)
                == expected.results_at({name: point[name] for name in others.dims}, known)
                for point in points
            )
        except Exception:  # The module, which is any code, has no graph for these sizes.
            is_same = False
        if not is_same:
            sizes.exclude(*next(iter(chosen.items())))


def _points(sizes: SymbolicSizes, chosen: Mapping[str, int]) -> list[dict[str, int]]:
    """Return some sizes, the hints first, with those that are chosen."""
    return [
        {
            **{
                name: min(max(sizes.hints[name] + sign * step, dim.least, 2), dim.most)
                for step, (name, dim) in enumerate(sizes.dims.items(), 1)
            },
            **chosen,
        }
        for sign in (0, 1, -1)
    ]


def _inputs_with_sizes(program: DynamicProgram) -> list[tuple[int, str]]:
    """Return inputs that together have all named sizes, usually one: position and name.

    The shapes of others need not be read to find a static model, which checks its arguments.
    """
    names = [slot.name for slot in program.graph.inputs]
    sources = program.sizes.sources
    counts = Counter([name for name, _ in {(name, size) for name, _, size in sources}])
    chosen: dict[str, str] = {}
    for name, _, size in sorted(sources, key=lambda source: -counts[source[0]]):
        chosen.setdefault(size, name)
    return [(names.index(name), name) for name in dict.fromkeys(chosen.values())]
