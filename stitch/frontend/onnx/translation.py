"""ONNX models: a file or `ModelProto` of opset 1 to 28 becomes a computation graph.

Symbolic dimensions take the examples' sizes. An input whose data decides a shape becomes a constant
with the example's value, and the program checks at each run that it is given that value. Functions
are expanded, branches of constant conditions inlined, short loops written out; what data decide
becomes a choice or a loop that ends by data, and sequences become their tensors (`x[0]`, `x[1]`,
...). Sizes that depend on data, and types that Stitch lacks, are refused by name, all at once.
Importing this module needs the package onnx (an optional extra).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import numpy as np
import onnx

from stitch.errors import CompileError, FormatError, StitchError, UsageError, unknown
from stitch.frontend.onnx.control_flow import MAX_ROUNDS, UNROLLED_ROUNDS, Loops
from stitch.frontend.onnx.node_walk import Walk
from stitch.frontend.onnx.protos import OnnxModel, element_type, read_model
from stitch.frontend.onnx.values import NOTHING, Failed, Given, Scope, TensorList
from stitch.graph import (
    ComputationGraph,
    ComputationGraphBuilder,
    PlacementOption,
    SymbolicTensor,
    placement_of,
)
from stitch.linker import remove_dead_code
from stitch.program import COMMON_HINT, Array, DataType, Dim, SymbolicSizes, TensorDesc, ValueType

#: By input and axis, or the Dim of a dimension that the model names.
DynamicShapes = Mapping[str, Mapping[int, Dim] | Dim]


def dynamic_axes(
    declared: Mapping[str, tuple[Any, ...]], dynamic_shapes: DynamicShapes,
    shapes: Mapping[str, tuple[int | None, ...]],
) -> dict[str, dict[int, Dim]]:  # fmt: skip
    """Return the Dims of inputs by axis.

    Args:
        declared: By input, for each axis its size, its name, or anything else.
        dynamic_shapes: As of `stitch.compile`.
        shapes: Shapes of inputs as asked for, with None for sizes that are not.

    Raises:
        UsageError: A key is neither an input nor a dimension of the model, an axis does not exist
            or has a fixed size, or a dimension has no Dim, two, or a Dim and a
            size.
    """
    by_name: dict[str, Dim] = {}
    names = {key for axes in declared.values() for key in axes if isinstance(key, str)}
    found: dict[str, dict[int, Dim]] = {}
    for key, value in dynamic_shapes.items():
        if isinstance(value, Dim) and key in names:
            _add(by_name, key, value)
        elif key in names and key not in declared:
            raise UsageError(
                f"dynamic_shapes= gives dimension {key!r} of the model as a stitch.Dim",
                expected=f'stitch.Dim("{key}", 1, 64)',
                got=f"{type(value).__name__}: {value!r}"[:80],
            )  # fmt: skip
        elif key not in declared:
            unnamed = next(  # Such as "?", which is no name: each has a size of its own.
                ((name, axes.index(None)) for name, axes in declared.items() if None in axes), None
            )
            raise unknown(
                f"dynamic_shapes= names {key!r}, which is no input or free dimension of the model",
                key, (*declared, *sorted(names)),
                remedy=unnamed and "give dimensions without a name by input and axis: "
                f'{{"{unnamed[0]}": {{{unnamed[1]}: stitch.Dim("batch", 1, 64)}}}}',
            )  # fmt: skip
        elif isinstance(value, Mapping):
            found[key] = _axes(key, declared[key], value)
            for axis, dim in found[key].items():
                name = declared[key][axis]
                if isinstance(name, str):
                    _add(by_name, name, dim)
        else:
            raise UsageError(
                f"dynamic_shapes= gives the axes of input {key!r} as a mapping of axes to Dims",
                expected='{0: stitch.Dim("batch", 1, 64)}', got=repr(value)[:80],
            )  # fmt: skip
    for key, axes in declared.items():
        named = {i: by_name[n] for i, n in enumerate(axes) if isinstance(n, str) and n in by_name}
        for axis, dim in named.items():
            size = shapes[key][axis] if key in shapes else None
            if size is not None and axis not in found.get(key, {}):
                raise UsageError(
                    f"dimension {axes[axis]!r} of the model has bounds and a size",
                    where=f"axis {axis} of input {key!r}", expected=str(dim), got=str(size),
                )  # fmt: skip
        if named:
            found[key] = named | found.get(key, {})
    return found


def _axes(name: str, declared: tuple[Any, ...], given: Mapping[Any, Any]) -> dict[int, Dim]:
    axes: dict[int, Dim] = {}
    for axis, dim in given.items():
        if not (type(axis) is int and isinstance(dim, Dim)):
            raise UsageError(
                f"dynamic_shapes= gives the axes of input {name!r} as a mapping of axes to Dims",
                expected='{0: stitch.Dim("batch", 1, 64)}', got=repr(dict(given))[:80],
            )  # fmt: skip
        if not -len(declared) <= axis < len(declared):
            raise UsageError(f"dynamic_shapes= names axis {axis} of input {name!r}, which has "
                             f"{len(declared)} axes")  # fmt: skip
        if axis % len(declared) in axes:
            raise UsageError(f"dynamic_shapes= names axis {axis} of input {name!r} twice")
        size = declared[axis]
        if isinstance(size, int):
            raise UsageError(
                f"axis {axis} of input {name!r} has a fixed size in the model", expected=str(size),
                got=str(dim), remedy="export the model with a free dimension there",
            )  # fmt: skip
        axes[axis % len(declared)] = dim
    return axes


def _add(by_name: dict[str, Dim], name: str, dim: Dim) -> None:
    if by_name.setdefault(name, dim) != dim:
        raise UsageError(f"dimension {name!r} of the model has two Dims",
                         expected=str(by_name[name]), got=str(dim))  # fmt: skip


def example_shapes(
    declared: Mapping[str, tuple[Any, ...]], axes: Mapping[str, Mapping[int, Dim]],
    examples: Mapping[str, tuple[int, ...]], asked: Mapping[str, tuple[int | None, ...]],
) -> dict[str, tuple[int, ...]]:  # fmt: skip
    """Return shapes of the inputs without example that have Dims, and of those asked for.

    Inputs that have a size which is not known are left out.

    Args:
        declared: As for `dynamic_axes`.
        axes: The Dims of inputs by axis.
        examples: The shapes of examples by input.
        asked: Shapes of inputs as asked for, with None for sizes that are not.
    """
    sizes: dict[str, int] = {}
    for name, shape in (*examples.items(), *asked.items()):
        for axis, dim in axes.get(name, {}).items():
            if axis < len(shape) and (size := shape[axis]) is not None:
                sizes.setdefault(dim.name, size)
    shapes: dict[str, tuple[int, ...]] = {}
    for name, listed in declared.items():
        dims = axes.get(name, {})
        if name not in asked and (name in examples or not dims):
            continue
        wanted = [
            sizes.get(dims[i].name, max(dims[i].least, min(dims[i].most, COMMON_HINT)))
            if i in dims else size if fixed is None else fixed
            for i, (size, fixed) in enumerate(zip(
                listed, asked.get(name, (None,) * len(listed)), strict=True
            ))
        ]  # fmt: skip
        if all(isinstance(size, int) for size in wanted):
            shapes[name] = tuple(wanted)
    return shapes


# --------------------------------------------------------------------------------------------------
# Inputs of a graph

Examples = Sequence[Any] | Mapping[str, Any]
Shapes = Mapping[str, Sequence[int]]
#: A declared dimension: its size, its name, or nothing.
Dimension = int | str | None


@dataclass(frozen=True, slots=True)
class BoundInput:
    """An input: its type, the example that was given for it, and the placement options of its
    descriptor.
    """

    name: str
    type: ValueType
    example: Array | None = None
    placement: tuple[PlacementOption, ...] = ()


@dataclass(frozen=True, slots=True)
class _Declared:
    name: str
    data_type: DataType
    dimensions: tuple[Dimension, ...] | None


@dataclass(frozen=True, slots=True)
class _Given:
    shape: tuple[int, ...]
    data_type: DataType | None = None
    example: Array | None = None
    placement: tuple[PlacementOption, ...] = ()


def bind_inputs(
    graph: Any, examples: Examples, shapes: Shapes, title: str,
    axes: Mapping[str, Mapping[int, Dim]] = MappingProxyType({}),
) -> tuple[BoundInput, ...]:  # fmt: skip
    """The graph's inputs in order; those with an initializer only where an example names them.

    A symbolic dimension of an input without an example takes the size that the examples give to its
    name; names that are no identifiers (`?`, `-1`) are nobody's. Examples may give one name two
    sizes, as ONNX Runtime lets them. Raises `CompileError`, and `FormatError` for two
    inputs of one name. `axes` are the Dims of inputs by axis.
    """
    defaults = {tensor.name for tensor in graph.initializer}
    defaults |= {tensor.values.name for tensor in graph.sparse_initializer}
    named = set(examples) if isinstance(examples, Mapping) else set()
    wanted = [i for i in graph.input if i.name not in defaults or i.name in (named | set(shapes))]
    names = [info.name for info in wanted]
    twice = sorted(name for name, times in Counter(names).items() if times > 1)
    if twice:
        raise FormatError(f"two inputs are called {twice[0]!r}", where=title)
    _check_names(names, named | set(shapes), title)
    given = dict(examples) if isinstance(examples, Mapping) else _by_position(
        names, examples, title
    )  # fmt: skip
    problems: list[str] = []
    declared: list[_Declared] = []
    known: dict[str, _Given] = {}
    refused: set[str] = set()
    for info in wanted:
        try:
            one = _declared(info)
            declared.append(one)
            given_input = _given(one, given.get(info.name), shapes.get(info.name))
            if given_input is not None:
                known[info.name] = given_input
        except StitchError as error:
            refused.add(info.name)
            problems.append(_line(info.name, error))
    sizes, misfits = _sizes(declared, known), len(problems)
    bound = [
        _bound(one, known.get(one.name), sizes, axes.get(one.name, ()), problems)
        for one in declared if one.name not in refused
    ]  # fmt: skip
    if problems:
        raise CompileError(
            "the inputs of the model cannot be bound:\n  - " + "\n  - ".join(problems),
            where=title,
            remedy="run what reads such inputs with ONNX Runtime (onnx.utils.extract_model)"
            if len(declared) < len(wanted)
            else None
            if len(problems) == misfits
            else "give example inputs, or shapes: --input_shape NAME=1x3x224x224 "
            "(input_shapes={...} in Python); sizes that shall stay free: "
            'dynamic_shapes={"NAME": stitch.Dim("NAME", 1, 64)}',
        )
    return tuple(one for one in bound if one is not None)


def input_dimensions(model: str | Path | Any) -> dict[str, tuple[Dimension, ...]]:
    """Return the dimensions of the tensors that a model needs, by input: a number, the name of a
    size, or None. Inputs whose shape the model does not say have none."""
    graph = read_model(model).graph
    defaults = {tensor.name for tensor in graph.initializer}
    return {
        info.name: tuple(_dimension(d) for d in info.type.tensor_type.shape.dim)
        for info in graph.input
        if info.name not in defaults
    }


def _check_names(names: list[str], asked: set[str], title: str) -> None:
    others = sorted(asked - set(names))
    if others:
        what = f"the model has no input {others[0]!r}"
        raise unknown(what, others[0], names, CompileError, where=title, none="no inputs")


def _by_position(names: list[str], examples: Sequence[Any], title: str) -> dict[str, Any]:
    if examples and len(examples) != len(names):
        raise CompileError(
            f"{len(examples)} example inputs for a model of {len(names)}", where=title,
            expected=", ".join(names) or "none",
        )  # fmt: skip
    return dict(zip(names, examples, strict=False))


def _line(name: str, error: StitchError) -> str:
    got = f" (expected {error.expected}, got {error.got})" if error.got else ""
    return f"input {name!r}: {error.what}{got}"


def _declared(info: Any) -> _Declared:
    kind = info.type.WhichOneof("value")
    if kind != "tensor_type":
        spelled = str(kind or "no type").removesuffix("_type").replace("_", " ")
        if spelled in ("sequence", "optional"):
            raise CompileError(
                f"{spelled} values take the form of their example, which is lacking or no list"
            )
        raise CompileError(f"only tensors are supported, not {spelled}")
    tensor = info.type.tensor_type
    data_type = element_type(tensor.elem_type, "")
    if not tensor.HasField("shape"):
        return _Declared(info.name, data_type, None)
    dimensions = tuple(_dimension(d) for d in tensor.shape.dim)
    return _Declared(info.name, data_type, dimensions)


def _dimension(dim: Any) -> Dimension:
    if dim.HasField("dim_value"):
        return int(dim.dim_value) if dim.dim_value >= 0 else None
    # Exporters write "?" and "-1" for sizes that they do not know: two have nothing in common.
    return dim.dim_param if dim.dim_param.isidentifier() else None


def _given(declared: _Declared, example: Any, shape: Sequence[int] | None) -> _Given | None:
    """What the caller said of an input, checked against its declaration."""
    taken = None if example is None else _described(declared, example)
    if shape is not None:
        if None in shape:
            raise CompileError("None stands for a size that dynamic_shapes= names",
                               expected="numbers", got=str(list(shape)))  # fmt: skip
        asked = tuple(int(size) for size in shape)
        if taken is not None and taken.shape != asked:
            raise CompileError(
                "the example has another shape", expected=str(list(asked)),
                got=str(list(taken.shape)),
            )  # fmt: skip
        taken = taken or _Given(asked)
    if taken is None:
        return None
    if taken.data_type not in (None, declared.data_type):
        raise CompileError(
            "the example has another type", expected=declared.data_type.value,
            got=taken.data_type.value if taken.data_type else None,
        )  # fmt: skip
    dimensions = declared.dimensions
    if dimensions is not None and not (
        len(dimensions) == len(taken.shape)
        and all(
            size == wanted or not isinstance(wanted, int)
            for size, wanted in zip(taken.shape, dimensions, strict=True)
        )
    ):
        raise CompileError(
            "the shape does not fit", expected=_shape_text(dimensions), got=str(list(taken.shape))
        )
    return taken


def _described(declared: _Declared, example: Any) -> _Given:
    if isinstance(example, ValueType):
        return _Given(example.shape, example.data_type)
    if isinstance(example, TensorDesc):
        stored = example.layout.data_type
        logical = declared.data_type if stored.is_floating else stored
        return _Given(example.shape, logical, None, placement_of("input", declared.name, example))
    try:
        typed = hasattr(example, "dtype")
        array = np.asarray(example) if typed else np.asarray(example, declared.data_type.dtype)
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise CompileError(f"the example is no array: {error}") from error
    return _Given(array.shape, DataType.from_dtype(array.dtype), array)


def _sizes(declared: Sequence[_Declared], known: Mapping[str, _Given]) -> dict[str, set[int]]:
    """The sizes that examples give to each symbolic dimension."""
    sizes: dict[str, set[int]] = {}
    for one in declared:
        given = known.get(one.name)
        if given is None or one.dimensions is None:
            continue
        for dimension, size in zip(one.dimensions, given.shape, strict=True):
            if isinstance(dimension, str):
                sizes.setdefault(dimension, set()).add(size)
    return sizes


def _bound(
    declared: _Declared, given: _Given | None, sizes: Mapping[str, set[int]],
    named: Collection[int], problems: list[str],
) -> BoundInput | None:  # fmt: skip
    if given is not None:
        kind = ValueType(given.shape, declared.data_type)
        return BoundInput(declared.name, kind, given.example, given.placement)
    if declared.dimensions is None:
        problems.append(f"input {declared.name!r}: the model does not say its shape")
        return None
    shape: list[int] = []
    for axis, dimension in enumerate(declared.dimensions):
        known = sizes.get(dimension, set()) if isinstance(dimension, str) else set()
        if isinstance(dimension, int) or len(known) == 1:
            shape += [dimension] if isinstance(dimension, int) else known
            continue
        if axis in named:
            continue
        spelled = dimension or f"axis {axis}"
        several = f" (in other inputs it is {' and '.join(map(str, sorted(known)))})"
        problems.append(
            f"input {declared.name!r} {_shape_text(declared.dimensions)}: "
            f"dynamic dimension left unbound: {spelled}{several if known else ''}"
        )
    if len(shape) < len(declared.dimensions):
        return None
    return BoundInput(declared.name, ValueType(tuple(shape), declared.data_type))


def _shape_text(dimensions: Sequence[Dimension]) -> str:
    return "[" + ", ".join("?" if d is None else str(d) for d in dimensions) + "]"


#: For each input that is no plain tensor: the names of its tensors; None where it is left out.
Structures = Mapping[str, tuple[str, ...] | None]


@dataclass(frozen=True, slots=True)
class FlatInputs:
    """A graph's inputs as tensors: `graph` has the fields that binding asks of a `GraphProto`."""

    graph: Any
    examples: Examples
    structures: Structures = field(default_factory=dict)

    def value(self, name: str, tensors: Mapping[str, SymbolicTensor]) -> Given:
        """What an input that is no plain tensor stands for."""
        names = self.structures[name]
        return NOTHING if names is None else TensorList(tuple(tensors[one] for one in names))


