"""The bytes of instances: where they begin, and what lies there, as arrays."""

from __future__ import annotations

import numpy as np

from stitch.budget import LARGE_NBYTES, claimed_array, copied
from stitch.memory import CopyKernel
from stitch.program import Array, TensorDesc, host_layout
from stitch.runtime.backends.local_backend import LocalBackend
from stitch.runtime.executors import as_bytes
from stitch.runtime.values import InstanceRecord


class InstanceBytes:
    """The bytes of instances: in a backend's memory spaces, and in host arrays outside."""

    def __init__(self, backend: LocalBackend) -> None:
        self._backend = backend
        self._shape = backend.machine.shape
        #: Whether the spaces hold data: an executor may only plan.
        self.has_data = backend.executor.computes

    def address(self, instance: InstanceRecord) -> int | None:
        """The address per bank at which an instance begins; None outside the spaces."""
        start = self.start(instance)
        return None if start is None else start // self._shape.space(instance.buffer.space).banks

    def start(self, instance: InstanceRecord) -> int | None:
        """Where in the bytes of its space an instance begins; None outside the spaces."""
        buffer = instance.buffer
        if buffer.address is None:
            return None
        return buffer.address * self._shape.space(buffer.space).banks + instance.offset_nbytes

    def region(self, instance: InstanceRecord) -> Array:
        """The bytes of an instance, from its offset to the end of its buffer."""
        buffer = instance.buffer
        if buffer.array is not None:
            return as_bytes(np.ascontiguousarray(buffer.array))
        assert buffer.address is not None
        whole = self._backend.region(buffer.space, buffer.address, buffer.size_per_bank)
        return whole[instance.offset_nbytes :]

    def dense(self, instance: InstanceRecord) -> Array | None:
        """An instance as an array over its own bytes, None where its layout is not dense."""
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
        # Both at once: nothing can come in between these.
        instance.view = view
        instance.viewed_at = buffer.address
        return view

    def elements(self, instance: InstanceRecord, desc: TensorDesc, allowed: int) -> Array:
        """The elements of an instance in an array of their own, block formats as float32.

        `desc` is that of its value. Raises `OutOfMemoryError` where a large one takes more of the
        host's bytes than `allowed`.
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
