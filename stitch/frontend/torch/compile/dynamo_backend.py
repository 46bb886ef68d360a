"""The backend of torch.compile: `torch.compile(model, backend="stitch")`.

Comes in: fx graphs as dynamo captures them, by way of aot_autograd (so in-place operators are
functional, and the backward pass is a graph too). Goes out: functions that run them as stitched
programs on one device for all graphs with the same options. A graph break simply gives more
programs; what passes between them stays on the device. Importing this module needs the package
torch (an optional extra).

Options, as in `torch.compile(model, backend="stitch", options={"target": "wormhole_n150"})`:
`target`: a machine by name or path (host); `executor`: what computes (torch); `window`: tasks that
the device's queue holds; `algorithm`: `optimize` runs the compiler's passes, `as_written` does not.
"""

from __future__ import annotations

import copy
import itertools
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any

from stitch.errors import CompileError, UsageError, closest

try:
    import torch
except ModuleNotFoundError as error:
    raise CompileError(
        "the backend of torch.compile needs the package torch",
        remedy="pip install stitch-runtime[torch]",
    ) from error

from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.utils._python_dispatch import _disable_current_modes

from stitch.frontend.torch.compile.graph_program import GraphProgram, GraphSettings, boxed
from stitch.frontend.torch.compile.shared_storage import SharedStorage
from stitch.frontend.torch.decompositions import decompositions
from stitch.machine import load_machine
from stitch.program import Space
from stitch.report import Device
from stitch.runtime import DEFAULT_WINDOW

ALGORITHMS = ("optimize", "as_written")
#: Shapes for which one symbolic graph keeps programs; the oldest go first.
MAX_SHAPES = 64
_count = itertools.count()


@dataclass(frozen=True, slots=True)
class CompileSettings:
    """The options of one torch.compile."""

    target: str = "host"
    executor: str = "torch"
    window: int = DEFAULT_WINDOW
    algorithm: str = "optimize"
    max_memory: int | str | None = None

    @staticmethod
    def of(options: Mapping[str, Any] | None) -> CompileSettings:
        """The settings that options ask for; raises `UsageError` for unknown ones."""
        given = dict(options or {})
        known = [field.name for field in fields(CompileSettings)]
        unknown = sorted(map(str, given.keys() - set(known)))
        if unknown:
            raise UsageError(
                f"backend 'stitch' has no option {', '.join(map(repr, unknown))}",
                expected=", ".join(known),
                remedy=closest(unknown[0], known) or None,
            )
        settings = CompileSettings(**{**given, **_spelled(given)})
        if settings.algorithm not in ALGORITHMS:
            raise UsageError(
                "backend 'stitch' has no such algorithm",
                expected=", ".join(ALGORITHMS),
                got=repr(settings.algorithm),
            )
        return settings


def _spelled(given: Mapping[str, Any]) -> dict[str, str]:
    return {name: str(given[name]) for name in ("target", "executor") if name in given}


_storages: dict[tuple[str, str, int, int | str | None], SharedStorage] = {}
_opening = threading.Lock()


def _in_child() -> None:
    """After a fork another thread may have held the lock; devices that it opened are closed."""
    global _opening
    _opening = threading.Lock()


os.register_at_fork(after_in_child=_in_child)


def shared_storage_of(settings: CompileSettings) -> SharedStorage:
    """What torch shares with the device that these settings ask for; the device is opened once."""
    key = (settings.target, settings.executor, settings.window, settings.max_memory)
    with _opening:
        storage = _storages.get(key)
        if storage is None or storage.device.is_closed:
            device = Device(
                load_machine(settings.target), executor=settings.executor, window=settings.window,
                max_memory=settings.max_memory,
            )  # fmt: skip
            storage = _storages[key] = SharedStorage(device)
        return storage


def device_of(options: Mapping[str, Any] | None = None) -> Device:
    """The device that `torch.compile(..., backend="stitch", options=options)` runs on."""
    return shared_storage_of(CompileSettings.of(options)).device


