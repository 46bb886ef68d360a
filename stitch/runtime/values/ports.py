"""Input ports: the input slots of a loaded program, as calls use them."""

from __future__ import annotations

from stitch.program import Space, TensorDesc, ValueType, host_layout

SMALL_NBYTES = 16384


class InputPort:
    """An input slot for calls: the type that arrays must have, and the tensors that match."""

    __slots__ = (
        "accepted", "desc", "dtype", "host_desc", "host_key", "is_small", "name", "origin",
        "shape", "signature", "type",
    )  # fmt: skip

    def __init__(self, who: str, name: str, kind: ValueType, desc: TensorDesc, key: int) -> None:
        self.name = name
        self.origin = f"input {name!r} of {who!r}"
        self.type = kind
        self.desc = desc
        self.shape = kind.shape
        self.dtype = kind.data_type.dtype
        self.host_desc = TensorDesc(kind.shape, host_layout(kind.data_type))
        self.host_key = key
        #: Whether copying an array is cheaper than checking who may write to it.
        self.is_small = self.host_desc.elements * self.dtype.itemsize <= SMALL_NBYTES
        #: The `InstanceRecord.signature` of a host array in this slot.
        self.signature = (Space.HOST, 0, key, 0, key)
        #: Keys of descriptors known to match this slot.
        self.accepted: set[int] = set()
