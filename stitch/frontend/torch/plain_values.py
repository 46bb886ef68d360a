"""What modules take and give, as containers that torch.export knows, and back again.

torch.export is given a module and examples without objects that hold tensors (dataclasses, caches
of transformers and what is like them): an object is a dictionary of its attributes that hold
tensors, and one of a class that is registered with torch's pytree without key paths the tuple of
its parts. No class is registered here, for what is registered changes how torch takes it
everywhere. A `CallStructure` takes what the module takes, and gives what it gives.
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
from torch.utils import _pytree as pytree

from stitch.errors import CompileError, UsageError

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
_NUMBERS = (int, float, complex, str)
#: What every module has.
_OWN_ATTRIBUTES = frozenset(vars(torch.nn.Module())) | vars(torch.nn.Module).keys()


@dataclass(frozen=True, slots=True)
class Structure:
    """How values lie in containers and objects; two are equal where the same was flattened.

    `objects`: for each leaf of the tree that is an object its class and how many tensors it holds,
    else None.
    """

    tree: Any
    objects: tuple[tuple[type, int] | None, ...]


def flattened(value: Any) -> tuple[list[Any], Structure]:
    """The leaves of a value, of objects the tensors in them, and how they lie in it."""
    leaves, tree = pytree.tree_flatten(value)
    flat: list[Any] = []
    objects: list[tuple[type, int] | None] = []
    for leaf in leaves:
        if not _is_object(leaf):
            flat.append(leaf)
            objects.append(None)
            continue
        inside = _Inside()
        inside.plain(leaf)
        flat += inside.tensors
        objects.append((type(leaf), len(inside.tensors)))
    return flat, Structure(tree, tuple(objects))


def rebuilt(like: Any, flat: Sequence[Any]) -> Any:
    """What is built like a value, of other leaves, in the order in which `flattened` gives them."""
    leaves, tree = pytree.tree_flatten(like)
    rest = iter(flat)
    return tree.unflatten(
        [_with_tensors(leaf, rest) if _is_object(leaf) else next(rest) for leaf in leaves]
    )


def _with_tensors(example: Any, tensors: Iterator[Any]) -> Any:
    """An object like another one, with these tensors, and the same modules."""
    inside = _Inside()
    inside.plain(example)
    memo = {id(old): next(tensors) for old in inside.tensors}
    return copy.deepcopy(example, memo | {id(module): module for module in inside.modules})


@dataclass(frozen=True, slots=True)
class StaticValue:
    """A number, text or None that the module was compiled with, or gives at every call."""

    value: Any


@dataclass(frozen=True, slots=True, eq=False)
class CallStructure:
    """The arguments of a module's calls as inputs of its program, and the outputs as its results.

    `arguments`: how the examples lay in theirs, `names`: those of the ones by name; `inputs`: for
    each leaf the name of a slot, or a static value. `results`: what the module gave when it was
    captured; `outputs`: for each leaf of it the number of an output, or a static value.
    """

    arguments: Structure
    names: tuple[str, ...]
    inputs: tuple[str | StaticValue, ...]
    results: Any
    outputs: tuple[int | StaticValue, ...]

    def inputs_of(
        self, arguments: tuple[Any, ...], named: Mapping[str, Any]
    ) -> dict[str, Any] | None:
        """The program's inputs by name, of arguments that lie as the examples did; None of others.

        Raises `UsageError` for another value where a static one was given.
        """
        if named.keys() == set(self.names):
            named = {name: named[name] for name in self.names}
        leaves, structure = flattened((arguments, dict(named)))
        if structure != self.arguments:
            # The keys of a dictionary may come in another order.
            tree = self.arguments.tree
            try:
                ordered = tree.unflatten(tree.flatten_up_to((arguments, dict(named))))
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
                    "the module was compiled for another value of an argument that is no tensor",
                    expected=repr(slot.value)[:100], got=repr(leaf)[:100],
                    remedy="compile it again for this value, or let forward take it as a tensor",
                )  # fmt: skip
        return slots

    def results_of(self, given: Any) -> Any:
        """What the module gives, of what the program gave."""
        outputs = given if isinstance(given, tuple) else (given,)
        return rebuilt(
            self.results, [outputs[o] if isinstance(o, int) else o.value for o in self.outputs]
        )


def are_tensors(values: Iterable[Any]) -> bool:
    """Whether all of these values are tensors of torch."""
    return all(isinstance(value, torch.Tensor) for value in values)


def with_plain_values(module: Any, examples: Arguments) -> tuple[Any, Arguments, ModuleCalls]:
    """A module that computes the same with plain arguments and results; its examples, plain; and
    its calls, of which the last one's results are known.

    The module stays as it is: its twin shares parameters, layers and hooks. Of objects the twin
    makes new ones in each call; it raises `CompileError` where the module changes one of these and
    does not return what it changed, as nobody would see that.
    """
    calls = ModuleCalls(examples)
    # Not copy.copy: modules may leave parts of themselves out of that.
    twin = object.__new__(type(module))
    twin.__dict__.update(module.__dict__)
    for name in ("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs", "_forward_hooks"):
        twin.__dict__[name] = OrderedDict(getattr(module, name))
    twin.register_forward_pre_hook(calls.before, prepend=True, with_kwargs=True)
    twin.register_forward_hook(calls.after)
    return twin, _plain(examples), calls


@dataclass
class ModuleCalls:
    """Around the twin's forward: makes objects of plain arguments, and plain results."""

    examples: Arguments
    #: What the last call gave.
    results: Any = None
    #: By attribute, the numbers before the last call and after it, where it changed them.
    changed_numbers: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    #: The objects of this call, each with its tensors as they were, and how often those had been
    #: written to.
    _made: list[tuple[Any, list[tuple[Any, int]]]] = field(default_factory=list)
    _numbers: dict[str, Any] = field(default_factory=dict)
    _buffers: dict[str, torch.Size] = field(default_factory=dict)

    def before(self, twin: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> Arguments:
        self._made.clear()
        self._numbers = _numbers_of(twin)
        self._buffers = {name: buffer.shape for name, buffer in twin.named_buffers()}
        leaves, tree = pytree.tree_flatten(self.examples, is_leaf=_has_no_paths)
        parts = tree.flatten_up_to((arguments, named))
        values = map(self._like, leaves, parts)
        rebuilt: Arguments = tree.unflatten(values)
        return rebuilt

    def _like(self, example: Any, part: Any) -> Any:
        """What is like a leaf of the examples, with these tensors."""
        if not (_is_object(example) or _has_no_paths(example)):
            return part
        # Copies: what the module writes into its object is no change of an argument.
        fresh = [tensor.clone() for tensor in _tensors(part)]
        kept = iter(fresh)
        leaves, tree = pytree.tree_flatten(example)
        made = tree.unflatten(
            [
                _with_tensors(leaf, kept) if _is_object(leaf)
                else next(kept) if isinstance(leaf, torch.Tensor) else leaf
                for leaf in leaves
            ]
        )  # fmt: skip
        self._made.append((made, [(t, t._version) for t in fresh]))
        return made

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
                    expected=f"the shape that it has before, {list(before)}",
                    got=str(list(buffer.shape)),
                    remedy="make the buffer as large as it becomes, and write into a part of it: "
                    "self.cache[:, place] = x",
                )
        plain, self.results = _plain(result), result
        returned = {id(tensor) for tensor in _tensors(plain)}
        for made, versions in self._made:
            inside = _Inside()
            inside.plain(made)
            known = {id(tensor): version for tensor, version in versions}
            changed = [t for t in inside.tensors if known.get(id(t)) != t._version]
            if any(id(tensor) not in returned for tensor in changed):
                raise CompileError(
                    f"the module changes a {type(made).__name__} that it is given, and does not "
                    "return what it changed",
                    expected="the changed object among the results: a program gives what it makes",
                    remedy="return it from forward, or use "
                    'torch.compile(module, backend="stitch"), which changes it',
                )
        return plain


