"""Which output feeds which input: in a chain, or as `--wire` says.

Comes in: modules and words such as `a.y=b.x`. Goes out: `Wire`s, checked. Must not know: devices.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from stitch.cli.modules import Module
from stitch.errors import UsageError
from stitch.graph.wish import closest
from stitch.link import Wire, chain_wires, wire

FORM = "MODULE.OUTPUT=MODULE.INPUT, such as a.y=b.x or 0.0=1.0"


def wires_of(
    modules: Sequence[Module], words: Sequence[str], *, strict_types: bool = False
) -> tuple[Wire, ...]:
    """The wires of a chain (see `chain_wires`); with `words`, only what they say.

    A module is called by its program's name, its file's name without suffix, or its index; a slot
    by its name or its index. Raises `UsageError` for words that name nothing, `LinkError` for slots
    that do not fit.
    """
    if not words:
        return chain_wires([module.program for module in modules], strict_types=strict_types)
    found = [_parsed(modules, word) for word in words]
    fed: dict[tuple[int, int], str] = {}
    for one, word in zip(found, words, strict=True):
        if (one.consumer, one.input) in fed:
            raise UsageError(
                f"an input is fed twice: {fed[one.consumer, one.input]} and {word}",
                where="--wire",
            )
        fed[one.consumer, one.input] = word
    for one in found:
        _check(modules, one, strict_types)
    return tuple(sorted(found, key=lambda w: (w.consumer, w.input)))


def _check(modules: Sequence[Module], one: Wire, strict_types: bool) -> None:
    producer, consumer = modules[one.producer].program, modules[one.consumer].program
    names = {consumer.inputs[one.input].name: producer.outputs[one.output].name}
    wire(producer, consumer, names, partial=True, strict_types=strict_types)


def _parsed(modules: Sequence[Module], word: str) -> Wire:
    made, equals, wanted = word.partition("=")
    if not (equals and "." in made and "." in wanted):
        raise UsageError(f"{word!r} is no wire", expected=FORM)
    producer, output = _slot(modules, made, "output", word)
    consumer, taken = _slot(modules, wanted, "input", word)
    if producer >= consumer:
        raise UsageError(
            f"wire {word!r} leads backwards",
            expected="an output of a module that runs before the one that it feeds",
            remedy="give the modules in the order in which they run",
        )
    return Wire(producer, output, consumer, taken)


def output_port(modules: Sequence[Module], word: str) -> tuple[int, int]:
    """The module and output that `a.y` names; raises `UsageError`."""
    if "." not in word:
        raise UsageError(f"{word!r} names no output", expected="MODULE.OUTPUT, such as a.y")
    return _slot(modules, word, "output", word)


def _slot(modules: Sequence[Module], text: str, side: str, word: str) -> tuple[int, int]:
    """The module and the slot that a text names; slots may have dots in their names."""
    candidates = [at for at, mark in enumerate(text) if mark == "."]
    problems = []
    for at in candidates:
        found = _named_module(modules, text[:at])
        if found is None:
            continue
        program = modules[found].program
        slots = program.inputs if side == "input" else program.outputs
        index = slot_index([slot.name for slot in slots], text[at + 1 :])
        if index is not None:
            return found, index
        near = closest(text[at + 1 :], [slot.name for slot in slots])
        problems.append(
            f"{program.name!r} has no {side} {text[at + 1 :]!r} "
            f"(it has {', '.join(s.name for s in slots)})" + (f"; {near}" if near else "")
        )
    if problems:
        raise UsageError(problems[0], where=word)
    names = ", ".join(f"{i}: {m.program.name}" for i, m in enumerate(modules))
    raise UsageError(f"no module is called {text[: candidates[0]]!r}", where=word,
                     expected=names)  # fmt: skip


def _named_module(modules: Sequence[Module], name: str) -> int | None:
    for called in ([m.program.name for m in modules], [m.label for m in modules]):
        if called.count(name) > 1:
            raise UsageError(
                f"several modules are called {name!r}", remedy="use their indices, from 0"
            )
        if name in called:
            return called.index(name)
    return int(name) if name.isdecimal() and int(name) < len(modules) else None


def slot_index(names: Iterable[str], word: str) -> int | None:
    """A slot by its name, or, where none has that name, by its index."""
    known = list(names)
    if word in known:
        return known.index(word)
    return int(word) if word.isdecimal() and int(word) < len(known) else None
