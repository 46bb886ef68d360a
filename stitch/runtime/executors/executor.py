"""`Executor`: computes the operations of a program on host memory.

`prepare` is called once per program, `bind` once per set of addresses; the result of `bind` belongs
to one plan. Calling the bound steps allocates nothing and decides nothing. Call them through
`with_fp_errors_ignored`: kernels rely on NumPy's floating-point errors being ignored.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextvars import Context, copy_context
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, ParamSpec, TypeVar, overload

import numpy as np

from stitch.errors import CompileError, UsageError
from stitch.machine import MachineShape
from stitch.ops import KernelMemory, bytes_from_a_line
from stitch.program import Array, Program, TensorDesc, as_read_only
from stitch.runtime.executors.prices import PriceTable

# Linking


@dataclass(frozen=True, slots=True)
class LinkTerms:
    """What an executor says of programs that could be linked into one.

    `obstacle`: why the linked program would not give the same bits; empty where it would.
    `repeats`: after how many runs of the programs one after the other they are linked; None where
    that gains nothing. It rests on what the programs are, never on a clock.
    """

    obstacle: str = ""
    repeats: int | None = None


P = ParamSpec("P")
Result = TypeVar("Result")


def with_fp_errors_ignored(
    function: Callable[P, Result], *arguments: P.args, **named: P.kwargs
) -> Result:
    """Call a function without floating-point warnings or errors of NumPy's: kernels rely on it.

    The state belongs to a run: it is set in a copy of the caller's context, which ends with the
    call. So a run may happen within another and beside others, sees the context variables of its
    caller, and leaves nothing behind wherever it is interrupted. It takes 0.1 us; `np.errstate`
    takes 0.7. Where nothing but kernels runs, `prepared_context_run` takes a third of that.

    >>> with_fp_errors_ignored(np.reciprocal, np.float32(0))
    np.float32(inf)
    """
    context = copy_context()
    context.run(ignore_errors)
    return context.run(function, *arguments, **named)


def treating(context: Context, **errors: Any) -> Callable[[], object]:
    """What makes NumPy treat errors so in the context in which it is called.

    It puts into the context variable that NumPy has what `np.seterr` puts there in `context`;
    `np.seterr` itself, which takes five times as long, if there is not just one.
    """
    context.run(np.seterr, **errors)
    kept = list(context.items())
    if len(kept) != 1:
        return partial(np.seterr, **errors)
    ((variable, state),) = kept
    return partial(variable.set, state)


#: Makes NumPy ignore errors in the context of the caller, for as long as that lasts; or report
#: them, as it does unless told otherwise.
ignore_errors = treating(Context(), all="ignore")
report_errors = treating(Context(), divide="warn", over="warn", under="ignore", invalid="warn")


def prepared_context_run() -> Callable[..., Any]:
    """Return what calls a function as `with_fp_errors_ignored` does, in a context prepared once.

    It is for runs of nothing but kernels, one after another: the function does not see the context
    variables of its caller, and the context cannot be entered twice at once.
    """
    context = Context()
    context.run(ignore_errors)
    return context.run


Owner = TypeVar("Owner")
Value = TypeVar("Value")


class cached_attribute(Generic[Owner, Value]):
    """A property that is computed when first asked for; its result is kept as an attribute of the
    object, where it is found from then on.

    `functools.cached_property` of Python 3.11 holds one lock for all objects while it computes; in
    the child of a fork, if another thread held it, it would never be given back.
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
        # Not by `owner.__dict__`: once it was asked for, CPython looks every attribute of the
        # object up in it, and calls of programs take 4 % longer. Frozen classes allow this too.
        object.__setattr__(owner, self._name, value)
        return value


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

    `operations[i]` is (index of the operation, first step, one past its last step); steps before
    the first bring the inputs into the arrays that operations read;
    `arrays` are the compute arrays by value, for hooks; `staging_nbytes` what the executor holds
    apart from the spaces because a form had to change. An executor that runs a program as a whole
    has no `operations`; then `one_by_one` binds the same program operation by operation.
    `written`: by value, the steps that bring it from its array to where it belongs.
    """

    steps: tuple[Thunk, ...]
    operations: tuple[tuple[int, int, int], ...]
    arrays: dict[int, Array]
    staging_nbytes: int
    one_by_one: Callable[[], BoundProgram] | None = None
    written: Mapping[int, tuple[Thunk, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ProgramBytes:
    """Bytes of the host's memory that running a program takes beside the spaces.

    `kept`: once it is prepared (constants in their compute type, staging, what ONNX Runtime
    rearranges); `bound`: each time it is bound to addresses; `values`: values inside it, where
    programs of one device take the same bytes in turn; `kernels`: what one kernel has at a time.
    `staged`: the part of `kept` that each thread has for itself. `largest` names the operation
    whose kernel takes most.
    """

    kept: int
    bound: int
    values: int
    kernels: int
    largest: str
    staged: int = 0

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

    def on_thread(self, workspace: Workspace) -> PreparedProgram:
        """The same program, to be bound to steps that run on a thread of their own, whose workspace
        this is, beside others: asked only where the executor `supports_threads`.

        It shares with this one nothing that a run changes. Its steps call nothing of Stitch's, and
        see no context variables of the caller's. Itself, where bindings have nothing in common.
        """
        return self


class Executor(ABC):
    """Computes operation lists; final classes are registered by name in `executors`."""

    name: str
    computes: bool = True
    #: Whether its programs may run beside each other: then all have a form `on_thread`.
    supports_threads: bool = False
    #: The table by which it chooses who computes what; None where it has no choice.
    prices: PriceTable | None = None

    @abstractmethod
    def prepare(
        self, program: Program, machine: MachineShape, workspace: Workspace | None = None
    ) -> PreparedProgram:
        """Make a program ready; raises `CompileError` for operators it cannot run.

        `workspace` is the device's; a program that is given none has its own.
        """

    def prepare_alone(self, program: Program, machine: MachineShape) -> PreparedProgram:
        """A program made ready by this executor's own kernels wherever there are some, whatever
        they cost: for those who measure them."""
        return self.prepare(program, machine)

    def check(self, program: Program, machine: MachineShape) -> None:
        """Raise `CompileError` for operations that this executor cannot run; asked at load."""
        self.check_foreign(program)

    def takes_foreign(self) -> bool:
        """Whether it gives foreign operators to ONNX Runtime."""
        return False

    def check_foreign(self, program: Program) -> None:
        """Raise `CompileError` for foreign operators where this executor does not take them."""
        found = program.foreign_operations()
        if found and not self.takes_foreign():
            listed = ", ".join(dict.fromkeys(operation.title for operation in found))
            raise CompileError(
                f"the executor {self.name!r} cannot run {listed}: Stitch does not define "
                f"{'it' if ',' not in listed else 'them'}, so only ONNX Runtime computes "
                f"{'it' if ',' not in listed else 'them'}",
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
        """What running a program takes of the host's memory, at most; see `host_bytes`."""

    def link_terms(self, programs: Sequence[Program]) -> LinkTerms:
        """Whether these programs, linked into one, give the same bits, and when that pays.

        An executor that says nothing promises nothing.
        """
        return LinkTerms(f"the executor {self.name!r} does not promise equal bits")