def flat_inputs(graph: Any, examples: Examples) -> FlatInputs:
    """All inputs as tensors, as the examples have them; a graph of plain tensors stays as it is.

    A structure without an example stays too: binding refuses it by name.
    """
    if all(info.type.WhichOneof("value") == "tensor_type" for info in graph.input):
        return FlatInputs(graph, examples)
    defaults = {tensor.name for tensor in graph.initializer}
    infos = [info for info in graph.input if info.name not in defaults]
    if isinstance(examples, Mapping):
        given = dict(examples)
    elif len(examples) == len(infos):
        given = {info.name: value for info, value in zip(infos, examples, strict=True)}
    else:
        return FlatInputs(graph, examples)
    structures: dict[str, tuple[str, ...] | None] = {}
    inputs: list[Any] = []
    for info in graph.input:
        kind = info.type
        if kind.WhichOneof("value") == "optional_type" and info.name in given:
            kind = kind.optional_type.elem_type
            if given[info.name] is None:
                structures[info.name] = None
                del given[info.name]
                continue
        inputs += _tensors(info, kind, given, structures)
    flat = SimpleNamespace(
        input=inputs, initializer=graph.initializer, sparse_initializer=graph.sparse_initializer
    )
    return FlatInputs(flat, given, structures)


def _tensors(
    info: Any, kind: Any, given: dict[str, Any], structures: dict[str, tuple[str, ...] | None]
) -> list[Any]:
    """The tensors of one input; their examples take the place of its own."""
    example = given.get(info.name)
    form = kind.WhichOneof("value")
    if form == "tensor_type":
        return [onnx.ValueInfoProto(name=info.name, type=kind)]
    element = kind.sequence_type.elem_type if form == "sequence_type" else None
    listed = isinstance(example, Sequence) and not isinstance(example, str | bytes)
    if element is None or element.WhichOneof("value") != "tensor_type" or not listed:
        return [info]
    elements = []
    for index, value in enumerate(given.pop(info.name)):
        one = onnx.ValueInfoProto(name=f"{info.name}[{index}]")
        # Elements may differ in shape, so the declared one says nothing.
        one.type.tensor_type.elem_type = element.tensor_type.elem_type
        given[one.name] = value
        elements.append(one)
    structures[info.name] = tuple(one.name for one in elements)
    return elements


