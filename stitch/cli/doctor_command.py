"""`stitch doctor`: check this installation, and say what each part of it gives."""

from __future__ import annotations

import argparse
import os
import platform
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib import import_module, metadata
from pathlib import Path
from typing import Literal

import numpy as np

from stitch import api, plugins
from stitch.budget import allowed_nbytes, machine_nbytes
from stitch.cli.command import EXIT_FAILURE, EXIT_OK, Command, say_result
from stitch.cli.parser import make_parser
from stitch.cli.phases import LEVELS, phase
from stitch.cli.settings import default_cache_folder, project_settings
from stitch.errors import FormatError, StitchError
from stitch.machine import machine_names
from stitch.option_values import EXECUTOR_NAMES
from stitch.report import counted
from stitch.runtime import load_prices, processor_name, this_processor
from stitch.version import __version__

EXAMPLES = """\
  stitch doctor
  stitch doctor --quick
  stitch doctor --json"""


def command() -> Command:
    """Return `stitch doctor` with its options."""
    parser = make_parser("Check this installation, and say what each part of it gives.", EXAMPLES)
    parser.add_argument("--quick", action="store_true",
                        help="do not compile and run a program with each executor")  # fmt: skip
    return Command(parser.read, _doctor)


def _doctor(options: argparse.Namespace) -> int:
    findings = all_findings(quick=options.quick)
    counts = Counter(finding.status for finding in findings)
    verdict = "Stitch works here"
    if counts["problem"]:
        verdict = f"{counted(counts['problem'], 'problem')} to solve"
    elif options.quick:
        verdict = "no problem found; without --quick programs are run as well"
    body = {"verdict": verdict, "findings": list(map(asdict, findings))}
    say_result(body, lambda: [*map(_line, findings), f"verdict: {verdict}"])
    return EXIT_FAILURE if counts["problem"] else EXIT_OK


def _line(finding: Finding) -> str:
    remedy = f"\n  try: {finding.remedy}" if finding.remedy else ""
    mark = {"ok": "ok  ", "note": "--  ", "problem": "BAD "}[finding.status]
    return f"{mark}{finding.topic}: {finding.text}{remedy}"


