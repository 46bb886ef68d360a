"""The form of `compute` in a machine's description: the rates of one core.

Comes in: the values of the form. Goes out: `Compute`. Must not know: what the rates are used for.
"""

from __future__ import annotations

from stitch.forms import Choice, Form, Number, Row
from stitch.machine.compute import Compute
from stitch.machine.figure_kinds import NOT_NEGATIVE, POSITIVE
from stitch.program import DataType, MathFidelity, Space

_FIDELITIES = tuple(kind for kind in MathFidelity if kind is not MathFidelity.BY_TYPE)

#: Operands whose types have different ones.
_MIXED = "mixed"


def _passes(**passes: float | None) -> tuple[tuple[MathFidelity, float], ...]:
    return tuple((MathFidelity(name), n) for name, n in passes.items() if n is not None)


def _fidelities(**named: str | None) -> tuple[tuple[DataType | None, MathFidelity], ...]:
    return tuple(
        (None if kind == _MIXED else DataType(kind), MathFidelity(name))
        for kind, name in named.items()
        if name is not None
    )


def _by_space(**rates: float | None) -> tuple[tuple[Space, float], ...]:
    return tuple((Space(name), rate) for name, rate in rates.items() if rate is not None)


_SHARE = Number(above=0, most=1, is_float=True)
_PASSES = Form(
    "the passes",
    _passes,
    *(Row(kind.value, Number(least=1, is_float=True), needed=True) for kind in _FIDELITIES),
)
_FIDELITY = Form(
    "the math fidelity of types",
    _fidelities,
    *(
        Row(name, Choice(tuple(f.value for f in _FIDELITIES)))
        for name in (*(kind.value for kind in DataType), _MIXED)
    ),
)
#: L1 is each core's own.
_SHARED = Form(
    "the spaces that cores share",
    _by_space,
    *(Row(space.value, POSITIVE) for space in Space if space is not Space.L1),
)
COMPUTE = Form(
    "compute",
    Compute,
    Row("launch_seconds", NOT_NEGATIVE, needed=True),
    Row("clock_hz", POSITIVE, needed=True),
    Row("multiply_adds_per_cycle", POSITIVE, needed=True),
    Row("passes", _PASSES, needed=True),
    Row("fidelity", _FIDELITY, default=()),
    Row("elements_per_cycle", POSITIVE, needed=True),
    Row("l1_bytes_per_cycle", POSITIVE, needed=True),
    Row("tile_loads", NOT_NEGATIVE, default=0.0),
    Row("products_share", _SHARE, default=1.0),
    Row("hidden_share", Number(least=0, most=1, is_float=True), default=1.0),
    Row("bytes_per_second", _SHARED, default=()),
)
