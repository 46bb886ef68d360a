"""Attributes of modules, classes and objects, read without running any code of theirs.

Comes in: what has attributes, and a name. Goes out: what stands there, in all places where Python
would look; why a class or object cannot be read so. Must not know what is done with it.
"""

from __future__ import annotations

import dataclasses
import reprlib
import types
from collections import namedtuple
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import numpy as np

from stitch.frontend import is_torch

#: Fields of named tuples.
_FIELD = type(vars(namedtuple("_One", "field"))["field"])  # its class has no name
#: What C code reads or calls, of which there is nothing to know.
DESCRIPTORS = frozenset({
    types.MemberDescriptorType, types.GetSetDescriptorType, types.WrapperDescriptorType,
    types.MethodDescriptorType, types.ClassMethodDescriptorType, _FIELD,
})  # fmt: skip
#: Members of classes that nobody calls but when there is nobody left.
_UNCALLED = frozenset({"__del__", "__dict__", "__weakref__"})
#: By these NumPy finds an array in any object; most of them tell where bytes lie.
_LENDING = ("__array__", "__array_interface__", "__array_struct__")
#: What is called only by who has the class itself, and makes an object or a class of it.
MAKERS = frozenset({
    "__class_getitem__", "__init__", "__init_subclass__", "__new__", "__post_init__",
})  # fmt: skip
#: Without being told, NumPy asks any object for what arrays have and for what its own functions
#: are called; Python asks for the rest of these.
_ASKED = frozenset([
    *[name for name in dir(np.ndarray) if not name.startswith("_")],
    *[name for name, each in vars(np).items() if isinstance(each, np.ufunc)],
    "__array_priority__", "__array_ufunc__", "close", "flush", "keys", "send", "throw", "write",
])  # fmt: skip
#: Of a class written in C.
_OF_C = (
    types.WrapperDescriptorType, types.MethodDescriptorType, types.ClassMethodDescriptorType,
    types.BuiltinFunctionType,
)  # fmt: skip


def classes_of(kind: type) -> list[type]:
    """A class and its bases, as far as they are written in Python."""
    return [each for each in kind.__mro__ if each not in (object, tuple) and not _is_error(each)]


def implicit_members(kind: type) -> Iterator[tuple[str, Any]]:
    """What Python itself calls of a class, be it a function or another object; its makers are not
    among it."""
    for name, member in [*vars(kind).items()]:
        if not (name.startswith("__") and name.endswith("__")) or name in _UNCALLED | MAKERS:
            continue
        if name == "__repr__" and is_shown_by_fields(member):
            member = member.__wrapped__
        # None stands for what a class refuses to be asked.
        if member is None or callable(member) or hasattr(type(member), "__get__"):
            yield name, member


def is_of_torch(kind: type) -> bool:
    """Whether a class is one of PyTorch's own."""
    return kind.__module__.partition(".")[0] == "torch"


def asked_for(owner: Any) -> frozenset[str]:
    """Names that an object, or a class and its bases, have and that others ask for."""
    if not isinstance(owner, type):
        return _ASKED.intersection(getattr(owner, "__dict__", ()))
    return _ASKED.intersection([name for each in classes_of(owner) for name in vars(each)])


def is_shown_by_fields(member: Any) -> bool:
    """Whether a method is how a dataclass shows itself: it has another one within, that names the
    fields, and remembers what is being shown."""
    code = getattr(member, "__code__", None)
    within = (dataclasses.__file__, reprlib.__file__)
    return code is not None and code.co_filename in within and hasattr(member, "__wrapped__")


def _is_error(kind: type) -> bool:
    """Whether a class is one of Python's own exceptions."""
    return issubclass(kind, BaseException) and kind.__module__ == "builtins"


def refusal_of_class(kind: type) -> str:
    """Why the attributes of a class cannot be read; empty if they can."""
    if type(kind) is not type:
        return f"its class is a {type(kind).__name__}"
    if tuple in kind.__mro__ and not hasattr(kind, "_fields"):
        return "it is a tuple"
    for each in classes_of(kind):
        members = vars(each)
        if "__getattribute__" in members:
            return "it finds its attributes itself"
        if type(members.get("__dict__")) not in (types.NoneType, types.GetSetDescriptorType):
            return "it has a dictionary of its own"
        if any(name in members for name in _LENDING[1:]):
            return "it lends bytes"
        if type(each) is not type or any(type(m) in _OF_C for m in vars(each).values()):
            return f"{each.__name__} is not written in Python"
    return ""


def refusal_of_object(value: Any) -> str:
    """Why the attributes of an object cannot be read; empty if they can."""
    if isinstance(value, tuple | BaseException):
        return "not all of it are attributes"
    return refusal_of_class(type(value)) or refusal_of_instance(value)


def refusal_of_instance(value: Any) -> str:
    """The same of an object whose class can be read."""
    inside = getattr(value, "__dict__", None)
    if inside is not None and type(inside) is not dict:
        return f"its attributes are in a {type(inside).__name__}"
    return "it lends bytes" if inside and any(name in inside for name in _LENDING) else ""


def attribute(owner: Any, name: str) -> Iterator[Any]:
    """What stands under a name in an owner itself; of a class, in each class that it has it
    from."""
    if isinstance(owner, type):
        for each in classes_of(owner):
            if name in vars(each):
                yield vars(each)[name]
        return
    if isinstance(owner, ModuleType):
        if name in vars(owner):
            yield vars(owner)[name]
        return
    if isinstance(owner, np.ndarray):
        if name == "base":
            yield owner.base
        return
    inside = getattr(owner, "__dict__", None)
    if type(inside) is dict and name in inside:
        yield inside[name]
    for each in classes_of(type(owner)):
        member = vars(each).get(name)
        if type(member) is types.MemberDescriptorType:
            try:
                yield member.__get__(owner)
            except AttributeError:
                yield "nothing yet"
        elif name in vars(each) and is_torch(owner) and not is_of_torch(each):
            yield member
