"""The backend of torch.compile: `torch.compile(model, backend="stitch")`.

Comes in: fx graphs as dynamo captures them, by way of aot_autograd (so in-place operators are
functional, and the backward pass is a graph too). Goes out: functions that run them as stitched
programs on one device for all graphs with the same options. A graph break simply gives more
programs; what passes between them stays on the device. Importing this module needs the package
torch (an optional extra).

Options, as in `torch.compile(model, backend="stitch", options={"target": "wormhole_n150"})`:
`target`: a machine (host); `executor`: what computes (torch: each operation by PyTorch, ONNX
Runtime or NumPy, whichever the table of prices says is best); whatever else `open_device` takes,
such as `window`, `max_memory`, `prices`; `passes`: whether the compiler's passes run (True);
`algorithm`: `none`, `greedy` or `search`; `optimizer`: an optimizer of torch.optim whose `step` is
a program from then on (`optimizer_loop`); `fallback`: who runs what Stitch cannot compile, `torch`,
or nobody, an `error`; `min_operations`: where a graph is cut for that, parts with fewer operations
are left to torch as well; `cache`: a folder in which what was compiled is kept for the next
process, or True for torch's own (`TORCHINDUCTOR_CACHE_DIR`). Random numbers follow from a key that
torch draws for each call.
"""

from __future__ import annotations

import inspect
import itertools
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

from stitch.argument_kinds import BOOL
from stitch.errors import CompileError, UsageError, closest

try:
    import torch
except ModuleNotFoundError as error:
    raise CompileError(
        "the backend of torch.compile needs the package torch",
        remedy="pip install stitch-runtime[torch]",
    ) from error

from torch._dynamo.eval_frame import innermost_fn
from torch.utils._python_dispatch import _disable_current_modes

from stitch.frontend.torch.compile.aot_trace import by_aot_autograd
from stitch.frontend.torch.compile.aot_wrappers import Inference
from stitch.frontend.torch.compile.graph_report import GraphReport, Heard, log_report
from stitch.frontend.torch.compile.kept_graphs import keeping, kept_compiler, program_cache
from stitch.frontend.torch.compile.partition import partition
from stitch.frontend.torch.compile.program_form import GraphSettings
from stitch.frontend.torch.compile.shared_storage import SharedStorage
from stitch.frontend.torch.compile.stitched_graph import Run, stitched
from stitch.frontend.torch.decompositions import decompositions
from stitch.machine import Machine
from stitch.program import Space
from stitch.report import Device, open_device
from stitch.runtime import Executor

#: What `algorithm` said before it said what it says everywhere.
_PASSES = {"optimize": True, "as_written": False}
FALLBACKS = ("torch", "error")
MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
#: What `open_device` takes beside the machine.
DEVICE_OPTIONS = tuple(inspect.signature(open_device).parameters)[1:]
#: A program costs some ten microseconds a call, an operator of torch two: parts that are smaller
#: than this are faster where torch runs them between its own (tools/bench/torch_fallback.py).
MIN_OPERATIONS = 4
_count = itertools.count()


@dataclass(frozen=True, slots=True)
class CompileSettings:
    """The options of one torch.compile."""

    target: str | Machine = "host"
    executor: str | Executor = "torch"
    algorithm: str = "none"
    fallback: str = "torch"
    min_operations: int = MIN_OPERATIONS
    #: A folder, True for torch's own, or None.
    cache: str | bool | None = None
    passes: bool = True
    optimizer: Any = None
    #: What `open_device` takes beside the machine and the executor, by name, as far as it is given.
    device: tuple[tuple[str, Any], ...] = ()

    @staticmethod
    def of(options: Mapping[str, Any] | None) -> CompileSettings:
        """The settings that options ask for; raises `UsageError` for unknown ones."""
        given = dict(options or {})
        own = [field.name for field in fields(CompileSettings) if field.name != "device"]
        known = [*own, *(name for name in DEVICE_OPTIONS if name not in own)]
        unknown = sorted(map(str, given.keys() - set(known)))
        if unknown:
            raise UsageError(
                f"backend 'stitch' has no option {', '.join(map(repr, unknown))}",
                expected=", ".join(known),
                remedy=closest(unknown[0], known) or None,
            )
        given.update({n: str(v) for n, v in given.items() if isinstance(v, Path)})
        device = tuple((name, given.pop(name)) for name in known if name in given.keys() - {*own})
        settings = CompileSettings(**given, device=device)
        if settings.algorithm != "none":
            _check_algorithm(settings.algorithm)
        BOOL.check("backend 'stitch'", "passes", settings.passes)
        if settings.fallback not in FALLBACKS:
            raise UsageError(
                "backend 'stitch' has no such fallback",
                expected=", ".join(FALLBACKS),
                got=repr(settings.fallback),
            )
        if settings.cache is False:
            settings = replace(settings, cache=None)
        if not isinstance(settings.cache, str | bool | None):
            raise UsageError(
                "backend 'stitch' keeps what it compiled in a folder",
                expected="cache=FOLDER, or True for torch's own",
                got=repr(settings.cache),
            )
        least = settings.min_operations
        if not isinstance(least, int) or isinstance(least, bool) or least < 0:
            raise UsageError(
                "min_operations is a number of operations",
                expected="a whole number, 0 or more",
                got=repr(least),
            )
        return settings


