"""The backend of torch.compile: `torch.compile(model, backend="stitch", options={...})`.

The options are `target` and `executor` (of the device), all other arguments of `open_device`, and:
`passes`: run the compiler's passes (True); `algorithm`: `none`, `greedy` or `search`; `optimizer`:
an optimizer of torch.optim whose `step` becomes a program (`optimizer_loop`); `fallback`: `torch`
runs operators that Stitch cannot compile, or they raise an `error`; `min_operations`: smaller parts
of a graph that is cut for that are left to torch; `cache`: a folder for compiled programs, or True
for torch's own (`TORCHINDUCTOR_CACHE_DIR`).

Values between the programs of a graph, or of several graphs, stay on the device. Random numbers
follow from a key that torch draws for each call.
"""

from __future__ import annotations

import inspect
import itertools
import operator
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

from stitch.argument_kinds import BOOL, WHOLE, ArgumentKind
from stitch.errors import CompileError, UsageError, closest

try:
    import torch
except ModuleNotFoundError as error:
    raise CompileError(
        "the backend of torch.compile needs the package torch",
        remedy="pip install 'stitch-runtime[torch]'",
    ) from error

from torch.utils.checkpoint import CheckpointPolicy

from stitch.frontend.torch import torch_internals as internals
from stitch.frontend.torch.compile.graph_cache import (
    autograd_cache,
    caching_compiler,
)
from stitch.frontend.torch.compile.graph_program import GraphLowering, GraphProgram, GraphSettings
from stitch.frontend.torch.compile.stitched_graph import Run, stitched
from stitch.frontend.torch.compile.subgraphs import ORIGIN, copied, is_random, is_tensor, unit_of
from stitch.frontend.torch.compile.symbolic_graph import is_static
from stitch.frontend.torch.decompositions import decompositions
from stitch.frontend.torch.graph_report import GraphReport, ReportListener, log_report
from stitch.frontend.torch.lowering import CHECKS, lowering_of
from stitch.frontend.torch.shared_storage import SharedStorage
from stitch.machine import Machine
from stitch.option_values import is_torch_device
from stitch.program import Space
from stitch.report import Device, open_device
from stitch.runtime import Executor

# Calls without aot_autograd's wrappers ------------------------------------------------------------

_is_grad_enabled = torch.is_grad_enabled


#: For the function of a graph without gradients, aot_autograd's wrapper of it, and examples of its
#: arguments: the function for arguments like these, which is the first if no wrapper is needed.
Unwrap = Callable[[Callable[..., Any], Callable[..., Any], Sequence[Any]], Callable[..., Any]]


def unwrapping(graph: Any, metadata: Any) -> Unwrap:
    """Return how to call a graph of aot_autograd, which is cut afterwards; `metadata` is torch's
    description of it."""
    count = sum(node.op == "placeholder" for node in graph.nodes)
    is_torchs = all(map(_is_torchs, graph.nodes))

    def unwrapped(
        run: Callable[..., Any], wrapped: Callable[..., Any], examples: Sequence[Any]
    ) -> Callable[..., Any]:
        # aot_autograd may drop duplicate arguments, add some, or flatten lists.
        is_flat = count == len(examples) and all(isinstance(e, torch.Tensor) for e in examples)
        if not is_flat or metadata is None or not _is_plain(metadata):
            return wrapped
        if isinstance(getattr(run, "__self__", None), GraphProgram):
            return lambda *arguments: run(list(arguments))
        if not is_torchs:
            return wrapped

        def run_without_modes(*arguments: Any) -> Any:
            # These modes would affect the operators that torch runs between programs.
            if _is_grad_enabled() or internals.is_autocast_enabled():
                return wrapped(*arguments)
            return run(list(arguments))

        return run_without_modes

    return unwrapped


def _is_torchs(node: Any) -> bool:
    """Whether a node is neither a custom operator, which torch checks at its first run, nor one
    that calls functions."""
    if node.op != "call_function" or node.target is operator.getitem:
        return bool(node.op != "get_attr")
    return isinstance(node.target, internals.OpOverload) and node.target.namespace in (
        "aten",
        "prims",
    )


