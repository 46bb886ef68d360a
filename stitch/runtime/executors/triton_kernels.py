"""Generated Triton kernels: consecutive elementwise operations as one kernel.

The text of a kernel has sizes and strides as numbers, so it depends on types and layouts only.
Operators that only move elements (the parts of a Split, a Transpose) become strides of what the
kernel loads. It computes in float32 and rounds each result to its type, as kernels one by one do.
"""

from __future__ import annotations

import hashlib
import importlib.util
import linecache
import math
import os
from collections.abc import Callable, Container, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import groupby
from typing import Any

import torch

from stitch.program import ABSENT, Array, DataType, Operation, Value
from stitch.runtime.executors.cuda_graphs import Launch
from stitch.runtime.executors.cuda_kernels import VIEWS, views_of

#: Expressions of operators on float32, by the names of their operands.
FUNCTIONS: Mapping[str, str] = {
    "Abs": "tl.abs({0})", "Add": "{0} + {1}", "Ceil": "tl.ceil({0})", "Cos": "tl.cos({0})",
    "Div": "tl.math.div_rn({0}, {1})", "Erf": "tl.math.erf({0})", "Exp": "tl.exp({0})",
    "Floor": "tl.floor({0})", "Log": "tl.log({0})",
    "Max": "tl.maximum({0}, {1}, propagate_nan=tl.PropagateNan.ALL)",
    "Min": "tl.minimum({0}, {1}, propagate_nan=tl.PropagateNan.ALL)",
    "Mul": "{0} * {1}", "Neg": "-1.0 * {0}", "Reciprocal": "tl.math.div_rn(1.0, {0})",
    "Relu": "tl.maximum({0}, 0.0, propagate_nan=tl.PropagateNan.ALL)",
    "Sigmoid": "tl.math.div_rn(1.0, 1.0 + tl.exp(-{0}))",
    "Sin": "tl.sin({0})", "Sqrt": "tl.math.sqrt_rn({0})", "Sub": "{0} - {1}",
    "Tanh": "tanh({0})",
}  # fmt: skip
#: Those whose result is a condition, and those on conditions.
COMPARISONS: Mapping[str, str] = {
    "Equal": "{0} == {1}", "Greater": "{0} > {1}", "GreaterOrEqual": "{0} >= {1}",
    "Less": "{0} < {1}", "LessOrEqual": "{0} <= {1}",
}  # fmt: skip
LOGIC: Mapping[str, str] = {
    "And": "{0} & {1}", "Not": "{0} == 0", "Or": "{0} | {1}", "Xor": "{0} ^ {1}",
}  # fmt: skip
SELECTION = {"Where": "tl.where({0}, {1}, {2})"}
#: Those that only move elements.
MOVES = frozenset(op for _, op in VIEWS) | {"Expand"}
TYPES: Mapping[DataType, str] = {
    DataType.FLOAT32: "{0}",
    DataType.FLOAT16: "{0}.to(tl.float16).to(tl.float32)",
    DataType.BFLOAT16: "as_bfloat16({0})",
    DataType.BOOL: "{0}",
}
#: Operations and lines of a kernel at most: its text is written recursively.
MOST_OPERATIONS, MOST_LINES = 64, 512
#: Elements of a program of a kernel, and those of a kernel from which a program has more.
BLOCK, LARGE_BLOCK, LARGE = 256, 1024, 1 << 18
#: Of Triton: a product and a sum are rounded each, as by kernels one by one.
OPTIONS: Mapping[str, Any] = {"enable_fp_fusion": False}
HEADER = """\
@triton.jit
def tanh(x):
    size = tl.abs(x)
    power = tl.exp(-2.0 * size)
    far = tl.math.div_rn(1.0 - power, 1.0 + power)
    square = x * x
    near = x * (1.0 + square * (-0.33333334 + square * (0.13333334 + square * (
        -0.053968254 + square * 0.021869488))))
    return tl.where(size < 0.25, near, tl.where(x < 0.0, -far, far))


@triton.jit
def as_bfloat16(x):
    bits = x.to(tl.int32, bitcast=True)
    bits = (bits + 32767 + ((bits >> 16) & 1)) & -65536
    return tl.where(x == x, bits.to(tl.float32, bitcast=True), x)


"""

