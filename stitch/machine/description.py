"""Machine descriptions: a YAML file → a checked `Machine`; ours and a user's work in the same way.

Comes in: the name of a machine that Stitch ships, the path of a YAML file or of one that another
room reads (`_READERS`), or a `Machine`. Goes out: a `Machine`, or one `FormatError` that lists
every problem with its line. The form:

    name: my_device
    description: a sentence                     # optional
    core_grid: [rows, columns]
    host:  {banks: 1, bank_nbytes: .., alignment: 64}
    dram:  {banks: .., bank_nbytes: .., base: .., alignment: ..}            # optional
    l1:    {banks: rows x columns, bank_nbytes: .., base: .., alignment: ..,
            granule: .., policy: best_fit,
            reserved_bottom_nbytes: .., reserved_top_nbytes: ..}            # optional
    noc:   {clock_hz: .., bytes_per_cycle: {128: 5.5, ..}, latency_cycles: ..,
            latency_cycles_per_hop: .., and optional:
            read_latency_cycles: {core: .., column: .., row: .., both: ..},
            link_bytes_per_cycle: .., core_bytes_per_cycle: .., dram_bytes_per_cycle: ..,
            dram_queueing: 1.2, turns: 0.4,
            routers: {grid: [rows, columns], core_rows: [1, 2, ..], core_columns: [1, 2, ..],
                      dram: [[row, column], ..]}}               # optional
    compute: {launch_seconds: .., clock_hz: .., multiply_adds_per_cycle: ..,
              passes: {lofi: 1, hifi2: 2, hifi3: 3, hifi4: 4}, elements_per_cycle: ..,
              l1_bytes_per_cycle: .., and optional:
              fidelity: {bfloat16: hifi2, bfp8: lofi, mixed: hifi2}, tile_loads: 1.25,
              products_share: 0.8, hidden_share: 0.5,
              bytes_per_second: {dram: .., host: ..}}           # optional
    loops: {near_nbytes: .., near_bytes_per_second: .., far_bytes_per_second: ..,
            numpy: {loop_seconds: .., round_seconds: .., element_seconds: .., operation_seconds: ..,
                    function_seconds: .., movement_seconds: .., has_views: true,
                    copies_elements: true, matrix_seconds: .., flops_per_second: ..,
                    packed_flops_per_second: ..},
            onnxruntime: {..}, torch: {..}}                     # optional; at least one of them
    paths:
      - {from: host, to: dram, bytes_per_second: .., latency_seconds: ..}
      - {from: host, to: host, curve: {4096: 1.0e+9, ..}, latency_seconds: ..}
      - {from: dram, to: l1, noc_links: .., hops: .., limit_bytes_per_second: ..}

Of a bank, addresses from `base + reserved_bottom_nbytes` up to `bank_nbytes - reserved_top_nbytes`
may be used. At the bottom of L1 a machine reserves the region of circular buffers, at its top
L1_SMALL, at the top of DRAM the trace region; without these keys nothing is. Pages lie at multiples
of the `alignment`, a power of two; tensors at multiples of the `granule`, itself a multiple of the
alignment, and they take whole ones (without it: the alignment). `policy` says which hole a tensor
takes: `best_fit` (without the key) the smallest in which it fits; `first_fit`, as tt-metal's free
list does, the first: in L1 from the top down, in DRAM from the bottom up.

A path has exactly one of `bytes_per_second`, `curve` and `noc_links` (so many cores copy at most,
each over its own link). A path that is left out does not exist: without `l1 -> l1`, moves inside L1
go through DRAM. A path over the NoC has `hops`, for its latency, unless `read_latency_cycles` tells
that of reads. `routers` say where cores and DRAM banks stand: without them, copies are priced by
what each core carries, and contention on links is not seen. `compute` holds the rates of one core
(see `compute.Compute`); without it programs take no simulated time. `loops` weighs schedules of
loops against each other, for each executor by its rates (without: the figures of `host`);
`tools/bench/loop_rates.py` measures them. Any figure may be written `{value: .., source: ..}`; a
`source` in a mapping speaks for all of its figures. The machines that Stitch ships name the source
of every figure (a test keeps that); a user's file may leave them all out.
Must not know tensors, plans or devices.
"""

from __future__ import annotations

import functools
import re
from importlib import import_module
from pathlib import Path as FilePath

from stitch.errors import FormatError, StitchError, UsageError, closest
from stitch.files import identity, open_file
from stitch.machine.machine import Machine

#: A description is a page of text; anything longer is another kind of file.
MAX_FILE_NBYTES = 1 << 20
_SHIPPED = FilePath(__file__).parent
#: Files that describe machines and are no YAML, by their endings: the module whose
#: `machines_in(content, path)` gives one machine for each chip. It is loaded for such a file.
_READERS = {".ttsys": "stitch.ttb.system_machines"}
#: Behind such a path may stand which of its chips is meant.
_CHIP = re.compile(rf"(.*(?:{'|'.join(map(re.escape, _READERS))}))(?::(\d{{1,4}}))?", re.DOTALL)
_FORM = "the form of the file is shown by: python -m pydoc stitch.machine.description"


def machine_names() -> tuple[str, ...]:
    """The machines that Stitch ships, in alphabetical order.

    >>> machine_names()
    ('blackhole_p150', 'host', 'tiny', 'wormhole_n150')
    """
    return tuple(sorted(file.stem for file in _SHIPPED.iterdir() if file.suffix == ".yaml"))


