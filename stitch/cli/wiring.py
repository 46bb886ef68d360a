"""Connections between modules: outputs to inputs by position, or by `--wire`.

Also assigns option values of the form `[SLOT=]VALUE` to slots by name, by index, else by position.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence

from stitch.cli.module_files import ModuleFile
from stitch.cli.parser import Option
from stitch.errors import LinkError, UsageError, closest
from stitch.linker import (
    WIRE_FORM,
    Port,
    ProgramNames,
    Wire,
    chain_wires,
    likely_words,
    slot_index,
    wires_in_words,
)

#: What commands on several modules take.
FUNCTION_OPTION: Option = ("--function", {
    "action": "append", "default": [], "metavar": "NAME",
    "help": "the program of a module; the k-th for the k-th module"})  # fmt: skip
WIRE_OPTION: Option = ("--wire", {
    "action": "append", "default": [], "metavar": "A.Y=B.X",
    "help": f"connect by name instead of by position: {WIRE_FORM}"})  # fmt: skip


def wires_of(
    modules: Sequence[ModuleFile], texts: Sequence[str], *, strict_types: bool = False,
    given: Collection[str] = (),
) -> tuple[Wire, ...]:  # fmt: skip
    """The wires of a chain (see `chain_wires`); with `texts`, only what they say.

    A module is called by its program's name, its file's name without suffix, or its index; a slot
    by its name or its index. Raises `UsageError` for texts that name nothing, `LinkError` for slots
    that do not fit. `given`: names of slots that come from outside wherever a chain lacks them.
    """
    names = names_of(modules)
    if texts:
        return wires_in_words(names, texts, strict_types=strict_types)
    try:
        return chain_wires(names.programs, strict_types=strict_types)
    except LinkError as error:
        for name in given:
            _check_input_name(names, name)
        last = (name.rpartition(".")[2] for name in given)
        outside = {slot.name for p in names.programs[1:] for slot in p.inputs} & {*given, *last}
        if not outside:
            raise _with_wires(error, names) from error
    try:
        return chain_wires(names.programs, strict_types=strict_types, outside=outside)
    except LinkError as error:
        raise _with_wires(error, names) from error


def names_of(modules: Sequence[ModuleFile]) -> ProgramNames:
    """What the modules are called: by their programs, and by their files."""
    return ProgramNames([m.program for m in modules], [m.label for m in modules])


def _check_input_name(names: ProgramNames, name: str) -> None:
    """Raise `UsageError` where no module has an input of this name (`mask`, `a.mask`, an index)."""
    own = [slot.name for program in names.programs for slot in program.inputs]
    if name in own or name.isdecimal():
        return
    if "." in name:
        names.port(name, "input", f"--input={name}=...")
        return
    raise UsageError(
        f"no module has an input {name!r}{closest(name, own, '; ')}",
        where=f"--input={name}=...",
        expected=", ".join(dict.fromkeys(own)) or "none",
    )


def _with_wires(error: LinkError, names: ProgramNames) -> LinkError:
    """The error of a chain, with the texts that connect what can be and leave the rest open."""
    texts = likely_words(names)[:4] or ["MODULE.OUTPUT=MODULE.INPUT"]
    wires = " ".join(f"--wire={word}" for word in texts)
    return LinkError(
        error.what, where=error.where, expected=error.expected, got=error.got,
        remedy=f"connect the slots by name with {wires}; other inputs come from outside",
    )  # fmt: skip


def free_outputs(modules: Sequence[ModuleFile], wires: Iterable[Wire]) -> list[Port]:
    """Module and index of each output that feeds no input."""
    fed = {(wire.producer, wire.output) for wire in wires}
    return [
        (k, o)
        for k, module in enumerate(modules)
        for o in range(len(module.program.outputs))
        if (k, o) not in fed
    ]


def split_slot(word: str, is_value: Callable[[str], bool]) -> tuple[str | None, str]:
    """The slot that a word names, if any, and the rest; `is_value` knows a bare value.

    >>> split_slot("x=@x.npy", lambda w: w.startswith("@"))
    ('x', '@x.npy')
    """
    if is_value(word):
        return None, word
    name, equals, rest = word.partition("=")
    if equals and name and is_value(rest):
        return name, rest
    return None, word


def split_slots(
    texts: Iterable[str], is_value: Callable[[str], bool], what: str, form: str,
    where: str | None = None,
) -> list[tuple[str | None, str]]:  # fmt: skip
    """Each word as `split_slot` does; raises `UsageError` for one that is no `what`."""
    split = [split_slot(word, is_value) for word in texts]
    for name, word in split:
        if name is None and not is_value(word):
            raise UsageError(f"{word[:80]!r} is no {what}", where=where, expected=form)
    return split


def deal(
    texts: Sequence[tuple[str | None, str]],
    names: Sequence[str],
    option: str,
    shared: Sequence[str] = (),
) -> dict[int, str]:
    """The word of each slot that has one: named texts first, the others fill up in order.

    `shared`: what each slot is called within its own program; a word for `mask` goes to `a.mask`
    and `b.mask` alike, but where another word names one of them. Raises `UsageError` for unknown
    names, slots named twice, and texts left over.
    """
    dealt: dict[int, str] = {}
    places = {name: index for index, name in enumerate(names)}
    for_several: list[tuple[list[int], str]] = []
    for name, word in texts:
        if name is None:
            continue
        index = slot_index(places, name)
        owners = [i for i, own in enumerate(shared) if own == name]
        if index is None and owners:
            for_several.append((owners, word))
            continue
        if index is None:
            raise UsageError(
                f"there is no {option} {name!r}{closest(name, names, '; ')}",
                where=f"--{option}={name}={word}"[:200],
                expected=", ".join(names) or "none",
            )
        if index in dealt:
            raise UsageError(f"{option} {names[index]!r} is given twice")
        dealt[index] = word
    for owners, word in for_several:
        left = [index for index in owners if index not in dealt]
        if not left:
            raise UsageError(f"{option} {names[owners[0]]!r} is given twice")
        dealt |= dict.fromkeys(left, word)
    free = deque(index for index in range(len(names)) if index not in dealt)
    for name, word in texts:
        if name is not None:
            continue
        if not free:
            raise UsageError(
                f"there is a surplus --{option}: {word[:80]}",
                expected=f"at most {len(names)}: {', '.join(names)}" if names else f"no --{option}",
            )
        dealt[free.popleft()] = word
    return dealt
