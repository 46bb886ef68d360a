"""What is said about nodes that cannot be compiled: by each, and about all at once."""

from __future__ import annotations

from dataclasses import dataclass, field

from stitch.errors import CompileError, FormatError, StitchError

#: Lines of one message; what goes beyond is counted.
MAX_LINES = 60

_DATA_DEPENDENT = "the shape of its result depends on data"
_CONTROL_FLOW = "control flow that depends on data"
_STRING = "only numbers are supported, not strings"
_RANDOM = "its result differs from run to run: random operators take an explicit key in Stitch"
_LAYOUT = (
    "a layout of one machine's vectors: let ONNX Runtime save the model at "
    "GraphOptimizationLevel.ORT_ENABLE_EXTENDED"
)
_REASONS = {
    **dict.fromkeys(("NonZero", "Unique", "Compress", "NonMaxSuppression"), _DATA_DEPENDENT),
    **dict.fromkeys(("If", "Loop", "Scan"), _CONTROL_FLOW),
    "com.microsoft.Unique": _DATA_DEPENDENT,
    "ImageDecoder": "the shape of its result depends on what a file holds",
    **dict.fromkeys(
        ("StringConcat", "StringSplit", "StringNormalizer", "RegexFullMatch"),
        _STRING,
    ),
    **dict.fromkeys(
        [f"com.microsoft.nchwc.{name}" for name in
         ("Conv", "MaxPool", "AveragePool", "GlobalMaxPool", "GlobalAveragePool", "ReorderInput",
          "ReorderOutput", "Upsample")], _LAYOUT,
    ),
    **dict.fromkeys(
        ("RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike", "Multinomial",
         "Bernoulli"), _RANDOM,
    ),
}  # fmt: skip


def is_refused_by_name(title: str) -> bool:
    """Whether an operator is refused whatever its operands are."""
    return title in _REASONS


class Refusing:
    """What a node says of itself that does not fit: errors with its place."""

    __slots__ = ()
    where: str

    def malformed(
        self, what: str, *, expected: str | None = None, got: str | None = None
    ) -> FormatError:
        """The error to raise where the model is not sound."""
        return FormatError(what, where=self.where, expected=expected, got=got)

    def refused(
        self,
        what: str,
        *,
        expected: str | None = None,
        got: str | None = None,
        remedy: str | None = None,
    ) -> CompileError:
        """The error to raise where a sound model cannot be compiled."""
        return CompileError(what, where=self.where, expected=expected, got=got, remedy=remedy)


class Unsupported(StitchError):
    """Stitch cannot compute an operator; its title is what the error says."""


@dataclass
class Refusals:
    """Collects what went wrong, where; `raise_any` ends it."""

    title: str
    _unsupported: dict[str, list[str]] = field(default_factory=dict)
    _errors: list[tuple[str, StitchError]] = field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        """Whether nothing went wrong."""
        return not self._unsupported and not self._errors

    def unsupported(self, op: str, where: str) -> None:
        """An operator that Stitch cannot compute."""
        places = self._unsupported.setdefault(op, [])
        if where not in places:
            places.append(where)

    def failed(self, where: str, error: StitchError) -> None:
        """A node that is not sound, or whose operands do not fit."""
        if not any(text == where and str(error) == str(known) for text, known in self._errors):
            self._errors.append((where, error))

    def raise_any(self, remedy: str | None = None) -> None:
        """Raises one error for all that was collected; does nothing if that is nothing.

        `remedy` is for operands that do not fit.
        """
        if self.is_empty:
            return
        if not self._unsupported and len(self._errors) == 1:
            error = self._errors[0][1]
            if isinstance(error, CompileError):
                error.remedy = error.remedy or remedy
            raise error
        lines = [_unsupported_line(op, places) for op, places in self._unsupported.items()]
        lines += [f"{where}: {error.sentence()}" for where, error in self._errors]
        more = len(lines) - MAX_LINES
        shown = [*lines[:MAX_LINES], *([f"and {more} more"] if more > 0 else [])]
        text = "the model cannot be compiled:\n  - " + "\n  - ".join(shown)
        # A file that is not sound is its own fault, whatever else cannot be compiled in it.
        damaged = all(isinstance(error, FormatError) for _, error in self._errors)
        if self._errors and damaged and not self._unsupported:
            raise FormatError(text, where=self.title)
        raise CompileError(text, where=self.title, remedy=None if self._unsupported else remedy)


def _unsupported_line(op: str, places: list[str]) -> str:
    reason = _REASONS.get(op)
    listed = ", ".join(places[:20]) + (f" and {len(places) - 20} more" if places[20:] else "")
    return f"operator {op} is not supported" + (f" ({reason})" if reason else "") + f": {listed}"
