"""`Tensor`: a user's handle on a value. The value may be pending (a future) or a view of another
one."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from functools import partial
from types import EllipsisType
from typing import Any

import numpy as np

from stitch.argument_kinds import WHOLE
from stitch.errors import LayoutError, StitchError, UsageError
from stitch.program import Array, DataType, Layout, Space, TensorDesc
from stitch.runtime.values import Status, ValueRecord
from stitch.tasks import Handle

#: `repr` summarises tensors with more elements than this.
SHOWN_ELEMENTS = 1000


class Tensor(Handle):
    """A value on a device. Reading its elements or its address runs the queue; its shape does not.

    Using a handle whose value was freed, donated or lost raises `TaskError`, which names the task
    that did so. `==` compares identity; to compare or compute with elements, use `numpy()`.
    """

    #: Finalizers may run at any point, so this one only appends to a queue that the device
    #: processes later. It is a C callable: a Python method could be interrupted before its first
    #: line.
    __slots__ = ("__del__", "__weakref__", "_record")
    __del__: Callable[[], object]
    _record: ValueRecord

    def __copy__(self) -> Tensor:
        """Return another handle on the same value."""
        return handle_on(self._record)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        """Return the same elements in a separate buffer."""
        return self.to_layout(self.layout.without_address(), copy=True)

    def __reduce__(self) -> Any:
        raise TypeError("cannot pickle a device tensor: pickle tensor.numpy() instead")

    # -- what it is ------------------------------------------------------------------------------

    @property
    def device(self) -> Any:
        """The `Device` of the tensor. Typed `Any`: this module does not import the device."""
        return self._record.device

    @property
    def function_queue(self) -> Any:
        """The device, which enqueues host functions that are called with this tensor."""
        return self._record.device

    @property
    def shape(self) -> tuple[int, ...]:
        """The logical shape."""
        return self._record.desc.shape

    @property
    def data_type(self) -> DataType:
        """The storage type of the elements."""
        return self._record.desc.layout.data_type

    @property
    def dtype(self) -> np.dtype[Any]:
        """The NumPy type of one element in `numpy()`."""
        return self.data_type.in_arrays.dtype

    @property
    def volume(self) -> int:
        """The number of elements, without padding."""
        return self._record.desc.elements

    @property
    def stride(self) -> tuple[int, ...]:
        """Row-major strides in elements."""
        strides, step = [], 1
        for length in reversed(self.shape):
            strides.append(step)
            step *= length
        return tuple(reversed(strides))

    @property
    def desc(self) -> TensorDesc:
        """Shape and layout; the layout of a ready tensor has its address."""
        return TensorDesc(self.shape, self.layout)

    @property
    def layout(self) -> Layout:
        """The tensor's layout; for a pending tensor, the layout that its producer declares."""
        return self._record.device.layout_of(self._record)

    @property
    def space(self) -> Space:
        """The space of its primary instance."""
        return self.layout.space

    @property
    def address(self) -> int | None:
        """The address per bank, or None for a host array; runs the queue if pending."""
        self.settle()
        return self.layout.address

    @property
    def is_pending(self) -> bool:
        """Whether the tensor is not computed yet."""
        value = self._record
        if value.status is not Status.PENDING:
            return False
        return not value.consumed or value.device.tasks.awaits(value)

    @property
    def is_allocated(self) -> bool:
        """Whether the tensor is pending or ready: not freed, donated, lost or failed."""
        return self._record.is_usable

    @property
    def retain(self) -> bool:
        """Whether `stitch.submit` keeps the tensor after its last use; settable."""
        return self._record.retain

    @retain.setter
    def retain(self, value: bool) -> None:
        self._record.retain = bool(value)
        self._record.slots = None

    def __getattr__(self, name: str) -> Any:
        """Raise `AttributeError` with a hint for attributes of NumPy arrays and torch tensors."""
        if name.startswith("_"):
            raise AttributeError(name)
        raise AttributeError(
            f"a device tensor has no attribute {name!r}: use tensor.numpy() for a NumPy array, "
            "torch.as_tensor(tensor) for a torch tensor"
        )

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, arguments: Sequence[Any] = (), named: Any = None
    ) -> Any:
        """Raise `TypeError` with a hint: torch calls this if a function of it gets a tensor."""
        raise TypeError(
            f"torch's {getattr(function, '__name__', function)} takes no device tensor: "
            "pass torch.as_tensor(tensor)"
        )

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("a tensor with 0 dimensions has no length")
        return self.shape[0]

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Tensor) or other is None:
            return self is other
        raise TypeError(
            f"cannot compare a tensor with {type(other).__name__}: compare the elements, as in "
            "tensor.numpy() == ..."
        )

    __hash__ = object.__hash__

    def __bool__(self) -> bool:
        return bool(self._one("bool", "tensor.numpy().any() or .all() for its elements"))

    def __float__(self) -> float:
        return float(self._one("float", "tensor.numpy() for an array"))

    def __int__(self) -> int:
        return int(self._one("int", "tensor.numpy() for an array"))

    def _one(self, kind: str, remedy: str) -> Any:
        if self.volume != 1:
            raise UsageError(
                f"{kind}() takes a tensor of one element", got=self._record.desc.text(),
                remedy=remedy,
            )  # fmt: skip
        return self.item()

    def __repr__(self) -> str:
        """Show the elements of a ready tensor as NumPy does, otherwise shape, layout and status."""
        record = self._record
        text, state = record.desc.text(), record.status.name.lower()
        if record.status is Status.READY and not record.consumed:
            try:
                elements = self.numpy()
            except StitchError:  # The device is closed, computes no data, or runs this very code.
                pass
            else:
                shown = np.array2string(
                    elements, separator=", ", prefix="Tensor(", threshold=SHOWN_ELEMENTS
                )
                return f"Tensor({shown}, {text})"
        if record.consumed and record.status <= Status.FREED:
            state = "donated" if record.by.startswith(("donated", "given away")) else "freed"
        return f"<Tensor {text} {state}>"

    # -- what it holds ---------------------------------------------------------------------------

    def numpy(self) -> Array:
        """Return a copy of the elements as a NumPy array (block formats as float32); runs the
        queue."""
        return self._record.device.read(self._record)

    def item(self) -> Any:
        """Return the only element as a Python number.

        Raises:
            ValueError: The tensor has more than one element.
        """
        return self.numpy().item()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        if copy is False:
            raise ValueError(
                "a device tensor cannot become an array without a copy; use np.from_dlpack"
            )
        array = self.numpy()
        return array if dtype is None else array.astype(dtype, copy=False)

    def __dlpack__(self, **options: Any) -> Any:
        """Export a dense tensor without a copy; its buffer is pinned until the consumer drops it.

        Raises:
            BufferError: The layout is not dense, so that an export would need a copy.
        """
        device = self._record.device
        with device.lock:
            array = device.export(self._record)
        return array.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        spaces = self._record.device.backend.spaces
        found: tuple[int, int] = spaces[self.space].data.dlpack_device
        return found

    # -- what can be done with it ----------------------------------------------------------------

    def to_layout(
        self, layout: Layout | TensorDesc, *, retain: bool | None = None, copy: bool = False
    ) -> Tensor:
        """Return the same elements in another layout; see `stitch.to_layout`."""
        device = self._record.device
        result: Tensor = device.to_layout(self, layout, retain=retain, copy=copy)
        return result

    def has_layout(self, layout: Layout | TensorDesc) -> bool:
        """Return whether the tensor has this layout; an address is compared only if `layout` has
        one."""
        return self._record.device.has_layout(self, layout)

    def settle(self) -> None:
        """Run the queue if the tensor is pending.

        Raises:
            TaskError: It was freed, donated or lost, or its producer failed.
        """
        self._record.device.settle(self._record)

    def deallocate(self, by: str = "deallocate()") -> None:
        """Free the value now; later uses of any handle raise `TaskError`, which names `by`."""
        self._record.device.deallocate(self._record, by)

    def __getitem__(self, index: int | slice | EllipsisType) -> Tensor:
        """Return a view of part of the first dimension; it shares the buffer and keeps it alive.

        A view of a pending tensor is pending as well; the queue computes it into a separate buffer.

        Raises:
            LayoutError: The part does not start on a page, or the tensor is sharded.
        """
        if index is ...:
            return handle_on(self._record)
        if not self.shape:
            raise LayoutError("cannot index a tensor with 0 dimensions")
        length = self.shape[0]
        if isinstance(index, slice):
            start, stop, step = index.indices(length)
            if step != 1:
                raise LayoutError(
                    "a view needs consecutive rows: step must be 1", got=f"step {step}"
                )
            stop = max(stop, start)
        else:
            WHOLE.check("Tensor[...]", "index", index)
            start = operator.index(index)
            if not -length <= start < length:
                raise IndexError(f"index {start} is out of range for length {length}")
            start %= length
            stop = start + 1
        keep = isinstance(index, slice)
        part: Tensor = self._record.device.view(self, start, stop, keep=keep)
        return part


def handle_on(record: ValueRecord) -> Tensor:
    """Return a new handle on a value. (Faster than `Tensor.__init__` by half.)"""
    tensor, note = Tensor(), partial(record.device.drop, record)
    # Atomic under the GIL: no call in between.
    tensor._record = record
    tensor.__del__ = note
    record.handles += 1
    return tensor


def handles_on(records: Sequence[ValueRecord]) -> Tensor | tuple[Tensor, ...]:
    """Return one handle per value as a tuple, or a single handle for a single value."""
    if len(records) == 1:
        return handle_on(records[0])
    return tuple([handle_on(record) for record in records])
