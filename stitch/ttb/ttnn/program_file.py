"""A whole TTNN binary: its version first, then all of it verified, then its parts read.

Raises `FormatError` with every defect, `IncompatibleError` for a version whose order of fields is
not known, which names those that are; nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from stitch.errors import FormatError, StitchError
from stitch.flatbuffer import (
    FieldSpec,
    ForeignFile,
    ProblemList,
    Record,
    Release,
    Schema,
    TableSpec,
    unknown_order,
    verified,
    whole_file,
)
from stitch.machine import Machine, system_chips
from stitch.ttb.binary import Binary, Origin
from stitch.ttb.ttnn.counterparts import Counterparts
from stitch.ttb.ttnn.field_history import HASHED_SINCE, TtnnSchema, known_versions, schema_of
from stitch.ttb.ttnn.file_format import FORMAT
from stitch.ttb.ttnn.opaque_programs import ProgramReader, ReadProgram

_REMEDY = "copy the file again from where it was made; it is damaged"
#: What stands in every version: its number, and the hash of its schema (once, of its commit).
_PEEK = Schema(
    "root",
    {
        "root": TableSpec(
            "root",
            (
                FieldSpec(0, "version", "struct", "HHI", required=True),
                FieldSpec(1, "hash", "string", limit=1024),
            ),
        )
    },
    {},
)


def read_ttnn(file: memoryview, where: str) -> Binary:
    """The programs of a file; `where` is its name for errors."""
    data = whole_file(file, where, FORMAT)
    numbers, digest = verified(data, where, _PEEK, FORMAT)
    version = Release(*numbers)
    schema = schema_of(version, digest)
    if schema is None:
        is_hashed = version >= Release(0, 0, HASHED_SINCE)
        got = f"{version}, schema {digest[:16] or 'without a hash'}" if is_hashed else str(version)
        raise unknown_order(FORMAT, where, got, _known())
    root = verified(data, where, schema.schema, FORMAT)
    problems = ProblemList()
    try:
        binary = _binary(schema, root, problems, len(data))
    except FormatError as error:
        error.where = where
        raise
    what = "the contents of the TTNN binary do not fit together"
    problems.raise_if_any(what, where=where, remedy=_REMEDY)
    assert binary is not None, "neither a binary nor a problem"
    return binary


def _known() -> str:
    first, last = known_versions()
    return (
        f"version {first} to {last}, as tt-mlir's main branch had them (from 0.0.{HASHED_SINCE} on "
        "by the hash of the schema)"
    )


def _binary(schema: TtnnSchema, root: Record, problems: ProblemList, nbytes: int) -> Binary | None:
    said = schema.schema.named("TTNNBinary", root)
    lacking = Counterparts()
    machine = _machine(schema, said, lacking)
    reader = ProgramReader(schema, machine.shape, problems, lacking)
    read = [reader.read(record, i) for i, record in enumerate(said["programs"])]
    if problems.count:
        return None
    shown: list[ReadProgram] = [one for one in read if one is not None]
    shown.sort(key=lambda one: one.is_private)  # What others call stands behind.
    version, commit = Release(*said["version"]), said["ttmlir_git_hash"]
    lives = tuple(life for one in shown for life in one.lives)
    origin = Origin("TTNN", str(version), commit, machine, lacking.lines(), lives, nbytes)
    producer = f"tt-mlir {commit[:12] or 'of an unknown commit'}"
    try:
        programs = tuple(one.program for one in shown)
        return Binary(programs, machine.shape, producer, origin=origin)
    except StitchError as error:
        problems.add("binary", "TTNNBinary", " ".join(str(error).split()))
        return None


def _machine(schema: TtnnSchema, said: Mapping[str, Any], lacking: Counterparts) -> Machine:
    """The machine of the first chip, called by its architecture: it is no device of a name."""
    # Of a release, as descriptors count them: branches have schemas of the main one's commits.
    file = ForeignFile(Release(0, 0, schema.release), schema.schema, ())
    system = file.named("SystemDesc", said["system_desc"])
    first, *others = system_chips(file, system, "system_desc")
    if others:
        lacking.add(f"of {len(others) + 1} chips the first is shown", "system descriptor")
    return replace(first.machine, shape=replace(first.machine.shape, name=first.architecture))
