"""Machine descriptions: a YAML file → a checked `Machine`; ours and a user's work in the same way.

Comes in: the name of a machine that Stitch ships, the path of a YAML file, or a `Machine`.
Goes out: a `Machine`, or one `FormatError` that lists every problem with its line. The form:

    name: my_device
    description: a sentence                     # optional
    core_grid: [rows, columns]
    host:  {banks: 1, bank_nbytes: .., alignment: 64}
    dram:  {banks: .., bank_nbytes: .., alignment: ..}          # optional
    l1:    {banks: rows x columns, bank_nbytes: .., base: .., reserved_top_nbytes: ..,
            alignment: ..}                                      # optional
    noc:   {clock_hz: .., bytes_per_cycle: {128: 5.5, ..}, latency_cycles: ..,
            latency_cycles_per_hop: ..}                         # optional
    compute: {launch_seconds: .., other_flops_per_second: ..,
              flops_per_second: {bfloat16: .., bfp8: ..},
              bytes_per_second: {dram: .., l1: ..}}             # optional
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

A path has exactly one of `bytes_per_second`, `curve` and `noc_links` (so many cores copy, each over
its own link). A path that is left out does not exist: without `l1 -> l1`, moves inside L1 go
through DRAM. Without `compute` programs take no simulated time. `loops` weighs schedules of loops
against each other, for each executor by its rates (without: the figures of `host`);
`tools/bench/loop_rates.py` measures them. Any figure may be written `{value:
.., source: ..}`; a `source` in a mapping speaks for all of its figures. The machines that Stitch
ships name the source of every figure (a test keeps that); a user's file may leave them all out.
Must not know tensors, plans or devices.
"""

from __future__ import annotations

import functools
from pathlib import Path as FilePath

from stitch.errors import FormatError, StitchError, UsageError, closest
from stitch.files import identity, open_file
from stitch.machine.machine import Machine

#: A description is a page of text; anything longer is another kind of file.
MAX_FILE_NBYTES = 1 << 20
_SHIPPED = FilePath(__file__).parent
_FORM = "the form of the file is shown by: python -m pydoc stitch.machine.description"


def machine_names() -> tuple[str, ...]:
    """The machines that Stitch ships, in alphabetical order.

    >>> machine_names()
    ('blackhole_p150', 'host', 'tiny', 'wormhole_n150')
    """
    return tuple(sorted(file.stem for file in _SHIPPED.iterdir() if file.suffix == ".yaml"))


def load_machine(name_or_path: str | FilePath | Machine) -> Machine:
    """The machine of a shipped name or of a YAML file; a `Machine` is given back as it is.

    A text that ends in `.yaml` or `.yml`, or holds a slash, is a path. Raises `UsageError` where
    there is no such machine or file, `FormatError` with all problems where the file is not sound.

    >>> load_machine("wormhole_n150").shape.l1.banks
    64
    """
    if isinstance(name_or_path, Machine):
        return name_or_path
    if not isinstance(name_or_path, str | FilePath):
        raise UsageError(
            "a machine is a name, the path of a .yaml description, or a Machine",
            got=type(name_or_path).__name__,
        )
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
                remedy="choose one of these, or give the path of a .yaml description",
            )
        content = (_SHIPPED / f"{name}.yaml").read_bytes()
    except OSError as error:
        raise StitchError(
            "cannot read the machines that Stitch ships", got=error.strerror or str(error)
        ) from error
    return parse_machine(content, f"{name}.yaml")


def _read_file(file: FilePath) -> Machine:
    try:
        with open_file(file) as stream:
            content = stream.read(MAX_FILE_NBYTES + 1)
    except (OSError, ValueError) as error:
        raise UsageError(
            f"cannot read the machine description {str(file)!r}",
            got=getattr(error, "strerror", None) or str(error),
            remedy="give an existing .yaml file, or one of " + ", ".join(machine_names()),
        ) from error
    return parse_machine(content, str(file))


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
