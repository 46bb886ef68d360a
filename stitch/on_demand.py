"""Public APIs whose names are imported on first use.

Type checkers read ordinary imports in the other branch:

   if TYPE_CHECKING:
       from stitch.api import load
   else:
       __getattr__, __dir__ = names_on_demand(__name__, {"api": "load"})

One of the two branches is needed: type checkers accept any name of a module with `__getattr__`.
"""

from __future__ import annotations

import sys
from importlib import import_module

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any


class late_import:  # It reads as a verb: `with late_import():`.
    """Wrap an import that runs on first use.

    Raises:
        StitchError: The system cannot open the module's file, for example because the process has
            too many open files. A later call tries again. Or a package has another version than
            the module needs.
        CompileError: The module needs torch, which is not installed.
    """

    def __enter__(self) -> None:
        pass

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if isinstance(error, ModuleNotFoundError) and error.name == "torch":
            from stitch.errors import CompileError

            raise CompileError(
                "this part of Stitch needs the package torch, which is not installed",
                remedy="pip install 'stitch-runtime[torch]'",
            ) from error
        if isinstance(error, OSError):
            # `import stitch` loads this file alone.
            from stitch.errors import StitchError

            raise StitchError(
                "a module of Stitch cannot be loaded",
                where=error.filename,
                got=error.strerror or str(error),
                remedy="close files, or raise the limit of open files (ulimit -n), and call again",
            ) from error
        if isinstance(error, AttributeError):
            # `from package import name` replaces an AttributeError by one that hides its cause.
            from traceback import extract_tb

            from stitch.errors import StitchError

            last = extract_tb(error.__traceback__)[-1]
            raise StitchError(
                "a module of Stitch cannot be loaded",
                where=f"{last.filename}:{last.lineno}",
                got=f"{type(error).__name__}: {error}",
                remedy="install the versions of packages that this Stitch needs: "
                "pip install 'stitch-runtime[onnx,torch]'",
            ) from error


def names_on_demand(
    package: str, homes: Mapping[str, str], modules: str = "", others: str = ""
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` for a package.

    Args:
        package: The package's name.
        homes: For each of its modules, the names that it defines, separated by spaces.
        modules: Modules that are attributes themselves, as in `import stitch; stitch.graph.trace`.
        others: Text for the error of an unknown name.
    """
    home_of = {name: home for home, names in homes.items() for name in names.split()}
    own = frozenset(modules.split())

    def load(name: str) -> Any:
        if name in home_of:
            with late_import():
                value = getattr(import_module(f"{package}.{home_of[name]}"), name)
        elif name in own:
            with late_import():
                value = import_module(f"{package}.{name}")
        else:
            raise AttributeError(f"module {package!r} has no attribute {name!r}{others}")
        # Later accesses do not call `__getattr__`.
        setattr(sys.modules[package], name, value)
        return value

    def listed() -> list[str]:
        return sorted({*vars(sys.modules[package]), *home_of, *own})

    return load, listed