#: What moves of elements make of a value: expanded to a shape, or the result that a move makes.
View = tuple[tuple[int, ...] | int, ...]


def can_run(device: torch.device) -> bool:
    """Whether Triton compiles for a device: a card, or the processor by Triton's interpreter."""
    if importlib.util.find_spec("triton") is None:
        return False
    is_interpreted = device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1"
    return device.type == "cuda" or is_interpreted


@cache
def compiled(text: str) -> Any:
    """Return the kernel of a text; Triton reads the lines of its functions."""
    import triton
    import triton.language as tl

    name = f"<stitch kernel {hashlib.sha256(text.encode()).hexdigest()[:16]}>"
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    inside: dict[str, Any] = {"triton": triton, "tl": tl, "__name__": "stitch_kernel"}
    exec(compile(text, name, "exec"), inside)
    return inside["kernel"]


def is_member(operation: Operation, values: Sequence[Value]) -> bool:
    """Whether an operation can be part of a kernel, by its operator and types."""
    moves = operation.op in MOVES
    read = operation.inputs[:1] if moves else operation.inputs
    touched = [values[v].type for v in (*read, *operation.outputs) if v != ABSENT]
    if operation.domain or ABSENT in (*operation.outputs, *operation.inputs[:1]):
        return False
    if any(kind.data_type not in TYPES or 0 in kind.shape for kind in touched):
        return False
    kinds = [values[v].type.data_type is DataType.BOOL for v in operation.inputs if v != ABSENT]
    match operation.op:
        case "Where":
            return kinds[0] and kinds[1] is kinds[2]
        case "Max" | "Min" if len(kinds) != 2:
            return False
        case op if op in LOGIC:
            return all(kinds)
        case op if op in FUNCTIONS or op in COMPARISONS or op == "Clip":
            return not any(kinds)
    return moves or operation.op == "Cast"


def runs_of(
    operations: Sequence[Operation], values: Sequence[Value], apart: Container[int] = ()
) -> dict[int, int]:
    """Return the consecutive operations that one kernel or a few compute, first to end; not
    those `apart`."""
    return runs(
        operations,
        lambda index: index not in apart and is_member(operations[index], values),
        lambda some: len(some) > 1 and any(o.op not in MOVES for o in some),
    )


def runs(
    operations: Sequence[Operation], joins: Callable[[int], bool],
    is_worth: Callable[[Sequence[Operation]], bool],
) -> dict[int, int]:  # fmt: skip
    """Return the consecutive operations that join, first to end, where they are worth a kernel."""
    found: dict[int, int] = {}
    for has_joined, group in groupby(range(len(operations)), joins):
        numbers = [*group] if has_joined else []
        for first in numbers[::MOST_OPERATIONS]:
            end = min(first + MOST_OPERATIONS, numbers[-1] + 1)
            if is_worth(operations[first:end]):
                found[first] = end
    return found


