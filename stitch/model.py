"""`CompiledModel`: compiled programs with their graph, called, saved, trained, or stored as
JSON."""

from __future__ import annotations

import json
import os
import threading
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final, Literal, NamedTuple

from stitch.argument_kinds import (
    MAPPING,
    PATH,
    READABLE,
    WHOLE,
    WRITABLE,
    arranged,
    either,
    instance_of,
    optional,
    takes,
)
from stitch.compile_cache import CachedCompilation, CompileCache
from stitch.compiler import CompileOptions, CompileWarning, LoopNote, compile_graph
from stitch.errors import (
    IncompatibleError,
    LayoutError,
    LinkError,
    TaskError,
    UsageError,
    closest,
    unknown,
)
from stitch.files import OutputFiles, atomic_write, make_folder, text_of, write_files
from stitch.frozen_json import check_format, from_plain, located, read_json, to_plain
from stitch.graph import (
    LAYOUT_FIELDS,
    ComputationGraph,
    ComputationGraphBuilder,
    PlacementOption,
    PlacementValue,
    as_data,
    from_data,
    parse_placement,
)
from stitch.html_table import html_table
from stitch.live_objects import LiveObjects
from stitch.machine import Machine, load_machine
from stitch.program import (
    INITIAL_STATE,
    Array,
    MathFidelity,
    Program,
    Role,
    Space,
    ValueType,
    summary,
)
from stitch.report import Device, open_device
from stitch.runtime import LoadedProgram, Tensor, capture
from stitch.ttb import Binary, content_of, encode, save, state_names
from stitch.ttb import load as load_binary
from stitch.version import __version__

if TYPE_CHECKING:
    from stitch.frontend import CallStructure
    from stitch.training import CompiledTraining, PlacementResult, TrainingInstance


# --------------------------------------------------------------------------------------------------
# Models of binaries

#: Programs that a model's `repr` names.
MAX_SHOWN = 3
#: The default executor, as for `open_device`.
DEFAULT_EXECUTOR = "numpy"


class SharedDevice:
    """An open device that models of one target and executor share.

    When the last model is gone, the device is closed, unless tensors of it are still referenced.
    """

    __slots__ = ("__weakref__", "device")

    def __init__(self, device: Device) -> None:
        self.device = device
        weakref.finalize(self, device.close_unless_held).atexit = False


_shared_devices: dict[tuple[Machine, str], weakref.ref[SharedDevice]] = {}
_opening = threading.Lock()
_sessions: LiveObjects[ModelSession] = LiveObjects()


def _reset_locks_in_child() -> None:
    """Replace the locks after a fork: another thread of the parent may have held them."""
    global _opening
    _opening = threading.Lock()
    for session in _sessions:
        session._lock = threading.RLock()


os.register_at_fork(after_in_child=_reset_locks_in_child)


def shared_device(target: str, executor: str | None) -> SharedDevice:
    """Return the shared device of a target and an executor; open it if needed.

    A closed device, or one that belongs to the parent of a forked process, is replaced.
    """
    machine, executor = load_machine(target), executor or DEFAULT_EXECUTOR
    with _opening:
        reference = _shared_devices.get((machine, executor))
        shared = None if reference is None else reference()
        if shared is None or shared.device.is_closed:
            shared = SharedDevice(open_device(machine, executor=executor))
            _shared_devices[machine, executor] = weakref.ref(shared)
        return shared


def _sharer_of(device: Device) -> SharedDevice | None:
    """Return the `SharedDevice` of a device, None if it is not shared."""
    with _opening:
        sharers = [reference() for reference in _shared_devices.values()]
    return next((one for one in sharers if one is not None and one.device is device), None)


