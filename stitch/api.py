"""The public API: compile, load, open devices, submit, wait, convert layouts, chain programs.

Training, pipeline files and front ends are imported on first use: most processes only run compiled
programs.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from stitch.argument_kinds import (
    EXAMPLES,
    INDEX_OR_NAME,
    LIST,
    MAPPING,
    PATH,
    TEXT,
    WHOLE,
    WORDS,
    either,
    instance_of,
    member_of,
    optional,
    several,
    takes,
    with_method,
)
from stitch.compile_cache import CompileCache
from stitch.compiler import CompileOptions, compile_dynamic, split_graph
from stitch.dynamic_model import DynamicModel, exclude_small_sizes
from stitch.errors import UsageError, closest, unknown
from stitch.frontend import (
    TrainableSource,
    opened,
    read_dynamic,
    read_graph,
    read_module,
    read_trainable,
    torch_device,
)
from stitch.graph import ComputationGraph, PlacementOption, Side, parse_placement
from stitch.linking import LinkedModel, link
from stitch.machine import Machine, load_machine
from stitch.model import PRODUCER, CompiledModel, ModelOfBinary, compile_for_inference
from stitch.option_values import DEFAULT_TARGET
from stitch.program import (
    Dim,
    InputKind,
    InputSlot,
    Layout,
    MathFidelity,
    OutputSlot,
    Role,
    Space,
    TensorDesc,
)
from stitch.report import MACHINE, Device, open_device
from stitch.runtime import TENSOR, LoadedProgram, RuntimeDevice, RuntimePipeline, Tensor
from stitch.ttb import SOURCE, Binary, SymbolicBinary, inspect_sizes, load_any

if TYPE_CHECKING:
    from stitch.documents import YamlPipeline
    from stitch.mesh import CompiledStages, MachineSpecification, Mesh, ParallelOptions
    from stitch.training import Loss, Optimizer, PlacementResult, TrainingOptions

_DEVICE = instance_of("an open device", RuntimeDevice)
_OPTION = either(TEXT, instance_of("a stitch.graph.PlacementOption", PlacementOption))


@overload
def compile(
    module: ComputationGraph | str | Path | Callable[..., Any] | Any,
    example_inputs: Sequence[Any] | Mapping[str, Any] = (),
    *,
    target: str | Path | Machine = DEFAULT_TARGET,
    placement: str | Iterable[str | PlacementOption] = (),
    name: str | None = None,
    role: Role | str = Role.FORWARD,
    input_shapes: Mapping[str, Sequence[int]] | None = None,
    optimizer: Optimizer | str | Mapping[str, Any] | None = None,
    loss: Loss | str | Mapping[str, Any] | None = None,
    weights: Mapping[str, Any] | None = None,
    trainable: Iterable[str] | None = None,
    algorithm: str = "none",
    schedule: str | None = None,
    executor: str | None = None,
    unroll: int | None = None,
    math_fidelity: MathFidelity | str = MathFidelity.BY_TYPE,
    cache: str | Path | CompileCache | None = None,
    parallel: None = None,
    dynamic_shapes: None = None,
    **training: Any,
) -> CompiledModel: ...
@overload
def compile(
    module: str | Path | Callable[..., Any] | Any,
    example_inputs: Sequence[Any] | Mapping[str, Any] = (),
    *,
    dynamic_shapes: Mapping[str, Mapping[int, Dim] | Any] | Sequence[Any],
    **options: Any,
) -> DynamicModel: ...
@overload
def compile(
    module: ComputationGraph | str | Path | Callable[..., Any] | Any,
    example_inputs: Sequence[Any] | Mapping[str, Any] = (),
    *,
    optimizer: Optimizer | str | Mapping[str, Any],
    loss: Loss | str | Mapping[str, Any],
    parallel: Mapping[str, Any],
    devices: int | str | Path | MachineSpecification | None = None,
    **options: Any,
) -> CompiledStages: ...
@overload
def compile(
    module: ComputationGraph | str | Path | Callable[..., Any] | Any,
    example_inputs: Sequence[Any] | Mapping[str, Any] = (),
    *,
    optimizer: Optimizer | str | Mapping[str, Any],
    loss: Loss | str | Mapping[str, Any],
    algorithm: str,
    devices: int | str | Path | MachineSpecification,
    **options: Any,
) -> CompiledStages: ...
@takes(
    example_inputs=EXAMPLES, target=MACHINE, name=optional(TEXT),
    role=member_of(Role, "a role"),
    placement=either(_OPTION, several("a list of placement options", _OPTION)),
    input_shapes=optional(MAPPING), weights=optional(MAPPING), trainable=optional(WORDS),
    algorithm=TEXT, schedule=optional(TEXT), executor=optional(TEXT), unroll=optional(WHOLE),
    math_fidelity=member_of(MathFidelity, "a math fidelity"),
    cache=optional(either(PATH, instance_of("a CompileCache", CompileCache))),
    parallel=optional(MAPPING), dynamic_shapes=optional(either(MAPPING, LIST)),
    devices=optional(either(WHOLE, PATH, with_method("a MachineSpecification", "entry"))),
)  # fmt: skip
def compile(
    module: ComputationGraph | str | Path | Callable[..., Any] | Any,
    example_inputs: Sequence[Any] | Mapping[str, Any] = (),
    *,
    target: str | Path | Machine = DEFAULT_TARGET,
    placement: str | Iterable[str | PlacementOption] = (),
    name: str | None = None,
    role: Role | str = Role.FORWARD,
    input_shapes: Mapping[str, Sequence[int]] | None = None,
    optimizer: Optimizer | str | Mapping[str, Any] | None = None,
    loss: Loss | str | Mapping[str, Any] | None = None,
    weights: Mapping[str, Any] | None = None,
    trainable: Iterable[str] | None = None,
    algorithm: str = "none",
    schedule: str | None = None,
    executor: str | None = None,
    unroll: int | None = None,
    math_fidelity: MathFidelity | str = MathFidelity.BY_TYPE,
    cache: str | Path | CompileCache | None = None,
    parallel: Mapping[str, Any] | None = None,
    devices: int | str | Path | MachineSpecification | None = None,
    dynamic_shapes: Mapping[str, Mapping[int, Dim] | Any] | Sequence[Any] | None = None,
    **training: Any,
) -> CompiledModel | CompiledStages | DynamicModel:
    """Compile a module for a machine.

    Args:
        module: A computation graph, the path of a YAML, ONNX or `.pt2` file, an ONNX `ModelProto`,
            a torch module (`nn.Module`, `GraphModule`, `ExportedProgram`), or a Python function,
            which is traced.
        example_inputs: Arrays, tensors or descriptors, by position or name. They set the shapes of
            functions and torch modules, and the symbolic dimensions of ONNX models.
        target: A machine's name (`wormhole_n150`, `tiny`, `host`), a machine file, or a `Machine`.
        placement: Placement options of inputs and outputs, as for `stitch-compile --set`:
            `"input.x.space=l1"`.
        input_shapes: Shapes of an ONNX model's inputs, by name; with `dynamic_shapes`, None for
            sizes that it names.
        optimizer: With `loss`, compile for training: an optimizer of Stitch or `torch.optim`, or
            its name.
        loss: A loss of `stitch.losses` or `torch.nn`, its name, or a function that calls one.
        weights: Initial values for training, by name.
        trainable: Names of constants to train (default: floating constants with a name and an
            axis).
        algorithm: How spaces of inputs and outputs are chosen: `none` (compiler rules), `greedy` or
            `search` (L1 for the tensors that save most); for training also what is recomputed.
            With `devices`, how the training is divided among them: `data_parallel` (replicas),
            `pipeline` (stages) or `search` (both), as `stitch.training.optimize` finds.
        schedule: A loop schedule to prefer over the cheapest one.
        executor: The executor whose rates decide schedules, and that runs calls (default: `numpy`).
        unroll: ONNX loops with up to this many rounds are unrolled (default: 4).
        math_fidelity: `lofi`, `hifi2`, `hifi3` or `hifi4` for matrix products (default: by data
            type). It decides simulated time, not results.
        cache: A folder or `CompileCache` for compiled programs.
        parallel: With `optimizer` and `loss`, train in stages on several devices: a mapping of the
            fields of `stitch.mesh.ParallelOptions` (`stages`, `schedule`, `replicas`,
            `micro_batches`, `chunks`, `tensor`, `divide`).
        devices: With `parallel` or `algorithm`, a machine specification, its YAML file, or a number
            of devices of machine `target` (default with `parallel`: as many as needed).
        dynamic_shapes: Named sizes of the inputs of a function, an ONNX model or a torch module: by
            input and axis a `stitch.Dim` with bounds (of torch modules also a `torch.export.Dim`),
            or by the name of a free dimension of an ONNX model. The module is compiled once, for
            all sizes within the bounds.
        **training: Further options of `stitch.training.TrainingOptions`.

    Returns:
        The compiled model, to call, save, or load on a device; with `parallel` or `devices` the
        stages, to start; with `dynamic_shapes` a `DynamicModel`.

    Raises:
        CompileError: The module has an unsupported operator, or its shapes do not match.
        UsageError: An argument is unknown or has a wrong type.
        FormatError: A file is invalid.
        LayoutError: A placement option is illegal on the machine.
        OutOfMemoryError: The program does not fit.
    """
    module = _module(module)
    if dynamic_shapes is not None:
        asked_too = {
            "optimizer": optimizer, "loss": loss, "cache": cache, "unroll": unroll,
            "schedule": schedule, "weights": weights, "trainable": trainable,
            "parallel": parallel, "devices": devices, **training,
            "algorithm": None if algorithm == "none" else algorithm,
        }  # fmt: skip
        others = [word for word, value in asked_too.items() if value is not None]
        if others:
            raise UsageError(
                "compile takes these only without dynamic_shapes=", got=", ".join(others),
                remedy="leave dynamic_shapes= out; a training takes batches of other sizes too",
            )  # fmt: skip
        read = read_dynamic(module, example_inputs, dynamic_shapes, input_shapes)
        options = CompileOptions(_placement(placement), name, Role(role), executor=executor,
                                 math_fidelity=MathFidelity(math_fidelity))  # fmt: skip
        machine, spelled = load_machine(target), _spelled(target)
        program = compile_dynamic(read.graph, read.sizes, machine, options)
        if read.static is not None:
            exclude_small_sizes(program, read.static, machine)
        return DynamicModel(program, spelled, structure=read.structure)
    if optimizer is not None or loss is not None:
        if optimizer is None or loss is None:
            raise UsageError(
                "training needs both an optimizer and a loss",
                got="a loss only" if optimizer is None else "an optimizer only",
                remedy="compile(module, examples, optimizer='adam', loss='mse'), or neither; a "
                "stitch.torch.nn.Module needs no loss: module.compile(optimizer=...)",
            )
        if schedule is not None:
            raise UsageError("compile takes schedule= only without optimizer= and loss=")
        if MathFidelity(math_fidelity) is not MathFidelity.BY_TYPE:
            raise UsageError("compile takes math_fidelity= only without optimizer= and loss=")
        if cache is not None:
            raise UsageError(
                "compile takes cache= only without optimizer= and loss=: trainings are not cached",
                remedy="store the model with model.dump(file), and read it with "
                "CompiledModel.load(file)",
            )
        return _compiled_for_training(
            (module, example_inputs, input_shapes, unroll), target, (loss, optimizer), training,
            algorithm, _placement(placement), weights or {}, trainable, executor, parallel, devices,
        )  # fmt: skip
    named = {
        "weights": weights, "trainable": trainable, "parallel": parallel, "devices": devices
    }  # fmt: skip
    if training or any(value is not None for value in named.values()):
        _check_known(training)
        names = [*training, *(word for word, value in named.items() if value is not None)]
        raise UsageError("compile takes these only with optimizer= and loss=",
                         got=", ".join(names))  # fmt: skip
    graph, structure = read_module(module, example_inputs, input_shapes, unroll)
    machine, asked = load_machine(target), _placement(placement)
    result, chosen = _algorithm_placement(graph.with_placement(*asked), machine, algorithm)
    options = CompileOptions(
        placement=(*chosen, *asked), name=name, role=Role(role), schedule=schedule,
        executor=executor, math_fidelity=MathFidelity(math_fidelity),
    )  # fmt: skip
    if cache is not None and not isinstance(cache, CompileCache):
        cache = CompileCache(cache)
    model = compile_for_inference(graph, machine, _spelled(target), options, cache)
    return replace(model, search_result=result, structure=structure)


@takes(
    example_inputs=EXAMPLES, parts=optional(WHOLE), at=optional(either(TEXT, WORDS)),
    input_shapes=optional(MAPPING), unroll=optional(WHOLE), name=optional(TEXT),
    placement=either(_OPTION, several("a list of placement options", _OPTION)),
)  # fmt: skip
def split(
    module: ComputationGraph | str | Path | Callable[..., Any] | Any,
    example_inputs: Sequence[Any] | Mapping[str, Any] = (),
    *,
    parts: int | None = None,
    at: str | Sequence[str] | None = None,
    input_shapes: Mapping[str, Sequence[int]] | None = None,
    unroll: int | None = None,
    name: str | None = None,
    placement: str | Iterable[str | PlacementOption] = (),
    **options: Any,
) -> tuple[CompiledModel, ...]:
    """Compile a module as several programs that run one after the other.

    Loaded and chained by `Pipeline`, they give the results of the whole module, bit for bit.

    Args:
        module: Anything that `compile` takes.
        example_inputs: As for `compile`.
        parts: Number of programs, 2 by default; cuts are where the fewest bytes pass between parts
            of about equal cost.
        at: Names of nodes after which to cut, instead of `parts`: those of the compiled program
            (`compile(module, ...).text()`), whose graph can number them in another way.
        input_shapes: As for `compile`.
        unroll: As for `compile`.
        name: The name of the graph; part k is named after it, with `_k`.
        placement: As for `compile`, for inputs and outputs of the whole module.
        **options: `target`, `role`, `schedule`, `executor`, `math_fidelity`, `cache`, as for
            `compile`.

    Raises:
        CompileError: No node has a name in `at`, or a part would have no operations.
        UsageError: Both `parts` and `at` are given.

    >>> import numpy as np
    >>> first, second = split(lambda x: (x * 2) + 1, [np.zeros((2, 4))], parts=2)
    >>> first.program.outputs[0].name == second.program.inputs[0].name
    True
    """
    unknown = options.keys() - {
        "target", "role", "schedule", "executor", "math_fidelity", "cache"
    }  # fmt: skip
    if unknown:
        raise UsageError(f"split takes no {', '.join(sorted(unknown))}",
                         expected="target, role, schedule, executor, math_fidelity, cache",
                         remedy="pass the others to compile, of the whole module")  # fmt: skip
    if at is not None and parts is not None:
        raise UsageError("split takes parts= or at=", got="both", remedy="leave one of them out")
    graph = read_graph(_module(module), example_inputs, input_shapes, unroll)
    if name is not None:
        graph = replace(graph, name=name)
    if at is None:
        cuts: int | tuple[str, ...] = 2 if parts is None else parts
    else:
        cuts = (at,) if isinstance(at, str) else tuple(at)
    graphs = split_graph(graph.with_placement(*_placement(placement)), cuts)
    return tuple([compile(part, **options) for part in graphs])


def _module(module: Any) -> Any:
    """Open an archive; refuse what is compiled and can be called, as a function to trace can."""
    if isinstance(module, CompiledModel | DynamicModel | LoadedProgram):
        raise UsageError("this is compiled already", got=type(module).__name__,
                         expected="a module", remedy="pass what it was compiled from")  # fmt: skip
    return opened(module)


def _algorithm_placement(
    graph: ComputationGraph, machine: Machine, algorithm: str
) -> tuple[PlacementResult[ComputationGraph] | None, tuple[PlacementOption, ...]]:
    """Return placement options for the slots that have none, as an algorithm chooses them."""
    if algorithm == "none":
        return None, ()
    from stitch.training import SimulatedTime, place_inference

    sides: tuple[tuple[Side, Sequence[InputSlot | OutputSlot]], ...] = (
        ("input", graph.inputs), ("output", graph.outputs),
    )  # fmt: skip
    slots = [
        (side, i, slot.name, placement)
        for side, named in sides
        for i, (slot, placement) in enumerate(
            zip(named, graph.placement_by_slot(side), strict=True)
        )
    ]
    fixed = {
        name: option.value
        for _, _, name, placement in slots
        for option in placement if isinstance(option.value, Space)
    }  # fmt: skip
    result = place_inference(graph, machine, SimulatedTime(), algorithm, fixed)
    chosen = [
        PlacementOption(side, i, "space", result.tensor_mapping[name])
        for side, i, name, placement in slots if not placement
    ]  # fmt: skip
    return result, tuple(chosen)


def _check_target(
    target: str | Path | Machine, machine: Machine,
    devices: int | str | Path | MachineSpecification | None,
) -> None:  # fmt: skip
    """Raise `UsageError` if a target was named that is none of the devices' machines."""
    if devices is None or isinstance(devices, int) or target == DEFAULT_TARGET:
        return
    from stitch.mesh import MachineSpecification

    if not isinstance(devices, MachineSpecification):
        devices = MachineSpecification.from_yaml(devices)
    names = sorted({entry.machine.name for entry in devices.devices.values()})
    if machine.name not in names:
        raise UsageError(
            "target= names another machine than devices=", expected=" or ".join(names),
            got=machine.name, remedy="leave target= out: each stage is compiled for its device",
        )  # fmt: skip