def flat_output(name: str, value: Given, where: str) -> list[tuple[str, SymbolicTensor]]:
    """The tensors of an output: itself, or `name[0]`, `name[1]`, ... of a sequence."""
    if isinstance(value, SymbolicTensor):
        return [(name, value)]
    if isinstance(value, TensorList):
        return [(f"{name}[{index}]", item) for index, item in enumerate(value.items)]
    raise CompileError("an output is an empty optional value, which no tensor stands for",
                       where=where)  # fmt: skip


#: An input that decides shapes holds sizes, axes or indices; larger ones are data.
MAX_DECIDING_ELEMENTS = 4096


def from_onnx(
    model: str | Path | Any,
    example_inputs: Examples = (),
    input_shapes: Shapes | None = None,
    unroll: int = UNROLLED_ROUNDS,
) -> ComputationGraph:
    """The graph of an ONNX model: a path or `ModelProto`.

    `example_inputs` are arrays, descriptors or types, by position or by name; `input_shapes` are
    shapes by name; loops of at most `unroll` rounds are written out. Raises `FormatError` for a
    file that is not sound (`IncompatibleError` for an opset or IR version), `CompileError` for what
    cannot be compiled.
    """
    read = read_model(model)
    flat = flat_inputs(read.graph, example_inputs)
    inputs = bind_inputs(flat.graph, flat.examples, input_shapes or {}, read.title)
    loops = Loops(unroll)
    try:
        return _translated(read, flat, inputs, loops)
    except CompileError:
        if loops.kept:
            # What comes after may have to know what a loop comes to.
            with suppress(CompileError):
                return _translated(read, flat, inputs, Loops(MAX_ROUNDS))
        raise


