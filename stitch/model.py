"""A compiled model: programs, their graph, their form as JSON."""

from __future__ import annotations

import base64
import json
import os
import threading
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

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
from stitch.compile_cache import CompileCache, KeptCompilation
from stitch.compiler import CompileOptions, CompileWarning, LoopNote, compile_graph
from stitch.errors import FormatError, LinkError, Problem, TaskError, UsageError, closest
from stitch.files import OutputFiles, atomic_write, make_folder, text_of
from stitch.frontend import graph_of_torch_call
from stitch.graph import (
    LAYOUT_FIELDS,
    ComputationGraph,
    ComputationGraphBuilder,
    JsonObject,
    PlacementOption,
    PlacementValue,
    as_data,
    from_json,
    objects_without_duplicates,
    parse_placement,
)
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
    from stitch.training import CompiledTraining, SearchResult, TrainingInstance


# --------------------------------------------------------------------------------------------------
# Models of binaries

#: Programs that a model's `repr` names.
MAX_SHOWN = 3
#: The executor of a model that names none, as of a device that is opened without.
DEFAULT_EXECUTOR = "numpy"


class SharedDevice:
    """An open device of the models of one target and executor; each of them refers to this.

    With the last of them the device is closed, unless tensors of it are still referred to.
    """

    __slots__ = ("__weakref__", "device")

    def __init__(self, device: Device) -> None:
        self.device = device
        weakref.finalize(self, device.close_unless_held).atexit = False


_shared_devices: dict[tuple[Machine, str], weakref.ref[SharedDevice]] = {}
_opening = threading.Lock()
_sessions: LiveObjects[ModelSession] = LiveObjects()


def _reset_locks_in_child() -> None:
    """Replace the locks, which another thread of the parent may have held at the fork."""
    global _opening
    _opening = threading.Lock()
    for session in _sessions:
        session._lock = threading.RLock()


os.register_at_fork(after_in_child=_reset_locks_in_child)


