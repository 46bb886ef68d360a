"""The backend of torch.compile: `torch.compile(model, backend="stitch")`.

A graph break simply gives more programs; what passes between them stays on the device. Importing
this module needs the package torch (an optional extra).

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
import operator
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
        remedy="pip install 'stitch-runtime[torch]'",
    ) from error

from torch._dynamo import disable
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.eval_frame import innermost_fn
from torch._dynamo.utils import counters, flatten_graph_inputs
from torch._functorch import config as functorch_config
from torch._functorch._aot_autograd.schemas import PlainTensorMeta
from torch._functorch.aot_autograd import SerializableAOTDispatchCompiler, aot_module_simplified
from torch._functorch.compile_utils import get_aten_target, rand_ops
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.checkpoint import CheckpointPolicy

from stitch.frontend.torch.compile.graph_cache import keeping, kept_compiler, program_cache
from stitch.frontend.torch.compile.graph_program import Building, GraphProgram, GraphSettings
from stitch.frontend.torch.compile.graph_report import GraphReport, Heard, log_report
from stitch.frontend.torch.compile.shared_storage import SharedStorage
from stitch.frontend.torch.compile.stitched_graph import Run, is_static, stitched
from stitch.frontend.torch.compile.subgraphs import ORIGIN, copied, is_random, is_tensor, unit_of
from stitch.frontend.torch.decompositions import decompositions
from stitch.frontend.torch.lowering import CHECKS, lowering_of
from stitch.machine import Machine
from stitch.program import Space
from stitch.report import Device, open_device
from stitch.runtime import Executor

# --------------------------------------------------------------------------------------------------
# A graph of dynamo by way of aot_autograd: without what torch's own class for that loads.


def by_aot_autograd(
    module: Any, examples: Sequence[Any], *, bw_compiler: Any, **how: Any
) -> Callable[..., Any]:
    """The function; `how` is as `aot_module_simplified` takes it. Raises what compilers raise."""
    if os.environ.get("TORCH_COMPILE_DEBUG") == "1":
        logged: Callable[..., Any] = aot_autograd(bw_compiler=bw_compiler, **how)(module, examples)
        return logged
    if any(isinstance(example, list | tuple | dict) for example in examples):
        again = partial(by_aot_autograd, bw_compiler=bw_compiler, **how)
        flat: Callable[..., Any] = flatten_graph_inputs(module, examples, again)
        return flat
    counted, is_done = counters["aot_autograd"], False
    counted["total"] += 1
    try:
        run = aot_module_simplified(module, examples, bw_compiler=_untraced(bw_compiler), **how)
        is_done = True
    finally:
        counted["ok" if is_done else "not_ok"] += 1
    left_alone: Callable[..., Any] = disable(run, reason="it is compiled")
    return left_alone


def _untraced(compiler: Any) -> Any:
    """A compiler of backward passes that dynamo traces neither itself nor what it makes: it runs
    where others' code may be traced."""
    if isinstance(compiler, SerializableAOTDispatchCompiler):
        compiler.compiler_fn = _untraced(compiler.compiler_fn)
        return compiler

    def compile_backward(*arguments: Any, **named: Any) -> Any:
        made = disable(compiler, reason="it compiles")(*arguments, **named)
        return disable(made, reason="it is compiled")

    return compile_backward


# --------------------------------------------------------------------------------------------------
# What torch's aot_autograd wraps around a compiled graph, and where nothing needs it.

_are_gradients_on = torch.is_grad_enabled
_is_autocast_on = torch._C._is_any_autocast_enabled