def from_onnx_dynamic(
    model: str | Path | Any, example_inputs: Examples, dynamic_shapes: DynamicShapes,
    input_shapes: Mapping[str, Sequence[int | None]] | None = None,
) -> tuple[ComputationGraph, SymbolicSizes]:  # fmt: skip
    """Return the graph of an ONNX model whose inputs have symbolic sizes, and the sizes.

    Inputs without an example take sizes within the bounds of `dynamic_shapes`, also where
    `input_shapes` has None. Raises as `from_onnx`, and `UsageError` for `dynamic_shapes` that do
    not fit the model's inputs.
    """
    read = read_model(model)
    flat = flat_inputs(read.graph, example_inputs)
    shapes = {name: tuple(shape) for name, shape in (input_shapes or {}).items()}
    _check_names([info.name for info in flat.graph.input], set(shapes), read.title)
    named = set(flat.examples) if isinstance(flat.examples, Mapping) else set()
    defaults = {tensor.name for tensor in read.graph.initializer}
    defaults -= named | set(shapes) | set(dynamic_shapes)
    declared: dict[str, tuple[Dimension, ...]] = {}
    for info in flat.graph.input:
        if info.name not in defaults and info.type.WhichOneof("value") == "tensor_type":
            given = shapes.get(info.name, ())
            dimensions = _declared(info).dimensions
            declared[info.name] = (None,) * len(given) if dimensions is None else dimensions
            if info.name in shapes and len(given) != len(declared[info.name]):
                raise UsageError(
                    f"the shape of input {info.name!r} has another number of axes than in the "
                    "model", where=read.title, expected=_shape_text(declared[info.name]),
                    got=_shape_text(given),
                )  # fmt: skip
    examples = flat.examples
    if not isinstance(examples, Mapping):
        examples = _by_position(list(declared), examples, read.title)
    known = {name: tuple(np.shape(value)) for name, value in examples.items()}
    axes = dynamic_axes({**known, **declared}, dynamic_shapes, shapes)
    sizes, hints = SymbolicSizes(axes), example_shapes(declared, axes, known, shapes)
    inputs = [
        replace(one, type=ValueType(sizes.shape_of(one.name, one.type.shape), one.type.data_type))
        for one in bind_inputs(flat.graph, examples, hints, read.title, axes)
    ]
    of_examples = {dim.name for name in known for dim in axes.get(name, {}).values()}
    assumed = {
        f"{dim.name}={hints[name][axis]}": None
        for name in hints
        for axis, dim in axes.get(name, {}).items()
        if dim.name not in of_examples
    }
    remedy = (
        f"{', '.join(assumed)} was assumed: pass example inputs of sizes at which the model runs, "
        "or numbers instead of named sizes"
    )
    graph = _translated(
        read, flat, inputs, Loops(MAX_ROUNDS), sizes, remedy if assumed else None
    )  # fmt: skip
    sizes.locate = lambda: read.title
    return graph, sizes