class ModelSession:
    """The calls of one model: its program on the devices that it was called on, and its state."""

    # Slots are cleared in the order of their names: states before the shared device.
    __slots__ = ("__weakref__", "_before", "_current", "_loaded", "_lock", "_shared")

    def __init__(self) -> None:
        #: Held while a call reads and writes the model's state.
        self._lock = threading.RLock()
        _sessions.add(self)
        #: The state for the next call, None for its initial values; and the state before the last
        #: call, in case that fails.
        self._current: dict[str, Any] | None = None
        self._before: dict[str, Any] | None = None
        #: The last one called first, each with a reference that keeps a shared device open.
        self._loaded: tuple[tuple[LoadedProgram, SharedDevice | None], ...] = ()
        self._shared: SharedDevice | None = None

    @property
    def programs(self) -> tuple[LoadedProgram, ...]:
        """The model's program on each device that it was called on, the last one first."""
        return tuple([loaded for loaded, _ in self._loaded])

    def call(self, model: ModelOfBinary, arguments: Sequence[Any], named: Mapping[str, Any]) -> Any:
        """Run the first program on the device of the first tensor argument, else on the shared
        device."""
        loaded = self.loaded_for(model, arguments, named)
        if not loaded.state_names:
            return loaded(*arguments, **named)
        types = [(p.name, p.type.text()) for p in loaded.ports if p.name not in loaded.state_names]
        inputs = arranged(f"model {loaded.name!r}", types, arguments, named)
        values = {name: value for (name, _), value in zip(types, inputs, strict=True)}
        with self._lock:
            state = self._state_on(loaded)
            values.update(state)
            results = loaded(*[values[port.name] for port in loaded.ports])
            outputs = results if isinstance(results, tuple) else (results,)
            left = dict(zip(loaded.output_names, outputs, strict=True))
            self._before = state
            self._current = {name: left.pop(name) for name in loaded.state_names}
        others = tuple(left.values())
        return others[0] if len(others) == 1 else others

    def state(self, model: ModelOfBinary) -> dict[str, Tensor]:
        """Return the model's current state as tensors."""
        last = next((one for one, _ in self._loaded if not one.device.is_closed), None)
        loaded = self._load(model, None) if last is None else last
        if not loaded.state_names:
            return {}
        with self._lock:
            state = self._state_on(loaded)
            for name, value in state.items():
                if not isinstance(value, Tensor):
                    state = {**state, name: loaded.device.tensor(value)}
            self._current = state
        return dict(state)

    def reset_state(self, model: ModelOfBinary, values: Mapping[str, Any]) -> None:
        """Set states for the next call; other states get their initial values."""
        program = model.binary.programs[0]
        types = {s.name: program.values[s.value].type for s in program.inputs}
        names = state_names(model.binary, program)
        taken: dict[str, Any] = {}
        for name, value in values.items():
            if name not in names:
                what = f"model {program.name!r} has no state {name!r}"
                raise unknown(what, name, names, none="no states: the module writes no buffers")
            what = f"state {name!r} of {program.name!r}"
            expected = types[name]
            if isinstance(value, Tensor):
                if _has_failed(value):
                    value.settle()  # Raises the error of its task.
                actual = ValueType(value.shape, value.layout.data_type)
                if actual != expected:
                    raise LinkError(f"{what} has another type",
                                    expected=expected.text(), got=actual.text())  # fmt: skip
                taken[name] = value
            else:
                taken[name] = capture(
                    value, expected.shape, expected.data_type, False, what, is_input=False
                )
        with self._lock:
            self._before = self._current = taken

    def _state_on(self, loaded: LoadedProgram) -> dict[str, Any]:
        """Return the state that a call reads, on the device of its program."""
        current = self._current
        if current is not None and any(_has_failed(value) for value in current.values()):
            # Roll back to the state before the failed call.
            current = self._before
            if current is not None and any(_has_failed(value) for value in current.values()):
                raise UsageError(
                    f"the state of {loaded.name!r} is lost: several queued calls have failed",
                    remedy="call reset_state(); to recover from a failed call, read its result "
                    "before the next call",
                )
        if current is None or current.keys() != {*loaded.state_names}:
            current = {**loaded.initial_state(), **(current or {})}
        for name, value in current.items():
            if isinstance(value, Tensor) and value.device is not loaded.device:
                current = {**current, name: value.numpy()}
        self._current = current
        return current

    def loaded_for(
        self, model: ModelOfBinary, arguments: Sequence[Any], named: Mapping[str, Any]
    ) -> LoadedProgram:
        """Return the program on the device of the first tensor argument, else on the shared
        device."""
        device = None
        for argument in (*arguments, *named.values()) if named else arguments:
            if type(argument) is Tensor:
                device = argument.device
                break
        shared = self._shared
        target_device = shared.device if device is None and shared is not None else device
        for loaded, _ in self._loaded[:1]:
            if loaded.device is target_device and not target_device.is_closed:
                return loaded
        return self._load(model, device)

    def _load(self, model: ModelOfBinary, device: Device | None) -> LoadedProgram:
        """Load the program on a device, or on the shared device if `device` is None or has another
        executor than the model was compiled for."""
        if device is not None:
            device.check_open()
        if device is None or device.executor != (model.executor or device.executor):
            if self._shared is None or self._shared.device.is_closed:
                self._shared = shared_device(model.target, model.executor)
            device = self._shared.device
        others = [one for one in self._loaded if not one[0].device.is_closed]
        last = next((one for one in others if one[0].device is device), None)
        if last is None:
            last = device.load(model), _sharer_of(device)
        self._loaded = (last, *(one for one in others if one is not last))
        return last[0]


