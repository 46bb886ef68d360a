"""The meaning of a user function: what is equal only for functions that do the same.

Comes in: functions and what they are given; values of the graph under construction that they read.
Goes out: a key, the arrays and values that it holds a place for. What cannot be judged raises
`UnreadableError`. Read are code by identity, defaults, closures, the globals that code names,
attributes of modules, classes and objects as far as some code names them, and so on through all
that is reached. Must not know what is kept for a meaning.
"""

from __future__ import annotations

import builtins
import functools
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np

from stitch.errors import StitchError
from stitch.fractal.fractal_tensor import FractalTensor, Leaf
from stitch.fractal.meanings.array_contents import CONTENTS, MAX_CONTENT_NBYTES
from stitch.fractal.meanings.code_names import BACK_DOORS, names_dates, names_of
from stitch.fractal.meanings.object_attributes import (
    DESCRIPTORS,
    MAKERS,
    asked_for,
    attribute,
    classes_of,
    implicit_members,
    is_of_torch,
    refusal_of_class,
    refusal_of_instance,
    refusal_of_object,
)
from stitch.fractal.meanings.trusted import is_library, is_trusted
from stitch.fractal.programs import SameObject, state_of
from stitch.fractal.rows import Affine, Indexed, IndexMap, Rows
from stitch.fractal.zipped import Zipped
from stitch.frontend import is_torch
from stitch.graph import SymbolicTensor
from stitch.program import Array
from stitch.runtime import LoadedProgram, Tensor

#: Arrays of so few bytes are told by their bytes, others by what they held before.
SMALL_NBYTES = 1 << 14
#: So much is read of one function at most.
MAX_VALUES = 20_000
#: About what a value takes in a key.
VALUE_NBYTES = 128
_PLAIN = frozenset({bool, int, str, bytes, type(None), type(Ellipsis), type(NotImplemented)})


class UnreadableError(Exception):
    """Nothing is known of a value that a function reads."""

    def __init__(self, why: str) -> None:
        super().__init__(why)
        self.why = why


@dataclass(frozen=True, slots=True)
class Meaning:
    """What was read: `key` is equal for what means the same, where `values` and `arrays` stand at
    its places. `nbytes`: about what the key takes."""

    key: Hashable
    values: tuple[SymbolicTensor, ...]
    arrays: tuple[Array, ...]
    nbytes: int