def load_machine(name_or_path: str | FilePath | Machine) -> Machine:
    """The machine of a shipped name or of a file; a `Machine` is given back as it is.

    A text that ends in `.yaml`, `.yml` or `.ttsys`, or holds a slash, is a path; `n300.ttsys:1` is
    the second chip of a system. Without a number that is the first, if the chips differ in nothing
    but their usable addresses. Raises `UsageError` if they differ in more, and where there is no
    such machine or file, `FormatError` with all problems where the file is not sound.

    >>> load_machine("wormhole_n150").shape.l1.banks
    64
    """
    if isinstance(name_or_path, Machine):
        return name_or_path
    if not isinstance(name_or_path, str | FilePath):
        raise UsageError(
            "a machine is a name, the path of a .yaml description or a .ttsys file, or a Machine",
            got=type(name_or_path).__name__,
        )
    of_system = _CHIP.fullmatch(str(name_or_path))
    if of_system is not None:
        return _one_of(FilePath(of_system[1]), of_system[2])
    if isinstance(name_or_path, FilePath) or _looks_like_path(name_or_path):
        return _read_file(FilePath(name_or_path))
    try:
        return _shipped(name_or_path)
    except UsageError as error:
        beside = FilePath(f"{name_or_path}.yaml")
        # A name may be too long to ask the system for.
        if identity(beside) is not None and beside.is_file():
            error.remedy = f"the file {str(beside)!r} is named with its ending"
        raise


def load_machines(path: str | FilePath | Machine) -> tuple[Machine, ...]:
    """Every machine of a file, one for each chip: `NAME:0`, `NAME:1`, .. where there are several.

    What is no file of several machines gives the only one; raises as `load_machine` does.
    """
    of_system = _CHIP.fullmatch(str(path)) if isinstance(path, str | FilePath) else None
    if of_system is None or of_system[2] is not None:
        return (load_machine(path),)
    return _read_system(FilePath(of_system[1]))


def is_machine_file(path: str) -> bool:
    """Whether a path is that of a file of machines which is no YAML.

    >>> is_machine_file("n300.ttsys:1"), is_machine_file("mine.yaml")
    (True, False)
    """
    return _CHIP.fullmatch(path) is not None


def _one_of(file: FilePath, chip: str | None) -> Machine:
    machines = _read_system(file)
    if chip is not None and int(chip) >= len(machines):
        last = f" to {file.name}:{len(machines) - 1}" if len(machines) > 1 else ""
        raise UsageError(
            f"{str(file)!r} has no chip {chip}: it describes {len(machines)}",
            expected=f"{file.name}:0{last}",
        )
    first = machines[int(chip or 0)]
    for number, other in enumerate(machines if chip is None else ()):
        apart = [*first.shape.shortcomings(other.shape), *other.shape.shortcomings(first.shape)]
        if apart:
            raise UsageError(
                f"the chips of {str(file)!r} are not alike",
                expected=f"one of {file.name}:0 to {file.name}:{len(machines) - 1}",
                got=f"chip {number} beside chip 0: " + "; ".join(apart),
                remedy="name the chip behind the file",
            )
    return first


def _read_system(file: FilePath) -> tuple[Machine, ...]:
    read = import_module(_READERS[file.suffix]).machines_in
    machines: tuple[Machine, ...] = read(_content(file), str(file))
    return machines


def _looks_like_path(text: str) -> bool:
    return text.endswith((".yaml", ".yml")) or "/" in text or "\\" in text


@functools.cache
def _shipped(name: str) -> Machine:
    try:
        names = machine_names()
        if name not in names:
            near = closest(name, names)
            raise UsageError(
                f"there is no machine {name!r}{f'; {near}' if near else ''}",
                expected="one of " + ", ".join(names),
                remedy="choose one of these, or give the path of a .yaml or .ttsys file",
            )
        content = shipped_text(name).encode()
    except OSError as error:
        raise StitchError(
            "cannot read the machines that Stitch ships", got=error.strerror or str(error)
        ) from error
    return parse_machine(content, f"{name}.yaml")


def shipped_text(name: str) -> str:
    """The description of a machine that Stitch ships."""
    return (_SHIPPED / f"{name}.yaml").read_bytes().decode()


def _read_file(file: FilePath) -> Machine:
    return parse_machine(_content(file), str(file))


def _content(file: FilePath) -> bytes:
    try:
        with open_file(file) as stream:
            return stream.read(MAX_FILE_NBYTES + 1)
    except (OSError, ValueError) as error:
        raise UsageError(
            f"cannot read the machine description {str(file)!r}",
            got=getattr(error, "strerror", None) or str(error),
            remedy="give an existing .yaml or .ttsys file, or one of " + ", ".join(machine_names()),
        ) from error


def parse_machine(content: bytes, file_name: str) -> Machine:
    """A checked machine from the bytes of a YAML file; raises `FormatError` with all problems."""
    if len(content) > MAX_FILE_NBYTES:
        raise FormatError(
            "this is not a machine description",
            where=file_name,
            expected=f"at most {MAX_FILE_NBYTES} bytes",
        )
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise FormatError(
            "the machine description is no UTF-8 text", where=file_name, got=error.reason
        ) from error
    # Loaded when there is a text to read: YAML's reader takes as long as all of a small room.
    from stitch.forms import read_yaml
    from stitch.machine.machine_form import read_description

    root, log = read_yaml(text, file_name)
    machine = read_description(root, log)
    log.raise_any("machine description", f"correct the keys named below; {_FORM}")
    assert machine is not None, "what is wrong has been noted"
    return machine
