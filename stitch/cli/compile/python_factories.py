"""Python factories: what `--entry=file.py:factory` names, called.

Comes in: words. Goes out: what the factory returned, with its examples. Must not know: targets,
programs.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from stitch.errors import CompileError, FormatError, StitchError, UsageError, closest
from stitch.files import open_file, unreadable
from stitch.graph import ComputationGraph

#: The extra with which a package is installed that a factory may need.
_EXTRAS = {"torch": "torch", "onnx": "onnx", "onnxruntime": "onnx", "safetensors": "onnx"}


def from_entry(source: str | None, entry: str) -> tuple[Any, Sequence[Any] | Mapping[str, Any]]:
    """Call a factory: it returns a graph, or a module and its examples.

    Raises `UsageError`, `CompileError`, `FormatError`.
    """
    module_name, colon, name = entry.rpartition(":")
    if not name or (source is None and not (colon and module_name)):
        raise UsageError(
            f"--entry={entry} names no factory",
            expected="--entry=pkg.mod:factory, --entry=file.py:factory, or SOURCE and --entry=NAME",
        )
    if source is None and module_name.lower().endswith(".py"):
        source, module_name = module_name, ""
    if source is not None and module_name:
        raise UsageError(
            "SOURCE and the module of --entry both say where the factory is",
            expected=f"SOURCE and --entry={name}, or --entry={entry} alone",
        )
    module = _file_module(Path(source)) if source is not None else _imported(entry)
    factory = getattr(module, name, None)
    if not callable(factory):
        known = [key for key, value in vars(module).items() if callable(value)]
        raise UsageError(
            f"{module.__name__} has no factory {name!r}",
            where=f"--entry={entry}",
            remedy=closest(name, known) or None,
        )
    try:
        returned = factory()
    except StitchError:
        raise
    except Exception as error:
        raise _failure("the factory failed", error, f"--entry={entry}") from error
    if isinstance(returned, ComputationGraph):
        return returned, ()
    if isinstance(returned, tuple) and len(returned) == 2 and callable(returned[0]):
        function, examples = returned
        if isinstance(examples, Mapping):
            return function, examples
        return function, tuple(examples) if isinstance(examples, list | tuple) else (examples,)
    raise CompileError(
        "the factory returned something that no front end reads",
        where=f"--entry={entry}",
        expected="a ComputationGraph, or (function or torch module, example inputs)",
        got=type(returned).__name__,
    )


def _imported(entry: str) -> Any:
    name, _, factory = entry.rpartition(":")
    # As with `python -m`: the user's own modules lie in the current folder.
    place = str(Path.cwd())
    if place not in sys.path:
        sys.path.insert(0, place)
    try:
        return importlib.import_module(name)
    except Exception as error:
        failure = _failure(f"cannot import {name!r}", error, f"--entry={entry}")
        absent = isinstance(error, ModuleNotFoundError) and error.name == name
        if absent and "." not in name and not failure.remedy:
            failure.remedy = f"a file is named with its ending: --entry={name}.py:{factory}"
        raise failure from error


def _file_module(path: Path) -> Any:
    if path.suffix.lower() != ".py":
        raise UsageError("SOURCE with --entry is a Python file", got=str(path))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None, "a .py file always has a loader"
    module = importlib.util.module_from_spec(spec)
    try:
        open_file(path).close()  # The import opens it by its name, and would wait for a pipe.
        spec.loader.exec_module(module)
    except OSError as error:
        raise unreadable(path, error) from error
    except FormatError:
        raise
    except Exception as error:
        raise _failure(f"{path.name} cannot be imported", error) from error
    return module


def _failure(what: str, error: Exception, where: str | None = None) -> CompileError:
    """What went wrong in a user's Python; a package that is one of our extras can be installed.

    Where only a part of it is missing (`onnx.nope`), the package itself is there, and loaded.
    """
    name = error.name or "" if isinstance(error, ModuleNotFoundError) else ""
    package = name.partition(".")[0]
    extra = _EXTRAS.get(package) if sys.modules.get(package) is None else None
    return CompileError(
        f"{what}: {type(error).__name__}: {error}", where=where,
        remedy=None if extra is None else f"pip install stitch-runtime[{extra}]",
    )  # fmt: skip
