"""Named sizes of an ONNX model's inputs: which axes have which `Dim`, and example shapes for them.

A model may name its free dimensions (`dim_param`); axes of one name have one size.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stitch.errors import UsageError, unknown
from stitch.program import COMMON_HINT, Dim

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
            raise unknown(f"dynamic_shapes= names {key!r}, which is no input or free dimension of "
                          "the model", key, (*declared, *sorted(names)), UsageError)  # fmt: skip
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