def _check_algorithm(algorithm: str) -> None:
    # What trains is loaded for who names one of its algorithms.
    from stitch.training import ALGORITHMS, check_algorithm

    if algorithm in _PASSES:
        raise UsageError(
            "algorithm says where tensors lie, and passes whether the compiler's passes run",
            expected=", ".join(ALGORITHMS), got=f"algorithm={algorithm!r}",
            remedy=f"passes={_PASSES[algorithm]}",
        )  # fmt: skip
    check_algorithm(algorithm)


_storages: dict[tuple[Any, ...], SharedStorage] = {}
_opening = threading.Lock()


def _in_child() -> None:
    """After a fork another thread may have held the lock; devices that it opened are closed."""
    global _opening
    _opening = threading.Lock()


os.register_at_fork(after_in_child=_in_child)


def shared_storage_of(settings: CompileSettings) -> SharedStorage:
    """What torch shares with the device that these settings ask for; the device is opened once."""
    key = (settings.target, settings.executor, *sorted(settings.device))
    with _opening:
        storage = _storages.get(key)
        if storage is None or storage.device.is_closed:
            device = open_device(
                settings.target, executor=settings.executor, **dict(settings.device)
            )
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

    `mode`: one of torch's, all of which are the same: a plan is recorded, and runs again without
    being made; who computes follows from a table of prices, and nothing is tuned by a clock. Raises
    `UsageError` for unknown options and modes, `CompileError` with all operators that are lacking.
    """
    settings = CompileSettings.of(options)
    if mode not in (None, *MODES):
        raise UsageError(
            f"backend 'stitch' has no mode {mode!r}",
            expected=", ".join(MODES),
            remedy=closest(str(mode), MODES) or None,
        )
    return compiled_graph(module, examples, settings)


def compiled_graph(
    module: Any, examples: Sequence[Any], settings: CompileSettings, heard: Heard | None = None
) -> Callable[..., Any]:
    """A graph of dynamo as a function of torch tensors; `heard` is told of each graph that
    aot_autograd makes of it, when that has been compiled."""
    storage = shared_storage_of(settings)
    keeps = settings.cache is not None and heard is None
    made: list[tuple[Inference, Run]] = []

    def compiler(role: str) -> Callable[..., Any]:
        compile_graph = _compiler(storage, settings, role, heard, made.append)
        return (
            kept_compiler(compile_graph, partial(shared_storage_of, settings))
            if keeps
            else (compile_graph)
        )

    with ExitStack() as stack:
        stack.enter_context(without_onednn())
        if keeps:
            named = replace(settings, executor=storage.device.executor, cache=None, optimizer=None)
            stack.enter_context(keeping(module, _folder(settings), named, storage.device.machine))
        run = by_aot_autograd(
            module, examples, fw_compiler=compiler("forward"), bw_compiler=compiler("backward"),
            inference_compiler=compiler("inference"), partition_fn=partition,
            decompositions=decompositions(),
        )  # fmt: skip
    while made:
        graph, straight = made.pop()
        run = graph.unwrapped(straight, run, examples)
    if settings.optimizer is not None:
        from stitch.frontend.torch.compile.optimizer_loop import optimizer_loop

        # It steps here for as long as there is a graph that was compiled with it. Dynamo keeps the
        # innermost function alone.
        innermost_fn(run).loop = optimizer_loop(settings.optimizer, storage)
    return run


def _folder(settings: CompileSettings) -> Path | None:
    return Path(settings.cache) if isinstance(settings.cache, str) else None


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


def _compiler(
    storage: SharedStorage, settings: CompileSettings, role: str, heard: Heard | None,
    note: Callable[[tuple[Inference, Run]], object],
) -> Callable[..., Any]:  # fmt: skip
    def tell(report: GraphReport) -> None:
        storage.counts.add(report)
        log_report(report)
        if heard is not None:
            heard(report)

    def compile_graph(module: Any, _: Sequence[Any]) -> Run:
        static, visible = _of_trace(module, role)
        wanted = GraphSettings(
            f"{role}_{next(_count)}", static, visible, settings.passes,
            Space.DRAM in storage.device.machine.shape.spaces, role,
            settings.fallback == "error", settings.min_operations,
            None if settings.cache is None else program_cache(_folder(settings)),
            copies_results=role == "inference",
        )  # fmt: skip
        # The modes that trace: constants of the graph are read here, and have data.
        with _disable_current_modes():
            graph = Inference.of(module.graph, _metadata())
            run = stitched(module, storage, wanted, tell)
        if role == "inference":
            note((graph, run))
        return run

    return compile_graph


def _metadata() -> Any:
    context = torch._guards.TracingContext.try_get()
    return None if context is None else context.fw_metadata


def _of_trace(module: Any, role: str) -> tuple[frozenset[int], int]:
    """Which arguments come again at every call, and how many outputs the user sees."""
    if role == "backward":
        return frozenset(), 0
    metadata = _metadata()
    static = () if metadata is None else metadata.static_input_indices or ()
    outputs = next(node for node in module.graph.nodes if node.op == "output").args[0]
    if role == "inference" or metadata is None:
        return frozenset(static), len(outputs)
    return frozenset(static), metadata.num_forward_returns
