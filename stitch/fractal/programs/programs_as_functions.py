"""Programs and torch modules as functions over nests: on tensors with data they are run, on values
of a graph under construction their operations are written in.

A module is captured once for the types of what it is given, and anew once its weights, parts, hooks
or attributes have changed.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from stitch.argument_kinds import arranged
from stitch.errors import UsageError
from stitch.fractal.eager import EagerBuilder
from stitch.fractal.programs.module_states import same_bits, state_of
from stitch.fractal.programs.programs_in_graphs import written_in
from stitch.frontend import is_torch, read_graph
from stitch.graph import ComputationGraph, SymbolicTensor
from stitch.runtime import LoadedProgram, Tensor

#: Captures that are kept of one module.
MAX_CAPTURED = 64


def as_function(function: Callable[..., Any], builder: Any) -> Callable[..., Any]:
    """A user function as one that can be called with the tensors of a builder: programs and torch
    modules on values of a graph too; others as they are."""
    if isinstance(function, LoadedProgram):
        return ProgramFunction(function, builder)
    return ModuleFunction(function, builder) if is_torch(function) else function


def called(program: LoadedProgram, given: Sequence[Any], builder: Any) -> Any:
    """What a program gives: by a run, or written into the graph that one of the values is of."""
    if not any(map(_is_traced, given)):
        return program(*given)
    found = written_in(program.program, given, builder)
    return found[0] if len(found) == 1 else found


class ProgramFunction:
    """A loaded program as a function."""

    def __init__(self, program: LoadedProgram, builder: Any) -> None:
        self._program, self._builder = program, builder

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """Its results; raises what calling the program raises, `LinkError`."""
        program = self._program
        types = [(port.name, port.type.text()) for port in program.ports]
        given = arranged(f"program {program.name!r}", types, arguments, named)
        return called(program, given, self._builder)


class ModuleFunction:
    """A torch module as a function: what `forward` takes and gives are tensors, nested in tuples.

    Raises `CompileError` for what cannot be captured, `UsageError` for other arguments.
    """

    def __init__(self, module: Any, builder: Any) -> None:
        self._module, self._builder = module, builder
        forward = getattr(module, "forward", None)
        self.__signature__ = None if forward is None else inspect.signature(forward)
        #: What was captured in this call, by the types of what was given: nobody trains meanwhile.
        self._known: dict[Hashable, _Captured] = {}

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """The module's results for tensors."""
        if named:
            arguments = self._by_position(arguments, named)
        given = tuple([self._tensors(argument) for argument in arguments])
        flat = [*_flat(given)]
        kinds = _nested(given, lambda tensor: tensor.type)
        if kinds not in self._known:
            self._known[kinds] = _captured(self._module, kinds)
        captured = self._known[kinds]
        if isinstance(self._builder, EagerBuilder) and not any(map(_is_traced, flat)):
            found = self._builder.run(captured.graph, flat)
        else:
            found = written_in(captured.graph, flat, self._builder)
        return captured.shaped(found)

    def _by_position(self, arguments: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, ...]:
        name = type(self._module).__name__
        if self.__signature__ is None:
            raise UsageError(f"{name} takes what it is given by position", got=", ".join(named))
        try:
            bound = self.__signature__.bind(*arguments, **named)
        except TypeError as error:
            raise UsageError(f"{name}.forward: {error}", got=", ".join(named)) from error
        if bound.kwargs:
            raise UsageError(
                f"{name}.forward takes tensors by position", got=", ".join(bound.kwargs)
            )
        return bound.args

    def _tensors(self, value: Any) -> Any:
        """What stands for a module's argument: tensors of the builder."""
        if isinstance(value, tuple | list):
            return tuple([self._tensors(each) for each in value])
        if isinstance(value, float):
            value = np.float32(value)
        if isinstance(value, SymbolicTensor | Tensor | np.ndarray | np.generic | bool | int):
            array = value.numpy() if isinstance(value, Tensor) else value
            return self._builder.tensor(array)
        raise UsageError(
            f"{type(self._module).__name__} takes tensors, or tuples of such, as torch modules do",
            got=type(value).__name__, remedy="flatten the nest first: ops.flatten(nest)",
        )  # fmt: skip


class _Captured:
    """A module's graph for some types."""

    def __init__(self, graph: ComputationGraph, state: Hashable, tensors: Sequence[Any]) -> None:
        self.graph, self._state, self._tensors = graph, state, tensors
        self._paths = [_path(graph, slot.name) for slot in graph.outputs]

    def is_of(self, state: Hashable, tensors: Sequence[Any]) -> bool:
        """Whether the module is still what was captured."""
        pairs = zip(tensors, self._tensors, strict=False)
        return (
            state == self._state
            and len(tensors) == len(self._tensors)
            and all(same_bits(then, now) for now, then in pairs)
        )

    def shaped(self, found: Sequence[Any]) -> Any:
        """Results as the module gives them: one, or a tuple, nested."""
        if self._paths == [()]:
            return found[0]
        return _tuples(dict(zip(self._paths, found, strict=True)))


#: What was captured of modules that are alive, by the types of what they were given.
_modules: WeakKeyDictionary[Any, dict[Hashable, _Captured]] = WeakKeyDictionary()


def _captured(module: Any, kinds: Any) -> _Captured:
    """The module's graph for these types, as the module is now."""
    known = _modules.setdefault(module, {})
    state, tensors = state_of(module)
    if len(known) >= MAX_CAPTURED:
        known.clear()
    found = known.get(kinds)
    if found is None or not found.is_of(state, tensors):
        graph = read_graph(module, kinds)
        found = _Captured(graph, state, [tensor.detach().clone() for tensor in tensors])
        known[kinds] = found
    return found


def _is_traced(value: Any) -> bool:
    """Whether it is a value of a graph under construction."""
    return isinstance(value, SymbolicTensor) and value.written is None


def _flat(value: Any) -> Iterator[Any]:
    if isinstance(value, tuple):
        for each in value:
            yield from _flat(each)
    else:
        yield value


def _nested(value: Any, of: Callable[[Any], Any]) -> Any:
    return tuple([_nested(each, of) for each in value]) if isinstance(value, tuple) else of(value)


def _path(graph: ComputationGraph, name: str) -> tuple[int, ...]:
    """Where a result stands in what the module returns, by the name that the front end gave it."""
    first, *numbers = name.split("_")
    if first != "output" or not all(number.isdecimal() for number in numbers):
        raise UsageError(
            f"{graph.name} returns a dictionary, and functions over nests give tensors or tuples",
            got=name,
        )
    return tuple(map(int, numbers))


def _tuples(found: dict[tuple[int, ...], Any]) -> tuple[Any, ...]:
    """Results by their paths as nested tuples, in order."""
    groups: dict[int, dict[tuple[int, ...], Any]] = {}
    for path, value in found.items():
        groups.setdefault(path[0], {})[path[1:]] = value
    return tuple([
        inside[()] if () in inside else _tuples(inside) for _, inside in sorted(groups.items())
    ])  # fmt: skip
