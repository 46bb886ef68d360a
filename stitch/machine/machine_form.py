"""The form of a machine's description, and what of it has to fit each other.

Comes in: the nodes of a file. Goes out: a `Machine`, or None after every defect was noted. The form
is shown in `description`. Must not know: files, what figures are used for.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from stitch.errors import StitchError
from stitch.forms import (
    Choice,
    Form,
    FormValues,
    ListOf,
    Node,
    Place,
    ProblemLog,
    Reading,
    Row,
    Whole,
    Word,
    as_written,
)
from stitch.machine.compute_form import COMPUTE
from stitch.machine.figure_kinds import NOT_NEGATIVE
from stitch.machine.loop_form import LOOPS, loop_rates
from stitch.machine.machine import Machine
from stitch.machine.network_form import (
    NOC,
    PATH,
    GridKind,
    path_of,
    read_latency,
)
from stitch.machine.shape import MOST_GRANULES, MachineShape, Policy, SpaceShape
from stitch.program import Space


def read_description(root: Node, log: ProblemLog) -> Machine | None:
    """The machine that a file describes; None where a defect was noted."""
    reading = Reading(log, sources=[])
    fields = _MACHINE.fields(root, reading.root)
    _check_parts(fields)
    if log.problems:
        return None
    machine = _machine(fields, reading)
    return None if log.problems else machine


# -- what stands in the file -----------------------------------------------------------------------


@dataclass(eq=False, repr=False)
class _Space:
    """The figures of a space."""

    banks: int
    bank_nbytes: int
    base: int
    reserved_bottom_nbytes: int
    reserved_top_nbytes: int
    alignment: int
    granule: int | None
    policy: str
    place: Place

    @property
    def shape(self) -> SpaceShape:
        """It as machines have it: its usable addresses, less what is reserved at either end."""
        return SpaceShape(
            self.banks,
            self.base + self.reserved_bottom_nbytes,
            self.bank_nbytes - self.reserved_top_nbytes,
            self.alignment,
            self.granule or 0,
            Policy(self.policy),
        )


#: What a process has addresses for.
_MOST_NBYTES = 1 << 46


def _check_space(space: _Space, place: Place) -> None:
    shape = space.shape
    base, limit, granule = shape.base, shape.limit, shape.granule
    what = "alignment" if space.granule is None else "granule"
    if shape.alignment & (shape.alignment - 1):
        place.at("alignment").note("alignment", f"{shape.alignment} is no power of two")
    elif granule % shape.alignment:
        detail = f"{granule} is no multiple of the alignment {shape.alignment}"
        place.at("granule").note("granule", detail)
    elif base >= limit:
        sizes = (
            f"(bank_nbytes {space.bank_nbytes} - reserved_top_nbytes {space.reserved_top_nbytes})"
        )
        detail = f"base {base} leaves no room below the limit {limit} {sizes}"
        place.at("base").note("no_room", detail)
    elif space.bank_nbytes > (most := min(granule * MOST_GRANULES, _MOST_NBYTES // space.banks)):
        detail = f"{space.bank_nbytes} bytes a bank are more than can be simulated, {most}"
        place.at("bank_nbytes").note("out_of_range", detail)
    elif base % granule or limit % granule:
        detail = (
            f"usable addresses [{base}, {limit}) must start and end at a multiple of the "
            f"{what} {granule}"
        )
        place.at("base" if base % granule else "bank_nbytes").note(what, detail)


_SPACE = Form(
    "a space",
    _Space,
    Row("banks", Whole(1), needed=True),
    Row("bank_nbytes", Whole(1), needed=True),
    Row("base", Whole(0), default=0),
    Row("reserved_bottom_nbytes", Whole(0), default=0),
    Row("reserved_top_nbytes", Whole(0), default=0),
    Row("alignment", Whole(1), needed=True),
    Row("granule", Whole(1)),
    Row("policy", Choice(("best_fit", "first_fit")), default=Policy.BEST_FIT.value),
    check=_check_space,
)


_MACHINE = Form(
    "a machine",
    as_written,
    Row("name", Word("a name", is_text=True), needed=True),
    Row("description", Word("a sentence", is_text=True)),
    Row("core_grid", GridKind(), needed=True),
    Row("host", _SPACE, needed=True),
    Row("dram", _SPACE),
    Row("l1", _SPACE),
    Row("noc", NOC),
    Row("compute", COMPUTE),
    Row("loops", LOOPS),
    Row("paths", ListOf(PATH, "a list of paths"), needed=True, default=()),
)
MACHINE_KEYS = _MACHINE.keys


# -- what has to fit each other --------------------------------------------------------------------


def _check_parts(fields: FormValues) -> None:
    """Notes parts that do not fit each other, as far as they are sound by themselves."""
    place, values = fields.place, fields.values
    present = {key for key, node in place.nodes.items() if node.data is not None}
    l1, grid, noc = values["l1"], values["core_grid"], values["noc"]
    if l1 is not None and grid is not None and l1.banks != grid[0] * grid[1]:
        detail = f"L1 has one bank for each core: {grid[0] * grid[1]} of core_grid, not {l1.banks}"
        l1.place.at("banks").note("banks_per_core", detail)
    if "l1" in present and "dram" not in present:
        place.at("dram").note("missing_key", "a machine with L1 needs DRAM, to evict to")
    spaces = tuple(s.value for s in Space if s is Space.HOST or s.value in present)
    seen: set[tuple[str, str]] = set()
    for path in values["paths"]:
        for key, name in (("from", path.source), ("to", path.target)):
            if name not in spaces:
                detail = f"{name!r} is no space of this machine (it has {', '.join(spaces)})"
                path.place.at(key).note("unknown_space", detail)
        if (path.source, path.target) in seen:
            path.place.note("duplicate_path", "this path is described twice")
        seen.add((path.source, path.target))
        if path.noc_links is not None and "noc" not in present:
            path.place.at("noc_links").note("rate", "the machine has no `noc` section")
        elif path.noc_links is not None and path.hops is None and not read_latency(noc, path):
            path.place.at("hops").wrong(None, NOT_NEGATIVE.wanted)
    if noc is not None and noc.routers is not None and grid is not None:
        fit = [
            ("core_rows", len(noc.routers.core_rows), "row", grid[0]),
            ("core_columns", len(noc.routers.core_columns), "column", grid[1]),
            ("dram", len(noc.routers.dram), "bank", values["dram"].banks if values["dram"] else 0),
        ]
        outer = place.inside(place.nodes["noc"], "noc")
        inner = outer.inside(outer.nodes["routers"], "noc.routers")
        for key, found, each, wanted in fit:
            if found < wanted:
                detail = f"one for each {each} is needed: {wanted}, not {found}"
                inner.at(key).note("routers", detail)


def _machine(fields: FormValues, reading: Reading) -> Machine:
    values = fields.values
    dram, l1 = (None if space is None else space.shape for space in (values["dram"], values["l1"]))
    if dram is not None and dram.policy is Policy.FIRST_FIT:
        dram = replace(dram, policy=Policy.FIRST_FIT_UPWARDS)
    shape = MachineShape(values["name"], values["core_grid"], values["host"].shape, l1, dram)
    paths = tuple(path_of(path, values["noc"]) for path in values["paths"])
    machine = Machine(
        shape,
        paths,
        tuple(reading.sources or ()),
        values["noc"],
        values["compute"],
        loop_rates(values["loops"]),
    )
    for source in shape.spaces:
        for target in shape.spaces:
            try:
                machine.route(source, target)
            except StitchError as error:
                fields.place.at("paths").note("unreachable", error.what)
    return machine
