"""A compiled graph of aot_autograd as a function that takes and gives torch tensors.

Which argument goes where is decided once.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeVar

import torch
from torch.autograd import forward_ad

from stitch.frontend.torch.aten_call import in_pairs
from stitch.frontend.torch.compile.graph_outputs import Output, Result, results_of, shown
from stitch.frontend.torch.compile.program_arguments import ProgramArguments, refuse_tangents
from stitch.frontend.torch.compile.program_form import ProgramForm
from stitch.frontend.torch.compile.shared_storage import ArgumentSlot, SharedStorage
from stitch.frontend.torch.lowering import KEY_LIMIT
from stitch.runtime import PreparedGraph, Replay, chain_graph

#: Called by C for one array after the other.
_TENSOR = torch.from_numpy

Run = TypeVar("Run", bound=Callable[..., Any])


def boxed(run: Run) -> Run:
    """Mark, for aot_autograd, what takes its arguments in a list and empties it: they may die
    early."""
    run._boxed_call = True  # type: ignore[attr-defined]  # how it asks
    return run


class GraphProgram:
    """A graph on a device: a function of torch tensors. Raises what loading and running raise."""

    def __init__(self, form: ProgramForm, storage: SharedStorage) -> None:
        self.form = form
        self._storage = storage
        self._device = storage.device
        self._runs_here, self._queues_here = (
            self._device.holds_run_lock,
            self._device.holds_queue_lock,
        )
        self._lock = self._device.quick_lock
        self._outputs = form.outputs
        slots = [ArgumentSlot(p, p in form.static, p in form.fresh) for p in form.positions]
        self._arguments = ProgramArguments(storage, slots)
        self._prepared = None
        if form.binary is not None:
            loaded = self._device.load(form.binary)
            # Now, not at the first call: what the executor refuses others can run.
            loaded.prepared()
            table, _ = chain_graph((loaded,), ({},), "compiled graph")
            self._prepared = PreparedGraph(self._device, table, title="the compiled graph")
        #: How what ran last is repeated, where torch gets copies of all results.
        self._copies = all(map(storage.copies, results_of(form.outputs)))
        self._repeat: Replay | None = None
        #: Whether the outputs are those as they are, which the first run has looked at.
        self._is_plain = all(map(_is_plain, form.outputs))
        self._nbytes = sum(result.nbytes for result in results_of(form.outputs))

    @boxed
    def __call__(self, arguments: list[Any]) -> list[Any]:
        """Run it on the graph's arguments, and empty their list; the outputs are ready."""
        if forward_ad._current_level >= 0:
            refuse_tangents(arguments)
        storage, prepared, form = self._storage, self._prepared, self.form
        # What is called is a local: a method that an object only has costs 20 ns more to be found.
        holds_run_lock, holds_queue_lock = self._runs_here, self._queues_here
        with self._device.lock if holds_run_lock() or holds_queue_lock() else self._lock:
            results: Any = ()
            is_repeated = False
            if prepared is not None:
                # Not kept where this call does not come to its end: then it is none on the
                # arguments of the call before.
                repeat, self._repeat = self._repeat, None
                tensors = in_parts(arguments, form.complex) if form.complex else arguments
                given = self._arguments
                arrays = given.arrays(tensors)
                if form.has_key:
                    arrays.append(torch.randint(KEY_LIMIT, (1,), device="cpu").numpy())
                results = None
                if self._copies and given.stay:
                    # What ran on the same lent tensors runs again, if it can.
                    if repeat is None:
                        repeat = prepared.repeat(given.all_of(arrays))
                    results = None if repeat is None else repeat(arrays)
                is_repeated = results is not None
                if is_repeated:
                    self._repeat = repeat
                else:
                    results = prepared.run(tuple(given.all_of(arrays)))
                    if type(results) is not tuple:
                        results = (results,)
            if is_repeated and self._is_plain:
                storage.copied_nbytes += self._nbytes
                outputs = list(map(_TENSOR, results))
            else:
                show = storage.copy if is_repeated else storage.result
                outputs = shown(self._outputs, arguments, results, show)
        arguments.clear()
        return outputs


def _is_plain(output: Output) -> bool:
    """Whether an output is a result as it comes."""
    if not isinstance(output, Result) or output.strides is not None:
        return False
    return not (output.dtype is torch.bfloat16 or output.dtype.is_complex)


def in_parts(arguments: Sequence[Any], places: Collection[int]) -> list[Any]:
    """Arguments with the complex ones, which are at these places, as pairs of parts."""
    given = list(arguments)
    for place in places:
        given[place] = in_pairs(given[place])
    return given
