"""The JSON of a compiled model, read back: every field checked before anything is made of it.

Comes in: text. Goes out: `ModelParts`, or a `FormatError` that says what is wrong. A version says
how the fields are meant; a text without one is of version 1. Must not know: devices, compiling.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from stitch.compiler import CompileOptions
from stitch.errors import FormatError, Problem, UsageError
from stitch.graph import (
    ComputationGraph,
    JsonObject,
    from_json,
    objects_without_duplicates,
    parse_wish,
)
from stitch.program import MathFidelity, Role
from stitch.ttb import Binary
from stitch.ttb import load as load_binary

if TYPE_CHECKING:  # It loads when it is asked for: few processes train.
    from stitch.training import CompiledTraining, SearchResult

VERSION = 1
#: The fields of a model's JSON that are always there, beside its graph; and those that may be.
_FIELDS = ("stitch", "target", "name", "role", "wishes")
_MORE = ("version", "math_fidelity", "programs", "training", "search")


@dataclass(frozen=True, slots=True)
class ModelParts:
    """What a model is made of; one for inference has neither binary nor training."""

    graph: ComputationGraph
    target: str
    options: CompileOptions
    binary: Binary | None = None
    training: CompiledTraining | None = None
    search_result: SearchResult[Any] | None = None


def read_model(text: str) -> ModelParts:
    """The parts of a model that was dumped; raises `FormatError` for any other text."""
    try:
        body = json.loads(text, object_pairs_hook=objects_without_duplicates)
        graph_text = json.dumps(body.get("graph") if isinstance(body, dict) else None)
    except (RecursionError, ValueError) as error:
        raise _no_model(_not_json(text, error)) from error
    problems: list[Problem] = []
    root = JsonObject(body, "model", problems)
    if isinstance(body, dict) and body.get("stitch") == "model":
        _check_version(body.get("version", VERSION))
    root.refuse_other_keys((*_FIELDS, "graph", *_MORE))
    name, target, wishes = root.text("name"), root.text("target"), root.texts("wishes")
    role = root.choice("role", {role.value: role for role in Role}, Role.FORWARD)
    fidelity = MathFidelity.BY_TYPE
    if root.get("math_fidelity") is not None:
        fidelity = root.choice("math_fidelity", {f.value: f for f in MathFidelity}, fidelity)
    if root.text("stitch") != "model" or problems:
        raise _no_model("its fields are not those that dump writes", tuple(problems))
    graph = from_json(graph_text)
    try:
        options = CompileOptions(
            wishes=tuple(map(parse_wish, wishes)), name=name, role=role, math_fidelity=fidelity
        )
        parts = _parts(graph, target, options, root)
    except (RecursionError, UsageError) as error:
        raise _no_model(str(error)) from error
    if problems or parts is None:
        raise _no_model("its fields are not those that dump writes", tuple(problems))
    return parts


def _parts(
    graph: ComputationGraph, target: str, options: CompileOptions, root: JsonObject
) -> ModelParts | None:
    """The parts; None where a defect was noted."""
    has_training, has_search = "training" in root, "search" in root
    if not has_training and not has_search:
        return ModelParts(graph, target, options)
    from stitch.training import CompiledTraining, InferenceGraphs, SearchResult

    if not has_training:
        found = SearchResult.from_record(root.record("search"), InferenceGraphs(graph))
        return ModelParts(graph, target, options, search_result=found)
    data = root.data("programs")
    if data is None:
        return None
    binary = load_binary(data)
    search = root.record("search") if has_search else None
    training = CompiledTraining.from_record(root.record("training"), binary.programs, graph, search)
    if training is None:
        return None
    return ModelParts(graph, target, options, binary, training, training.search_result)


def _check_version(version: object) -> None:
    if version != VERSION or isinstance(version, bool):
        raise FormatError(
            "this JSON of a compiled model is of a version that is not read here",
            expected=f"version {VERSION}", got=f"version {version!r}"[:100],
            remedy="read it with the Stitch that wrote it, and dump it there for this one",
        )  # fmt: skip


def _not_json(text: str, error: Exception) -> str:
    end = isinstance(error, json.JSONDecodeError) and error.pos >= len(text.rstrip()) > 0
    if end or "Unterminated" in str(error):
        return f"it ends in the middle, after {len(text)} characters"
    return f"it is no JSON, or nested too deeply ({error})"


def _no_model(why: str, problems: tuple[Problem, ...] = ()) -> FormatError:
    return FormatError(f"this is no JSON of a compiled model: {why}", problems=problems,
                       remedy="write it with CompiledModel.dump")  # fmt: skip
