"""The modules that a command names: binaries, their programs, and the machine to run them on.

Comes in: the words of `--module`, `--function`, `--device`. Goes out: binaries, programs, a
machine. Must not know: wires, inputs.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from stitch import api
from stitch.errors import StitchError, UsageError
from stitch.files import note_standard_input, own_descriptor, read_bytes, sweep_folder
from stitch.machine import Machine, load_machine, machine_names
from stitch.program import Program
from stitch.ttb import Binary


@dataclass(frozen=True, slots=True)
class Module:
    """One file given to a command, and the program of it that is meant.

    `label` is the file's name without folder and suffix, `path` what the user wrote.
    """

    path: str
    label: str
    binary: Binary
    program: Program


def read_modules(
    paths: Sequence[str], functions: Sequence[str] = (), *, verify: str = "metadata"
) -> tuple[Module, ...]:
    """The modules, in order; the k-th function is for the k-th module, the rest take program 0.

    Raises `UsageError` for too many functions or an unknown one, and what `stitch.load` raises.
    """
    if len(functions) > len(paths):
        raise UsageError(
            f"{len(functions)} functions for {len(paths)} modules",
            remedy="give at most one --function for each --module, in the same order",
        )
    if paths.count("-") > 1:
        raise UsageError("standard input holds one module only", got="--module=- twice")
    for folder in {Path(path).parent for path in paths if len(paths) > 1}:
        sweep_folder(folder)  # Parts of one module belong together; a kill may have come between.
    chosen = [*functions, *[""] * (len(paths) - len(functions))]
    return tuple(_module(path, name, verify) for path, name in zip(paths, chosen, strict=True))


def _module(path: str, function: str, verify: str) -> Module:
    if path == "-":
        note_standard_input()
        binary, label = api.load(sys.stdin.buffer.read(), verify=verify), "stdin"
    else:
        binary, label = api.load(module_source(path), verify=verify), Path(path).stem
    return Module(path, label, binary, _program(binary, function, path))


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


def machine_for(asked: str | None, modules: Sequence[Module]) -> Machine:
    """The machine that was asked for, else the one that the first module was compiled for.

    Raises `UsageError` where that is not a machine that Stitch ships.
    """
    if asked is not None:
        return load_machine(asked)
    return load_machine(known_machine(modules[0].binary.machine.name, modules[0].path))


def known_machine(name: str, path: str) -> str:
    """The name, if Stitch ships that machine; else `UsageError` asking for `--device`."""
    if name not in machine_names():
        raise UsageError(
            f"{path} was compiled for {name!r}, a machine that Stitch does not ship",
            expected="--device=NAME or --device=machine.yaml",
            remedy="give its description; known names: " + ", ".join(machine_names()),
        )
    return name