def shared_device(target: str, executor: str | None) -> SharedDevice:
    """Return the shared device of a target and an executor; open it if there is none.

    A device that was closed, or that a fork has left in the parent process, is replaced.
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
    """Return what models refer to that share a device; None where it is no shared device."""
    with _opening:
        sharers = [reference() for reference in _shared_devices.values()]
    return next((one for one in sharers if one is not None and one.device is device), None)


class ModelSession:
    """The calls of one model: its program, loaded on the devices that the calls run on."""

    # They end in the order of their names: the shared device, last, finds no state that is held.
    __slots__ = ("__weakref__", "_before", "_current", "_loaded", "_lock", "_shared")

    def __init__(self) -> None:
        #: Held by a call of a model that has a state, from its reading to its writing.
        self._lock = threading.RLock()
        _sessions.add(self)
        #: What the next call reads of the model's state, None: its initial values; and what the
        #: last call read, for where that call fails.
        self._current: dict[str, Any] | None = None
        self._before: dict[str, Any] | None = None
        #: The last one called comes first, each with what keeps its device open if that is shared.
        self._loaded: tuple[tuple[LoadedProgram, SharedDevice | None], ...] = ()
        self._shared: SharedDevice | None = None

    @property
    def programs(self) -> tuple[LoadedProgram, ...]:
        """The model's program on each device that a call has run on, the last one first."""
        return tuple([loaded for loaded, _ in self._loaded])

    def call(self, model: ModelOfBinary, arguments: Sequence[Any], named: Mapping[str, Any]) -> Any:
        """Run the first program on the device of the first tensor among the arguments, else on the
        shared device of the model's target."""
        loaded = self._loaded_for(model, arguments, named)
        if not loaded.state_names:
            return loaded(*arguments, **named)
        types = [(p.name, p.type.text()) for p in loaded.ports if p.name not in loaded.state_names]
        inputs = arranged(f"model {loaded.name!r}", types, arguments, named)
        given = {name: value for (name, _), value in zip(types, inputs, strict=True)}
        with self._lock:
            state = self._state_on(loaded)
            given.update(state)
            results = loaded(*[given[port.name] for port in loaded.ports])
            made = results if isinstance(results, tuple) else (results,)
            left = dict(zip(loaded.output_names, made, strict=True))
            self._before = state
            self._current = {name: left.pop(name) for name in loaded.state_names}
        others = tuple(left.values())
        return others[0] if len(others) == 1 else others

    def state(self, model: ModelOfBinary) -> dict[str, Tensor]:
        """The model's state as it is, as tensors."""
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
        """The next call begins with these values, and with the initial ones of the other states."""
        program = model.binary.programs[0]
        types = {s.name: program.values[s.value].type for s in program.inputs}
        known = state_names(model.binary, program)
        taken: dict[str, Any] = {}
        for name, value in values.items():
            if name not in known:
                raise UsageError(
                    f"{program.name!r} has no state {name!r}",
                    expected=", ".join(known) or "no state: the module writes no buffers",
                    remedy=closest(name, known) or None,
                )
            what = f"state {name!r} of {program.name!r}"
            wanted = types[name]
            if isinstance(value, Tensor):
                if _has_failed(value):
                    value.settle()  # Raises TaskError, which says why it is gone.
                given = ValueType(value.shape, value.layout.data_type)
                if given != wanted:
                    raise LinkError(f"{what} has another type",
                                    expected=wanted.text(), got=given.text())  # fmt: skip
                taken[name] = value
            else:
                taken[name] = capture(value, wanted.shape, wanted.data_type, False, what)
        with self._lock:
            self._before = self._current = taken

    def _state_on(self, loaded: LoadedProgram) -> dict[str, Any]:
        """The state that a call reads, on the device of its program."""
        current = self._current
        if current is not None and any(_has_failed(value) for value in current.values()):
            # A call that fails leaves what there was before it.
            current = self._before
            if current is not None and any(_has_failed(value) for value in current.values()):
                raise UsageError(
                    f"the state of {loaded.name!r} is lost: calls that were queued one on another "
                    "have failed",
                    remedy="begin anew with reset_state(); a result that is read before the next "
                    "call tells that it failed",
                )
        if current is None or current.keys() != {*loaded.state_names}:
            current = {**loaded.initial_state(), **(current or {})}
        for name, value in current.items():
            if isinstance(value, Tensor) and value.device is not loaded.device:
                current = {**current, name: value.numpy()}
        self._current = current
        return current

    def _loaded_for(
        self, model: ModelOfBinary, arguments: Sequence[Any], named: Mapping[str, Any]
    ) -> LoadedProgram:
        """Return the program on the device of the first tensor among the arguments, else on the
        shared one."""
        device = None
        for argument in (*arguments, *named.values()) if named else arguments:
            if type(argument) is Tensor:
                device = argument.device
                break
        shared = self._shared
        wanted = shared.device if device is None and shared is not None else device
        for loaded, _ in self._loaded[:1]:
            if loaded.device is wanted and not wanted.is_closed:
                return loaded
        return self._load(model, device)

    def _load(self, model: ModelOfBinary, device: Device | None) -> LoadedProgram:
        """Return the program on a device, or on the shared one where there is no other, or where
        the model was compiled for another executor than that of the device."""
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
    """Whether a value is a tensor that will never be there."""
    return isinstance(value, Tensor) and not value.is_allocated


