"""`Executor`: computes the operations of a program on host memory.

`prepare` is called once per program, `bind` once per plan. The bound steps allocate nothing; call
them through `with_fp_errors_ignored`, as kernels rely on NumPy's floating-point errors being off.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from contextvars import Context, copy_context
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeVar, overload

import numpy as np

from stitch.errors import CompileError, UsageError
from stitch.machine import Machine, MachineShape, SpaceShape
from stitch.memory import SpaceBytes
from stitch.ops import KernelMemory, bytes_from_a_line
from stitch.program import Array, Program, Space, TensorDesc, as_read_only

if TYPE_CHECKING:
    from stitch.runtime.executors.prices import PriceTable

P = ParamSpec("P")
Result = TypeVar("Result")


def with_fp_errors_ignored(
    function: Callable[P, Result], *arguments: P.args, **named: P.kwargs
) -> Result:
    """Call a function with NumPy's floating-point errors ignored.

    The state is set in a copy of the caller's context, so nested, concurrent and interrupted runs
    do not affect each other. It takes 0.1 us (`np.errstate` 0.7; `prepared_context_run` 0.03).

    >>> with_fp_errors_ignored(np.reciprocal, np.float32(0))
    np.float32(inf)
    """
    context = copy_context()
    context.run(ignore_errors)
    return context.run(function, *arguments, **named)


def error_setter(context: Context, **errors: Any) -> Callable[[], object]:
    """Return `np.seterr(**errors)` for the caller's context, five times as fast.

    Sets NumPy's context variable directly; falls back to `np.seterr` if it is not the only one.
    """
    context.run(np.seterr, **errors)
    variables = list(context.items())
    if len(variables) != 1:
        return partial(np.seterr, **errors)
    ((variable, state),) = variables
    return partial(variable.set, state)


#: Make NumPy ignore floating-point errors in the caller's context, or report them as by default.
ignore_errors = error_setter(Context(), all="ignore")
report_errors = error_setter(Context(), divide="warn", over="warn", under="ignore", invalid="warn")


def prepared_context_run() -> Callable[..., Any]:
    """Return the `run` of a reusable context in which floating-point errors are ignored.

    For steps that are kernels only: they do not see the caller's context variables, and the context
    cannot be entered twice at once.
    """
    context = Context()
    context.run(ignore_errors)
    return context.run


Owner = TypeVar("Owner")
Value = TypeVar("Value")


class cached_attribute(Generic[Owner, Value]):
    """A property that is computed on first access and stored as an attribute of the object.

    Unlike `functools.cached_property` of Python 3.11 it takes no lock, which a thread could hold
    during a fork.
    """

    def __init__(self, find: Callable[[Owner], Value]) -> None:
        self._find = find
        self.__doc__ = find.__doc__

    def __set_name__(self, owner: type[Any], name: str) -> None:
        self._name = name

    @overload
    def __get__(self, owner: None, kind: type[Any]) -> cached_attribute[Owner, Value]: ...
    @overload
    def __get__(self, owner: Owner, kind: type[Any]) -> Value: ...
    def __get__(self, owner: Any, kind: type[Any]) -> Any:
        if owner is None:
            return self
        value = self._find(owner)
        # Not `owner.__dict__`: materialising it makes every attribute access slower (calls of
        # programs by 4 %). This also works for frozen classes.
        object.__setattr__(owner, self._name, value)
        return value


Thunk = Callable[[], object]


class Workspace:
    """Bytes that the programs of a device use in turn while they run; they stay in the caches.

    >>> space = Workspace()
    >>> small, large = space.region(100), space.region(1000)
    >>> large.nbytes, space.region(100).nbytes
    (1000, 100)
    """

    __slots__ = ("_bytes", "kernels")

    def __init__(self) -> None:
        self._bytes: Array = np.empty(0, np.uint8)
        self.kernels = KernelMemory()

    def forget(self) -> None:
        """Release the bytes; nothing may be bound to them any more."""
        self._bytes = np.empty(0, np.uint8)
        self.kernels.forget()

    def region(self, nbytes: int) -> Array:
        """Return the first `nbytes` bytes; growing leaves earlier regions usable."""
        if nbytes > self._bytes.nbytes:
            self._bytes = bytes_from_a_line(nbytes)
        return self._bytes[:nbytes]


@dataclass(frozen=True, slots=True, eq=False)
class BoundProgram:
    """A program bound to addresses: steps to call in order.

    Attributes:
        operations: (operation, first step, end of its steps) of each operation; earlier steps
            convert the inputs. Empty if the program is bound as a whole.
        arrays: The arrays that values are computed in, for hooks.
        staging_nbytes: Bytes outside the spaces for converted values.
        one_by_one: Binds the same program operation by operation.
        written: The steps that convert and store each value.
    """

    steps: tuple[Thunk, ...]
    operations: tuple[tuple[int, int, int], ...]
    arrays: dict[int, Array]
    staging_nbytes: int
    one_by_one: Callable[[], BoundProgram] | None = None
    written: Mapping[int, tuple[Thunk, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ProgramBytes:
    """Host memory outside the spaces that running a program takes, in bytes.

    Attributes:
        kept: Per prepared program: converted constants, staging, weights packed by ONNX Runtime.
        bound: Per binding.
        values: Intermediate values; programs of a device use the same bytes in turn.
        kernels: The workspace of the kernel that takes most, of operation `largest`.
        staged: The part of `kept` that each thread has separately.
    """

    kept: int
    bound: int
    values: int
    kernels: int
    largest: str
    staged: int = 0

    @property
    def peak(self) -> int:
        """Bytes of all at once; kernels count twice, for their shared memory and while they run."""
        return self.kept + self.bound + self.values + 2 * self.kernels


class PreparedProgram(ABC):
    """A program that an executor has prepared, to be bound to any addresses."""

    @abstractmethod
    def bind(
        self, inputs: tuple[Array, ...], outputs: tuple[Array, ...], scratch: Array | None
    ) -> BoundProgram:
        """Bind the program to memory.

        Args:
            inputs, outputs: Writable uint8 arrays, the slots' footprints in their layouts. The
                regions of constants that are read in their places follow those of the inputs.
            scratch: The program's scratch footprint.
        """

    #: Whether it reads constants in their places in the spaces; others read them from the file.
    reads_placed_constants: bool = False
    #: Returns the regions of its constants, None for one without a place.
    constant_regions: Callable[[], Sequence[Any]] = staticmethod(tuple)

    def on_thread(self, workspace: Workspace) -> PreparedProgram:
        """Return the program for a thread with its own workspace, if the executor
        `supports_threads`; it shares nothing with this one that a run changes."""
        return self

    def reuse(self, counted: ProgramBytes) -> None:  # noqa: B027 (by default nothing)
        """Take over what the executor's `host_bytes` computed for this program."""


