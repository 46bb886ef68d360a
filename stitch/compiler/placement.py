"""Placement: choose a space and a layout for each input, output and constant, and for the scratch.

A placement option is applied exactly, or refused with the reason.

Defaults, in order:
1. Parameters, state, saved tensors, keys and constants: DRAM, row-major interleaved.
2. Activations and outputs: L1, row-major interleaved. An aliasing output is placed with its input.
3. The scratch: L1 if it takes at most half of what pinned slots leave free, else DRAM.
4. Slots and scratch together use at most three quarters of L1; the rest is for tensors of programs
   stitched to this one. Above that, the largest slot not pinned to L1 moves to DRAM (of equals the
   later one), repeatedly: moving the fewest tensors costs least, as an L1 page is accessed in a
   fraction of the time of a DRAM page.
5. A machine without L1 uses DRAM; one without device memory uses the host.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from stitch.compiler.body_graphs import add_output_identities, named_values, program_names
from stitch.compiler.options import CompileOptions, CompileWarning
from stitch.errors import CompileError, LayoutError, OutOfMemoryError
from stitch.graph import (
    LAYOUT_FIELDS,
    ComputationGraph,
    PlacementError,
    PlacementOption,
    requested_layout,
)
from stitch.linker import (
    AliasProofs,
    Demand,
    ScratchPacker,
    address_problems,
    check_capacity,
    choose_scratch,
    demands,
    expansion_nbytes,
    place_intermediates,
)
from stitch.machine import MachineShape, footprint, room_per_bank, round_up, shard_layout
from stitch.ops import has_products
from stitch.packing import gaps_between, pack
from stitch.program import (
    BLOCK_ELEMENTS,
    TILE_SHAPE,
    DataType,
    InputKind,
    Layout,
    MathFidelity,
    MemoryLayout,
    Operation,
    Ownership,
    Program,
    Scratch,
    Space,
    TensorDesc,
    Value,
    ValueType,
)

ByField = Mapping[str, PlacementOption]


@dataclass(frozen=True, slots=True)
class SlotPlacement:
    """Layout options by field of each input and output, and the requested aliases.

    `aliases` pairs output indices with input indices; both slots of a pair share their options.
    """

    inputs: tuple[ByField, ...]
    outputs: tuple[ByField, ...]
    aliases: tuple[tuple[int, int], ...]

    def rounded_outputs(self, graph: ComputationGraph) -> frozenset[int]:
        """Return the outputs whose storage type differs from their logical type."""
        return frozenset(
            i
            for i, placement in enumerate(self.outputs)
            if "data_type" in placement
            and placement["data_type"].value is not graph.output_type(i).data_type
        )


def apply_kinds(graph: ComputationGraph) -> ComputationGraph:
    """Apply the placement options for kind and ownership to the input slots."""
    slots = list(graph.inputs)
    for i, asked in enumerate(graph.placement_by_slot("input")):
        for option in asked:
            if isinstance(option.value, InputKind):
                slots[i] = replace(slots[i], kind=option.value)
            elif isinstance(option.value, Ownership):
                slots[i] = replace(slots[i], ownership=option.value)
    return replace(graph, inputs=tuple(slots))


def slot_placement(graph: ComputationGraph) -> SlotPlacement:
    """Return the layout options of each slot; raise `CompileError` listing all contradictions."""
    inputs = [_layout_options(asked) for asked in graph.placement_by_slot("input")]
    outputs = [_layout_options(asked) for asked in graph.placement_by_slot("output")]
    aliases = _requested_aliases(graph)
    problems = [
        problem
        for side, by_slot, type_of in (
            ("input", inputs, graph.input_type),
            ("output", outputs, graph.output_type),
        )
        for i, placement in enumerate(by_slot)
        if (problem := _type_problem(f"{side} {i}", placement, type_of(i))) is not None
    ]
    for output, source in aliases:
        merged = dict(inputs[source])
        for name, option in outputs[output].items():
            if name in merged and merged[name].value != option.value:
                problems.append(
                    f"{option.text()} contradicts {merged[name].text()}: the output takes the "
                    "input's buffer"
                )
            merged.setdefault(name, option)
        inputs[source] = outputs[output] = merged
    if problems:
        raise CompileError(
            "these placement options cannot be satisfied: " + "; ".join(problems),
            where=f"graph {graph.name!r}",
        )
    return SlotPlacement(tuple(inputs), tuple(outputs), aliases)


def _layout_options(placement: tuple[PlacementOption, ...]) -> dict[str, PlacementOption]:
    return {option.field: option for option in placement if option.field in LAYOUT_FIELDS}


def _type_problem(slot: str, placement: ByField, kind: ValueType) -> str | None:
    if "data_type" not in placement:
        return None
    option = placement["data_type"]
    stored = option.value
    if not isinstance(stored, DataType) or stored is kind.data_type:
        return None
    if stored.is_floating and kind.data_type.is_floating:
        return None
    return (
        f"{option.text()}: {slot} is {kind.text()}; only a floating type can be stored as another "
        "floating type. Add a Cast to the module"
    )


def _requested_aliases(graph: ComputationGraph) -> tuple[tuple[int, int], ...]:
    names = [slot.name for slot in graph.inputs]
    pairs: dict[int, int] = {
        i: slot.aliases_input
        for i, slot in enumerate(graph.outputs)
        if slot.aliases_input is not None
    }
    for i, asked in enumerate(graph.placement_by_slot("output")):
        for option in asked:
            if option.field == "alias":
                pairs[i] = (
                    option.value
                    if isinstance(option.value, int)
                    else names.index(str(option.value))
                )
    twice = {i for i, times in Counter(pairs.values()).items() if times > 1}
    if twice:
        listed = ", ".join(repr(names[i]) for i in sorted(twice))
        raise CompileError(
            f"two outputs alias the same input: {listed}",
            where=f"graph {graph.name!r}",
            remedy="let only one of the outputs alias it",
        )
    return tuple(sorted(pairs.items()))


# Aliasing: outputs that take the buffer of a donated input ---------------------------------------
Pairs = tuple[tuple[int, int], ...]


def prove_aliases(graph: ComputationGraph, asked: Pairs) -> None:
    """Raise `CompileError` listing every requested alias that cannot be proved."""
    if not asked:
        return
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
            remedy="remove the alias (each then gets a buffer of its own), or change the module",
        )


def free_aliases(graph: ComputationGraph, placement: SlotPlacement) -> Pairs:
    """Return aliases that can be proved, between slots without conflicting placement options.

    Each donated input goes to the first output that qualifies. Inputs stored in another type are
    skipped: an aliasing output would be rounded too.
    """
    if all(slot.ownership is not Ownership.DONATE for slot in graph.inputs):
        return ()
    taken = {i for _, i in placement.aliases}
    busy = {o for o, _ in placement.aliases}
    pairs = []
    proofs = AliasProofs(graph)
    #: Outputs by the values that their last operation reads: candidates for aliasing.
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
        option = f"input.{given.name}.ownership=donate"
        return f"{pair}: the input is not donated (--set {option}; in Python placement=)"
    ours, theirs = graph.output_type(output), graph.input_type(source)
    if ours != theirs:
        return f"{pair}: {ours.text()} is not {theirs.text()}"
    obstacle = proofs.obstacle(output, source)
    return None if obstacle is None else f"{pair}: {obstacle}"


# Slot layouts -----------------------------------------------------------------------------------

#: Warn about a footprint of at least this many times the bytes of the elements ...
TRAP_FACTOR = 4
#: ... that wastes at least this many bytes.
TRAP_NBYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class SlotRequest:
    """A slot to place. `kind` is None for an output."""

    side: str
    name: str
    type: ValueType
    kind: InputKind | None
    placement: ByField

    @property
    def label(self) -> str:
        return f"{self.side} {self.name!r}"


def default_space(request: SlotRequest, machine: MachineShape) -> Space:
    """Return the preferred space: L1 for activations and outputs, else DRAM.

    The host, on a machine without device memory.
    """
    if "space" in request.placement:
        requested = request.placement["space"].value
        assert isinstance(requested, Space)
        return requested
    sharded = "memory_layout" in request.placement or "shard_spec" in request.placement
    local = request.kind in (None, InputKind.ACTIVATION) or sharded
    if local and machine.l1 is not None:
        return Space.L1
    return Space.HOST if machine.dram is None else Space.DRAM


def is_pinned(request: SlotRequest) -> bool:
    """Whether placement options determine the space: a space, an address, or shards."""
    return not {"space", "address", "memory_layout", "shard_spec"}.isdisjoint(request.placement)


def slot_layout(request: SlotRequest, space: Space, machine: MachineShape) -> Layout:
    """Return the layout of a slot in `space`: row-major interleaved, changed by its options.

    Sharding without a shard spec becomes the machine's even sharding.

    Raises:
        LayoutError: The options contradict each other, or the machine does not support the layout.
        PlacementError: A shard spec without a sharded memory layout.
    """
    try:
        layout = _requested(request, space, machine)
        if layout.address is not None and layout.space is Space.HOST:
            raise LayoutError(
                "a host layout cannot have a fixed address", got=f"address {layout.address:#x}"
            )
        footprint(TensorDesc(request.type.shape, layout), machine)
    except LayoutError as error:
        asked = ", ".join(option.text() for option in request.placement.values())
        kind = PlacementError if isinstance(error, PlacementError) else LayoutError
        raise kind(
            f"{request.label} ({request.type.text()}) cannot be placed: {error.what}",
            where=f"machine {machine.name!r}" + (f", placement options: {asked}" if asked else ""),
            expected=error.expected,
            got=error.got,
            remedy=error.remedy or "change the placement options of this slot",
        ) from error
    return layout


def _requested(request: SlotRequest, space: Space, machine: MachineShape) -> Layout:
    placement: list[PlacementOption] = list(request.placement.values())
    default = Layout(request.type.data_type, space)
    asked = request.placement.get("memory_layout")
    spec = request.placement.get("shard_spec")
    if spec is not None and (asked is None or asked.value is MemoryLayout.INTERLEAVED):
        raise PlacementError(
            "a shard spec needs a sharded memory layout",
            remedy=f"add --set {spec.side}.{spec.slot}.memory_layout=height_sharded, or as "
            "width_sharded or block_sharded; in Python placement=",
        )
    if asked is None or spec is not None:
        return requested_layout(default, placement)
    kind = asked.value
    assert isinstance(kind, MemoryLayout)
    if kind is MemoryLayout.INTERLEAVED:
        return requested_layout(default, placement)
    plain = requested_layout(default, [w for w in placement if w.field != "memory_layout"])
    sharded = shard_layout(
        request.type.shape, kind, machine, data_type=plain.data_type, space=space,
        tile_shape=plain.tile_shape,
    )  # fmt: skip
    assert sharded.shard_spec is not None
    return requested_layout(
        default, [*placement, PlacementOption("input", 0, "shard_spec", sharded.shard_spec)]
    )


def size_traps(
    request: SlotRequest, layout: Layout, machine: MachineShape
) -> Iterator[CompileWarning]:
    """Yield a warning if padding multiplies the size of a tensor.

    ttnn pads the last two dimensions to 32: 1000x512x1x1 in tiles takes 1024 times its data.
    """
    desc = TensorDesc(request.type.shape, layout)
    taken = footprint(desc, machine).nbytes
    elements = desc.elements
    if layout.data_type.is_block:
        elements = round_up(elements, BLOCK_ELEMENTS)
    data = layout.data_type.nbytes(elements)
    if taken < TRAP_FACTOR * data or taken - data < TRAP_NBYTES:
        return
    remedy = "reshape it in the module so that its last two dimensions are the large ones"
    if layout.tile_shape == TILE_SHAPE and not layout.data_type.is_block:
        remedy = f"--set {request.side}.{request.name}.layout=row_major, or " + remedy
    yield CompileWarning(
        "padding",
        request.label,
        f"{desc.text()} takes {taken} B in {layout.space.value} for {data} B of data",
        remedy,
    )


#: Maximum share of L1 that slots and scratch use by default.
L1_SHARE = (3, 4)
#: Above this number of slots, L1 with fixed addresses is checked by sums instead of packing.
PACKED_SLOTS = 400


@dataclass(slots=True)
class _Slot:
    """A slot during placement; aliasing outputs have none."""

    request: SlotRequest
    value: int
    layout: Layout
    size_per_bank: int

    def text(self) -> str:
        return f"{self.request.label} ({self.size_per_bank} B per bank)"


def _with_math_fidelity(graph: ComputationGraph, fidelity: MathFidelity) -> ComputationGraph:
    """Set the math fidelity of every operation that sums products."""
    if fidelity is MathFidelity.BY_TYPE:
        return graph

    def told(operations: Sequence[Operation]) -> tuple[Operation, ...]:
        return tuple(
            replace(operation, math_fidelity=fidelity) if has_products(operation) else operation
            for operation in operations
        )

    bodies = tuple(replace(body, operations=told(body.operations)) for body in graph.bodies)
    return replace(graph, operations=told(graph.operations), bodies=bodies)


class GraphPlacer:
    """Places a graph, also with other shapes: what does not depend on them is computed once.

    Args:
        graph: A prepared graph without symbolic sizes.
        machine: The memory of the machine.
        options: The options of the compilation.

    Raises:
        CompileError: Placement options cannot be satisfied.
    """

    __slots__ = (
        "_constants", "_copies", "_demands", "_graph", "_machine", "_names", "_options", "_packer",
        "_placement", "_program",
    )  # fmt: skip

    def __init__(
        self, graph: ComputationGraph, machine: MachineShape, options: CompileOptions
    ) -> None:
        self._machine, self._options = machine, options
        self._placement = slot_placement(graph)
        graph = _with_math_fidelity(graph, options.math_fidelity)
        if graph.bodies:
            bodies = [replace(body, values=named_values(body)) for body in graph.bodies]
            graph = replace(graph, bodies=tuple(bodies))
        #: The graph whose outputs are values of their own.
        self._graph = add_output_identities(graph, self._placement.rounded_outputs(graph))
        #: Names and sources of the values that this added.
        added = self._graph.operations[len(graph.operations) :]
        self._copies = [(self._graph.values[o.outputs[0]].name, o.inputs[0]) for o in added]
        self._names = program_names(self._graph)
        self._packer = ScratchPacker(self._graph.operations, self._graph.placed_values())
        #: By constant its value, and this with its layout; the latter, and its demand.
        self._constants: dict[int, tuple[Value, Value]] = {}
        self._demands: dict[int, tuple[Value, Demand]] = {}
        #: What was placed first: its structure has been checked.
        self._program: Program | None = None

    def place(self, graph: ComputationGraph) -> tuple[Program, tuple[CompileWarning, ...]]:
        """Place the graph with other shapes of its values; return program and warnings.

        Args:
            graph: The same graph; values and constants may have other shapes.

        Raises:
            LayoutError: A layout is invalid.
            CompileError: A requested alias is not proved, or fixed addresses overlap.
            OutOfMemoryError: The program does not fit.
        """
        copies = [Value(name, graph.values[source].type) for name, source in self._copies]
        graph = self._graph.resized((*graph.values, *copies), graph.constants)
        machine, placement = self._machine, self._placement
        prove_aliases(graph, placement.aliases)
        aliases = placement.aliases + free_aliases(graph, placement)
        name = self._options.name or graph.name
        where = f"program {name!r} on machine {machine.name!r}"
        slots = _slots(graph, placement, aliases, machine)
        plan = self._packer.pack(graph.values)
        pinned = sum(s.size_per_bank for s in slots if _in_l1(s) and is_pinned(s.request))
        scratch = choose_scratch(expansion_nbytes(graph, plan), machine, l1_slots_per_bank=pinned)
        _move_slots_to_dram(slots, scratch, machine, where)
        values = _placed_values(graph, slots, aliases, machine, place_intermediates(
            graph.values, plan, scratch, self._names
        ), self._names, self._constants)  # fmt: skip
        over = dict(aliases)
        outputs = tuple([
            replace(slot, aliases_input=over[i]) if i in over else slot
            for i, slot in enumerate(graph.outputs)
        ])  # fmt: skip
        if self._program is None:
            self._program = program = Program(
                name, graph.inputs, outputs, tuple(values), graph.operations, graph.constants,
                scratch, self._options.role, bodies=graph.bodies,
            )  # fmt: skip
        else:
            program = self._program.placed(tuple(values), graph.constants, outputs, scratch)
        _check(demands(program, scratch, machine, self._demands), machine, where)
        warnings = [w for s in slots for w in size_traps(s.request, s.layout, machine)]
        return program, tuple(warnings)


def _slots(
    graph: ComputationGraph, placement: SlotPlacement, aliases: Pairs, machine: MachineShape
) -> list[_Slot]:
    requests = [
        (slot.value, SlotRequest("input", slot.name, graph.input_type(i), slot.kind, asked))
        for i, (slot, asked) in enumerate(zip(graph.inputs, placement.inputs, strict=True))
    ]
    over = dict(aliases)
    requests += [
        (slot.value, SlotRequest("output", slot.name, graph.output_type(i), None, asked))
        for i, (slot, asked) in enumerate(zip(graph.outputs, placement.outputs, strict=True))
        if i not in over
    ]
    return [
        _slot(request, value, default_space(request, machine), machine)
        for value, request in requests
    ]


def _slot(request: SlotRequest, value: int, space: Space, machine: MachineShape) -> _Slot:
    layout = slot_layout(request, space, machine)
    size = room_per_bank(TensorDesc(request.type.shape, layout), machine)
    return _Slot(request, value, layout, size)


def _in_l1(slot: _Slot) -> bool:
    return slot.layout.space is Space.L1


def _move_slots_to_dram(
    slots: list[_Slot], scratch: Scratch, machine: MachineShape, where: str
) -> None:
    """Move the largest unpinned slots to DRAM until the default share holds and the rest fits."""
    if machine.l1 is None:
        return
    capacity = machine.l1.capacity
    bottom = scratch.size_per_bank if scratch.space is Space.L1 else 0
    here = [i for i, s in enumerate(slots) if _in_l1(s)]
    # `free.pop()` takes the largest, of equals the last.
    free = [i for i in here if not is_pinned(slots[i].request)]
    free.sort(key=lambda i: (slots[i].size_per_bank, i))
    # Slots with a fixed address are pinned, so the gaps between them do not change.
    gaps = [size for _, size in _gaps([slots[i] for i in here], bottom, machine)]
    pieces = {i: slots[i].size_per_bank for i in here if slots[i].layout.address is None}
    loose = sum(pieces.values())
    used = bottom + sum(slots[i].size_per_bank for i in here)
    while True:
        comfortable = used * L1_SHARE[1] <= capacity * L1_SHARE[0]
        if (comfortable or not free) and (used > capacity or _fits(pieces, loose, gaps)):
            return  # `check_capacity` reports a sum above the capacity.
        if not free:
            raise _no_gap([s for s in slots if _in_l1(s)], bottom, machine, where)
        largest = free.pop()
        slot = slots[largest]
        slots[largest] = _slot(slot.request, slot.value, Space.DRAM, machine)
        del pieces[largest]
        loose, used = loose - slot.size_per_bank, used - slot.size_per_bank


def _fits(pieces: Mapping[int, int], total: int, gaps: list[int]) -> bool:
    """Whether slots of these sizes, `total` in all, fit into the gaps of L1."""
    if len(gaps) == 1:
        return total <= gaps[0]
    if len(pieces) > PACKED_SLOTS:
        return total <= sum(gaps)
    # If neither is proved, accept: the runtime can evict.
    return pack(list(pieces.values()), gaps).refutation is None


def _gaps(here: list[_Slot], bottom: int, machine: MachineShape) -> tuple[tuple[int, int], ...]:
    l1 = machine.space(Space.L1)
    fixed = [(s.layout.address, s.size_per_bank) for s in here if s.layout.address is not None]
    return gaps_between(fixed, min(l1.base + bottom, l1.limit), l1.limit)


def _no_gap(here: list[_Slot], bottom: int, machine: MachineShape, where: str) -> OutOfMemoryError:
    gaps = ", ".join(f"{size} B at {address:#x}" for address, size in _gaps(here, bottom, machine))
    return OutOfMemoryError(
        "the slots pinned to L1 do not fit between its fixed addresses",
        where=where,
        expected=f"gaps of L1, bytes per bank: {gaps or 'none'}",
        got=", ".join(s.text() for s in here if s.layout.address is None),
        remedy="move the fixed addresses together, or place some of these slots in DRAM",
    )


def _placed_values(
    graph: ComputationGraph, slots: list[_Slot], aliases: Pairs, machine: MachineShape,
    values: Sequence[Value], names: Sequence[str], known: dict[int, tuple[Value, Value]],
) -> list[Value]:  # fmt: skip
    """Return the values with the names, and with the layouts of slots and constants.

    `known` keeps constants, by index the value and with its layout, for graphs with the same ones.
    """
    placed = list(values)
    for slot in slots:
        kind = values[slot.value].type
        placed[slot.value] = Value(names[slot.value], kind, slot.layout)
    for output, source in aliases:
        taker, given = graph.outputs[output].value, graph.inputs[source].value
        placed[taker] = Value(names[taker], values[taker].type, placed[given].layout)
    home = Space.HOST if machine.dram is None else Space.DRAM
    kinds = {placed[constant.value].type.data_type for constant in graph.constants}
    layouts = {data_type: Layout(data_type, home) for data_type in kinds}
    for constant in graph.constants:
        value = values[constant.value]
        found = known.get(constant.value)
        if found is None or found[0] is not value:
            layout = layouts[value.type.data_type]
            name = names[constant.value]
            found = known[constant.value] = value, Value(name, value.type, layout)
        placed[constant.value] = found[1]
    return placed


def _check(wanted: tuple[Demand, ...], machine: MachineShape, where: str) -> None:
    problems = list(address_problems(wanted, machine))
    if problems:
        free = ""
        fixed = {d.space for d in wanted if d.kind == "slot" and d.address is not None}
        if machine.l1 is not None and Space.L1 in fixed:
            scratch = sum(d.size_per_bank for d in wanted if d.kind == "scratch")
            free = (
                f"L1 is free for slots at [{machine.l1.base + scratch:#x}, {machine.l1.limit:#x})"
            )
        raise PlacementError(
            "the requested addresses cannot be used: " + "; ".join(problems),
            where=where,
            expected=free or None,
            remedy="choose other addresses, or let the planner choose them",
        )
    check_capacity(wanted, machine, where)
