"""Defaults of options from `[tool.stitch]` in the nearest pyproject.toml.

    [tool.stitch]
    target = "wormhole_n150"        # --target of `stitch compile`
    executor = "torch"              # --executor of `stitch run` and `stitch compile`
    cache = true                    # --cache of `stitch compile`: the default folder, or a path
    budgets = ["copies", "bytes:+0", "seconds:+5%"]     # --fail_on of `stitch diff`

The file is that of the current folder, or of the nearest folder above it that has one. An option
of the command line replaces a setting; --fail_on adds to the budgets. Paths are relative to the
file's folder.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stitch import plugins
from stitch.errors import FormatError, Problem, closest
from stitch.files import read_text, unreadable
from stitch.option_values import EXECUTOR_NAMES, is_torch_device

#: By key: what it takes, for errors.
KEYS = {
    "target": "the name of a machine, or the path of its description",
    "executor": "the name of an executor",
    "cache": "true, false, or the path of a folder",
    "budgets": "a list of texts, as --fail_on of `stitch diff` takes them",
}
_REMEDY = "correct the file, or run the command in a folder of another project"
#: By key: the name of the option (of its attribute) that it stands for.
OPTIONS = {"target": "target", "executor": "executor", "cache": "cache", "budgets": "fail_on"}
#: The value of `--cache` that stands for the default folder.
DEFAULT_CACHE = "default"


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of a project; `file` is where they come from, None without any."""

    file: Path | None = None
    target: str | None = None
    executor: str | None = None
    cache: str | None = None
    budgets: tuple[str, ...] = ()

    def defaults(self) -> dict[str, Any]:
        """Return what the settings say, by the name of the option that each stands for."""
        values = ((name, getattr(self, key)) for key, name in OPTIONS.items())
        return {name: list(v) if isinstance(v, tuple) else v for name, v in values if v}


def default_cache_folder() -> Path:
    """Return the folder of this user's compile cache, by the conventions of the system."""
    from platformdirs import user_cache_path

    return user_cache_path("stitch", appauthor=False) / "compiled"


def project_settings(folder: Path | None = None) -> Settings:
    """Return the settings of the project of a folder (default: the current one).

    Raises:
        FormatError: The file's `[tool.stitch]` has defects; lists all.
    """
    start = Path.cwd() if folder is None else folder
    file = next(
        (f for at in (start, *start.parents) if (f := at / "pyproject.toml").is_file()), None
    )
    if file is None:
        return Settings()
    try:
        text = read_text(file)
    except (OSError, UnicodeDecodeError) as error:
        raise (
            unreadable(file, error)
            if isinstance(error, OSError)
            else FormatError(
                "this is no UTF-8 text", where=str(file), got=error.reason, remedy=_REMEDY
            )
        ) from error
    # Other tools report what is wrong in a file without settings of Stitch.
    return _settings_of(text, file) if "stitch" in text else Settings()


def _settings_of(text: str, file: Path) -> Settings:
    try:
        table = tomllib.loads(text).get("tool", {}).get("stitch")
    except (tomllib.TOMLDecodeError, AttributeError, RecursionError) as error:
        raise FormatError(
            "this is no TOML", where=str(file), got=str(error), remedy=_REMEDY
        ) from error
    if table is None:
        return Settings()
    problems = _problems(table, file)
    if problems:
        count = len(problems)
        raise FormatError(
            f"[tool.stitch] has {count} defect{'s' if count > 1 else ''}",
            where=str(file), problems=problems,
            remedy=_REMEDY,
        )  # fmt: skip
    values = dict(table)
    if "cache" in values:
        values["cache"] = _cache_of(values["cache"], file.parent)
    target = values.get("target")
    if target is not None and ("/" in target or target.endswith((".yaml", ".yml", ".ttsys"))):
        values["target"] = str(file.parent / target)
    return Settings(file, **values | {"budgets": tuple(values.get("budgets", ()))})


def _cache_of(value: bool | str, folder: Path) -> str | None:
    if isinstance(value, bool):
        return DEFAULT_CACHE if value else None
    return str(folder / Path(value).expanduser())


def _problems(table: object, file: Path) -> tuple[Problem, ...]:
    """Return the defects of `[tool.stitch]`."""
    if not isinstance(table, Mapping):
        return (Problem("wrong_type", f"{file}: tool.stitch", "must be a table"),)
    found = []
    for key, value in table.items():
        where = f"{file}: tool.stitch.{key}"
        if key not in KEYS:
            detail = f"there is no such key; allowed: {', '.join(KEYS)}{closest(key, KEYS, '; ')}"
            found.append(Problem("unknown_key", where, detail))
        elif key == "executor" and isinstance(value, str) and not _is_executor(value):
            detail = f"there is no executor {value!r}{closest(value, EXECUTOR_NAMES, '; ')}"
            found.append(Problem("unknown_word", where, detail))
        elif not _is_sound(key, value):
            found.append(Problem("wrong_type", where, f"must be {KEYS[key]}, not {value!r}"[:300]))
    return tuple(found)


def _is_sound(key: str, value: object) -> bool:
    if key == "budgets":
        return isinstance(value, list) and all(isinstance(word, str) and word for word in value)
    return (isinstance(value, str) and bool(value)) or (key == "cache" and isinstance(value, bool))


def _is_executor(name: str) -> bool:
    return name in EXECUTOR_NAMES or is_torch_device(name) or name in plugins.names("executors")


def cache_folder(option: str) -> Path:
    """Return the folder of `--cache=DIR`, where `default` stands for that of this user."""
    return default_cache_folder() if option == DEFAULT_CACHE else Path(option)
