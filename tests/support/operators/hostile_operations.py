"""Operations drawn to do harm: sound cases of every operator, with something wrong in each."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np

from stitch.ops import operators
from stitch.ops.definition import OpDef
from stitch.program import Array, DataType
from tests.support.operators.drawn_operands import operands_of
from tests.support.operators.lanes import rows

#: Operands of more elements than this make a case too slow to be drawn thousands of times.
SMALL = 3000
KINDS = tuple(t for t in DataType if not t.is_block)
INTS = (0, 1, 2, 3, 5, 16, -1, -2, -7, 2**31, -(2**31), 2**62, 2**63 - 1, -(2**63), 10**6)
FLOATS = (0.0, 1.0, -1.0, 0.5, math.nan, math.inf, -math.inf, 1e9, 1e30, -1e30, 1e-30, 1e308)
WORDS = (
    "", "constant", "reflect", "edge", "wrap", "nearest", "linear", "cubic", "SAME_UPPER", "VALID",
    "NOTSET", "reverse", "bidirectional", "asymmetric", "align_corners", "tf_crop_and_resize",
    "half_pixel", "output_half_pixel", "add", "mul", "mean", "sum", "none", "max", "min", "avg",
    "ij,jk->ik", "ii", "ii->i", "...ij->...", "->", "a,", "CRD", "zeros", "border", "reflection",
    "not_larger", "floor", "Relu", "tanh", "\u00e9" * 40,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Drawn:
    """One operation: operands as arrays, attributes, and how many outputs are wanted."""

    op: OpDef
    operands: tuple[Array | None, ...]
    attributes: Mapping[str, Any]
    outputs: int = 1

    def text(self) -> str:
        """What is needed to see it again."""
        listed = [None if a is None else f"{a.dtype}{list(a.shape)}" for a in self.operands]
        return f"{self.op.name}{listed} {dict(self.attributes)} -> {self.outputs}"


@cache
def sound_cases() -> tuple[Drawn, ...]:
    """Cases of every operator, of the tables in `tests/ops` and of Stitch's own."""
    known = {(d.domain, d.name): d for d in operators()}
    found = [
        Drawn(known[row.domain, row.op], tuple(operands_of(row.specs)), row.attributes, row.outputs)
        for row in rows()
    ]
    return tuple(case for case in found if all(a is None or a.size <= SMALL for a in case.operands))


def cases_by_operator() -> dict[tuple[str, str], list[Drawn]]:
    """The sound cases, by domain and name."""
    found: dict[tuple[str, str], list[Drawn]] = {}
    for case in sound_cases():
        found.setdefault((case.op.domain, case.op.name), []).append(case)
    return found


def damaged(draw: random.Random, case: Drawn) -> Drawn:
    """The case with one to three things wrong."""
    for _ in range(draw.choice((1, 1, 2, 3))):
        kind = draw.random()
        if kind < 0.5 and case.operands:
            case = replace(case, operands=_other_operands(draw, case.operands))
        elif kind < 0.93 and case.op.attributes:
            case = replace(case, attributes=_other_attributes(draw, case))
        else:
            case = replace(case, outputs=draw.choice((0, 1, 2, 3, case.outputs + 1)))
    return case


def _other_operands(
    draw: random.Random, operands: tuple[Array | None, ...]
) -> tuple[Array | None, ...]:
    found, at = list(operands), draw.randrange(len(operands))
    one, kind = found[at], draw.random()
    if one is None or kind < 0.05:
        found[at] = np.ones((), np.float32) if one is None else None
    elif kind < 0.4:
        found[at] = _poisoned(draw, one)
    elif kind < 0.65:
        found[at] = np.resize(one, _other_shape(draw, one.shape)).astype(one.dtype)
    elif kind < 0.85:
        with np.errstate(all="ignore"):
            found[at] = one.astype(np.float32).astype(draw.choice(KINDS).dtype)
    elif kind < 0.93:
        del found[at]
    else:
        found.insert(at, draw.choice(operands))
    return tuple(found)


def _poisoned(draw: random.Random, array: Array) -> Array:
    """Some elements as bad as their type allows."""
    kind = DataType.from_dtype(array.dtype)
    made = array.copy()
    flat = made.reshape(-1)
    for at in draw.sample(range(flat.size), min(flat.size, draw.choice((1, 2, 8, flat.size)))):
        if kind is DataType.BOOL:
            flat[at] = not flat[at]
        elif kind.is_floating:
            with np.errstate(all="ignore"):
                flat[at] = np.array(draw.choice(FLOATS)).astype(kind.dtype)
        else:
            least, most = kind.limits
            flat[at] = min(max(draw.choice(INTS), int(least)), int(most))
    return made


def _other_shape(draw: random.Random, shape: tuple[int, ...]) -> tuple[int, ...]:
    found, kind = list(shape), draw.random()
    if kind < 0.35 and found:
        found[draw.randrange(len(found))] = draw.choice((0, 1, 2, 3, 4, 7))
    elif kind < 0.6:
        found.insert(draw.randrange(len(found) + 1), draw.choice((0, 1, 2, 3)))
    elif kind < 0.8 and found:
        del found[draw.randrange(len(found))]
    else:
        found = [draw.choice((0, 1, 2, 3, 4)) for _ in range(draw.randrange(8))]
    return tuple(found) if math.prod(found) <= SMALL else (2,)


def _other_attributes(draw: random.Random, case: Drawn) -> dict[str, Any]:
    found = dict(case.attributes)
    name = draw.choice(sorted(case.op.attributes))
    kind, before = case.op.attributes[name].kind, found.get(name)
    if kind.endswith("s") and before and draw.random() < 0.6:
        items = list(before)
        items[draw.randrange(len(items))] = _value(draw, kind[:-1])
        found[name] = items
    elif draw.random() < 0.1:
        found.pop(name, None)
    else:
        found[name] = _value(draw, kind)
    return found


def _value(draw: random.Random, kind: str) -> Any:
    if kind.endswith("s"):
        return [_value(draw, kind[:-1]) for _ in range(draw.choice((0, 1, 2, 3, 4, 8)))]
    return draw.choice({"int": INTS, "float": FLOATS, "string": WORDS}[kind])
