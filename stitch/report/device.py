"""`open_device` and the public `Device`: the runtime's device with its reports."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from stitch.argument_kinds import (
    BOOL,
    PATH,
    TEXT,
    WHOLE,
    either,
    instance_of,
    optional,
    takes,
)
from stitch.machine import Machine, load_machine
from stitch.on_demand import late_import
from stitch.runtime import (
    AGGREGATE,
    DEFAULT_WINDOW,
    Executor,
    LoadedProgram,
    PreparedGraph,
    PriceTable,
    RuntimeDevice,
    make_executor,
)
from stitch.tasks import TaskGraph
from stitch.ttb import Binary

#: What listeners take.
DEVICE = instance_of("a device", RuntimeDevice)
#: Programs that `submit` keeps loaded on a device.
MAX_SUBMITTED = 64
#: What `dir(device)` lists: the methods and attributes that the reference documents.
PUBLIC_NAMES = (
    "account", "allowed_nbytes", "call", "close", "computes", "deallocate", "empty", "events",
    "executor", "explain", "footprint_of", "has_layout", "history", "hooks", "inter_op_threads",
    "is_closed", "load", "machine", "memory", "memory_report", "memory_use", "memory_views",
    "peak_nbytes", "prepare", "prices", "statistics", "strict_types", "submit", "tensor",
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
        """A program of a binary, loaded at most once: for callers that submit it over and over.

        The last `MAX_SUBMITTED` stay loaded until the device closes. Raises what `load` raises.
        """
        if isinstance(source, LoadedProgram):
            return source
        binary = getattr(source, "binary", source)
        if not isinstance(binary, Binary):
            return self.load(binary, program)
        key = (id(binary), program)
        entry = self._submitted.get(key)
        if entry is None:
            with self.lock:
                # Another thread may have loaded it meanwhile.
                entry = self._submitted.get(key) or (binary, self._load(binary, program))
        with self.queue_lock:
            # The entry holds the binary, so its id stays its own. The last used comes last.
            self._submitted.pop(key, None)
            self._submitted[key] = entry
            while len(self._submitted) > MAX_SUBMITTED:
                del self._submitted[next(iter(self._submitted))]
        return entry[1]

    def prepare(self, graph: TaskGraph) -> PreparedGraph:
        """A task graph as a callable: with arrays or tensors for its inputs, by position or name,
        it gives its outputs, ready.

        Programs that are not loaded here yet are. Raises `TaskError` with all that is wrong with
        the graph, `UsageError` for programs of another device, and what loading raises.
        """
        instance_of("a task graph", TaskGraph).check("device.prepare", "graph", graph)
        self.check_open()
        return PreparedGraph(self, graph.table())

    def explain(self) -> str:
        """Every copy so far, with bytes, simulated time and reason."""
        with late_import():
            from stitch.report.explanation import explain

        return explain(self)

    def memory_report(self) -> str:
        """What each space holds, in bytes per bank, and what the host's memory gave."""
        with late_import():
            from stitch.report.explanation import memory_report

        return memory_report(self)

    def memory_views(self) -> dict[str, dict[str, Any]]:
        """The memory report as data, with tt-metal's keys."""
        with late_import():
            from stitch.report.explanation import memory_views

        return memory_views(self)


# Opening.

#: What a machine is named by.
MACHINE = either(TEXT, PATH, instance_of("a Machine", Machine))


@takes(
    machine=MACHINE,
    executor=either(TEXT, instance_of("an Executor", Executor)), threads=optional(WHOLE),
    window=WHOLE, debug=BOOL, strict_types=BOOL, max_memory=optional(either(WHOLE, TEXT)),
    spill=BOOL, aggregate=AGGREGATE, inter_op_threads=WHOLE,
    prices=optional(either(TEXT, PATH, instance_of("a PriceTable", PriceTable))),
)  # fmt: skip
def open_device(
    machine: str | Path | Machine = "wormhole_n150",
    *,
    executor: str | Executor = "numpy",
    threads: int | None = None,
    window: int = DEFAULT_WINDOW,
    debug: bool = False,
    strict_types: bool = False,
    max_memory: int | str | None = None,
    spill: bool = True,
    aggregate: str = "auto",
    inter_op_threads: int = 1,
    prices: str | Path | PriceTable | None = None,
) -> Device:
    """Open a simulated machine by name, YAML path or description.

    `executor`: who computes: `numpy`, `onnxruntime`, `auto` (either, by operation), `torch`
    (`auto` with PyTorch's kernels too), `null` (nobody); `threads`: on how many threads ONNX
    Runtime computes one operation (default 1). `window`: tasks queued before they run; 1 runs
    each call at once. `debug`: poison freed bytes and guard padding. `strict_types`: links may
    not change the floating storage type. `max_memory`: bytes (or a text, `"2GiB"`) of the
    host's memory that all devices of the process may take together when this one asks for more
    (default: 80 % of the machine's, or of its control group's); over it, plans and tensors
    raise `OutOfMemoryError` before anything of them is allocated. `spill`: tensors for which
    DRAM has no room wait on the host, and constants in their file; without, that is an
    `OutOfMemoryError`. `aggregate`: whether programs that feed each other are linked and run as
    one: `auto` (where the executor promises the same bits, once the same calls have come back
    so often that it pays: after 100 times at most), `never`, or `always` (at once, also where
    sums may differ). Results of which somebody still has a handle are kept; `explain` says what
    was linked.
    `inter_op_threads`: number of threads for independent sections of a plan of at least 100 us each
    by their counts; results and copies do not depend on it.
    `prices`: the table by which `auto` and `torch` choose who computes an operation: the name of a
    family of processors (`x86_avx512_intel`), or the path of a file that `tools/prices` wrote
    (default: the family nearest to this processor). The choice, and with it the last digits of
    results, follows from it alone; name one to have the same on every machine.
    """
    return Device(
        load_machine(machine),
        executor=executor
        if threads is None
        else make_executor(
            executor, threads, fuse_across_seams=aggregate == "always", prices=prices
        ),
        window=window, debug=debug, strict_types=strict_types, max_memory=max_memory,
        spill=spill, aggregate=aggregate, inter_op_threads=inter_op_threads,
        prices=prices if threads is None else None,
    )  # fmt: skip
