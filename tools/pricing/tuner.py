"""The prices of this machine as a file that `open_device(prices=)` takes."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from pricing.figures import Figure, Section, points_of, section_of
from pricing.operations import measured_operations
from pricing.timing import installed, times_of
from stitch.errors import UsageError
from stitch.files import atomic_write
from stitch.runtime import (
    LIBRARY_PRICES,
    PriceTable,
    load_prices,
    parse_prices,
    processor_name,
    this_processor,
)

#: Elements of the largest operands, and how often all is tried.
LARGEST, TRIES = 1 << 20, 15
#: Fewer elements tell nothing; more than this only take time.
LEAST_LARGEST, MOST_LARGEST = 1 << 6, 1 << 26
_PACKAGES = {"numpy": "numpy", "onnxruntime": "onnxruntime", "torch": "torch"}


def tune(
    file: Path, *, name: str | None = None, largest: int = LARGEST, tries: int = TRIES
) -> PriceTable:
    """Measure what operations take on this machine, by each library that is installed, and write
    that as a file for `open_device(prices=file)`.

    It takes about a minute, on one thread, and is best done while nothing else runs. `name`: what
    `explain` calls the table (default: as the file is called). `largest`: elements of the largest
    operands; `tries`: how often each operation is tried, of which the least time counts. Nothing
    uses the file but where it is named. Raises `UsageError` for sizes that tell nothing,
    `StitchError` where the file cannot be written.
    """
    if file.suffix not in (".yaml", ".yml"):
        raise UsageError(
            "a table of prices is a .yaml file", got=str(file),
            remedy=f"name it {str(file.with_suffix('.yaml'))!r}",
        )  # fmt: skip
    text = measured_text(name or file.stem, largest, tries)
    table = parse_prices(text.encode(), str(file))
    atomic_write(file, text)
    return table


def measured_text(name: str, largest: int = LARGEST, tries: int = TRIES) -> str:
    """The prices of this machine as the text of a file; raises `UsageError`."""
    if not LEAST_LARGEST <= largest <= MOST_LARGEST or tries < 1:
        raise UsageError(
            "there is nothing to be told by these sizes",
            expected=f"largest from {LEAST_LARGEST} to {MOST_LARGEST}, tries from 1",
            got=f"largest={largest}, tries={tries}",
        )
    executors = installed(LIBRARY_PRICES)
    operations = list(measured_operations(largest))
    times = times_of(operations, executors, tries)
    functions = [n for n in dict.fromkeys(o.name for o in operations) if n[0].isupper() or "." in n]
    sections = {library: section_of(library, times, functions) for library in executors}
    head = [
        f"# The prices of one machine, as `tools/prices` measures them.\nname: {name}",
        f"processor:\n{_processor_lines()}",
    ]
    points = points_of(sections)
    head.append("points:\n" + _lines(points) + '\n  source: "where ONNX Runtime\'s call is paid '
                'back, by the prices below"')  # fmt: skip
    head.append("gains:\n" + _gains_lines())
    source = f"measured by tools/prices, {processor_name()}, one thread, up to {largest} elements"
    body = [
        f'{library}:\n{_lines(section)}\n  source: "{source}, {_version(library)}"'
        for library, section in sections.items()
    ]
    return "\n\n".join([*head, *body]) + "\n"


def _processor_lines() -> str:
    mine = this_processor()
    # What is not known is written as the nearest shipped family has it.
    near = load_prices().processor
    figures = {
        "vendor": mine.vendor or near.vendor,
        "cache_nbytes": mine.cache_nbytes or near.cache_nbytes,
    }
    lines = [f"  {key}: {value}" for key, value in figures.items()]
    return "\n".join([*lines, '  source: "what the system says of the processor"'])


def _gains_lines() -> str:
    return "\n".join([
        "  division: {part: 0.1, us: 20}", "  numpy: {part: 0.1, us: 0}",
        "  library: {part: 0.1, us: 20}",
        '  source: "chosen: prices are too rough for less, and fusions are not seen in them"',
    ])  # fmt: skip


def _version(library: str) -> str:
    try:
        return f"{library} {version(_PACKAGES[library])}"
    except PackageNotFoundError:
        return library


def _lines(section: Section | Mapping[str, int]) -> str:
    lines = []
    for key, value in section.items():
        if isinstance(value, Mapping) and any(isinstance(k, str) for k in value):
            lines.append(f"  {key}:")
            lines += [f"    {name}: {_figure(figure)}" for name, figure in value.items()]
        elif isinstance(value, Mapping) and not value:
            lines.append(f"  {key}: {{}}")
        else:
            lines.append(f"  {key}: {_figure(value)}")
    return "\n".join(lines)


def _figure(figure: Figure) -> str:
    if isinstance(figure, Mapping):
        return "{" + ", ".join(f"{size}: {_number(value)}" for size, value in figure.items()) + "}"
    return _number(figure)


def _number(value: float) -> str:
    """Three digits: no measurement has more."""
    if isinstance(value, int):
        return str(value)
    rounded = float(f"{value:.3g}")
    return f"{int(rounded)}" if rounded == int(rounded) else repr(rounded)
