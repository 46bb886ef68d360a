"""Which output feeds which input: in a chain, or as `--wire` says; and words of the form
`[SLOT=]WHAT`, dealt out to slots by name, by index, else by position.

Comes in: modules and words such as `a.y=b.x`. Goes out: `Wire`s, checked; slot → word. Must not
know: devices.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import pairwise

from stitch.cli.module_files import Module
from stitch.cli.parser import Option
from stitch.errors import LinkError, UsageError, closest
from stitch.linker import Port, Wire, chain_wires, check_wire
from stitch.program import InputSlot, OutputSlot, Program

FORM = "MODULE.OUTPUT=MODULE.INPUT, such as a.y=b.x or 0.0=1.0"
#: What commands on several modules take.
FUNCTION_WORD: Option = ("--function", {
    "action": "append", "default": [], "metavar": "NAME",
    "help": "the program of a module; the k-th for the k-th module"})  # fmt: skip
WIRE_WORD: Option = ("--wire", {
    "action": "append", "default": [], "metavar": "A.Y=B.X",
    "help": f"connect by name instead of by position: {FORM}"})  # fmt: skip


def wires_of(
    modules: Sequence[Module], words: Sequence[str], *, strict_types: bool = False,
    given: Collection[str] = (),
) -> tuple[Wire, ...]:  # fmt: skip
    """The wires of a chain (see `chain_wires`); with `words`, only what they say.

    A module is called by its program's name, its file's name without suffix, or its index; a slot
    by its name or its index. Raises `UsageError` for words that name nothing, `LinkError` for slots
    that do not fit. `given`: names of slots that come from outside wherever a chain lacks them.
    """
    programs = [module.program for module in modules]
    if not words:
        return _chained(modules, strict_types, given)
    known = _Names(modules)
    parsed = [_parsed(known, word) for word in words]
    fed: dict[tuple[int, int], str] = {}
    for one, word in zip(parsed, words, strict=True):
        if (one.consumer, one.input) in fed:
            raise UsageError(
                f"an input is fed twice: {fed[one.consumer, one.input]} and {word}", where="--wire"
            )
        fed[one.consumer, one.input] = word
    for one in parsed:
        check_wire(programs, one, strict_types)
    return tuple(sorted(parsed, key=lambda w: (w.consumer, w.input)))


def _chained(
    modules: Sequence[Module], strict_types: bool, given: Collection[str]
) -> tuple[Wire, ...]:
    programs = [module.program for module in modules]
    try:
        return chain_wires(programs, strict_types=strict_types)
    except LinkError as error:
        known = _Names(modules)
        for name in given:
            _check_input_name(known, name)
        last = (name.rpartition(".")[2] for name in given)
        outside = {slot.name for p in programs[1:] for slot in p.inputs} & {*given, *last}
        if not outside:
            raise _with_wires(error, modules) from error
    try:
        return chain_wires(programs, strict_types=strict_types, outside=outside)
    except LinkError as error:
        raise _with_wires(error, modules) from error


def _check_input_name(known: _Names, name: str) -> None:
    """Raise `UsageError` where no module has an input of this name (`mask`, `a.mask`, an index)."""
    own = [slot.name for module in known.modules for slot in module.program.inputs]
    if name in own or name.isdecimal():
        return
    if "." in name:
        _slot(known, name, "input", f"--input={name}=...")
        return
    raise UsageError(
        f"no module has an input {name!r}{closest(name, own, '; ')}",
        where=f"--input={name}=...",
        expected=", ".join(dict.fromkeys(own)) or "none",
    )


def _with_wires(error: LinkError, modules: Sequence[Module]) -> LinkError:
    """The error of a chain, with the words that connect what can be and leave the rest open."""
    labels = [module.label for module in modules]
    called = [name if labels.count(name) == 1 else str(at) for at, name in enumerate(labels)]
    wires = [
        f"--wire={producer}.{output}={consumer}.{wanted}"
        for (one, other), (producer, consumer) in zip(
            pairwise(modules), pairwise(called), strict=True
        )
        for output, wanted in _likely_pairs(one.program, other.program)
    ]
    words = " ".join(wires[:4]) or "--wire=MODULE.OUTPUT=MODULE.INPUT"
    return LinkError(
        error.what, where=error.where, expected=error.expected, got=error.got,
        remedy=f"connect the slots by name with {words}; other inputs come from outside",
    )  # fmt: skip


def _likely_pairs(producer: Program, consumer: Program) -> list[tuple[str, str]]:
    """Outputs and inputs of one name; else the first that are alike."""
    outputs = {s.name: producer.values[s.value].type for s in producer.outputs}
    inputs = {s.name: consumer.values[s.value].type for s in consumer.inputs}
    same = [(name, name) for name in outputs if outputs[name] == inputs.get(name)]
    alike = [(o, i) for o, kind in outputs.items() for i, other in inputs.items() if kind == other]
    return same or alike[:1]


def free_outputs(modules: Sequence[Module], wires: Iterable[Wire]) -> list[Port]:
    """Module and index of each output that feeds no input."""
    fed = {(wire.producer, wire.output) for wire in wires}
    return [
        (k, o)
        for k, module in enumerate(modules)
        for o in range(len(module.program.outputs))
        if (k, o) not in fed
    ]


class _Names:
    """What modules and their slots are called, looked up once for all words."""

    def __init__(self, modules: Sequence[Module]) -> None:
        self.modules = modules
        self._called = (
            _by_name(module.program.name for module in modules),
            _by_name(module.label for module in modules),
        )
        self._slots: dict[tuple[int, str], dict[str, int]] = {}

    def module(self, name: str) -> int | None:
        """A module by its program's name, its file's, or its index; None: there is none."""
        for called in self._called:
            places = called.get(name, [])
            if len(places) > 1:
                raise UsageError(
                    f"several modules are called {name!r}", remedy="use their indices, from 0"
                )
            if places:
                return places[0]
        return _decimal(name, len(self.modules))

    def slots(self, module: int, side: str) -> dict[str, int]:
        """The indices of a module's inputs or outputs by name."""
        by_name = self._slots.get((module, side))
        if by_name is None:
            program = self.modules[module].program
            inputs, outputs = program.inputs, program.outputs
            slots: Sequence[InputSlot | OutputSlot] = inputs if side == "input" else outputs
            by_name = {slot.name: index for index, slot in enumerate(slots)}
            self._slots[module, side] = by_name
        return by_name


