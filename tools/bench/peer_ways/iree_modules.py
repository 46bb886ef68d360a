"""IREE: a module per program in one context, for this CPU, without threads (`local-sync`).

Weights are constants of the modules, so that the compiler may pack them; values between modules
stay on its device, and the input lies there before.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from iree import compiler, runtime

from peer_ways.chains import Case, Layer, Way
from stitch.program import Array

DATA_TILING = "--iree-dispatch-creation-data-tiling"


def constant(name: str, array: Array) -> tuple[str, str, str]:
    """A constant: its line, its resource, its type."""
    kind = f"tensor<{'x'.join(map(str, array.shape))}xf32>"
    line = f"    %{name} = arith.constant dense_resource<{name}> : {kind}"
    # A blob begins with its alignment, four bytes, little end first.
    return line, f'{name}: "0x04000000{array.tobytes().hex()}"', kind


def module_text(name: str, layers: Sequence[Layer], batch: int) -> str:
    """Matrix products that begin with the bias, and a maximum with zero, in linalg."""
    lines, blobs, value = [], [], "%x"
    wide = f"tensor<{batch}x{layers[0][0].shape[0]}xf32>"
    head = f"  func.func @main(%x: {wide}) -> tensor<{batch}x{layers[-1][1].size}xf32> {{"
    for i, (w, b) in enumerate(layers):
        (line_w, blob_w, kind_w), (line_b, blob_b, kind_b) = (
            constant(f"w{i}", w),
            constant(f"b{i}", b),
        )
        made = f"tensor<{batch}x{b.size}xf32>"
        blobs += [blob_w, blob_b]
        lines += [
            line_w,
            line_b,
            f"    %e{i} = tensor.empty() : {made}",
            f"    %c{i} = linalg.broadcast ins(%b{i} : {kind_b}) outs(%e{i} : {made}) "
            "dimensions = [0]",
            f"    %m{i} = linalg.matmul ins({value}, %w{i} : {wide}, {kind_w}) "
            f"outs(%c{i} : {made}) -> {made}",
            f"    %z{i} = arith.constant dense<0.0> : {made}",
            f"    %r{i} = arith.maximumf %m{i}, %z{i} : {made}",
        ]
        value, wide = f"%r{i}", made
    body = "\n".join(
        [f"module @{name} {{", head, *lines, f"    return {value} : {wide}", "  }", "}"]
    )
    return body + "\n{-# dialect_resources: { builtin: { " + ", ".join(blobs) + " } } #-}\n"


def make_way(case: Case, name: str, flags: Sequence[str]) -> Way:
    """Both functions, one after the other, compiled with these flags."""
    binaries = [
        compiler.compile_str(
            module_text(f"program{i}", layers, case.chain.batch),
            target_backends=["llvm-cpu"],
            extra_args=["--iree-llvmcpu-target-cpu=host", "--iree-opt-level=O3", *flags],
        )
        for i, layers in enumerate(case.programs)
    ]
    config = runtime.Config("local-sync")
    context = runtime.SystemContext(config=config)
    context.add_vm_modules([runtime.VmModule.copy_buffer(context.instance, b) for b in binaries])
    functions = [context.modules[f"program{i}"]["main"] for i in range(len(binaries))]

    def run(x: Any) -> Any:
        for function in functions:
            x = function(x)
        return x

    given = runtime.asdevicearray(config.device, case.x)
    return Way(name, run, given, lambda found: found.to_host())


def make_ways(case: Case, stack: ExitStack) -> list[Way]:
    """With rows as they are and packed into tiles: which is faster hangs on the sizes.

    Raises `CompilerToolError` with the compiler's text.
    """
    return [
        make_way(case, "iree, a module each, one context", []),
        make_way(case, "iree, the same with data tiling", [DATA_TILING]),
    ]
