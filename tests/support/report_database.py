"""The database of a folder for ttnn-visualizer, read back."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

COPIES = ("copy", "evict", "return", "move", "bounce", "write")


def rows(folder: Path, query: str) -> list[Any]:
    with sqlite3.connect(folder / "db.sqlite") as database:
        found = database.execute(query).fetchall()
    database.close()
    return found


def copies_told(folder: Path) -> tuple[int, int]:
    """Copies and their bytes, as the arguments of operations say."""
    named = dict(rows(folder, "SELECT operation_id, name FROM operations"))
    given = rows(folder, "SELECT operation_id, name, value FROM operation_arguments")
    nbytes = {i: int(value) for i, name, value in given if name == "nbytes"}
    many = {i: int(value) for i, name, value in given if name == "tensors"}
    moving = [i for i, name in named.items() if name in COPIES]
    return sum(many.get(i, 1) for i in moving), sum(nbytes[i] for i in moving)


def check_references(folder: Path) -> None:
    """Every tensor and operation that a row names is there, and every output lies in a buffer."""
    for table in ("input_tensors", "output_tensors"):
        for column, of in (("tensor_id", "tensors"), ("operation_id", "operations")):
            query = f"SELECT * FROM {table} WHERE {column} NOT IN (SELECT {column} FROM {of})"
            assert rows(folder, query) == []
    lost = rows(
        folder,
        "SELECT o.operation_id, t.address FROM output_tensors o JOIN tensors t USING (tensor_id) "
        "WHERE t.address IS NOT NULL AND NOT EXISTS (SELECT 1 FROM buffers b "
        "WHERE b.operation_id = o.operation_id AND b.buffer_type = t.buffer_type "
        "AND t.address >= b.address AND t.address < b.address + b.max_size_per_bank)",
    )
    assert lost == []
