"""Read machine descriptions: a YAML file → a checked `Machine`.

The format, of shipped machines and of users':

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
    residency: NAME                                             # optional, a plugin
    paths:
      - {from: host, to: dram, bytes_per_second: .., latency_seconds: ..}
      - {from: host, to: host, curve: {4096: 1.0e+9, ..}, latency_seconds: ..}
      - {from: dram, to: l1, noc_links: .., hops: .., limit_bytes_per_second: ..}

A description may have another one as its `base`: `base: wormhole_n150` or a path, a `name`, and
`overrides: {l1.bank_nbytes: ..}` (see `derived_description`); all other keys are optional then.

Usable addresses of a bank are `base + reserved_bottom_nbytes` up to `bank_nbytes -
reserved_top_nbytes`: the circular buffers at the bottom of L1, L1_SMALL at its top and the trace
region at the top of DRAM are reserved. Pages start at multiples of `alignment`, a power of two.
Tensors start at multiples of `granule`, a multiple of the alignment (default: the alignment), and
take whole granules. `policy` selects the hole for a tensor: `best_fit` (default), the smallest;
`first_fit`, as tt-metal's free list, the first: in L1 from the top, in DRAM from the bottom; or
the name of an allocator plugin. `residency` is an eviction rule of a plugin.

A path has exactly one of `bytes_per_second`, `curve` and `noc_links` (the number of cores that
copy, each over its own link). Without a path `l1 -> l1`, moves inside L1 go through DRAM. A path
over the NoC has `hops`, for its latency, unless `read_latency_cycles` are given. `routers` are
the positions of cores and DRAM banks; without them, contention on links is ignored. `compute`
holds the rates of one core (see `machine.Compute`); without it programs take no simulated time.
`loops` holds rates of executors to compare schedules of loops (default: the figures of `host`),
as measured by `tools/bench/loop_rates.py`. Any figure may be written `{value: .., source: ..}`; a
`source` in a mapping applies to all of its figures. Shipped machines name the source of every
figure (tested).
"""

from __future__ import annotations

from collections.abc import Mapping

from stitch.machine.machine import Machine

#: Size limit of a description.
MAX_FILE_NBYTES = 1 << 20
_FORM = "the format is documented by: python -m pydoc stitch.machine.description"


def parse_machine(content: bytes, file_name: str) -> Machine:
    """Parse and check a machine description; raise FormatError with all problems."""
    # Imported on demand: importing the YAML reader is slow.
    from stitch.forms import read_yaml_bytes
    from stitch.machine.machine_yaml import read_description

    root, log = read_yaml_bytes(content, file_name, "machine description")
    if isinstance(root.data, Mapping) and "base" in root.data:
        from stitch.machine.derived_description import with_base

        root = with_base(root, log, file_name)
    machine = read_description(root, log)
    log.raise_any("machine description", f"correct the keys named below; {_FORM}")
    assert machine is not None, "problems were noted"
    return machine
