"""Read the files that a command names: modules, their programs and machine, records."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from stitch import api
from stitch.errors import CompileError, FormatError, StitchError, UsageError
from stitch.files import (
    note_standard_input,
    own_descriptor,
    read_bytes,
    read_text,
    unreadable,
)
from stitch.machine import Machine, load_machine, machine_names
from stitch.program import Program
from stitch.report import counted
from stitch.ttb import Binary

_T = TypeVar("_T")
#: What ONNX models are compiled for where nothing says more.
DEFAULT_TARGET = "wormhole_n150"


@dataclass(frozen=True, slots=True)
class ModuleFile:
    """One file given to a command, and the program of it that is meant.

    `label` is the file's name without folder and suffix, `path` what the user wrote.
    """

    path: str
    label: str
    binary: Binary
    program: Program


def read_modules(
    paths: Sequence[str], functions: Sequence[str] = (), *, verify: str = "metadata",
    device: str | None = None, compiling: Callable[[str], None] | None = None,
) -> tuple[ModuleFile, ...]:  # fmt: skip
    """The modules, in order; the k-th function is for the k-th module, the rest take program 0.

    With `compiling`, which is told of it, ONNX models are compiled here, for `device`, else for the
    machine of the first module that is a file. Raises `UsageError` for too many functions or an
    unknown one, and what `stitch.load` raises.
    """
    if len(functions) > len(paths):
        raise UsageError(
            f"{counted(len(functions), 'function')} for {counted(len(paths), 'module')}",
            remedy="give at most one --function for each --module, in the same order",
        )
    if paths.count("-") > 1:
        raise UsageError("standard input holds one module only", got="--module=- twice")
    chosen = [*functions, *[""] * (len(paths) - len(functions))]
    models = {path for path in paths if compiling and Path(path).suffix.lower() == ".onnx"}
    binaries = {path: _binary(path, verify) for path in paths if path not in models}
    for path in models:
        target = device or next((b.machine.name for b in binaries.values()), DEFAULT_TARGET)
        binaries[path] = _compiled(path, target, compiling)
    return tuple(
        ModuleFile(path, "stdin" if path == "-" else Path(path).stem, binaries[path],
               _program(binaries[path], name, path))
        for path, name in zip(paths, chosen, strict=True)
    )  # fmt: skip


def lacking_lines(modules: Sequence[ModuleFile]) -> list[str]:
    """What of binaries of other compilers has no counterpart here, and how it is shown."""
    binaries = {module.path: module.binary for module in modules}
    return [
        f"{path}: {line}"
        for path, binary in binaries.items()
        if binary.origin is not None
        for line in binary.origin.lacking
    ]


def told_apart(modules: Sequence[ModuleFile]) -> tuple[ModuleFile, ...]:
    """The modules, with programs of one name from several files named after their files as well."""
    files: dict[str, set[str]] = {}
    for module in modules:
        files.setdefault(module.program.name, set()).add(module.path)
    return tuple(m if len(files[m.program.name]) == 1 else _named_by_file(m) for m in modules)


def _named_by_file(module: ModuleFile) -> ModuleFile:
    name = f"{module.program.name} in {module.path}"
    return with_program(module, replace(module.program, name=name))


def with_program(module: ModuleFile, program: Program | None) -> ModuleFile:
    """The module with another program in the place of its own, if there is one."""
    if program is None:
        return module
    binary = replaced(module.binary, module.program, program)
    return replace(module, binary=binary, program=program)


def replaced(binary: Binary, old: Program, new: Program) -> Binary:
    """The binary with another program in the place of one of its own."""
    return replace(binary, programs=tuple(new if p is old else p for p in binary.programs))


def _binary(path: str, verify: str) -> Binary:
    if path == "-":
        note_standard_input()
        return api.load(sys.stdin.buffer.read(), verify=verify)
    return api.load(module_source(path), verify=verify)


def _compiled(path: str, target: str, compiling: Callable[[str], None] | None) -> Binary:
    """An ONNX model, compiled in memory."""
    if compiling is not None:
        compiling(f"{path} is compiled for {target}, in memory (stitch-compile writes a file)")
    try:
        return api.compile(path, target=target).binary
    except CompileError as error:
        raise CompileError(
            error.what, where=error.where or path, expected=error.expected, got=error.got,
            remedy=error.remedy if (error.remedy or "").startswith("pip install")
            else f"stitch-compile {path} -o m.ttb takes --input_shape, --input and more",
        ) from error  # fmt: skip


def module_source(path: str) -> str | bytes:
    """The path itself, to be mapped; the bytes of a pipe that the shell opened, read once."""
    return path if own_descriptor(path) is None else read_bytes(path)


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
    """What a text file holds; an error names the file."""
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
    """The machine that was asked for, else the one that the first module was compiled for: as its
    own file describes it, if that does.

    Raises `UsageError` where that is not a machine that Stitch ships.
    """
    if asked is not None:
        return load_machine(asked)
    origin = modules[0].binary.origin
    if origin is not None:
        return origin.machine
    return load_machine(known_machine(modules[0].binary.machine.name, modules[0].path))


def known_machine(name: str, path: str) -> str:
    """The name, if Stitch ships that machine; else `UsageError` asking for `--device`."""
    if name not in machine_names():
        raise UsageError(
            f"{path} was compiled for {name!r}, a machine that Stitch does not ship",
            expected="--device=NAME, --device=machine.yaml or --device=system.ttsys",
            remedy="give its description; known names: " + ", ".join(machine_names()),
        )
    return name