def _has_failed(value: Any) -> bool:
    """Return whether a value is a tensor whose task failed."""
    return isinstance(value, Tensor) and not value.is_allocated


class ModelOfBinary:
    """Base of compiled and linked models: saved as a binary, loaded on devices, and called."""

    __slots__ = ()

    binary: Binary
    #: The machine that a call opens.
    target: str
    #: The executor of the device that a call opens, None for the default.
    executor: str | None
    session: ModelSession

    def __repr__(self) -> str:
        programs = [f"  {summary(program)}" for program in self.binary.programs[:MAX_SHOWN]]
        more = len(self.binary.programs) - MAX_SHOWN
        tail = [f"  and {more} more"] if more > 0 else []
        head = f"<{type(self).__name__} for {self.target}:"
        return "\n".join([head, *programs, *tail]) + ">"

    @property
    def program(self) -> Program:
        """The only program, except that of its initial state; raises `UsageError` for a training,
        which has several."""
        first, *others = self.binary.programs
        if [p.name for p in others] not in ([], [f"{first.name}{INITIAL_STATE}"]):
            raise UsageError(
                f"this model has {len(self.binary.programs)} programs",
                remedy="take one of model.binary.programs",
            )
        return self.binary.programs[0]

    @takes(path=PATH)
    def save(self, path: str | Path) -> None:
        """Write the `.ttb` file atomically."""
        save(self.binary, path)

    def encode(self) -> bytes:
        """Return the bytes that `save` writes."""
        return encode(self.binary)

    def text(self) -> str:
        """Return the programs as readable text."""
        return "".join(program.text() for program in self.binary.programs)


# --------------------------------------------------------------------------------------------------
# Reading the JSON of a compiled model

VERSION: Final = 1


class _Model(NamedTuple):
    """The JSON of a model; `programs` are the bytes of a training's binary."""

    stitch: Literal["model"]
    version: Literal[1]
    target: str
    name: str
    role: Role
    placement: tuple[str, ...]
    graph: Any
    math_fidelity: MathFidelity = MathFidelity.BY_TYPE
    programs: bytes | None = None
    training: Any = None
    search: Any = None


