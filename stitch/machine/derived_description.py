"""Machine descriptions with a `base`: another description, of which some figures are replaced.

    base: wormhole_n150         # a shipped machine, or a path relative to this file
    name: half_an_l1
    overrides: {l1.bank_nbytes: 749_568, paths.host.dram.bytes_per_second: 8.0e+9}

A key of `overrides` is the dotted name of a figure; a path is named by its two spaces. Other keys
of the file, such as `residency`, replace those of the base.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path as FilePath

from stitch.errors import closest
from stitch.files import read_bytes
from stitch.forms import Node, ProblemLog, read_yaml_bytes
from stitch.machine.shipped import machine_names, shipped_text

#: Descriptions that may stand on each other.
MAX_BASES = 8


def with_base(root: Node, log: ProblemLog, file_name: str, depth: int = 0) -> Node:
    """Return a description with the figures of its base; note defects.

    Raises `FormatError` for a base that is itself defective.
    """
    if not isinstance(root.data, Mapping) or "base" not in root.data:
        return root
    base = root.data["base"]
    line = base.key_line
    found = _base_of(base, log, file_name, depth)
    if found is None or not isinstance(found.data, Mapping):
        return root
    inherited = {key: _on_line(node, line) for key, node in found.data.items()}
    for key in ("name", "description", "overrides"):
        inherited.pop(key, None)
    merged = Node(root.line, {**inherited, **root.data})
    overrides = root.data.get("overrides")
    if overrides is None or not isinstance(overrides.data, Mapping):
        return merged
    for figure, value in overrides.data.items():
        merged = _replaced(merged, figure.split("."), value, figure, log)
    return merged


def _base_of(base: Node, log: ProblemLog, file_name: str, depth: int) -> Node | None:
    """Return the description that a base names, with that of its own base."""
    name = base.data
    if not isinstance(name, str):
        log.note("wrong_type", base.key_line, "base: must be the name of a shipped machine, or the "
                 f"path of a description, not {base.describe()}")  # fmt: skip
        return None
    if depth >= MAX_BASES:
        log.note("base", base.key_line, f"base: more than {MAX_BASES} descriptions on each other")
        return None
    if name in machine_names():
        content, path = shipped_text(name).encode(), f"{name}.yaml"
    elif name.endswith((".yaml", ".yml")) or "/" in name:
        path = str(FilePath(file_name).parent / name)
        try:
            content = read_bytes(FilePath(path))
        except OSError as error:
            log.note("base", base.key_line, f"base: cannot read {path!r}: {error.strerror}")
            return None
    else:
        near = closest(name, machine_names(), "; ")
        allowed = ", ".join(machine_names())
        log.note("base", base.key_line, f"base: there is no machine {name!r}{near}; shipped are "
                 f"{allowed}; a path ends in .yaml")  # fmt: skip
        return None
    found, own_log = read_yaml_bytes(content, path, "machine description")
    found = with_base(found, own_log, path, depth + 1)
    own_log.raise_any("machine description")
    return found


def _on_line(node: Node, line: int) -> Node:
    """Return a node of another file, whose defects count on a line of this one."""
    data = node.data
    if isinstance(data, Mapping):
        data = {key: _on_line(value, line) for key, value in data.items()}
    elif isinstance(data, tuple):
        data = tuple(_on_line(value, line) for value in data)
    return replace(node, line=line, key_line=line, data=data)


def _replaced(node: Node, words: list[str], value: Node, figure: str, log: ProblemLog) -> Node:
    """Return a description with the figure that `words` name below a node replaced."""
    if not words:
        return value
    data = node.data
    if isinstance(data, tuple):
        for index, path in enumerate(data):
            ends = path.data if isinstance(path.data, Mapping) else {}
            if [ends[key].raw for key in ("from", "to") if key in ends] == words[:2] != []:
                changed = _replaced(_without_rate(path, words[2:]), words[2:], value, figure, log)
                return replace(node, data=(*data[:index], changed, *data[index + 1 :]))
    elif isinstance(data, Mapping) and (words[0] in data or len(words) == 1):
        child = data.get(words[0], value)
        changed = _replaced(child, words[1:], value, figure, log)
        return replace(node, data={**data, words[0]: changed})
    keys = data if isinstance(data, Mapping) else ()
    near = closest(words[0], keys, "; ")
    log.note("unknown_key", value.key_line, f"overrides: there is no figure {figure!r}: "
             f"{words[0]!r} is not there{near}")  # fmt: skip
    return node


def _without_rate(path: Node, words: list[str]) -> Node:
    """Return a path without its rate, if `words` name another kind of rate that replaces it."""
    rates = {"bytes_per_second", "curve", "noc_links"}
    if len(words) != 1 or words[0] not in rates or not isinstance(path.data, Mapping):
        return path
    gone = rates if words[0] == "noc_links" else {*rates, "hops"}
    return replace(path, data={key: node for key, node in path.data.items() if key not in gone})
