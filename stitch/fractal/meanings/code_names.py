"""The names that the code of a function reads, that of functions within it included.

Comes in: code, or a text. Goes out: names of globals and of attributes; why it cannot be judged.
Must not know what the names stand for.
"""

from __future__ import annotations

import dis
import re
from collections.abc import Iterator
from dataclasses import dataclass
from types import CodeType

#: Attributes through which code reads what it does not name.
BACK_DOORS = frozenset({
    "__annotate__", "__annotations__", "__array_interface__", "__array_struct__", "__builtins__",
    "__closure__", "__code__", "__dict__", "__doc__", "__getattr__", "__getattribute__",
    "__getstate__", "__globals__", "__module__", "__reduce__", "__reduce_ex__", "__self__",
    "__subclasses__", "__type_params__", "ag_frame", "cell_contents", "cr_frame", "ctypes",
    "f_back", "f_builtins", "f_globals", "f_locals", "format", "format_map", "gi_frame",
    "tb_frame",
})  # fmt: skip
#: NumPy's name of a type of dates: by it a text such as "now" is read from the clock.
_DATES = re.compile(r"[<>=|]?(M8?|datetime64)(\[.*)?")
#: Code whose names are kept.
MAX_CODES = 4096


@dataclass(frozen=True, slots=True)
class CodeNames:
    """What a code reads by name; `why` it reads what has none, if it does."""

    globals: tuple[str, ...]
    attributes: frozenset[str]
    why: str


_known: dict[int, tuple[CodeType, CodeNames]] = {}


def names_of(code: CodeType) -> CodeNames:
    """The names in a code and those within it; looked at once.

    >>> names = names_of((lambda x: len(x.shape) + (lambda y: y @ weights)(x)).__code__)
    >>> names.globals, sorted(names.attributes)
    (('len', 'weights'), ['shape'])
    """
    known = _known.get(id(code))
    if known is not None and known[0] is code:
        return known[1]
    names = _read(code)
    if len(_known) >= MAX_CODES:
        _known.clear()
    _known[id(code)] = code, names
    return names


def names_dates(text: str) -> bool:
    """Whether a text is NumPy's name of a type of dates.

    >>> names_dates("<M8[us]"), names_dates("datetime64"), names_dates("Mean"), names_dates("m8")
    (True, True, False, False)
    """
    return _DATES.fullmatch(text) is not None


def _texts(constant: object) -> Iterator[str]:
    if isinstance(constant, str):
        yield constant
    elif isinstance(constant, tuple | frozenset):
        for each in constant:
            yield from _texts(each)


def _read(code: CodeType) -> CodeNames:
    names, attributes, why = set[str](), set[str](), ""
    for each in _codes(code):
        if any(map(names_dates, _texts(each.co_consts))):
            why = "it names dates, that may be now"
        for instruction in dis.get_instructions(each):
            kind, name = instruction.opname, instruction.argval
            if kind in ("IMPORT_NAME", "IMPORT_STAR"):
                why = "it imports"
            elif kind == "MATCH_CLASS":
                why = "it matches a class"
            elif not isinstance(name, str):
                continue
            elif "GLOBAL" in kind or kind.endswith("_NAME"):
                names.add(name)
            elif "ATTR" in kind or kind in ("LOAD_METHOD", "LOAD_SUPER_METHOD"):
                attributes.add(name)
                if name in BACK_DOORS:
                    why = f"it reads {name}"
    return CodeNames(tuple(sorted(names)), frozenset(attributes), why)


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)
