"""Aliasing: which outputs take the buffer of a donated input, each with its proof.

A pair that was asked for and cannot be proved is an error that names the reader in the way (see
`stitch.linker.alias_proofs` for the rule).
"""

from __future__ import annotations

from stitch.compiler.slot_wishes import SlotPlacement
from stitch.errors import CompileError
from stitch.graph import ComputationGraph
from stitch.linker import AliasProofs
from stitch.program import Ownership

Pairs = tuple[tuple[int, int], ...]


def prove_aliases(graph: ComputationGraph, asked: Pairs) -> None:
    """Raises `CompileError` with every pair that was asked for and does not hold."""
    proofs = AliasProofs(graph)
    problems = [p for pair in asked if (p := _obstacle(graph, proofs, *pair)) is not None]
    if problems:
        raise CompileError(
            "an output cannot take the buffer of an input: " + "; ".join(problems),
            where=f"graph {graph.name!r}",
            expected=(
                "a donated input of the same type, whose last reader is the elementwise "
                "operation that writes the output"
            ),
            remedy="drop the alias (the two buffers then take turns), or change the module",
        )


def free_aliases(graph: ComputationGraph, placement: SlotPlacement) -> Pairs:
    """More pairs that hold: donated inputs that no placement option names, and outputs without a
    placement option.

    Each input goes to the first output that can prove its claim. An output that takes the buffer
    of an input that is stored rounded would be rounded too; such inputs are left alone.
    """
    taken = {i for _, i in placement.aliases}
    busy = {o for o, _ in placement.aliases}
    pairs = []
    proofs = AliasProofs(graph)
    #: The outputs that can prove a claim on a value at all: their writer reads it.
    claimants: dict[int, list[int]] = {}
    for o in range(len(graph.outputs)):
        for value in set(proofs.read_by_writer(o)):
            claimants.setdefault(value, []).append(o)
    for i, slot in enumerate(graph.inputs):
        if (
            slot.ownership is not Ownership.DONATE
            or i in taken
            or "data_type" in placement.inputs[i]
        ):
            continue
        for o in claimants.get(slot.value, ()):
            free = o not in busy and not placement.outputs[o]
            if free and _obstacle(graph, proofs, o, i) is None:
                pairs.append((o, i))
                busy.add(o)
                break
    return tuple(pairs)


def _obstacle(graph: ComputationGraph, proofs: AliasProofs, output: int, source: int) -> str | None:
    name, given = graph.outputs[output].name, graph.inputs[source]
    pair = f"output {name!r} over input {given.name!r}"
    if given.ownership is not Ownership.DONATE:
        return f"{pair}: the input is not donated (--set input.{given.name}.ownership=donate)"
    ours, theirs = graph.output_type(output), graph.input_type(source)
    if ours != theirs:
        return f"{pair}: {ours.text()} is not {theirs.text()}"
    obstacle = proofs.obstacle(output, source)
    return None if obstacle is None else f"{pair}: {obstacle}"
