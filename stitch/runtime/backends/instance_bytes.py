"""Access to the bytes of instances: addresses and arrays."""

from __future__ import annotations

import numpy as np

from stitch.budget import LARGE_NBYTES, claimed_array, copied
from stitch.memory import CopyKernel
from stitch.program import Array, TensorDesc, host_layout
from stitch.runtime.backends.local_backend import LocalBackend
from stitch.runtime.executors import as_bytes
from stitch.runtime.values import InstanceRecord


class InstanceBytes:
    """Access to instances in a backend's memory spaces and in host arrays."""

    def __init__(self, backend: LocalBackend) -> None:
        self._backend = backend
        self._shape = backend.machine.shape
        #: Whether the spaces contain data (not with the null executor).
        self.has_data = backend.executor.computes

    def address(self, instance: InstanceRecord) -> int | None:
        """Return the start address per bank; None for host arrays."""
        start = self.start(instance)
        return None if start is None else start // self._shape.space(instance.buffer.space).banks

    def start(self, instance: InstanceRecord) -> int | None:
        """Return the start offset in the bytes of its space; None for host arrays."""
        buffer = instance.buffer
        if buffer.address is None:
            return None
        return buffer.address * self._shape.space(buffer.space).banks + instance.offset_nbytes

    def region(self, instance: InstanceRecord) -> Array:
        """Return the bytes of an instance, from its offset to the end of its buffer."""
        buffer = instance.buffer
        if buffer.array is not None:
            return as_bytes(np.ascontiguousarray(buffer.array))
        assert buffer.address is not None
        whole = self._backend.region(buffer.space, buffer.address, buffer.size_per_bank)
        return whole[instance.offset_nbytes :]

    def dense(self, instance: InstanceRecord) -> Array | None:
        """Return an array over the instance's bytes; None if its layout is not dense."""
        buffer = instance.buffer
        if buffer.array is not None:
            return buffer.array
        if instance.view is not None and instance.viewed_at == buffer.address:
            return instance.view
        layout = instance.desc.layout
        if not layout.is_dense:
            return None
        nbytes = instance.desc.elements * layout.data_type.itemsize
        flat = self.region(instance)[:nbytes].view(layout.data_type.dtype)
        view = flat.reshape(instance.desc.shape)
        # Atomic under the GIL: no call in between.
        instance.view = view
        instance.viewed_at = buffer.address
        return view

    def elements(self, instance: InstanceRecord, desc: TensorDesc, allowed: int) -> Array:
        """Return a copy of the elements, block formats as float32.

        `desc` is the value's descriptor.

        Raises:
            OutOfMemoryError: A large array exceeds `allowed` bytes.
        """
        view = instance.view
        if view is None or instance.viewed_at != instance.buffer.address:
            view = self.dense(instance)
        if view is not None:
            small = view.nbytes < LARGE_NBYTES
            return view.copy() if small else copied(view, f"reading {desc.text()}", allowed)
        target = instance.desc.layout.data_type.in_arrays
        what = f"reading {instance.desc.text()}"
        elements: Array = claimed_array(instance.desc.shape, target.dtype, what, allowed)
        host = TensorDesc(instance.desc.shape, host_layout(target))
        kernel: CopyKernel = self._backend.kernel(instance.desc, host)
        kernel.bind(self.region(instance), as_bytes(elements))()
        return elements
