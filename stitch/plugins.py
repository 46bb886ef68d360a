"""Extensions of Stitch: entry points of installed packages, files given as `--plugin`, `register`.

Each kind of extension (`KINDS`) is looked up by name in one place, which tries the names that
Stitch ships and then calls `find`. Listing entry points reads the metadata of packages only; a
plugin is imported when its own name is asked for. One that fails raises an error that names it,
and its name is left out of `names` from then on.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from threading import RLock
from typing import TYPE_CHECKING, Any

from stitch.errors import StitchError, UsageError, unknown

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

#: Kinds of extensions: what a value is, and the module and attribute that hold the shipped names.
#: The entry points of a kind are in the group `stitch.<kind>`.
KINDS: dict[str, tuple[str, str, str]] = {
    "machines": (
        "a Machine, the path of its YAML description, or a function that returns one",
        "stitch.machine", "machine_names",
    ),
    "executors": (
        "a class of executors, or a function that returns an executor",
        "stitch.runtime", "EXECUTORS",
    ),
    "operators": ("a tuple of OpDef, whose domain is the name", "stitch.ops", "DOMAINS"),
    "frontends": (
        "a function (path, examples, input_shapes) that returns a ComputationGraph",
        "stitch.frontend", "SUFFIXES",
    ),
    "allocators": (
        "a function (holes, nbytes) that returns an address", "stitch.machine", "POLICIES"
    ),
    "residency": (
        "a function of an EvictionCandidate that returns its price", "stitch.planner", "RULES"
    ),
}  # fmt: skip
_LOCK = RLock()
#: By (kind, name): values and where they were registered; loaded entry points; errors of failed
#: ones.
_registered: dict[tuple[str, str], tuple[Any, str]] = {}
_loaded: dict[tuple[str, str], Any] = {}
_failed: dict[tuple[str, str], UsageError] = {}


@dataclass(frozen=True, slots=True)
class Plugin:
    """One extension: its kind and name, where it comes from, and why it cannot be used, if so."""

    kind: str
    name: str
    source: str
    problem: str = ""


def register(kind: str, name: str, value: object) -> None:
    """Add an extension to this process.

    Args:
        kind: One of `KINDS`: `machines`, `executors`, `operators`, `frontends`, `allocators` or
            `residency`.
        name: The name by which it is asked for. For operators the domain, for front ends the
            suffix without the dot.
        value: See `docs/how-to/plugins.md` for each kind.

    Raises:
        UsageError: The kind is unknown, or the name is Stitch's own or registered already.
    """
    if kind not in KINDS:
        raise unknown(f"there is no kind of plugin {kind!r}", kind, KINDS)
    if not isinstance(name, str) or not name:
        raise UsageError("a plugin needs a name", expected="text", got=repr(name))
    if name in shipped_names(kind):
        raise UsageError(
            f"the {_title(kind)} {name!r} is Stitch's own", remedy="register it under another name"
        )
    with _LOCK:
        others = [plugin.source for plugin in installed(kind) if plugin.name == name]
        if others:
            raise UsageError(
                f"the {_title(kind)} plugin {name!r} is registered twice", where=others[0],
                remedy="register each name once, or choose another name",
            )  # fmt: skip
        _registered[kind, name] = value, _caller()


def find(kind: str, name: str) -> Any:
    """Return the extension of a name, or None if there is none; imports it on first use.

    Raises:
        UsageError: Importing it fails, or two packages provide the name.

    >>> find("executors", "gpu") is None
    True
    """
    key = kind, name
    with _LOCK:
        if key in _registered:
            return _registered[key][0]
        if key in _failed:
            raise _failed[key]
        if key not in _loaded:
            points = [point for point in _entry_points(kind) if point.name == name]
            if not points:
                return None
            _loaded[key] = _load(kind, name, points)
        return _loaded[key]


def _load(kind: str, name: str, points: Sequence[EntryPoint]) -> Any:
    try:
        if len(points) > 1:
            raise UsageError(
                f"several packages provide the {_title(kind)} plugin {name!r}",
                got=", ".join(map(_source, points)), remedy="uninstall all but one of them",
            )  # fmt: skip
        try:
            return points[0].load()
        except (Exception, SystemExit) as error:
            raise failure(kind, name, error) from error
    except UsageError as error:
        _failed[kind, name] = error
        raise


def failure(kind: str, name: str, error: BaseException) -> UsageError:
    """Return the error for a plugin that raised `error`."""
    source = next((p.source for p in installed(kind) if p.name == name), "")
    said = error.brief() if isinstance(error, StitchError) else str(error)
    return UsageError(
        f"the {_title(kind)} plugin {name!r} failed",
        where=source or None, got=f"{type(error).__name__}: {said}",
        remedy="correct the plugin, or uninstall it; other plugins are not affected",
    )  # fmt: skip


def called(kind: str, name: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a plugin's function; raise `UsageError` that names the plugin for what it raises."""
    try:
        return function(*arguments)
    except StitchError:
        raise
    except Exception as error:
        raise failure(kind, name, error) from error


