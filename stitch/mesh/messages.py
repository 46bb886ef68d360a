"""The messages that a device server takes, and what it answers.

Messages are frozen dataclasses of bytes, text and numbers; arrays travel beside them, dense and of
NumPy's builtin types: bfloat16 and the narrow types as their bits. `check_message` verifies all of
it where it arrives, so that a server trusts no client.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Final, TypeAlias

import numpy as np

from stitch import errors
from stitch.errors import (
    CompileError,
    FormatError,
    Problem,
    StitchError,
    TaskError,
    UsageError,
)
from stitch.program import Array, DataType

# --------------------------------------------------------------------------------------------------
# Where the inputs of a piece come from, and where its outputs go.


@dataclass(frozen=True, slots=True)
class Source:
    """Where a server finds an input of a piece.

    `kind`: `sent` with the message; `buffer`, a persistent buffer; `kept`, an output that another
    piece of the same run left on the device. `name`: of the buffer or the kept value. `is_last`:
    whether a kept value is dropped afterwards.
    """

    kind: str
    name: str = ""
    is_last: bool = False


@dataclass(frozen=True, slots=True)
class Target:
    """Where an output of a piece goes: into the answer, a persistent buffer, or a kept value."""

    is_sent: bool
    buffer: str = ""
    kept: str = ""


SENT: Final = Source("sent")
_SOURCE_KINDS = ("sent", "buffer", "kept")

# --------------------------------------------------------------------------------------------------
# Messages.


@dataclass(frozen=True, slots=True)
class Load:
    """Hold the bytes of a `.ttb` file, checked wholly, under their SHA-256 (hexadecimal)."""

    sha256: str
    data: bytes


@dataclass(frozen=True, slots=True)
class Prepare:
    """Prepare a piece: the JSON of its task graph, whose programs are of loaded files.

    `functions`: name in the graph → `package.module:function`. `sources` and `targets`: one for
    each input and output.
    """

    piece: int
    graph: str
    functions: tuple[tuple[str, str], ...]
    sources: tuple[Source, ...]
    targets: tuple[Target, ...]


@dataclass(frozen=True, slots=True)
class Run:
    """Run a piece once, on the arrays that come with the message.

    `run`: the run that its kept values belong to. `turn`: of a piece with persistent buffers, the
    number of this run among all such runs of the device, in whose order they are done, each once;
    0 for other pieces. `settled`: the client has the answers of all runs below it.
    """

    piece: int
    run: int
    turn: int = 0
    settled: int = 0


@dataclass(frozen=True, slots=True)
class Write:
    """Set persistent buffers to the values that come with the message, and the turn done last."""

    buffers: tuple[str, ...]
    turn: int = 0


@dataclass(frozen=True, slots=True)
class Read:
    """Answer persistent buffers by name, and behind them the turn done last."""

    buffers: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Drop:
    """Drop pieces, files by their SHA-256, and persistent buffers that no piece names any more."""

    pieces: tuple[int, ...]
    files: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Report:
    """Answer a report of the device: one of `REPORTS`."""

    what: str


@dataclass(frozen=True, slots=True)
class Close:
    """Close the device."""


Message: TypeAlias = Load | Prepare | Run | Write | Read | Drop | Report | Close
REPORTS: Final = ("explain", "memory", "statistics", "trace", "record", "clock")

# --------------------------------------------------------------------------------------------------
# Answers.


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a value does not exist: the error of the task that failed, as text.

    It travels in place of the value, so that only tasks that depend on it are cancelled.
    """

    kind: str
    what: str
    where: str | None = None
    expected: str | None = None
    got: str | None = None
    remedy: str | None = None
    #: Whether the task was never run, as a value that it reads does not exist.
    is_cancelled: bool = False
    problems: tuple[Problem, ...] = ()

    @staticmethod
    def of(error: BaseException, where: str) -> Failure:
        """Return an error as a value."""
        if isinstance(error, StitchError):
            return Failure(
                type(error).__name__, error.what, error.where or where, error.expected, error.got,
                error.remedy, problems=getattr(error, "problems", ()),
            )  # fmt: skip
        return Failure("TaskError", f"{type(error).__name__}: {error}", where)

    def error(self) -> StitchError:
        """Return the error to raise where the value is read."""
        kind = getattr(errors, self.kind, TaskError)
        if not (isinstance(kind, type) and issubclass(kind, StitchError)):
            kind = TaskError
        made = kind(
            self.what, where=self.where, expected=self.expected, got=self.got, remedy=self.remedy
        )
        if isinstance(made, CompileError | FormatError):
            made.problems = self.problems
        return made


@dataclass(frozen=True, slots=True)
class RunRecord:
    """What a run of a piece took: wall times in seconds since the epoch, simulated seconds.

    `untold`: the error of a task without results, which no value tells.
    """

    device: str
    piece: int
    run: int
    begin: float
    end: float
    simulated_seconds: float
    copies: int
    nbytes: int
    untold: Failure | None = None


