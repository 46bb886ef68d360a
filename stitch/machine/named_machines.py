"""Load machines by name, from YAML files, and from system descriptors."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path as FilePath

from stitch import plugins
from stitch.errors import StitchError, UsageError, closest
from stitch.files import identity, open_file
from stitch.machine.description import MAX_FILE_NBYTES, parse_machine
from stitch.machine.machine import Machine
from stitch.machine.shipped import machine_names, shipped_text
from stitch.option_values import is_torch_device

#: The path of a system descriptor, with an optional chip number.
_CHIP = re.compile(r"(.*\.ttsys)(?::(\d{1,4}))?", re.DOTALL)


def load_machine(name_or_path: str | FilePath | Machine) -> Machine:
    """Return the machine of a name or of a file; a `Machine` is returned unchanged.

    A text that ends in `.yaml`, `.yml` or `.ttsys`, or contains a slash, is a path; `n300.ttsys:1`
    is the second chip of a system. Without a number it is the first, if the chips differ only in
    their usable addresses.

    Raises:
        UsageError: There is no such machine or file, or the chips differ.
        FormatError: The file is malformed; lists all problems.

    >>> load_machine("wormhole_n150").shape.l1.banks
    64
    """
    if isinstance(name_or_path, Machine):
        return name_or_path
    if not isinstance(name_or_path, str | FilePath):
        raise UsageError(
            "a machine is a name, the path of a .yaml description or a .ttsys file, or a Machine",
            got=type(name_or_path).__name__,
        )
    of_system = _CHIP.fullmatch(str(name_or_path))
    if of_system is not None:
        return _machine_of_chip(FilePath(of_system[1]), of_system[2])
    text = str(name_or_path)
    if (
        isinstance(name_or_path, FilePath)
        or text.endswith((".yaml", ".yml"))
        or "/" in text
        or ("\\" in text)
    ):
        return parse_machine(_content(FilePath(text)), text)
    try:
        return _shipped(text)
    except UsageError as error:
        value = plugins.find("machines", text)
        if value is not None:
            return _of_plugin(text, value)
        beside = FilePath(f"{name_or_path}.yaml")
        # A name may be too long for a file name.
        if identity(beside) is not None and beside.is_file():
            error.remedy = f"for the file {str(beside)!r} give its name with the extension"
        raise


def varied_machine(base: str, overrides: Mapping[str, int | float], name: str) -> Machine:
    """Return a machine with some figures replaced.

    Args:
        base: A shipped name, or the path of a description.
        overrides: By the dotted name of a figure, its value.
        name: The name of the new machine.

    Raises:
        FormatError: There is no such figure, or the machine is not sound with these.

    >>> varied_machine("tiny", {"l1.bank_nbytes": 8192}, "small").shape.l1.capacity
    7168
    """
    body = {"base": base, "name": name, "overrides": dict(overrides)}
    return parse_machine(json.dumps(body).encode(), f"{FilePath(base).name} with other figures")


def known_machines() -> tuple[str, ...]:
    """Return the names that `load_machine` takes: shipped ones, then those of plugins."""
    return (*machine_names(), *plugins.names("machines"))


def with_policies(machine: Machine, allocator: str | None, residency: str | None) -> Machine:
    """Return the machine with a plugin's allocator in L1 and DRAM, and a plugin's eviction rule.

    Raises:
        UsageError: There is no such plugin.
    """
    shape = machine.shape
    if allocator is not None:
        check_policy("allocators", allocator)
        l1, dram = (s and replace(s, allocator=allocator) for s in (shape.l1, shape.dram))
        shape = replace(shape, l1=l1, dram=dram)
    if residency is not None:
        check_policy("residency", residency)
    return replace(machine, shape=shape, residency=residency or machine.residency)


def check_policy(kind: str, name: str) -> None:
    """Import the plugin of a policy; raise `UsageError` if there is none, or it is no function."""
    policy = plugins.find(kind, name)
    if policy is None:
        raise plugins.no_plugin(kind, name)
    if not callable(policy):
        raise plugins.wrong(kind, name, policy)


def _of_plugin(name: str, value: object) -> Machine:
    """Return the machine of a plugin: binaries store its name, so it must be the plugin's."""
    made = plugins.called("machines", name, value) if callable(value) else value
    if isinstance(made, str | FilePath):
        made = parse_machine(_content(FilePath(made)), str(made))
    if not isinstance(made, Machine):
        raise plugins.wrong("machines", name, made)
    if made.name != name:
        raise UsageError(
            f"the machine of the plugin {name!r} has another name", expected=repr(name),
            got=repr(made.name), remedy="give both the same name: binaries store the machine's",
        )  # fmt: skip
    return made


def _machine_of_chip(file: FilePath, chip: str | None) -> Machine:
    # Imported on demand: few processes read a descriptor.
    from stitch.machine.systems import machines_in

    machines = machines_in(_content(file), str(file))
    if chip is not None and int(chip) >= len(machines):
        last = f" to {file.name}:{len(machines) - 1}" if len(machines) > 1 else ""
        raise UsageError(
            f"{str(file)!r} has no chip {chip}: it describes {len(machines)}",
            expected=f"{file.name}:0{last}",
        )
    first = machines[int(chip or 0)]
    for number, other in enumerate(machines if chip is None else ()):
        apart = [*first.shape.shortcomings(other.shape), *other.shape.shortcomings(first.shape)]
        if apart:
            raise UsageError(
                f"the chips of {str(file)!r} differ",
                expected=f"one of {file.name}:0 to {file.name}:{len(machines) - 1}",
                got=f"chip {number} beside chip 0: " + "; ".join(apart),
                remedy="append the number of a chip to the file name",
            )
    return first


@functools.cache
def _shipped(name: str) -> Machine:
    try:
        names = machine_names()
        if name not in names:
            near = closest(name, known_machines())
            raise UsageError(
                f"there is no machine {name!r}{f'; {near}' if near else ''}",
                expected="one of " + ", ".join(known_machines()),
                remedy=f"compile for the machine 'cuda', and open_device({name!r})"
                if is_torch_device(name)
                else "choose one of these, or give the path of a .yaml or .ttsys file",
            )
        content = shipped_text(name).encode()
    except OSError as error:
        raise StitchError(
            "cannot read the machines that Stitch ships", got=error.strerror or str(error)
        ) from error
    return parse_machine(content, f"{name}.yaml")


def _content(file: FilePath) -> bytes:
    try:
        with open_file(file) as stream:
            return stream.read(MAX_FILE_NBYTES + 1)
    except (OSError, ValueError) as error:
        raise UsageError(
            f"cannot read the machine description {str(file)!r}",
            got=getattr(error, "strerror", None) or str(error),
            remedy="give an existing .yaml or .ttsys file, or one of " + ", ".join(machine_names()),
        ) from error
