"""Generated Triton kernels on tiles: products, reductions of rows and folds join elementwise ones.

A value is a matrix here: its last axis are columns, all others are rows. A program of a kernel
computes a block of rows, and all columns or, where no operation needs them at once, a block of
these. Operations that move elements become strides, also of a product's operands: each gate of an
LSTM is a product with its own columns of the weights. The rounds of a scan are a loop inside of the
kernel, with the states in registers; what its sequences are computed of is computed in the loop.
"""

from __future__ import annotations

import math
import re
from collections.abc import Container, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from stitch.ops import attributes_of
from stitch.program import ABSENT, Array, Body, DataType, Operation, Program, ScanForm, is_scan
from stitch.runtime.executors.cuda_graphs import Launch
from stitch.runtime.executors.torch_bytes import uploaded
from stitch.runtime.executors.triton_kernels import (
    HEADER,
    MOST_LINES,
    MOST_OPERATIONS,
    MOVES,
    OPTIONS,
    TYPES,
    KernelWriter,
    View,
    compiled,
    is_member,
    merged_axes,
    offset_text,
    runs,
    share_bytes,
)

#: Of a product in a loop's round that joins a kernel, the most terms of a sum; and of those whose
#: left operand is computed in the kernel, since all of the right one is in shared memory.
MOST_TERMS = {DataType.FLOAT32: 256, DataType.FLOAT16: 512, DataType.BFLOAT16: 512}
MOST_WHOLE = 256
#: Elements of a tile, and rows, columns and terms of blocks.
MOST_ELEMENTS, ROWS, FEW_ROWS, COLUMNS, TERMS, LEAST = 1 << 14, 64, 32, 32, 32, 16
#: Loads of a loop that are in flight: more would need more shared memory.
STAGES = 2
#: Reductions of rows: what columns that are not there are, and the expression.
REDUCTIONS: Mapping[str, tuple[str, str]] = {
    "ReduceMax": ("-float('inf')", "tl.reduce({0}, 1, largest, keep_dims=True)"),
    "ReduceMean": ("0.0", "tl.math.div_rn(tl.sum({0}, 1, keep_dims=True), {1}.0)"),
    "ReduceMin": ("float('inf')", "tl.reduce({0}, 1, least, keep_dims=True)"),
    "ReduceSum": ("0.0", "tl.sum({0}, 1, keep_dims=True)"),
}
FUNCTIONS = """\
@triton.jit
def largest(x, y):
    return tl.maximum(x, y, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def least(x, y):
    return tl.minimum(x, y, propagate_nan=tl.PropagateNan.ALL)


"""
#: Types of a product's operands.
NARROWED = {DataType.FLOAT32: "tl.float32", DataType.FLOAT16: "tl.float16",
            DataType.BFLOAT16: "BF16"}  # fmt: skip
#: What takes a round's element of a sequence.
ELEMENT = "Element"


def tile_runs(
    program: Program, known: Mapping[int, Array], apart: Container[int], *, in_round: bool
) -> dict[int, int]:
    """Return the consecutive operations that become a kernel on tiles, first to end.

    They are products with what is elementwise around them in a round of a loop, or a fold with what
    its sequences are computed of and what is computed of its result; none of them is `apart`.
    """
    operations = program.operations
    if in_round:

        def joins(index: int) -> bool:
            one = operations[index]
            is_product = _is_product(program, one, MOST_TERMS)
            return index not in apart and (is_product or is_member(one, program.values))

        def has_both(some: Sequence[Operation]) -> bool:
            ops = {operation.op for operation in some}
            return "MatMul" in ops and bool(ops - {"MatMul"} - MOVES)

        return runs(operations, joins, has_both)
    found = dict[int, int]()
    for index, operation in enumerate(operations):
        if index not in apart and _is_fold(program, operation):
            span = _around(program, known, index, apart, max(found.values(), default=0))
            found[span.start] = span.stop
    return found


