"""Connections between modules: outputs to inputs by position, or by `--wire`."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from stitch.cli.module_files import ModuleFile
from stitch.errors import LinkError, UsageError, closest
from stitch.linker import (
    ProgramNames,
    Wire,
    chain_wires,
    likely_words,
    wires_in_words,
)


def wires_of(
    modules: Sequence[ModuleFile], texts: Sequence[str], *, strict_types: bool = False,
    named: Collection[str] = (),
) -> tuple[Wire, ...]:  # fmt: skip
    """Return the wires that `texts` name, or without texts those of a chain (`chain_wires`).

    Args:
        modules: The modules, in run order.
        texts: Values of `--wire`.
        strict_types: Refuse wires that change the floating storage type.
        named: Inputs with an array of their own, for which a chain needs no output.

    Raises:
        UsageError: A text or a name matches no slot.
        LinkError: Slots do not fit.
    """
    names = names_of(modules)
    if texts:
        return wires_in_words(names, texts, strict_types=strict_types)
    try:
        return chain_wires(names.programs, strict_types=strict_types)
    except LinkError as error:
        inputs = {_input_name(names, name) for name in named}
        outside = {slot.name for p in names.programs[1:] for slot in p.inputs} & inputs
        if not outside:
            raise _with_wires(error, names) from error
    try:
        return chain_wires(names.programs, strict_types=strict_types, outside=outside)
    except LinkError as error:
        raise _with_wires(error, names) from error


def names_of(modules: Sequence[ModuleFile]) -> ProgramNames:
    """Return the names of the modules' programs and files, for `MODULE.SLOT`."""
    return ProgramNames([m.program for m in modules], [m.label for m in modules])


def _input_name(names: ProgramNames, name: str) -> str:
    """Return the slot name of an input (`mask`, `a.mask`, `1.0`, or an index of the run's inputs).

    Raises `UsageError` where no module has such an input.
    """
    own = [slot.name for program in names.programs for slot in program.inputs]
    if name in own or name.isdecimal():
        return name
    if "." in name:
        module, index = names.port(name, "input", f"--input={name}=...")
        return names.programs[module].inputs[index].name
    raise UsageError(
        f"no module has an input {name!r}{closest(name, own, '; ')}",
        where=f"--input={name}=...",
        expected=", ".join(dict.fromkeys(own)) or "none",
    )


def _with_wires(error: LinkError, names: ProgramNames) -> LinkError:
    """Return a chain's error with a remedy: the `--wire` options that connect what fits, if any."""
    wires = " ".join(f"--wire={word}" for word in likely_words(names)[:4])
    remedy = f"connect the slots by name with {wires}; other inputs come from outside"
    if not wires:
        remedy = (
            "compile one module for the other's shapes (--at: sizes that agree), or connect "
            "other slots by --wire=MODULE.OUTPUT=MODULE.INPUT"
        )
    return LinkError(
        error.what, where=error.where, expected=error.expected, got=error.got,
        remedy=remedy,
    )  # fmt: skip
