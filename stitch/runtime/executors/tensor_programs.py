"""Programs on tensors: bound to the places of a plan, operation by operation.

Kernels of PyTorch write into the planned places by `out=`. Views, loops, attention and elementwise
operations in a row are bound as wholes. An operation without a kernel is computed by NumPy's, by
way of host arrays, with the same bits as on the executor `numpy`.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from stitch.errors import StitchError
from stitch.linker import program_of_body, repeated_outputs
from stitch.machine import MachineShape
from stitch.ops import attributes_of, evaluate_operation
from stitch.program import (
    ABSENT,
    Array,
    DataType,
    Operation,
    Program,
    ScanForm,
    is_scan,
)
from stitch.runtime.executors.attention import (
    Attention,
    Mask,
    attention_steps,
    attentions_of,
    mask_steps,
    may_leave_a_row,
    row_steps,
)
from stitch.runtime.executors.cuda_graphs import Launch
from stitch.runtime.executors.cuda_kernels import (
    IN_PLACE,
    KERNELS,
    PRODUCTS,
    VIEWS,
    TensorCall,
    takes_strides,
    views_of,
    with_precision,
)
from stitch.runtime.executors.executor import BoundProgram, PreparedProgram, Thunk, Workspace
from stitch.runtime.executors.host import (
    NumpyExecutor,
    PartOfProgram,
    StagedRegions,
    StagingArrays,
    WholeProgram,
    as_bytes,
    computable,
    is_direct,
)
from stitch.runtime.executors.index_faults import IndexFaults
from stitch.runtime.executors.inductor_functions import FunctionWriter, explained, functions_of
from stitch.runtime.executors.tensor_loops import (
    MOST_FOLDED,
    MOST_STEPS,
    BoundRound,
    LeftToHost,
    TensorPool,
    fewest_steps,
    unroll,
)
from stitch.runtime.executors.torch_bytes import TORCH_TYPES, as_tensor, uploaded
from stitch.runtime.executors.triton_kernels import KernelWriter, can_run, runs_of, share_bytes
from stitch.runtime.executors.triton_tiles import TileWriter, tile_runs


class PreparedTensors(PreparedProgram):
    """A program on tensors: constants on the device, and NumPy's kernels for the operations without
    one here."""

    reads_placed_constants = True

    def __init__(
        self, program: Program, machine: MachineShape, device: torch.device,
        left_to_numpy: set[str], precision: str, faults: IndexFaults, *, inductor: bool = False,
        in_round: bool = False,
    ) -> None:  # fmt: skip
        """`left_to_numpy`: takes the operators that NumPy's kernels compute; `precision`: of
        products (see `with_precision`); `inductor`: whether consecutive operations are compiled,
        but not those of loops; `in_round`: whether it is the body of a loop."""
        self.program, self.machine, self.device = program, machine, device
        self.precision, self.faults = precision, faults
        self.left_to_numpy = left_to_numpy
        self.whole = WholeProgram(program)
        self.attributes = [attributes_of(operation) for operation in program.operations]
        self.attentions = attentions_of(self.whole)
        self.workspace = Workspace()
        self.pool = TensorPool(device)
        self.readers = program.readers()
        #: Operations that become kernels together, first to end.
        self.runs: dict[int, int] = {}
        #: Those on tiles, by their first one.
        self.tiles: set[int] = set()
        self.inductor = inductor
        self.writer: Callable[..., KernelWriter] = KernelWriter
        apart = {i for attention in self.attentions for i in attention.operations}
        if inductor:
            self.runs = functions_of(program, self.attributes, self.whole.data, device, apart)
            self.writer = partial(FunctionWriter, precision=precision, compiled={})
        elif can_run(device):
            self.runs = tile_runs(program, self.whole.data, apart, in_round=in_round)
            self.tiles = {*self.runs}
            joined = {i for first, end in self.runs.items() for i in range(first, end)}
            self.runs |= runs_of(program.operations, program.values, apart | joined)
        self._inside: dict[int, PreparedTensors] = {}
        #: A constant in its compute type on the device, beside its place.
        self.constant = cache(self._constant)
        #: An operation as a program of its own, and NumPy's kernels of it.
        self.part = cache(self._part)

    def writer_at(self, first: int) -> Callable[..., KernelWriter]:
        """Return what writes the kernels of the operations from this one on."""
        if first not in self.tiles:
            return self.writer
        bodies, precision = self.program.bodies, self.precision
        return partial(TileWriter, bodies=bodies, precision=precision, device=self.device)

    def refuse(self, span: range) -> None:
        """Note that no kernel computes operations; those of elements are tried without others."""
        del self.runs[span.start]
        if span.start in self.tiles:
            self.tiles.remove(span.start)
            operations = self.program.operations
            others = {*range(len(operations))}.difference(span)
            self.runs |= runs_of(operations, self.program.values, others)

    def kernel_of(self, value: int) -> Hashable:
        """Return a key of the values that a kernel computes together: one of Triton has a shape."""
        return None if self.inductor else self.program.values[value].type.shape

    def _constant(self, value: int) -> torch.Tensor:
        return uploaded(self.whole.data[value], self.program.values[value], self.device)

    @property
    def nbytes(self) -> int:
        """Bytes of temporary tensors, which all bindings use in turn."""
        return self.pool.nbytes + sum(inside.nbytes for inside in self._inside.values())

    def inside(self, index: int) -> PreparedTensors:
        """Return the body of a scan as a program; shared operands that are constants are there."""
        found = self._inside.get(index)
        if found is None:
            operation, data = self.program.operations[index], self.whole.data
            form = ScanForm.of(operation)
            first = form.states + form.sequences
            known = {i: data[v] for i, v in enumerate(operation.inputs) if i >= first and v in data}
            program = program_of_body(self.program, operation.body, form.states, known)
            found = self._inside[index] = PreparedTensors(
                program, self.machine, self.device, self.left_to_numpy, self.precision, self.faults,
                in_round=True,
            )  # fmt: skip
        return found

    def bind_round(
        self, operands: Sequence[torch.Tensor | None], known: Mapping[int, Array],
        results: Sequence[torch.Tensor],
    ) -> BoundRound:  # fmt: skip
        """Bind a round of a loop, of which this is the body; raises `LeftToHost`."""

        # Slots are named by the numbers of their operands.
        takes, gives = (
            {int(slot.name.split()[1]): slot.value for slot in slots}
            for slots in (self.program.inputs, self.program.outputs)
        )

        def regions(tensors: Sequence[torch.Tensor | None], numbers: Iterable[int]) -> Any:
            found = [tensors[number] for number in numbers]
            return tuple([t.reshape(-1).view(torch.uint8) for t in found if t is not None])

        self.pool.restart()
        scratch = self.pool.take((self.program.scratch.size_per_bank,), torch.uint8)
        binding = _TensorBinding(
            self, regions(operands, takes), regions(results, gives), scratch, is_observed=False,
            is_round=True,
        )  # fmt: skip
        binding.known |= {v: known[i] for i, v in takes.items() if i in known}
        steps, after = binding.bound().steps, binding.known
        return steps, {i: after[v] for i, v in gives.items() if v in after}

    def _part(self, index: int) -> tuple[PartOfProgram, PreparedProgram]:
        held = [v for v in self.program.operations[index].outputs if v != ABSENT]
        part = PartOfProgram(self.whole, (index,), held)
        program = part.program_of_part()
        return part, NumpyExecutor().prepare(program, self.machine, self.workspace)

    def bind(self, inputs: tuple[Any, ...], outputs: tuple[Any, ...], scratch: Any) -> BoundProgram:
        """Bind it; regions are tensors, or arrays of the host."""

        def bound(*, is_observed: bool) -> BoundProgram:
            with torch.inference_mode(False):
                self.pool.restart()
                binding = _TensorBinding(self, inputs, outputs, scratch, is_observed=is_observed)
                return binding.bound()

        one_by_one = cache(partial(bound, is_observed=True))
        return replace(bound(is_observed=False), one_by_one=one_by_one)


class _TensorBinding:
    """A binding under construction: the tensor of each value in its compute type.

    Operations that only rearrange elements have no steps where their readers can read a view of the
    operand; and operations that are attention are bound as one. A value that is read so after the
    planner has given its place away is moved before it is overwritten.

    `is_observed`: for hooks, each value is copied to an array of the host as it is computed.
    `is_round`: of a loop on the device: nothing may go by way of the host.
    """

    def __init__(
        self, prepared: PreparedTensors, inputs: tuple[Any, ...], outputs: tuple[Any, ...],
        scratch: Any, *, is_observed: bool, is_round: bool = False,
    ) -> None:  # fmt: skip
        self.is_observed, self.is_round = is_observed, is_round
        #: Of values, for hooks; and the steps that put an array in the place of a value.
        self.arrays: dict[int, Array] = {}
        self.written: dict[int, tuple[Thunk, ...]] = {}
        self.prepared, self.program = prepared, prepared.program
        self.values, self.scratch = self.program.values, scratch
        self.given = {slot.value for slot in self.program.inputs}
        self.returned = {slot.value for slot in self.program.outputs}
        takes = len(self.program.inputs)
        slots = [*(s.value for s in self.program.inputs), *(s.value for s in self.program.outputs)]
        self.regions = dict(zip(slots, (*inputs[:takes], *outputs), strict=True))
        self.readers = prepared.readers
        self.attentions = [] if is_observed else prepared.attentions
        self.inside = {i: one for one in self.attentions for i in one.operations}
        #: The last operation that reads a value, as planned, and as it is bound here.
        self.planned_last = {value: max(readers) for value, readers in self.readers.items()}
        self.last = dict(self.planned_last)
        for one in self.attentions:
            self.last |= {v: max(self.last[v], one.last) for v in one.operands}
        #: Values whose bytes the plan does not keep until they are read the last time.
        self.borrowed: set[int] = set()
        #: What attentions add to their scores and to the rows of their results.
        self.masks: dict[tuple[Mask, ...], torch.Tensor] = {}
        self.rows: dict[tuple[Mask, ...], torch.Tensor] = {}
        self.tensors: dict[int, torch.Tensor] = {}
        #: Values that are the same in every run: constants, and in a round what is computed of them
        #: and of the number of the round.
        self.known = dict(prepared.whole.data)
        # Constants that lie in their places as kernels compute with them; others are converted.
        for constant, region in zip(self.program.constants, inputs[takes:], strict=False):
            value = constant.value
            if region is not None and is_direct(self.values[value]):
                self.regions[value] = region
                stored = self._stored(value)
                if stored is not None:
                    self.tensors[value] = stored
        self.steps: list[Thunk] = []
        self.staging_nbytes = 0
        #: Conversions of values that the device cannot convert, by way of the host.
        nothing = np.empty(0, np.uint8)
        self.host = StagedRegions(
            StagingArrays(self.program, prepared.machine), (nothing,) * takes,
            (nothing,) * len(outputs), nothing,
        )  # fmt: skip

    def bound(self) -> BoundProgram:
        for slot in self.program.inputs:
            # Those of a round that are converted are so only if they are needed.
            is_lazy = self.is_round and not is_direct(self.values[slot.value])
            if slot.value in self.readers and not is_lazy:
                self._read(slot.value)
                self._show(slot.value)
                self._keep(slot.value)
        if self.is_observed:
            for value, data in self.prepared.whole.data.items():
                self.arrays[value] = computable(data, self.values[value].type)
        marks = [len(self.steps)]
        index, operations = 0, self.program.operations
        runs = {} if self.is_observed else self.prepared.runs
        while index < len(operations):
            while (end := runs.get(index, index)) > index and not self._fuse(range(index, end)):
                pass
            if end == index:
                end = index + 1
                self._append(index, operations[index])
                marks.append(len(self.steps))
            index = end
        spans = [(i, a, b) for i, (a, b) in enumerate(pairwise(marks))] if self.is_observed else ()
        return BoundProgram(
            tuple(self.steps), tuple(spans), self.arrays,
            self.staging_nbytes + self.prepared.nbytes, written=self.written,
        )  # fmt: skip

    def _show(self, value: int) -> None:
        """Append the step that copies a value to an array of the host, for hooks."""
        if self.is_observed:
            kind = self.values[value].type
            array = self.arrays[value] = np.empty(kind.shape, kind.data_type.compute_dtype)
            self.steps.append(partial(torch.from_numpy(array).copy_, self.tensors[value]))

    # -- values ------------------------------------------------------------------------------------

    def _tensor(self, value: int) -> torch.Tensor:
        """Return the tensor that an operation reads."""
        if value not in self.tensors and value in self.given:
            self._read(value)
        found = self.tensors.get(value)
        return self.prepared.constant(value) if found is None else found

    def _new(self, shape: Sequence[int], dtype: np.dtype[Any]) -> torch.Tensor:
        return self.prepared.pool.take(shape, TORCH_TYPES[DataType.from_dtype(dtype)])

    def _stored(self, value: int) -> torch.Tensor | None:
        """Return a dense value in its place on the device, in its storage type; None if it lies on
        the host, or in a layout or type that PyTorch does not have."""
        described, region = self.values[value], self.regions[value]
        layout, shape = described.layout, described.type.shape
        assert layout is not None
        dtype = TORCH_TYPES.get(layout.data_type)
        if isinstance(region, np.ndarray) or not layout.is_dense or dtype is None:
            return None
        flat: torch.Tensor = region[: math.prod(shape) * dtype.itemsize].view(dtype)
        return flat.view(shape)

    def _read(self, value: int) -> None:
        """Append the steps that bring an input into its tensor."""
        described, stored = self.values[value], self._stored(value)
        if stored is not None and is_direct(described):
            self.tensors[value] = stored
            return
        dtype = described.type.data_type.compute_dtype
        tensor = self.tensors[value] = self._new(described.type.shape, dtype)
        if stored is not None:
            self.steps.append(Launch(tensor.copy_, stored))
            return
        array = self._on_host(value, reads=True)
        self.steps.append(partial(tensor.copy_, as_tensor(array)))

    def _on_host(self, value: int, *, reads: bool) -> Array:
        """Return the host array of a value in its compute type, with the steps that fill it."""
        if self.is_round:
            raise LeftToHost
        region = self.regions[value]
        if not isinstance(region, np.ndarray):
            region = np.empty(len(region), np.uint8)
            if reads:
                self.steps.append(partial(torch.from_numpy(region).copy_, self.regions[value]))
        self.host.regions[value] = region
        steps: list[Thunk] = []
        array = self.host.read(value, steps)
        if reads:
            self.steps += steps
        return array

    def _place(self, value: int) -> torch.Tensor:
        """Return the tensor that an operation writes a value into."""
        described = self.values[value]
        if value not in self.regions:
            layout = described.layout
            assert layout is not None
            start = layout.address
            nbytes = layout.data_type.nbytes(math.prod(described.type.shape))
            if nbytes:
                assert self.scratch is not None and start is not None
                self.regions[value] = self.scratch[start : start + nbytes]
            else:
                self.regions[value] = np.empty(0, np.uint8)
        stored = self._stored(value)
        if stored is not None and is_direct(described):
            return stored
        return self._new(described.type.shape, described.type.data_type.compute_dtype)

    def _write(self, value: int) -> None:
        """Append the steps that round a computed value and store it in its layout."""
        described, tensor, stored = self.values[value], self.tensors[value], self._stored(value)
        if stored is not None and is_direct(described):
            return
        logical = described.type.data_type
        kept = described.desc.layout.data_type
        # PyTorch rounds float64 to float16 by way of float32: twice.
        is_rounded_twice = tensor.dtype is torch.float64 and kept is DataType.FLOAT16
        if stored is not None and logical in TORCH_TYPES and not is_rounded_twice:
            if logical is not kept and logical.dtype != logical.compute_dtype:
                rounded = self._new_as(logical, tensor)
                self.steps += [Launch(rounded.copy_, tensor), Launch(tensor.copy_, rounded)]
            self.steps.append(Launch(stored.copy_, tensor))
            if kept.dtype != logical.compute_dtype and value in self.readers:
                self.steps.append(Launch(tensor.copy_, stored))
            return
        array = self._on_host(value, reads=False)
        host, region = torch.from_numpy(array), self.regions[value]
        is_read = value in self.readers
        self.steps += [partial(host.copy_, tensor), self.prepared.faults.check]
        if isinstance(region, np.ndarray):
            self.steps += self.host.write(value, array, read_back=is_read)
        else:
            # What lies between and behind the elements stays.
            bytes_ = torch.from_numpy(self.host.regions[value])
            self.steps.append(partial(bytes_.copy_, region))
            self.steps += self.host.write(value, array, read_back=is_read)
            self.steps.append(partial(region.copy_, bytes_))
        if is_read:
            self.steps.append(partial(tensor.copy_, host))

    def _new_as(self, kind: DataType, like: torch.Tensor) -> torch.Tensor:
        return self.prepared.pool.take(like.shape, TORCH_TYPES[kind])

    # -- operations --------------------------------------------------------------------------------

    def _fold(self, operation: Operation) -> bool:
        """Compute an operation of a round now, if all that it reads is known."""
        if not (self.is_round and operation.inputs and self.known.keys() >= {*operation.inputs}):
            return False
        kinds = [self.values[v].type for v in operation.outputs if v != ABSENT]
        is_small = all(math.prod(kind.shape) <= MOST_FOLDED for kind in kinds)
        if not is_small or len(kinds) < len(operation.outputs):
            return False
        try:
            arrays = evaluate_operation(operation, [self.known[v] for v in operation.inputs])
        except StitchError as error:
            raise LeftToHost from error  # The host raises it in a run.
        for value, array in zip(operation.outputs, arrays, strict=True):
            self.known[value] = array
            self.tensors[value] = uploaded(array, self.values[value], self.prepared.device)
            if value in self.regions:
                self.steps.append(Launch(self._place(value).copy_, self.tensors[value]))
                self._write(value)
        return True

    def _fuse(self, span: range) -> bool:
        """Append kernels that compute consecutive operations; return whether that is possible."""
        makers: dict[int, tuple[Operation, Mapping[str, Any]]] = {}
        for index in span:
            operation = self.program.operations[index]
            is_apart = makers.keys().isdisjoint(operation.inputs)
            is_apart &= any(self._is_read_after(v, span) for v in operation.outputs)
            if not self._fold(operation) and not (is_apart and self._is_view(index, operation)):
                made = operation, self.prepared.attributes[index]
                makers |= {v: made for v in operation.outputs if v != ABSENT}
        kept = [v for v in makers if v in self.returned or self._is_read_after(v, span)]
        writers: dict[Hashable, KernelWriter] = {}
        try:
            for value in kept:
                key = self.prepared.kernel_of(value)
                if key not in writers:
                    writers[key] = self.prepared.writer_at(span.start)(
                        self.values, makers, self.known, self._loaded
                    )
                writers[key].name(value)
            launches, copies, tensors = self._stores(kept, span, writers)
        except Exception as error:  # Whatever Triton refuses: PyTorch's kernels compute it.
            self.prepared.refuse(span)
            if self.prepared.inductor:
                warnings.warn(
                    f"inductor cannot compile operations {span.start} to {span.stop - 1} of "
                    f"program {self.program.name!r}, PyTorch's kernels compute them: "
                    f"{explained(error)}",
                    RuntimeWarning, stacklevel=2,
                )  # fmt: skip
            return False
        written = [target for writer in writers.values() for _, target in writer.stores]
        for value in [*self.borrowed]:
            tensor = self.tensors[value]
            if self.last[value] >= span.stop and any(share_bytes(tensor, t) for t in written):
                self._move(span.stop - 1, value)
        self.steps += [*launches, *copies]
        self.tensors |= tensors
        for value in kept:
            if not self._is_kept_as_is(value):
                self._write(value)
            self._keep(value)
        return True

    def _stores(
        self, kept: Sequence[int], span: range, writers: Mapping[Hashable, KernelWriter]
    ) -> tuple[list[Launch], list[Launch], dict[int, torch.Tensor]]:
        """Let kernels store values; return their calls, the copies after them, and the tensors."""
        copies, tensors = list[Launch](), dict[int, torch.Tensor]()
        for value in kept:
            for target in self._targets(value, span):
                beside = target
                if len(writers) == 1:
                    is_free = all(writer.allows(target) for writer in writers.values())
                else:
                    is_free = not any(writer.reads(target) for writer in writers.values())
                if not is_free:
                    beside = self._empty_like(target)
                    if value in self.returned:
                        copies.append(Launch(target.copy_, beside))
                writers[self.prepared.kernel_of(value)].store(value, beside)
                tensors.setdefault(value, beside)
        return [writer.launch() for writer in writers.values()], copies, tensors

    def _targets(self, value: int, span: range) -> list[torch.Tensor]:
        """Return the tensors that a kernel writes a value into: for readers, and stored."""
        place, stored = self._place(value), self._stored(value)
        if stored is None or is_direct(self.values[value]) or not self._is_kept_as_is(value):
            return [place]
        return [place] * self._is_read_after(value, span) + [stored] * (value in self.returned)

    def _is_kept_as_is(self, value: int) -> bool:
        """Whether a value lies on the device in its own type."""
        stored, kind = self._stored(value), self.values[value].type.data_type
        return stored is not None and stored.dtype is TORCH_TYPES.get(kind)

    def _loaded(self, value: int) -> torch.Tensor:
        """Return the tensor of a value that a kernel loads, in its own type or the compute type."""
        stored = self._stored(value) if value in self.given - self.tensors.keys() else None
        return stored if stored is not None and self._is_kept_as_is(value) else self._tensor(value)

    def _is_read_after(self, value: int, span: range) -> bool:
        return not self.readers.get(value, set()) <= {*span}

    def _append(self, index: int, operation: Operation) -> None:
        attention = self.inside.get(index)
        if attention is not None and index != attention.last:
            return
        if attention is None and not is_scan(operation) and self._fold(operation):
            return
        if attention is None and self._is_view(index, operation):
            return
        written = [value for value in operation.outputs if value != ABSENT]
        places = {value: self._place(value) for value in written}
        regions = [*places.values(), *[self.regions[value] for value in written]]
        self._move_out(index, [r for r in regions if isinstance(r, torch.Tensor)])
        if attention is not None:
            self._attend(attention, places[written[0]])
        else:
            self._compute(index, operation, places)
        self.tensors |= places
        for value in written:
            before = len(self.steps)
            self._write(value)
            self._keep(value)
            if self.is_observed:
                storing = self.steps[before:]
                self._show(value)
                put = partial(places[value].copy_, torch.from_numpy(self.arrays[value]))
                self.written[value] = (put, *storing, self.steps[-1])

    def _compute(
        self, index: int, operation: Operation, places: Mapping[int, torch.Tensor]
    ) -> None:
        for value in operation.inputs:
            if value != ABSENT and not takes_strides(operation, self._tensor(value)):
                self._move(index, value)
        bind = self._unrolled if is_scan(operation) else self._kernel
        steps = bind(index, operation, places)
        self.steps += self._by_numpy(index, places) if steps is None else steps

    def _attend(self, one: Attention, out: torch.Tensor) -> None:
        """Append the steps of an attention. Its masks are computed once per binding."""
        dtype = self.values[one.query].type.data_type.compute_dtype
        new = partial(self._new, dtype=dtype)
        key, mask, rows = tuple(one.masks), None, None
        if len(key) == 1 and key[0].fill is None:
            # Where the value is now: it may have been moved since another attention read it.
            mask = self._tensor(key[0].value)
        elif key:
            if key not in self.masks:
                tensors = [self._tensor(mask.value) for mask in key]
                self.masks[key], steps = mask_steps(key, tensors, new)
                self._launch(steps)
            mask = self.masks[key]
        if mask is not None and may_leave_a_row(one, self.known, dtype):
            if key not in self.rows:
                self.rows[key], steps = row_steps(mask, new)
                self._launch(steps)
            rows = self.rows[key]
        operands = [self._tensor(v) for v in one.operands[:3]]
        calls = attention_steps(one, operands, mask, rows, out)
        precision = self.prepared.precision
        self._launch([partial(with_precision, precision, call) for call in calls])

    def _launch(self, calls: Sequence[Thunk]) -> None:
        self.steps += [Launch(call) for call in calls]

    # -- views -------------------------------------------------------------------------------------

    def _is_view(self, index: int, operation: Operation) -> bool:
        """Whether the results of an operation are views of its operand, which they become here."""
        is_view = (operation.domain, operation.op) in VIEWS and ABSENT not in operation.outputs
        if self.is_observed or not is_view:
            return False
        kind = self.values[operation.inputs[0]].type.data_type
        for value in operation.outputs:
            described = self.values[value]
            kinds = {described.type.data_type, described.layout and described.layout.data_type}
            if value in self.regions or kinds != {kind} or 0 in described.type.shape:
                return False
        shapes = [self.values[v].type.shape for v in operation.outputs]
        attributes = self.prepared.attributes[index]
        known = [self.known.get(v) for v in operation.inputs]
        x = self._tensor(operation.inputs[0])
        views = views_of(operation.op, x, shapes, attributes, known)
        if views is None:
            return False
        self.tensors |= zip(operation.outputs, views, strict=True)
        self.borrowed |= {v for v in operation.outputs if v in self.last}
        return True

    def _keep(self, value: int) -> None:
        """Note a value that is read later than planned."""
        if self.last.get(value, -1) > self.planned_last.get(value, -1):
            self.borrowed.add(value)

    def _move_out(self, index: int, written: Sequence[torch.Tensor]) -> None:
        """Move the values that are read after an operation and whose bytes it overwrites."""
        self.borrowed = {value for value in self.borrowed if self.last[value] >= index}
        for value in [*self.borrowed]:
            tensor = self.tensors[value]
            if self.last[value] > index and any(share_bytes(tensor, region) for region in written):
                self._move(index, value)

    def _move(self, index: int, value: int) -> None:
        """Append the step that copies a value into its own place, or beside where this is gone."""
        tensor, place = self._tensor(value), None
        if value not in self.regions and index <= self.planned_last[value]:
            place = self._place(value)
            others = [tensor, *[self.tensors[other] for other in self.borrowed]]
            if any(share_bytes(other, place) for other in others):
                place = None
        self.borrowed.discard(value)
        if place is None:
            place = self._empty_like(tensor)
        else:
            self._keep(value)
        self._launch([partial(place.copy_, tensor)])
        self.tensors[value] = place

    # -- kernels -----------------------------------------------------------------------------------

    def _kernel(
        self, index: int, operation: Operation, places: Mapping[int, torch.Tensor]
    ) -> Sequence[Thunk] | None:
        """Return the steps of PyTorch's kernel; None if there is none that suits."""
        operands = [None if v == ABSENT else self._tensor(v) for v in operation.inputs]
        kernel, results = KERNELS.get((operation.domain, operation.op)), [*places.values()]
        tensors = [t for t in (*operands, *results) if t is not None]
        if kernel is None or ABSENT in operation.outputs or not all(t.numel() for t in tensors):
            return None
        # A result that overwrites what is read is computed beside it.
        beside = [
            self._empty_like(result) if self._is_read_there(operation, operands, result) else result
            for result in results
        ]
        known = [self.known.get(v) for v in operation.inputs]
        title = f"{operation.title} in program {self.program.name!r}"
        flag = partial(self.prepared.faults.steps, title)
        steps = kernel(TensorCall(operands, beside, self.prepared.attributes[index], known, flag))
        if steps is None:
            return None
        if (operation.domain, operation.op) in PRODUCTS:
            steps = [partial(with_precision, self.prepared.precision, step) for step in steps]
        pairs = zip(results, beside, strict=True)
        copies = [Launch(a.copy_, b) for a, b in pairs if a is not b]
        return [*map(Launch, steps), *copies]

    def _unrolled(
        self, index: int, operation: Operation, places: Mapping[int, torch.Tensor]
    ) -> Sequence[Thunk] | None:
        """Return the steps of all rounds of a scan; None if the host has to compute it."""
        form, bodies = ScanForm.of(operation), self.program.bodies
        if form.has_condition or not 0 < fewest_steps(operation, bodies) <= MOST_STEPS:
            return None
        body, inside = bodies[operation.body], self.prepared.inside(index)
        first, constants = form.states + form.sequences, self.prepared.whole.data
        before, after = list[Thunk](), list[Thunk]()
        try:
            operands = [
                None if v == ABSENT or (i >= first and v in constants) else self._typed(v, before)
                for i, v in enumerate(operation.inputs)
            ]
            results = []
            for i, value in enumerate(operation.outputs):
                kind, result = body.output_types[i], places.get(value)
                shape = kind.shape if i < form.states else (form.count, *kind.shape)
                dtype, read = _torch_type(kind.data_type), [t for t in operands if t is not None]
                is_free = result is not None and not any(share_bytes(t, result) for t in read)
                if result is None or not is_free or result.dtype is not dtype:
                    beside = self.prepared.pool.take(shape, dtype)
                    after += [Launch(result.copy_, beside)] if result is not None else []
                    result = beside
                results.append(result)
            known = {i: self.known[v] for i, v in enumerate(operation.inputs) if v in self.known}
            repeated, pool = repeated_outputs(body, form.states), self.prepared.pool
            steps = unroll(form, operands, known, results, repeated, pool, inside.bind_round)
        except LeftToHost:
            return None
        return None if steps is None else [*before, *steps, *after]

    def _typed(self, value: int, steps: list[Thunk]) -> torch.Tensor:
        """Return a value in its own type, which is narrower than the compute type perhaps."""
        tensor, kind = self._tensor(value), self.values[value].type.data_type
        if tensor.dtype is _torch_type(kind):
            return tensor
        narrow = self._new_as(kind, tensor)
        steps.append(Launch(narrow.copy_, tensor))
        return narrow

    def _empty_like(self, tensor: torch.Tensor) -> torch.Tensor:
        return self.prepared.pool.take(tensor.shape, tensor.dtype)

    def _is_read_there(
        self, operation: Operation, operands: Sequence[torch.Tensor | None], result: torch.Tensor
    ) -> bool:
        for operand in operands:
            if operand is None or not share_bytes(operand, result):
                continue
            same = operand.data_ptr() == result.data_ptr() and operand.shape == result.shape
            same = same and operand.stride() == result.stride()
            if not (same and not operation.domain and operation.op in IN_PLACE):
                return True
        return False

    def _by_numpy(self, index: int, places: Mapping[int, torch.Tensor]) -> list[Thunk]:
        """Return the steps of NumPy's kernel: operands to the host, results back."""
        if self.is_round:
            raise LeftToHost
        part, prepared = self.prepared.part(index)
        self.prepared.left_to_numpy.add(self.program.operations[index].title)
        types = {v: self.values[v].type for v in (*part.inputs, *part.outputs)}
        arrays = {v: np.empty(k.shape, k.data_type.compute_dtype) for v, k in types.items()}
        self.staging_nbytes += sum(array.nbytes for array in arrays.values())
        bound = prepared.bind(
            tuple(as_bytes(arrays[v]) for v in part.inputs),
            tuple(as_bytes(arrays[v]) for v in part.outputs), None,
        )  # fmt: skip
        self.staging_nbytes += bound.staging_nbytes
        return [
            *[partial(torch.from_numpy(arrays[v]).copy_, self._tensor(v)) for v in part.inputs],
            *bound.steps,
            *[partial(places[v].copy_, torch.from_numpy(arrays[v])) for v in part.outputs],
        ]


def _torch_type(kind: DataType) -> torch.dtype:
    """Return PyTorch's type; raises `LeftToHost` for those that it does not have."""
    if kind not in TORCH_TYPES:
        raise LeftToHost
    return TORCH_TYPES[kind]
