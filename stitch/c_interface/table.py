"""The table of C functions: each is a Python function with its C prototype.

Header, glue and the conversion of arguments all follow from the prototypes. Every function returns
`stitch_error_t`, which is NULL if it succeeded.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

#: The kinds of handles; `stitch_KIND_t` is the C type.
KINDS = (
    "device", "program", "pipeline", "computation_graph", "optimizer",
    "model_compilation_result", "model_training_instance",
)  # fmt: skip
#: The kinds by their C types.
HANDLE_TYPES = {f"stitch_{kind}_t": kind for kind in KINDS}


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter of a C function: its type and name."""

    type: str
    name: str

    @property
    def is_handle(self) -> bool:
        """Whether it is a handle of one of the kinds."""
        return self.type in HANDLE_TYPES

    def text(self) -> str:
        """Return the declaration.

        >>> Parameter("const char *", "path").text(), Parameter("size_t", "count").text()
        ('const char *path', 'size_t count')
        """
        return self.type + ("" if self.type.endswith("*") else " ") + self.name


@dataclass(frozen=True, slots=True)
class CFunction:
    """A C function: its name, parameters, sentence for the header, and implementation.

    `nullable` names the parameters that may be NULL, or for tensors zero.
    """

    name: str
    parameters: tuple[Parameter, ...]
    doc: str
    implementation: Callable[..., Any]
    nullable: Collection[str] = ()
    section: str = ""

    @property
    def releases(self) -> bool:
        """Whether the function ends the life of its first argument."""
        return self.name.endswith("_destroy") or self.name in (
            "stitch_close_device", "stitch_stop_training",
        )  # fmt: skip

    def prototype(self) -> str:
        """Return the C prototype without a semicolon."""
        parameters = ", ".join(parameter.text() for parameter in self.parameters)
        return f"stitch_error_t {self.name}({parameters})"

    def glue(self) -> tuple[str, str]:
        """Return the prototype of the function that Python defines, and the call of it: as the C
        function, with the numbers of handles."""
        types = [("uint64_t" if p.is_handle else p.type, p.name) for p in self.parameters]
        parameters = ", ".join(Parameter(*one).text() for one in types)
        arguments = ", ".join(p.name + (".id" if p.is_handle else "") for p in self.parameters)
        return f"stitch_error_t py_{self.name}({parameters})", f"py_{self.name}({arguments})"


def parsed(prototype: str) -> tuple[str, tuple[Parameter, ...]]:
    """Return name and parameters of a prototype without its result type.

    >>> parsed("stitch_load(stitch_device_t device, const char *path)")[1][1]
    Parameter(type='const char *', name='path')
    """
    name, _, rest = prototype.rstrip(")").partition("(")
    parameters = []
    for declaration in rest.split(", "):
        before, star, own = declaration.rpartition("*")
        if not star:
            before, star, own = (*declaration.rpartition(" ")[:1], "", declaration.split(" ")[-1])
        parameters.append(Parameter((before + star).strip(), own))
    return name, tuple(parameters)


class FunctionTable:
    """C functions in the order of the header; `section` is the heading of those that follow."""

    def __init__(self) -> None:
        self.functions: list[CFunction] = []
        self.section = ""

    def add(
        self, prototype: str, doc: str, implementation: Callable[..., Any], *nullable: str
    ) -> None:
        """Add a function; `prototype` is without its result type."""
        name, parameters = parsed(prototype)
        function = CFunction(name, parameters, doc, implementation, nullable, self.section)
        self.functions.append(function)
