"""Collecting: what the rounds of a repeat make becomes one tensor, along a new first axis.

Comes in: tensors of one device, in order. Goes out: one tensor, perhaps pending. They are joined as
they come, `MOST_JOINED` at a time, by small programs that are compiled when they are first needed:
so no program has an input for every round. Must not know: files, steps.
"""

from __future__ import annotations

from collections.abc import Sequence

from stitch.compiler import compile_graph
from stitch.documents.pipelines.checked_values import collected_desc
from stitch.graph import ComputationGraphBuilder
from stitch.program import TensorDesc
from stitch.report import Device
from stitch.runtime import LoadedProgram, Tensor
from stitch.ttb import Binary

#: Tensors that one program joins.
MOST_JOINED = 64


class Joins:
    """Programs of a device that put tensors one after the other; loaded once for each form.

    `is_copying`: a tensor may be given away after it was added, so it is copied at once.
    """

    def __init__(self, device: Device, *, is_copying: bool) -> None:
        self._device, self.is_copying = device, is_copying
        self._programs: dict[tuple[TensorDesc, tuple[int, ...]], LoadedProgram] = {}

    def joined(self, pieces: Sequence[Tensor], counts: Sequence[int], desc: TensorDesc) -> Tensor:
        """Pieces as one tensor; each is so many tensors like `desc`, 0: one without the axis."""
        key = desc.without_address(), tuple(counts)
        if key not in self._programs:
            self._programs[key] = self._loaded(*key)
        joined = self._device.submit(self._programs[key], pieces, True)
        assert isinstance(joined, Tensor), "it has one output"
        return joined

    def forget(self) -> None:
        """Drop the programs."""
        self._programs.clear()

    def _loaded(self, desc: TensorDesc, counts: tuple[int, ...]) -> LoadedProgram:
        builder = ComputationGraphBuilder("collect")
        # In what elements are stored in, so that joined they keep their bits.
        kind = collected_desc(desc, 1).layout.data_type
        parts = []
        for number, count in enumerate(counts):
            shape = (count, *desc.shape) if count else desc.shape
            piece = builder.input(f"piece{number}", shape, kind)
            parts.append(piece if count else builder.unsqueeze(piece, 0))
        builder.output("all", builder.concat(parts, 0))
        machine = self._device.machine
        program = compile_graph(builder.build(), machine).program
        return self._device.load(Binary((program,), machine.shape, "pipeline"))


class Collected:
    """What the rounds of one repeat made so far, under one name."""

    def __init__(self, joins: Joins) -> None:
        self._joins = joins
        #: Pieces, how many tensors each holds (0: one as it came), how often it was joined.
        self._pieces: list[tuple[Tensor, int, int]] = []
        self._desc: TensorDesc | None = None

    def add(self, made: Tensor) -> None:
        """What one more round made."""
        if self._desc is None:
            self._desc = made.desc
        if self._joins.is_copying:
            made = self._joins.joined([made], [0], self._desc)
        self._pieces.append((made, int(self._joins.is_copying), 0))
        # Those that were joined equally often lie next to each other, at the end.
        while len(alike := self._alike()) == MOST_JOINED:
            self._join(alike)

    def whole(self) -> Tensor:
        """All of them; there is at least one."""
        while len(self._pieces) > 1 or not self._pieces[0][1]:
            self._join(self._pieces[-MOST_JOINED:])
        return self._pieces[0][0]

    def _alike(self) -> list[tuple[Tensor, int, int]]:
        """The last pieces that were joined equally often."""
        level = self._pieces[-1][2]
        last = self._pieces[-MOST_JOINED:]
        return [piece for piece in last if piece[2] == level]

    def _join(self, last: Sequence[tuple[Tensor, int, int]]) -> None:
        """Joins the last pieces."""
        assert self._desc is not None, "something was added"
        pieces, counts = [piece for piece, _, _ in last], [count for _, count, _ in last]
        whole = self._joins.joined(pieces, counts, self._desc)
        level = max(level for _, _, level in last) + 1
        del self._pieces[-len(last) :]
        self._pieces.append((whole, sum(max(1, count) for count in counts), level))
