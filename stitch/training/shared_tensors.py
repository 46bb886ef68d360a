"""Tensors of a training that somebody outside of it reads and writes directly: a module of torch's.

Comes in: arrays on the outside's bytes, by the names of tensors. Goes out: arrays on the bytes that
both have from then on, the outside's where the device reads them in place, else the device's: a
step writes there, and nothing is compared or copied. What cannot be had so (other types and
layouts, what must be free to leave L1, what programs make in a new place) is mirrored: shown after
the programs that change it, and compared before those that read it. Must not know: torch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from stitch.program import Array, DataType, Space
from stitch.runtime import comparison_of, lend, share
from stitch.training.graphs import MASTER
from stitch.training.stitching import NamedCells


class Sharer(Protocol):
    """Who has tensors of a training outside of it."""

    def take_writes(self) -> None:
        """Programs are about to read: what was written outside is the training's from now on."""

    def check_constants(self) -> None:
        """Programs are about to run; raises `UsageError` where constants of theirs have changed."""

    def check_step(self) -> None:
        """An update is about to run; raises `UsageError` where it would miss something."""

    def moved(self, name: str, array: Array) -> None:
        """A shared tensor's elements are in this array from now on."""

    def gradients_dropped(self) -> None:
        """There are no gradients any more."""

    def without_gradients(self) -> AbstractContextManager[None]:
        """Within it the outside sees no gradients of the training: it is read again."""

    def end(self) -> None:
        """The training is over; its tensors are still there."""


@dataclass(frozen=True, slots=True)
class _Mirrored:
    """The outside's array, what it held when it was last equal to the training's, and whether it
    holds something else now."""

    theirs: Array
    shown: Array
    differs: Callable[[], object]

    @staticmethod
    def of(theirs: Array) -> _Mirrored:
        """What is equal now."""
        shown = np.array(theirs, order="C")
        return _Mirrored(theirs, shown, comparison_of(theirs, shown))


class SharedTensors:
    """The tensors of one training that the outside has too; `moving`: those that programs leave in
    other places than they found them."""

    def __init__(self, cells: NamedCells, moving: Collection[str]) -> None:
        self._cells, self._moving = cells, moving
        self._mirrored: dict[str, _Mirrored] = {}
        #: Tensors on bytes that both have: who hears of others, and the array that it gave.
        self._shared: dict[str, tuple[Sharer, Array]] = {}
        #: Gradients that were asked for: the values that they are, and arrays on their bytes.
        self._gradients: dict[str, tuple[object, Array]] = {}

    def share(self, name: str, theirs: Array, sharer: Sharer) -> Array:
        """The array that has a tensor's elements from now on: `theirs`, with the values that the
        training has, or one on the device's bytes."""
        cells = self._cells
        # Before there is a handle more.
        is_alone = cells.is_alone(cells.numbers[name])
        device, tensor = cells.device, cells.get(name)
        assert tensor is not None, "what is kept is always there"
        layout = tensor.layout
        is_plain = layout.data_type is DataType.FLOAT32 and theirs.dtype == np.float32
        if is_plain and tensor.volume and layout.is_dense and name not in self._moving:
            if device.reads_in_place and theirs.flags.c_contiguous and theirs.flags.writeable:
                self._shared[name] = sharer, theirs
                return self._lend(name, theirs, cells.elements(name))
            # What lies in L1 has to leave it where programs want the room.
            if layout.space is not Space.L1 and is_alone:
                self._shared[name] = sharer, theirs
                with device.lock:
                    return share(tensor)
        theirs[...] = self.current(name)
        self._mirrored[name] = _Mirrored.of(theirs)
        return theirs

    def _lend(self, name: str, theirs: Array, held: Array) -> Array:
        cells, device = self._cells, self._cells.device
        if comparison_of(theirs, held)():
            np.copyto(theirs, held)
        with device.lock:
            # The bytes are there for as long as anything may run on them.
            lent = lend(device, theirs, f"tensor {name!r}", shared_by=cells)
        cells.hold(cells.numbers[name], lent)
        return theirs

    def gradient(self, name: str, dtype: np.dtype[Any]) -> Array | None:
        """A parameter's gradient as an array on bytes that both have, if it is there."""
        cells, gradient = self._cells, f"{name}.grad"
        number = cells.numbers[gradient]
        value, known = cells.values[number], self._gradients.get(gradient)
        if value is None or (known is not None and known[0] is value):
            return None if value is None or known is None else known[1]
        tensor = cells.tensor(number)
        assert tensor is not None, "it has just been there"
        layout = tensor.layout
        is_plain = layout.data_type is DataType.FLOAT32 and dtype == np.float32
        if is_plain and layout.is_dense and layout.space is not Space.L1 and tensor.volume:
            with cells.device.lock:
                array = share(tensor)
        else:
            array = tensor.numpy().astype(dtype)
            self._mirrored[gradient] = _Mirrored.of(array)
        self._gradients[gradient] = value, array
        return array

    def clear_gradient(self, name: str) -> None:
        """A gradient is zero: what backward adds to it is all of it."""
        number = self._cells.numbers[f"{name}.grad"]
        self.write(f"{name}.grad", np.zeros(self._cells.descs[number].shape, np.float32))

    def gradients_dropped(self) -> None:
        """There are no gradients any more."""
        for name in self._gradients:
            self._mirrored.pop(name, None)
        self._gradients.clear()

    def current(self, name: str) -> Array:
        """A tensor's elements; a parameter's in float32, where it has a master."""
        master = f"{name}.{MASTER}"
        return self._cells.elements(master if master in self._cells.numbers else name)

    def write(self, name: str, array: Array) -> None:
        """Overwrite a tensor, and a parameter's master; raises as `NamedCells.put`."""
        cells, master = self._cells, f"{name}.{MASTER}"
        before = cells.values[cells.numbers[name]] if name in cells.numbers else None
        cells.put(name, array)
        if master in cells.numbers:
            cells.put(master, np.asarray(array).astype(np.float32))
        shared = self._shared.get(name)
        if shared is not None and cells.values[cells.numbers[name]] is not before:
            sharer, theirs = shared
            sharer.moved(name, self.share(name, theirs, sharer))
        self.show((name,))

    def take_writes(self) -> None:
        """What was written outside to what is mirrored is the training's."""
        for name, each in self._mirrored.items():
            if each.differs():
                self.write(name, each.theirs)

    def show(self, names: Iterable[str] | None = None) -> None:
        """The outside has these of the tensors that are mirrored as they are now (None: all)."""
        for name in self._mirrored if names is None else names:
            each = self._mirrored.get(name)
            if each is not None:
                each.theirs[...] = self.current(name)
                each.shown[...] = each.theirs