def _is_plain(metadata: Any) -> bool:
    """Whether a graph mutates no arguments, returns no views of them, and has only plain tensors
    as arguments and results."""
    return not bool(
        metadata.num_mutated_inp_runtime_indices
        or metadata.num_mutated_graph_handled_indices
        or metadata.num_outputs_aliased
        or metadata.num_intermediate_bases
        or metadata.dynamic_outputs
        or metadata.grad_enabled_mutation is not None
        or metadata.tokens
        or metadata.is_rng_op_functionalized
        or metadata.num_graphsafe_rng_states
        or not all(isinstance(m, internals.PlainTensorMeta) for m in metadata.subclass_inp_meta)
        or not all(
            isinstance(m, internals.PlainTensorMeta) for m in metadata.subclass_fw_graph_out_meta
        )
    )


# Partitioning joint graphs ------------------------------------------------------------------------

aten = torch.ops.aten


def partition(joint: Any, *operands: Any, **named: Any) -> Any:
    """Return the forward and the backward graph of a joint one; the decisions of a user's
    checkpoint stay."""
    _ignore_running_statistics(joint.graph)
    refused = _refused(joint) if is_static(joint.graph) else _without_lowering(joint.graph)
    for node in set(refused):
        for result in (node, *(u for u in node.users if u.target is operator.getitem)):
            if is_tensor(result):
                result.meta.setdefault("recompute", CheckpointPolicy.MUST_SAVE)
    # torch merges equal nodes, except the random operators that it lists.
    is_safe = not any(
        is_random(n) and internals.get_aten_target(n) not in internals.rand_ops
        for n in joint.graph.nodes
    )
    with internals.functorch_config.patch(cse=internals.functorch_config.cse and is_safe):
        return internals.min_cut_rematerialization_partition(joint, *operands, **named)


def _ignore_running_statistics(graph: Any) -> None:
    """Make gradients and recomputation of batch normalization in training independent of running
    statistics: these are overwritten before the backward pass runs."""
    for node in list(graph.nodes):
        if node.target is aten.native_batch_norm_backward.default and node.args[7]:
            node.args = (*node.args[:3], None, None, *node.args[5:])
        is_trained = node.target is aten._native_batch_norm_legit_functional.default
        if not is_trained or not node.args[5] or "recompute" not in node.meta:
            continue
        with graph.inserting_before(node):
            operands = *node.args[:3], *node.args[5:]
            again = graph.call_function(aten._native_batch_norm_legit.no_stats, operands)
        again.meta = {**node.meta, "val": tuple(node.meta["val"][:3])}
        for result in list(node.users):
            if result.args[1] < 3:
                result.args = (again, result.args[1])
            else:
                result.meta.pop("recompute", None)
        node.meta.pop("recompute")


def _refused(joint: Any) -> Iterable[Any]:
    """The nodes that torch will run: a joint graph is lowered like its two parts."""
    # Constants of the graph are read, so tracing modes must be off.
    with internals.disable_current_modes():
        lowering = GraphLowering(copied(joint.graph), joint, GraphSettings("joint", role="forward"))
    origins = (refusal.node.meta.get(ORIGIN) for refusal in lowering.refusals)
    return [unit_of(node) for node in origins if isinstance(node, torch.fx.Node)]


def _without_lowering(graph: Any) -> Iterable[Any]:
    known = CHECKS | {operator.getitem}
    return [
        n for n in graph.nodes
        if n.op == "call_function" and n.target not in known and lowering_of(n.target) is None
    ]  # fmt: skip


# Options ------------------------------------------------------------------------------------------

FALLBACKS = ("torch", "error")
MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
#: Arguments of `open_device` besides the machine.
DEVICE_OPTIONS = tuple(inspect.signature(open_device).parameters)[1:]
#: A call of a program takes about ten microseconds, an operator of torch two: smaller parts are
#: faster in torch (tools/bench/torch_fallback.py).
MIN_OPERATIONS = 4
_OPTION_KINDS = {
    "passes": BOOL,
    "fallback": ArgumentKind(" or ".join(FALLBACKS), lambda value: value in FALLBACKS),
    "cache": ArgumentKind(
        "a folder, True for torch's own, or None",
        lambda value: isinstance(value, str | bool | None),
    ),
    "min_operations": ArgumentKind(
        "a whole number, 0 or more", lambda value: WHOLE.accepts(value) and value >= 0
    ),
}
_count = itertools.count()


