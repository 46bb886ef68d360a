"""IREE: a module per program in one context, for this CPU, without threads (`local-sync`).

Weights are constants of the modules, so that the compiler may pack them; values between modules
stay on its device, and the input lies there before.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from iree import compiler, runtime

from peer_ways.cases import Absent, Case, NotAvailableError, Way

DATA_TILING = "--iree-dispatch-creation-data-tiling"
FLAGS = (
    "--iree-llvmcpu-target-cpu=host",
    "--iree-opt-level=O3",
    # Twice and more what is usual: some products of 64x256 values need a little more.
    "--iree-llvmcpu-stack-allocation-limit=131072",
)


def make_way(case: Case, name: str, flags: Sequence[str]) -> Way:
    """All functions, one after the other, compiled with these flags.

    Raises `NotAvailableError` with the first line of the compiler's error.
    """
    binaries, names = [], []
    for i, program in enumerate(case.programs):
        text, dialect, function = program.mlir(f"program{i}")
        names.append(function)
        try:
            binaries.append(
                compiler.compile_str(
                    text,
                    input_type=dialect,
                    target_backends=["llvm-cpu"],
                    extra_args=[*FLAGS, *flags],
                )
            )
        except compiler.CompilerToolError as error:
            found = [line for line in str(error).splitlines() if "error:" in line]
            raise NotAvailableError(f"program {i}: {(found or [str(error)])[0][:200]}") from error
    config = runtime.Config("local-sync")
    context = runtime.SystemContext(config=config)
    context.add_vm_modules([runtime.VmModule.copy_buffer(context.instance, b) for b in binaries])
    functions = [context.modules[f"program{i}"][function] for i, function in enumerate(names)]

    def run(x: Any) -> Any:
        for function in functions:
            x = function(x)
        return x

    given = runtime.asdevicearray(config.device, case.x)
    return Way(name, run, given, lambda found: found.to_host())


def make_ways(case: Case, stack: ExitStack) -> list[Way | Absent]:
    """With rows as they are and packed into tiles: which is faster hangs on the sizes."""
    made: list[Way | Absent] = []
    for name, flags in {
        "iree, a module each, one context": [],
        "iree, the same with data tiling": [DATA_TILING],
    }.items():
        try:
            made.append(make_way(case, name, flags))
        except NotAvailableError as error:
            made.append(Absent(name, str(error)))
    return made
