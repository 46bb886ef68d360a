"""`stitch-compile`: compile one module into a `.ttb` file."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import io
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from shlex import quote
from typing import Any

from stitch import api, plugins
from stitch.cli.command import EXIT_OK, Command, prog, say_aside, say_result, say_written
from stitch.cli.output_checks import TTB, OutputChecks
from stitch.cli.parser import add_options, count, file_path, make_parser, positive, size
from stitch.cli.phases import phase
from stitch.cli.run_inputs import is_array_text, parse_array, split_slot
from stitch.cli.settings import cache_folder
from stitch.compile_cache import DEFAULT_MAX_NBYTES
from stitch.compiler import RATED_EXECUTORS, SCHEDULES
from stitch.documents import MACHINE, MODULE, kind_of
from stitch.errors import CompileError, FormatError, StitchError, UsageError, unknown
from stitch.files import OutputFiles, nearest_file, open_file, text_of, unreadable, write_files
from stitch.frontend import opened
from stitch.graph import ComputationGraph, from_json
from stitch.option_values import DEFAULT_TARGET
from stitch.program import Array, Dim, MathFidelity, Program, Role
from stitch.report import counted
from stitch.ttb import Binary, SymbolicBinary, content_of

# Python factories: `--entry=file.py:factory`.

#: The extras of Stitch that install the packages which a factory may import.
_EXTRAS = {"torch": "torch", "onnx": "onnx", "onnxruntime": "onnx"}


def from_entry(source: str | None, entry: str) -> tuple[Any, Sequence[Any] | Mapping[str, Any]]:
    """Call a factory; return its graph, or its module and example inputs.

    Raises `UsageError`, `CompileError`, `FormatError`.
    """
    module_name, colon, name = entry.rpartition(":")
    if not name or (source is None and not (colon and module_name)):
        raise UsageError(
            f"--entry={entry} names no factory",
            expected="--entry=pkg.mod:factory, --entry=file.py:factory, or SOURCE and --entry=NAME",
        )
    if source is None and module_name.lower().endswith(".py"):
        source, module_name = module_name, ""
    if source is not None and module_name:
        raise UsageError(
            "SOURCE and --entry both name the module of the factory",
            expected=f"SOURCE and --entry={name}, or --entry={entry} alone",
        )
    module = _file_module(Path(source)) if source is not None else _imported(entry)
    factory = getattr(module, name, None)
    if not callable(factory):
        callables = [key for key, value in vars(module).items() if callable(value)]
        what, where = f"{module.__name__} has no factory {name!r}", f"--entry={entry}"
        raise unknown(what, name, callables, expected=None, where=where)
    try:
        returned = factory()
    except StitchError:
        raise
    except Exception as error:
        raise _failure("the factory failed", error, f"--entry={entry}") from error
    if isinstance(returned, ComputationGraph):
        return returned, ()
    if isinstance(returned, tuple) and len(returned) == 2 and callable(returned[0]):
        function, examples = returned
        if isinstance(examples, Mapping):
            return function, examples
        return function, tuple(examples) if isinstance(examples, list | tuple) else (examples,)
    raise CompileError(
        "the factory returned a value that no front end reads",
        where=f"--entry={entry}",
        expected="a ComputationGraph, or (function or torch module, example inputs)",
        got=type(returned).__name__,
    )


def _imported(entry: str) -> Any:
    name, _, factory = entry.rpartition(":")
    # Like `python -m`: import the user's modules from the current folder.
    folder = str(Path.cwd())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        return importlib.import_module(name)
    except Exception as error:
        failure = _failure(f"cannot import {name!r}", error, f"--entry={entry}")
        absent = isinstance(error, ModuleNotFoundError) and error.name == name
        if absent and "." not in name and not failure.remedy:
            failure.remedy = f"name a file with its suffix: --entry={name}.py:{factory}"
        raise failure from error


def _file_module(path: Path) -> Any:
    if path.suffix.lower() != ".py":
        raise UsageError("--entry takes a Python file as SOURCE", got=str(path))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None, "a .py file always has a loader"
    module = importlib.util.module_from_spec(spec)
    try:
        open_file(path).close()  # The import would block on a named pipe.
        spec.loader.exec_module(module)
    except OSError as error:
        raise unreadable(path, error) from error
    except FormatError:
        raise
    except Exception as error:
        raise _failure(f"{path.name} cannot be imported", error) from error
    return module


def _failure(what: str, error: Exception, where: str | None = None) -> CompileError:
    """Return the error for an exception in user code; name the extra of a missing package."""
    name = error.name or "" if isinstance(error, ModuleNotFoundError) else ""
    # A package that is imported is installed: only a part of it is missing (`onnx.nope`).
    package = name.partition(".")[0]
    extra = _EXTRAS.get(package) if sys.modules.get(package) is None else None
    return CompileError(
        f"{what}: {type(error).__name__}: {error}", where=where,
        remedy=None if extra is None else f"pip install 'stitch-runtime[{extra}]'",
    )  # fmt: skip


# Sources: the options that name a module, its examples and shapes.

SOURCES = (
    "modules in YAML (.yaml, .yml), ONNX models (.onnx), archives of torch.export (.pt2), "
    "graphs in JSON (.json), "
    "Python (.py with --entry=NAME)"
)
_SIZE = r"(?:[^\W\d]\w*:\d{1,18}\.\.)?\d{1,18}"
_SHAPE = re.compile(rf"(?:{_SIZE}(?:x{_SIZE})*)?", re.ASCII)
#: The sizes of a text that is a shape; names may have an x.
_SIZES = re.compile(rf"(?:^|x)({_SIZE})", re.ASCII)


def module_of(options: argparse.Namespace) -> tuple[Any, Sequence[Any] | Mapping[str, Any]]:
    """Return the module and its example inputs; raise `UsageError`, `CompileError`."""
    source: str | None = options.source
    suffix = Path(source or "").suffix.lower()
    if options.examples and suffix != ".onnx":
        raise UsageError("example inputs are only for ONNX models", where="--input")
    if options.entry is not None:
        return from_entry(source, options.entry)
    if source is None:
        raise UsageError(
            "there is no module to compile", expected=f"SOURCE ({SOURCES}), or --entry"
        )
    if suffix == ".onnx":
        return source, example_inputs(options.examples)
    if suffix == ".json":
        return _graph_of_json(Path(source)), ()
    if suffix == ".pt2":
        return opened(source), ()
    if suffix == ".py":
        raise UsageError(f"{source!r} needs the name of its factory", remedy="add --entry=NAME")
    if suffix not in (".yaml", ".yml") and suffix[1:] not in plugins.names("frontends"):
        raise CompileError(
            f"no front end reads {source!r}", expected=SOURCES, remedy=other_source(source)
        )
    return source, ()


def _graph_of_json(path: Path) -> ComputationGraph:
    text = text_of(path)
    if '"stitch": "model"' in text[:40]:
        model = api.CompiledModel.load(io.StringIO(text))
        return model.graph.with_placement(*model.placement)
    return from_json(text)


def input_shapes(options: Sequence[str]) -> dict[str, tuple[int | Dim, ...]]:
    """Parse the values of `--input_shape`; raise `UsageError`.

    >>> input_shapes(["x=1x3x224x224", "scale="])
    {'x': (1, 3, 224, 224), 'scale': ()}
    >>> input_shapes(["x=batch:1..64x784"])
    {'x': (Dim(name='batch', least=1, most=64), 784)}
    >>> [size.name for size in input_shapes(["x=x:1..2xxx:3..4xmax:5..6"])["x"]]
    ['x', 'xx', 'max']
    """
    shapes: dict[str, tuple[int | Dim, ...]] = {}
    dims: dict[str, Dim] = {}
    for word in options:
        name, equals, text = word.rpartition("=")
        if not (equals and name) or _SHAPE.fullmatch(text) is None:
            raise UsageError(
                f"{word[:80]!r} is not an input with its shape", where="--input_shape",
                expected="NAME=1x3x224x224, or with named sizes NAME=batch:1..64x784",
            )  # fmt: skip
        if name in shapes:
            raise UsageError(f"the shape of input {name!r} is given twice", where="--input_shape")
        shapes[name] = tuple(_size(size, dims) for size in _SIZES.findall(text))
    return shapes


def _size(text: str, dims: dict[str, Dim]) -> int | Dim:
    """Return a number, or a named size, which is added to `dims`."""
    name, colon, bounds = text.partition(":")
    if not colon:
        return int(text)
    least, _, most = bounds.partition("..")
    try:
        dim = Dim(name, int(least), int(most))
    except UsageError as error:
        raise UsageError(error.what, where=f"--input_shape, {text}", expected=error.expected,
                         got=error.got) from error  # fmt: skip
    if dims.setdefault(name, dim) != dim:
        first = dims[name]
        raise UsageError(
            f"size {name!r} has two bounds", where="--input_shape",
            expected=f"{first.least}..{first.most}, as before", got=f"{dim.least}..{dim.most}",
            remedy="write equal bounds, or another name for another size",
        )  # fmt: skip
    return dim


def example_inputs(options: Sequence[str]) -> dict[str, Array]:
    """Parse the values of `--input`; raise `UsageError`, or `FormatError` for a bad file."""
    examples: dict[str, Array] = {}
    for word in options:
        name, text = split_slot(word, is_array_text)
        if name is None:
            raise UsageError(
                f"{word[:80]!r} is no example input", where="--input",
                expected="NAME=@file.npy, or as in NAME=2xi64=3 4",
            )  # fmt: skip
        if name in examples:
            raise UsageError(f"input {name!r} is given twice", where="--input")
        examples[name] = parse_array(text, name)
    return examples


def other_source(source: str) -> str | None:
    """Return the remedy for a source that no front end reads, if there is one.

    >>> other_source("mlp.py:make"), other_source("a.ttb"), other_source("a.txt")
    ('--entry=mlp.py:make', 'stitch-inspect a.ttb', None)
    """
    module, colon, factory = source.rpartition(":")
    if colon and module and factory.isidentifier():
        return f"--entry={source}"
    if Path(source).suffix.lower() == ".ttb":
        return f"stitch-inspect {quote(source)}"
    return nearest_file(source, (".yaml", ".yml", ".onnx", ".pt2", ".json", ".py")) or None


def refuse_other_kinds(options: argparse.Namespace, error: FormatError) -> None:
    """Raise `UsageError` if SOURCE is a machine or a pipeline in YAML."""
    path: str | None = options.source
    if path is None or Path(path).suffix.lower() not in (".yaml", ".yml"):
        return
    kind = kind_of(path, MODULE)
    if kind != MODULE:
        is_machine = kind == MACHINE
        remedy = (
            f"stitch-compile module.yaml -o module.ttb --target={quote(path)}"
            if is_machine
            else f"stitch-run {quote(path)} --init=ones"
        )
        raise UsageError(f"{path!r} is a {kind}", expected="a module", remedy=remedy) from error


EXAMPLES = """\
  stitch-compile features.yaml -o features.ttb
  stitch-compile classifier.yaml -o c.ttb --target=wormhole_n150 --set input.x.space=l1
  stitch-compile --entry=mymodels.mlp:make -o mlp.ttb
  stitch-compile --entry=mlp.py:make -o - | stitch-run --module=- --init=randn
  stitch-compile model.onnx --input_shape x=batch:1..64x784 -o m.ttb  # for all these sizes
  stitch-compile model.onnx --input_shape x=1x3x224x224 --split=2 -o m.ttb  # m.0.ttb, m.1.ttb"""


