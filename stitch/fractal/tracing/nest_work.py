"""A call of a function over nests, before it is said how it runs: its value in a way, and the key
under which its trace is kept."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from stitch.fractal.current import ExecutionMode, NestCall
from stitch.fractal.tracing.call_inputs import CallInputs, NoFormError
from stitch.fractal.zipped import Nest


@dataclass(frozen=True, slots=True)
class CallReading:
    """What a call gives a program as `inputs`; equal keys run the same program. Without a key the
    call is traced each time, and `why` says for what reason."""

    inputs: CallInputs
    key: Hashable = None
    why: str = ""


@dataclass(frozen=True, slots=True)
class NestWork:
    """`method` of a way, with these words."""

    call: NestCall
    xs: Nest
    initializer: Any
    method: str
    words: Mapping[str, bool] = field(default_factory=dict)

    def written(self, way: ExecutionMode) -> Any:
        """The value in a way."""
        given = (self.xs,) if self.method == "mapped" else (self.xs, self.initializer)
        return getattr(way, self.method)(self.call, *given, **self.words)

    def on(self, call: NestCall, xs: Nest, initializer: Any) -> NestWork:
        """The same of other values."""
        return replace(self, call=call, xs=xs, initializer=initializer)

    def read(self, *, keeps_numbers: bool) -> CallReading:
        """The key of the call: its function as an object, the form of what it is given."""
        inputs = CallInputs(keeps_numbers=keeps_numbers)
        call = self.call
        try:
            key = (
                self.method, *self.words.values(),
                inputs.form(call.function),
                inputs.form(call.arguments),
                tuple([(name, inputs.form(each)) for name, each in call.named.items()]),
                inputs.form(self.xs),
                None if self.initializer is None else inputs.form(self.initializer),
            )  # fmt: skip
        except NoFormError as error:
            return CallReading(inputs, why=error.why)
        return CallReading(inputs, key)
