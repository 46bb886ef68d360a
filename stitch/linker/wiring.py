"""Parse wiring such as `a.y=b.x`, or a mapping of inputs to outputs, into wires.

A program is named by its name, its file's name without suffix, or its index; a slot by its name or
index.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, Literal, TypeAlias

from stitch.errors import LinkError, UsageError, closest
from stitch.linker.wires import Port, Wire, chain_wires, check_fits
from stitch.option_values import WIRE_FORM
from stitch.program import InputSlot, OutputSlot, Program

#: A slot: `a.y`, or the program and the slot, each by name or index.
SlotWord: TypeAlias = "str | tuple[str | int, str | int]"
#: Wires as texts, or a mapping of inputs to the outputs that feed them.
Wiring: TypeAlias = "str | Iterable[str] | Mapping[Any, SlotWord]"
Side = Literal["input", "output"]


class ProgramNames:
    """Looks up programs and their slots by name.

    Args:
        labels: The programs' file names without folder and suffix; empty without a file.
    """

    def __init__(self, programs: Sequence[Program], labels: Sequence[str] = ()) -> None:
        self.programs = programs
        self.labels = labels or [""] * len(programs)
        self._by_name = (
            _by_name(program.name for program in programs),
            _by_name(self.labels),
        )
        self._slots: dict[tuple[int, Side], dict[str, int]] = {}

    def program(self, name: str | int) -> int | None:
        """Return the index of a program by its name, its file's name or its index, else None.

        Raises `UsageError` if several programs have the name.
        """
        for by_name in self._by_name:
            indices = by_name.get(name, []) if isinstance(name, str) else []
            if len(indices) > 1:
                raise UsageError(
                    f"several modules are called {name!r}",
                    expected=", ".join(f"{i}: {self.programs[i].name}" for i in indices[:8]),
                    remedy="use their indices, from 0",
                )
            if indices:
                return indices[0]
        return _index(name, len(self.programs))

    def short_name(self, index: int) -> str:
        """Return a name that `program` finds: the file's, the program's, or the index."""
        for name in (self.labels[index], self.programs[index].name):
            owners = next(filter(None, (by_name.get(name) for by_name in self._by_name)), [])
            if owners == [index]:
                return name
        return str(index)

    def port(self, word: SlotWord, side: Side, where: str) -> Port:
        """Return the program and slot that a text names; slot names may contain dots.

        Raises `UsageError` if it names none; `where` is its context in the error.
        """
        if isinstance(word, str):
            splits: list[tuple[str | int, str | int]]
            splits = [(word[:at], word[at + 1 :]) for at, mark in enumerate(word) if mark == "."]
        elif _is_pair(word):
            splits = [word]
        else:
            splits = []
        if not splits:
            raise UsageError(
                f"{word!r} names no {side}", where=where,
                expected=f"MODULE.{side.upper()}, such as {'a.y' if side == 'output' else 'b.x'}",
            )  # fmt: skip
        problems = []
        for called, slot in splits:
            owner = self.program(called)
            if owner is None:
                continue
            slots = self._slots_of(owner, side)
            index = slot_index(slots, slot)
            if index is not None:
                return owner, index
            problems.append(
                f"{self.programs[owner].name!r} has no {side} {slot!r} "
                f"(it has {', '.join(slots) or 'none'}){closest(str(slot), slots, '; ')}"
            )
        if problems:
            raise UsageError(problems[0], where=where)
        raise UsageError(
            f"no module is called {splits[0][0]!r}",
            where=where,
            expected=", ".join(map(self._called_in_full, range(len(self.programs)))),
            remedy="name a module by its index, its file's name without suffix, or its program's "
            "name",
        )

    def wire(self, output: SlotWord, input: SlotWord, where: str) -> Wire:
        """Return the wire between two slots; raises `UsageError` for an unknown one."""
        return Wire(*self.port(output, "output", where), *self.port(input, "input", where))

    def _slots_of(self, program: int, side: Side) -> dict[str, int]:
        by_name = self._slots.get((program, side))
        if by_name is None:
            inputs, outputs = self.programs[program].inputs, self.programs[program].outputs
            slots: Sequence[InputSlot | OutputSlot] = inputs if side == "input" else outputs
            by_name = {slot.name: index for index, slot in enumerate(slots)}
            self._slots[program, side] = by_name
        return by_name

    def _called_in_full(self, index: int) -> str:
        name, label = self.programs[index].name, self.labels[index]
        return f"{index}: {name}" + (f" ({label})" if label not in ("", name) else "")


def wires_in_words(
    names: ProgramNames, wiring: Wiring, *, strict_types: bool = False
) -> tuple[Wire, ...]:
    """Parse wiring; return the wires by consumer and input.

    Raises:
        UsageError: Unknown slots, an input fed twice, wires that lead backwards.
        LinkError: Slots that do not fit, with both descriptors.

    >>> wires_in_words(ProgramNames(()), [])
    ()
    """
    words: dict[Port, str] = {}
    wires = []
    for output, input, word in _pairs(wiring):
        wire = names.wire(output, input, word)
        port = (wire.consumer, wire.input)
        if port in words:
            raise UsageError(
                f"an input is fed twice: {words[port]} and {word}", where="the wiring",
                remedy="keep one of the two",
            )  # fmt: skip
        if wire.producer >= wire.consumer:
            raise UsageError(
                f"wire {word!r} leads backwards",
                expected="an output of a module that runs before the one that it feeds",
                remedy="give the modules in the order in which they run",
            )
        words[port] = word
        wires.append(wire)
    check_fits(names.programs, wires, strict_types)
    return tuple(sorted(wires, key=lambda w: (w.consumer, w.input)))


def chain_in_words(names: ProgramNames, *, strict_types: bool = False) -> tuple[Wire, ...]:
    """Return the wires of a chain, see `chain_wires`; its error suggests a wiring."""
    try:
        return chain_wires(names.programs, strict_types=strict_types)
    except LinkError as error:
        words = likely_words(names)[:4] or ["MODULE.OUTPUT=MODULE.INPUT"]
        error.remedy = f"connect the slots by name: wiring={words}; other inputs come from outside"
        raise


def likely_words(names: ProgramNames) -> list[str]:
    """Suggest a wiring of neighbours by name, or else by type."""
    called = [names.short_name(index) for index in range(len(names.programs))]
    return [
        f"{producer}.{output}={consumer}.{wanted}"
        for (one, other), (producer, consumer) in zip(
            pairwise(names.programs), pairwise(called), strict=True
        )
        for output, wanted in _likely_pairs(one, other)
    ]


def _likely_pairs(producer: Program, consumer: Program) -> list[tuple[str, str]]:
    """Return outputs and inputs of the same name and type; else the first of the same type."""
    outputs = {s.name: producer.values[s.value].type for s in producer.outputs}
    inputs = {s.name: consumer.values[s.value].type for s in consumer.inputs}
    same = [(name, name) for name in outputs if outputs[name] == inputs.get(name)]
    alike = [(o, i) for o, kind in outputs.items() for i, other in inputs.items() if kind == other]
    return same or alike[:1]


def _pairs(wiring: Wiring) -> Iterable[tuple[SlotWord, SlotWord, str]]:
    """Yield output, input, and text for errors, of each wire."""
    if isinstance(wiring, Mapping):
        for input, output in wiring.items():
            yield output, input, f"{input!r}: {output!r}"
        return
    for word in (wiring,) if isinstance(wiring, str) else wiring:
        source, equals, wanted = word.partition("=") if isinstance(word, str) else ("", "", "")
        if not (equals and "." in source and "." in wanted):
            raise UsageError(f"{word!r} is not a wire", expected=WIRE_FORM)
        yield source, wanted, word


def slot_index(names: Mapping[str, int], word: str | int) -> int | None:
    """Return the index of a slot by its name, else by its index; None if there is none."""
    found = names.get(word) if isinstance(word, str) else None
    return _index(word, len(names)) if found is None else found


def _index(word: str | int, count: int) -> int | None:
    """Parse an index below `count`; None for anything else."""
    if isinstance(word, str):
        word = int(word) if word.isdecimal() and len(word) < 20 else -1
    return word if 0 <= word < count else None


def _by_name(names: Iterable[str]) -> dict[str, list[int]]:
    indices: dict[str, list[int]] = {}
    for index, name in enumerate(names):
        if name:
            indices.setdefault(name, []).append(index)
    return indices


def _is_pair(word: object) -> bool:
    return (
        isinstance(word, tuple)
        and len(word) == 2
        and all(isinstance(part, str | int) and not isinstance(part, bool) for part in word)
    )