def _compiled_for_training(
    source: tuple[Any, Any, Any, Any], target: str | Path | Machine, goal: tuple[Any, Any],
    options: dict[str, Any], algorithm: str, placement: tuple[PlacementOption, ...],
    weights: Mapping[str, Any], trainable: Iterable[str] | None, executor: str | None,
    parallel: Mapping[str, Any] | None, devices: int | str | Path | MachineSpecification | None,
) -> CompiledModel | CompiledStages:  # fmt: skip
    from stitch.training import (
        ANY_LOSS,
        ANY_OPTIMIZER,
        PARALLEL_ALGORITHMS,
        AlgorithmConfig,
        ModelReader,
        SimulatedTime,
        TorchOptimizer,
        as_trainable,
        compile_model,
        is_torch_optimizer,
        parameter_names,
    )

    loss, optimizer = goal
    ANY_LOSS.check("compile", "loss", loss)
    ANY_OPTIMIZER.check("compile", "optimizer", optimizer)
    if parallel is not None:
        chosen = _parallel(parallel, algorithm)
        options = {"accumulation_steps": chosen.micro_batches, **options}
    elif devices is not None and algorithm not in PARALLEL_ALGORITHMS:
        raise UsageError(
            "compile with devices= takes parallel=, or an algorithm that divides a training",
            expected=f"algorithm={' or '.join(map(repr, PARALLEL_ALGORITHMS))}",
            got=f"algorithm={algorithm!r}", remedy="algorithm='search'",
        )  # fmt: skip
    how, state = _options(options), {}
    graph, values, twin = read_trainable(*source)
    if is_torch_optimizer(optimizer):
        have = [slot.name for slot in graph.inputs if slot.kind is InputKind.PARAMETER]
        theirs = TorchOptimizer(optimizer, parameter_names(source[0], have))
        # As in torch, parameters without a group are not trained.
        stepped = theirs.parameters
        trainable = stepped if trainable is None else {*stepped}.intersection(trainable)
        optimizer, state = theirs.native, theirs.initial_state()
    trained = None if trainable is None else frozenset(trainable)
    model = as_trainable(graph.with_placement(*placement), {**values, **weights}, trained, twin)
    machine = load_machine(target)
    if parallel is not None or devices is not None:
        from stitch.mesh import compile_stages, specification_of

        _check_target(target, machine, devices)
        found = None
        if parallel is None:
            from stitch.parallel import optimize

            assert devices is not None, "checked above"
            devices = specification_of(devices, machine)
            config = AlgorithmConfig(algorithm, loss, optimizer, how)
            found = optimize(model, devices, SimulatedTime(), config)
            chosen, recompute = found.parallel, found.solution.recompute
            devices = found.specification
            how = replace(how, accumulation_steps=chosen.micro_batches, recompute=recompute)
        model = replace(model, values={**model.values, **state})
        divided = None
        if chosen.tensor > 1:
            from stitch.parallel import divided_stages

            divided = divided_stages(model, loss, optimizer, how, chosen)
        stages = compile_stages(
            model, loss, optimizer, how, chosen, machine if devices is None else devices, executor,
            divided,
        )  # fmt: skip
        return replace(stages, search_result=found)
    reader = ModelReader(TrainableSource(graph, *source), placement, trained)
    training = compile_model(
        model, loss, optimizer, how, machine, algorithm, executor, state, reader
    )
    binary = Binary(training.programs.all, machine.shape, PRODUCER)
    return CompiledModel(
        model.graph, binary, _spelled(target), model.graph.placement, training.programs.warnings,
        training, executor=executor, search_result=training.search_result,
    )  # fmt: skip


