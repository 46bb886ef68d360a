"""The task store: the slots of registered tasks, the tensors that they are bound to, arguments.

A tensor that has its place keeps it: what is written goes there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from stitch.errors import UsageError, closest
from stitch.program import TensorDesc
from stitch.runtime import RuntimeDevice, Tensor
from stitch.training.local_backend.task_binding import RuntimeArgument
from stitch.training.local_backend.task_slots import TaskSignature
from stitch.training.stitching import NamedCells


class TaskStore:
    """What the slots of tasks stand for on a device."""

    def __init__(
        self, device: RuntimeDevice, references: Mapping[RuntimeArgument, Callable[[], Any]]
    ) -> None:
        self.device = device
        #: The slots of the tasks, by id.
        self.signatures: dict[str, TaskSignature] = {}
        self._references = references
        self._cells = NamedCells(device)

    # -- tensors -----------------------------------------------------------------------------------

    @property
    def names(self) -> tuple[str, ...]:
        """The tensors that are known, whether there or not."""
        return tuple(self._cells.numbers)

    def add_tensor(self, name: str, desc: TensorDesc) -> None:
        """Make a tensor known, which is not there before someone writes it.

        Raises `UsageError` where one of this name is described otherwise.
        """
        number = self._cells.numbers.get(name)
        if number is None:
            self._cells.number(name, desc)
        elif self._cells.descs[number] != desc.without_address():
            raise UsageError(
                f"there is another tensor {name!r}",
                expected=self._cells.descs[number].text(), got=desc.text(),
            )  # fmt: skip

    def desc(self, name: str) -> TensorDesc:
        """How a tensor is described; raises `UsageError` for a name that is not known."""
        return self._cells.descs[self._number(name)]

    def find(self, name: str) -> Tensor | None:
        """A handle on a tensor, None where it is not there; `UsageError` for an unknown name."""
        return self._cells.tensor(self._number(name))

    def tensor(self, name: str) -> Tensor:
        """A handle on a tensor; raises `UsageError` for one that is unknown, or not there."""
        tensor = self.find(name)
        if tensor is None:
            raise UsageError(
                f"tensor {name!r} is not there yet: no task has written it, and nobody has set it",
                expected=self.desc(name).text(),
                remedy=f"set_tensor({name!r}, array), or run a task that writes it",
            )
        return tensor

    def hold(self, name: str, tensor: Tensor) -> None:
        """The tensor of a name is this one from now on; raises what `check` does."""
        self.check(name, tensor)
        self.replace(name, tensor)

    def check(self, name: str, tensor: Tensor) -> None:
        """Raise `UsageError` for a tensor that cannot be that of a name: of another shape, element
        type or device."""
        wanted = self.desc(name)
        self.device.check_device(tensor, f"tensor {name!r}")
        given = tensor.desc
        if (given.shape, given.layout.data_type) != (wanted.shape, wanted.layout.data_type):
            raise UsageError(
                f"tensor {name!r} is described otherwise", expected=wanted.text(),
                got=given.text(),
            )  # fmt: skip

    def replace(self, name: str, tensor: Tensor) -> None:
        """The tensor of a name is this one, which was checked, from now on."""
        self._cells.hold(self._number(name), tensor)

    def write(self, name: str, array: Any) -> None:
        """Overwrite the elements of a tensor, which gets its place if it has none.

        Raises `UsageError` for an unknown name, `LinkError` where shape or kind of number differ.
        """
        self._number(name)
        self._cells.put(name, array)

    def drop(self, names: Iterable[str]) -> None:
        """These are not there any more."""
        self._cells.drop(tuple(map(self._number, names)))

    def close(self) -> None:
        """Give all tensors back."""
        self._cells.close()

    def _number(self, name: str) -> int:
        number = self._cells.numbers.get(name)
        if number is None:
            raise UsageError(
                f"there is no tensor {name!r}", expected=", ".join(self.names) or "none",
                remedy=closest(name, self.names) or None,
            )  # fmt: skip
        return number

    # -- arguments ---------------------------------------------------------------------------------

    def argument(self, value: Any) -> Any:
        """An argument's value: what it refers to now, if it is a reference."""
        return self._references[value]() if isinstance(value, RuntimeArgument) else value