@dataclass
class KernelWriter:
    """Writes a kernel that computes values of one shape.

    Attributes:
        values: All values.
        makers: By value, the operation of the kernel that computes it, and its attributes.
        known: Constants.
        read: Returns the tensor of a value that the kernel loads.
    """

    values: Sequence[Value]
    makers: Mapping[int, tuple[Operation, Mapping[str, Any]]]
    known: Mapping[int, Array]
    read: Callable[[int], torch.Tensor]
    loads: list[torch.Tensor] = field(default_factory=list)
    stores: list[tuple[str, torch.Tensor]] = field(default_factory=list)
    _lines: list[str] = field(default_factory=list)
    _names: dict[tuple[int, View], str] = field(default_factory=dict)
    _loaded: dict[Hashable, str] = field(default_factory=dict)

    def name(self, value: int, view: View = ()) -> str:
        """Return the variable of a value, or of a view of it; write what computes it."""
        key = value, view
        if key not in self._names:
            self._names[key] = self._written(value, view)
        return self._names[key]

    def store(self, value: int, target: torch.Tensor) -> None:
        """Store a value in a tensor."""
        self.stores.append((self.name(value), target))

    def _written(self, value: int, view: View) -> str:
        if value not in self.makers:
            tensor = self._seen(self.read(value), view)
            key = tensor.data_ptr(), tensor.dtype, tensor.stride()
            if key not in self._loaded:
                self._loaded[key] = f"x{len(self.loads)}"
                self.loads.append(tensor)
            return self._loaded[key]
        operation = self.makers[value][0]
        if operation.op in MOVES:
            return self.name(operation.inputs[0], (value, *view))
        shape = self.values[value].type.shape
        names = [
            self.name(v, (shape, *view) if self._shape(v) != shape else view)
            for v in operation.inputs
            if v != ABSENT
        ]
        kind = self.values[value].type.data_type
        return self._line(TYPES[kind].format(f"({self._expression(operation, names, kind)})"))

    def _line(self, text: str) -> str:
        """Write a variable, and return it."""
        if len(self._lines) == MOST_LINES:
            raise RuntimeError("the kernel is too long")
        self._lines.append(f"    v{len(self._lines)} = {text}\n")
        return f"v{len(self._lines) - 1}"

    def _shape(self, value: int) -> tuple[int, ...]:
        return self.values[value].type.shape

    def _seen(self, tensor: torch.Tensor, view: View) -> torch.Tensor:
        """Return a view of a tensor; raises `RuntimeError` if no strides express it."""
        for step in view:
            if isinstance(step, tuple):
                tensor = tensor.expand(step)
                continue
            operation, attributes = self.makers[step]
            if operation.op == "Expand":
                tensor = tensor.expand(self._shape(step))
                continue
            shapes = [self._shape(value) for value in operation.outputs]
            known = [self.known.get(value) for value in operation.inputs]
            views = views_of(operation.op, tensor, shapes, attributes, known)
            if views is None:
                raise RuntimeError("elements are not in a view")
            tensor = views[operation.outputs.index(step)]
        return tensor

    def _expression(self, operation: Operation, names: Sequence[str], kind: DataType) -> str:
        op = operation.op
        of_condition = self.values[operation.inputs[0]].type.data_type is DataType.BOOL
        if op == "Cast":
            if kind is DataType.BOOL:
                return names[0] if of_condition else f"{names[0]} != 0.0"
            return f"{names[0]}.to(tl.float32)" if of_condition else names[0]
        if op == "Clip":
            text, *bounds = names
            for function, operand in zip(("Max", "Min"), operation.inputs[1:], strict=False):
                if operand != ABSENT:
                    text = FUNCTIONS[function].format(text, bounds.pop(0))
            return text
        return {**FUNCTIONS, **COMPARISONS, **LOGIC, **SELECTION}[op].format(*names)

    def reads(self, target: torch.Tensor) -> bool:
        """Whether a tensor shares bytes with what the kernel loads."""
        return any(share_bytes(target, load) for load in self.loads)

    def allows(self, target: torch.Tensor) -> bool:
        """Whether a tensor may be written while the kernel reads: it shares no bytes with what the
        kernel loads, or each element is in the place of the one that it is computed of."""
        return all(
            not share_bytes(target, load)
            or (target.data_ptr() == load.data_ptr() and target.dtype is load.dtype
                and target.stride() == load.stride() and target.shape == load.shape)
            for load in self.loads
        )  # fmt: skip

    def text(self) -> str:
        """Return the kernel."""
        tensors = [*self.loads, *(target for _, target in self.stores)]
        shape, strides = merged_axes(tensors[-1].shape, [t.stride() for t in tensors])
        count = math.prod(shape)
        offsets = [offset_text(shape, each) for each in strides]
        most = [sum((n - 1) * s for n, s in zip(shape, each, strict=True)) for each in strides]
        if max(*most, count + LARGE_BLOCK) >= 1 << 31:
            raise RuntimeError("indices need 64 bits")
        pointers = [f"p{i}" for i in range(len(tensors))]
        lines = [
            HEADER, f"@triton.jit\ndef kernel({', '.join(pointers)}, BLOCK: tl.constexpr):\n",
            "    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)\n", f"    live = i < {count}\n",
        ]  # fmt: skip
        for number, (tensor, offset) in enumerate(zip(self.loads, offsets, strict=False)):
            kind = "{} != 0" if tensor.dtype is torch.bool else "{}.to(tl.float32)"
            loaded = f"tl.load(p{number} + {offset}, mask=live, other=0)"
            lines.append(f"    x{number} = {kind.format(loaded)}\n")
        lines += self._lines
        for number, (name, _) in enumerate(self.stores, len(self.loads)):
            pointer = f"p{number}"
            stored = f"{name}.to({pointer}.dtype.element_ty)"
            lines.append(f"    tl.store({pointer} + {offsets[number]}, {stored}, mask=live)\n")
        return "".join(lines)

    def launch(self) -> Launch:
        """Return the call of the kernel; on a card it is compiled now.

        Raises:
            RuntimeError: No kernel can compute it.
        """
        kernel, tensors = compiled(self.text()), [*self.loads, *(t for _, t in self.stores)]
        count = tensors[-1].numel()
        block = LARGE_BLOCK if count >= LARGE else BLOCK
        grid = (-(-count // block),)
        if tensors[-1].is_cuda:
            kernel.warmup(*tensors, BLOCK=block, **OPTIONS, grid=grid)
        return Launch(kernel[grid], *tensors, BLOCK=block, **OPTIONS)


def share_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether the bytes from a tensor's first to its last element meet those of another one."""
    return bool(one.data_ptr() < _end(other) and other.data_ptr() < _end(one))


def _end(tensor: torch.Tensor) -> int:
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    last = sum((size - 1) * stride for size, stride in steps) if tensor.numel() else -1
    return int(tensor.data_ptr() + (last + 1) * tensor.itemsize)


def merged_axes(
    shape: Sequence[int], strides: Sequence[Sequence[int]]
) -> tuple[list[int], list[list[int]]]:
    """Return a shape and strides with as few axes as possible.

    >>> merged_axes((2, 1, 3, 4), [(12, 12, 4, 1), (0, 0, 4, 1)])
    ([2, 12], [[12, 1], [0, 1]])
    """
    sizes, found = list[int](), [list[int]() for _ in strides]
    for axis, size in enumerate(shape):
        now = [each[axis] for each in strides]
        if size == 1:
            continue
        if sizes and all(kept[-1] == n * size for kept, n in zip(found, now, strict=True)):
            sizes[-1] *= size
            for kept in found:
                kept.pop()
        else:
            sizes.append(size)
        for kept, n in zip(found, now, strict=True):
            kept.append(n)
    return sizes, found


def offset_text(shape: Sequence[int], strides: Sequence[int]) -> str:
    """Return the offset of element `i` of a shape.

    >>> offset_text([2, 12], [0, 1]), offset_text([24], [1]), offset_text([2, 12], [16, 1])
    ('i % 12', 'i', '(i // 12) * 16 + i % 12')
    """
    terms, inner = [], 1
    for axis in reversed(range(len(shape))):
        index = "i" if inner == 1 else f"(i // {inner})"
        if axis:
            index = f"{index} % {shape[axis]}"
        if strides[axis]:
            bracketed = f"({index})" if " % " in index else index
            terms.append(index if strides[axis] == 1 else f"{bracketed} * {strides[axis]}")
        inner *= shape[axis]
    return " + ".join(reversed(terms)) or "i * 0"
