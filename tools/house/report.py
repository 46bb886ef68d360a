"""The report: the numbers of a package, each with its goal where it has one."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from house.findings import (
    circles,
    deep_imports,
    folder_sizes,
    lines,
    long_files,
    private_reaches,
    reference_counts,
)
from house.modules import read_modules


@dataclass(frozen=True)
class Structure:
    """What was measured. `findings` have the goal that there are none, `notes` have no goal."""

    files: int
    lines: int
    longest_folder: tuple[str, int]
    findings: dict[str, tuple[str, ...]]
    notes: dict[str, tuple[str, ...]]


def measure(package: Path) -> Structure:
    """Everything about one package."""
    modules = read_modules(package)
    return Structure(
        files=len(modules),
        lines=lines(modules),
        longest_folder=next(iter(folder_sizes(modules).items())),
        findings={
            "deep imports": tuple(deep_imports(modules)),
            "circles of files": tuple(" ".join(names) for names in circles(modules)),
            "uses of getrefcount": tuple(reference_counts(modules)),
        },
        notes={
            "private reaches": tuple(private_reaches(modules)),
            "files over 800 lines": tuple(long_files(modules)),
        },
    )


def goals_missed(structure: Structure) -> list[str]:
    """The findings that there should be none of."""
    return [name for name, found in structure.findings.items() if found]


def print_report(structure: Structure, every: bool) -> None:
    """The numbers, a line each, and every finding below its line if asked for."""
    print(f"{structure.files:7} files")
    print(f"{structure.lines:7} lines")
    folder, count = structure.longest_folder
    print(f"{count:7} files in the longest folder, {folder}")
    for name, found in (structure.findings | structure.notes).items():
        goal = ", goal 0" if name in structure.findings else ""
        print(f"{len(found):7} {name}{goal}")
        for line in found if every else ():
            print(f"          {line}")
