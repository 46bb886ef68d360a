"""Link checks: may this output feed that input, and what has to be done to it on the way?"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from stitch.errors import LinkError, closest
from stitch.program import InputKind, Program, TensorDesc, link_problem

Pairs = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class LinkReport:
    """What a sound link does to a tensor: whether its storage type changes, and in which words.

    `conversions` are the steps of `to_layout`, in the order in which they happen: untilize, cast,
    tilize, reshard, move (between spaces), relocate (to a fixed address). Empty: nothing to copy.
    """

    output: str
    input: str
    changes_type: bool
    conversions: tuple[str, ...]

    def text(self) -> str:
        """One line, for `stitch-inspect a.ttb b.ttb`."""
        return f"{self.output} -> {self.input}: " + (", ".join(self.conversions) or "as it is")


def check_link(
    source: TensorDesc, target: TensorDesc, *, output: str, input: str, strict_types: bool = False
) -> LinkReport:
    """What linking an output to an input takes; `output`, `input` name program and slot.

    Raises `LinkError` where shapes differ, where floats would become integers or the reverse, where
    integer types differ, and with `strict_types` where the storage type changes at all.

    >>> from stitch.program import DataType, Layout, Space
    >>> here = TensorDesc((4, 4), Layout(DataType.FLOAT32, Space.L1))
    >>> there = TensorDesc((4, 4), Layout(DataType.BFLOAT16, Space.DRAM))
    >>> check_link(here, there, output="a.y", input="b.x").conversions
    ('cast f32 to bf16', 'move l1 to dram')
    """
    problem = link_problem(source, target, strict_types)
    if problem is not None:
        what, remedy = problem
        raise LinkError(
            f"{output} cannot feed {input}: {what}",
            where=f"link {output} -> {input}",
            expected=target.text(),
            got=source.text(),
            remedy=remedy,
        )
    changes = source.layout.data_type is not target.layout.data_type
    return LinkReport(output, input, changes, tuple(_conversions(source, target)))


def _conversions(source: TensorDesc, target: TensorDesc) -> Iterator[str]:
    here, there = source.layout, target.layout
    casts = here.data_type is not there.data_type
    if here.is_tiled and not there.is_tiled:
        yield "untilize"
    if casts:
        yield f"cast {here.data_type.short} to {there.data_type.short}"
    if there.is_tiled and not here.is_tiled:
        yield "tilize"
    if (here.memory_layout, here.shard_spec) != (there.memory_layout, there.shard_spec):
        yield f"reshard {here.memory_layout.value} to {there.memory_layout.value}"
    if here.space is not there.space:
        yield f"move {here.space.value} to {there.space.value}"
    if there.address is not None and (
        here.space is not there.space or here.address != there.address
    ):
        yield f"relocate to {there.address:#x}"


def wire(
    producer: Program,
    consumer: Program,
    names: Mapping[str, str] | None = None,
    *,
    strict_types: bool = False,
    partial: bool = False,
) -> Pairs:
    """The (output index, input index) pairs that connect two programs.

    Without `names`, outputs meet activation inputs by position, in order. With `names`, each input
    slot named in the keys takes the output named in the value (one output may feed several inputs).
    Every pair is checked. Raises one `LinkError` with all problems: unknown names, slots without a
    partner (allowed with `partial`), descriptors that do not fit.
    """
    problems: list[str] = []
    if names is None:
        pairs = _by_position(producer, consumer, problems, partial)
    else:
        pairs = _by_name(producer, consumer, names, problems, partial)
    for given, taken in pairs:
        try:
            check_link(
                producer.output_desc(given),
                consumer.input_desc(taken),
                output=output_name(producer, given),
                input=input_name(consumer, taken),
                strict_types=strict_types,
            )
        except LinkError as error:
            problems.append(f"{error.what} (expected {error.expected}, got {error.got})")
    if problems:
        raise LinkError(
            f"program {producer.name!r} does not fit program {consumer.name!r}:\n  - "
            + "\n  - ".join(problems),
            where=f"{producer.name} -> {consumer.name}",
            expected=_slots_text(consumer, "inputs"),
            got=_slots_text(producer, "outputs"),
            remedy="connect the slots by name, or compile one module for the other",
        )
    return pairs


def output_name(program: Program, index: int) -> str:
    """How messages call an output slot."""
    return f"program {program.name!r} output {program.outputs[index].name!r}"


def input_name(program: Program, index: int) -> str:
    """How messages call an input slot."""
    return f"program {program.name!r} input {program.inputs[index].name!r}"


def activations(program: Program) -> list[int]:
    """The indices of the inputs that come from outside or from other programs, in order."""
    return [i for i, s in enumerate(program.inputs) if s.kind is InputKind.ACTIVATION]


def handed_on(program: Program) -> list[int]:
    """The indices of the outputs that are for other programs, in order: all but those that replace
    a state of the program's own, an input of their name."""
    states = {slot.name for slot in program.inputs if slot.kind is InputKind.STATE}
    return [i for i, slot in enumerate(program.outputs) if slot.name not in states]


def _by_position(producer: Program, consumer: Program, problems: list[str], partial: bool) -> Pairs:
    pairs = tuple(zip(handed_on(producer), activations(consumer), strict=False))
    if not partial:
        problems += _alone(producer, consumer, {o for o, _ in pairs}, {i for _, i in pairs})
    return pairs


def _alone(
    producer: Program, consumer: Program, used: Collection[int], fed: Collection[int]
) -> Iterator[str]:
    """What is said of activations that no output feeds, and of outputs that feed nothing."""
    for i in activations(consumer):
        if i not in fed:
            yield f"{input_name(consumer, i)} has no output to feed it"
    for i in handed_on(producer):
        if i not in used:
            yield f"{output_name(producer, i)} has no input to feed"


def _by_name(
    producer: Program,
    consumer: Program,
    names: Mapping[str, str],
    problems: list[str],
    partial: bool,
) -> Pairs:
    outputs = {slot.name: i for i, slot in enumerate(producer.outputs)}
    inputs = {slot.name: i for i, slot in enumerate(consumer.inputs)}
    pairs = []
    for taken, given in names.items():
        if taken not in inputs:
            problems.append(_unknown(f"program {consumer.name!r} has no input", taken, inputs))
        if given not in outputs:
            problems.append(_unknown(f"program {producer.name!r} has no output", given, outputs))
        if taken in inputs and given in outputs:
            pairs.append((outputs[given], inputs[taken]))
    if not partial:
        fed = {inputs[name] for name in names if name in inputs}
        used = {outputs[name] for name in names.values() if name in outputs}
        problems += _alone(producer, consumer, used, fed)
    return tuple(sorted(pairs, key=lambda pair: pair[1]))


def _unknown(what: str, name: str, known: Mapping[str, int]) -> str:
    near = closest(name, known)
    return f"{what} {name!r} (it has {', '.join(known) or 'none'}{f'; {near}' if near else ''})"


def _slots_text(program: Program, side: str) -> str:
    if side == "inputs":
        chosen = [
            (program.inputs[i].name, program.input_desc(i).text()) for i in activations(program)
        ]
    else:
        chosen = [(s.name, program.output_desc(i).text()) for i, s in enumerate(program.outputs)]
    listed = ", ".join(f"{name}: {desc}" for name, desc in chosen)
    return f"{side} of {program.name!r}: {listed or 'none'}"