def command() -> Command:
    """Return `stitch-compile` with its options."""
    parser = make_parser("Compile a module into a .ttb file.", EXAMPLES)
    parser.add_argument("source", nargs="?", metavar="SOURCE", help=SOURCES)
    parser.add_argument("-o", "--output", metavar="FILE", help="the .ttb file, - for stdout")
    add_options(
        parser,
        ("--target", {"metavar": "NAME|machine.yaml|.ttsys", "help": "the machine to compile for "
                      f"(default: {DEFAULT_TARGET})"}),
        ("--set", {"action": "append", "default": [], "metavar": "SIDE.SLOT.FIELD=VALUE",
                   "dest": "placement", "help": "a placement option of one slot: input.x.space=l1; "
                   "fields: space, data_type, layout, memory_layout, shard_spec, address, kind and "
                   "ownership (of inputs), alias (of outputs)"}),
        ("--name", {"help": "the program's name"}),
        ("--role", {"choices": [role.value for role in Role], "default": Role.FORWARD.value,
                    "help": "the program's role (default: %(default)s)"}),
        ("--entry", {"metavar": "pkg.mod:factory|file.py:factory", "help": "a Python factory that "
                     "returns a ComputationGraph, or a function or torch module with its example "
                     "inputs"}),
        ("--input_shape", {"action": "append", "default": [], "metavar": "NAME=1x3x224x224",
                           "help": "the shape of an ONNX model's input; batch:1..64x784 names a "
                           "size and its bounds (also of a function or torch module): the file "
                           "has all these sizes"}),
        ("--input", {"action": "append", "default": [], "metavar": "NAME=ARRAY",
                     "dest": "examples", "help": "an example of an ONNX model's input, as for "
                     "stitch-run; needed if shapes depend on its values"}),
        ("--unroll", {"type": count, "metavar": "N",
                      "help": "unroll an ONNX model's loops of at most N rounds (default: 4)"}),
        ("--schedule", {"choices": list(SCHEDULES),
                        "help": "the schedule of loops that allow it (default: the cheapest)"}),
        ("--executor", {"choices": list(RATED_EXECUTORS),
                        "help": "the executor whose costs select schedules (default: numpy, of a "
                        "card cuda); any executor runs the file"}),
        ("--math_fidelity", {"choices": [each.value for each in MathFidelity],
                             "default": MathFidelity.BY_TYPE.value,
                             "help": "number of passes of a device's matrix products, for the "
                             "simulated time (default: by the operands' type)"}),
        ("--split", {"type": positive, "metavar": "N",
                     "help": "split the module into N programs where the fewest bytes cross; "
                     "-o m.ttb writes m.0.ttb, m.1.ttb, ..."}),
        ("--split_at", {"action": "append", "default": [], "metavar": "NODE,...",
                        "help": "split the module after these nodes, by their names in the "
                        "program (--text); repeat it for names that have commas"}),
        ("--cache", {"metavar": "DIR", "type": file_path, "help": "the folder of a "
                     "compile cache: reuse its programs, and add new ones; \"default\" is the one "
                     "of this user (default: no cache)"}),
        ("--cache_size", {"metavar": "SIZE", "type": size, "help": "maximum size of the cache, "
                          "such as 2GiB; evicts the least recently used entries (default: 4GiB)"}),
        ("--text", {"action": "store_true", "help": "print the program as text"}),
    )  # fmt: skip
    return Command(parser.read, _compile)


