"""A compiled model and the device that it opens: programs, their graph, their form as JSON.

Comes in: graphs, what `dump` wrote. Goes out: `CompiledModel`, callable, and `Device`. Must not
know: front ends. The public face re-exports both.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from stitch.argument_kinds import (
    MAPPING,
    PATH,
    READABLE,
    WHOLE,
    WRITABLE,
    instance_of,
    optional,
    takes,
)
from stitch.compile_cache import CompileCache, KeptCompilation
from stitch.compiler import CompileOptions, CompileWarning, LoopNote, compile_graph
from stitch.errors import FormatError, Problem, TaskError, UsageError
from stitch.files import FileBatch, make_folder
from stitch.graph import (
    ComputationGraph,
    JsonObject,
    Wish,
    as_data,
    from_json,
    objects_without_duplicates,
    parse_wish,
)
from stitch.machine import Machine, load_machine
from stitch.program import MathFidelity, Program, Role, summary
from stitch.report import Device, open_device
from stitch.runtime import (
    LoadedProgram,
    Tensor,
)
from stitch.ttb import Binary, content_of, encode, save
from stitch.ttb import load as load_binary
from stitch.version import __version__

if TYPE_CHECKING:  # It loads when it is asked for: few processes train.
    from stitch.training import CompiledTraining, TensorFuture, TrainingInstance

PRODUCER = f"stitch {__version__}"
#: Programs that a model's `repr` names.
MAX_SHOWN = 3
#: The fields of a model's JSON that are always there, beside its graph.
_FIELDS = ("stitch", "target", "name", "role", "wishes")


class ModelOfBinary:
    """What was made here and has a file's form: it is saved, loaded on devices, and called."""

    __slots__ = ()

    binary: Binary
    #: How the machine is spelled that a call opens.
    target: str
    #: Who computes there: for whom loops were scheduled; None: who computes by default.
    executor: str | None
    #: The program on a device of its own, from the first call on.
    _loaded: list[LoadedProgram]

    def __repr__(self) -> str:
        programs = [f"  {summary(program)}" for program in self.binary.programs[:MAX_SHOWN]]
        more = len(self.binary.programs) - MAX_SHOWN
        tail = [f"  and {more} more"] if more > 0 else []
        head = f"<{type(self).__name__} for {self.target}:"
        return "\n".join([head, *programs, *tail]) + ">"

    @property
    def program(self) -> Program:
        """The one program; raises `UsageError` for a training, which has several."""
        if len(self.binary.programs) != 1:
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

    def run_alone(
        self, arguments: Sequence[Any], named: Mapping[str, Any]
    ) -> Tensor | tuple[Tensor, ...]:
        """Run the first program on a device of the model's own target."""
        if not self._loaded:
            words: dict[str, Any] = {} if self.executor is None else {"executor": self.executor}
            self._loaded.append(open_device(self.target, **words).load(self))
        return self._loaded[0](*arguments, **named)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class CompiledModel(ModelOfBinary):
    """A compiled module: its graph, its binary, what the compiler warned of, how its loops run.

    Callable: runs on a device of its own target, opened at the first call. One compiled with an
    optimizer holds four programs and a `training`; its first call starts training.
    """

    graph: ComputationGraph
    binary: Binary
    target: str
    wishes: tuple[Wish, ...] = ()
    warnings: tuple[CompileWarning, ...] = ()
    training: CompiledTraining | None = None
    loops: tuple[LoopNote, ...] = ()
    executor: str | None = None
    math_fidelity: MathFidelity = MathFidelity.BY_TYPE
    #: Whether it was read from a compile cache.
    is_from_cache: bool = False
    _loaded: list[LoadedProgram] = field(default_factory=list, repr=False)

    def as_json(self, *, weights: bool = True) -> str:
        """The model as JSON for `CompiledModel.load`: graph, target, wishes, math fidelity; of a
        training also its programs, how it is done, and, with `weights`, parameters and state as
        they are now.
        """
        program = self.binary.programs[0]
        body: dict[str, Any] = {
            "stitch": "model", "target": self.target, "name": program.name,
            "role": program.role.value, "wishes": [wish.text() for wish in self.wishes],
        }  # fmt: skip
        if self.math_fidelity is not MathFidelity.BY_TYPE:
            body["math_fidelity"] = self.math_fidelity.value
        if self.training is not None:
            body["programs"] = base64.b64encode(self.encode()).decode("ascii")
            body["training"] = self.training.as_data(weights=weights)
        return json.dumps(body | {"graph": as_data(self.graph)})

    @takes(file=WRITABLE)
    def dump(self, file: IO[str], *, weights: bool = True) -> None:
        """Write `as_json` into an open text file."""
        file.write(self.as_json(weights=weights))

    @staticmethod
    @takes(file=READABLE)
    def load(file: IO[str]) -> CompiledModel:
        """Read what `dump` wrote; raises `FormatError` for anything else."""
        try:
            body = json.load(file, object_pairs_hook=objects_without_duplicates)
            graph_text = json.dumps(body.get("graph") if isinstance(body, dict) else None)
        except (RecursionError, ValueError) as error:
            raise _no_model(f"it is no JSON, or nested too deeply ({error})") from error
        problems: list[Problem] = []
        root = JsonObject(body, "model", problems)
        root.refuse_other_keys((*_FIELDS, "graph", "math_fidelity", "programs", "training"))
        name, target, wishes = root.text("name"), root.text("target"), root.texts("wishes")
        role = root.choice("role", {role.value: role for role in Role}, Role.FORWARD)
        fidelity = MathFidelity.BY_TYPE
        if root.get("math_fidelity") is not None:
            fidelity = root.choice("math_fidelity", {f.value: f for f in MathFidelity}, fidelity)
        if root.text("stitch") != "model" or problems:
            raise _no_model("its fields are not those that dump writes", tuple(problems))
        graph = from_json(graph_text)
        try:
            options = CompileOptions(
                wishes=tuple(map(parse_wish, wishes)), name=name, role=role, math_fidelity=fidelity
            )
            if "training" in body:
                from stitch.training import CompiledTraining

                binary = load_binary(base64.b64decode(body["programs"], validate=True))
                training = CompiledTraining.from_data(body["training"], binary.programs)
                return CompiledModel(graph, binary, target, training=training)
        except (AttributeError, KeyError, TypeError, UsageError, ValueError) as error:
            raise _no_model(str(error)) from error
        return compiled(graph, load_machine(target), target, options)

    def __call__(self, *arguments: Any, **named: Any) -> Tensor | tuple[Tensor, ...] | TensorFuture:
        """Run on a device of the model's own target: the first program (one tensor, or a tuple of
        them), or a training's forward (a future). Raises `TaskError` once a training was closed.
        """
        if self.training is not None:
            if self.training.is_over:
                raise TaskError(
                    "the training of this model was closed, and what it learned went with it",
                    remedy="begin another with model.start(), from weights=instance.state_dict() "
                    "of before if it is to go on",
                )
            return (self.training.instance or self.start())(*arguments, **named)
        return self.run_alone(arguments, named)

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
        return self.training.start(chosen, weights=weights, seed=seed, owns_device=owned)

    @property
    def instance(self) -> TrainingInstance:
        """The training that the first call started; raises `UsageError` before."""
        instance = None if self.training is None else self.training.instance
        if instance is None:
            raise UsageError("training has not started", remedy="call the model, or start()")
        return instance

    @takes(folder=PATH)
    def save_programs(self, folder: str | Path) -> tuple[Path, ...]:
        """Write each program into a `.ttb` file of its own, named after its role.

        Of a training: `forward`, `loss`, `backward`, `update`, and `evaluation`.
        """
        place = Path(folder)
        make_folder(place)
        batch, paths = FileBatch(as_one=True), []
        for program in self.binary.programs:
            twin = self.training is not None and program is self.training.programs.evaluation
            path = place / f"{'evaluation' if twin else program.role.value}.ttb"
            batch.add(path, content_of(Binary((program,), self.binary.machine, PRODUCER)))
            paths.append(path)
        batch.commit()
        return tuple(paths)


def _no_model(why: str, problems: tuple[Problem, ...] = ()) -> FormatError:
    return FormatError(f"this is no JSON of a compiled model: {why}", problems=problems,
                       remedy="write it with CompiledModel.dump")  # fmt: skip


def compiled(
    graph: ComputationGraph, machine: Machine, target: str, options: CompileOptions,
    cache: CompileCache | None = None,
) -> CompiledModel:  # fmt: skip
    """The model of a graph on a machine, perhaps from a cache; `target` is how the machine is
    spelled."""

    def compile() -> KeptCompilation:
        compilation = compile_graph(graph, machine, options)
        binary = Binary((compilation.program,), machine.shape, PRODUCER)
        return KeptCompilation(binary, compilation.warnings, compilation.loops)

    made = None if cache is None else cache.compilation(graph, machine, options, compile)
    kept = compile() if made is None else made.kept
    return CompiledModel(
        graph, kept.binary, target, options.wishes, kept.warnings, loops=kept.loops,
        executor=options.executor, math_fidelity=options.math_fidelity,
        is_from_cache=made is not None and made.is_hit,
    )  # fmt: skip
