"""Random operations computed by every executor, and where one differs from the NumPy kernels.

Run as a module it does so in a process of its own and names each operation before it is computed:
`python -m tests.support.operators.draws_by_executors ZEROS FIRST COUNT OPERATOR...`, where ZEROS is
the share of lengths that are 0, or `original`: then ONNX's reference evaluator and ONNX Runtime
compute each node as it is written. So an operation that ends the process is known.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from stitch.errors import CompileError, TaskError
from stitch.ops import OpDef, evaluate
from stitch.program import Array, DataType
from stitch.runtime.executors import Executor, Workspace, make_executor
from stitch.runtime.executors.host.numpy_executor import PreparedKernels
from stitch.runtime.executors.onnx.session import tried
from tests.support.executors.named_prices import ATEN
from tests.support.operators.against_onnx import onnx_model, reference, tolerance
from tests.support.operators.drawn_operands import operands_of
from tests.support.operators.drawn_operations import draw_row, drawn_operators
from tests.support.operators.one_operation import MACHINE, Binding, OneOperation, Row, one_operation

#: Executors beside `numpy`; `auto` and `torch` choose among kernels.
OTHERS = ("onnxruntime", "auto", "torch", "torch:cpu")
#: How far apart sound results may lie, in tolerances of one operation.
SLACK = 10
#: Operators over which ONNX Runtime (1.32) ends the process; it is never given them.
ENDS_THE_PROCESS = ("DFT",)


@dataclass(frozen=True, slots=True)
class Compared:
    """What came of one random operation: by how many others it was computed, and the differences
    of these from the NumPy kernels, as texts."""

    computed: int
    differences: tuple[str, ...]


def magnification(row: Row, operands: Sequence[Array]) -> float:
    """By how much a normalization magnifies a rounding of its operand: |x| over the least
    deviation; 0 for other operators."""
    normalizations = ("GroupNormalization", "InstanceNormalization", "LayerNormalization")
    if row.op not in normalizations or not operands[0].size:
        return 0.0
    x = operands[0].astype(np.float64)
    axis = int(row.attributes.get("axis", -1)) if row.op == "LayerNormalization" else 2
    if row.op == "GroupNormalization":
        x = x.reshape(len(x), row.attributes["num_groups"], -1)
    variance = x.var(tuple(range(axis % x.ndim, x.ndim)))
    return float(abs(x).max() / np.sqrt(variance + row.attributes.get("epsilon", 1e-5)).min())


def difference(ours: Sequence[Array], theirs: Sequence[Array], magnified: float = 0.0) -> str:
    """In what the second results differ beyond rounding; empty where they do not.

    `magnified`: by how much the operation magnifies roundings of its operand.
    """
    if len(ours) != len(theirs):
        return f"{len(theirs)} results, expected {len(ours)}"
    for mine, other in zip(ours, theirs, strict=True):
        if (mine.shape, mine.dtype) != (other.shape, other.dtype):
            return f"{other.dtype}{other.shape}, expected {mine.dtype}{mine.shape}"
        if not mine.size:
            continue
        if not DataType.from_dtype(mine.dtype).is_floating:
            if not np.array_equal(mine, other):
                return f"{int((mine != other).sum())} of {mine.size} elements"
            continue
        a, b = mine.astype(np.float64), other.astype(np.float64)
        finite = np.isfinite(a) & np.isfinite(b)
        if not (finite | (a == b) | (np.isnan(a) & np.isnan(b))).all():
            return "infinities or NaN"
        a, b = a[finite], b[finite]
        relative, absolute = tolerance(DataType.from_dtype(mine.dtype))
        most = max(abs(a).max(), abs(b).max()) if a.size else 0.0
        whole = 2 * relative + SLACK * np.finfo(np.float32).eps * magnified
        if (abs(a - b) > SLACK * (relative * abs(a) + absolute) + whole * most).any():
            return f"up to {abs(a - b).max():.3g} of {most:.3g}"
    return ""


def is_open(seed: int) -> bool:
    """Whether constants are inputs, where compiling does not need them: in two of three draws."""
    return seed % 3 != 0


def drawn_operation(definition: OpDef, seed: int, zeros: float) -> tuple[Row, OneOperation]:
    """The operation of a seed, as a program."""
    row = draw_row(definition, seed, zeros)
    return row, one_operation(row, seed, open_=is_open(seed))


def compare(definition: OpDef, seed: int, zeros: float, executors: dict[str, Executor]) -> Compared:
    """Compute one random operation by every executor; a refusal has to name the operator."""
    row, one = drawn_operation(definition, seed, zeros)
    usual = Binding(executors["numpy"].prepare(one.program, MACHINE), one.program)
    wanted = usual.outcome(one.operands)
    if isinstance(wanted, TaskError):
        raise AssertionError(f"the NumPy kernel refuses {row}: {wanted}")
    computed, found, magnified = 0, list[str](), magnification(row, one.operands)
    for name in OTHERS:
        try:
            prepared = executors[name].prepare(one.program, MACHINE)
        except CompileError as refusal:
            if row.op not in str(refusal):
                found.append(f"{name} refuses without a name: {refusal}")
            continue
        found.append(_differing(name, prepared, one, wanted, magnified))
        computed += 1
    if ATEN.price(one.program, one.operation, 1, 1) < math.inf:
        kernels = PreparedKernels(one.program, MACHINE, Workspace(), (), ATEN, [0])
        found.append(_differing("PyTorch's kernel", kernels, one, wanted, magnified))
    return Compared(computed, tuple(f"{text}: {row}, seed {seed}" for text in found if text))


def _differing(
    name: str, prepared: object, one: OneOperation, wanted: Sequence[Array], magnified: float
) -> str:
    """Of the second of two runs: the first may have left something behind."""
    binding = Binding(prepared, one.program)  # type: ignore[arg-type]
    binding.outcome(one.operands)
    made = binding.outcome(one.operands)
    if isinstance(made, TaskError):
        return f"{name} stops: {made.what}"
    text = difference(wanted, made, magnified)
    return f"{name}: {text}" if text else ""


def every_executor() -> dict[str, Executor]:
    """The executors that are compared, by name."""
    return {name: make_executor(name) for name in ("numpy", *OTHERS)}


def compare_originals(definition: OpDef, seed: int) -> Iterator[tuple[str, str]]:
    """Whose result of the node as it is written differs from the NumPy kernel's, and in what:
    `reference`, `onnxruntime`, or `both` where these two agree."""
    row = draw_row(definition, seed)
    operands = operands_of(row.specs, seed)
    ours = evaluate(row.op, operands, attributes=row.attributes, outputs=row.outputs)
    attributes = {k: v for k, v in row.attributes.items() if v != ()}
    theirs: dict[str, list[Array]] = {}
    with suppress(Exception):  # Each refuses, or fails at, a part of what is drawn.
        theirs["reference"] = reference(row.op, operands, attributes, row.outputs)
    model = onnx_model(
        row.op, operands, [not isinstance(s, str) for s in row.specs], attributes, row.outputs
    )
    feeds = {
        f"x{i}": a
        for i, a in enumerate(operands)
        if a is not None and isinstance(row.specs[i], str)
    }
    if definition.name not in ENDS_THE_PROCESS:
        with suppress(Exception):
            theirs["onnxruntime"] = tried(model.SerializeToString(), **feeds)
    found = {}
    for who, results in theirs.items():
        cast = [
            np.asarray(r).astype(o.dtype) if o.dtype.kind not in "iub" else np.asarray(r)
            for r, o in zip(results, ours, strict=True)
        ]
        theirs[who] = cast
        text = difference(ours, cast)
        if text:
            found[who] = f"{text}: {row}, seed {seed}"
    if len(found) == 2 and not difference(theirs["reference"], theirs["onnxruntime"]):
        yield "both", found["reference"]
    else:
        yield from found.items()


def in_own_process(zeros: float | str, first: int, count: int, names: Sequence[str]) -> list[str]:
    """The differences of some operators, by a process that an operation may end."""
    command = [sys.executable, "-m", "tests.support.operators.draws_by_executors"]
    arguments = [str(zeros), str(first), str(count), *names]
    ran = subprocess.run(
        [*command, *arguments], cwd=Path(__file__).parents[3], capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    lines = [json.loads(line) for line in ran.stdout.splitlines()]
    found = [line["difference"] for line in lines if "difference" in line]
    if ran.returncode:
        started = [line["operation"] for line in lines if "operation" in line]
        found.append(f"exit {ran.returncode} after {started[-1:]}: {ran.stderr[-500:]}")
    return found


def _lines(zeros: str, first: int, count: int, names: Sequence[str]) -> Iterator[dict[str, str]]:
    executors = every_executor()
    for definition in drawn_operators():
        for seed in range(first, first + count) if definition.name in names else ():
            yield {"operation": f"{definition.name}, seed {seed}, {zeros}"}
            if zeros != "original":
                for text in compare(definition, seed, float(zeros), executors).differences:
                    yield {"difference": text}
            elif not definition.domain:
                for who, text in compare_originals(definition, seed):
                    yield {"difference": f"{definition.name} {who} {text}"}


if __name__ == "__main__":
    _, share, start, many, *wanted = sys.argv
    for line in _lines(share, int(start), int(many), wanted):
        print(json.dumps(line), flush=True)