@dataclass(frozen=True, slots=True)
class CompileSettings:
    """The options of one torch.compile."""

    target: str | Machine = "host"
    executor: str | Executor | None = "torch"
    algorithm: str = "none"
    fallback: str = "torch"
    min_operations: int = MIN_OPERATIONS
    #: A folder, True for torch's own, or None.
    cache: str | bool | None = None
    passes: bool = True
    optimizer: Any = None
    #: Other arguments of `open_device`, by name.
    device: tuple[tuple[str, Any], ...] = ()

    @staticmethod
    def of(options: Mapping[str, Any] | None) -> CompileSettings:
        """Check options; raises `UsageError` for unknown names and wrong values."""
        given = dict(options or {})
        if is_torch_device(given.get("target")):
            given.setdefault("executor", None)  # The device has its own.
        own = [field.name for field in fields(CompileSettings) if field.name != "device"]
        known = [*own, *(name for name in DEVICE_OPTIONS if name not in own)]
        unknown = sorted(map(str, given.keys() - set(known)))
        if "devices" in given or "parallel" in given:
            raise UsageError(
                "backend 'stitch' runs a model's graphs on one device: torch drives the training, "
                "so there is none to divide",
                got=", ".join(word for word in ("devices", "parallel") if word in given),
                remedy="stitch.torch.compile(module, optimizer=..., algorithm='search', "
                "devices=...) trains it on several devices by the same loop",
            )
        if unknown:
            near = "name the device as option 'target'" if "device" in unknown else ""
            raise UsageError(
                f"backend 'stitch' has no option {', '.join(map(repr, unknown))}",
                expected=", ".join(known),
                remedy=near or closest(unknown[0], known) or None,
            )
        given.update({n: str(v) for n, v in given.items() if isinstance(v, Path)})
        device = tuple((name, given.pop(name)) for name in known if name in given.keys() - {*own})
        settings = CompileSettings(**given, device=device)
        if settings.algorithm != "none":
            # Late, because stitch.training takes time to load.
            from stitch.training import check_algorithm

            check_algorithm(settings.algorithm)
        for name, kind in _OPTION_KINDS.items():
            kind.check("backend 'stitch'", name, getattr(settings, name))
        return replace(settings, cache=None) if settings.cache is False else settings


_storages: dict[tuple[Any, ...], SharedStorage] = {}
_opening = threading.Lock()


def _in_child() -> None:
    """Replace the lock in a forked child, because another thread may have held it."""
    global _opening
    _opening = threading.Lock()


os.register_at_fork(after_in_child=_in_child)


def shared_storage_of(settings: CompileSettings) -> SharedStorage:
    """Return the storage shared with the device of these settings; the device is opened once."""
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
    """Return the device of `torch.compile(..., backend="stitch", options=options)`."""
    return shared_storage_of(CompileSettings.of(options)).device