def checked_threads(threads: int) -> int:
    """A number of threads for an executor; raises `UsageError` for fewer than one."""
    if threads < 1:
        raise UsageError("an executor needs at least one thread", got=str(threads))
    return threads


# Host functions


class FunctionCall(ABC):
    """One call of a function, which runs once or never."""

    __slots__ = ()

    @abstractmethod
    def run(self, arrays: tuple[Array, ...]) -> None:
        """Call it on its inputs (read-only) and outputs; raises what the function raises."""

    @abstractmethod
    def stop(self, why: str) -> None:
        """It will not run, or did not come to its end; `why`: for who waits for what it gives."""

    @property
    @abstractmethod
    def is_cancelled(self) -> str | None:
        """Why it cannot run, where something that it is given was never made."""


class CallBox:
    """Holds the call that the next run of some steps makes; empty between runs."""

    __slots__ = ("call",)

    def __init__(self) -> None:
        self.call: FunctionCall | None = None


class CallKernel(PreparedProgram):
    """A function of the caller's, as recordings know it; `box` holds the call of a run."""

    def __init__(self, inputs: Sequence[TensorDesc], outputs: Sequence[TensorDesc]) -> None:
        self.inputs, self.outputs, self.box = inputs, outputs, CallBox()

    def bind(
        self, inputs: tuple[Array, ...], outputs: tuple[Array, ...], scratch: Array | None
    ) -> BoundProgram:
        """One step, which calls with arrays over these bytes."""
        read = [as_read_only(_dense(*one)) for one in zip(inputs, self.inputs, strict=True)]
        left = [_dense(*one) for one in zip(outputs, self.outputs, strict=True)]
        return BoundProgram((partial(call_in_turn, self.box, *read, *left),), (), {}, 0)


def call_in_turn(box: CallBox, *arrays: Array) -> None:
    """Make the call whose turn it is, with NumPy's errors reported as it does by default."""
    call, box.call = box.call, None
    assert call is not None, "each run is given its calls"
    # Kernels ignore them; to a function they are reported as NumPy does unless told otherwise.
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
    """Checks programs and lets plans run without touching a byte."""

    name = "null"
    computes = False

    def prepare(
        self, program: Program, machine: MachineShape, workspace: Workspace | None = None
    ) -> PreparedProgram:
        """Nothing to make ready."""
        return self

    def host_bytes(self, program: Program) -> ProgramBytes:
        """Nothing: nothing is computed."""
        return ProgramBytes(0, 0, 0, 0, "")

    def link_terms(self, programs: Sequence[Program]) -> LinkTerms:
        """Nothing is computed: nothing differs, and nothing is gained."""
        return LinkTerms()

    def bind(
        self, inputs: tuple[Array, ...], outputs: tuple[Array, ...], scratch: Array | None
    ) -> BoundProgram:
        """No steps."""
        return BoundProgram((), (), {}, 0)