def _translated(
    read: OnnxModel, flat: FlatInputs, inputs: Sequence[BoundInput], loops: Loops,
    sizes: SymbolicSizes | None = None, remedy: str | None = None,
) -> ComputationGraph:  # fmt: skip
    fixed: set[str] = set()
    while True:
        walk = Walk(read, ComputationGraphBuilder(_name(read)), loops)
        if sizes is not None:
            sizes.reset(())
            sizes.locate = lambda builder=walk.builder: builder.location
        slots = _declared_type(walk, inputs)
        outputs = _walked(walk, inputs, fixed, slots, flat)
        wanted = [name for name in walk.dependencies.wanted if name not in fixed]
        if wanted:
            fixed.update(_fixable(inputs, wanted, walk, read))
            continue
        walk.refusals.raise_any(remedy)
        if not outputs:
            raise CompileError("all outputs of the model are empty sequences", where=read.title)
        checks = {one.name: one.example for one in inputs if one.name in fixed}
        graph = _built(walk.builder, outputs, checks, slots)
        # A loop that could not stay was begun as one.
        return remove_dead_code(graph) if loops.given_up else graph


def _name(model: OnnxModel) -> str:
    return str(model.graph.name) or Path(model.title).stem


def _declared_type(walk: Walk, inputs: Sequence[BoundInput]) -> dict[str, SymbolicTensor]:
    """The input slots by name."""
    builder, slots = walk.builder, {}
    for one in inputs:
        with builder.at(f"{walk.model.title}: input {one.name!r}"):
            slots[one.name] = builder.input(one.name, one.type.shape, one.type.data_type)
            builder.place(*one.placement)
        walk.dependencies.add_input(one.name, slots[one.name])
        walk.declared.bind(one.name, one.type.shape)
    return slots


