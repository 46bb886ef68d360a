"""Where torch's parameters lay before they were a device's, and the way back.

Importing this module needs the package torch (an optional extra).
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes


class ParameterHomes:
    """The places of some parameters before they were moved, by the identity of torch's object."""

    __slots__ = ("_homes",)

    def __init__(self) -> None:
        self._homes: dict[int, tuple[Any, Any]] = {}

    def move(self, parameter: Any, tensor: Any) -> None:
        """A parameter lies where this tensor does: whatever it had before is another tensor's."""
        self._homes.setdefault(id(parameter), (parameter, parameter.data))
        parameter.data = tensor
        torch.autograd.graph.increment_version(parameter)

    def bring_back(self) -> None:
        """Parameters lie where they lay, with the values that they have now; twice does no harm.

        The end may come in the middle of torch's tracing of something else.
        """
        with torch._C.DisableTorchFunction(), _disable_current_modes(), torch.no_grad():
            while self._homes:
                number, (parameter, home) = next(iter(self._homes.items()))
                if home.shape == parameter.shape:
                    home.copy_(parameter.data)
                else:  # It was given another shape meanwhile.
                    home = parameter.data.clone()
                parameter.data = home
                del self._homes[number]
