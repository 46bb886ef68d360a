"""Elementwise graphs through generated Triton kernels, beside NumPy's executor.

A script, because Triton's interpreter is chosen when Triton is imported:
`TRITON_INTERPRET=1 python -m tests.support.triton_cases FILE` runs all and writes the kernels;
`python -m tests.support.triton_cases --compile FILE` compiles them for a card that is not there.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import stitch
from stitch.graph import ComputationGraph, ComputationGraphBuilder
from stitch.program import Array, DataType
from stitch.runtime.executors import triton_kernels
from tests.support.run_seed import SEED
from tests.support.scan_cases import CASES, graph_of, inputs_of

TYPES = ("float32", "float16", "bfloat16")
#: Relative to the larger of the result and one.
TOLERANCES = {"float32": 2e-6, "float16": 2e-3, "bfloat16": 1.6e-2}
SHAPES = (((3, 5, 7), (3, 5, 7)), ((33, 7), (7,)), ((5, 1, 3), (4, 1)), ((257,), ()), ((), (1, 1)))
SPECIAL = (0.0, -0.0, np.inf, -np.inf, np.nan, 1.0, -1.0, 0.25, -0.25, 1e-4, 80.0, -80.0)
BINARY = ("Add", "Div", "Max", "Min", "Mul", "Sub")
#: NumPy reports sines of infinities, and the compiler leaves copies out.
TAME = ("Cos", "Sin")
UNARY = sorted({*triton_kernels.FUNCTIONS} - {*BINARY, "Identity"})
RANDOM_GRAPHS, ROUNDS, COMPILED = 60, 3, 40
#: The texts of all kernels, with the types of their tensors.
texts: dict[str, list[str]] = {}


def numbers(rng: np.random.Generator, shape: Sequence[int], *, special: bool) -> Array:
    found = rng.standard_normal(tuple(shape)).astype(np.float32)
    if special and found.size > len(SPECIAL):
        found.reshape(-1)[: len(SPECIAL)] = SPECIAL
    return found


def check(name: str, graph: ComputationGraph, given: Sequence[Array], tolerance: float) -> None:
    """Compare both executors; the first must have used a kernel."""
    before = counted[0]
    model, results = stitch.compile(graph, target="cuda", schedule="rounds"), []
    for device in devices:
        found = device.load(model)(*given)
        results.append(
            [t.numpy().copy() for t in (found if isinstance(found, tuple) else (found,))]
        )
    assert counted[0] > before, f"{name}: no kernel"
    for ours, theirs in zip(*results, strict=True):
        assert ours.dtype == theirs.dtype and ours.shape == theirs.shape, name
        if ours.dtype == bool:
            np.testing.assert_array_equal(ours, theirs, name)
            continue
        a, b = ours.astype(np.float64), theirs.astype(np.float64)
        finite = np.isfinite(b)
        np.testing.assert_array_equal(a[~finite], b[~finite], name)
        error = np.abs(a[finite] - b[finite]) / np.maximum(1, np.abs(b[finite]))
        assert error.max(initial=0) <= tolerance, f"{name}: {error.max()}"


#: Name, graph, inputs, tolerance.
Case = tuple[str, ComputationGraph, list[Array], float]


def result_of(b: ComputationGraphBuilder, op: str, x: Any, y: Any, kind: str) -> Any:
    """An operator's result, and an operation behind it, which makes it a group."""
    match op:
        case "Cast":
            narrow = "float16" if kind == "bfloat16" else "bfloat16"
            return -b.cast(b.cast(x, narrow), kind)
        case "Clip":
            return -b.op(op, x, *(b.cast(np.float32(bound), kind) for bound in (-0.5, 0.7)))
        case "Where":
            return -b.op(op, x > y, x, y)
        case "Not":
            return b.cast(b.op(op, x > 0), kind)
        case _ if op in triton_kernels.LOGIC:
            return b.op("Not", b.op(op, x > 0, y > 0.5))
        case _ if op in triton_kernels.COMPARISONS:
            return b.op("Not", b.op(op, x, y))
    return -(b.op(op, x, y) if op in BINARY else b.op(op, x) * 2.0)


def single_cases(rng: np.random.Generator) -> Iterator[Case]:
    """Each operator in each type, with broadcasts."""
    conditions = (*triton_kernels.COMPARISONS, *triton_kernels.LOGIC)
    for kind in TYPES:
        for op in (*UNARY, *BINARY, *conditions, "Where", "Clip", "Cast"):
            for shapes in SHAPES:
                b = ComputationGraphBuilder(op)
                x, y = (b.input(f"i{i}", shape, kind) for i, shape in enumerate(shapes))
                b.output("z", result_of(b, op, x, y, kind))
                given = [numbers(rng, shape, special=op not in TAME) for shape in shapes]
                dtype = DataType(kind).dtype
                name = f"{op} {kind} {shapes}"
                yield name, b.build(), [g.astype(dtype) for g in given], TOLERANCES[kind]


