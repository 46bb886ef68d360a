"""`stitch machine`: list the known machines, or show one with every figure."""

from __future__ import annotations

import argparse
from typing import Any

from stitch import plugins
from stitch.cli.command import EXIT_OK, Command, say_result
from stitch.cli.parser import make_parser
from stitch.machine import Machine, load_machine, machine_names

EXAMPLES = """\
  stitch machine
  stitch machine wormhole_n150
  stitch machine mine.yaml --sources
  stitch machine tiny --json"""


def command() -> Command:
    """Return `stitch machine` with its options."""
    parser = make_parser("List the known machines, or show one.", EXAMPLES)
    parser.add_argument("machine", nargs="?", metavar="NAME|machine.yaml|.ttsys",
                        help="the machine to show (default: list the known ones)")  # fmt: skip
    parser.add_argument("--sources", action="store_true",
                        help="also print where each figure comes from")  # fmt: skip
    return Command(parser.read, _show)


def _show(options: argparse.Namespace) -> int:
    if options.machine is None:
        names = [*machine_names(), *plugins.names("machines")]
        body = {"machines": [machine_facts(load_machine(name)) for name in names]}
        say_result(body, lambda: map(machine_line, names))
        return EXIT_OK
    machine = load_machine(options.machine)
    shown, lines = machine_facts(machine), machine_lines(machine)
    if options.sources:
        shown["sources"] = dict(machine.sources)
        lines += [f"  {figure}: {source}" for figure, source in machine.sources]
    say_result(shown, lambda: lines)
    return EXIT_OK


def machine_facts(machine: Machine) -> dict[str, Any]:
    """Return a machine as plain data: memory per bank, and the rate of each path for 1 MiB."""
    shape = machine.shape
    spaces = {
        space.value: {
            "banks": figures.banks, "base": figures.base, "limit": figures.limit,
            "capacity": figures.capacity, "alignment": figures.alignment,
            "granule": figures.granule, "policy": figures.policy.value,
        }
        for space in shape.spaces
        for figures in (shape.space(space),)
    }  # fmt: skip
    paths = [
        {"from": source.value, "to": target.value, "latency_seconds": path.latency_seconds,
         "bytes_per_second": path.rate(1 << 20)}
        for source, target, path in machine.paths
    ]  # fmt: skip
    return {
        "name": shape.name, "core_grid": list(shape.core_grid), "spaces": spaces, "paths": paths,
        "has_compute": machine.compute is not None,
    }  # fmt: skip


def machine_line(name: str) -> str:
    """Return the name of a shipped machine, and the banks and bytes per bank of its spaces.

    >>> machine_line("tiny")
    'tiny: host 1 x 67108864 B, dram 2 x 1048576 B, l1 4 x 15360 B'
    """
    shape = load_machine(name).shape
    spaces = [(space.value, shape.space(space)) for space in shape.spaces]
    return f"{name}: " + ", ".join(f"{s} {of.banks} x {of.capacity} B" for s, of in spaces)


def machine_lines(machine: Machine) -> list[str]:
    """Return a machine as text."""
    facts = machine_facts(machine)
    rows, columns = facts["core_grid"]
    lines = [f"{facts['name']}: {rows} x {columns} cores"]
    for name, of in facts["spaces"].items():
        lines.append(
            f"  {name}: {of['banks']} x {of['capacity']} B at [{of['base']}, {of['limit']}), "
            f"alignment {of['alignment']}, granule {of['granule']}, {of['policy']}"
        )
    lines += [
        f"  {path['from']} -> {path['to']}: {path['latency_seconds'] * 1e6:.2f} us + bytes / "
        f"{path['bytes_per_second'] / 1e9:.1f} GB/s"
        for path in facts["paths"]
    ]
    if not facts["has_compute"]:
        lines.append("  programs take no simulated time: the description has no `compute`")
    return lines
