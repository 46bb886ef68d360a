"""Graphs and nests through generated Triton kernels, beside NumPy's executor.

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
from stitch import fractal
from stitch.fractal import FractalTensor
from stitch.graph import ComputationGraph, ComputationGraphBuilder
from stitch.program import Array, DataType, is_scan
from stitch.runtime.executors import triton_kernels
from stitch.runtime.executors.triton_tiles import STAGES, TileWriter
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
NEST_TOLERANCES = {"float32": 1e-5, "float16": 2e-2, "bfloat16": 1.5e-1}
#: Of a program, on cards of compute capability 9.0.
SHARED_NBYTES = 227 << 10
#: Nests of each kind and type, and how many of their kernels on tiles are compiled (10 s each).
NESTS, TILES_COMPILED = 4, 4
#: The texts of all kernels, with the types of their tensors; those on tiles have their rows too.
texts: dict[str, list[str]] = {}


def numbers(rng: np.random.Generator, shape: Sequence[int], *, special: bool) -> Array:
    found = rng.standard_normal(tuple(shape)).astype(np.float32)
    if special and found.size > len(SPECIAL):
        found.reshape(-1)[: len(SPECIAL)] = SPECIAL
    return found


def check(name: str, graph: Any, given: Sequence[Array], tolerance: float) -> None:
    """Compare both executors; the first must have used a kernel, and for a nest one on tiles."""
    before, model, results = counted[:], graph, []
    if isinstance(graph, ComputationGraph):
        model = stitch.compile(graph, target="cuda", schedule="rounds")
    for device in devices:
        found = device.load(model)(*given)
        results.append(
            [t.numpy().copy() for t in (found if isinstance(found, tuple) else (found,))]
        )
    used = [after - each for after, each in zip(counted, before, strict=True)]
    if not isinstance(graph, ComputationGraph):
        # A loop of one round is none.
        has_loop = any(is_scan(operation) for operation in graph.program(0).operations)
        used = used[1:] if has_loop else used
    assert any(used), f"{name}: no kernel"
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


#: Name, graph or compiled nest, inputs, tolerance.
Case = tuple[str, Any, list[Array], float]


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


def exact_cases() -> Iterator[Case]:
    """The signs of zeros, by their reciprocals; and a product with a sum."""
    b = ComputationGraphBuilder("sum")
    x = b.input("x", (4,), "float32")
    b.output("y", x * x + x)
    yield "sum", b.build(), [np.ones(4, np.float32)], 0.0
    for op in ("Ceil", "Floor", "Neg", "Sqrt", "Tanh"):
        b = ComputationGraphBuilder(op)
        x = b.input("x", (4,), "float32")
        b.output("y", b.op("Reciprocal", b.op(op, x)))
        given = [np.array([0.0, -0.0, 0.25, 4.0], np.float32)]
        yield f"zeros of {op}", b.build(), given, TOLERANCES["float32"]


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


def nest_cases(rng: np.random.Generator) -> Iterator[Case]:
    """Folds and loops over nests: attention with and without masks, recurrent cells, statistics."""
    for number in range(NESTS):
        for kind in TYPES:
            for made in (attention, masked, recurrent, folded, statistics):
                network, arrays = made(rng, DataType(kind).dtype, number)
                if number % 4 == 3:
                    arrays[0].reshape(-1)[:4] = np.inf, np.nan, -np.inf, 60.0
                nests = [FractalTensor(list(a) if a.ndim < 5 else [*map(list, a)]) for a in arrays]
                with np.errstate(all="ignore"):
                    nest = fractal.compile(network, *nests, target="cuda")
                yield f"{made.__name__} {number} {kind}", nest.binary, arrays, NEST_TOLERANCES[kind]


def sizes(rng: np.random.Generator, *most: int) -> list[int]:
    return [int(rng.integers(1, each + 1)) for each in most]


def sums_of(dtype: Any) -> Any:
    """The type of products of a type."""
    return np.dtype(np.float32) if dtype == DataType("bfloat16").dtype else dtype


def drawn(rng: np.random.Generator, dtype: Any, *shape: int) -> Array:
    return np.asarray(rng.standard_normal(shape).astype(dtype))


def attention(rng: np.random.Generator, dtype: Any, number: int) -> tuple[Any, list[Array]]:
    """A map over blocks of queries, in it a fold over one or an odd number of blocks of keys."""
    blocks, many, keys, width = (1, 3, 5)[number % 3], *sizes(rng, 3, 1, 1)
    rows, keys, width = (int(rng.integers(2, 20)) for _ in range(3))
    wide = sums_of(dtype)
    start = np.full((rows, 1), -6e4, wide), *(np.zeros((rows, n), wide) for n in (1, width))

    def step(state: Any, key: Any, value: Any, *, query: Any) -> Any:
        largest, total, weighed = state
        scores = query @ key.T * np.full((1, 1), 0.3, wide)
        new = np.maximum(largest, scores.max(axis=1, keepdims=True))
        before, powers = np.exp(largest - new), np.exp(scores - new)
        total = total * before + powers.sum(axis=1, keepdims=True)
        return new, total, weighed * before + powers.astype(dtype) @ value

    def block(query: Any, *, keys: Any, values: Any) -> Any:
        _, total, weighed = fractal.fold(step, fractal.zip(keys, values), start, query=query)
        return weighed / total

    arrays = [
        drawn(rng, dtype, many, rows, width), drawn(rng, dtype, blocks, keys, width),
        drawn(rng, dtype, blocks, keys, width),
    ]  # fmt: skip
    return lambda q, k, v: fractal.map(block, q, keys=k, values=v), arrays


def masked(rng: np.random.Generator, dtype: Any, number: int) -> tuple[Any, list[Array]]:
    """Attention of a block with masks, of which some hide all keys of a row."""
    blocks = (1, 3, 5)[number % 3]
    rows, keys, width = (int(rng.integers(2, 20)) for _ in range(3))
    query = drawn(rng, dtype, rows, width)
    wide = sums_of(dtype)
    start = np.full((rows, 1), -np.inf, wide), *(np.zeros((rows, n), wide) for n in (1, width))

    def step(state: Any, key: Any, value: Any, mask: Any) -> Any:
        largest, total, weighed = state
        scores = query @ key.T + mask
        new = np.maximum(largest, scores.max(axis=1, keepdims=True))
        before, powers = np.exp(largest - new), np.exp(scores - new)
        total = total * before + powers.sum(axis=1, keepdims=True)
        return new, total, weighed * before + powers.astype(dtype) @ value

    def network(keys: Any, values: Any, masks: Any) -> Any:
        return fractal.fold(step, fractal.zip(keys, values, masks), start)

    hidden = np.where(rng.random((blocks, rows, keys)) < 0.3, -np.inf, 0.0).astype(wide)
    hidden[:, :1] = -np.inf if number % 2 else 0.0
    arrays = [
        drawn(rng, dtype, blocks, keys, width),
        drawn(rng, dtype, blocks, keys, width),
        hidden,
    ]
    return network, arrays


def recurrent(rng: np.random.Generator, dtype: Any, number: int) -> tuple[Any, list[Array]]:
    """A scan whose rounds have two products with parts of their columns."""
    length, rows = sizes(rng, 4, 20)
    hidden = int(rng.integers(2, 80))
    w, u = (drawn(rng, dtype, hidden, 2 * hidden) * np.full((1, 1), 0.2, dtype) for _ in range(2))

    def step(state: Any, x: Any) -> Any:
        both = (x @ w + state @ u).astype(dtype)
        new = np.tanh(both[:, :hidden]) * np.tanh(both[:, hidden:]) + state
        return new * np.full((1, 1), 0.5, dtype)

    start = np.zeros((rows, hidden), dtype)
    return lambda xs: fractal.scan(step, xs, start), [drawn(rng, dtype, length + 1, rows, hidden)]


def folded(rng: np.random.Generator, dtype: Any, number: int) -> tuple[Any, list[Array]]:
    """A fold whose state is multiplied by a matrix in each round."""
    length, rows = sizes(rng, 5, 40)
    hidden = int(rng.integers(2, 40))
    u = drawn(rng, dtype, hidden, hidden) * np.full((1, 1), 0.2, dtype)

    def step(state: Any, x: Any) -> Any:
        return np.tanh((state @ u).astype(dtype) + x)

    start = drawn(rng, dtype, rows, hidden)
    return lambda xs: fractal.fold(step, xs, start), [drawn(rng, dtype, length, rows, hidden)]


def statistics(rng: np.random.Generator, dtype: Any, number: int) -> tuple[Any, list[Array]]:
    """Extremes, sums and means of rows."""
    length, rows, columns = sizes(rng, 5, 40, 70)

    def step(state: Any, x: Any) -> Any:
        least, most, total = state
        scaled = x - x.mean(axis=1, keepdims=True)
        least = np.minimum(least, scaled.min(axis=1, keepdims=True))
        most = np.maximum(most, scaled.max(axis=1, keepdims=True))
        return least, most, total + x.sum(axis=1, keepdims=True) * most

    start = tuple(np.full((rows, 1), number, dtype) for number in (9, -9, 0))
    arrays = [drawn(rng, dtype, length, rows, columns)]
    return lambda xs: fractal.fold(step, xs, start), arrays


def noted(writers: Any, number: int) -> None:
    """Count and keep the kernels of a class of writers."""
    launch = writers.launch

    def counting(writer: Any) -> Any:
        counted[number] += 1
        found = launch(writer)
        kinds = [t.dtype for t in (*writer.loads, *(t for _, t in writer.stores))]
        texts[writer.text()] = [str(kind).removeprefix("torch.") for kind in kinds]
        if number:
            texts[writer.text()].append(str(found.keywords["ROWS"]))
        return found

    writers.launch = counting


def run(file: Path) -> int:
    noted(triton_kernels.KernelWriter, 0)
    noted(TileWriter, 1)
    rng = np.random.default_rng(SEED)
    done = 0
    elements = *single_cases(rng), *exact_cases(), *random_cases(rng)
    for case in (*elements, *scan_cases(), *nest_cases(rng)):
        try:
            check(*case)
        except Exception:
            print(f"{case[0]}, seed {SEED}")
            raise
        done += 1
    file.write_text(json.dumps(texts))
    print(f"{done} cases, {len(texts)} kernels, {counted[1]} launches on tiles")
    return 0


def compile_all(file: Path) -> int:
    """Compile a part of the kernels for compute capability 9.0."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = {"float32": "*fp32", "float16": "*fp16", "bfloat16": "*bf16", "bool": "*i1"}
    kept: dict[str, list[str]] = json.loads(file.read_text())
    rng = np.random.default_rng(SEED)
    tiles = sorted(text for text in kept if "ROWS: tl.constexpr" in text)
    flat = sorted(kept.keys() - {*tiles}, key=len)
    chosen = {*flat[-5:], *rng.choice(flat, min(COMPILED, len(flat)), replace=False).tolist()}
    # Those with a loop and products have most in shared memory.
    chosen.update(sorted(tiles, key=lambda text: text.count("tl.dot"))[-1:])
    chosen.update(rng.choice(tiles, TILES_COMPILED, replace=False).tolist())
    sums = [text for text in flat if "v0 = (x0 * x0)\n    v1 = (v0 + x0)\n    tl.store" in text]
    assert sums
    chosen.update(sums)
    for text in chosen:
        kinds = [kind for kind in kept[text] if kind in names]
        fixed: dict[str, Any] = {"BLOCK": triton_kernels.BLOCK}
        if text in tiles:
            fixed = {"ROWS": int(kept[text][-1]), "BF16": triton.language.bfloat16}
        signature = {f"p{i}": names[kind] for i, kind in enumerate(kinds)}
        signature |= dict.fromkeys(fixed, "constexpr")
        source = ASTSource(triton_kernels.compiled(text), signature=signature, constexprs=fixed)
        options = {**triton_kernels.OPTIONS, **({"num_stages": STAGES} if text in tiles else {})}
        made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
        assert text not in sums or "fma." not in made.asm["ptx"], "a product is not rounded"
        assert made.asm["cubin"][:4] == b"\x7fELF" and ".target sm_90" in made.asm["ptx"]
        assert made.metadata.shared <= SHARED_NBYTES
    print(f"{len(chosen)} kernels compiled")
    return 0


counted = [0, 0]
devices: list[stitch.Device] = []

if __name__ == "__main__":
    if sys.argv[1] == "--compile":
        sys.exit(compile_all(Path(sys.argv[2])))
    devices += [stitch.open_device("torch:cpu"), stitch.open_device("cuda", executor="numpy")]
    sys.exit(run(Path(sys.argv[1])))
