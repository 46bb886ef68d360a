"""What is known of the values of a pipeline file before it runs."""

from __future__ import annotations

from dataclasses import dataclass

from stitch.program import TensorDesc, ValueType, host_layout


@dataclass(frozen=True, slots=True)
class CheckedValue:
    """What is known of a value: its type; where it lies, if a program made it, and which one.

    `elements`: the types of the arrays of a list, of which `type` is the first.
    """

    type: ValueType
    desc: TensorDesc | None = None
    made_by: str = ""
    elements: tuple[ValueType, ...] | None = None


def collected_desc(desc: TensorDesc, times: int) -> TensorDesc:
    """What all rounds made of such a tensor: [times, *shape], in the type that it is stored in.

    Where it lies is settled when it is compiled for a device.

    >>> from stitch.program import DataType
    >>> collected_desc(TensorDesc((2,), host_layout(DataType.FLOAT32)), 3).text()
    '3x2xf32:host:row_major:interleaved'
    """
    return TensorDesc((times, *desc.shape), host_layout(desc.layout.data_type.in_arrays))


def all_rounds(value: CheckedValue, times: int, made_by: str) -> CheckedValue:
    """What so many rounds made of such a value, along a new first axis."""
    kind = ValueType((times, *value.type.shape), value.type.data_type)
    assert value.desc is not None, "a step made it"
    return CheckedValue(kind, collected_desc(value.desc, times), made_by)
