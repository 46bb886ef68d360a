"""Functions and classes that give the same for the same, whose code need not be read.

Comes in: functions, classes. Goes out: whether they are of Python's, NumPy's or our own that read
nothing but what they are given. Must not know what is done with the answer.
"""

from __future__ import annotations

import builtins
import sys
from typing import Any

import numpy as np

from stitch.program import DataType

BUILTINS = frozenset(
    [
        "NotImplemented",
        "abs",
        "all",
        "any",
        "ascii",
        "bin",
        "bool",
        "bytearray",
        "bytes",
        "callable",
        "chr",
        "classmethod",
        "complex",
        "dict",
        "divmod",
        "enumerate",
        "filter",
        "float",
        "format",
        "frozenset",
        "hex",
        "int",
        "isinstance",
        "issubclass",
        "iter",
        "len",
        "list",
        "map",
        "max",
        "min",
        "next",
        "object",
        "oct",
        "ord",
        "pow",
        "print",
        "property",
        "range",
        "repr",
        "reversed",
        "round",
        "set",
        "slice",
        "sorted",
        "staticmethod",
        "str",
        "sum",
        "super",
        "tuple",
        "type",
        "zip",
        "__build_class__",
    ]
)
#: Whole modules of which all is trusted.
MODULES = frozenset({"math", "cmath", "operator", "_operator", "itertools", "typing"})
#: What reads attributes that no code names.
READ_BY_NAME = frozenset({"attrgetter", "get_type_hints", "methodcaller"})
FUNCTOOLS = frozenset({"partial", "reduce"})
#: Of NumPy: what reads files, settings, memory or the clock, or calls what it was given when it was
#: made.
NUMPY_DENIED = frozenset(
    [
        "DataSource",
        "DateTime64DType",
        "as_strided",
        "busday_count",
        "busday_offset",
        "busdaycalendar",
        "byte_bounds",
        "datetime64",
        "empty",
        "empty_like",
        "errstate",
        "fromfile",
        "frompyfunc",
        "fromregex",
        "genfromtxt",
        "get_printoptions",
        "getbufsize",
        "geterr",
        "geterrcall",
        "is_busday",
        "load",
        "loadtxt",
        "memmap",
        "nditer",
        "nested_iters",
        "open_memmap",
        "printoptions",
        "save",
        "savetxt",
        "savez",
        "savez_compressed",
        "set_printoptions",
        "setbufsize",
        "seterr",
        "seterrcall",
        "test",
        "vectorize",
    ]
)
#: Of ours: what chooses how calls run, or opens a device.
FRACTAL_DENIED = frozenset({"compile", "mode"})


def is_trusted(value: Any) -> bool:
    """Whether a function or class, found under its own name in its module, is trusted.

    >>> is_trusted(len), is_trusted(np.tanh), is_trusted(np.random.default_rng), is_trusted(open)
    (True, True, False, False)
    """
    name = getattr(value, "__qualname__", None) or getattr(value, "__name__", None)
    module = getattr(value, "__module__", None)
    if isinstance(value, np.ufunc):
        module, name = "numpy", value.__name__
    if not isinstance(name, str) or not isinstance(module, str):
        return False
    home = sys.modules.get(module)
    if home is None or vars(home).get(name) is not value:
        return False
    if module == "builtins":
        return name in BUILTINS or _is_exception(value)
    if module in ("functools", "_functools"):
        return name in FUNCTOOLS
    package, _, rest = module.partition(".")
    if package == "numpy":
        return not rest.startswith("random") and name not in NUMPY_DENIED
    if package == "stitch":
        return value is DataType or (rest.startswith("fractal.") and name not in FRACTAL_DENIED)
    return module in MODULES and name not in READ_BY_NAME


def is_library(module: str) -> bool:
    """Whether what a module lacks now it will not have otherwise later."""
    return module.partition(".")[0] in ("numpy", "stitch") or module in MODULES


def _is_exception(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, BaseException) and hasattr(
        builtins, value.__name__
    )  # fmt: skip
