"""The workspace of a device: host memory for what programs keep between their operations.

Programs of one device run one after the other, so the same bytes, still in the caches, serve all.
"""

from __future__ import annotations

import numpy as np

from stitch.ops import KernelMemory, bytes_from_a_line
from stitch.program import Array


class Workspace:
    """Bytes that every program of a device may use while it runs, and no longer.

    >>> space = Workspace()
    >>> small, large = space.region(100), space.region(1000)
    >>> large.nbytes, space.region(100).nbytes
    (1000, 100)
    """

    __slots__ = ("_bytes", "kernels")

    def __init__(self) -> None:
        self._bytes: Array = np.empty(0, np.uint8)
        #: What kernels use for themselves.
        self.kernels = KernelMemory()

    def forget(self) -> None:
        """Begin anew, where nothing is bound to these bytes any more."""
        self._bytes = np.empty(0, np.uint8)
        self.kernels.forget()

    def region(self, nbytes: int) -> Array:
        """The first so many bytes; what was given before stays usable where this takes new ones."""
        if nbytes > self._bytes.nbytes:
            self._bytes = bytes_from_a_line(nbytes)
        return self._bytes[:nbytes]
