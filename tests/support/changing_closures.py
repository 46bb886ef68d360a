"""Random functions that read what changes between calls, for nests and plain lists alike.

A program is source: a function for one element that reads numbers and arrays from everywhere that
Python lets it (closures, late-bound ones, globals, defaults, attributes of objects, of classes and
of modules, lists, dictionaries, partials, functions that read more), and a call of functions over
nests around it. `changes` are statements, one of which is run before each call.
"""

from __future__ import annotations

import random
import re
import types
from dataclasses import dataclass
from typing import Any

import numpy as np

from stitch.fractal import FractalTensor

#: What a function reads, where it comes from, and what may change it.
_READS = (
    ("cell", "cell = {0}", "set_cell({1})"),
    ("GLOBAL", "", "globals().update(GLOBAL={1})"),
    ("float(small[1])", "small = np.array([1, {0}], np.float32)", "small[1] = {1}"),
    ("float(large[7])", "large = np.full(5000, {0}, np.float32)", "large[7] = {1}"),
    ("large[:1].sum()", "large = np.full(5000, {0}, np.float32)", "large[0] = {1}"),
    ("weights[2]", "weights = np.full(4, {0}, np.float32)", "weights[:] = {1}"),
    ("listed[0]", "listed = [{0}]", "listed[0] = {1}"),
    ("listed[-1]", "listed = [{0}]", "listed.append({1})"),
    ("named['a']", "named = dict(a={0})", "named['a'] = {1}"),
    ("thing.number", "thing = Thing({0})", "thing.number = {1}"),
    ("thing.method()", "thing = Thing({0})", "thing.number = {1}"),
    ("thing.method()", "thing = Thing({0})", "Thing.shared = {1}"),
    ("thing.method()", "thing = Thing({0})", "Thing.method = lambda self: {1}"),
    ("thing.slot", "thing = Slotted({0})", "thing.slot = {1}"),
    ("thing.inner.number", "thing = Thing(1.0); thing.inner = Thing({0})",
     "thing.inner = Thing({1})"),
    ("module.number", "module.number = {0}", "module.number = {1}"),
    ("module.deeper.number", "module.deeper.number = {0}", "module.deeper.number = {1}"),
    ("part()", "part = functools.partial(lambda y: y, {0})",
     "part.__setstate__((part.func, ({1},), dict(), None))"),
    ("default()", "def default(y={0}): return y", "default.__defaults__ = ({1},)"),
    ("named_default()", "def named_default(*, y={0}): return y",
     "named_default.__kwdefaults__['y'] = {1}"),
    ("helper()", "helper_cell = {0}\ndef helper(): return helper_cell * GLOBAL",
     "set_helper({1})"),
    ("HELPER()", "", "globals().update(HELPER=lambda: {1})"),
    ("noted.kept", "def noted(): return 0\nnoted.kept = {0}", "noted.kept = {1}"),
    ("bound()", "thing = Thing({0}); bound = thing.method", "thing.number = {1}"),
    ("next(iter(listed))", "listed = [{0}]", "listed[0] = {1}"),
    ("getattr(thing, 'number')", "thing = Thing({0})", "thing.number = {1}"),
    ("vars(thing)['number']", "thing = Thing({0})", "thing.number = {1}"),
    ("loop[1]()", "loop = []\nfor late in (1.0, {0}): loop.append(lambda: late)",
     "set_late({1})"),
    ("recursive(2)", "def recursive(n): return recursive(n - 1) if n else cell\ncell = {0}",
     "set_cell({1})"),
    ("prop.value", "prop = Thing({0})", "prop.number = {1}"),
    ("float(frozen.data[0])", "frozen = FractalTensor([{0}])", "set_frozen({1})"),
    ("float(flag_array[0])", "flag_array = np.array([{0}]); flag_array.flags.writeable = False",
     "flag_array.flags.writeable = True; flag_array[0] = {1}; flag_array.flags.writeable = False"),
    ("(8 if big.flags.writeable else {0})", "big = np.zeros(9000)", "big.flags.writeable = False"),
)  # fmt: skip
_SETTERS = {"set_cell": "cell", "set_helper": "helper_cell", "set_late": "late"}
_CALLS = (
    "ops.map(leaf, xs)",
    "ops.map(lambda x: leaf(x) + GLOBAL, xs)",
    "ops.scan(lambda s, x: s * 0.5 + leaf(x), xs, 1.0)",
    "ops.fold(lambda s, x: s * 0.5 + leaf(x), xs, 1.0)",
    "ops.scanr(lambda s, x: s * 0.5 + leaf(x), xs)",
    "ops.map(functools.partial(leaf), xs)",
    "ops.map(Applied(leaf).call, xs)",
    "ops.map(Applied(leaf), xs)",
    "ops.map(lambda x, k: leaf(x) * k, xs, 2.0)",
    "ops.map(lambda x, k: leaf(x) * k, xs, k=GLOBAL)",
)
_RAGGED = (
    "ops.map(lambda row: ops.map(leaf, row), xss)",
    "ops.map(lambda row: ops.scan(lambda s, x: s * 0.5 + leaf(x), row, 1.0), xss)",
    "ops.map(lambda row: ops.fold(lambda s, x: s * 0.5 + leaf(x), row, cell0), xss)",
    "ops.scan(lambda s, row: s + ops.fold(lambda t, x: t * s + leaf(x), row, 0.0), xss, 1.0)",
)
_HEAD = """
GLOBAL = 1.5
HELPER = lambda: 2.5

class Thing:
    shared = 0.5
    def __init__(self, number):
        self.number = number
    def method(self):
        return self.number + self.shared
    @property
    def value(self):
        return self.number * GLOBAL

class Slotted:
    __slots__ = ("slot",)
    def __init__(self, slot):
        self.slot = slot

class Applied:
    def __init__(self, f):
        self.f = f
    def call(self, x):
        return self.f(x) + 1.0
    def __call__(self, x):
        return self.f(x) - 1.0
"""


