"""Attributes of modules, classes and objects, read without running any code of theirs.

Comes in: what has attributes, and a name. Goes out: what stands there, in all places where Python
would look; why a class or object cannot be read so. Must not know what is done with it.
"""

from __future__ import annotations

import types
from collections import namedtuple
from collections.abc import Iterator
from types import ModuleType
from typing import Any

#: Fields of named tuples.
_FIELD = type(vars(namedtuple("_One", "field"))["field"])  # its class has no name
#: What C code reads or calls, of which there is nothing to know.
DESCRIPTORS = frozenset({
    types.MemberDescriptorType, types.GetSetDescriptorType, types.WrapperDescriptorType,
    types.MethodDescriptorType, types.ClassMethodDescriptorType, _FIELD,
})  # fmt: skip
#: Of a class written in C.
_OF_C = (
    types.WrapperDescriptorType, types.MethodDescriptorType, types.ClassMethodDescriptorType,
    types.BuiltinFunctionType,
)  # fmt: skip


def classes_of(kind: type) -> list[type]:
    """A class and its bases, as far as they are written in Python."""
    return [each for each in kind.__mro__ if each not in (object, tuple) and not _is_error(each)]


def is_implicit(kind: type, name: str) -> bool:
    """Whether Python itself calls a method of this name; that by which a dataclass shows itself
    only reads its fields."""
    is_shown = name == "__repr__" and "__dataclass_fields__" in vars(kind)
    return name.startswith("__") and name.endswith("__") and name != "__del__" and not is_shown


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
        if "__getattribute__" in vars(each):
            return "it finds its attributes itself"
        if type(each) is not type or any(type(m) in _OF_C for m in vars(each).values()):
            return f"{each.__name__} is not written in Python"
    return ""


def refusal_of_object(value: Any) -> str:
    """Why the attributes of an object cannot be read; empty if they can."""
    if isinstance(value, tuple | BaseException):
        return "not all of it are attributes"
    return refusal_of_class(type(value))


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
