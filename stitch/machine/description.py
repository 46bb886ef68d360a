"""Machine descriptions: a YAML file → a checked `Machine`; ours and a user's work in the same way.

The form:

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
(see `machine.Compute`); without it programs take no simulated time. `loops` weighs schedules of
loops against each other, for each executor by its rates (without: the figures of `host`);
`tools/bench/loop_rates.py` measures them. Any figure may be written `{value: .., source: ..}`; a
`source` in a mapping speaks for all of its figures. The machines that Stitch ships name the source
of every figure (a test keeps that); a user's file may leave them all out.
"""

from __future__ import annotations

from pathlib import Path as FilePath

from stitch.machine.machine import Machine

#: A description is a page of text; anything longer is another kind of file.
MAX_FILE_NBYTES = 1 << 20
_SHIPPED = FilePath(__file__).parent
_FORM = "the format is documented by: python -m pydoc stitch.machine.description"


def machine_names() -> tuple[str, ...]:
    """The machines that Stitch ships, in alphabetical order.

    >>> machine_names()
    ('blackhole_p150', 'host', 'tiny', 'wormhole_n150')
    """
    return tuple(sorted(file.stem for file in _SHIPPED.iterdir() if file.suffix == ".yaml"))


def shipped_text(name: str) -> str:
    """The description of a machine that Stitch ships."""
    return (_SHIPPED / f"{name}.yaml").read_bytes().decode()


def parse_machine(content: bytes, file_name: str) -> Machine:
    """A checked machine from the bytes of a YAML file; raises `FormatError` with all problems."""
    # Loaded when there is a text to read: YAML's reader takes as long as all of a small room.
    from stitch.forms import read_yaml_bytes
    from stitch.machine.machine_yaml import read_description

    root, log = read_yaml_bytes(content, file_name, "machine description")
    machine = read_description(root, log)
    log.raise_any("machine description", f"correct the keys named below; {_FORM}")
    assert machine is not None, "problems were noted"
    return machine
