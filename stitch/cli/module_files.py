"""Read the files that a command names: modules and their machine, records."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, TypeAlias, TypeVar

from stitch import api
from stitch.api import DynamicModel
from stitch.errors import FormatError, StitchError, UsageError
from stitch.files import (
    note_file,
    read_text,
    unreadable,
)
from stitch.frontend import onnx_dimensions
from stitch.machine import Machine, known_machines, load_machine
from stitch.option_values import DEFAULT_TARGET
from stitch.program import Program
from stitch.report import counted
from stitch.ttb import Binary, SymbolicBinary, load_any

_T = TypeVar("_T")
#: Dimensions by input: a number, the name of a size, or None.
Dimensions: TypeAlias = "Mapping[str, tuple[int | str | None, ...]]"


@dataclass(frozen=True, slots=True)
class ModuleFile:
    """A file and the selected program of it.

    `label` is the file's name without folder and suffix, `path` the command's argument.
    """

    path: str
    label: str
    binary: Binary
    program: Program

    @property
    def source(self) -> tuple[str, str]:
        """Return the file and the program's name."""
        return self.path, self.program.name


def read_modules(
    paths: Sequence[str], functions: Sequence[str] = (), *, verify: str = "metadata",
    device: str | None = None, compiling: Callable[[str], None] | None = None,
    sizes: Callable[[DynamicModel, str, str], Mapping[str, int]] | None = None,
    shapes: Callable[[Dimensions, str, str], Mapping[str, tuple[int, ...]]] | None = None,
) -> tuple[ModuleFile, ...]:  # fmt: skip
    """Read modules, in order.

    Args:
        paths: The files; `-` is standard input.
        functions: The program of the k-th module, by name or index; program 0 for the rest.
        verify: As for `stitch.load`.
        device: The target of ONNX models, by default the machine of the first other module.
        compiling: Called before an ONNX model is compiled; None: ONNX models are refused.
        sizes: Returns the sizes for a module with named sizes, of its file and label; None: such
            modules are refused.
        shapes: Returns shapes of inputs for an ONNX model, of its dimensions by input, file and
            label; None: they are those of the model.

    Raises:
        UsageError: Too many or unknown functions.
        IncompatibleError: A module has named sizes.
    """
    if len(functions) > len(paths):
        raise UsageError(
            f"{counted(len(functions), 'function')} for {counted(len(paths), 'module')}",
            remedy="write at most one --function for each --module, in the same order",
        )
    if paths.count("-") > 1:
        raise UsageError("standard input holds one module only", got="--module=- twice")
    chosen = [*functions, *[""] * (len(paths) - len(functions))]
    models = {path for path in paths if compiling and Path(path).suffix.lower() == ".onnx"}
    binaries = {
        path: _placed(read_file(path, verify), path, sizes) for path in paths if path not in models
    }
    for path in models:
        target = device or next((b.machine.name for b in binaries.values()), DEFAULT_TARGET)
        binaries[path] = _compiled(path, target, compiling, shapes)
    return tuple(
        ModuleFile(path, _label(path), binaries[path],
               _program(binaries[path], name, path))
        for path, name in zip(paths, chosen, strict=True)
    )  # fmt: skip


def lacking_lines(modules: Sequence[ModuleFile]) -> list[str]:
    """Return the properties of foreign binaries that Stitch simplifies, with their files."""
    binaries = {module.path: module.binary for module in modules}
    return [
        f"{path}: {line}"
        for path, binary in binaries.items()
        if binary.origin is not None
        for line in binary.origin.lacking
    ]


def with_unique_names(modules: Sequence[ModuleFile]) -> tuple[ModuleFile, ...]:
    """Append the file to the names of programs that several files have."""
    files: dict[str, set[str]] = {}
    for module in modules:
        files.setdefault(module.program.name, set()).add(module.path)
    return tuple(m if len(files[m.program.name]) == 1 else _named_by_file(m) for m in modules)


def _named_by_file(module: ModuleFile) -> ModuleFile:
    name = f"{module.program.name} in {module.path}"
    return with_program(module, replace(module.program, name=name))


def with_program(module: ModuleFile, program: Program) -> ModuleFile:
    """Replace the module's program."""
    programs = tuple(program if p is module.program else p for p in module.binary.programs)
    return replace(module, binary=replace(module.binary, programs=programs), program=program)


def read_file(path: str, verify: str) -> Binary | SymbolicBinary:
    """Read a `.ttb` file, or standard input for `-`."""
    how: Literal["metadata", "full"] = "full" if verify == "full" else "metadata"
    if path == "-":
        note_file(0, "standard input")
        return load_any(sys.stdin.buffer.read(), verify=how)
    return load_any(path, verify=how)


def _label(path: str) -> str:
    return "stdin" if path == "-" else Path(path).stem


def _placed(
    binary: Binary | SymbolicBinary, path: str,
    sizes: Callable[[DynamicModel, str, str], Mapping[str, int]] | None,
) -> Binary:  # fmt: skip
    if isinstance(binary, Binary):
        return binary
    if sizes is None:
        raise binary.needs_sizes(path)
    model = DynamicModel.of(binary)
    return model.at(**sizes(model, path, _label(path))).binary


def _compiled(
    path: str, target: str, compiling: Callable[[str], None] | None,
    shapes: Callable[[Dimensions, str, str], Mapping[str, tuple[int, ...]]] | None,
) -> Binary:  # fmt: skip
    """Compile an ONNX model in memory."""
    if compiling is not None:
        compiling(f"{path} is compiled for {target}, in memory (stitch-compile writes a file)")
    given = None if shapes is None else shapes(onnx_dimensions(path), path, _label(path))
    return api.compile(path, target=target, input_shapes=given).binary


def _program(binary: Binary, function: str, path: str) -> Program:
    names = [program.name for program in binary.programs]
    if not function:
        return binary.programs[0]
    try:
        which = int(function) if function.isdecimal() and function not in names else function
        return binary.program(which)
    except StitchError as error:
        raise UsageError(
            error.what, where=path, expected=error.expected, remedy=error.remedy
        ) from error


def read_document(path: str, read: Callable[[str], _T]) -> _T:
    """Parse a text file; a `FormatError` names the file."""
    try:
        text = read_text(path, errors="surrogateescape")
    except OSError as error:
        raise unreadable(path, error) from error
    try:
        return read(text)
    except FormatError as error:
        error.where = ", ".join(filter(None, (path, error.where)))
        raise


def machine_for(asked: str | None, modules: Sequence[ModuleFile]) -> Machine:
    """Return the machine of `--device`, or the one that the first module was compiled for.

    Raises `UsageError` if Stitch does not know that machine.
    """
    if asked is not None:
        return load_machine(asked)
    origin = modules[0].binary.origin
    if origin is not None:
        return origin.machine
    return load_machine(known_machine(modules[0].binary.machine.name, modules[0].path))


def known_machine(name: str, path: str) -> str:
    """Return the name of a machine that Stitch or a plugin has; raise `UsageError` for another."""
    if name not in known_machines():
        raise UsageError(
            f"{path} was compiled for {name!r}, a machine that Stitch does not ship",
            expected="--device=NAME, --device=machine.yaml or --device=system.ttsys",
            remedy="pass its description, or the --plugin=FILE.py that has it; known names: "
            + ", ".join(known_machines()),
        )
    return name