def _parallel(parallel: Mapping[str, Any], algorithm: str) -> ParallelOptions:
    from stitch.mesh import ParallelOptions

    known = [field.name for field in fields(ParallelOptions)]
    others = [str(name) for name in parallel if name not in known]
    if others:
        raise unknown(f"parallel= takes no {', '.join(others)}", others[0], known)
    if algorithm != "none":
        raise UsageError("compile takes algorithm= only without parallel=", got=algorithm)
    return ParallelOptions(**parallel)


def _options(training: dict[str, Any]) -> TrainingOptions:
    from stitch.training import TrainingOptions

    _check_known(training)
    return TrainingOptions(**training)


def check_options(
    target: str | Path | Machine = DEFAULT_TARGET, optimizer: Any = None, loss: Any = None,
    executor: str | None = None, algorithm: str = "none", **options: Any,
) -> None:  # fmt: skip
    """Raise the errors of `compile` for options that are wrong for every module."""
    from stitch.training import is_torch_optimizer as is_theirs
    from stitch.training import loss_of, optimizer_from_config

    own = inspect.signature(compile).parameters
    _options({word: value for word, value in options.items() if word not in own})
    if options.get("parallel") is not None:
        MAPPING.check("compile", "parallel", options["parallel"])
        _parallel(options["parallel"], algorithm)
    load_machine(target)
    CompileOptions(executor=executor, schedule=options.get("schedule"))
    if optimizer is not None and not is_theirs(optimizer):
        optimizer_from_config(optimizer)
    if loss is not None:
        loss_of(loss)