def _is_product(program: Any, operation: Operation, most: Mapping[DataType, int]) -> bool:
    if operation.domain or operation.op != "MatMul":
        return False
    kinds = [program.values[v].type for v in (*operation.inputs, *operation.outputs)]
    one, other, result = kinds
    is_known = one.data_type is other.data_type and result.data_type in NARROWED
    are_matrices = all(len(k.shape) > 1 and 0 not in k.shape for k in kinds)
    return is_known and are_matrices and one.shape[-1] <= most.get(one.data_type, 0)


def _is_tile(program: Any, known: Mapping[int, Array], operation: Operation) -> bool:
    """Whether an operation is elementwise, a product or a reduction of rows."""
    if not operation.domain and operation.op in REDUCTIONS:
        kind = program.values[operation.inputs[0]].type
        axes: Any = operation.attributes.get("axes")
        if len(operation.inputs) > 1:
            data = known.get(operation.inputs[1])
            axes = None if data is None else data.ravel().tolist()
        is_last = axes is not None and list(axes) in ([-1], [len(kind.shape) - 1])
        is_kept = operation.attributes.get("keepdims", 1) == 1
        is_float = kind.data_type in NARROWED and 0 not in kind.shape
        return bool(is_last and is_kept and is_float)
    every = dict.fromkeys(NARROWED, MOST_WHOLE)
    return is_member(operation, program.values) or _is_product(program, operation, every)


def _is_fold(program: Program, operation: Operation) -> bool:
    """Whether an operation is a scan without collected results, with sums in its rounds."""
    if not is_scan(operation):
        return False
    form, body = ScanForm.of(operation), program.bodies[operation.body]
    known = {c.value: c.data for c in body.constants}
    types = [body.values[v].type for v in body.inputs[: form.states] if v != ABSENT]
    return (
        not form.has_condition and not form.collected and form.count > 0
        and ABSENT not in operation.inputs and ABSENT not in body.inputs
        and all(kind.data_type in NARROWED and 0 not in kind.shape for kind in types)
        and all(_is_tile(body, known, each) for each in body.operations)
        and any(o.op == "MatMul" or o.op in REDUCTIONS for o in body.operations)
        and len(body.operations) <= MOST_OPERATIONS
    )  # fmt: skip


def _around(
    program: Program, known: Mapping[int, Array], index: int, apart: Container[int], least: int
) -> range:
    """Return a fold with the operations before that are for it only, and those after it."""
    operations, readers = program.operations, program.readers()
    returned = {slot.value for slot in program.outputs}
    first, end = index, index + 1
    while end < len(operations) and end not in apart and is_member(operations[end], program.values):
        end += 1
    while first > least and first - 1 not in apart and end - first < MOST_OPERATIONS:
        one = operations[first - 1]
        if not _is_tile(program, known, one):
            break
        inside = {*range(first, end)}
        if any(v in returned or not readers.get(v, set()) <= inside for v in one.outputs):
            break
        first -= 1
    return range(first, end)


@dataclass(slots=True)
class _Rows:
    """Where the rows of a tile are in a value: row `text` of it, and its columns from `column` on.

    Attributes:
        step: A divisor of the numbers of rows at which a block may begin, for its rows to follow
            one another; 0: each.
        is_same: Whether row `i` of the tile is row `i` of the value, in a round of its own element.
    """

    text: str
    column: int
    width: int
    step: int
    is_same: bool