class MeaningReader:
    """One walk through functions and what they read; what is met again is called by its number.

    `value_form` says what of a value of a graph counts beside its place, and raises
    `UnreadableError` for one of another graph.
    """

    def __init__(self, value_form: Callable[[SymbolicTensor], Hashable]) -> None:
        self.values: list[SymbolicTensor] = []
        self.arrays: list[Array] = []
        self.nbytes = 0
        self._value_form = value_form
        self._met: dict[int, int] = {}
        self._kinds: dict[int, int] = {}
        #: Nothing that was met goes while this reads, so that no other comes to lie there.
        self._held: list[Any] = []
        self._attributes: set[str] = set()
        self._owners: list[Any] = []
        #: What has the bytes of arrays, by its address: its number, and the first array of it.
        self._lenders: dict[int, tuple[int, Array]] = {}
        self._path: list[str] = []

    def meaning(self, key: Hashable) -> Meaning:
        """What was read so far under a key, with all attributes that some code names."""
        try:
            with self._at("attributes"):
                named = (key, tuple(self._named_attributes()), self._printing())
        except RecursionError:
            raise self._too_deep() from None
        nbytes = self.nbytes + VALUE_NBYTES * (1 + len(self._held))
        return Meaning(named, tuple(self.values), tuple(self.arrays), nbytes)

    def of(self, value: Any) -> Hashable:
        """What a value is; raises `UnreadableError`."""
        try:
            return self._of(value)
        except RecursionError:
            raise self._too_deep() from None

    def _too_deep(self) -> UnreadableError:
        return UnreadableError("what it reads is nested too deeply")

    def _printing(self) -> Hashable:
        """How NumPy shows arrays as text."""
        options = np.get_printoptions()
        if options["formatter"] or options.get("override_repr"):
            return self._of(dict(options))
        return tuple(options.values())

    def _of(self, value: Any) -> Hashable:
        kind = type(value)
        if kind in _PLAIN:
            self.nbytes += len(value) if kind in (str, bytes) else 8
            if kind is str and names_dates(value):
                raise self._unreadable(value, "names dates, that may be now")
            return kind.__name__, value
        if kind is float:
            return "float", value.hex()
        met = self._met.get(id(value))
        if met is not None:
            return "again", met
        if len(self._held) >= MAX_VALUES:
            raise UnreadableError(f"it reads more than {MAX_VALUES} values")
        self._met[id(value)] = len(self._held)
        self._held.append(value)
        read = _READERS.get(kind)
        return self._other(value) if read is None else read(self, value)

    # Data --------------------------------------------------------------------------------------

    def _several(self, value: Any) -> Hashable:
        self._check_count(value)
        return type(value).__name__, *map(self._of, value)

    def _check_count(self, value: Any) -> None:
        if len(value) > MAX_VALUES:
            raise self._unreadable(value, f"more than {MAX_VALUES} elements")

    def _dict(self, value: Mapping[Any, Any]) -> Hashable:
        self._check_count(value)
        return "dict", *[(self._of(k), self._of(v)) for k, v in [*value.items()]]

    def _set(self, value: Any) -> Hashable:
        self._check_count(value)
        # In their order: it is that in which they came, where their hashes meet.
        elements = [*value]
        if not all(type(each) in _PLAIN for each in elements):
            raise self._unreadable(value)
        return type(value).__name__, *[(type(each).__name__, each) for each in elements]

    def _slice(self, value: Any) -> Hashable:
        return type(value).__name__, *map(self._of, (value.start, value.stop, value.step))

    def _text_of(self, value: Any) -> Hashable:
        return type(value).__name__, repr(value)

    def _dtype(self, value: np.dtype[Any]) -> Hashable:
        if value.hasobject or value.names or value.metadata or value.kind == "M":
            raise self._unreadable(value)
        return "dtype", value.str, value.name

    def _array(self, value: Any, data: Any = None) -> Hashable:
        """An array, or the data of a tensor."""
        data = value if data is None else data
        part: Hashable = None
        if isinstance(value, np.ndarray):
            self.arrays.append(value)
            part = self._part_of(value)
        form = self._dtype(data.dtype), data.shape, data.strides, data.flags.writeable, part
        if data.nbytes <= SMALL_NBYTES:
            self.nbytes += data.nbytes
            return "array", *form, data.tobytes()
        return "array", *form, self._content(value, data)

    def _part_of(self, array: Array) -> Hashable:
        """Which bytes of which owner an array has, as far as others have some of them."""
        if array.base is not None:
            self._owners.append(array)
        lender: Any = array
        while isinstance(lender, np.ndarray | memoryview):
            lent = lender.base if isinstance(lender, np.ndarray) else lender.obj
            if lent is None:
                break
            lender = lent
        number, first = self._lenders.setdefault(id(lender), (len(self._lenders), array))
        return number, 0 if first is array else _address(array) - _address(first)

    def _content(self, holder: Any, data: Any) -> Hashable:
        """What a large array holds, or the data of a tensor."""
        if data.nbytes > MAX_CONTENT_NBYTES:
            raise self._unreadable(holder, f"more than {MAX_CONTENT_NBYTES >> 20} MiB")
        return CONTENTS.of(holder, data)

    def _tensor(self, value: Tensor) -> Hashable:
        try:
            data = value.numpy()
        except StitchError as error:
            raise self._unreadable(value, error.what) from error
        return self._array(value, data)

    def _value(self, value: SymbolicTensor) -> Hashable:
        written = value.written
        if written is not None:
            return self._array(value, written)
        self.values.append(value)
        return "value", self._value_form(value)

    def _nest(self, value: FractalTensor) -> Hashable:
        data = value.data
        if isinstance(data, np.ndarray) and data.nbytes > SMALL_NBYTES:
            # Nobody writes to it: it is the nest's own.
            self.arrays.append(data)
            rows: Hashable = data.dtype.name, data.shape, SameObject(data)
        else:
            rows = self._of(data)
        return "nest", rows, self.index(value.index)

    def index(self, index: Indexed) -> Hashable:
        """Which row each leaf of a nest is."""
        lengths = tuple([n if isinstance(n, int) else self._numbers(n) for n in index.tree.lengths])
        return lengths, self.map(index.map)

    def map(self, rows: IndexMap) -> Hashable:
        """The same without lengths."""
        if isinstance(rows, Affine):
            return rows
        return type(rows).__name__, self._numbers(
            rows.starts if isinstance(rows, Rows) else rows.numbers
        )

    def _numbers(self, numbers: Array) -> bytes:
        self.nbytes += numbers.nbytes
        return numbers.tobytes()

    def _zipped(self, value: Zipped) -> Hashable:
        return "zip", *map(self._of, value.parts)

    # Functions ---------------------------------------------------------------------------------

    def _function(self, function: FunctionType) -> Hashable:
        if is_trusted(function):
            return SameObject(function)
        code = function.__code__
        names = names_of(code)
        if names.why:
            raise UnreadableError(f"{self._where()}{names.why}")
        self._attributes |= names.attributes
        parts: list[Hashable] = [SameObject(code), function.__name__, function.__qualname__]
        with self._at("defaults"):
            parts += [self._of(function.__defaults__), self._of(function.__kwdefaults__)]
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            with self._at(name):
                try:
                    parts.append(self._of(cell.cell_contents))
                except ValueError:
                    parts.append("nothing yet")
        for name in names.globals:
            with self._at(name):
                parts.append(self._global(function, name))
        if function.__dict__:
            with self._at("attributes"):
                parts.append(self._of(function.__dict__))
        return "function", *parts

    def _global(self, function: FunctionType, name: str) -> Hashable:
        known: Any = function  # Not all checkers know what it has.
        for names in (function.__globals__, _names_of(known.__builtins__)):
            if name in names:
                return self._of(names[name])
        return "no such name"

    def _partial(self, value: functools.partial[Any]) -> Hashable:
        parts = value.func, value.args, value.keywords, value.__dict__
        return "partial", *map(self._of, parts)

    def _method(self, value: MethodType) -> Hashable:
        return "method", self._of(value.__func__), self._of(value.__self__)

    def _builtin(self, value: Any) -> Hashable:
        if is_trusted(value):
            return SameObject(value)
        owner = value.__self__
        if value.__name__ in BACK_DOORS or owner is None or isinstance(owner, ModuleType):
            raise self._unreadable(value, getattr(value, "__name__", ""))
        return "builtin", value.__name__, self._of(owner)

    def _wrapped(self, value: Any) -> Hashable:
        if type(value) is classmethod:  # An object hands its class to it.
            self._attributes |= MAKERS
        return type(value).__name__, self._of(value.__func__)

    def _property(self, value: property) -> Hashable:
        return "property", *map(self._of, (value.fget, value.fset, value.fdel))

    def _same(self, value: Any) -> Hashable:
        return SameObject(value)

    # What has attributes -----------------------------------------------------------------------

    def _module(self, module: ModuleType) -> Hashable:
        self._owners.append(module)
        has_more = not is_library(module.__name__) and "__getattr__" in vars(module)
        return (
            "module",
            SameObject(module),
            self._of(vars(module)["__getattr__"]) if has_more else None,
        )

    def _other(self, value: Any) -> Hashable:
        kind = type(value)
        if isinstance(value, type):
            return self._class(value)
        if kind in DESCRIPTORS or kind.__module__ == "typing":
            return SameObject(value), *self._descriptor(value)
        if isinstance(value, np.ufunc) or kind.__name__ == "_ArrayFunctionDispatcher":
            if is_trusted(value):
                return SameObject(value)
            raise self._unreadable(value)
        if isinstance(value, np.generic) and is_trusted(kind):
            self.nbytes += value.nbytes
            return "number", self._dtype(value.dtype), value.tobytes()
        if isinstance(value, np.dtype):
            return self._dtype(value)
        if isinstance(value, SymbolicTensor):
            return self._value(value)
        if isinstance(value, Enum) and is_trusted(kind):
            return SameObject(value)
        if is_torch(value):
            return self._torch(value)
        if isinstance(value, tuple) and hasattr(kind, "_fields"):
            refused = refusal_of_instance(value)
            if refused:
                raise self._unreadable(value, refused)
            self._owners.append(value)
            self._attributes |= asked_for(value)
            return "named", self._kind(kind), *map(self._of, tuple.__iter__(value))
        return self._object(value)

    def _descriptor(self, value: Any) -> Iterator[Hashable]:
        """What C code, or a type of `typing`, stands for."""
        name = getattr(value, "__name__", None)
        if name in BACK_DOORS:
            raise self._unreadable(value, name)
        if isinstance(name, str):
            self._attributes.add(name)
        if type(value).__module__ == "typing":
            self._owners.append(value)
            for each in ("__origin__", "__args__"):
                yield self._of(getattr(value, each, None))

    def _torch(self, module: Any) -> Hashable:
        self._owners.append(module)
        its_own = [each for each in classes_of(type(module)) if not is_of_torch(each)]
        called = [self._of(member) for each in its_own for _, member in implicit_members(each)]
        state, tensors = state_of(module)
        contents = [self._content(tensor, tensor.detach()) for tensor in tensors]
        return "torch", SameObject(module), state, *called, *contents

    def _class(self, kind: type) -> Hashable:
        """A class that may be called."""
        if kind is type:  # It gives that of any object.
            self._attributes |= MAKERS
        if is_trusted(kind):
            return SameObject(kind)
        found = [self._kind(kind)]
        for name in sorted(MAKERS):
            for member in attribute(kind, name):
                with self._at(name):
                    found.append(self._of(member))
        return "class", *found

    def _kind(self, kind: type) -> Hashable:
        """The class of an object: how it is made counts only where the class itself is reached."""
        met = self._kinds.get(id(kind))
        if met is not None:
            return "again", met
        self._kinds[id(kind)] = len(self._kinds)
        self._held.append(kind)
        if is_trusted(kind):
            return SameObject(kind)
        refused = refusal_of_class(kind)
        if refused:
            raise self._unreadable(kind, refused)
        self._owners.append(kind)
        self._attributes |= asked_for(kind)
        implicit = []
        for each in classes_of(kind):
            for name, member in implicit_members(each):
                with self._at(name):
                    implicit.append((name, self._of(member)))
        names = kind.__name__, kind.__qualname__
        return "kind", SameObject(kind), *names, *map(SameObject, classes_of(kind)), *implicit

    def _object(self, value: Any) -> Hashable:
        refused = refusal_of_object(value)
        if refused or any(map(is_trusted, classes_of(type(value)))):
            raise self._unreadable(value)
        self._owners.append(value)
        self._attributes |= asked_for(value)
        return "object", self._kind(type(value))

    def _named_attributes(self) -> Iterator[Hashable]:
        """Of all that has attributes those that some code names, until no more is reached."""
        known, looked = list[str](), 0
        while True:
            if "__class__" in self._attributes:
                self._attributes |= MAKERS
            fresh, count = sorted(self._attributes.difference(known)), len(self._owners)
            if not fresh and looked == count:
                return
            todo = [(number, name) for name in fresh for number in range(looked)]
            known += fresh
            todo += [(number, name) for number in range(looked, count) for name in known]
            looked = count
            for number, name in todo:
                for found in attribute(self._owners[number], name):
                    with self._at(name):
                        yield number, name, self._of(found)

    # Where -------------------------------------------------------------------------------------

    @contextmanager
    def _at(self, name: str) -> Iterator[None]:
        self._path.append(name)
        yield
        self._path.pop()

    def _where(self) -> str:
        names = [name for name in self._path if name not in ("defaults", "attributes")]
        return f"{names[-1]!r}: " if names else ""

    def _unreadable(self, value: Any, why: str = "") -> UnreadableError:
        names = [name for name in self._path if name != "attributes"]
        name = f"{names[-1]!r}, " if names else ""
        return UnreadableError(
            f"it reads {name}of type {type(value).__name__}{why and f' ({why})'}"
        )


def _address(array: Array) -> int:
    at: int = array.__array_interface__["data"][0]
    return at


def _names_of(namespace: Any) -> Mapping[str, Any]:
    return namespace if isinstance(namespace, dict) else vars(builtins)


_READERS: dict[type, Callable[[MeaningReader, Any], Hashable]] = {
    complex: MeaningReader._text_of, range: MeaningReader._slice, slice: MeaningReader._slice,
    tuple: MeaningReader._several, list: MeaningReader._several, dict: MeaningReader._dict,
    set: MeaningReader._set, frozenset: MeaningReader._set, np.ndarray: MeaningReader._array,
    Leaf: MeaningReader._array,
    Tensor: MeaningReader._tensor, SymbolicTensor: MeaningReader._value,
    FractalTensor: MeaningReader._nest, Zipped: MeaningReader._zipped,
    FunctionType: MeaningReader._function, functools.partial: MeaningReader._partial,
    MethodType: MeaningReader._method, BuiltinFunctionType: MeaningReader._builtin,
    staticmethod: MeaningReader._wrapped, classmethod: MeaningReader._wrapped,
    property: MeaningReader._property, LoadedProgram: MeaningReader._same,
    ModuleType: MeaningReader._module,
}  # fmt: skip