def _compile(options: argparse.Namespace) -> int:
    try:
        return _compile_source(options)
    except FormatError as error:
        refuse_other_kinds(options, error)
        raise


def _compile_source(options: argparse.Namespace) -> int:
    if options.output is None and not options.text and (options.source or options.entry):
        raise UsageError("there is nothing to do", expected="-o FILE, or --text")
    if options.output == "-" and options.text:
        raise UsageError("-o - and --text both use standard output", remedy="choose one of them")
    checks = OutputChecks()
    cuts = cuts_of(options.split, options.split_at)
    shapes = input_shapes(options.input_shape)
    is_dynamic = any(isinstance(size, Dim) for shape in shapes.values() for size in shape)
    if is_dynamic:
        _refuse_static_options(options)
    if options.output == "-" and cuts is not None:
        raise UsageError("a split writes several files", expected="-o FILE, such as m.ttb")
    factory_file = (options.entry or "").rpartition(":")[0]
    checks.reads(filter(None, (options.source, options.target, factory_file)))
    if options.output is not None and cuts is None:
        checks.add(options.output, TTB, "-o")
    cache = cache_of(options.cache, options.cache_size)
    with phase("reading the module"):
        module, examples = module_of(options)
    checks.refuse_sources()
    how: dict[str, Any] = {
        "target": options.target or DEFAULT_TARGET, "placement": options.placement,
        "name": options.name, "role": options.role,
        "input_shapes": shapes, "unroll": options.unroll,
        "schedule": options.schedule, "executor": options.executor,
        "math_fidelity": options.math_fidelity, "cache": cache,
    }  # fmt: skip
    if is_dynamic:
        how["dynamic_shapes"] = {
            name: {axis: size for axis, size in enumerate(shape) if isinstance(size, Dim)}
            for name, shape in shapes.items()
        }
        how["input_shapes"] = {
            name: [None if isinstance(size, Dim) else size for size in shape]
            for name, shape in shapes.items()
        }
    if cuts is None:
        with phase("compiling"):
            model = api.compile(module, examples, **how)
        _write([model], [options.output], options, cache)
        return EXIT_OK
    parts = {"parts": cuts} if isinstance(cuts, int) else {"at": cuts}
    with phase("compiling"):
        models = api.split(module, examples, **parts, **how)
    output: str | None = options.output
    paths = [None if output is None else part_path(output, at) for at in range(len(models))]
    for path in paths:
        if path is not None:
            checks.add(path, TTB, "-o")
    _write(models, paths, options, cache)
    return EXIT_OK


