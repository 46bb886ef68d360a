"""Convert call arguments to values: link tensors, capture arrays, check donations."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from stitch.errors import TaskError, UsageError
from stitch.linker import check_link
from stitch.runtime.tensor import Tensor
from stitch.runtime.values import ArgumentRecord, InputPort, Status, ValueRecord, capture
from stitch.tasks import Handle, Transformation

if TYPE_CHECKING:
    from stitch.runtime.device import RuntimeDevice

PENDING, READY = Status.PENDING, Status.READY


def link_argument(
    device: RuntimeDevice, name: str, port: InputPort, argument: Any, borrow: bool
) -> ValueRecord:
    """Return the value of one argument of the program or function `name`."""
    if type(argument) is Tensor:
        value = argument._record
        if value.desc_key not in port.accepted or value.status > READY or value.consumed:
            link_value(device, name, port, value)
        return value
    if isinstance(argument, Handle):
        raise UsageError(
            f"{port.origin} is not an array or tensor",
            expected=f"an array, or a tensor of {device!r}",
            got=" ".join(repr(argument).split())[:60],
            remedy="call programs on futures in their graph, graph.call(program, future); a host "
            "function returns tensors if it declares returns=desc",
        )
    allowed = device.host_memory.allowed
    host = capture(argument, port.shape, port.type.data_type, borrow, port.origin, allowed)
    return ArgumentRecord(device, host, port)


def link_value(device: RuntimeDevice, name: str, port: InputPort, value: ValueRecord) -> None:
    """Raise `TaskError`, `UsageError` or `LinkError` if a value cannot be this input of `name`."""
    value.check_usable()
    if value.device is not device:
        raise UsageError(
            f"input {port.name!r} of {name!r} is a tensor of another device",
            expected=f"an array, or a tensor of {device!r}",
            got=f"a tensor of {value.device!r}",
            remedy="copy it to this device: device.tensor(tensor.numpy())",
        )
    if value.desc_key not in port.accepted:
        origin = value.by or "a tensor"
        check_link(
            value.desc, port.desc, output=origin, input=f"{name}.{port.name}",
            strict_types=device.strict_types,
        )  # fmt: skip
        port.accepted.add(value.desc_key)


def check_donations(what: Transformation, inputs: list[ValueRecord]) -> None:
    """Raise `TaskError` if a donated input is also used elsewhere."""
    for index in what.donated:
        value = inputs[index]
        # Another thread may be releasing a value: take the list once.
        sharers = {id(u) for i in value.instances for u in tuple(i.buffer.users)} - {id(value)}
        pinned = any(not i.buffer.is_open for i in value.instances)
        if inputs.count(value) > 1 or sharers or pinned:
            why = "it is exported" if pinned else "views share it"
            if inputs.count(value) > 1:
                why = "it is passed twice"
            raise TaskError(
                f"input {what.input_name(index)!r} of {what.name!r} is donated, but {why}",
                remedy="donate a tensor without other references, or a copy of it",
            )
