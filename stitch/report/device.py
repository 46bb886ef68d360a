"""`open_device` and the public `Device`: the runtime's device with its reports."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from stitch.argument_kinds import (
    BOOL,
    MAPPING,
    PATH,
    TEXT,
    WHOLE,
    either,
    instance_of,
    optional,
    takes,
)
from stitch.errors import UsageError
from stitch.files import write_files
from stitch.html_table import html_table
from stitch.machine import Machine, load_machine
from stitch.on_demand import late_import
from stitch.option_values import DEFAULT_WINDOW, INDUCTOR, is_torch_device
from stitch.runtime import (
    Executor,
    LoadedProgram,
    PreparedGraph,
    PriceTable,
    RuntimeDevice,
    make_executor,
)
from stitch.tasks import TaskGraph
from stitch.ttb import Binary

DEVICE = instance_of("a device", RuntimeDevice)
#: Programs that `loaded` keeps on a device.
MAX_SUBMITTED = 64
#: What `dir(device)` lists: the methods and attributes that the reference documents.
PUBLIC_NAMES = (
    "account", "allowed_nbytes", "call", "close", "computes", "deallocate", "empty", "events",
    "executor", "explain", "footprint_of", "has_layout", "history", "hooks", "inter_op_threads",
    "is_closed", "load", "machine", "memory", "memory_report", "memory_use", "memory_views",
    "peak_nbytes", "prepare", "prices", "report", "statistics", "strict_types", "submit", "tensor",
    "to_layout", "wait", "watch_memory", "why_single_thread", "window", "write",
)  # fmt: skip


class Device(RuntimeDevice):
    """An open simulated machine: loads programs, runs them and reports on them; see `open_device`.

    It is safe to use from several threads. `dir(device)` lists the public names.

    Attributes:
        machine: The description of the machine.
        history: Counts of runs, copies and bytes since the device was opened.
        events: Subscription to events: plans, copies, reads, memory.
        hooks: Functions that are called before and after each operation.
        is_closed: Whether `close` was called.
        strict_types: Whether a link may not change the floating storage type.
        inter_op_threads: Number of threads for independent sections of a plan.
    """

    def __init__(self, machine: str | Machine, **options: Any) -> None:
        super().__init__(machine, **options)
        self._submitted: dict[tuple[int, int | str], tuple[Binary, LoadedProgram]] = {}

    def __dir__(self) -> list[str]:
        return [*PUBLIC_NAMES]

    def _let_go(self) -> None:
        self._submitted.clear()
        super()._let_go()

    def loaded(self, source: Any, program: int | str) -> LoadedProgram:
        """Return a program of a binary, loaded once; the last `MAX_SUBMITTED` stay loaded."""
        if isinstance(source, LoadedProgram):
            return source
        binary = getattr(source, "binary", source)
        if not isinstance(binary, Binary):
            return self.load(binary, program)
        key = (id(binary), program)
        entry = self._submitted.get(key)
        if entry is None:
            with self.lock:
                # Another thread may have loaded it since.
                entry = self._submitted.get(key) or (binary, self._load(binary, program))
        with self.queue_lock:
            # The entry holds the binary, so its id is not reused. The last used one comes last.
            self._submitted.pop(key, None)
            self._submitted[key] = entry
            while len(self._submitted) > MAX_SUBMITTED:
                del self._submitted[next(iter(self._submitted))]
        return entry[1]

    @takes(graph=instance_of("a task graph", TaskGraph))
    def prepare(self, graph: TaskGraph, *, takes: Collection[str] = ()) -> PreparedGraph:
        """Prepare a task graph as a callable of its inputs, by position or name.

        Loads its programs. A run consumes tensors that are passed to the inputs `takes`. Raises
        `TaskError` that lists all defects of the graph, `UsageError` for programs of another
        device, and the errors of `load`.
        """
        self.check_open()
        return PreparedGraph(self, graph.table(), takes)

    def explain(self) -> str:
        """Describe every copy so far, with bytes, simulated time and reason."""
        with late_import():
            from stitch.report.explanation import explain

        return explain(self)

    @takes(path=PATH, curves=optional(MAPPING))
    def report(
        self, path: str | Path, *, curves: Mapping[str, Sequence[float]] | None = None
    ) -> None:
        """Write a page about all work so far, for a browser, as `stitch-run --report` does.

        Runs the queue. The history does not have the order in which runs of several plans took
        turns: a `Recorder` does.

        Args:
            path: The page.
            curves: Values by training step to show beside it, such as `{"loss": losses}`.

        Raises:
            StitchError: The file cannot be written.
        """
        with late_import():
            from stitch.report.page import device_page

        write_files({path: device_page(self, curves or {})})

    def _repr_html_(self) -> str:
        if self.is_closed:
            return html_table(f"{self.machine.name}: closed", (), ())
        with self.lock:  # A display must not run the queue.
            total = self.history.account().total
        rows = [
            (space.value, f"{use.used_nbytes:,} B", f"{use.largest_hole:,} B",
             f"{self.machine.shape.space(space).capacity:,} B")
            for space, use in self.memory_use().items()
        ]  # fmt: skip
        return html_table(
            f"{self.machine.name}: {total.programs} program runs, {total.copies} copies, "
            f"{total.nbytes:,} B, {total.seconds * 1e6:.1f} us simulated; "
            "report('run.html') writes a page",
            ("space, per bank", "in use", "largest hole", "capacity"), rows,
        )  # fmt: skip

    def memory_report(self) -> str:
        """Describe the contents of each space in bytes per bank, and the host memory."""
        with late_import():
            from stitch.report.explanation import memory_report

        return memory_report(self)

    def memory_views(self) -> dict[str, dict[str, Any]]:
        """Return the memory report as plain data, with tt-metal's keys."""
        with late_import():
            from stitch.report.explanation import memory_views

        return memory_views(self)