def wrong(kind: str, name: str, got: object) -> UsageError:
    """Return the error for a plugin that is, or returns, something else than its kind needs."""
    return UsageError(
        f"the {_title(kind)} plugin {name!r} is not what it must be", expected=KINDS[kind][0],
        got=repr(got)[:200],
    )  # fmt: skip


def no_plugin(kind: str, name: str) -> StitchError:
    """Return the error for a name that no plugin has."""
    return unknown(
        f"there is no {_title(kind)} plugin {name!r}", name, names(kind),
        remedy="install the package that provides it, or pass --plugin=FILE.py",
    )  # fmt: skip


def _title(kind: str) -> str:
    return kind.removesuffix("s")


def names(kind: str) -> tuple[str, ...]:
    """Return the names of a kind's plugins that can be asked for, sorted; imports none."""
    usable = {plugin.name for plugin in installed(kind) if not plugin.problem}
    return tuple(sorted(usable))


def installed(kind: str | None = None) -> tuple[Plugin, ...]:
    """Return the known plugins, of one kind or all, without importing one.

    `problem` is set for a name of Stitch's own (it is never used), for a name of two packages, and
    for plugins that have failed in this process.
    """
    if kind is None:
        return tuple(plugin for each in KINDS for plugin in installed(each))
    with _LOCK:
        found = [Plugin(k, n, source) for (k, n), (_, source) in _registered.items() if k == kind]
        points = _entry_points(kind)
        provided = [point.name for point in points]
        for point in points:
            problem = ""
            if point.name in shipped_names(kind):
                problem = "the name is Stitch's own, so it is not used"
            elif provided.count(point.name) > 1:
                problem = "several packages provide this name"
            elif (kind, point.name) in _failed:
                problem = _failed[kind, point.name].got or _failed[kind, point.name].what
            found.append(Plugin(kind, point.name, _source(point), problem))
    return tuple(found)


def shipped_names(kind: str) -> tuple[str, ...]:
    """Return the names of a kind that Stitch ships."""
    _, module, attribute = KINDS[kind]
    shipped = getattr(import_module(module), attribute)
    return tuple(shipped() if callable(shipped) else shipped)


@functools.cache
def _entry_points(kind: str) -> tuple[EntryPoint, ...]:
    from importlib.metadata import entry_points  # Imported here: it takes 20 ms.

    # A package that is found through two entries of `sys.path` is one.
    points = {(p.name, p.value, _source(p)): p for p in entry_points(group=f"stitch.{kind}")}
    return tuple(sorted(points.values(), key=lambda point: (point.name, point.value)))


def _source(point: EntryPoint) -> str:
    package = point.dist
    return point.value if package is None else f"{package.name} {package.version} ({point.value})"


def _caller() -> str:
    """Return the source location outside this module that registers something."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__") == __name__:
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


@contextmanager
def files(paths: Sequence[str]) -> Iterator[None]:
    """Run Python files that call `register`; what they register is removed afterwards.

    Raises:
        UsageError: A file cannot be read, raises an exception, or registers nothing.
    """
    before = dict(_registered)
    try:
        for path in paths:
            count = len(_registered)
            _run(path)
            if len(_registered) == count:
                raise UsageError(
                    f"the plugin file {path!r} registers nothing",
                    remedy='call stitch.register("executors", "NAME", value) in it',
                )
        yield
    finally:
        _registered.clear()
        _registered.update(before)


def _run(path: str) -> None:
    file = Path(path)
    if file.suffix != ".py" or not file.is_file():
        raise UsageError(
            f"there is no plugin file {path!r}", expected="an existing Python file (.py)",
            remedy="a plugin of an installed package needs no --plugin",
        )  # fmt: skip
    name = f"stitch_plugin_{file.stem}"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None, "the suffix was checked"
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except StitchError as error:
        error.where = f"{path}, {error.where}" if error.where else path
        raise
    except (Exception, SystemExit) as error:
        raise UsageError(
            f"the plugin file {path!r} failed", got=f"{type(error).__name__}: {error}",
            remedy=f"correct the file; python {path} shows where it fails",
        ) from error  # fmt: skip