class Executor(ABC):
    """Computes programs; `EXECUTORS` lists the implementations by name."""

    name: str
    #: Where the bytes of `space_bytes` lie, for messages.
    place: str = "this machine"
    #: Of an executor on memory elsewhere: operators that NumPy's kernels computed, by way of the
    #: host.
    left_to_numpy: Collection[str] = ()
    computes: bool = True
    #: Whether it captures what a binding launches on a device, and how many graphs it captured or
    #: could not capture.
    captures: bool = False
    graphs_captured: int = 0
    graphs_failed: int = 0
    #: Seconds on its clock, when what was launched before is done.
    clock: Callable[[], float] = staticmethod(perf_counter)
    #: Whether programs may run concurrently, each prepared by `on_thread`.
    supports_threads: bool = False
    #: The table by which it chooses kernels; None without a choice.
    prices: PriceTable | None = None

    @abstractmethod
    def prepare(
        self, program: Program, machine: MachineShape, workspace: Workspace | None = None
    ) -> PreparedProgram:
        """Prepare a program; raises `CompileError` for operators it cannot run.

        Without the device's `workspace` the program has its own.
        """

    def prepare_alone(self, program: Program, machine: MachineShape) -> PreparedProgram:
        """Prepare a program by this executor's own kernels whatever they cost, to measure them."""
        return self.prepare(program, machine)

    def machine(self, described: Machine, max_memory: int | None) -> Machine:
        """Return the machine that a device has: by default as it is described.

        `max_memory`: a limit in bytes for memory that is allocated at once.
        """
        return described

    def space_bytes(self, space: Space, shape: SpaceShape) -> SpaceBytes | None:
        """Return the bytes of a space, where its kernels compute; None for a mapping of this
        process. Called once per device."""
        return None

    def captured(self, steps: Sequence[Sequence[Thunk]]) -> Sequence[Sequence[Thunk]] | None:
        """Return the steps of a binding with sequences of launches captured as graphs, where the
        executor `captures`; None if there is no graph. Nothing is run."""
        return None

    def left_to_host(self, program: Program, machine: MachineShape) -> tuple[str, ...]:
        """Return the operators that are computed by way of the host, without running anything."""
        return ()

    def finish(self) -> None:  # noqa: B027 (by default nothing)
        """Wait until what was launched on a device is done; raises what failed there."""

    def is_lost(self) -> bool:
        """Whether the memory of its device cannot be reached any more, with all that lies there."""
        return False

    def check(self, program: Program, machine: MachineShape) -> None:
        """Raise `CompileError` at load for operations that this executor cannot run."""
        self.check_foreign(program)

    def takes_foreign(self) -> bool:
        """Whether it computes foreign operators (by ONNX Runtime)."""
        return False

    def check_foreign(self, program: Program) -> None:
        """Raise `CompileError` for foreign operators unless `takes_foreign`."""
        found = program.foreign_operations()
        if found and not self.takes_foreign():
            listed = ", ".join(dict.fromkeys(operation.title for operation in found))
            them = "them" if "," in listed else "it"
            raise CompileError(
                f"the executor {self.name!r} cannot run {listed}: Stitch does not define {them}, "
                f"so only ONNX Runtime computes {them}",
                where=f"program {program.name!r}"
                + (f" at {found[0].location}" if found[0].location else ""),
                remedy="pip install 'stitch-runtime[onnx]'"
                if self.name == "auto"
                else "executor='onnxruntime' or 'auto', of open_device or (for a model that is "
                "called as a function) of compile; --executor=auto of stitch-run. Both need the "
                "package onnxruntime",
            )

    @abstractmethod
    def host_bytes(self, program: Program) -> ProgramBytes:
        """Bound the host memory that running a program takes."""

    def link_obstacle(self, programs: Sequence[Program]) -> str:
        """Return why these programs, linked into one, would give other bits; empty if equal."""
        return f"the executor {self.name!r} does not promise equal bits"


