"""Tensors of torch's that programs overwrite where they lie: parameters, state of an optimizer.

On a machine that reads torch's bytes in place that is on these; elsewhere it has bytes of the
device, and torch's tensor is to lie there (`ParameterHomes`), where it is read and written as any
result.
"""

from __future__ import annotations

from typing import Any

from stitch.frontend.torch.aten_call import data_type_of
from stitch.frontend.torch.compile.graph_outputs import axes_in_memory
from stitch.frontend.torch.compile.shared_storage import SharedStorage, Shown
from stitch.frontend.torch.tensor_bytes import array_at, tensor_on
from stitch.program import Array, TensorDesc
from stitch.runtime import Tensor, lend, share

#: The order in which a tensor's axes lie; None where that is row-major.
Axes = tuple[int, ...] | None
#: A tensor's shape with its axes in that order, and the order: as what a program sees it.
Form = tuple[tuple[int, ...], Axes]


class Overwritten:
    """A tensor of torch's on bytes that a program overwrites; they are kept while this lives.

    `axes`: the order in which they lie, where they are read in place. Raises what allocating on the
    device raises.
    """

    __slots__ = (
        "__weakref__", "_shape", "_shown", "_strides", "form", "start", "storage_start", "tensor",
        "value",
    )  # fmt: skip

    def __init__(
        self, storage: SharedStorage, tensor: Any, desc: TensorDesc, axes: Axes = None
    ) -> None:
        device = storage.device
        self.form: Form = (desc.shape, axes)
        self._shown: Shown | None = None
        #: Its elements as torch has them: where they lay, or from now on on the device's bytes.
        self.tensor = tensor.detach()
        #: What stands for it now; a run that overwrites it takes this, and gives another.
        self.value: Tensor
        if device.reads_in_place and tensor.numel():
            array = _array(in_order(self.tensor, axes))
            with device.lock:
                self.value = lend(device, array, "a tensor of torch", shared_by=self)
        else:
            self.value = device.empty(desc.without_address())
            dense = self.tensor.contiguous()
            device.write(self.value, _array(dense))
            if tensor.numel():
                self._shown = Shown(self.value, storage.shown)
                with device.lock:
                    shared = share(self.value, self._shown.ended)
                    self.tensor = tensor_on(shared, tensor.dtype)
                    self._shown.begin(self.tensor.data_ptr())
        self.start = self.tensor.data_ptr()
        #: Where the storage begins that it is in.
        self.storage_start = self.tensor.untyped_storage().data_ptr()
        self._shape, self._strides = self.tensor.shape, self.tensor.stride()

    def is_at(self, tensor: Any) -> bool:
        """Whether a tensor of torch's still lies here, in the same order."""
        return bool(
            tensor.data_ptr() == self.start
            and tensor.shape == self._shape
            and tensor.stride() == self._strides
        )

    def become(self, value: Tensor) -> None:
        """A run has overwritten it."""
        self.value = value
        if self._shown is not None:
            self._shown.tensor = value

    def give_up(self) -> None:
        """A run that was to overwrite it has failed: torch has what is there, no device has."""
        if self._shown is not None:
            self._shown.ended()


def axes_of(tensor: Any) -> Axes:
    """The order in which a tensor's axes lie, if it is dense at all."""
    return None if tensor.is_contiguous() else axes_in_memory(tensor.stride())


def in_order(tensor: Any, axes: Axes) -> Any:
    """A tensor with its axes in the order in which they lie."""
    return tensor if axes is None else tensor.permute(axes)


def _array(dense: Any) -> Array:
    """An array on a dense tensor, which it does not keep."""
    kind = data_type_of(dense.dtype).dtype
    return array_at(dense.data_ptr(), tuple(dense.shape), kind)