#: The name of the distribution; another one, `stitch`, installs a package of the same name.
DISTRIBUTION, OTHER = "stitch-runtime", "stitch"
#: By extra: what it gives.
GIVES = {
    "torch": "PyTorch modules, torch.compile, training beside PyTorch, --executor=torch",
    "onnx": "ONNX models, --executor=onnxruntime and auto",
    "ray": "devices in processes of their own, --backend=ray",
    "report": "figures of the examples by Plotly",
}
#: The package that each executor needs beside NumPy.
_NEEDS = {"onnxruntime": "onnxruntime", "auto": "onnxruntime", "torch": "torch"}
#: By extra, whose name is that of its first package: what its front end is loaded for.
_FRONT_ENDS = {"torch": "captured_module", "onnx": "from_onnx"}
_REQUIREMENT = re.compile(r"([A-Za-z0-9._-]+)\s*([^;]*)(?:;\s*extra\s*==\s*[\"'](\w+)[\"'])?")
_BOUND = re.compile(r"(>=|<=|==|<|>|!=)\s*([0-9.]+)")


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was checked.

    Args:
        topic: What was checked.
        status: `note` is for what is absent, and needed only for some uses.
        text: What was found.
        remedy: A command or a change that mends it.
    """

    topic: str
    status: Literal["ok", "note", "problem"]
    text: str
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class Requirement:
    """A package that the distribution needs, in a range of versions, perhaps for an extra only."""

    package: str
    bounds: str
    extra: str


def requirement_of(text: str) -> Requirement:
    """Parse a requirement of a distribution's metadata.

    >>> requirement_of('torch<2.15,>=2.13; extra == "torch"')
    Requirement(package='torch', bounds='<2.15,>=2.13', extra='torch')
    """
    match = _REQUIREMENT.match(text)
    assert match is not None, "packaging wrote it"
    return Requirement(match[1], match[2].strip(" ()"), match[3] or "")


def is_within(version: str, bounds: str) -> bool:
    """Return whether a version is within all bounds, by its leading numbers.

    >>> is_within("2.13.0+cpu", "<2.15,>=2.13"), is_within("2.15.1", "<2.15"), is_within("1", "")
    (True, False, True)
    """

    def numbers(text: str) -> tuple[int, ...]:
        found = re.match(r"\d+(?:\.\d+)*", text)
        parts = [int(part) for part in found[0].split(".")] if found else []
        while parts and not parts[-1]:
            parts.pop()
        return tuple(parts)

    mine = numbers(version)
    compare = {">=": mine.__ge__, "<=": mine.__le__, "==": mine.__eq__, "<": mine.__lt__,
               ">": mine.__gt__, "!=": mine.__ne__}  # fmt: skip
    return all(compare[sign](numbers(bound)) for sign, bound in _BOUND.findall(bounds))


def all_findings(*, quick: bool) -> list[Finding]:
    """Return everything that was found; without `quick` every executor runs a program."""
    parts: list[Callable[[], Iterator[Finding]]] = [
        _versions, _packages, _plugins, _prices, _limits, _settings,
    ]  # fmt: skip
    findings = [finding for part in parts for finding in part()]
    if not quick:
        findings += [_front_end(extra) for extra in _FRONT_ENDS if _version(extra)]
        for name in EXECUTOR_NAMES:
            if name != "null" and (name not in _NEEDS or _version(_NEEDS[name])):
                with phase(f"running a program with the executor {name}"):
                    findings.append(_executor(name))
    return findings


def _versions() -> Iterator[Finding]:
    where = Path(__file__).resolve().parents[2]
    yield Finding("stitch", "ok", f"{__version__} in {where}")
    supported = sys.version_info >= (3, 11)
    text = f"{platform.python_version()} ({platform.python_implementation()}), {sys.executable}"
    yield Finding("python", "ok" if supported else "problem", text,
                  "" if supported else "install Python 3.11 or later")  # fmt: skip
    yield Finding("system", "ok", f"{platform.system()} {platform.machine()}, {processor_name()}")
    if _version(OTHER) is not None:
        yield Finding(
            "packages named stitch", "problem",
            f"the distribution {OTHER!r} {_version(OTHER)}, another program, also installs a "
            "package named stitch",
            f"pip uninstall -y {OTHER} && pip install --force-reinstall --no-deps {DISTRIBUTION}",
        )  # fmt: skip
    installed = _version(DISTRIBUTION)
    if installed is None:
        yield Finding("installation", "problem", f"{DISTRIBUTION} is not installed: this package "
                      "is imported from a folder", f"pip install {DISTRIBUTION}")  # fmt: skip
    elif installed != __version__:
        yield Finding(
            "installation", "problem", f"{DISTRIBUTION} {installed} is installed, and the imported "
            f"package is {__version__}", f"pip install --force-reinstall {DISTRIBUTION}",
        )  # fmt: skip


def _packages() -> Iterator[Finding]:
    """Check the packages that Stitch needs, and those of each extra."""
    try:
        needed = [requirement_of(text) for text in metadata.requires(DISTRIBUTION) or ()]
    except metadata.PackageNotFoundError:
        return
    for extra in ("", *GIVES):
        asked = [requirement for requirement in needed if requirement.extra == extra]
        absent = [one.package for one in asked if _version(one.package) is None]
        outside = [
            f"{one.package} {found} is outside of the tested range {one.bounds}"
            for one in asked
            if (found := _version(one.package)) is not None and not is_within(found, one.bounds)
        ]
        have = ", ".join(f"{one.package} {_version(one.package)}" for one in asked)
        topic = f"extra {extra}" if extra else "needed packages"
        what = f"stitch-runtime[{extra}]" if extra else DISTRIBUTION
        remedy = f"pip install '{what}'"
        if not asked:
            continue
        if absent and extra:
            text = f"not installed ({', '.join(absent)}); it gives {GIVES[extra]}"
            yield Finding(topic, "note", text, remedy)
        elif absent:
            yield Finding(topic, "problem", f"{', '.join(absent)} not installed", remedy)
        elif outside:
            yield Finding(topic, "problem", "; ".join(outside), remedy)
        else:
            yield Finding(topic, "ok", have + (f", for {GIVES[extra]}" if extra else ""))


def _plugins() -> Iterator[Finding]:
    """Load every plugin; one that fails is a problem."""
    points = [
        point
        for group in sorted(metadata.entry_points().groups)
        if group.startswith("stitch.")
        for point in metadata.entry_points(group=group)
    ]
    packaged = {(point.group, point.name) for point in points}
    registered = [p for p in plugins.installed() if (f"stitch.{p.kind}", p.name) not in packaged]
    if not points and not registered:
        yield Finding("plugins", "ok", "none")
    for plugin in registered:
        topic = f"plugin {plugin.name} of stitch.{plugin.kind}"
        yield Finding(topic, "ok", f"registered at {plugin.source}")
    for point in points:
        topic = f"plugin {point.name} of {point.group}"
        source = point.dist.name if point.dist is not None else point.value
        try:
            point.load()
        except Exception as error:
            why = error.brief() if isinstance(error, StitchError) else str(error)
            yield Finding(topic, "problem", f"{type(error).__name__}: {why}",
                          f"correct it, or: pip uninstall {source}")  # fmt: skip
        else:
            yield Finding(topic, "ok", f"from {source}")


def _prices() -> Iterator[Finding]:
    table, here = load_prices(), this_processor()
    away = here.distance(table.processor)
    near = "measured on this family" if not away else f"the nearest family, distance {away:.1f}"
    yield Finding(
        "price table", "ok",
        f"{table.name}: {near} ({here.text() if here.vendor else 'this processor is unknown'}); "
        "tools/prices of the repository measures another, --prices=FILE uses it",
    )  # fmt: skip
    yield Finding("machines", "ok", ", ".join(machine_names()))


def _limits() -> Iterator[Finding]:
    size, allowed = machine_nbytes(), allowed_nbytes()
    yield Finding("memory limit", "ok", f"{allowed >> 20} MiB of {size >> 20} MiB "
                  "(--max_memory sets another)")  # fmt: skip
    folder = default_cache_folder()
    if folder.is_dir():
        files = [path for path in folder.iterdir() if path.is_file()]
        held = f"{counted(len(files), 'file')}, {sum(p.stat().st_size for p in files) >> 20} MiB"
    else:
        held = "not there yet"
    at = next(path for path in (folder, *folder.parents) if path.exists())
    if os.access(at, os.W_OK):
        yield Finding("cache folder", "ok", f"{folder}: {held} (--cache=default uses it)")
    else:
        yield Finding("cache folder", "problem", f"{folder}: {at} is not writable",
                      "set XDG_CACHE_HOME to a folder of yours")  # fmt: skip
    level = os.environ.get("STITCH_LOG")
    if level:
        yield Finding("STITCH_LOG", "ok", f"{level} (one of {', '.join(LEVELS)})")


def _settings() -> Iterator[Finding]:
    try:
        settings = project_settings()
    except FormatError as error:
        text = "; ".join([f"{error.where}: {error.what}", *(p.detail for p in error.problems)])
        yield Finding("[tool.stitch]", "problem", text, error.remedy or "")
        return
    if settings.file is None:
        yield Finding("[tool.stitch]", "ok", "no settings in a pyproject.toml here")
    else:
        values = ", ".join(f"{name}={value}" for name, value in settings.defaults().items())
        yield Finding("[tool.stitch]", "ok", f"{settings.file}: {values or 'empty'}")


def _front_end(extra: str) -> Finding:
    """Load a front end: its package may lack what it needs in another version."""
    topic = f"front end {extra}"
    try:
        getattr(import_module(f"stitch.frontend.{extra}"), _FRONT_ENDS[extra])
    except Exception as error:
        return Finding(topic, "problem", _brief(error), f"pip install 'stitch-runtime[{extra}]'")
    return Finding(topic, "ok", "loaded")


def _executor(name: str) -> Finding:
    """Compile and run a program on the machine `tiny`, and compare its result."""
    topic, x = f"executor {name}", np.arange(32, dtype=np.float32).reshape(4, 8)
    try:
        with api.open_device("tiny", executor=name) as device:
            program = device.load(api.compile(lambda a: a @ a.T, (x,), target="tiny").binary)
            result = program(x).numpy()
    except Exception as error:
        return Finding(topic, "problem", _brief(error), f"stitch run --executor={name} --debug")
    if not np.allclose(result, x @ x.T):
        return Finding(topic, "problem", "a product of matrices is wrong",
                       "report it, with the output of stitch doctor --json")  # fmt: skip
    return Finding(topic, "ok", "compiled and ran a program, its result is right")


def _brief(error: Exception) -> str:
    return error.brief() if isinstance(error, StitchError) else f"{type(error).__name__}: {error}"


def _version(package: str) -> str | None:
    """Return the version of an installed distribution, or None."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