@dataclass
class TileWriter(KernelWriter):
    """Writes a kernel on tiles.

    Attributes:
        bodies: Those of scans.
        precision: Of float32 products: `ieee` or `tf32`.
        device: Where it runs.
    """

    bodies: Sequence[Body] = ()
    precision: str = "ieee"
    device: torch.device = field(default_factory=partial(torch.device, "cpu"))
    #: Rows of what is stored, and how many of them follow one another in each operand.
    _rows: int = 0
    _group: int = 0
    #: Columns of what is stored, if they are in blocks: no operation needs all at once.
    _split: int | None = None
    #: Lines before and in the loop, the names that its rounds change, and those of its states.
    _before: list[str] = field(default_factory=list)
    _inside: list[str] = field(default_factory=list)
    _varying: set[str] = field(default_factory=set)
    _states: dict[int, str] = field(default_factory=dict)
    _in_loop: bool = False
    _rounds: int = 1
    #: The operations that take elements forward and backward: one for all sequences.
    _elements: dict[Any, int] = field(default_factory=dict)
    #: The round whose elements `_seen` takes.
    _round: int = 0
    _constants: dict[int, torch.Tensor] = field(default_factory=dict)
    #: Sizes of tiles: columns, and terms of products.
    _widths: set[int] = field(default_factory=set)
    _terms: set[int] = field(default_factory=set)
    _most_rows: int = ROWS
    #: Loads of which a program reads other elements than those that it writes.
    _spread: list[torch.Tensor] = field(default_factory=list)
    _numbers: dict[Hashable, int] = field(default_factory=dict)

    # -- values ------------------------------------------------------------------------------------

    def name(self, value: int, view: View = ()) -> str:
        if not self._rows:
            *shape, columns = self._shape(value) or (1,)
            self._rows = self._group = math.prod(shape)
            needs_all = any(o.op in REDUCTIONS or is_scan(o) for o, _ in self.makers.values())
            self._split = None if needs_all else columns
        return super().name(value, view)

    def store(self, value: int, target: torch.Tensor) -> None:
        if self.makers[value][0].op == "MatMul":
            raise RuntimeError("a product alone is PyTorch's")
        super().store(value, target)

    def allows(self, target: torch.Tensor) -> bool:
        return super().allows(target) and not any(share_bytes(target, s) for s in self._spread)

    def _written(self, value: int, view: View) -> str:
        if value not in self.makers and value not in self._states:
            return self._load(*self._strided(self._source(value), view))
        operation = None if value in self._states else self.makers[value][0]
        if operation is not None and operation.op == ELEMENT:
            step = self._elements[operation.attributes["backward"]]
            return self.name(operation.inputs[0], (step, *view))
        element, is_moved = self._element_of(view), operation and operation.op in MOVES
        if view != element and not is_moved and self._is_tile(value, view):
            return self.name(value, element)
        if operation is None:
            if view:
                raise RuntimeError("rows are in another program")
            return self._states[value]
        if is_scan(operation):
            self._fold(operation)
            return self.name(value, view)
        if operation.op == "MatMul":
            return self._product(operation, value, view)
        if operation.op in REDUCTIONS:
            return self._reduced(operation, value, view)
        return super()._written(value, view)

    def _line(self, text: str, more: Sequence[str] = ()) -> str:
        """Write a variable, and lines with its name as `@`; where it changes in the loop, there."""
        name = f"v{len(self._lines) + len(self._before) + len(self._inside)}"
        if name == f"v{MOST_LINES}":
            raise RuntimeError("the kernel is too long")
        varies = not self._varying.isdisjoint(re.findall(r"\w+", " ".join((text, *more))))
        if self._in_loop and varies:
            self._varying.add(name)
        lines = self._lines if not self._in_loop else self._inside if varies else self._before
        margin = "        " if lines is self._inside else "    "
        made = [f"{margin}{each}\n".replace("@", name) for each in (f"@ = {text}", *more)]
        lines.append("".join(made))
        return name

    def _source(self, value: int) -> torch.Tensor:
        return self._constants[value] if value in self._constants else self.read(value)

    def _seen(self, tensor: torch.Tensor, view: View) -> torch.Tensor:
        for at, step in enumerate(view):
            if isinstance(step, int) and self.makers[step][0].op == ELEMENT:
                is_back = self.makers[step][0].attributes["backward"]
                row = self._rounds - 1 - self._round if is_back else self._round
                return self._seen(super()._seen(tensor, view[:at])[row], view[at + 1 :])
        return super()._seen(tensor, view)

    def _strided(self, tensor: torch.Tensor, view: View) -> tuple[torch.Tensor, int]:
        """Return a view, of the first round's elements, and how far the next round's are."""
        self._round = 0
        first = self._seen(tensor, view)
        if self._rounds == 1:
            return first, 0
        self._round = 1
        return first, self._seen(tensor, view).storage_offset() - first.storage_offset()

    def _element_of(self, view: View) -> View:
        """Return the part of a view that takes a round's element."""
        return tuple([s for s in view if isinstance(s, int) and self.makers[s][0].op == ELEMENT])

    def _columns(self, width: int) -> str:
        """Return the variable that numbers the columns of a tile."""
        if self._split and width != self._split:
            raise RuntimeError("columns are others")
        self._widths.add(self._size(width))
        return f"j{self._size(width)}"

    def _size(self, width: int) -> int:
        if width == 1:
            return 1
        return min(_padded(width), COLUMNS) if self._split else _padded(width)

    def _load(self, tensor: torch.Tensor, per_round: int) -> str:
        tensor = tensor if tensor.ndim else tensor.reshape(1)
        *shape, width = tensor.shape
        offset, masks = list[str](), list[str]()
        if any(n > 1 and s for n, s in zip(shape, tensor.stride(), strict=False)):
            if math.prod(shape) != self._rows:
                raise RuntimeError("rows are others")
            masks.append("live")
        if width > 1 and tensor.stride(-1):
            column = self._columns(width)
            offset.append(_times(column, tensor.stride(-1)))
            masks.append(f"({column} < {width})")
        text = self._pointer((tensor, per_round), shape, "i" if "live" in masks else "", offset)
        if not per_round:
            self._spread.pop()
        rest = f", mask={' & '.join(masks)}, other=0" if masks else ""
        kind = "{} != 0" if tensor.dtype is torch.bool else "{}.to(tl.float32)"
        return self._line(kind.format(f"tl.load({text}{rest})"))

    def _pointer(
        self, operand: tuple[torch.Tensor, int], sizes: Sequence[int], index: str,
        offsets: Sequence[str],
    ) -> str:  # fmt: skip
        """Return pointers into a tensor; an index numbers its first axes, of these sizes."""
        tensor, per_round = operand
        ends = zip(tensor.shape, tensor.stride(), strict=True)
        most = sum((size - 1) * stride for size, stride in ends) + abs(per_round) * self._rounds
        if max(most, self._rows) + (1 << 16) >= 1 << 31:
            raise RuntimeError("indices need 64 bits")
        merged, (strides,) = merged_axes(sizes, [tensor.stride()[: len(sizes)]])
        key = tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()
        if self._numbers.setdefault(key, len(self.loads)) == len(self.loads):
            self.loads.append(tensor)
        terms = [f"p{self._numbers[key]}", *[f"r * {per_round}"] * bool(per_round)]
        if index:
            terms.append(re.sub(r"\bi\b", index, offset_text(merged, strides)))
        self._spread.append(tensor)
        return " + ".join([*terms, *offsets])

    def _place(self, value: int, view: View) -> _Rows:
        """Return where the rows of a view of a value are that is computed here."""
        width = self._shape(value)[-1]
        whole = torch.empty(self._shape(value), device="meta")
        seen, per_round = self._strided(whole, view)
        *shape, taken = seen.shape or (0,)
        sizes, (strides,) = merged_axes(shape, [seen.stride()[:-1]])
        first, column = divmod(seen.storage_offset(), width)
        is_matrix = taken == 1 or seen.stride(-1) in (0, 1)
        taken = taken if seen.stride(-1) else 1
        is_matrix &= math.prod(shape) == self._rows and column + taken <= width
        is_matrix &= whole.numel() < 1 << 31
        if not is_matrix or any(n % width for n in (*strides, per_round)):
            raise RuntimeError("elements are not in rows")
        strides, per_round = [n // width for n in strides], per_round // width
        is_run = not strides or strides[-1] == 1
        step = math.gcd(*sizes[-1:], first, per_round, *strides[:-1]) if is_run else 1
        terms = [offset_text(sizes, strides), *[f"r * {per_round}"] * bool(per_round)]
        text = " + ".join([*terms, *[str(first)] * bool(first)])
        is_same = math.prod(sizes[1:]) == 1 and is_run and not first
        element = self._element_of(view)
        if element:
            outer, *inner = self._shape(value)[:-1]
            is_same &= outer == self._rounds and per_round == math.prod(inner)
        return _Rows(text, column, taken, step, is_same)

    def _is_tile(self, value: int, view: View) -> bool:
        """Whether a view of a value is the tile in which it is computed, or its one column."""
        try:
            rows = self._place(value, view)
        except RuntimeError:
            return False
        return rows.is_same and not rows.column and rows.width == self._shape(value)[-1]

    # -- operations --------------------------------------------------------------------------------

    def _rounded(self, value: int, text: str) -> str:
        return TYPES[self.values[value].type.data_type].format(f"({text})")

    def _reduced(self, operation: Operation, value: int, view: View) -> str:
        if not self._is_tile(value, view):
            raise RuntimeError("rows are in another program")
        x, width = self.name(operation.inputs[0], view), self._shape(operation.inputs[0])[-1]
        missing, text = REDUCTIONS[operation.op]
        there = f"tl.where({self._columns(width)} < {width}, {x}, {missing})" if width > 1 else x
        return self._line(self._rounded(value, text.format(there, width)))

    def _source_of(self, value: int, shape: Sequence[int]) -> tuple[int, View]:
        """Return of what an operand of a product is a view, before it was cast to float32."""
        seen: View = (tuple(shape),)
        while value in self.makers:
            operation = self.makers[value][0]
            if operation.op in (*MOVES, ELEMENT):
                seen = value, *seen
            elif operation.op != "Cast" or not self._is_widened(operation):
                break
            value = operation.inputs[0]
        return value, seen

    def _is_widened(self, operation: Operation) -> bool:
        kinds = [self.values[v].type.data_type for v in (*operation.inputs, *operation.outputs)]
        return kinds[0] in NARROWED and kinds[1] is DataType.FLOAT32

    def _product(self, operation: Operation, value: int, view: View) -> str:
        one, other = operation.inputs
        here = self.makers.keys() | self._states.keys()
        *batch, many, columns = self._shape(value)
        terms, rows = self._shape(one)[-1], self._place(value, view)
        left_source, left_view = self._source_of(one, (*batch, many, terms))
        source, right_view = self._source_of(other, (*batch, terms, columns))
        kinds = {self.values[v].type.data_type for v in (left_source, source)}
        kind = NARROWED[kinds.pop()] if len(kinds) == 1 else NARROWED[DataType.FLOAT32]
        if source in here or rows.width == 1:
            raise RuntimeError("the right operand of a product is computed here, or one column")
        column, size = self._columns(rows.width), _padded(terms)
        if self._split or kind == NARROWED[DataType.FLOAT32]:
            self._most_rows = FEW_ROWS  # More are too many registers.
        right = self._strided(self._source(source), right_view)
        if left_source not in here:
            left = self._strided(self._source(left_source), left_view)
            size = min(size, TERMS)
            inner = [_times(f"(k + k{size}[None, :])", left[0].stride(-1))]
            text = self._pointer(left, (*batch, many), f"({rows.text})", inner)
            a = f"tl.load({text}, mask=live & (k + k{size}[None, :] < {terms}), other=0)"
        else:
            is_here = rows.is_same and self._shape(one)[:-1] == (*batch, many) and terms > 1
            if not is_here or self._split or size * self._size(rows.width) > MOST_ELEMENTS:
                raise RuntimeError("the left operand of a product is in other rows, or too wide")
            tile = self.name(one, self._element_of(view))
            tile = f"tl.where({self._columns(terms)} < {terms}, {tile}, 0.0)"
            a = f"tl.broadcast_to({tile}, [ROWS, {size}])"
        index = ""
        if any(n > 1 and s for n, s in zip(batch, right[0].stride(), strict=False)):
            # A program has rows of one matrix.
            self._group = math.gcd(self._group, many, rows.step)
            index = re.sub(r"\bi\b", "first", f"(({rows.text}) // {many})")
        self._terms.add(size)
        inner = [
            _times(f"(k + k{size}[:, None])", right[0].stride(-2)),
            _times(f"({column} + {rows.column})", right[0].stride(-1)),
        ]
        mask = f"(k + k{size}[:, None] < {terms}) & ({column} < {rows.width})"
        b = f"tl.load({self._pointer(right, batch, index, inner)}, mask={mask}, other=0)"
        more = [
            f"for k in range(0, {terms}, {size}):", f"    @a = {a}", f"    @b = {b}",
            f"    @ = tl.dot(@a.to({kind}), @b.to({kind}), @, input_precision='{self.precision}')",
            f"@ = {self._rounded(value, '@')}",
        ]  # fmt: skip
        return self._line(f"tl.zeros([ROWS, {self._size(rows.width)}], tl.float32)", more)

    def _fold(self, operation: Operation) -> None:
        """Write the loop of a scan; its results are its states' variables."""
        if self._states:
            raise RuntimeError("a kernel has one loop")
        form, body = ScanForm.of(operation), self.bodies[operation.body]
        first = form.states + form.sequences
        at = {v: len(self.values) + v for v in range(len(body.values))} | {ABSENT: ABSENT}
        at |= zip(body.inputs[first:], operation.inputs[first:], strict=True)
        self.values = [*self.values, *body.values]
        made = {**self.makers}
        for each in body.operations:
            reads, gives = (tuple(at[v] for v in some) for some in (each.inputs, each.outputs))
            inside = replace(each, inputs=reads, outputs=gives), attributes_of(each)
            made |= dict.fromkeys(gives, inside)
        for number, is_back in enumerate(form.taken_backward, form.states):
            element = at[body.inputs[number]]
            attributes = {"backward": is_back}
            taken = Operation(ELEMENT, (operation.inputs[number],), (element,), attributes)
            made[element] = taken, attributes
            self._elements.setdefault(is_back, element)
        data = {at[c.value]: c.data for c in body.constants}
        self.makers, self.known = made, {**self.known, **data}
        for value, array in data.items():
            self._constants[value] = uploaded(array, self.values[value], self.device)
        sizes = list[int]()
        for number, value in enumerate(operation.inputs[: form.states]):
            *shape, width = self._shape(value)
            if math.prod(shape) != self._rows:
                raise RuntimeError("rows are others")
            sizes.append(self._size(width))
            begun = f"tl.broadcast_to({self.name(value)}, [ROWS, {sizes[-1]}])"
            self._lines.append(f"    s{number} = {begun}\n")
        states = {at[v]: f"s{i}" for i, v in enumerate(body.inputs[: form.states])}
        self._before, self._lines, self._states = self._lines, [], states
        self._varying = {"r", *states.values()}
        self._in_loop, self._rounds = True, form.count
        after = [self.name(at[v]) for v in body.outputs]
        self._in_loop = False
        self._inside = [
            f"    for r in range({form.count}):\n", *self._inside,
            *[f"        t{i} = tl.broadcast_to({name}, [ROWS, {size}])\n"
              for i, (name, size) in enumerate(zip(after, sizes, strict=True))],
            *[f"        s{i} = t{i}\n" for i in range(form.states)],
        ]  # fmt: skip
        self._states |= {v: f"s{i}" for i, v in enumerate(operation.outputs)}

    # -- the kernel --------------------------------------------------------------------------------

    @property
    def _block(self) -> int:
        """Rows of a program."""
        rows, width = min(self._most_rows, _padded(self._group)), max((1, *self._widths))
        while rows > LEAST and rows * width > MOST_ELEMENTS // 2:
            rows //= 2
        if max(rows, *self._terms, 1) * width > MOST_ELEMENTS:
            raise RuntimeError("tiles are too large")
        return rows

    def text(self) -> str:
        blocks, group = -(-self._group // self._block), self._group
        pointers = [f"p{i}" for i in range(len(self.loads) + len(self.stores))]
        parts = ", ".join([*pointers, "ROWS: tl.constexpr", "BF16: tl.constexpr"])
        program = "tl.program_id(0)"
        starts = " + tl.program_id(1) * {}" if self._split else ""
        lines = [
            HEADER, FUNCTIONS, f"@triton.jit\ndef kernel({parts}):\n",
            f"    first = {program} // {blocks} * {group} + {program} % {blocks} * ROWS\n",
            "    i = first + tl.arange(0, ROWS)[:, None]\n",
            f"    live = i < ({program} // {blocks} + 1) * {group}\n",
            *[f"    j{n} = tl.arange(0, {n})[None, :]{starts.format(n)}\n"
              for n in sorted(self._widths)],
            *[f"    k{n} = tl.arange(0, {n})\n" for n in sorted(self._terms)],
            *self._before, *self._inside, *self._lines,
            # Of few elements several threads have copies: all read them before one writes there.
            "    tl.debug_barrier()\n",
        ]  # fmt: skip
        for number, (name, target) in enumerate(self.stores, len(self.loads)):
            tensor = target if target.ndim else target.reshape(1)
            sizes, (strides,) = merged_axes(tensor.shape[:-1], [tensor.stride()[:-1]])
            width, column = tensor.shape[-1], f"j{self._size(tensor.shape[-1])}"
            place = f"p{number} + {offset_text(sizes, strides)}"
            place += f" + {_times(column, tensor.stride(-1))}" if width > 1 else ""
            mask = f"live & ({column} < {width})" if width > 1 else "live"
            value = f"tl.broadcast_to({name}, [ROWS, {self._size(width)}])"
            value = f"{value}.to(p{number}.dtype.element_ty)"
            lines.append(f"    tl.store({place}, {value}, mask={mask})\n")
        return "".join(lines)

    def launch(self) -> Launch:
        if self.stores[-1][1].ndim and self.stores[-1][1].shape[-1] > 1:
            self._columns(self.stores[-1][1].shape[-1])
        kernel, tensors = compiled(self.text()), [*self.loads, *(t for _, t in self.stores)]
        columns = -(-self._split // self._size(self._split)) if self._split else 1
        grid = (self._rows // self._group * -(-self._group // self._block), columns)
        sizes: dict[str, Any] = {
            "ROWS": self._block, "BF16": _narrow(self.device), "num_stages": STAGES, **OPTIONS,
        }  # fmt: skip
        if self.device.type == "cuda":
            made = kernel.warmup(*tensors, **sizes, grid=grid)
            has = torch.cuda.get_device_properties(self.device).shared_memory_per_block_optin
            if made.metadata.shared > has:
                raise RuntimeError("the kernel needs more shared memory than the card has")
        return Launch(kernel[grid], *tensors, **sizes)


def _times(index: str, stride: int) -> str:
    return index if stride == 1 else f"{index} * {stride}"


def _padded(size: int) -> int:
    return max(LEAST, 1 << (size - 1).bit_length())


def _narrow(device: torch.device) -> Any:
    """Return the type of a product's bfloat16: Triton's interpreter has no products of these."""
    import triton.language as tl

    return tl.bfloat16 if device.type == "cuda" else tl.float32