def _check_known(training: dict[str, Any]) -> None:
    from stitch.training import TrainingOptions

    options = [field.name for field in fields(TrainingOptions)]
    every = list(inspect.signature(compile).parameters)
    unknown = sorted(training.keys() - set(options))
    if unknown:
        machine = "target= names the machine" if {"device", "machine"} & {*unknown} else None
        raise UsageError(
            f"compile takes no {', '.join(unknown)}",
            expected=f"the parameters of stitch.compile, or of a training {', '.join(options)}",
            remedy=machine or closest(unknown[0], (*options, *every)) or None,
        )


def _placement(placement: str | Iterable[str | PlacementOption]) -> tuple[PlacementOption, ...]:
    placement = (placement,) if isinstance(placement, str) else placement
    return tuple(parse_placement(w) if isinstance(w, str) else w for w in placement)


def _spelled(target: str | Path | Machine) -> str:
    return target.name if isinstance(target, Machine) else str(target)


class Pipeline(RuntimePipeline):
    """A chain of loaded programs that one call runs: `Pipeline([a, b])(x)`.

    After the first calls it replays the recorded plan, which is the fastest way to run several
    programs. `link=True` links them into one program with bit-identical results; `fuse=True` also
    lets the executor fuse operations across programs, which may change the last bits.
    `from_yaml` reads a pipeline file with arbitrary connections.
    """

    device: Device

    @staticmethod
    @takes(path=PATH)
    def from_yaml(
        path: str | Path, *, device: Device | Mesh | None = None, **options: Any
    ) -> YamlPipeline:
        """Read a pipeline file and prepare it on a device, or on the devices of a mesh.

        Args:
            path: A YAML file; the reference describes its keys.
            device: Where it runs. By default a mesh is opened if the file names `devices`, with
                `options` as for `open_mesh`; else a device, with `options` as for `open_device`, on
                the machine that the file names, or else the machine of its first module.

        Raises:
            FormatError: The file is invalid; the text lists every defect with its line.
            IncompatibleError: A module was compiled for another machine.
            OutOfMemoryError: The pipeline does not fit.
        """
        from stitch.documents import YamlPipeline, read_pipeline
        from stitch.mesh import Mesh, open_mesh

        if device is not None:
            where = either(_DEVICE, instance_of("an open mesh", Mesh))
            where.check("Pipeline.from_yaml", "device", device)
        strict_types = device.strict_types if device else bool(options.get("strict_types", False))
        checked = read_pipeline(path, strict_types=strict_types)
        if device is None and checked.file.devices is not None:
            device = open_mesh(checked.file.devices, machine=checked.machine, **options)
        elif device is None:
            device = open_device(checked.machine, **options)
        elif options:
            raise UsageError("options for a new device were passed with an open device",
                             got=", ".join(options))  # fmt: skip
        return YamlPipeline(checked, device)


