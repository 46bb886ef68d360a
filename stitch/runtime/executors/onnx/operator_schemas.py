"""The schemas of operators that ONNX Runtime knows: by which version of its domain each is defined.

A model imports one version of a domain, and an operator means what the newest definition that is
not newer says.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from functools import cache

from onnxruntime.capi import onnxruntime_pybind11_state as library


@cache
def _definitions() -> tuple[Mapping[tuple[str, str], list[int]], frozenset[tuple[str, str]]]:
    """By domain and name, the versions that define an operator anew, in rising order; and the
    operators that take the seed of random numbers."""
    found: dict[tuple[str, str], list[int]] = {}
    seeded = set()
    for schema in library.get_all_operator_schema():
        key = (schema.domain, schema.name)
        found.setdefault(key, []).append(int(schema.since_version))
        seed = schema.attributes.get("seed")
        # Whole numbers are the seeds of hash functions.
        if seed is not None and seed.type == library.schemadef.OpSchema.AttrType.FLOAT:
            seeded.add(key)
    return {key: sorted(versions) for key, versions in found.items()}, frozenset(seeded)


def draws_random_numbers(op: str, domain: str) -> bool:
    """Whether an operator's results differ from run to run."""
    return (domain, op) in _definitions()[1]


def defining_version(op: str, domain: str, opset: int) -> int:
    """The version that defines an operator as of an opset of its domain; 0 where none does.

    >>> defining_version("LabelEncoder", "ai.onnx.ml", 3), defining_version("Nothing", "", 20)
    (2, 0)
    """
    versions = _definitions()[0].get((domain, op), [])
    index = bisect_right(versions, opset)
    return versions[index - 1] if index else 0
