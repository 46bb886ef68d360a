"""The public face: compile, load, open_device, submit, wait, to_layout, pipelines.

Comes in: modules, files, arrays. Goes out: compiled models, devices, tensors. `stitch/__init__.py`
re-exports it; nothing but the commands imports it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from stitch.compiler import CompileOptions, CompileWarning, compile_graph
from stitch.errors import FormatError, UsageError
from stitch.frontend.modules import read_graph
from stitch.frontend.pipeline_run import YamlPipeline, read_pipeline
from stitch.graph import ComputationGraph, Wish, as_json, from_json, parse_wish
from stitch.machine import Machine, load_machine
from stitch.program import Layout, Role, TensorDesc
from stitch.report import explain, memory_report, memory_views
from stitch.runtime import DEFAULT_WINDOW, LoadedProgram, Tensor
from stitch.runtime import Device as RuntimeDevice
from stitch.runtime.executors import Executor, make_executor
from stitch.runtime.pipeline import Pipeline as RuntimePipeline
from stitch.ttb import Binary, encode, inspect_sizes, save
from stitch.ttb import load as load_binary

__version__ = "0.1.0"
PRODUCER = f"stitch {__version__}"
#: Programs that `submit` keeps loaded on a device.
MAX_SUBMITTED = 64


class Device(RuntimeDevice):
    """A simulated machine, opened: load programs, call them, look at results; see `open_device`."""

    def __init__(self, machine: str | Machine, **options: Any) -> None:
        super().__init__(machine, **options)
        self._submitted: dict[tuple[int, int | str], tuple[Binary, LoadedProgram]] = {}

    def close(self) -> None:
        """Run what is queued and give all memory back; closing twice is allowed."""
        self._submitted.clear()
        super().close()

    def loaded(self, source: Any, program: int | str) -> LoadedProgram:
        """A program of a binary, loaded at most once: for those who submit it over and over.

        The last `MAX_SUBMITTED` stay loaded until the device closes. Raises what `load` raises.
        """
        if isinstance(source, LoadedProgram):
            return source
        binary = getattr(source, "binary", source)
        if not isinstance(binary, Binary):
            return self.load(binary, program)
        with self.lock:
            key = (id(binary), program)
            # The entry holds the binary, so its id stays its own.
            entry = self._submitted.pop(key, None) or (binary, self.load(binary, program))
            self._submitted[key] = entry
            while len(self._submitted) > MAX_SUBMITTED:
                del self._submitted[next(iter(self._submitted))]
            return entry[1]

    def explain(self) -> str:
        """Every copy so far, with bytes, simulated time and reason."""
        return explain(self)

    def memory_report(self) -> str:
        """What each space holds, in bytes per bank."""
        return memory_report(self)

    def memory_views(self) -> dict[str, dict[str, Any]]:
        """The memory report as data, with tt-metal's keys."""
        return memory_views(self)


@dataclass(frozen=True, slots=True, eq=False)
class CompiledModel:
    """A compiled module: its graph, its binary, and what the compiler warned of.

    Callable: runs on a device of its own target, opened at the first call.
    """

    graph: ComputationGraph
    binary: Binary
    target: str
    wishes: tuple[Wish, ...] = ()
    warnings: tuple[CompileWarning, ...] = ()
    #: The program on a device of its own, from the first call on.
    _loaded: list[LoadedProgram] = field(default_factory=list, repr=False)

    def save(self, path: str | Path) -> None:
        """Write the `.ttb` file, whole or not at all."""
        save(self.binary, path)

    def encode(self) -> bytes:
        """The bytes that `save` would write."""
        return encode(self.binary)

    def text(self) -> str:
        """The programs as readable text."""
        return "".join(program.text() for program in self.binary.programs)

    def as_json(self) -> str:
        """The graph, the target and the wishes as JSON; `CompiledModel.load` compiles it again."""
        program = self.binary.programs[0]
        body = {
            "stitch": "model", "target": self.target, "name": program.name,
            "role": program.role.value, "wishes": [wish.text() for wish in self.wishes],
        }  # fmt: skip
        return json.dumps(body | {"graph": json.loads(as_json(self.graph))})

    def dump(self, file: IO[str]) -> None:
        """Write `as_json` into an open text file."""
        file.write(self.as_json())

    @staticmethod
    def load(file: IO[str]) -> CompiledModel:
        """Read what `dump` wrote; raises `FormatError` for anything else."""
        try:
            body = json.load(file)
            options = CompileOptions(
                wishes=tuple(parse_wish(wish) for wish in body["wishes"]),
                name=body["name"],
                role=Role(body["role"]),
            )
            graph, target = from_json(json.dumps(body["graph"])), body["target"]
        except (AttributeError, KeyError, TypeError, UsageError, ValueError) as error:
            raise FormatError(f"this is no JSON of a compiled model: {error}") from error
        return _compiled(graph, load_machine(target), str(target), options)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """Run the first program on a device of the model's own target."""
        if not self._loaded:
            self._loaded.append(open_device(self.target).load(self))
        return self._loaded[0](*arguments, **named)