def _walked(
    walk: Walk,
    inputs: Sequence[BoundInput],
    fixed: Collection[str],
    slots: Mapping[str, SymbolicTensor],
    flat: FlatInputs,
) -> list[tuple[str, SymbolicTensor]]:
    """All nodes; gives the outputs by name, without those that were refused."""
    graph, title = walk.model.graph, walk.model.title
    scope = Scope(walk.model.opsets)
    bound = {
        one.name: walk.builder.constant(one.example) if one.name in fixed else slots[one.name]
        for one in inputs
    }
    parts = {name for names in flat.structures.values() for name in names or ()}
    for one in inputs:
        if one.name not in parts:
            scope.define(one.name, bound[one.name], title)
    for name in flat.structures:
        scope.define(name, flat.value(name, bound), title)
    dense = [tensor for tensor in graph.initializer if tensor.name not in slots]
    scope.add_initializers(dense, graph.sparse_initializer)
    walk.nodes(graph.node, scope)
    if not graph.output:
        raise FormatError("the model has no outputs", where=title)
    outputs: list[tuple[str, SymbolicTensor]] = []
    for info in graph.output:
        where = f"{title}: output {info.name!r}"
        try:
            value = walk.look_up(info.name, scope, where)
            if value is None:
                raise FormatError("an output has no name", where=where)
            if not isinstance(value, Failed):
                outputs += flat_output(info.name, value, where)
        except StitchError as error:
            walk.refusals.failed(where, error)
    return outputs


