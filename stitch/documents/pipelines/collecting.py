"""Collecting: what the rounds of a repeat make becomes one tensor, along a new first axis.

They are joined as they come, `MOST_JOINED` at a time, by small programs that are compiled when they
are first needed: so no program has an input for every round.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Generic, TypeAlias, TypeVar

from stitch.compiler import compile_graph
from stitch.documents.pipelines.checked_values import collected_desc
from stitch.graph import ComputationGraphBuilder
from stitch.program import TensorDesc
from stitch.report import Device
from stitch.runtime import LoadedProgram, Tensor
from stitch.tasks import Future, TaskGraph
from stitch.ttb import Binary

#: Tensors that one program joins.
MOST_JOINED = 64

T = TypeVar("T", Tensor, Future)
#: Joins pieces; each is so many tensors of a descriptor, 0: one without the axis.
Join: TypeAlias = Callable[[Sequence[T], Sequence[int], TensorDesc], T]


class Joins:
    """Programs of a device that put tensors one after the other; loaded once for each form.

    `is_copying`: a tensor may be given away after it was added, so it is copied at once.
    """

    def __init__(self, device: Device, *, is_copying: bool) -> None:
        self._device, self.is_copying = device, is_copying
        self._programs: dict[tuple[TensorDesc, tuple[int, ...]], LoadedProgram] = {}

    def tensors(self) -> Collected[Tensor]:
        """Collects tensors, by runs that are queued."""
        return Collected(self._queued, is_copying=self.is_copying)

    def futures(self, graph: TaskGraph) -> Collected[Future]:
        """Collects values of a task graph, by tasks of it."""
        return Collected(partial(self._added, graph), is_copying=self.is_copying)

    def most_tasks(self, rounds: int) -> int:
        """So many runs join so many rounds, at most."""
        copies = rounds if self.is_copying else 0
        return copies + rounds // (MOST_JOINED - 1) + 1

    def _queued(self, pieces: Sequence[Tensor], counts: Sequence[int], desc: TensorDesc) -> Tensor:
        joined = self._device.submit(self._program(desc, counts), pieces, True)
        assert isinstance(joined, Tensor), "it has one output"
        return joined

    def _added(
        self, graph: TaskGraph, pieces: Sequence[Future], counts: Sequence[int], desc: TensorDesc
    ) -> Future:
        joined = graph.call(self._program(desc, counts), *pieces)
        assert isinstance(joined, Future), "it has one output"
        return joined

    def _program(self, desc: TensorDesc, counts: Sequence[int]) -> LoadedProgram:
        key = desc.without_address(), tuple(counts)
        if key not in self._programs:
            self._programs[key] = self._loaded(*key)
        return self._programs[key]

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


class Collected(Generic[T]):
    """What the rounds of one repeat made so far, under one name."""

    def __init__(self, join: Join[T], *, is_copying: bool) -> None:
        self._join: Join[T] = join
        self._is_copying = is_copying
        #: Pieces, how many tensors each holds (0: one as it came), how often it was joined.
        self._pieces: list[tuple[T, int, int]] = []
        self._desc: TensorDesc | None = None

    def add(self, made: T) -> None:
        """What one more round made."""
        if self._desc is None:
            self._desc = made.desc
        if self._is_copying:
            made = self._join([made], [0], self._desc)
        self._take(made, int(self._is_copying), 0)

    def settle(self) -> None:
        """Joins what was added one by one: none of it is needed any more, and may be given away."""
        alone = [piece for piece in self._pieces if not piece[1]]
        if alone:
            self._joined(alone)

    def add_joined(self, made: T, count: int) -> None:
        """What so many more rounds made, joined; not the first one."""
        self._take(made, count, 1)

    def whole(self) -> T:
        """All of them; there is at least one."""
        while len(self._pieces) > 1 or not self._pieces[0][1]:
            self._joined(self._pieces[-MOST_JOINED:])
        return self._pieces[0][0]

    def _take(self, made: T, count: int, level: int) -> None:
        self._pieces.append((made, count, level))
        # Those that were joined equally often lie next to each other, at the end.
        while len(alike := self._alike()) == MOST_JOINED:
            self._joined(alike)

    def _alike(self) -> list[tuple[T, int, int]]:
        """The last pieces that were joined equally often."""
        level = self._pieces[-1][2]
        last = self._pieces[-MOST_JOINED:]
        return [piece for piece in last if piece[2] == level]

    def _joined(self, last: Sequence[tuple[T, int, int]]) -> None:
        """Joins the last pieces."""
        assert self._desc is not None, "something was added"
        pieces, counts = [piece for piece, _, _ in last], [count for _, count, _ in last]
        whole = self._join(pieces, counts, self._desc)
        level = max(level for _, _, level in last) + 1
        del self._pieces[-len(last) :]
        self._pieces.append((whole, sum(max(1, count) for count in counts), level))
