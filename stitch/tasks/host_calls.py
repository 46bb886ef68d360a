"""A call of a host function: its plain arguments, and the arrays of inputs and outputs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from stitch.errors import UsageError
from stitch.program import Array, TensorDesc
from stitch.tasks.host_functions import HostFunction, Permission


@dataclass(frozen=True, slots=True)
class InputPlace:
    """An argument that is the array of an input of the task."""

    index: int


@dataclass(frozen=True, slots=True)
class OutputPlace:
    """An argument that is the array of an output of the task, which the function fills."""

    index: int


class HostCall(NamedTuple):
    """The agent of a host task: a function with its arguments by position and by name.

    An argument is a plain Python value, or the position of an input's or output's array. `updated`
    are the inputs that the function modifies in place, in the order of the last outputs.
    """

    function: HostFunction
    arguments: tuple[object, ...]
    named: tuple[tuple[str, object], ...]
    #: The number of inputs.
    takes: int
    updated: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        """Return the function's name."""
        return self.function.name

    @property
    def makes(self) -> int:
        """How many outputs it has."""
        return len(self.function.returns) + len(self.updated)

    @property
    def consumes(self) -> frozenset[int]:
        """Return the consumed inputs."""
        return frozenset(self.updated)

    @property
    def aliases(self) -> tuple[tuple[int, int], ...]:
        """(Output, input) pairs that share their bytes."""
        first = len(self.function.returns)
        return tuple([(first + i, which) for i, which in enumerate(self.updated)])

    def outputs(self, inputs: Sequence[TensorDesc]) -> tuple[TensorDesc, ...]:
        """Return the descriptors of the outputs: written, returned, updated."""
        if not self.updated:
            return self.function.returns
        return (*self.function.returns, *[inputs[which] for which in self.updated])

    def input_name(self, index: int) -> str:
        """Return the parameter of an input."""
        names = list(self.function.signature.parameters)
        for at, value in enumerate(self.arguments):
            if type(value) is InputPlace and value.index == index:
                return names[min(at, len(names) - 1)]
        for name, value in self.named:
            if type(value) is InputPlace and value.index == index:
                return name
        return f"input {index}"

    def run(
        self,
        inputs: Sequence[Array],
        written: Sequence[Array] = (),
        pending: type | None = None,
    ) -> Any:
        """Call the function with the arrays of its inputs and of the outputs that it fills.

        `pending`: type of the arguments that were pending at the call and have a `result()` now.
        """
        passed = _passed(self.arguments, inputs, written, pending)
        if not self.named:
            return self.function.function(*passed)
        names, values = zip(*self.named, strict=True)
        by_name = dict(zip(names, _passed(values, inputs, written, pending), strict=True))
        return self.function.function(*passed, **by_name)


def _passed(
    values: Sequence[Any], inputs: Sequence[Array], written: Sequence[Array], pending: type | None
) -> list[Any]:
    """Return what the function gets for these arguments."""
    passed: list[Any] = []
    for value in values:
        kind = type(value)
        if kind is InputPlace:
            passed.append(inputs[value.index])
        elif kind is OutputPlace:
            passed.append(written[value.index])
        else:
            passed.append(value.result() if kind is pending else value)
    return passed


_CONTAINERS = (list, tuple, set, dict)


def host_call(
    function: HostFunction,
    arguments: Sequence[Any],
    named: Mapping[str, Any],
    is_value: Callable[[object], bool],
) -> tuple[HostCall, tuple[Any, ...]]:
    """Return a call, and the arguments that are values, in order.

    `is_value` recognizes futures and tensors. Raises `UsageError` for arguments that do not match
    the signature.
    """
    placed = _Placed(function, is_value)
    if not named and not function.writes and function.least <= len(arguments) <= function.most:
        # As below, in a tenth of the time.
        return placed.by_position(arguments)
    whole = inspect.BoundArguments(function.signature, placed.all(arguments, named))
    return placed.call(whole.args, tuple(whole.kwargs.items()))