def _numbers_of(module: Any) -> dict[str, Any]:
    """The Python numbers and text in the attributes of a module and its parts, by name; of lists
    and dictionaries those in them."""
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
    """A value with dictionaries in the place of objects, and tuples of what has no key paths."""

    def of_leaf(leaf: Any) -> Any:
        if _has_no_paths(leaf):
            return tuple(map(_plain, _parts_of(leaf)))
        return (_Inside().plain(leaf) or {}) if _is_object(leaf) else leaf

    return pytree.tree_map(of_leaf, value, is_leaf=_has_no_paths)


def _has_no_paths(value: Any) -> bool:
    """Whether torch's pytree takes a value apart, and has no names for its parts."""
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
    """Whether what a value holds is looked at by name; what torch takes as it is, and what can be
    called, is none."""
    if dataclasses.is_dataclass(value):
        return not isinstance(value, type)
    is_whole = _is_tensor(value) or isinstance(value, torch.nn.Module | Enum | type | ModuleType)
    return hasattr(value, "__dict__") and not is_whole and not callable(value)


@dataclass
class _Inside:
    """A walk through an object: its plain form, and the tensors and modules that it comes across,
    in order."""

    tensors: list[Any] = field(default_factory=list)
    modules: list[Any] = field(default_factory=list)
    _path: set[int] = field(default_factory=set)

    def plain(self, value: Any) -> Any:
        """What holds tensors in a value; None where nothing does."""
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
            return (
                None
                if all(part is None for part in parts)
                else tuple({} if p is None else p for p in parts)
            )
        leaves, tree = pytree.tree_flatten(value, is_leaf=_has_no_paths)
        if not tree.is_leaf():
            parts = [self.plain(leaf) for leaf in leaves]
            return None if all(part is None for part in parts) else tree.unflatten(parts)
        if not _is_object(value):
            return None
        held = {name: self.plain(part) for name, part in _attributes(value)}
        return {name: part for name, part in held.items() if part is not None} or None


def _attributes(value: Any) -> list[tuple[str, Any]]:
    """What an object holds, by name: the fields of a dataclass, all attributes of another, and what
    lies in it where its class is made of a dictionary, a list or a tuple."""
    held: dict[str, Any] = {}
    if isinstance(value, dict):
        held |= {str(key): part for key, part in value.items()}
    elif isinstance(value, list | tuple | deque):
        held |= {str(number): part for number, part in enumerate(value)}
    if dataclasses.is_dataclass(value):
        names = [one.name for one in dataclasses.fields(value)]
        own = {name: getattr(value, name) for name in names if hasattr(value, name)}
    else:
        own = dict(vars(value))
    # Classes that show keys as attributes may keep each value twice.
    return [*held.items(), *(item for item in own.items() if item[0] not in held)]