PRODUCER = f"stitch {__version__}"


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class CompiledModel(ModelOfBinary):
    """A compiled module, like a compiled `torch.nn.Module`: call it, save it, load it on a device.

    `model(x)` runs the program on the device of its inputs, or on a device that models of the same
    target share, and returns tensors that are computed when they are read. Arguments and results
    have the structure of the torch module's. Buffers that it writes are the `state`.

    A model that was compiled with `optimizer=` and `loss=` has the programs of a training step:
    `model(x)` returns the prediction, `loss_fn(pred, y).backward()` and `optimizer.step()` work as
    in PyTorch. The first call starts the training; `start` does so on a given device.

    Attributes:
        graph: The computation graph that was compiled. It can number values (`add_3`) in another
            way than the program, whose names `text`, files and errors have.
        binary: The programs and constants, as `save` writes them.
        target: The machine that a call opens.
        placement: The requested placement options.
        warnings: Messages of the compiler.
        training: The programs and initial values of a training, or None.
        loops: The schedule of each loop.
        executor: The executor of calls, None for the default.
        is_from_cache: Whether the program was read from a compile cache.
        search_result: The result of `algorithm=`.
        structure: How calls of a torch module map to the program's slots, if they differ.
    """

    graph: ComputationGraph
    binary: Binary
    target: str
    placement: tuple[PlacementOption, ...] = ()
    warnings: tuple[CompileWarning, ...] = ()
    training: CompiledTraining | None = None
    loops: tuple[LoopNote, ...] = ()
    executor: str | None = None
    math_fidelity: MathFidelity = MathFidelity.BY_TYPE
    is_from_cache: bool = False
    search_result: PlacementResult[Any] | None = None
    structure: CallStructure | None = None
    session: ModelSession = field(default_factory=ModelSession, repr=False)

    def _repr_html_(self) -> str:
        rows = []
        for program in self.binary.programs:
            for at, slot in enumerate(program.inputs):
                rows.append((program.name, "input", slot.name, program.input_desc(at).text()))
            for at, output in enumerate(program.outputs):
                rows.append((program.name, "output", output.name, program.output_desc(at).text()))
        return html_table(
            f"compiled for {self.target}: {', '.join(p.name for p in self.binary.programs)}",
            ("program", "", "slot", "descriptor"), rows,
        )  # fmt: skip

    def __copy__(self) -> CompiledModel:
        """Return a model with the same programs, and calls, state and training of its own."""
        training = None if self.training is None else replace(self.training, _started=[])
        return replace(self, training=training, session=ModelSession())

    def __deepcopy__(self, memo: dict[int, Any]) -> CompiledModel:
        return self.__copy__()

    def as_json(self, *, weights: bool = True) -> str:
        """Return the model as JSON for `CompiledModel.load`.

        For a training this includes its programs, loss, optimizer and options, and with `weights`
        the current parameters and states.
        """
        program, training, search = self.binary.programs[0], self.training, self.search_result
        form = _Model(
            "model", VERSION, self.target, program.name, program.role,
            tuple([option.text() for option in self.placement]), as_data(self.graph),
            self.math_fidelity,
            None if training is None else self.encode(),
            None if training is None else training.as_data(weights=weights),
            None if search is None else search.as_data(),
        )  # fmt: skip
        return json.dumps(to_plain(form))

    @takes(file=either(PATH, WRITABLE))
    def dump(self, file: str | Path | IO[str], *, weights: bool = True) -> None:
        """Write `as_json` to a path, atomically, or to an open text file."""
        text = self.as_json(weights=weights)
        if isinstance(file, str | os.PathLike):
            atomic_write(Path(file), text.encode())
        else:
            file.write(text)

    @staticmethod
    @takes(file=either(PATH, READABLE))
    def load(file: str | Path | IO[str]) -> CompiledModel:
        """Read what `dump` wrote, from a path or an open text file; raise `FormatError`."""
        data = read_json(text_of(file), "JSON of a compiled model")
        check_format(
            data, "compiled model", "compile the module again with this version of Stitch",
            stitch="model", version=VERSION,
        )  # fmt: skip
        form = from_plain(_Model, data, "model")
        graph, machine = from_data(form.graph), load_machine(form.target)
        with located("model"):
            options = CompileOptions(
                placement=tuple(map(parse_placement, form.placement)), name=form.name,
                role=form.role, math_fidelity=form.math_fidelity,
            )  # fmt: skip
        if form.training is None:
            model = compile_for_inference(graph, machine, form.target, options)
            if form.search is None:
                return model
            from stitch.training import PlacementResult

            result = PlacementResult.from_data(form.search, graph)
            return replace(model, search_result=result)
        from stitch.training import CompiledTraining

        with located("model.programs"):
            binary = load_binary(form.programs or b"")
            training = CompiledTraining.from_data(
                form.training, binary.programs, graph, form.search
            )
        return CompiledModel(
            graph, binary, form.target, options.placement, training=training,
            search_result=training.search_result,
        )  # fmt: skip

    def get_tensor(self, name: str, index: Any = ...) -> Array:
        """Return the elements of a training's tensor, or of a constant of a model for inference.

        Before the training starts these are the initial values. `index` selects a part. Raises
        `UsageError` for an unknown name or an invalid index.
        """
        if self.training is not None:
            return self.training.get_tensor(name, index)
        from stitch.training import constants_of, part_of

        constants = constants_of(self.graph)
        if name in self.graph.initial_state:
            raise UsageError(f"{name!r} is a state of this model, and no constant",
                             remedy=f"model.state()[{name!r}] has what calls left")  # fmt: skip
        if name not in constants:
            raise UsageError(f"this model has no constant {name!r}",
                             remedy=closest(name, constants) or None)  # fmt: skip
        return part_of(name, constants[name], index).copy()

    def set_tensor(self, name: str, array: Any, index: Any = ...) -> None:
        """Overwrite a training's tensor or its initial value, or the part at an index.

        Raises `UsageError` for an unknown name, `LinkError` for another shape.
        """
        if self.training is None and name in self.graph.initial_state:
            raise UsageError(f"{name!r} is a state of this model, and no constant",
                             remedy=f"model.reset_state({{{name!r}: array}})")  # fmt: skip
        if self.training is None:
            raise UsageError(
                "the weights of a model compiled for inference cannot be changed",
                remedy="compile it with optimizer= and loss=, or again with other weights",
            )
        self.training.set_tensor(name, array, index)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """Run the model on arrays or tensors.

        A torch module is called as in PyTorch and returns tensors in the module's structure; any
        model can be called with its inputs by name. A training runs its forward pass and returns a
        pending prediction.

        Raises:
            TaskError: The training was closed.
        """
        if self.training is not None:
            if self.training.is_over:
                raise TaskError(
                    "this model's training session is closed; its weights were discarded",
                    remedy="start another with model.start(weights=...); save "
                    "instance.state_dict() before closing to continue",
                )
            return (self.training.instance or self.start())(*arguments, **named)
        slots = None if self.structure is None else self.structure.inputs_of(arguments, named)
        return (
            self.session.call(self, arguments, named) if slots is None else self.call_slots(slots)
        )

    def call_slots(self, slots: Mapping[str, Any]) -> Any:
        """Run the model on inputs by name; return results in the structure of the torch module's.

        Args:
            slots: What the structure's `inputs_of` returns.
        """
        results = self.session.call(self, (), slots)
        return results if self.structure is None else self.structure.results_of(results)

    @takes(
        device=optional(instance_of("an open device", Device)), weights=optional(MAPPING),
        seed=WHOLE,
    )  # fmt: skip
    def start(
        self,
        device: Device | None = None,
        *,
        weights: Mapping[str, Any] | None = None,
        seed: int = 0,
        **options: Any,
    ) -> TrainingInstance:
        """Start training on a device, or on a new one with `options` as for `open_device`.

        Args:
            weights: Replace initial values, by name.
            seed: Seed of random operators.

        Returns:
            The training instance, which the model's calls use from now on.

        Raises:
            UsageError: The model was compiled for inference.
            IncompatibleError: It was compiled for a machine with memory that the device lacks.
            LayoutError: An exported array lies where the training needs the place.
        """
        if self.training is None:
            raise UsageError(
                "this model was compiled for inference",
                remedy="compile it with optimizer= and loss=",
            )
        if device is not None and options:
            raise UsageError("options for a new device were passed with an open device",
                             got=", ".join(options))  # fmt: skip
        owned = device is None
        if self.executor is not None:
            options.setdefault("executor", self.executor)
        chosen = open_device(self.target, **options) if device is None else device
        try:
            return self.training.start(chosen, weights=weights, seed=seed, owns_device=owned)
        except LayoutError as error:
            if chosen.machine.name == self.target:
                raise  # An exported array pins a place.
            raise IncompatibleError(
                f"a training compiled for {self.target!r} does not run here: {error.what}",
                remedy=f"compile(..., target={chosen.machine.name!r})",
            ) from error

    @property
    def instance(self) -> TrainingInstance:
        """The running training; raises `UsageError` before the first call."""
        instance = None if self.training is None else self.training.instance
        if instance is None:
            raise UsageError("the training has not started", remedy="call the model, or start()")
        return instance

    def state(self) -> dict[str, Tensor]:
        """Return the buffers that the module writes, by name, as tensors of the device.

        Later calls do not change these tensors. Empty for a module without such buffers; for a
        training use `get_tensor`.
        """
        return self.session.state(self)

    @takes(values=optional(MAPPING))
    def reset_state(self, values: Mapping[str, Any] | None = None) -> None:
        """Set buffers (arrays or tensors, by name) for the next call; others get their initial
        values.

        Raises `UsageError` for unknown names, `LinkError` for another shape or type.
        """
        self.session.reset_state(self, values or {})

    @takes(folder=PATH)
    def save_programs(self, folder: str | Path) -> tuple[Path, ...]:
        """Write each program into its own `.ttb` file, named after its role; return the paths.

        A training has `forward`, `loss`, `backward`, `update` and `evaluation`.
        """
        folder = Path(folder)
        make_folder(folder)
        files: OutputFiles = {}
        for program in self.binary.programs:
            twin = self.training is not None and program is self.training.programs.evaluation
            name = "evaluation" if twin else program.role.value
            if program.name.endswith(INITIAL_STATE) and program is not self.binary.programs[0]:
                name = INITIAL_STATE.removeprefix(".")
            content = content_of(Binary((program,), self.binary.machine, PRODUCER))
            files[folder / f"{name}.ttb"] = content
        return tuple(map(Path, write_files(files)))