def stitch_backend(
    module: Any,
    examples: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """What torch's entry point `stitch` names: a graph of dynamo as a function of torch tensors.

    Raises `UsageError` for unknown options, `CompileError` with all operators that are lacking.
    """
    if mode is not None:
        raise UsageError("backend 'stitch' has options, not modes", got=f"mode={mode!r}")
    settings = CompileSettings.of(options)
    storage = shared_storage_of(settings)
    backend = aot_autograd(
        fw_compiler=_compiler(storage, settings, "forward"),
        bw_compiler=_compiler(storage, settings, "backward"),
        inference_compiler=_compiler(storage, settings, "inference"),
        decompositions=decompositions(),
        partition_fn=min_cut_rematerialization_partition,
    )
    with without_onednn():
        return backend(module, examples)  # type: ignore[no-any-return]  # torch has no types here


@contextmanager
def without_onednn() -> Iterator[None]:
    """Otherwise a recurrent layer becomes one operator of oneDNN, whose gradient is another."""
    # Not torch.backends.mkldnn.flags: that warns of flags that are not touched.
    before = torch._C._get_mkldnn_enabled()
    try:
        torch._C._set_mkldnn_enabled(False)
        yield
    finally:
        torch._C._set_mkldnn_enabled(before)


def _compiler(storage: SharedStorage, settings: CompileSettings, role: str) -> Callable[..., Any]:
    def compile_graph(module: Any, _: Sequence[Any]) -> Callable[[list[Any]], list[Any]]:
        static, visible = _of_trace(module, role)
        wanted = GraphSettings(
            f"{role}_{next(_count)}", static, visible, settings.algorithm == "optimize",
            Space.DRAM in storage.device.machine.shape.spaces, role == "inference",
        )  # fmt: skip
        if is_static(module.graph):
            # The modes that trace: constants of the graph are read here, and have data.
            with _disable_current_modes():
                return GraphProgram(module, storage, wanted).__call__
        return _ByShapes(module, storage, wanted).__call__

    return compile_graph


def _of_trace(module: Any, role: str) -> tuple[frozenset[int], int]:
    """Which arguments come again at every call, and how many outputs the user sees."""
    if role == "backward":
        return frozenset(), 0
    context = torch._guards.TracingContext.try_get()
    metadata = None if context is None else context.fw_metadata
    static = () if metadata is None else metadata.static_input_indices or ()
    outputs = next(node for node in module.graph.nodes if node.op == "output").args[0]
    if role == "inference" or metadata is None:
        return frozenset(static), len(outputs)
    return frozenset(static), metadata.num_forward_returns


class _ByShapes:
    """A graph with symbolic sizes: a program for each set of shapes that it is called with."""

    def __init__(self, module: Any, storage: SharedStorage, settings: GraphSettings) -> None:
        self._module, self._storage, self._settings = module, storage, settings
        self._programs: dict[tuple[Any, ...], GraphProgram] = {}

    @boxed
    def __call__(self, arguments: list[Any]) -> list[Any]:
        key = tuple(
            (a.shape, a.stride(), a.dtype) if isinstance(a, torch.Tensor) else a for a in arguments
        )
        program = self._programs.get(key)
        if program is None:
            module = with_sizes_of(self._module, arguments)
            program = GraphProgram(module, self._storage, self._settings)
            self._programs[key] = program
            while len(self._programs) > MAX_SHAPES:
                del self._programs[next(iter(self._programs))]
        return program(arguments)


# Graphs with symbolic sizes, for arguments of given shapes ------------------------------------

_NUMBERS = (bool, int, float, torch.SymInt, torch.SymFloat, torch.SymBool)
_SYMBOLS = (torch.SymInt, torch.SymFloat, torch.SymBool)


def is_static(graph: Any) -> bool:
    """Whether all sizes in a graph are numbers already."""
    return not any(_has_symbols(node.meta.get("val")) for node in graph.nodes)


def _has_symbols(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        sizes = (*value.shape, *value.stride()) if value.layout is torch.strided else value.shape
        return any(isinstance(size, torch.SymInt) for size in sizes)
    if isinstance(value, list | tuple):
        return any(map(_has_symbols, value))
    return isinstance(value, _SYMBOLS)


class _Recorder(torch.fx.Interpreter):  # type: ignore[misc]  # torch has no types here
    """Remembers what every node gives."""

    def __init__(self, module: Any) -> None:
        super().__init__(module, garbage_collect_values=False)
        self.results: dict[Any, Any] = {}

    def run_node(self, node: Any) -> Any:
        self.results[node] = super().run_node(node)
        return self.results[node]


def with_sizes_of(module: Any, arguments: Sequence[Any]) -> Any:
    """A copy of a graph module for arguments of just these shapes."""
    mode = torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True)
    sized = copy.deepcopy(module)
    with mode, torch.no_grad():
        fakes = [
            torch.empty_strided(a.shape, a.stride(), dtype=a.dtype)
            if isinstance(a, torch.Tensor)
            else a
            for a in arguments
        ]
        recorder = _Recorder(sized)
        recorder.run(*fakes)
    numbers = {n: v for n, v in recorder.results.items() if isinstance(v, _NUMBERS)}
    for node in sized.graph.nodes:
        if node.op != "output":
            node.meta["val"] = recorder.results[node]
        if node.op not in ("placeholder", "get_attr"):
            node.args = torch.fx.node.map_arg(node.args, lambda n: numbers.get(n, n))
            node.kwargs = torch.fx.node.map_arg(node.kwargs, lambda n: numbers.get(n, n))
    for node in reversed(list(sized.graph.nodes)):
        if node in numbers and node.op == "call_function" and not node.users:
            sized.graph.erase_node(node)
    return sized