def checked_threads(threads: int) -> int:
    """Return a number of threads; raises `UsageError` below one."""
    if threads < 1:
        raise UsageError("an executor needs at least one thread", got=str(threads))
    return threads


# Host functions


class FunctionCall(ABC):
    """One call of a host function, which runs once or never."""

    __slots__ = ()

    @abstractmethod
    def run(self, arrays: tuple[Array, ...]) -> None:
        """Call it on its inputs (read-only) and outputs; raises what the function raises."""

    @abstractmethod
    def stop(self, why: str) -> None:
        """Mark the call as failed; readers of its results raise an error with `why`."""

    @property
    @abstractmethod
    def is_cancelled(self) -> str | None:
        """Why the call cannot run, if an input failed; else None."""


class CallBox:
    """Holds the call that the next run of a plan makes; empty between runs."""

    __slots__ = ("call",)

    def __init__(self) -> None:
        self.call: FunctionCall | None = None


class CallKernel(PreparedProgram):
    """A host function as a prepared program; `box` holds the call of the next run."""

    def __init__(self, inputs: Sequence[TensorDesc], outputs: Sequence[TensorDesc]) -> None:
        self.inputs, self.outputs, self.box = inputs, outputs, CallBox()

    def bind(
        self, inputs: tuple[Array, ...], outputs: tuple[Array, ...], scratch: Array | None
    ) -> BoundProgram:
        read = [as_read_only(_dense(*one)) for one in zip(inputs, self.inputs, strict=True)]
        written = [_dense(*one) for one in zip(outputs, self.outputs, strict=True)]
        return BoundProgram((partial(call_in_turn, self.box, *read, *written),), (), {}, 0)


def call_in_turn(box: CallBox, *arrays: Array) -> None:
    """Make the call in the box, with floating-point errors reported as NumPy does by default."""
    call, box.call = box.call, None
    assert call is not None, "the box is filled before each run"
    report_errors()
    try:
        call.run(arrays)
    finally:
        ignore_errors()


def _dense(region: Array, desc: TensorDesc) -> Array:
    dtype = desc.layout.data_type.dtype
    dense: Array = region[: desc.elements * dtype.itemsize].view(dtype).reshape(desc.shape)
    return dense


# The null executor


class NullExecutor(Executor, PreparedProgram):
    """Checks programs and runs plans without computing."""

    name = "null"
    computes = False

    def prepare(
        self, program: Program, machine: MachineShape, workspace: Workspace | None = None
    ) -> PreparedProgram:
        return self

    def host_bytes(self, program: Program) -> ProgramBytes:
        return ProgramBytes(0, 0, 0, 0, "")

    def link_obstacle(self, programs: Sequence[Program]) -> str:
        return ""

    def bind(
        self, inputs: tuple[Array, ...], outputs: tuple[Array, ...], scratch: Array | None
    ) -> BoundProgram:
        return BoundProgram((), (), {}, 0)
