"""Modules in YAML: a computation graph that people write by hand.

Comes in: the path of a YAML file. Goes out: a `ComputationGraph`, or one `FormatError` that lists
every defect with file and line, what is allowed, and the closest match. Must not know: machines.

The form::

    name: features                      # the file's name without suffix, if absent
    inputs:
      x: {shape: [64, 64], type: float32, space: l1, layout: tile}
      s: {shape: [64], type: float32, kind: state, ownership: donate}
    parameters:                         # constants of the graph
      w: {file: weights.npz, name: w1}  # .npy, .npz, .safetensors; relative to the YAML file
      b: {shape: [48], type: float32, init: {kind: randn, seed: 0, scale: 0.1}}
      z: {shape: [48], init: zeros}     # type is float32 if absent
      k: {values: [1, 0], type: int64}
    operations:                         # in the order in which they run
      - h = Gemm(x, w, b, transB=1)
      - v, i = TopK(h, [5], axis=-1)    # several results; `_` drops one
      - y = Reshape(h, [1, -1])         # a list of whole numbers is an int64 constant
      - t = Add(y, 1.0)                 # a number takes the first tensor's type
      - c = Clip(t, _, 6.0)             # `_` is an operand that is not there
      - u = Cast(c, to=float16)         # data types by name
      - {op: Relu, inputs: [u], outputs: [r], attributes: {}, domain: ""}    # the long form
    outputs:
      r: {space: l1}                    # placement wishes
      first: {value: v, shape: [64, 5]} # under another name; shape and type are checked if given

Inputs and outputs may carry the placement fields of `stitch.graph.Wish`: space, data_type (of
storage), layout, memory_layout, shard_spec (`8x1,32x64`), address, and `alias` for outputs.
`init` kinds: randn(seed, mean, scale), uniform(seed, low, high), zeros, ones, arange(start, step),
constant(value); a seed left out is the CRC-32 of the parameter's name. Operators are ONNX's
(opset 26), others as `domain.Name(...)`. `outputs` may also be a list of names.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

from stitch.errors import FormatError, LayoutError, StitchError, UsageError, closest
from stitch.files import read_text
from stitch.forms import Fields, Node, ProblemLog, read_yaml
from stitch.frontend.yaml.module_operations import OperationReader
from stitch.frontend.yaml.module_parameters import parameter_array
from stitch.frontend.yaml.statement import NAME
from stitch.graph import WISH_FIELDS, ComputationGraph, ComputationGraphBuilder, Side, Wish
from stitch.program import InputKind, Ownership

MODULE_KEYS = ("name", "inputs", "parameters", "operations", "outputs")
_PLACEMENT = ("space", "data_type", "layout", "memory_layout", "shard_spec", "address")
_INPUT_KEYS = ("shape", "type", "kind", "ownership", *_PLACEMENT)
_OUTPUT_KEYS = ("value", "shape", "type", *_PLACEMENT, "alias")


def load_module(path: str | Path) -> ComputationGraph:
    """The graph of a YAML file; raises `FormatError` listing every defect.

    Locations of operations are `file:line` of the YAML, without its folder.
    """
    place = Path(path)
    try:
        text = read_text(place)
    except OSError as error:
        raise FormatError(f"cannot read the module: {error.strerror}", where=place.name) from error
    except UnicodeDecodeError as error:
        raise FormatError(f"not YAML: it is no UTF-8 text ({error})", where=place.name) from error
    return module_from_text(text, place.parent, place.name)


def module_from_text(text: str, folder: Path, file: str = "module.yaml") -> ComputationGraph:
    """The graph of a YAML text whose weight files lie in `folder`; raises `FormatError`."""
    root, log = read_yaml(text, file)
    graph = _ModuleReader(root, folder, log).graph()
    log.raise_any("module")
    assert graph is not None, "what is missing has been noted"
    return graph


class _ModuleReader:
    """Reads one document into a builder."""

    def __init__(self, root: Node, folder: Path, log: ProblemLog) -> None:
        self.log = log
        self.folder = folder
        self.top = Fields(root, "a module", log)
        self.top.only(MODULE_KEYS)
        name = self.top.text("name") or Path(log.file).stem
        self.builder = ComputationGraphBuilder(name)
        self.operations = OperationReader(self.builder, log)

    def graph(self) -> ComputationGraph | None:
        for name, node in Fields(self.top.get("inputs"), "inputs", self.log).items():
            self._input(name, Fields(node, f"input {name!r}", self.log))
        for name, node in Fields(self.top.get("parameters"), "parameters", self.log).items():
            self._parameter(name, Fields(node, f"parameter {name!r}", self.log))
        self._operations()
        self._outputs()
        if self.log.problems:
            return None
        try:
            return self.builder.build()
        except StitchError as error:
            self.log.note_error("bad_module", self.top.line, error)
            return None

    def _input(self, name: str, fields: Fields) -> None:
        self.operations.declare(name, fields.line)
        fields.only(_INPUT_KEYS)
        shape, kind = fields.shape("shape", required=True), fields.data_type("type", required=True)
        role = _word(fields, "kind", {k.value: k for k in InputKind}, InputKind.ACTIVATION)
        owner = _word(fields, "ownership", {o.value: o for o in Ownership}, Ownership.BORROW)
        self._wishes("input", name, fields)
        if shape is None or kind is None:
            return
        try:
            with self.builder.at(f"{self.log.file}:{fields.line}"):
                tensor = self.builder.input(name, shape, kind, role, owner)
            self.operations.define(name, tensor)
        except StitchError as error:
            self.log.note_error("bad_input", fields.line, error)

    def _parameter(self, name: str, fields: Fields) -> None:
        self.operations.declare(name, fields.line)
        array = parameter_array(name, fields, self.folder)
        if array is not None:
            self.operations.define(name, self.builder.parameter(name, array))

    def _operations(self) -> None:
        node = self.top.get("operations")
        if node is None:
            return
        if not isinstance(node.data, tuple):
            self.top.wrong("operations", "a list of operations")
            return
        for item in node.data:
            self.operations.read(item)

    def _outputs(self) -> None:
        node = self.top.get("outputs")
        if node is None or not node.data:
            self.top.wrong("outputs", "a mapping or a list of names, at least one")
            return
        if isinstance(node.data, tuple):
            for item in node.data:
                if isinstance(item.data, tuple | Mapping) or not item.raw:
                    self.log.note("bad_value", item.line, "outputs: a list holds names only")
                    continue
                self._output(item.raw, Fields(None, f"output {item.raw!r}", self.log), item.line)
            return
        for name, item in Fields(node, "outputs", self.log).items():
            fields = Fields(item if item.data is not None else None, f"output {name!r}", self.log)
            self._output(name, fields, item.line)

    def _output(self, name: str, fields: Fields, line: int) -> None:
        fields.only(_OUTPUT_KEYS)
        self._wishes("output", name, fields)
        if NAME.fullmatch(name) is None:
            self.log.note("bad_name", line, f"{name!r} cannot be the name of an output")
        tensor = self.operations.value(fields.text("value") or name, line)
        shape, kind = fields.shape("shape"), fields.data_type("type")
        if tensor is None:
            return
        found = tensor.type
        if shape not in (None, found.shape) or kind not in (None, found.data_type):
            detail = f"output {name!r} is {found.text()}, which is not the declared shape or type"
            self.log.note("wrong_type", fields.line, detail)
        try:
            with self.builder.at(f"{self.log.file}:{line}"):
                self.builder.output(name, tensor)
        except StitchError as error:
            self.log.note_error("bad_output", line, error)

    def _wishes(self, side: Side, name: str, fields: Fields) -> None:
        for key in WISH_FIELDS[side]:
            node = fields.get(key)
            if node is None or key in ("kind", "ownership"):
                continue
            address = key == "address" and isinstance(node.data, int)
            spelled = node.data if address and isinstance(node.data, int) else fields.text(key)
            if spelled is None:
                continue
            try:
                self.builder.wish(Wish(side, name, key, spelled))
            except (UsageError, LayoutError) as error:
                self.log.note_error("bad_wish", node.line, error)


_T = TypeVar("_T")


def _word(fields: Fields, key: str, choices: Mapping[str, _T], otherwise: _T) -> _T:
    word = fields.text(key)
    if word is None:
        return otherwise
    if word not in choices:
        near = closest(word, choices)
        fields.wrong(key, f"one of {', '.join(choices)}" + (f" ({near})" if near else ""))
    return choices.get(word, otherwise)
