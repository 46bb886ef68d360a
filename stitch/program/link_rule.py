"""The rule of links: may a value that is described like this be read as described like that?"""

from __future__ import annotations

from stitch.program.layout import TensorDesc


def link_problem(
    source: TensorDesc, target: TensorDesc, strict_types: bool = False
) -> tuple[str, str] | None:
    """What keeps a value from feeding a slot, and a remedy; None where nothing does.

    Shapes are equal; floats never become integers, nor the reverse, nor one integer type another;
    with `strict_types` no storage type changes at all.
    """
    if source.shape != target.shape:
        return (
            f"shape {list(source.shape)} is not {list(target.shape)}",
            "compile one of the two modules for the other's shape",
        )
    given, wanted = source.layout.data_type, target.layout.data_type
    if given is wanted:
        return None
    if not (given.is_floating and wanted.is_floating):
        return (
            f"{given.value} never turns into {wanted.value} on a link",
            "add a Cast to one of the modules",
        )
    if strict_types:
        return (
            f"{given.value} would be stored as {wanted.value}, and strict_types is set",
            f"compile the consumer with data_type={given.value}, or allow type changes",
        )
    return None
