"""Convert arguments and results of modules to containers that torch.export accepts, and back.

torch.export rejects objects that hold tensors (dataclasses, caches of transformers). They are
passed as dictionaries of their attributes that hold tensors, or as tuples of their parts if torch's
pytree knows their class but has no key paths for it. Nothing is registered with torch's pytree,
because that would change how torch treats the class everywhere.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from types import ModuleType
from typing import Any

import torch

from stitch.errors import CompileError, UsageError
from stitch.frontend.torch.torch_internals import pytree

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
_NUMBERS = (int, float, complex, str)
_WHOLE = (torch.SymInt, torch.SymFloat, torch.SymBool, torch.nn.Module, Enum, type, ModuleType)
#: Attributes of every module.
_OWN_ATTRIBUTES = frozenset(vars(torch.nn.Module())) | vars(torch.nn.Module).keys()


@dataclass(frozen=True, slots=True)
class Structure:
    """The containers and objects around the leaves of a value.

    `objects`: for each leaf of the tree, its class and number of tensors if it is an object, else
    None.
    """

    tree: Any
    objects: tuple[tuple[type, int] | None, ...]


def flattened(value: Any) -> tuple[list[Any], Structure]:
    """Return the leaves of a value (of objects, their tensors) and its structure."""
    leaves, tree = pytree.tree_flatten(value)
    flat: list[Any] = []
    objects: list[tuple[type, int] | None] = []
    for leaf in leaves:
        if not _is_object(leaf):
            flat.append(leaf)
            objects.append(None)
            continue
        scan = _ObjectScan()
        scan.plain(leaf)
        flat += scan.tensors
        objects.append((type(leaf), len(scan.tensors)))
    return flat, Structure(tree, tuple(objects))


def rebuilt(like: Any, flat: Sequence[Any]) -> Any:
    """Build a value like another one from other leaves, in the order of `flattened`."""
    leaves, tree = pytree.tree_flatten(like)
    rest = iter(flat)
    return tree.unflatten(
        [_with_tensors(leaf, rest) if _is_object(leaf) else next(rest) for leaf in leaves]
    )


def _with_tensors(example: Any, tensors: Iterator[Any]) -> Any:
    """A copy of an object with other tensors and the same modules."""
    scan = _ObjectScan()
    scan.plain(example)
    memo = {id(old): next(tensors) for old in scan.tensors}
    return copy.deepcopy(example, memo | {id(module): module for module in scan.modules})


@dataclass(frozen=True, slots=True)
class StaticValue:
    """A number, text or None that is a constant of a compiled module."""

    value: Any


@dataclass(frozen=True, slots=True, eq=False)
class CallStructure:
    """Maps arguments of a module's calls to inputs of its program, and outputs to results.

    `arguments`: the structure of the examples, `names`: the examples passed by name; `inputs`: for
    each leaf, the name of a slot or a static value. `results`: the results of the captured call;
    `outputs`: for each leaf of them, the number of an output or a static value.
    """

    arguments: Structure
    names: tuple[str, ...]
    inputs: tuple[str | StaticValue, ...]
    results: Any
    outputs: tuple[int | StaticValue, ...]

    def inputs_of(
        self, arguments: tuple[Any, ...], named: Mapping[str, Any]
    ) -> dict[str, Any] | None:
        """Return the program's inputs by name; None if the arguments have another structure than
        the examples. Raises `UsageError` for another value of a static argument."""
        if named.keys() == set(self.names):
            named = {name: named[name] for name in self.names}
        leaves, structure = flattened((arguments, dict(named)))
        if structure != self.arguments:
            # The keys of a dictionary may have another order. The examples are copies: a copy of a
            # torch.Size is a tuple.
            tree = self.arguments.tree
            given = pytree.tree_map(lambda leaf: leaf, (arguments, dict(named)))
            try:
                ordered = tree.unflatten(tree.flatten_up_to(given))
            except (ValueError, TypeError):
                return None
            leaves, structure = flattened(ordered)
            if structure != self.arguments:
                return None
        slots: dict[str, Any] = {}
        for slot, leaf in zip(self.inputs, leaves, strict=True):
            if isinstance(slot, str):
                slots[slot] = leaf
            elif type(leaf) is not type(slot.value) or leaf != slot.value:
                raise UsageError(
                    "the module was compiled for another value of an argument that is not a tensor",
                    expected=repr(slot.value)[:100], got=repr(leaf)[:100],
                    remedy="compile it again for this value, or pass the value as a tensor",
                )  # fmt: skip
        return slots

    def results_of(self, outputs: Any) -> Any:
        """Build the module's results from the program's output, or tuple of outputs."""
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        return rebuilt(
            self.results, [outputs[o] if isinstance(o, int) else o.value for o in self.outputs]
        )


def are_tensors(values: Iterable[Any]) -> bool:
    """Whether all values are tensors of torch."""
    return all(isinstance(value, torch.Tensor) for value in values)


def with_plain_values(module: Any, examples: Arguments) -> tuple[Any, Arguments, ModuleCalls]:
    """Return a twin of a module with plain arguments and results, its plain examples, and the
    record of its calls.

    The twin shares parameters, layers and hooks with the module, which is not changed. It builds
    the objects of its arguments anew in each call, and raises `CompileError` if the module changes
    one of them without returning the change, which would be lost.
    """
    calls = ModuleCalls(examples)
    # Not copy.copy: a module may define what that copies.
    twin = object.__new__(type(module))
    twin.__dict__.update(module.__dict__)
    for name in ("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs", "_forward_hooks"):
        twin.__dict__[name] = OrderedDict(getattr(module, name))
    twin.register_forward_pre_hook(calls.before, prepend=True, with_kwargs=True)
    twin.register_forward_hook(calls.after)
    return twin, _plain(examples), calls


@dataclass
class ModuleCalls:
    """Hooks around the twin's forward: they build objects of plain arguments, and plain results."""

    examples: Arguments
    #: Results of the last call.
    results: Any = None
    #: Numbers that the last call changed, by attribute: before and after it.
    changed_numbers: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    #: The objects built for this call, each with its tensors and their version counters.
    _objects: list[tuple[Any, list[tuple[Any, int]]]] = field(default_factory=list)
    _numbers: dict[str, Any] = field(default_factory=dict)
    _buffers: dict[str, torch.Size] = field(default_factory=dict)

    def before(self, twin: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> Arguments:
        self._objects.clear()
        self._numbers = _numbers_of(twin)
        self._buffers = {name: buffer.shape for name, buffer in twin.named_buffers()}
        leaves, tree = pytree.tree_flatten(self.examples, is_leaf=_has_no_paths)
        parts = tree.flatten_up_to((arguments, named))
        built: Arguments = tree.unflatten(map(self._built, leaves, parts))
        return built

    def _built(self, example: Any, part: Any) -> Any:
        """An object like a leaf of the examples, with the tensors of its plain form."""
        if not (_is_object(example) or _has_no_paths(example)):
            return part
        # Copies: a write into the object must not change the plain argument.
        fresh = [tensor.clone() for tensor in _tensors(part)]
        rest = iter(fresh)
        leaves, tree = pytree.tree_flatten(example)
        built = tree.unflatten(
            [
                _with_tensors(leaf, rest) if _is_object(leaf)
                else next(rest) if isinstance(leaf, torch.Tensor) else leaf
                for leaf in leaves
            ]
        )  # fmt: skip
        self._objects.append((built, [(t, t._version) for t in fresh]))
        return built

    def after(self, twin: Any, _: Any, result: Any) -> Any:
        numbers = _numbers_of(twin)
        self.changed_numbers = {
            name: (self._numbers[name], numbers[name])
            for name in self._numbers.keys() & numbers.keys()
            if self._numbers[name] != numbers[name]
        }
        for name, buffer in twin.named_buffers():
            before = self._buffers.get(name, buffer.shape)
            if buffer.shape != before:
                raise CompileError(
                    f"forward changes the shape of the buffer {name!r}",
                    expected=str(list(before)),
                    got=str(list(buffer.shape)),
                    remedy="allocate the buffer at its final size and write into a part of it: "
                    "self.cache[:, position] = x",
                )
        plain, self.results = _plain(result), result
        returned = {id(tensor) for tensor in _tensors(plain)}
        for built, tensors in self._objects:
            scan = _ObjectScan()
            scan.plain(built)
            versions = {id(tensor): version for tensor, version in tensors}
            changed = [t for t in scan.tensors if versions.get(id(t)) != t._version]
            if any(id(tensor) not in returned for tensor in changed):
                raise CompileError(
                    f"the module changes an argument of class {type(built).__name__} without "
                    "returning it, so its program would lose the change",
                    expected="the changed object among the results",
                    remedy='return it from forward, or use torch.compile(module, backend="stitch")',
                )
        return plain


def _numbers_of(module: Any) -> dict[str, Any]:
    """Numbers and texts in the attributes of a module and its parts, and in lists and dictionaries
    there, by name."""
    found: dict[str, Any] = {}
    for prefix, part in module.named_modules():
        # An attribute of the class is the value before the first assignment.
        for name, value in (vars(type(part)) | vars(part)).items():
            if name not in _OWN_ATTRIBUTES and not name.startswith("__"):
                path = f"{prefix}.{name}" if prefix else name
                if isinstance(value, _NUMBERS):
                    found[path] = value
                elif type(value) in (list, dict):
                    items = value.items() if isinstance(value, dict) else enumerate(value)
                    found[path] = {k: v for k, v in items if isinstance(v, _NUMBERS)}
    return found


def _plain(value: Any) -> Any:
    """A value with dictionaries instead of objects, and tuples instead of values without key
    paths."""

    def of_leaf(leaf: Any) -> Any:
        if _has_no_paths(leaf):
            return tuple(map(_plain, _parts_of(leaf)))
        return (_ObjectScan().plain(leaf) or {}) if _is_object(leaf) else leaf

    return pytree.tree_map(of_leaf, value, is_leaf=_has_no_paths)


def _has_no_paths(value: Any) -> bool:
    """Whether torch's pytree flattens a value but has no key paths for its parts."""
    node = pytree.SUPPORTED_NODES.get(type(value))
    return node is not None and node.flatten_with_keys_fn is None


def _parts_of(value: Any) -> list[Any]:
    return list(pytree.SUPPORTED_NODES[type(value)].flatten_fn(value)[0])


def _is_tensor(value: Any) -> bool:
    """Whether a value is a tensor of torch, of Stitch, or an array."""
    return hasattr(type(value), "__dlpack__")


def _tensors(plain: Any) -> list[Any]:
    return [leaf for leaf in pytree.tree_leaves(plain) if isinstance(leaf, torch.Tensor)]


def _is_object(value: Any) -> bool:
    """Whether a value is passed as a dictionary of its attributes: not tensors, symbolic numbers,
    modules, enums and callables."""
    if dataclasses.is_dataclass(value):
        return not isinstance(value, type)
    is_whole = _is_tensor(value) or isinstance(value, _WHOLE)
    return hasattr(value, "__dict__") and not is_whole and not callable(value)


@dataclass
class _ObjectScan:
    """Collects the tensors and modules of an object, in order, and builds its plain form."""

    tensors: list[Any] = field(default_factory=list)
    modules: list[Any] = field(default_factory=list)
    _path: set[int] = field(default_factory=set)

    def plain(self, value: Any) -> Any:
        """The parts of a value that hold tensors; None if there are none."""
        if _is_tensor(value):
            self.tensors.append(value)
            return value
        if isinstance(value, torch.nn.Module):
            self.modules.append(value)
            return None
        if id(value) in self._path:
            return None
        self._path.add(id(value))
        try:
            return self._of_parts(value)
        finally:
            self._path.discard(id(value))

    def _of_parts(self, value: Any) -> Any:
        if _has_no_paths(value):
            parts = list(map(self.plain, _parts_of(value)))
            if all(part is None for part in parts):
                return None
            return tuple({} if part is None else part for part in parts)
        leaves, tree = pytree.tree_flatten(value, is_leaf=_has_no_paths)
        if not tree.is_leaf():
            parts = [self.plain(leaf) for leaf in leaves]
            return None if all(part is None for part in parts) else tree.unflatten(parts)
        if not _is_object(value):
            return None
        attributes = {name: self.plain(part) for name, part in _attributes(value)}
        return {name: part for name, part in attributes.items() if part is not None} or None


def _attributes(value: Any) -> list[tuple[str, Any]]:
    """The fields of a dataclass, all attributes of another object, and the items of an object whose
    class extends a dictionary, list, tuple or deque."""
    items: dict[str, Any] = {}
    if isinstance(value, dict):
        items |= {str(key): part for key, part in value.items()}
    elif isinstance(value, list | tuple | deque):
        items |= {str(number): part for number, part in enumerate(value)}
    if dataclasses.is_dataclass(value):
        names = [one.name for one in dataclasses.fields(value)]
        own = {name: getattr(value, name) for name in names if hasattr(value, name)}
    else:
        own = dict(vars(value))
    # Classes that show keys as attributes may have each value twice.
    return [*items.items(), *(item for item in own.items() if item[0] not in items)]
