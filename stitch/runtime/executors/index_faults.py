"""Indices out of range on a device, where no kernel can raise.

Kernels take such an index as one in range, and set a flag that the host reads after it has waited.
"""

from __future__ import annotations

import torch

from stitch.errors import TaskError
from stitch.runtime.executors.executor import Thunk


class IndexFaults:
    """The flag of a device: which operation had an index out of range, the last of them.

    >>> faults, indices = IndexFaults(torch.device("cpu")), torch.tensor([1, 7])
    >>> for step in faults.steps("Gather", indices, 4):
    ...     _ = step()
    >>> faults.check()
    Traceback (most recent call last):
    stitch.errors.TaskError: an index of Gather is out of range
      expected: -4 to 3
      try: check the indices before the call; what was computed from them is undefined
    >>> faults.check()
    """

    def __init__(self, device: torch.device) -> None:
        self._operations: list[tuple[str, int]] = []
        with torch.inference_mode(False):
            self._flag = torch.zeros((), dtype=torch.int32, device=device)
            pinned = device.type == "cuda"
            self._host = torch.zeros((), dtype=torch.int32, device="cpu", pin_memory=pinned)
        self._seen = self._host.numpy()

    def steps(self, title: str, indices: torch.Tensor, size: int) -> list[Thunk]:
        """Return the steps that set the flag if an index is below -size or not below size."""
        if (title, size) not in self._operations:
            self._operations.append((title, size))
        number = torch.full_like(self._flag, 1 + self._operations.index((title, size)))

        def mark() -> None:
            is_out = torch.any((indices < -size) | (indices >= size))
            torch.where(is_out, number, self._flag, out=self._flag)
            # Pinned, so it is there when a copy of results that the host waits for is done.
            self._host.copy_(self._flag, non_blocking=True)

        return [mark]

    def check(self) -> None:
        """Raise `TaskError` if the flag is set, and clear it; the host has waited."""
        found = int(self._seen)
        if found:
            self._flag.zero_()
            self._host.zero_()
            title, size = self._operations[found - 1]
            raise TaskError(
                f"an index of {title} is out of range",
                expected=f"{-size} to {size - 1}",
                remedy="check the indices before the call; what was computed from them is "
                "undefined",
            )