@takes(source=SOURCE, verify=TEXT)
def load(source: str | Path | bytes | ModelOfBinary, *, verify: str = "metadata") -> Any:
    """Read and check a binary without a device: a path, bytes, or a compiled model.

    Args:
        source: What to read.
        verify: `full` checks every byte.

    Returns:
        A `Binary`; of a file with named sizes a `DynamicModel`, to call or to ask for its programs
        `at` sizes.

    Raises:
        FormatError: The file is damaged.
        IncompatibleError: It is of another version, or requires unknown features.
    """
    if isinstance(source, ModelOfBinary):
        return source.binary
    if verify not in ("metadata", "full"):
        raise UsageError("verify must be 'metadata' or 'full'", got=repr(verify))
    binary = load_any(source, verify="full" if verify == "full" else "metadata")
    return DynamicModel.of(binary) if isinstance(binary, SymbolicBinary) else binary


def submit(
    device: Device, binary: Any, program: int | str, inputs: Sequence[Any]
) -> tuple[Tensor, ...]:
    """Run a program of a binary; return its pending outputs.

    Args:
        binary: What `device.load` accepts, or a loaded program.
        program: Index or name of the program.
        inputs: Arrays and tensors; tensors are freed afterwards unless they are retained.
    """
    _DEVICE.check("submit", "device", device)
    if not isinstance(binary, LoadedProgram):
        SOURCE.check("submit", "binary", binary)
    INDEX_OR_NAME.check("submit", "program", program)
    LIST.check("submit", "inputs", inputs)
    loaded = device.loaded(binary, program)
    device.check_program(loaded)
    results = loaded(*inputs)
    for tensor in inputs:
        if isinstance(tensor, Tensor) and tensor.is_allocated and not tensor.retain:
            tensor.deallocate(f"submit of {loaded.name!r}")
    return results if isinstance(results, tuple) else (results,)