class ModelOfBinary:
    """A model that has a file's form: it is saved, loaded on devices, and called."""

    __slots__ = ()

    binary: Binary
    #: How the machine is spelled that a call opens.
    target: str
    #: The executor of the device that a call opens, and for which loops were scheduled; None: the
    #: default one.
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
        """The one program, beside that of its initial state; raises `UsageError` for a training,
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
        """Write the `.ttb` file, whole or not at all."""
        save(self.binary, path)

    def encode(self) -> bytes:
        """The bytes that `save` would write."""
        return encode(self.binary)

    def text(self) -> str:
        """The programs as readable text."""
        return "".join(program.text() for program in self.binary.programs)


# --------------------------------------------------------------------------------------------------
# Compiled models

# --------------------------------------------------------------------------------------------------
# The JSON of a compiled model, read back: every field checked before anything is made of it.

VERSION = 1
#: The fields of a model's JSON that are always there, beside its graph; and those that may be.
_FIELDS = ("stitch", "target", "name", "role", "placement")
_MORE = ("version", "math_fidelity", "programs", "training", "search")


@dataclass(frozen=True, slots=True)
class ModelParts:
    """What a model is made of; one for inference has neither binary nor training."""

    graph: ComputationGraph
    target: str
    options: CompileOptions
    binary: Binary | None = None
    training: CompiledTraining | None = None
    search_result: SearchResult[Any] | None = None


def read_model(text: str) -> ModelParts:
    """The parts of a model that was dumped; raises `FormatError` for any other text."""
    try:
        body = json.loads(text, object_pairs_hook=objects_without_duplicates)
        graph_text = json.dumps(body.get("graph") if isinstance(body, dict) else None)
    except (RecursionError, ValueError) as error:
        raise _no_model(_not_json(text, error)) from error
    problems: list[Problem] = []
    root = JsonObject(body, "model", problems)
    if isinstance(body, dict) and body.get("stitch") == "model":
        _check_version(body.get("version", VERSION))
    root.refuse_other_keys((*_FIELDS, "graph", *_MORE))
    name, target, placement = root.text("name"), root.text("target"), root.texts("placement")
    role = root.choice("role", {role.value: role for role in Role}, Role.FORWARD)
    fidelity = MathFidelity.BY_TYPE
    if root.get("math_fidelity") is not None:
        fidelity = root.choice("math_fidelity", {f.value: f for f in MathFidelity}, fidelity)
    if root.text("stitch") != "model" or problems:
        raise _no_model("its fields are not those that dump writes", tuple(problems))
    graph = from_json(graph_text)
    try:
        options = CompileOptions(
            placement=tuple(map(parse_placement, placement)),
            name=name,
            role=role,
            math_fidelity=fidelity,
        )
        parts = _parts(graph, target, options, root)
    except (RecursionError, UsageError) as error:
        raise _no_model(str(error)) from error
    if problems or parts is None:
        raise _no_model("its fields are not those that dump writes", tuple(problems))
    return parts


def _parts(
    graph: ComputationGraph, target: str, options: CompileOptions, root: JsonObject
) -> ModelParts | None:
    """The parts; None where a defect was noted."""
    has_training, has_search = "training" in root, "search" in root
    if not has_training and not has_search:
        return ModelParts(graph, target, options)
    from stitch.training import CompiledTraining, InferenceGraphs, SearchResult

    if not has_training:
        found = SearchResult.from_record(root.record("search"), InferenceGraphs(graph))
        return ModelParts(graph, target, options, search_result=found)
    data = root.data("programs")
    if data is None:
        return None
    binary = load_binary(data)
    search = root.record("search") if has_search else None
    training = CompiledTraining.from_record(root.record("training"), binary.programs, graph, search)
    if training is None:
        return None
    return ModelParts(graph, target, options, binary, training, training.search_result)


def _check_version(version: object) -> None:
    if version != VERSION or isinstance(version, bool):
        raise FormatError(
            "this JSON of a compiled model is of a version that is not read here",
            expected=f"version {VERSION}", got=f"version {version!r}"[:100],
            remedy="read it with the Stitch that wrote it, and dump it there for this one",
        )  # fmt: skip


def _not_json(text: str, error: Exception) -> str:
    end = isinstance(error, json.JSONDecodeError) and error.pos >= len(text.rstrip()) > 0
    if end or "Unterminated" in str(error):
        return f"it ends in the middle, after {len(text)} characters"
    return f"it is no JSON, or nested too deeply ({error})"


def _no_model(why: str, problems: tuple[Problem, ...] = ()) -> FormatError:
    return FormatError(f"this is no JSON of a compiled model: {why}", problems=problems,
                       remedy="write it with CompiledModel.dump")  # fmt: skip


PRODUCER = f"stitch {__version__}"


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class CompiledModel(ModelOfBinary):
    """A compiled module: its graph, its binary, what the compiler warned of, how its loops run.

    Callable: runs on the device of its inputs, or on the one that models of its target share. One
    compiled with an optimizer holds four programs and a `training`; its first call starts training.
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
    #: Whether it was read from a compile cache.
    is_from_cache: bool = False
    #: What `algorithm=` found.
    search_result: SearchResult[Any] | None = None
    #: How a torch module's calls are calls of the program, where that is not the same.
    structure: CallStructure | None = None
    session: ModelSession = field(default_factory=ModelSession, repr=False)

    def __copy__(self) -> CompiledModel:
        """The same programs, with calls and a training of its own; all else never changes."""
        training = None if self.training is None else replace(self.training, _started=[])
        return replace(self, training=training, session=ModelSession())

    def __deepcopy__(self, memo: dict[int, Any]) -> CompiledModel:
        return self.__copy__()

    def as_json(self, *, weights: bool = True) -> str:
        """The model as JSON for `CompiledModel.load`: graph, target, placement options, math
        fidelity, what `algorithm=` found; of a training also its programs, how it is done, and,
        with `weights`, parameters and state as they are now.
        """
        program = self.binary.programs[0]
        body: dict[str, Any] = {
            "stitch": "model", "version": VERSION, "target": self.target, "name": program.name,
            "role": program.role.value, "placement": [option.text() for option in self.placement],
        }  # fmt: skip
        if self.math_fidelity is not MathFidelity.BY_TYPE:
            body["math_fidelity"] = self.math_fidelity.value
        if self.training is not None:
            body["programs"] = base64.b64encode(self.encode()).decode("ascii")
            body["training"] = self.training.as_data(weights=weights)
        if self.search_result is not None:
            body["search"] = self.search_result.as_data()
        return json.dumps(body | {"graph": as_data(self.graph)})

    @takes(file=either(PATH, WRITABLE))
    def dump(self, file: str | Path | IO[str], *, weights: bool = True) -> None:
        """Write `as_json` to a path (the old file or the new one, whole), or into an open text
        file."""
        text = self.as_json(weights=weights)
        if isinstance(file, str | os.PathLike):
            atomic_write(Path(file), text.encode())
        else:
            file.write(text)

    @staticmethod
    @takes(file=either(PATH, READABLE))
    def load(file: str | Path | IO[str]) -> CompiledModel:
        """Read what `dump` wrote, from a path or an open text file; raises `FormatError` for
        anything else."""
        parts = read_model(text_of(file))
        machine = load_machine(parts.target)
        if parts.training is None:
            model = compiled(parts.graph, machine, parts.target, parts.options)
            return replace(model, search_result=parts.search_result)
        assert parts.binary is not None
        return CompiledModel(
            parts.graph, parts.binary, parts.target, parts.options.placement,
            training=parts.training, search_result=parts.search_result,
        )  # fmt: skip

    def get_tensor(self, name: str, index: Any = ...) -> Array:
        """The elements of a tensor of the training, or a part of them; before the first call those
        that it begins with. Of a model for inference: a constant.

        Raises `UsageError` for an unknown name and an index that is out of range.
        """
        if self.training is not None:
            return self.training.get_tensor(name, index)
        from stitch.training import constants_of, part_of

        constants = constants_of(self.graph)
        if name not in constants:
            raise UsageError(f"this model has no constant {name!r}",
                             remedy=closest(name, constants) or None)  # fmt: skip
        return part_of(name, constants[name], index).copy()

    def set_tensor(self, name: str, array: Any, index: Any = ...) -> None:
        """Overwrite a tensor of the training, or a part of it; before the first call what it begins
        with. Raises `UsageError`, `LinkError`."""
        if self.training is None:
            raise UsageError(
                "the weights of a model for inference are constants of its program",
                remedy="compile it with optimizer= and loss=, or again with other weights",
            )
        self.training.set_tensor(name, array, index)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """Run the first program (one tensor, or a tuple of them), on the device of the inputs if
        these are tensors, else on the device that models of this target and executor share; or a
        training's forward (a future). Raises `TaskError` once a training was closed.

        With arguments like those that a torch module was compiled with it gives what the module
        gives, with tensors of Stitch in the place of torch's; with inputs by slot, outputs by slot.
        """
        if self.training is not None:
            if self.training.is_over:
                raise TaskError(
                    "the training of this model was closed, and what it learned went with it",
                    remedy="begin another with model.start(), from weights=instance.state_dict() "
                    "of before if it is to go on",
                )
            return (self.training.instance or self.start())(*arguments, **named)
        slots = None if self.structure is None else self.structure.inputs_of(arguments, named)
        if self.structure is None or slots is None:
            return self.session.call(self, arguments, named)
        return self.structure.results_of(self.session.call(self, (), slots))

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
        """Start training, on a device or on one of its own (`options` as for `open_device`).

        `weights` replaces initial values by name; `seed` decides what random operators draw. The
        model's next call goes to this instance. Raises `UsageError` for a model without training.
        """
        if self.training is None:
            raise UsageError(
                "this model was compiled for inference",
                remedy="compile it with optimizer= and loss=",
            )
        if device is not None and options:
            raise UsageError("a device that is open already takes no options",
                             got=", ".join(options))  # fmt: skip
        owned = device is None
        if self.executor is not None:
            options.setdefault("executor", self.executor)
        chosen = open_device(self.target, **options) if device is None else device
        return self.training.start(
            chosen, weights=weights, seed=seed, owns_device=owned, capture_call=graph_of_torch_call
        )

    @property
    def instance(self) -> TrainingInstance:
        """The training that the first call started; raises `UsageError` before."""
        instance = None if self.training is None else self.training.instance
        if instance is None:
            raise UsageError("training has not started", remedy="call the model, or start()")
        return instance

    def state(self) -> dict[str, Tensor]:
        """The buffers that the module writes, by name, as the calls so far have left them: tensors
        on the device, which stay as they are when the model is called again.

        Empty for a module that writes none; of a training they are among `get_tensor`'s.
        """
        return self.session.state(self)

    @takes(values=optional(MAPPING))
    def reset_state(self, values: Mapping[str, Any] | None = None) -> None:
        """The next call begins with these buffers (tensors, as `state` of a model gives them, or
        arrays, by name), and otherwise with those that the module had when it was compiled.

        Raises `UsageError` for names that are none of its states, `LinkError` for other shapes and
        types.
        """
        self.session.reset_state(self, values or {})

    @takes(folder=PATH)
    def save_programs(self, folder: str | Path) -> tuple[Path, ...]:
        """Write each program into a `.ttb` file of its own, named after its role.

        Of a training: `forward`, `loss`, `backward`, `update`, and `evaluation`.
        """
        place = Path(folder)
        make_folder(place)
        batch, paths = OutputFiles(), []
        for program in self.binary.programs:
            twin = self.training is not None and program is self.training.programs.evaluation
            name = "evaluation" if twin else program.role.value
            if program.name.endswith(INITIAL_STATE) and program is not self.binary.programs[0]:
                name = INITIAL_STATE.removeprefix(".")
            path = place / f"{name}.ttb"
            batch.add(path, content_of(Binary((program,), self.binary.machine, PRODUCER)))
            paths.append(path)
        batch.commit()
        return tuple(paths)