def _by_name(names: Iterable[str]) -> dict[str, list[int]]:
    indices: dict[str, list[int]] = {}
    for index, name in enumerate(names):
        indices.setdefault(name, []).append(index)
    return indices


def _parsed(modules: _Names, word: str) -> Wire:
    source, equals, wanted = word.partition("=")
    if not (equals and "." in source and "." in wanted):
        raise UsageError(f"{word!r} is no wire", expected=FORM)
    producer, output = _slot(modules, source, "output", word)
    consumer, taken = _slot(modules, wanted, "input", word)
    if producer >= consumer:
        raise UsageError(
            f"wire {word!r} leads backwards",
            expected="an output of a module that runs before the one that it feeds",
            remedy="give the modules in the order in which they run",
        )
    return Wire(producer, output, consumer, taken)


def output_port(modules: Sequence[Module], word: str) -> Port:
    """The module and output that `a.y` names; raises `UsageError`."""
    if "." not in word:
        raise UsageError(f"{word!r} names no output", expected="MODULE.OUTPUT, such as a.y")
    return _slot(_Names(modules), word, "output", word)


def _slot(known: _Names, text: str, side: str, word: str) -> tuple[int, int]:
    """The module and the slot that a text names; slots may have dots in their names."""
    candidates = [at for at, mark in enumerate(text) if mark == "."]
    problems = []
    for at in candidates:
        owner = known.module(text[:at])
        if owner is None:
            continue
        slots = known.slots(owner, side)
        index = slot_index(slots, text[at + 1 :])
        if index is not None:
            return owner, index
        problems.append(
            f"{known.modules[owner].program.name!r} has no {side} {text[at + 1 :]!r} "
            f"(it has {', '.join(slots)}){closest(text[at + 1 :], slots, '; ')}"
        )
    if problems:
        raise UsageError(problems[0], where=word)
    names = ", ".join(
        f"{i}: {m.program.name}" + (f" ({m.label})" if m.label != m.program.name else "")
        for i, m in enumerate(known.modules)
    )
    raise UsageError(
        f"no module is called {text[: candidates[0]]!r}", where=word, expected=names,
        remedy="call a module by its number, its file's name without suffix, or its program's name",
    )  # fmt: skip


def slot_index(names: Mapping[str, int], word: str) -> int | None:
    """A slot by its name, or, where none has that name, by its index."""
    return names[word] if word in names else _decimal(word, len(names))


def _decimal(word: str, count: int) -> int | None:
    """An index below `count`; digits without end are none."""
    is_index = word.isdecimal() and len(word) < 20 and int(word) < count
    return int(word) if is_index else None


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


def split_words(
    words: Iterable[str], is_value: Callable[[str], bool], what: str, form: str,
    where: str | None = None,
) -> list[tuple[str | None, str]]:  # fmt: skip
    """Each word as `split_slot` does; raises `UsageError` for one that is no `what`."""
    split = [split_slot(word, is_value) for word in words]
    for name, word in split:
        if name is None and not is_value(word):
            raise UsageError(f"{word[:80]!r} is no {what}", where=where, expected=form)
    return split


def deal(
    words: Sequence[tuple[str | None, str]],
    names: Sequence[str],
    option: str,
    shared: Sequence[str] = (),
) -> dict[int, str]:
    """The word of each slot that has one: named words first, the others fill up in order.

    `shared`: what each slot is called within its own program; a word for `mask` goes to `a.mask`
    and `b.mask` alike, but where another word names one of them. Raises `UsageError` for unknown
    names, slots named twice, and words left over.
    """
    dealt: dict[int, str] = {}
    places = {name: index for index, name in enumerate(names)}
    for_several: list[tuple[list[int], str]] = []
    for name, word in words:
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
    for name, word in words:
        if name is not None:
            continue
        if not free:
            raise UsageError(
                f"there is a surplus --{option}: {word[:80]}",
                expected=f"at most {len(names)}: {', '.join(names)}" if names else f"no --{option}",
            )
        dealt[free.popleft()] = word
    return dealt