def placed_call(
    function: HostFunction, arguments: Sequence[object], named: Mapping[str, object], takes: int
) -> HostCall:
    """Return a call whose arguments have positions already, as `host_call` gives them.

    Raises `UsageError` for arguments that do not match the signature, and for other positions.
    """

    def free(value: object) -> bool:
        return type(value) is not OutputPlace

    call, values = host_call(
        function, [value for value in arguments if free(value)],
        {name: value for name, value in named.items() if free(value)},
        lambda value: type(value) is InputPlace,
    )  # fmt: skip
    ordered = values == tuple(map(InputPlace, range(takes)))
    if not ordered or (call.arguments, dict(call.named)) != (tuple(arguments), dict(named)):
        raise UsageError(
            f"the places of task {function.name!r} are not one for each of its arrays",
            expected=f"{takes} inputs and {len(function.writes)} filled outputs, in order",
        )
    return call


class _Placed:
    """The arguments of a call, with a position for each value."""

    def __init__(self, function: HostFunction, is_value: Callable[[object], bool]) -> None:
        self.function, self.is_value = function, is_value
        self.values: list[Any] = []
        #: By parameter: the input that its array is.
        self.inputs: dict[str, int] = {}

    def all(self, arguments: Sequence[Any], named: Mapping[str, Any]) -> dict[str, Any]:
        """Return the argument of each parameter."""
        function = self.function
        parameters = function.signature.parameters
        taken = [p for name, p in parameters.items() if name not in function.writes]
        # Without what is written, a parameter with a default may stand before one without.
        visible = inspect.Signature(taken, __validate_parameters__=False)
        try:
            given = visible.bind(*arguments, **named).arguments
        except TypeError as error:
            written = ", ".join(function.writes)
            raise UsageError(
                f"task {function.name!r} cannot be called like this: {error}",
                expected=f"{function.name}{visible}",
                remedy=f"leave out {written}: the runtime gives its array" if written else None,
            ) from None
        placed: dict[str, Any] = {}
        for name, parameter in parameters.items():
            if name in function.writes:
                placed[name] = OutputPlace(function.writes.index(name))
            elif name not in given:
                continue
            elif parameter.kind is inspect.Parameter.VAR_POSITIONAL:
                placed[name] = tuple([self.one(value, name) for value in given[name]])
            elif parameter.kind is inspect.Parameter.VAR_KEYWORD:
                placed[name] = {key: self.one(value, name) for key, value in given[name].items()}
            else:
                placed[name] = self.one(given[name], name)
        return placed

    def by_position(self, arguments: Sequence[Any]) -> tuple[HostCall, tuple[Any, ...]]:
        """Return a call of positional arguments, the last parameter perhaps variadic."""
        parameters, last = self.function.parameters, len(self.function.parameters) - 1
        return self.call(tuple([
            self.one(value, parameters[at if at < last else last].name)
            for at, value in enumerate(arguments)
        ]))  # fmt: skip

    def call(
        self, arguments: tuple[Any, ...], named: tuple[tuple[str, Any], ...] = ()
    ) -> tuple[HostCall, tuple[Any, ...]]:
        """The call with what `one` gave for each argument."""
        function, values = self.function, tuple(self.values)
        updated: tuple[int, ...] = ()
        if function.updates:
            missing = [name for name in function.updates if name not in self.inputs]
            if missing:
                raise UsageError(
                    f"task {function.name!r} updates {', '.join(missing)}, which needs a future or "
                    "a tensor"
                )
            updated = tuple([self.inputs[name] for name in function.updates])
        return HostCall(function, arguments, named, len(values), updated), values

    def one(self, value: Any, parameter: str) -> Any:
        """Return an argument, or the position of a value."""
        if self.is_value(value):
            check_permission(self.function, parameter)
            self.inputs[parameter] = len(self.values)
            self.values.append(value)
            return InputPlace(len(self.values) - 1)
        if not isinstance(value, _CONTAINERS):
            return value
        inside = value.values() if isinstance(value, dict) else value
        if any(map(self.is_value, inside)):
            stars = "**" if isinstance(value, dict) else "*"
            raise UsageError(
                f"argument {parameter!r} of task {self.function.name!r} is a "
                f"{type(value).__name__} with futures in it",
                remedy=f"let the function take them one by one, as in {stars}{parameter}",
            )
        return value


def check_permission(function: HostFunction, parameter: str) -> None:
    """Raise `UsageError` if a parameter takes no arrays."""
    if function.permission(parameter) is Permission.NONE:
        usable = [p.name for p in function.parameters if p.permission is not Permission.NONE]
        raise UsageError(
            f"task {function.name!r} may do nothing with an array as {parameter!r}",
            expected=f"arrays as {', '.join(usable) or 'nothing'}",
            remedy=f"name {parameter!r} in reads= or updates=, or give a plain argument",
        )
