"""Opening a device: every option that a device takes, checked, in one place."""

from __future__ import annotations

from pathlib import Path

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
from stitch.report.reported_device import Device
from stitch.runtime import AGGREGATE, DEFAULT_WINDOW, Executor, PriceTable, make_executor

#: What a machine is named by.
MACHINE = either(TEXT, PATH, instance_of("a Machine", Machine))


@takes(
    machine=MACHINE,
    executor=either(TEXT, instance_of("an Executor", Executor)), threads=optional(WHOLE),
    window=WHOLE, debug=BOOL, strict_types=BOOL, max_memory=optional(either(WHOLE, TEXT)),
    spill=BOOL, aggregate=AGGREGATE, lanes=WHOLE,
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
    lanes: int = 1,
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
    `lanes`: on how many threads independent stretches of a plan run beside each
    other, where each takes 100 us at least by its counts; results and copies are those of one lane.
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
        spill=spill, aggregate=aggregate, lanes=lanes, prices=prices if threads is None else None,
    )  # fmt: skip