def random_cases(rng: np.random.Generator) -> Iterator[Case]:
    """Random graphs: parts, transposes, broadcasts, products between, several results."""
    for number in range(RANDOM_GRAPHS):
        kind = TYPES[number % 3]
        rows, width = (int(n) for n in rng.integers(2, 9, 2))
        b = ComputationGraphBuilder(f"random{number}")
        shapes = (rows, 4 * width), (4 * width,), (width, width)
        given = [numbers(rng, shape, special=False) for shape in shapes]
        x, bias, weights = (b.input(f"i{i}", g.shape, kind) for i, g in enumerate(given))
        whole = x + bias
        values: list[Any] = [whole[:, i * width : (i + 1) * width] for i in range(4)]
        for _ in range(int(rng.integers(4, 14))):
            one, other = (values[int(rng.integers(len(values)))] for _ in range(2))
            match int(rng.integers(8)):
                case 0:
                    made = np.tanh(one) * other
                case 1:
                    made = b.op("Sigmoid", one) - other
                case 2:
                    made = b.op("Max", one, other)
                case 3:
                    made = b.op("Where", one > other, one, -other)
                case 4:
                    turned = b.reshape(b.transpose(one * 0.5, (1, 0)), (width, rows))
                    made = b.transpose(turned, (1, 0)) - 1.0
                case 5:
                    made = one + other[:, :1]
                case 6:
                    made = np.tanh(b.op("MatMul", one, weights) * 0.25)
                case _:
                    made = b.cast(one > 0, kind) * other
            values.append(made)
        for i, value in enumerate(values[-int(rng.integers(1, 4)) :]):
            b.output(f"o{i}", -value + 1.0)
        dtype = DataType(kind).dtype
        # Sums in another order are rounded to other numbers of a narrow type.
        tolerance = {"float32": 1e-5, "float16": 2e-2, "bfloat16": 1.5e-1}[kind]
        yield f"random {number}", b.build(), [g.astype(dtype) for g in given], tolerance


def scan_cases() -> Iterator[Case]:
    """Loops whose rounds have elementwise operations beside products."""
    for case in CASES:
        if case.name in ("lstm", "weights", "power", "weighted", "nested", "bfloat16"):
            graph, given = graph_of(case, ROUNDS), inputs_of(case, ROUNDS)
            yield f"scan {case.name}", graph, given, case.tolerance


def run(file: Path) -> int:
    writers: Any = triton_kernels.KernelWriter
    launch = writers.launch

    def counting(writer: Any) -> Any:
        counted[0] += 1
        found = launch(writer)
        kinds = [t.dtype for t in (*writer.loads, *(t for _, t in writer.stores))]
        texts[writer.text()] = [str(kind).removeprefix("torch.") for kind in kinds]
        return found

    writers.launch = counting
    rng = np.random.default_rng(SEED)
    done = 0
    for case in (*single_cases(rng), *random_cases(rng), *scan_cases()):
        try:
            check(*case)
        except Exception:
            print(f"{case[0]}, seed {SEED}")
            raise
        done += 1
    file.write_text(json.dumps(texts))
    print(f"{done} cases, {len(texts)} kernels")
    return 0


def compile_all(file: Path) -> int:
    """Compile a part of the kernels for compute capability 9.0."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = {"float32": "*fp32", "float16": "*fp16", "bfloat16": "*bf16", "bool": "*i1"}
    kept: dict[str, list[str]] = json.loads(file.read_text())
    rng = np.random.default_rng(SEED)
    longest = sorted(kept, key=len)[-5:]
    chosen = {*longest, *rng.choice(sorted(kept), min(COMPILED, len(kept)), replace=False).tolist()}
    for text in chosen:
        signature = {f"p{i}": names[kind] for i, kind in enumerate(kept[text])}
        source = ASTSource(
            triton_kernels.compiled(text), signature={**signature, "BLOCK": "constexpr"},
            constexprs={"BLOCK": triton_kernels.BLOCK},
        )  # fmt: skip
        made = triton.compile(source, target=GPUTarget("cuda", 90, 32))
        assert made.asm["cubin"][:4] == b"\x7fELF" and ".target sm_90" in made.asm["ptx"]
    print(f"{len(chosen)} kernels compiled")
    return 0


counted = [0]
devices: list[stitch.Device] = []

if __name__ == "__main__":
    if sys.argv[1] == "--compile":
        sys.exit(compile_all(Path(sys.argv[2])))
    devices += [stitch.open_device("torch:cpu"), stitch.open_device("cuda", executor="numpy")]
    sys.exit(run(Path(sys.argv[1])))