def compile(
    module: ComputationGraph | str | Path | Callable[..., Any] | Any,
    example_inputs: Sequence[Any] | Mapping[str, Any] = (),
    *,
    target: str | Path | Machine = "wormhole_n150",
    wishes: str | Iterable[str | Wish] = (),
    name: str | None = None,
    role: Role | str = Role.FORWARD,
    input_shapes: Mapping[str, Sequence[int]] | None = None,
) -> CompiledModel:
    """Compile a module for a machine: a computation graph, the path of a YAML or ONNX file, a
    `ModelProto`, a torch module (`nn.Module`, `GraphModule`, `ExportedProgram`), or a Python
    function.

    A function is traced over `example_inputs` (descriptors or arrays), a torch module captured at
    theirs (tensors too, by position or name); those of an ONNX model (by position or name), and
    `input_shapes` by name, bind its symbolic dimensions. `wishes` are
    spelled as for `stitch-compile --set`, as in `"input.x.space=l1"`. Raises `CompileError`,
    `FormatError`, `LayoutError`, `OutOfMemoryError`.
    """
    graph = read_graph(module, example_inputs, input_shapes)
    wishes = (wishes,) if isinstance(wishes, str) else wishes
    asked = tuple(parse_wish(w) if isinstance(w, str) else w for w in wishes)
    options = CompileOptions(wishes=asked, name=name, role=Role(role))
    machine = load_machine(target)
    spelled = machine.name if isinstance(target, Machine) else str(target)
    return _compiled(graph, machine, spelled, options)


def _compiled(
    graph: ComputationGraph, machine: Machine, target: str, options: CompileOptions
) -> CompiledModel:
    made = compile_graph(graph, machine, options)
    binary = Binary((made.program,), machine.shape, PRODUCER)
    return CompiledModel(graph, binary, target, options.wishes, made.warnings)


def open_device(
    machine: str | Path | Machine = "wormhole_n150",
    *,
    executor: str | Executor = "numpy",
    threads: int | None = None,
    window: int = DEFAULT_WINDOW,
    debug: bool = False,
    strict_types: bool = False,
) -> Device:
    """Open a simulated machine by name, YAML path or description.

    `executor`: who computes (`numpy`, `onnxruntime`, `auto`, `null`); `threads`: on how many
    threads ONNX Runtime computes one operation (default 1). `window`: tasks queued before they run;
    1 runs each call at once. `debug`: poison freed bytes and guard padding.
    `strict_types`: links may not change the floating storage type.
    """
    return Device(
        load_machine(machine),
        executor=executor if threads is None else make_executor(executor, threads),
        window=window, debug=debug, strict_types=strict_types,
    )  # fmt: skip


class Pipeline(RuntimePipeline):
    """Loaded programs in a chain, called in one go; `from_yaml` reads a whole pipeline file."""

    @staticmethod
    def from_yaml(
        path: str | Path, *, device: Device | None = None, **options: Any
    ) -> YamlPipeline:
        """A pipeline file (its form: `stitch.frontend.pipeline_yaml`), ready to be called.

        Without a device one is opened, with `options` as for `open_device`: on the machine that the
        file names, else the one its first module was compiled for. Raises `FormatError` with every
        defect and its line, `IncompatibleError`, `OutOfMemoryError`.
        """
        strict_types = device.strict_types if device else bool(options.get("strict_types", False))
        checked = read_pipeline(path, strict_types=strict_types)
        if device is None:
            device = open_device(checked.machine, **options)
        elif options:
            raise UsageError("a device that is open already takes no options",
                             got=", ".join(options))  # fmt: skip
        return YamlPipeline(checked, device)