def _fixable(
    inputs: Sequence[BoundInput], wanted: Sequence[str], walk: Walk, model: OnnxModel
) -> list[str]:
    """The wanted inputs, if each is one that may become a constant; else raises."""
    by_name: Mapping[str, BoundInput] = {one.name: one for one in inputs}
    lacking = [name for name in wanted if by_name[name].example is None]
    data = [name for name in wanted if not _may_decide(by_name[name])]
    if data:
        # The shape depends on what is computed, not on a setting: the operator's error says so.
        walk.refusals.raise_any()
    if lacking:
        raise CompileError(
            f"the values of {', '.join(map(repr, lacking))} decide shapes, so they must be known",
            where=model.title,
            remedy="give example inputs with these values, such as "
            f"stitch compile --input {lacking[0]}={by_name[lacking[0]].type.text()}=VALUES; the "
            "program then takes no others",
        )
    return list(wanted)


def _may_decide(one: BoundInput) -> bool:
    """Integers and flags, and numbers such as the bounds of a Range."""
    if one.type.data_type.is_floating:
        return len(one.type.shape) <= 1 and math.prod(one.type.shape) <= 16
    return math.prod(one.type.shape) <= MAX_DECIDING_ELEMENTS


def _built(
    builder: ComputationGraphBuilder,
    outputs: Sequence[tuple[str, SymbolicTensor]],
    checks: Mapping[str, Array | None],
    slots: Mapping[str, SymbolicTensor],
) -> ComputationGraph:
    """The graph; its smallest output passes through the checks of the fixed inputs."""
    smallest = min(range(len(outputs)), key=lambda i: _nbytes(outputs[i][1])) if checks else 0
    for index, (name, value) in enumerate(outputs):
        for fixed, array in checks.items() if index == smallest else ():
            with builder.at(f"input {fixed!r}"):
                value = builder.op(
                    "Expect", value, slots[fixed], array, domain="stitch", name=fixed
                )
        builder.output(name, value)
    return builder.build()


def _nbytes(tensor: SymbolicTensor) -> int:
    return tensor.size * tensor.data_type.itemsize