@dataclass(frozen=True, slots=True)
class Inference:
    """A graph without gradients: how many arguments it takes, what aot_autograd knows of it, and
    whether all that it consists of is torch's own operators."""

    takes: int
    metadata: Any
    is_torchs: bool

    @staticmethod
    def of(graph: Any, metadata: Any) -> Inference:
        """That of a graph of aot_autograd, before it is cut."""
        takes = sum(node.op == "placeholder" for node in graph.nodes)
        return Inference(takes, metadata, all(map(_is_torchs, graph.nodes)))

    def unwrapped(
        self, run: Callable[..., Any], wrapped: Callable[..., Any], examples: Sequence[Any]
    ) -> Callable[..., Any]:
        """What is called with arguments like the examples: what the graph became, where nothing
        needs the wrappers, or that in them."""
        # Arguments may be left out for coming twice, be added, or be in lists.
        is_flat = self.takes == len(examples) and all(map(_is_tensor, examples))
        if not is_flat or self.metadata is None or not _is_plain(self.metadata):
            return wrapped
        if isinstance(getattr(run, "__self__", None), GraphProgram):
            return lambda *arguments: run(list(arguments))
        if not self.is_torchs:
            return wrapped

        def where_modes_are_off(*arguments: Any) -> Any:
            # Between programs torch runs operators, which would listen to them.
            if _are_gradients_on() or _is_autocast_on():
                return wrapped(*arguments)
            return run(list(arguments))

        return where_modes_are_off


def _is_torchs(node: Any) -> bool:
    """Whether a node is no operator of somebody else, which torch looks at when it runs first, nor
    one that calls functions."""
    if node.op != "call_function" or node.target is operator.getitem:
        return bool(node.op != "get_attr")
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    namespace: str = node.target.namespace
    return namespace in ("aten", "prims")


def _is_tensor(example: Any) -> bool:
    return isinstance(example, torch.Tensor)


def _is_plain(metadata: Any) -> bool:
    """Whether a graph changes none of its arguments, gives none of their bytes, and all that it
    takes and gives is plain tensors."""
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
        or not all(isinstance(m, PlainTensorMeta) for m in metadata.subclass_inp_meta)
        or not all(isinstance(m, PlainTensorMeta) for m in metadata.subclass_fw_graph_out_meta)
    )


# --------------------------------------------------------------------------------------------------
# How aot_autograd divides a graph of values and gradients into a forward and a backward one.

aten = torch.ops.aten


def partition(joint: Any, *operands: Any, **named: Any) -> Any:
    """The forward and the backward graph of a joint one. What a user's checkpoint says of a node
    is left as it is."""
    _part_from_running_statistics(joint.graph)
    refused = _refused(joint) if is_static(joint.graph) else _without_lowering(joint.graph)
    for node in set(refused):
        for result in (node, *(u for u in node.users if u.target is operator.getitem)):
            if is_tensor(result):
                result.meta.setdefault("recompute", CheckpointPolicy.MUST_SAVE)
    # Torch makes one of nodes that are alike, and knows by a list of its own which ones draw.
    is_known = not any(
        is_random(n) and get_aten_target(n) not in rand_ops for n in joint.graph.nodes
    )
    with functorch_config.patch(cse=functorch_config.cse and is_known):
        return min_cut_rematerialization_partition(joint, *operands, **named)


def _part_from_running_statistics(graph: Any) -> None:
    """Backward passes of batches in training read no running statistics, which are overwritten
    when they run: gradients are taken without, and what a checkpoint computes again is."""
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
    """What torch will run; values and gradients are lowered alike in one graph and in two."""
    # The modes that trace: constants of the graph are read here, and have data.
    with _disable_current_modes():
        building = Building(copied(joint.graph), joint, GraphSettings("joint", role="forward"))
    origins = (refusal.node.meta.get(ORIGIN) for refusal in building.refusals)
    return [unit_of(node) for node in origins if isinstance(node, torch.fx.Node)]


def _without_lowering(graph: Any) -> Iterable[Any]:
    known = CHECKS | {operator.getitem}
    return [
        n for n in graph.nodes
        if n.op == "call_function" and n.target not in known and lowering_of(n.target) is None
    ]  # fmt: skip


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