def _refuse_static_options(options: argparse.Namespace) -> None:
    """Raise `UsageError` for an option that does not go with named sizes."""
    others = ("split", "split_at", "cache", "unroll", "schedule")
    asked = [f"--{name}" for name in others if getattr(options, name) not in (None, [])]
    if asked:
        raise UsageError(
            f"{', '.join(asked)} and named sizes exclude each other", where="--input_shape",
            remedy="give a number for each size of an ONNX model, NAME=7x784; leave --input_shape "
            "out for other modules: their examples have sizes",
        )  # fmt: skip


def _write(
    models: Sequence[api.CompiledModel | api.DynamicModel], paths: Sequence[str | None],
    options: argparse.Namespace, cache: api.CompileCache | None,
) -> None:  # fmt: skip
    """Write the files and print a summary of each."""
    contents = zip(paths, [content_of(_stored(m)) for m in models], strict=True)
    files: OutputFiles = {path: content for path, content in contents if path is not None}
    with phase("writing"):
        say_written(write_files(files))
    bodies: list[dict[str, Any]] = []
    lines: list[str] = []
    for model, path in zip(models, paths, strict=True):
        static = model if isinstance(model, api.CompiledModel) else None
        warnings, loops = ((), ()) if static is None else (static.warnings, static.loops)
        for warning in warnings:
            say_aside(f"{prog()}: warning: {warning}")
        binary = _stored(model)
        nbytes = api.inspect_sizes(binary).total
        bodies.append({
            "file": path, "nbytes": nbytes, "machine": binary.machine.name,
            "programs": _programs_json(binary),
            "warnings": list(map(str, warnings)),
            "loops": [loop.text() for loop in loops],
            **({"text": model.text()} if options.text else {}),
        })  # fmt: skip
        if options.text:
            lines.append(model.text().rstrip("\n"))
        if path is not None:
            lines.append(_summary(binary, "standard output" if path == "-" else path, nbytes))
            lines += [f"  {loop.text()}" for loop in loops]
            if isinstance(model, api.DynamicModel) and not options.text:
                lines += model.program.size_lines()
    body: dict[str, Any] = {"files": bodies}
    if cache is not None:
        body["cache"] = {"folder": str(cache.folder), "hits": cache.hits, "misses": cache.misses}
        said = f"cache {cache.folder}: {counted(cache.hits, 'hit')}, "
        said += counted(cache.misses, "miss", "misses")
        if options.text and not options.json:
            say_aside(said)
        else:
            lines.append(said)
    say_result(body, lambda: lines)


