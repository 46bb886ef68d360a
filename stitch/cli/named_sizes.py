"""The sizes of modules with named sizes: from `--at`, and from the shapes of `--input` values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from stitch.api import DynamicModel
from stitch.cli.chain import RunInput
from stitch.cli.options import INPUT_FORM
from stitch.cli.run_inputs import (
    SlotNames,
    assign,
    is_archive,
    is_array_text,
    parse_array,
    split_slots,
)
from stitch.errors import UsageError
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
    is_alone: bool,
) -> dict[str, int]:  # fmt: skip
    """Return the sizes at which a module runs: those asked for, and those of its inputs' shapes.

    Args:
        model: The module.
        path: Its file, for errors.
        label: Its name in `MODULE.SLOT`.
        inputs: The values of `--input`.
        asked: The values of `--at`, which may be sizes of other modules.
        is_alone: Whether the run has no other module: then values may come without names.

    Raises:
        UsageError: A size is unknown, two inputs disagree, or a shape contradicts `--at`.
    """
    graph = model.program.graph
    slots = [RunInput(s.name, graph.input_type(i)) for i, s in enumerate(graph.inputs)]
    shapes = _shapes(slots, label, inputs, is_alone)
    names = model.program.sizes.dims
    known = model.sizes_of(shapes)
    for name in names:
        if name in asked and known.setdefault(name, asked[name]) != asked[name]:
            raise UsageError(f"--at={name}={asked[name]} contradicts an --input", where=path,
                             got=f"{name} = {known[name]}")  # fmt: skip
    missing = [name for name in names if name not in known]
    if missing:
        raise UsageError(
            f"the program of {path} has named sizes, and nothing says {', '.join(missing)}",
            expected=f"an --input of that size, or --at={','.join(f'{n}=N' for n in missing)}",
            got=", ".join(f"{d.name}: {d.least} to {d.most}" for d in names.values())
            + "".join(f"; --at={name}={size}" for name, size in asked.items()),
        )
    return known


def _shapes(
    slots: Sequence[RunInput], label: str, inputs: Sequence[str], is_alone: bool
) -> dict[str, tuple[int, ...]]:
    """Return the shapes of `--input` values by the module's inputs; no array is read."""
    single = [word for word in inputs if not is_archive(word)]
    split = [
        (None if name is None else name.removeprefix(f"{label}."), word)
        for name, word in split_slots(single, is_array_text, "input", INPUT_FORM, "--input")
    ]
    shapes: dict[str, tuple[int, ...]] = {}
    names = [slot.name for slot in slots]
    for word in filter(is_archive, inputs):
        arrays = read_array_file(Path(word.partition("@")[2]), lambda name, shape: False)
        shapes.update({str(name): arrays[name].shape for name in arrays if name in names})
    if not is_alone:
        split = [(name, word) for name, word in split if name in names]
    for index, word in assign(split, SlotNames(slots, "input"), "input").items():
        shapes[names[index]] = parse_array(word, names[index], ()).shape
    return shapes