@dataclass(frozen=True)
class ChangingProgram:
    """Source of `make(ops)`, which gives what runs on a nest, and statements that change things."""

    source: str
    changes: tuple[str, ...]
    is_ragged: bool

    def nest(self, choose: random.Random) -> Any:
        """A nest as plain lists of numbers."""

        def row(most: int) -> list[Any]:
            count = choose.randint(1, most)
            return [np.float32(choose.randint(-8, 8) / 4) for _ in range(count)]

        return [row(4) for _ in range(choose.randint(1, 4))] if self.is_ragged else row(5)

    def opened(self, functions: Any) -> tuple[Any, dict[str, Any]]:
        """The program for these functions over nests, and a namespace to run changes in."""
        module = types.ModuleType("changing")
        module.deeper = types.ModuleType("deeper")  # type: ignore[attr-defined]  # made here
        space: dict[str, Any] = {
            "np": np, "functools": __import__("functools"), "module": module,
            "FractalTensor": FractalTensor,
        }  # fmt: skip
        exec(self.source, space)
        run, inside = space["make"](functions)
        return run, {**space, **inside, "globals": lambda: space}


def random_program(seed: int) -> ChangingProgram:
    """A program of a seed."""
    choose = random.Random(seed)
    reads = choose.sample(_READS, choose.randint(1, 4))
    taken, lines, terms, changes = set[str](), [], [], list[str]()
    for read, setup, change in reads:
        name = setup.replace("def ", "").replace("(", " ").replace("[", " ").split(" ")[0]
        if (name and name in taken) or ("cell" in taken and "cell" in setup.split()):
            continue
        taken.add(name)
        first, other = (repr(round(choose.uniform(0.1, 3), 3)) for _ in range(2))
        if setup:
            lines.append(setup.format(first))
        terms.append(read.format(first))
        changes.append(change.format(first, other))
        changes.append(change.format(first, repr(round(choose.uniform(0.1, 3), 3))))
    depth = choose.randint(0, 2)
    body = " + ".join(f"x * ({term})" for term in terms)
    leaf = ["def leaf(x):", f"    return {body}"]
    for level in range(depth):
        leaf = [
            f"def outer{level}():", *[f"    {line}" for line in leaf], "    return leaf",
            f"leaf = outer{level}()",
        ]  # fmt: skip
        if choose.random() < 0.3:
            # Made anew at each look.
            leaf = [*leaf[:-1], f"def leaf(x): return outer{level}()(x)"]
    is_ragged = choose.random() < 0.5
    call = choose.choice(_RAGGED if is_ragged else _CALLS)
    setters, shown = [], []
    for setter, name in _SETTERS.items():
        if re.search(rf"^(for )?{name} ", "\n".join(lines), re.MULTILINE):
            setters += [f"def {setter}(value):", f"    nonlocal {name}", f"    {name} = value"]
            shown.append(setter)
    if any("frozen" in text for text in lines):
        setters += ["def set_frozen(value):", "    nonlocal frozen",
                    "    frozen = FractalTensor([value])"]  # fmt: skip
        shown.append("set_frozen")
    shown += [
        n
        for n in taken - {""}
        if n not in ("module.number", "module.deeper.number", "cell", "helper_cell", "recursive")
    ]
    body_lines = [
        "cell0 = 0.25", *lines, *leaf, *setters,
        "def run(xs):", "    xss = xs", f"    return {call}",
        f"return run, dict({', '.join(f'{n}={n}' for n in sorted({*shown, 'Thing'}))})",
    ]  # fmt: skip
    inside = "\n".join(body_lines).replace("\n", "\n    ")
    return ChangingProgram(f"{_HEAD}\ndef make(ops):\n    {inside}\n", tuple(changes), is_ragged)