def compile_for_inference(
    graph: ComputationGraph, machine: Machine, target: str, options: CompileOptions,
    cache: CompileCache | None = None,
) -> CompiledModel:  # fmt: skip
    """Compile a graph, or read it from a cache; `target` is how the machine was specified."""

    asked = options.placement
    if graph.initial_state:
        options = replace(options, placement=(*_state_placement(graph, machine, asked), *asked))

    def compile() -> CachedCompilation:
        compilation = compile_graph(graph, machine, options)
        binary = Binary((compilation.program,), machine.shape, PRODUCER)
        return CachedCompilation(binary, compilation.warnings, compilation.loops)

    if cache is None:
        compilation_entry, is_hit = compile(), False
    else:
        compilation_entry, is_hit = cache.compilation(graph, machine, options, compile)
    binary = compilation_entry.binary
    if graph.initial_state:
        start = _initial_state_program(graph, binary.programs[0].name, machine, options)
        binary = Binary((*binary.programs, start), machine.shape, PRODUCER)
    return CompiledModel(
        graph, binary, target, asked, compilation_entry.warnings, loops=compilation_entry.loops,
        executor=options.executor, math_fidelity=options.math_fidelity,
        is_from_cache=is_hit,
    )  # fmt: skip


def _state_layout(
    placement: Sequence[PlacementOption], machine: Machine
) -> dict[str, PlacementValue]:
    """Return the layout options of a state's input: in DRAM unless an option says otherwise."""
    layout = {option.field: option.value for option in placement if option.field in LAYOUT_FIELDS}
    # No fixed address: the old and the new state exist at the same time.
    layout.pop("address", None)
    if machine.shape.dram is not None and not {"memory_layout", "shard_spec"} & layout.keys():
        layout.setdefault("space", Space.DRAM)
    return layout