def _stored(model: api.CompiledModel | api.DynamicModel) -> Binary | SymbolicBinary:
    return model.stored() if isinstance(model, api.DynamicModel) else model.binary


def _programs_json(binary: Binary | SymbolicBinary) -> list[dict[str, Any]]:
    listed = [binary.graph] if isinstance(binary, SymbolicBinary) else binary.programs
    bodies: list[dict[str, Any]] = [
        {"name": p.name, "inputs": [slot.name for slot in p.inputs],
         "outputs": [slot.name for slot in p.outputs]} for p in listed
    ]  # fmt: skip
    if isinstance(binary, SymbolicBinary):
        bodies[0]["sizes"] = list(map(asdict, binary.sizes.dims.values()))
        bodies[0]["guards"] = [guard.text() for guard in binary.sizes.guards]
    return bodies


def _summary(binary: Binary | SymbolicBinary, where: str, nbytes: int) -> str:
    machine = binary.machine.name
    if isinstance(binary, SymbolicBinary):
        graph = binary.graph
        inputs, outputs = (
            ", ".join(f"{s.name} {graph.values[s.value].type.text()}" for s in slots)
            for slots in (graph.inputs, graph.outputs)
        )
        listed = f"{graph.name}: ({inputs}) -> ({outputs})"
        return f"{where}: {nbytes} bytes, 1 program with named sizes for {machine}; {listed}"
    programs = binary.programs
    listed = "; ".join(f"{p.name}: {_slots_text(p)}" for p in programs)
    return f"{where}: {nbytes} bytes, {counted(len(programs), 'program')} for {machine}; {listed}"


