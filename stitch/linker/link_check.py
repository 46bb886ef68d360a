"""Check whether an output can feed an input, and which conversions that takes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from stitch.errors import LinkError
from stitch.program import InputKind, Program, TensorDesc, link_problem

Pairs = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class LinkReport:
    """The conversions of a valid link.

    `conversions` are the steps of `to_layout` in order: untilize, cast, tilize, reshard, move
    (between spaces), relocate (to a fixed address); empty if no copy is needed.
    """

    output: str
    input: str
    changes_type: bool
    conversions: tuple[str, ...]

    def text(self) -> str:
        """Return one line, for `stitch-inspect a.ttb b.ttb`."""
        return f"{self.output} -> {self.input}: " + (", ".join(self.conversions) or "as it is")


def check_link(
    source: TensorDesc, target: TensorDesc, *, output: str, input: str, strict_types: bool = False
) -> LinkReport:
    """Check a link, and return its conversions; `output` and `input` name the slots in errors.

    Raises:
        LinkError: Shapes differ, a floating-point type meets an integer type, integer types
            differ, or, with `strict_types`, storage types differ.

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
    *,
    fed: Sequence[int] | None = None,
    strict_types: bool = False,
) -> Pairs:
    """Connect two programs by position; return (output index, input index) pairs.

    Args:
        fed: The inputs that the producer feeds; all activations by default.

    Raises:
        LinkError: Slots without a partner, and descriptors that do not fit; lists all.
    """
    inputs, outputs = activations(consumer) if fed is None else fed, handed_on(producer)
    pairs = tuple(zip(outputs, inputs, strict=False))
    problems = [
        f"{input_name(consumer, i)} has no output to feed it" for i in inputs[len(outputs) :]
    ]
    problems += [f"{output_name(producer, o)} has no input to feed" for o in outputs[len(inputs) :]]
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
    """Return the name of an output slot in messages."""
    return f"program {program.name!r} output {program.outputs[index].name!r}"


def input_name(program: Program, index: int) -> str:
    """Return the name of an input slot in messages."""
    return f"program {program.name!r} input {program.inputs[index].name!r}"


def activations(program: Program) -> list[int]:
    """Return the indices of the inputs that other programs or callers feed."""
    return [i for i, s in enumerate(program.inputs) if s.kind is InputKind.ACTIVATION]


def handed_on(program: Program) -> list[int]:
    """Return the outputs for other programs: all but new values of the program's states."""
    states = {slot.name for slot in program.inputs if slot.kind is InputKind.STATE}
    return [i for i, slot in enumerate(program.outputs) if slot.name not in states]


def _slots_text(program: Program, side: str) -> str:
    if side == "inputs":
        chosen = [
            (program.inputs[i].name, program.input_desc(i).text()) for i in activations(program)
        ]
    else:
        chosen = [(s.name, program.output_desc(i).text()) for i, s in enumerate(program.outputs)]
    listed = ", ".join(f"{name}: {desc}" for name, desc in chosen)
    return f"{side} of {program.name!r}: {listed or 'none'}"