def _state_placement(
    graph: ComputationGraph, machine: Machine, asked: Sequence[PlacementOption]
) -> tuple[PlacementOption, ...]:
    """Return options that give a state's output the layout of its input, so that the next call can
    read it without a copy."""
    requested = graph.with_placement(*asked)
    slots = zip(graph.inputs, requested.placement_by_slot("input"), strict=True)
    layouts = {slot.name: _state_layout(placement, machine) for slot, placement in slots}
    derived = []
    for slot, own in zip(graph.outputs, requested.placement_by_slot("output"), strict=True):
        fixed = {option.field for option in own}
        if slot.name in graph.initial_state and "alias" not in fixed:
            layout = layouts[slot.name].items()
            derived += [
                PlacementOption("output", slot.name, f, v) for f, v in layout if f not in fixed
            ]
    return tuple(derived)


def _initial_state_program(
    graph: ComputationGraph, name: str, machine: Machine, options: CompileOptions
) -> Program:
    """Compile the program without inputs that returns initial states, laid out as the inputs."""
    requested = graph.with_placement(*options.placement)
    builder = ComputationGraphBuilder(f"{name}{INITIAL_STATE}")
    for slot, placement in zip(graph.inputs, requested.placement_by_slot("input"), strict=True):
        if slot.name in graph.initial_state:
            builder.output(slot.name, builder.parameter(slot.name, graph.initial_state[slot.name]))
            layout = _state_layout(placement, machine)
            builder.place(*(PlacementOption("output", slot.name, f, v) for f, v in layout.items()))
    return compile_graph(builder.build(), machine, CompileOptions()).program