# Opening.

MACHINE = either(TEXT, PATH, instance_of("a Machine", Machine))


@takes(
    machine=MACHINE,
    executor=optional(either(TEXT, instance_of("an Executor", Executor))), threads=optional(WHOLE),
    window=WHOLE, debug=BOOL, strict_types=BOOL, max_memory=optional(either(WHOLE, TEXT)),
    spill=BOOL, inter_op_threads=WHOLE,
    prices=optional(either(TEXT, PATH, instance_of("a PriceTable", PriceTable))), tf32=BOOL,
)  # fmt: skip
def open_device(
    machine: str | Path | Machine = "wormhole_n150",
    *,
    executor: str | Executor | None = None,
    threads: int | None = None,
    window: int = DEFAULT_WINDOW,
    debug: bool = False,
    strict_types: bool = False,
    max_memory: int | str | None = None,
    spill: bool = True,
    inter_op_threads: int = 1,
    prices: str | Path | PriceTable | None = None,
    tf32: bool = False,
) -> Device:
    """Open a simulated machine, or a real device of PyTorch.

    Args:
        machine: Its name, the path of its description, or a `Machine`; or a device: `cuda:0`, or
            `torch:cpu`, PyTorch on the processor, which runs the same code. DRAM lies in its
            memory, PyTorch's kernels compute there, and it loads what is compiled for `cuda`.
        executor: How operations are computed: `numpy` (default); `onnxruntime`; `auto`, each
            operation by the faster of the two; `torch`, `auto` with PyTorch's kernels; `null`, plan
            only; or `cuda:0` or `torch:cpu`, for the spaces of any machine in the memory of that
            device. A device has its own: leave it out, or `cuda-inductor`: inductor compiles
            operations together (also `cuda:0-inductor`, as a device or an executor).
        threads: Threads of ONNX Runtime for one operation (default 1).
        window: Tasks queued before they run; 1 runs each call immediately.
        debug: Overwrite freed bytes, and check padding.
        strict_types: Refuse links that change the floating-point storage type.
        max_memory: Limit of the host memory of all devices of the process, in bytes or as `"2GiB"`
            (default: 80 % of the memory of this computer, or of its control group). Plans and
            tensors beyond it raise `OutOfMemoryError` before anything is allocated.
        spill: Evict tensors to the host and constants to their file if DRAM is full; without, raise
            `OutOfMemoryError`.
        inter_op_threads: Threads for independent sections of a plan, each estimated at 100 us or
            more; results and copies do not depend on it.
        prices: The cost table by which `auto` and `torch` select a kernel for each operation: a
            processor family (`x86_avx512_intel`), or the path of a file of `tools/prices` (default:
            the family nearest to this processor). The last digits of results depend on it.
        tf32: Let a card round operands of convolutions and matrix products to TF32 (10 bits).
            Without, Stitch's are computed in float32, whatever PyTorch's flags say.
    """
    if isinstance(machine, str) and is_torch_device(machine):
        if executor not in (None, f"cuda{INDUCTOR}"):
            raise UsageError(
                f"the device {machine!r} computes by PyTorch's kernels",
                got=f"executor={executor!r}",
                remedy=f"leave the executor out, or take 'cuda{INDUCTOR}'",
            )  # fmt: skip
        executor = machine if executor is None else machine.removesuffix(INDUCTOR) + INDUCTOR
        machine = "cuda"
    made = executor = "numpy" if executor is None else executor
    if threads is not None or tf32:
        made = make_executor(executor, threads, prices=prices, tf32=tf32)
    return Device(
        load_machine(machine),
        executor=made,
        window=window, debug=debug, strict_types=strict_types, max_memory=max_memory,
        spill=spill, inter_op_threads=inter_op_threads,
        prices=prices if made is executor else None,
    )  # fmt: skip