def compiled(
    graph: ComputationGraph, machine: Machine, target: str, options: CompileOptions,
    cache: CompileCache | None = None,
) -> CompiledModel:  # fmt: skip
    """The model of a graph on a machine, perhaps from a cache; `target` is how the machine is
    spelled."""

    asked = options.placement
    if graph.initial_state:
        options = replace(options, placement=(*_state_placement(graph, machine, asked), *asked))

    def compile() -> KeptCompilation:
        compilation = compile_graph(graph, machine, options)
        binary = Binary((compilation.program,), machine.shape, PRODUCER)
        return KeptCompilation(binary, compilation.warnings, compilation.loops)

    made = None if cache is None else cache.compilation(graph, machine, options, compile)
    kept = compile() if made is None else made.kept
    binary = kept.binary
    if graph.initial_state:
        start = _initial_state_program(graph, binary.programs[0].name, machine, options)
        binary = Binary((*binary.programs, start), machine.shape, PRODUCER)
    return CompiledModel(
        graph, binary, target, asked, kept.warnings, loops=kept.loops,
        executor=options.executor, math_fidelity=options.math_fidelity,
        is_from_cache=made is not None and made.is_hit,
    )  # fmt: skip


def _state_layout(
    placement: Sequence[PlacementOption], machine: Machine
) -> dict[str, PlacementValue]:
    """What a state's input is requested to be laid out as: in DRAM unless a placement option says
    otherwise.
    """
    layout = {option.field: option.value for option in placement if option.field in LAYOUT_FIELDS}
    # The state that a call reads and the one that it makes are there at the same time.
    layout.pop("address", None)
    if machine.shape.dram is not None and not {"memory_layout", "shard_spec"} & layout.keys():
        layout.setdefault("space", Space.DRAM)
    return layout


def _state_placement(
    graph: ComputationGraph, machine: Machine, asked: Sequence[PlacementOption]
) -> tuple[PlacementOption, ...]:
    """Placement options that lay an output that is a state out as the input of its name, so that
    the next call reads it where it is.
    """
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
    """The program without inputs that gives what the states of another one begin with, laid out as
    its inputs are."""
    requested = graph.with_placement(*options.placement)
    builder = ComputationGraphBuilder(f"{name}{INITIAL_STATE}")
    for slot, placement in zip(graph.inputs, requested.placement_by_slot("input"), strict=True):
        if slot.name in graph.initial_state:
            builder.output(slot.name, builder.parameter(slot.name, graph.initial_state[slot.name]))
            layout = _state_layout(placement, machine)
            builder.place(*(PlacementOption("output", slot.name, f, v) for f, v in layout.items()))
    return compile_graph(builder.build(), machine, CompileOptions()).program