def load(source: str | Path | bytes | CompiledModel, *, verify: str = "metadata") -> Binary:
    """Read and check a binary without a device: a path, bytes, or a compiled model.

    `verify="full"` checks every byte. Raises `FormatError`, `IncompatibleError`.
    """
    if isinstance(source, CompiledModel):
        return source.binary
    if verify not in ("metadata", "full"):
        raise UsageError("verify is 'metadata' or 'full'", got=repr(verify))
    if not isinstance(source, str | Path | bytes | bytearray | memoryview):
        raise UsageError("load takes a path, bytes or a compiled model", got=type(source).__name__)
    return load_binary(source, verify="full" if verify == "full" else "metadata")


def submit(
    device: Device, binary: Any, program: int | str, inputs: Sequence[Any]
) -> tuple[Tensor, ...]:
    """Run a program of a binary; inputs that are not retained are freed afterwards.

    `binary` is what `device.load` takes, or a loaded program. Gives the outputs, pending.
    """
    loaded = device.loaded(binary, program)
    if loaded.device is not device:
        raise UsageError(f"program {loaded.name!r} is loaded on another device")
    made = loaded(*inputs)
    for tensor in inputs:
        if isinstance(tensor, Tensor) and tensor.is_allocated and not tensor.retain:
            device.deallocate(tensor._record, f"submit of {loaded.name!r}")
    return made if isinstance(made, tuple) else (made,)


def wait(tensors: Tensor | Iterable[Tensor]) -> None:
    """Run the queues that these tensors are in; raises what a failed task raised."""
    for tensor in tensors if isinstance(tensors, Iterable) else (tensors,):
        _tensor(tensor).device.settle(tensor._record)


def to_layout(tensor: Tensor, layout: Layout | TensorDesc, *, retain: bool | None = None) -> Tensor:
    """The same elements in another layout (any legal one), queued; carries `retain` over.

    `retain=False` frees the source afterwards unless it is itself retained. Raises `LayoutError`
    where the shape differs or the machine cannot hold the layout.
    """
    return _tensor(tensor).to_layout(layout, retain=retain)


def has_layout(tensor: Tensor, layout: Layout | TensorDesc) -> bool:
    """Whether a tensor lies as described; an address counts only where one is given."""
    return _tensor(tensor).has_layout(layout)


def _tensor(value: Any) -> Tensor:
    if not isinstance(value, Tensor):
        raise UsageError(
            "this takes a tensor of a device",
            got=type(value).__name__,
            remedy="make one with device.tensor(array)",
        )
    return value


def get_layout(binary: Any, program: int | str = 0, input: int | str = 0) -> Layout:
    """The layout that a program wants an input in; raises `UsageError` for an unknown slot."""
    source = getattr(binary, "binary", binary)
    found = source if isinstance(source, Binary) else load(source)
    body = found.program(program)
    names = [slot.name for slot in body.inputs]
    if isinstance(input, str):
        if input not in names:
            raise UsageError(f"{body.name!r} has no input {input!r}", expected=", ".join(names))
        input = names.index(input)
    if not 0 <= input < len(names):
        raise UsageError(f"{body.name!r} has {len(names)} inputs, not {input + 1}")
    return body.input_desc(input).layout


@contextmanager
def forbid_copies(device: Device) -> Iterator[None]:
    """Within the block, work that would need a copy raises `TaskError` instead of making one."""
    device.flush()
    device.copies_forbidden += 1
    device.records.touch()
    try:
        yield
        device.flush()
    finally:
        device.copies_forbidden -= 1


__all__ = [
    "CompiledModel", "Device", "Pipeline", "compile", "forbid_copies", "get_layout", "has_layout",
    "inspect_sizes", "load", "open_device", "submit", "to_layout", "wait",
]  # fmt: skip