def wait(tensors: Any) -> None:
    """Run the queues of tensors, predictions or losses (one or several) until they are computed.

    Raises the error of a failed task.
    """
    is_several = isinstance(tensors, Iterable) and not hasattr(tensors, "wait")
    for each in tensors if is_several else (tensors,):
        if isinstance(each, Tensor):
            each.settle()
        elif hasattr(each, "wait"):
            each.wait()
        else:
            TENSOR.check("wait", "tensors", each)


@takes(tensor=TENSOR)
def to_layout(
    tensor: Tensor, layout: Layout | TensorDesc, *, retain: bool | None = None, copy: bool = False
) -> Tensor:
    """Return a tensor's elements in another legal layout, pending.

    A tensor that has the layout is returned itself, unless `copy` is set. The result inherits
    `retain`; `retain=False` frees the source afterwards, unless it is retained itself. Raises
    `LayoutError` for another shape, or a layout that the machine does not support.
    """
    return tensor.to_layout(layout, retain=retain, copy=copy)


@takes(tensor=TENSOR)
def has_layout(tensor: Tensor, layout: Layout | TensorDesc) -> bool:
    """Return whether a tensor has a layout; an address is compared only if `layout` has one."""
    return tensor.has_layout(layout)


@takes(binary=SOURCE, program=INDEX_OR_NAME, input=INDEX_OR_NAME)
def get_layout(binary: Any, program: int | str = 0, input: int | str = 0) -> Layout:
    """Return the layout that a program requires for an input; raise `UsageError` for unknown
    slots."""
    source = getattr(binary, "binary", binary)
    opened = source if isinstance(source, Binary) else load(source)
    body = opened.program(program)
    names = [slot.name for slot in body.inputs]
    if isinstance(input, str):
        if input not in names:
            raise UsageError(
                f"program {body.name!r} has no input {input!r}", expected=", ".join(names)
            )
        input = names.index(input)
    if not 0 <= input < len(names):
        raise UsageError(f"program {body.name!r} has no input {input}",
                         expected=f"0 to {len(names) - 1}")  # fmt: skip
    return body.input_desc(input).layout


@contextmanager
def forbid_copies(device: Device) -> Iterator[None]:
    """Within the block, raise `TaskError` for work that needs a copy."""
    _DEVICE.check("forbid_copies", "device", device)
    with device.without_copies():
        yield


__all__ = [
    "CompileCache", "CompiledModel", "Device", "DynamicModel", "LinkedModel", "Pipeline", "compile",
    "forbid_copies", "get_layout",
    "has_layout", "inspect_sizes", "link", "load", "open_device", "submit", "to_layout", "wait",
]  # fmt: skip


@takes(options=optional(MAPPING))
def device_of(options: Mapping[str, Any] | None = None) -> Device:
    """Return the device of `torch.compile(..., backend="stitch", options=options)`, for its
    reports.

    Raises `UsageError` for unknown options, `CompileError` if torch is not installed.
    """
    return torch_device(options)
