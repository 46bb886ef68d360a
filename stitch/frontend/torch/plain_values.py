"""What modules take and give, as containers that torch.export knows.

Comes in: a module and its examples, in which there may be objects that hold tensors: dataclasses,
caches of transformers and what is like them. Goes out: a module and examples without any, for
torch.export: an object is a dictionary of its attributes that hold tensors. No class is registered
with torch, for what is registered changes how torch takes it everywhere. Must not know: graphs,
exported programs.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import OrderedDict
from dataclasses import dataclass, field
from enum import Enum
from types import ModuleType
from typing import Any

import torch
from torch.utils import _pytree as pytree

from stitch.errors import CompileError

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def with_plain_values(module: Any, examples: Arguments) -> tuple[Any, Arguments]:
    """A module that computes the same with plain arguments and results; and its examples, plain.

    The module stays as it is: its twin shares parameters, layers and hooks. Of objects the twin
    makes new ones in each call; it raises `CompileError` where the module changes one of these and
    does not return what it changed, as nobody would see that.
    """
    calls = _Calls(examples)
    # Not copy.copy: modules may leave parts of themselves out of that.
    twin = object.__new__(type(module))
    twin.__dict__.update(module.__dict__)
    for name in ("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs", "_forward_hooks"):
        twin.__dict__[name] = OrderedDict(getattr(module, name))
    twin.register_forward_pre_hook(calls.before, prepend=True, with_kwargs=True)
    twin.register_forward_hook(calls.after)
    return twin, _plain(examples)


@dataclass
class _Calls:
    """Around the twin's forward: makes objects of plain arguments, and plain results."""

    examples: Arguments
    #: The objects of this call, each with its tensors as they were, and how often those had been
    #: written to.
    _made: list[tuple[Any, list[tuple[Any, int]]]] = field(default_factory=list)

    def before(self, _: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> Arguments:
        self._made.clear()
        leaves, tree = pytree.tree_flatten(self.examples)
        parts = tree.flatten_up_to((arguments, named))
        values = map(self._like, leaves, parts)
        rebuilt: Arguments = tree.unflatten(values)
        return rebuilt

    def _like(self, example: Any, part: Any) -> Any:
        """What is like a leaf of the examples, with these tensors."""
        if not _is_object(example):
            return part
        inside = _Inside()
        inside.plain(example)
        # Copies: what the module writes into its object is no change of an argument.
        fresh = [tensor.clone() for tensor in _tensors(part)]
        memo = {id(old): new for old, new in zip(inside.tensors, fresh, strict=True)}
        made = copy.deepcopy(example, memo | {id(module): module for module in inside.modules})
        self._made.append((made, [(t, t._version) for t in fresh]))
        return made

    def after(self, _: Any, __: Any, result: Any) -> Any:
        plain = _plain(result)
        returned = {id(tensor) for tensor in _tensors(plain)}
        for made, before in self._made:
            inside = _Inside()
            inside.plain(made)
            known = {id(tensor): version for tensor, version in before}
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


def _plain(value: Any) -> Any:
    """A value with dictionaries in the place of objects."""
    return pytree.tree_map(
        lambda leaf: _Inside().plain(leaf) or {} if _is_object(leaf) else leaf, value
    )


def _tensors(plain: Any) -> list[Any]:
    return [leaf for leaf in pytree.tree_leaves(plain) if isinstance(leaf, torch.Tensor)]


def _is_object(value: Any) -> bool:
    """Whether what a value holds is looked at by name; what torch takes as it is, and what can be
    called, is none."""
    if dataclasses.is_dataclass(value):
        return not isinstance(value, type)
    is_whole = isinstance(value, torch.Tensor | torch.nn.Module | Enum | type | ModuleType)
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
        if isinstance(value, torch.Tensor):
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
        leaves, tree = pytree.tree_flatten(value)
        if not tree.is_leaf():
            parts = [self.plain(leaf) for leaf in leaves]
            return None if all(part is None for part in parts) else tree.unflatten(parts)
        if not _is_object(value):
            return None
        held = {name: self.plain(part) for name, part in _attributes(value)}
        return {name: part for name, part in held.items() if part is not None} or None


def _attributes(value: Any) -> list[tuple[str, Any]]:
    """What an object holds, by name: the fields of a dataclass, all attributes of another."""
    if not dataclasses.is_dataclass(value):
        return list(vars(value).items())
    names = [one.name for one in dataclasses.fields(value)]
    return [(name, getattr(value, name)) for name in names if hasattr(value, name)]
