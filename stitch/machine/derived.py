"""Machines that are as one that Stitch ships, but for figures that are known better."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import replace

from stitch.errors import FormatError, Problem
from stitch.forms import Node, ProblemLog, read_yaml
from stitch.machine.description import shipped_text
from stitch.machine.machine import Machine
from stitch.machine.machine_form import read_description

#: A value, and its source.
Figure = tuple[int | tuple[int, ...], str]


def derived_machine(like: str, name: str, figures: Mapping[str, Figure], where: str) -> Machine:
    """A shipped machine under another name and with other figures, each by the dotted name that it
    has in a description. Raises `FormatError` naming `where` if they do not fit each other.

    >>> mine = derived_machine("tiny", "mine", {"l1.base": (2_048, "measured")}, "-")
    >>> mine.shape.l1.base, dict(mine.sources)["l1.base"], dict(mine.sources)["core_grid"][:13]
    (2048, 'measured', 'as tiny: chos')
    """
    root = _with(_shipped_root(like), ("name",), _scalar(name))
    for key, (value, source) in figures.items():
        held = _scalar(value)
        if isinstance(value, tuple):
            held = Node(0, tuple(_scalar(item) for item in value))
        figure = Node(0, {"value": held, "source": _scalar(source)})
        root = _with(root, tuple(key.split(".")), figure)
    log = ProblemLog(where)
    machine = read_description(root, log)
    if machine is None:
        raise FormatError(
            f"{where} is no machine: its figures do not fit each other",
            problems=tuple(Problem(p.kind, where, p.detail) for p in log.problems),
            remedy="make the descriptor again on the device; it is damaged",
        )
    sources = [(k, s if k in figures else f"as {like}: {s}") for k, s in machine.sources]
    return replace(machine, sources=tuple(sources))


@functools.cache
def _shipped_root(like: str) -> Node:
    # YAML's reader takes longer than all the rest, and a system has many chips.
    root, _ = read_yaml(shipped_text(like), like)
    return root


def _scalar(value: object) -> Node:
    assert isinstance(value, str | int | tuple), "no other figures are known"
    return Node(0, value if isinstance(value, str | int) else None, str(value))


def _with(node: Node, path: tuple[str, ...], value: Node) -> Node:
    """A mapping in which something else stands, under a key of a key."""
    if not path:
        return value
    assert isinstance(node.data, Mapping), "a figure stands in mappings"
    inner = node.data.get(path[0], Node(0, {}))
    return replace(node, data={**node.data, path[0]: _with(inner, path[1:], value)})