def _slots_text(program: Program) -> str:
    inputs = [f"{s.name} {program.input_desc(i).text()}" for i, s in enumerate(program.inputs)]
    outputs = [f"{s.name} {program.output_desc(i).text()}" for i, s in enumerate(program.outputs)]
    return f"({', '.join(inputs)}) -> ({', '.join(outputs)})"


def cache_of(folder: str | None, size: str | None) -> api.CompileCache | None:
    """Return the cache of `--cache`; raise `UsageError` for a size without a folder."""
    if folder is None:
        if size is not None:
            raise UsageError("--cache_size has no effect without --cache", remedy="add --cache=DIR")
        return None
    return api.CompileCache(cache_folder(folder), size or DEFAULT_MAX_NBYTES)


def cuts_of(count: int | None, nodes: Sequence[str]) -> int | tuple[str, ...] | None:
    """Return the parts of `stitch.split`, or None without a split; raise `UsageError`."""
    names = tuple(word for word in nodes if word.strip(","))
    if count is not None and names:
        raise UsageError("--split and --split_at exclude each other", remedy="choose one")
    if nodes and not names:
        raise UsageError("--split_at names no node", expected="--split_at=NODE,NODE")
    return names or count


def part_path(output: str, index: int) -> str:
    """Return the file of one part.

    >>> part_path("m.ttb", 2)
    'm.2.ttb'
    """
    path = Path(output)
    return str(path.with_name(f"{path.stem}.{index}{path.suffix}"))