def stitch_backend(
    module: Any, examples: Sequence[Any], *, options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:  # fmt: skip
    """Compile a graph of dynamo: torch's entry point `stitch`.

    Args:
        module: The graph.
        examples: Its arguments, fake tensors.
        options: See this module.
        mode: A mode of torch; all modes do the same.

    Returns:
        A function of torch tensors.

    Raises:
        UsageError: unknown options or mode.
        CompileError: with `fallback="error"`, lists all operators that are not supported.
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
    module: Any, examples: Sequence[Any], settings: CompileSettings,
    listener: ReportListener | None = None,
) -> Callable[..., Any]:  # fmt: skip
    """Compile a graph of dynamo to a function of torch tensors; `listener` is called with the
    report of each graph that aot_autograd makes of it."""
    storage = shared_storage_of(settings)
    is_cached = settings.cache is not None and listener is None
    inferences: list[tuple[Unwrap, Run]] = []

    def compiler(role: str) -> Callable[..., Any]:
        compile_graph = _compiler(storage, settings, role, listener, inferences.append)
        if is_cached:
            compile_graph = caching_compiler(compile_graph, partial(shared_storage_of, settings))
        return compile_graph

    with ExitStack() as stack:
        stack.enter_context(without_onednn())
        # Torch makes many modules of graphs that nothing runs: none is written as Python.
        stack.enter_context(internals.lazy_graph_modules(True))
        if is_cached:
            named = replace(settings, executor=storage.device.executor, cache=None, optimizer=None)
            key = named, storage.device.machine
            stack.enter_context(autograd_cache(module, _folder(settings), *key))
        run: Callable[..., Any] = internals.aot_autograd(
            fw_compiler=compiler("forward"), bw_compiler=compiler("backward"),
            inference_compiler=compiler("inference"), partition_fn=partition,
            decompositions=decompositions(),
        )(module, examples)  # fmt: skip
    while inferences:
        unwrapped, inner = inferences.pop()
        run = unwrapped(inner, run, examples)
    if settings.optimizer is not None:
        from stitch.frontend.torch.compile.optimizer_loop import optimizer_loop

        # The loop lives as long as a compiled graph: dynamo keeps the innermost function.
        internals.innermost_fn(run).loop = optimizer_loop(settings.optimizer, storage)
    return run


def _folder(settings: CompileSettings) -> Path | None:
    return Path(settings.cache) if isinstance(settings.cache, str) else None


@contextmanager
def without_onednn() -> Iterator[None]:
    """Disable oneDNN, which would make one operator of a recurrent layer, with its own gradient."""
    # Not torch.backends.mkldnn.flags: it warns about other flags.
    before = internals.is_mkldnn_enabled()
    try:
        internals.set_mkldnn_enabled(False)
        yield
    finally:
        internals.set_mkldnn_enabled(before)


def _compiler(
    storage: SharedStorage, settings: CompileSettings, role: str, listener: ReportListener | None,
    add_inference: Callable[[tuple[Unwrap, Run]], object],
) -> Callable[..., Any]:  # fmt: skip
    def report_graph(report: GraphReport) -> None:
        storage.counts.add(report)
        log_report(report)
        if listener is not None:
            listener(report)

    def compile_graph(module: Any, _: Sequence[Any]) -> Run:
        static, visible = _of_trace(module, role)
        wanted = GraphSettings(
            f"{role}_{next(_count)}", static, visible, settings.passes,
            Space.DRAM in storage.device.machine.shape.spaces, role,
            settings.fallback == "error", settings.min_operations,
            copies_results=role == "inference",
        )  # fmt: skip
        # Constants of the graph are read, so tracing modes must be off.
        with internals.disable_current_modes():
            unwrapped = unwrapping(module.graph, _metadata())
            run = stitched(module, storage, wanted, report_graph, _elsewhere(module, storage))
        if role == "inference":
            add_inference((unwrapped, run))
        return run

    return compile_graph


def _elsewhere(module: Any, storage: SharedStorage) -> Mapping[Any, str]:
    """The nodes whose result is not where the device's memory is, with the reason."""
    places = {
        node: place for node in module.graph.nodes
        if node.op == "call_function" and is_tensor(node)
        and (place := node.meta["val"].device) != storage.place
    }  # fmt: skip
    why = f"the device's memory is on {storage.place}: see the option 'target'"
    return {node: f"it is on {place}, and {why}" for node, place in places.items()}


def _metadata() -> Any:
    context = internals.TracingContext.try_get()
    return None if context is None else context.fw_metadata


def _of_trace(module: Any, role: str) -> tuple[frozenset[int], int]:
    """The positions of arguments that are the same in all calls, and the number of outputs that
    the user sees."""
    if role == "backward":
        return frozenset(), 0
    metadata = _metadata()
    static = () if metadata is None else metadata.static_input_indices or ()
    outputs = module.graph.output_node().args[0]
    if role == "inference" or metadata is None:
        return frozenset(static), len(outputs)
    return frozenset(static), metadata.num_forward_returns