@dataclass(frozen=True, slots=True)
class NotDone:
    """The answer to a run that came before the one that it continues, and to those that read it.

    Nothing has changed; it may be sent again after that one.
    """


# --------------------------------------------------------------------------------------------------
# Arrays on the way.


def to_wire(array: Array) -> Array:
    """Return a dense array of a builtin type with the same bits.

    >>> import ml_dtypes
    >>> to_wire(np.ones(2, ml_dtypes.bfloat16)).dtype
    dtype('uint16')
    """
    array = np.ascontiguousarray(array) if array.ndim else array
    return array if _is_builtin(array.dtype) else array.view(f"u{array.dtype.itemsize}")


def from_wire(array: Array, kind: DataType) -> Array:
    """Return an array that travelled with the elements of its data type."""
    dtype = kind.in_arrays.dtype
    return array if _is_builtin(dtype) else array.view(dtype)


def wire_dtype(kind: DataType) -> np.dtype[Any]:
    """Return the type in which arrays of a data type travel."""
    dtype = kind.in_arrays.dtype
    return dtype if _is_builtin(dtype) else np.dtype(f"u{dtype.itemsize}")


def _is_builtin(dtype: np.dtype[Any]) -> bool:
    # `isbuiltin` is 0 for equal types that were pickled.
    return dtype.kind in "biufc" and dtype.isnative


# --------------------------------------------------------------------------------------------------
# Checks where a message arrives.

_KINDS: Mapping[str, tuple[type, ...]] = {"str": (str,), "int": (int,), "bytes": (bytes,)}
_TUPLES: Mapping[str, type] = {"tuple[str, ...]": str, "tuple[int, ...]": int}
_PAIRS: Mapping[str, tuple[type, ...]] = {
    "tuple[tuple[str, str], ...]": (str, str),
}
_MESSAGES: tuple[type, ...] = (Load, Prepare, Run, Write, Read, Drop, Report, Close)
#: The names and types of the fields of each.
_FIELDS = {kind: [(each.name, str(each.type)) for each in fields(kind)] for kind in _MESSAGES}


def check_message(message: object, values: Sequence[object]) -> None:
    """Raise `UsageError` for what is no message, a field of another type, or a value that is no
    dense array of a builtin type."""
    if type(message) not in _MESSAGES:
        raise UsageError(
            "a device server takes messages only",
            expected=", ".join(kind.__name__ for kind in _MESSAGES), got=type(message).__name__,
        )  # fmt: skip
    for name, kind in _FIELDS[type(message)]:
        _check_field(type(message).__name__, name, kind, getattr(message, name))
    if isinstance(message, Report) and message.what not in REPORTS:
        raise UsageError(f"there is no report {message.what!r}", expected=", ".join(REPORTS))
    if isinstance(message, Write) and len(values) != len(message.buffers):
        raise UsageError("Write has one array for each buffer",
                         expected=str(len(message.buffers)), got=str(len(values)))  # fmt: skip
    if values and not isinstance(message, Run | Write):
        raise UsageError(f"{type(message).__name__} comes with no arrays", got=str(len(values)))
    for position, value in enumerate(values):
        _check_value(type(message).__name__, position, value)


def _check_field(message: str, name: str, kind: str, value: object) -> None:
    if kind in _KINDS:
        good = type(value) in _KINDS[kind]
    elif kind in _TUPLES:
        good = type(value) is tuple and all(type(each) is _TUPLES[kind] for each in value)
    elif kind in _PAIRS:
        good = type(value) is tuple and all(
            type(each) is tuple and tuple(map(type, each)) == _PAIRS[kind] for each in value
        )
    else:
        wanted = Source if "Source" in kind else Target
        good = type(value) is tuple and all(_is_end(each, wanted) for each in value)
    if not good:
        raise UsageError(
            f"field {name!r} of message {message} has a wrong type", expected=kind,
            got=f"{type(value).__name__}: {value!r:.60}",
        )  # fmt: skip


def _is_end(value: object, wanted: type) -> bool:
    if type(value) is not wanted:
        return False
    if isinstance(value, Source):
        named = type(value.name) is str and type(value.is_last) is bool
        return value.kind in _SOURCE_KINDS and named
    assert isinstance(value, Target)
    return (type(value.is_sent), type(value.buffer), type(value.kept)) == (bool, str, str)


def _check_value(message: str, position: int, value: object) -> None:
    if type(value) is Failure and message in ("Run", "Write"):
        return
    if not isinstance(value, np.ndarray) or not _is_builtin(value.dtype):
        got = f"{value.dtype} array" if isinstance(value, np.ndarray) else type(value).__name__
        raise UsageError(
            f"value {position} of message {message} is no array of a builtin type", got=got,
            remedy="bfloat16 and narrow types travel as their bits",
        )  # fmt: skip
