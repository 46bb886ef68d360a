"""The optimised form: what ONNX Runtime makes of a form, read back from it.

Comes in: an ONNX form. Goes out: the graph that ONNX Runtime would run. It gives that away only as
a file, which is written to a temporary folder and read at once. Large constants that it leaves as
they are stay the arrays that they were. Must not know programs.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
from onnx import helper, numpy_helper

from stitch.errors import CompileError
from stitch.program import Array
from stitch.runtime.executors.host import as_bytes
from stitch.runtime.executors.onnx.form_writer import EMBEDDED_NBYTES, OnnxForm, all_nodes
from stitch.runtime.executors.onnx.session import write_optimised

_MODEL, _CONSTANTS = "model.onnx", "constants"


@dataclass(frozen=True, slots=True, eq=False)
class OptimisedForm:
    """A graph, its large constants by name, and the versions of the operators' domains.

    The graph's inputs and outputs have the names that they have in `form`.
    """

    form: OnnxForm
    graph: onnx.GraphProto
    weights: Mapping[str, Array]
    opsets: Mapping[str, int]


def optimised_form(form: OnnxForm) -> OptimisedForm:
    """What ONNX Runtime makes of a form; raises one of `REFUSALS` for what it cannot run."""
    try:
        return _optimised(form)
    except OSError as error:
        raise CompileError(
            "what ONNX Runtime makes of it cannot be written to a temporary file",
            got=str(error),
            remedy="set TMPDIR to a folder with room for the program's constants",
        ) from error


def _optimised(form: OnnxForm) -> OptimisedForm:
    with tempfile.TemporaryDirectory(prefix="stitch-") as name:
        folder = Path(name)
        write_optimised(form, str(folder / _MODEL), _CONSTANTS, EMBEDDED_NBYTES + 1)
        model = onnx.load(folder / _MODEL, load_external_data=False)
        if model.functions:
            raise CompileError("what ONNX Runtime makes of it has functions of its own")
        given, weights = dict(form.weights), {}
        initializers = model.graph.initializer
        for tensor in (t for t in initializers if _is_outside(t)):
            weights[tensor.name] = _read(tensor, folder, given.get(tensor.name))
        for tensor in _inner_tensors(model.graph):
            if _is_outside(tensor):
                tensor.CopyFrom(numpy_helper.from_array(_read(tensor, folder, None), tensor.name))
    kept = [tensor for tensor in initializers if tensor.name not in weights]
    del initializers[:]
    initializers.extend(kept)
    _make_outputs(model.graph, weights)
    return OptimisedForm(form, model.graph, weights, _opsets(model))


def plain_form(form: OnnxForm) -> OptimisedForm:
    """A form without large constants as it is, for one that is not optimised."""
    model = onnx.load_from_string(form.model)
    return OptimisedForm(form, model.graph, {}, _opsets(model))


def _opsets(model: onnx.ModelProto) -> dict[str, int]:
    """The versions of the domains that the model's nodes are of."""
    return {opset.domain: opset.version for opset in model.opset_import}


def _make_outputs(graph: onnx.GraphProto, weights: dict[str, Array]) -> None:
    """Nodes for those outputs that have become constants."""
    small = {tensor.name: tensor for tensor in graph.initializer}
    for name in [output.name for output in graph.output]:
        constant = f"{name}.constant"
        if name in weights:
            weights[constant] = weights.pop(name)
        elif name in small:
            small[name].name = constant
        else:
            continue
        for node in all_nodes(graph.node):
            node.input[:] = [constant if each == name else each for each in node.input]
        graph.node.append(helper.make_node("Identity", [constant], [name]))


def _is_outside(tensor: onnx.TensorProto) -> bool:
    return bool(tensor.data_location == onnx.TensorProto.EXTERNAL)


def _inner_tensors(graph: onnx.GraphProto) -> Iterator[onnx.TensorProto]:
    """The constants of bodies inside a graph."""
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                yield from attribute.g.initializer
                yield from _inner_tensors(attribute.g)


def _read(tensor: onnx.TensorProto, folder: Path, given: Array | None) -> Array:
    """The elements of a constant: the array that was given where it has the same bytes."""
    facts = {entry.key: entry.value for entry in tensor.external_data}
    dtype = helper.tensor_dtype_to_np_dtype(tensor.data_type)
    count, offset = int(np.prod(tensor.dims, dtype=np.int64)), int(facts.get("offset", 0))
    data = np.fromfile(folder / facts["location"], dtype, count, offset=offset)
    data = data.reshape(tuple(tensor.dims))
    alike = given is not None and (given.dtype, given.shape) == (data.dtype, data.shape)
    return given if given is not None and alike and _bytes_equal(given, data) else data


def _bytes_equal(one: Array, other: Array) -> bool:
    return np.array_equal(as_bytes(one), as_bytes(other))
