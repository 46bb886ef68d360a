"""Modules in YAML: a computation graph that people write by hand.

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
      r: {space: l1}                    # placement options
      first: {value: v, shape: [64, 5]} # under another name; shape and type are checked if given

Inputs and outputs may carry the placement fields of `stitch.graph.PlacementOption`: space,
data_type (of storage), layout, memory_layout, shard_spec (`8x1,32x64`), address, and `alias` for
outputs. `init` kinds: randn(seed, mean, scale), uniform(seed, low, high), zeros, ones,
arange(start, step), constant(value); a seed left out is the CRC-32 of the parameter's name.
Operators are ONNX's (opset 26), others as `domain.Name(...)`. `outputs` may also be a list of
names.
"""

from __future__ import annotations

from pathlib import Path

from stitch.errors import LayoutError, StitchError, UsageError
from stitch.forms import (
    AsWritten,
    Choice,
    ElementType,
    Field,
    FieldType,
    FormValues,
    ListOf,
    Node,
    Pairs,
    ParseContext,
    Schema,
    Shape,
    SourceLocation,
    Word,
    as_written,
    form_text,
    is_word,
    read_yaml,
)
from stitch.frontend.yaml.module_operations import OperationReader
from stitch.frontend.yaml.module_parameters import parameter_array
from stitch.frontend.yaml.statement import NAME
from stitch.graph import (
    PLACEMENT_FIELDS,
    ComputationGraph,
    ComputationGraphBuilder,
    PlacementOption,
    Side,
)
from stitch.program import InputKind, Ownership


def load_module(path: str | Path) -> ComputationGraph:
    """The graph of a YAML file; raises `FormatError` listing every defect.

    Locations of operations are `file:line` of the YAML, without its folder.
    """
    place = Path(path)
    return module_from_text(form_text(place, "module", place.name), place.parent, place.name)


def module_from_text(text: str, folder: Path, file: str = "module.yaml") -> ComputationGraph:
    """The graph of a YAML text whose weight files lie in `folder`; raises `FormatError`."""
    root, log = read_yaml(text, file)
    graph = _ModuleReader(root, ParseContext(log, folder)).graph()
    log.raise_any("module")
    assert graph is not None, "what is missing has been noted"
    return graph


class _Requested(FieldType[str | int]):
    """A placement field as it is spelled; addresses may be numbers."""

    wanted = "a word"

    def value(self, node: Node, place: SourceLocation) -> str | int | None:
        is_number = isinstance(node.data, int) and not isinstance(node.data, bool)
        if place.key == "address" and is_number and isinstance(node.data, int):
            return node.data
        return Word().read(node, place)


_PLACEMENT = tuple(
    Field(key, _Requested())
    for key in ("space", "data_type", "layout", "memory_layout", "shard_spec", "address")
)
_INPUT = Schema(
    "input",
    as_written,
    Field("shape", Shape(), needed=True),
    Field("type", ElementType(), needed=True),
    Field("kind", Choice(tuple(kind.value for kind in InputKind)), default="activation"),
    Field("ownership", Choice(tuple(owner.value for owner in Ownership)), default="borrow"),
    *_PLACEMENT,
)
_OUTPUT = Schema(
    "output",
    as_written,
    Field("value", Word()),
    Field("shape", Shape()),
    Field("type", ElementType()),
    *_PLACEMENT,
    Field("alias", _Requested()),
)
_ENTRIES = Pairs(AsWritten(), "a mapping", by_position=False)
_MODULE = Schema(
    "a module",
    as_written,
    Field("name", Word(), default=ParseContext.stem),
    Field("inputs", _ENTRIES, default=()),
    Field("parameters", _ENTRIES, default=()),
    Field("operations", ListOf(AsWritten(), "a list of operations"), default=()),
    Field(
        "outputs",
        Pairs(AsWritten(), "a mapping or a list of names, at least one", least=1),
        needed=True,
        default=(),
    ),
)
MODULE_KEYS = _MODULE.keys


class _ModuleReader:
    """Reads one document into a builder."""

    def __init__(self, root: Node, reading: ParseContext) -> None:
        self.log = reading.log
        self.top = _MODULE.fields(root, reading.root)
        self.builder = ComputationGraphBuilder(self.top.values["name"])
        self.operations = OperationReader(self.builder, reading)

    def graph(self) -> ComputationGraph | None:
        for name, node in self.top.values["inputs"]:
            self._input(name, node)
        for name, node in self.top.values["parameters"]:
            self.operations.declare(name, node.line)
            array = parameter_array(node, self._entry("parameters", name, node))
            if array is not None:
                self.operations.define(name, self.builder.parameter(name, array))
        for node in self.top.values["operations"]:
            self.operations.read(node)
        for name, node in self.top.values["outputs"]:
            self._output(name, node)
        if self.log.problems:
            return None
        try:
            return self.builder.build()
        except StitchError as error:
            self.log.note_error("bad_module", self.top.place.line, error)
            return None

    def _entry(self, key: str, name: str, node: Node) -> SourceLocation:
        return self.top.place.at(key).entry(name, node)

    def _input(self, name: str, node: Node) -> None:
        self.operations.declare(name, node.line)
        fields = _INPUT.fields(node, self._entry("inputs", name, node))
        self._placement("input", name, fields)
        shape, data_type = fields.values["shape"], fields.values["type"]
        if shape is None or data_type is None:
            return
        role = InputKind(fields.values["kind"])
        owner = Ownership(fields.values["ownership"])
        try:
            with self.builder.at(f"{self.log.file}:{node.line}"):
                tensor = self.builder.input(name, shape, data_type, role, owner)
            self.operations.define(name, tensor)
        except StitchError as error:
            self.log.note_error("bad_input", node.line, error)

    def _output(self, name: str | None, node: Node) -> None:
        if name is None:
            if not is_word(node):
                self.log.note("bad_value", node.line, "outputs: a list holds names only")
                return
            name, node = node.raw, Node(node.line, None)
        fields = _OUTPUT.fields(
            Node(node.line, {}) if node.data is None else node, self._entry("outputs", name, node)
        )
        self._placement("output", name, fields)
        if NAME.fullmatch(name) is None:
            self.log.note("bad_name", node.line, f"{name!r} cannot be the name of an output")
        tensor = self.operations.value(fields.values["value"] or name, node.line)
        shape, data_type = fields.values["shape"], fields.values["type"]
        if tensor is None:
            return
        if shape not in (None, tensor.shape) or data_type not in (None, tensor.data_type):
            text = tensor.type.text()
            detail = f"output {name!r} is {text}, which is not the declared shape or type"
            self.log.note("wrong_type", node.line, detail)
        try:
            with self.builder.at(f"{self.log.file}:{node.line}"):
                self.builder.output(name, tensor)
        except StitchError as error:
            self.log.note_error("bad_output", node.line, error)

    def _placement(self, side: Side, name: str, fields: FormValues) -> None:
        for key in PLACEMENT_FIELDS[side]:
            spelled = fields.values[key]
            if spelled is None or key in ("kind", "ownership"):
                continue
            try:
                self.builder.place(PlacementOption(side, name, key, spelled))
            except (UsageError, LayoutError) as error:
                self.log.note_error("bad_placement", fields.place.at(key).line, error)
