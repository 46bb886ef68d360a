"""The schemas of operators that ONNX Runtime knows: by which version of its domain each is defined,
and which of its attributes are tensors.

A model imports one version of a domain, and an operator means what the newest definition that is
not newer says.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from functools import cache
from typing import Any

from onnxruntime.capi import onnxruntime_pybind11_state as library


@cache
def _definitions() -> Mapping[tuple[str, str], Mapping[int, Mapping[str, Any]]]:
    """By domain and name, the versions that define an operator anew, in rising order, each with the
    kinds of its attributes."""
    found: dict[tuple[str, str], dict[int, Mapping[str, Any]]] = {}
    for schema in library.get_all_operator_schema():
        kinds = {name: attribute.type for name, attribute in schema.attributes.items()}
        found.setdefault((schema.domain, schema.name), {})[int(schema.since_version)] = kinds
    return {key: dict(sorted(versions.items())) for key, versions in found.items()}


def draws_random_numbers(op: str, domain: str) -> bool:
    """Whether an operator's results differ from run to run."""
    # Whole numbers are the seeds of hash functions.
    real = library.schemadef.OpSchema.AttrType.FLOAT
    versions = _definitions().get((domain, op), {})
    return any(kinds.get("seed") == real for kinds in versions.values())


def is_tensor_attribute(op: str, domain: str, version: int, name: str) -> bool:
    """Whether an attribute of an operator, as this version defines it, is a tensor.

    >>> is_tensor_attribute("LabelEncoder", "ai.onnx.ml", 4, "keys_tensor")
    True
    """
    kinds = _definitions().get((domain, op), {}).get(version, {})
    return bool(kinds.get(name) == library.schemadef.OpSchema.AttrType.TENSOR)


def defining_version(op: str, domain: str, opset: int) -> int:
    """The version that defines an operator as of an opset of its domain; 0 where none does.

    >>> defining_version("LabelEncoder", "ai.onnx.ml", 3), defining_version("Nothing", "", 20)
    (2, 0)
    """
    versions = list(_definitions().get((domain, op), {}))
    index = bisect_right(versions, opset)
    return versions[index - 1] if index else 0
