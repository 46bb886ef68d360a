"""`Executor`: what computes a program's operations on host memory.

`prepare` is called once per program, `bind` once per set of addresses; what `bind` returns belongs
to a plan and dies with it. Calling the bound steps allocates and decides nothing; it is done
`quietly` (see `error_state`): kernels rely on NumPy's floating-point errors being ignored.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from stitch.machine import MachineShape
from stitch.ops import KernelMemory, bytes_from_a_line
from stitch.program import Array, Program

Thunk = Callable[[], object]


class Workspace:
    """Bytes that every program of a device may use while it runs, and no longer.

    Programs of one device run one after the other, so the same bytes, still in the caches, serve
    what each keeps between its operations.

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


@dataclass(frozen=True, slots=True, eq=False)
class BoundProgram:
    """A program bound to addresses: steps to call in order.

    `operations[i]` is (index of the operation, first step, one past its last step);
    `arrays` are the compute arrays by value, for hooks; `staging_nbytes` what the executor holds
    apart from the spaces because a form had to change. An executor that runs a program as a whole
    has no `operations`; then `one_by_one` binds the same program operation by operation.
    """

    steps: tuple[Thunk, ...]
    operations: tuple[tuple[int, int, int], ...]
    arrays: dict[int, Array]
    staging_nbytes: int
    one_by_one: Callable[[], BoundProgram] | None = None


@dataclass(frozen=True, slots=True)
class ProgramBytes:
    """Bytes of the host's memory that running a program takes beside the spaces.

    `kept`: once it is prepared (constants in their compute type, staging, what ONNX Runtime
    rearranges); `bound`: each time it is bound to addresses; `values`: values inside it, where
    programs of one device take the same bytes in turn; `kernels`: what one kernel has at a time.
    `largest` names the operation whose kernel takes most.
    """

    kept: int
    bound: int
    values: int
    kernels: int
    largest: str

    @property
    def peak(self) -> int:
        """All of them at once; kernels have their common memory and what they take while they
        run."""
        return self.kept + self.bound + self.values + 2 * self.kernels


class PreparedProgram(ABC):
    """A program made ready by an executor, to be bound to any addresses."""

    @abstractmethod
    def bind(
        self, inputs: tuple[Array, ...], outputs: tuple[Array, ...], scratch: Array | None
    ) -> BoundProgram:
        """Steps that compute on these regions.

        Each region is a writable uint8 array of a footprint, in the slot's described layout;
        `scratch` is the program's scratch footprint.
        """


class Executor(ABC):
    """Computes operation lists; final classes are registered by name in `executors`."""

    name: str
    computes: bool = True

    @abstractmethod
    def prepare(
        self, program: Program, machine: MachineShape, workspace: Workspace | None = None
    ) -> PreparedProgram:
        """Make a program ready; raises `CompileError` for operators it cannot run.

        `workspace` is the device's; a program that is given none has its own.
        """

    @abstractmethod
    def host_bytes(self, program: Program) -> ProgramBytes:
        """What running a program takes of the host's memory, at most; see `host_bytes`."""
