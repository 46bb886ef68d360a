"""Sizes of modules with named sizes and of ONNX models, from `--input` and `--at`."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from stitch.api import DynamicModel
from stitch.cli.module_files import Dimensions
from stitch.cli.options import INPUT_FORM
from stitch.cli.run_inputs import (
    SlotNames,
    assign,
    find_archived,
    is_archive,
    is_array_text,
    parse_array,
    split_slots,
)
from stitch.errors import UsageError, closest
from stitch.forms import read_array_file


def parse_sizes(texts: Sequence[str]) -> dict[str, int]:
    """Return the sizes of `--at` values.

    Raises:
        UsageError: A value has another form, or names a size again.

    >>> parse_sizes(["batch=7,length=3"])
    {'batch': 7, 'length': 3}
    """
    sizes: dict[str, int] = {}
    for text in texts:
        for part in text.split(","):
            name, _, number = part.partition("=")
            if not number.isdecimal() or not number.isascii() or len(number) > 19:
                raise UsageError("--at takes sizes", expected="NAME=N[,NAME=N]", got=text[:80])
            if name in sizes:
                raise UsageError(f"--at gives size {name!r} twice")
            sizes[name] = int(number)
    return sizes


def sizes_for(
    model: DynamicModel, path: str, label: str, inputs: Sequence[str], asked: Mapping[str, int],
    modules: Sequence[str],
) -> dict[str, int]:  # fmt: skip
    """Return the sizes at which a module runs: those asked for, and those of its inputs' shapes.

    Args:
        model: The module.
        path: Its file, one of `modules`.
        label: Its name in `MODULE.SLOT`.
        inputs: The values of `--input`.
        asked: The values of `--at`, which may be sizes of other modules.
        modules: The files of the run.

    Raises:
        UsageError: A size is unknown, two inputs disagree, or a shape contradicts `--at`.
    """
    slots = [slot.name for slot in model.program.graph.inputs]
    names = model.program.sizes.dims
    known = model.sizes_of(_shapes(slots, path, label, inputs, modules))
    for name in names:
        if name in asked and known.setdefault(name, asked[name]) != asked[name]:
            raise UsageError(f"--at={name}={asked[name]} contradicts an --input", where=path,
                             got=f"{name} = {known[name]}")  # fmt: skip
    missing = [name for name in names if name not in known]
    if missing:
        got = ", ".join(f"{d.name}: {d.least} to {d.most}" for d in names.values())
        raise _unknown_sizes(f"the program of {path} has named sizes", missing, got, asked, names)
    return known


def shapes_for(
    dimensions: Dimensions, path: str, label: str,
    inputs: Sequence[str], asked: Mapping[str, int], modules: Sequence[str],
) -> dict[str, tuple[int, ...]]:  # fmt: skip
    """Return the shapes of the inputs of an ONNX model that `--input` or `--at` gives.

    Args:
        dimensions: Its inputs; the others are those of `sizes_for`.

    Raises:
        UsageError: A shape contradicts `--at`, or a size is unknown.
    """
    shapes = _shapes([*dimensions], path, label, inputs, modules)
    known: dict[str, set[int]] = {name: {size} for name, size in asked.items()}
    for name, given in shapes.items():
        for axis, size in zip(dimensions[name], given, strict=False):
            if not isinstance(axis, str):
                continue
            if asked.get(axis, size) != size:
                raise UsageError(f"--at={axis}={asked[axis]} contradicts an --input", where=path,
                                 got=f"{axis} = {size}")  # fmt: skip
            known.setdefault(axis, set()).add(size)
    missing: list[str] = []
    for name, axes in dimensions.items():
        if name in shapes or all(isinstance(axis, int) for axis in axes):
            continue
        shape: list[int] = []
        for number, axis in enumerate(axes):
            sizes: set[int] = {axis} if isinstance(axis, int) else known.get(axis or "", set())
            if len(sizes) == 1:
                shape += sizes
            else:
                missing.append(str(axis or f"{name}.shape[{number}]"))
        shapes[name] = tuple(shape)
    if missing:
        raise _unknown_sizes(
            f"the model {path} has free dimensions", missing,
            ", ".join(f"{name}: [{', '.join(str(axis or '?') for axis in axes)}]"
                      for name, axes in dimensions.items()), asked,
            [axis for axes in dimensions.values() for axis in axes if isinstance(axis, str)],
            f"stitch-compile {path} -o m.ttb takes --input_shape",
        )  # fmt: skip
    return shapes


def _unknown_sizes(
    what: str, missing: Sequence[str], got: str, asked: Mapping[str, int], names: Collection[str],
    remedy: str = "",
) -> UsageError:  # fmt: skip
    """Return the error for sizes that neither `--input` nor `--at` gives."""
    unknown_names = list(dict.fromkeys(missing))
    options = ",".join(f"{name}=N" for name in unknown_names if name.isidentifier())
    near = [closest(name, unknown_names, f"--at={name}: ") for name in asked if name not in names]
    return UsageError(
        f"{what}, and nothing says {', '.join(unknown_names)}",
        expected="an --input of that size" + (f", or --at={options}" if options else ""),
        got=got + "".join(f"; --at={name}={size}" for name, size in asked.items()),
        remedy="; ".join(filter(None, [*near, remedy])) or None,
    )


def _shapes(
    names: Sequence[str], path: str, label: str, inputs: Sequence[str], modules: Sequence[str]
) -> dict[str, tuple[int, ...]]:
    """Return the shapes of `--input` values by the module's inputs; no array is read.

    The inputs of the first module are the first ones of the run: values without names and indices
    are its.
    """
    position, is_alone = modules.index(path), len(modules) == 1
    slots, shapes = SlotNames(names, "input"), dict[str, tuple[int, ...]]()

    def own_name(name: str) -> str | None:
        """Return the name or index of a slot of this module, None for another module's."""
        short = name.removeprefix(f"{label}.").removeprefix(f"{position}.")
        is_index = short.isdecimal() and int(short) < len(names)
        is_own = short in names or (is_index and (position == 0 or short != name))
        return name if name in names else short if is_own or is_alone else None

    for word in filter(is_archive, inputs):
        arrays = read_array_file(Path(word.partition("@")[2]), lambda name, shape: False)
        for name in arrays:
            if (own := own_name(str(name))) is not None:
                index = find_archived(slots, own, word, "input")[0]
                shapes[names[index]] = arrays[name].shape
    named: list[tuple[str | None, str]] = []
    unnamed: list[tuple[str | None, str]] = []
    single = [word for word in inputs if not is_archive(word)]
    for name, word in split_slots(single, is_array_text, "input", INPUT_FORM, "--input"):
        if name is None:
            unnamed.append((None, word))
        elif (own := own_name(name)) is not None:
            named.append((own, word))
    if not is_alone:  # The rest are values of the modules behind the first one.
        unnamed = unnamed[: max(len(names) - len(named), 0) if position == 0 else 0]
    own_values = [*named, *unnamed]
    for index, word in assign(own_values, slots, "input").items():
        shapes[names[index]] = parse_array(word, names[index], ()).shape
    return shapes
