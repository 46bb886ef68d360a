"""A call of a function over nests, before it is said how it runs.

Comes in: a call, a nest, an initializer, which method of a way computes it. Goes out: its value in
a way; its meaning, and what it gives a program. Must not know ways.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from stitch.fractal.current import NestCall, Way
from stitch.fractal.meanings import MeaningReader, UnreadableError
from stitch.fractal.tracing.call_inputs import CallInputs
from stitch.fractal.zipped import Nest
from stitch.graph import SymbolicTensor
from stitch.program import Array


@dataclass(frozen=True, slots=True)
class CallReading:
    """A call as it was read: equal keys run the same program, whose inputs get the data of
    `inputs`. Without a key, `why` says what cannot be judged."""

    inputs: CallInputs
    key: Hashable = None
    why: str = ""
    arrays: tuple[Array, ...] = ()
    nbytes: int = 0


@dataclass(frozen=True, slots=True)
class NestWork:
    """`method` of a way, with these words."""

    call: NestCall
    xs: Nest
    initializer: Any
    method: str
    words: Mapping[str, bool] = field(default_factory=dict)

    def written(self, way: Way) -> Any:
        """The value in a way."""
        given = (self.xs,) if self.method == "mapped" else (self.xs, self.initializer)
        return getattr(way, self.method)(self.call, *given, **self.words)

    def on(self, call: NestCall, xs: Nest, initializer: Any) -> NestWork:
        """The same of other values."""
        return replace(self, call=call, xs=xs, initializer=initializer)

    def read(self, *, keeps_numbers: bool) -> CallReading:
        """What the call means, and what it gives."""
        inputs, reader = CallInputs(keeps_numbers=keeps_numbers), MeaningReader(_no_value)
        call = self.call
        try:
            key = (
                self.method, *self.words.values(),
                tuple([inputs.form(each, reader) for each in call.arguments]),
                tuple([(name, inputs.form(each, reader)) for name, each in call.named.items()]),
                inputs.form(self.xs, reader),
                None if self.initializer is None else inputs.form(self.initializer, reader),
                reader.of(call.function),
            )  # fmt: skip
            meaning = reader.meaning(key)
        except UnreadableError as error:
            return CallReading(inputs, why=error.why)
        return CallReading(inputs, meaning.key, "", meaning.arrays, meaning.nbytes)


def _no_value(_: SymbolicTensor) -> Hashable:
    raise UnreadableError("it reads a tensor of a graph that is being written")
