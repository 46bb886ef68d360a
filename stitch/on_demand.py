"""Faces whose names are loaded when they are asked for.

Type checkers read imports instead, which stand beside it for them:

    if TYPE_CHECKING:
        from stitch.api import load
    else:
        __getattr__, __dir__ = names_on_demand(__name__, {"api": "load"})

They are the two branches of one choice, because type checkers would take any name from a module
that has a `__getattr__`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from typing import Any


@contextmanager
def late_import() -> Iterator[None]:
    """Surround an import that runs when its module is first needed.

    Raises:
        StitchError: the system cannot open the module's file, for instance because the process has
            no file descriptors left. A later call tries again.
        CompileError: the module needs the package torch, which is not installed.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        from stitch.errors import CompileError

        raise CompileError(
            "this part of Stitch needs the package torch, which is not installed",
            remedy="pip install 'stitch-runtime[torch]'",
        ) from error
    except OSError as error:
        # `import stitch` loads this file alone.
        from stitch.errors import StitchError

        raise StitchError(
            "a module of Stitch cannot be loaded",
            where=error.filename,
            got=error.strerror or str(error),
            remedy="close files, or raise the limit of open files (ulimit -n), and call again",
        ) from error


def names_on_demand(
    face: str, homes: Mapping[str, str], modules: str = "", others: str = ""
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """`__getattr__` and `__dir__` for a face.

    `homes` says of each file or folder beside the face which names it defines, `modules` which
    files and folders are names of the face themselves, as in `import stitch; stitch.graph.trace`.
    Several names are divided by spaces. `others` tells where a name that is none of these may be.
    """
    home_of = {name: home for home, names in homes.items() for name in names.split()}
    own = frozenset(modules.split())

    def load(name: str) -> Any:
        if name in home_of:
            with late_import():
                value = getattr(import_module(f"{face}.{home_of[name]}"), name)
        elif name in own:
            with late_import():
                value = import_module(f"{face}.{name}")
        else:
            raise AttributeError(f"module {face!r} has no attribute {name!r}{others}")
        # From now on it is an ordinary name of the face.
        setattr(sys.modules[face], name, value)
        return value

    def listed() -> list[str]:
        return sorted({*vars(sys.modules[face]), *home_of, *own})

    return load, listed
