"""What does not grow with the length of a loop: compiling, what the first run costs beyond any
other, the size of the file. And an ONNX model whose Scan is long.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import stitch
from fractal_ways.cases import numbers, reason_of
from fractal_ways.ours import MACHINE
from fractal_ways.recurrent_cases import lstm_network, lstm_weights, normal
from fractal_ways.results import Figure, Result
from stitch import fractal as ops
from stitch.errors import StitchError
from stitch.fractal import FractalTensor

#: Compiling and the first run, beyond what a later run takes: the long length / the short one.
LENGTH_GOAL = 1.5
#: The files of the two: the same size.
FILE_GOAL = 1.0
#: Seconds of the processor to compile an ONNX Scan of an LSTM cell, of a quarter of the length.
ONNX_SCAN_GOAL_S = 0.2
#: Fresh compilations of which the least counts, and later runs of each.
TRIES, LATER = 3, 3
#: Depth, batch.
STACK = (2, 4)


@dataclass(frozen=True, slots=True)
class _Begun:
    """Seconds of the processor, and bytes of the file."""

    compiling: float
    first: float
    later: float
    file_size: int

    @property
    def beginning(self) -> float:
        """What there is to do once."""
        return self.compiling + max(0.0, self.first - self.later)


def rows(short: int, long: int, hidden: int) -> Iterator[Result]:
    """The stacked LSTM of both lengths; the ONNX model."""
    depth, batch = STACK
    _begun(short, hidden)  # Loads all that compiling needs.
    begun = {length: _begun(length, hidden) for length in (short, long)}
    figures = [
        Figure(f"length {length}: {what}", seconds * 1e3, "ms")
        for length, each in begun.items()
        for what, seconds in (
            ("compile", each.compiling), ("first run", each.first), ("later run", each.later)
        )
    ]  # fmt: skip
    figures += [
        Figure(f"length {length}: file", e.file_size, "bytes") for length, e in begun.items()
    ]
    few, many = begun.values()
    figures += [
        Figure(f"compile and first run less a later one, {long} / {short} (LENGTH_GOAL)",
               many.beginning / few.beginning, "x", LENGTH_GOAL),
        Figure(f"size of the file, {long} / {short} (FILE_GOAL)",
               many.file_size / few.file_size, "x", FILE_GOAL),
    ]  # fmt: skip
    text = f"stacked LSTM of depth {depth}, batch {batch}, hidden {hidden}, on NumPy"
    yield Result("length", text, more=tuple(figures))
    yield _onnx_scan(max(1, long // 4), hidden)


def _begun(length: int, hidden: int) -> _Begun:
    """The least of several compilations, each run on a device of its own."""
    depth, batch = STACK
    network = lstm_network(*lstm_weights(depth, hidden), batch, hidden)
    xs = FractalTensor(normal(length, batch, hidden))
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(TRIES):
            started = time.process_time()
            nest = ops.compile(network, xs, target=MACHINE)
            compiled = time.process_time()
            with stitch.open_device(MACHINE, executor="numpy") as device:
                opened = time.process_time()
                nest.on(device)
                numbers(nest(xs))
                first = time.process_time() - opened
                later = []
                for _ in range(LATER):
                    opened = time.process_time()
                    numbers(nest(xs))
                    later.append(time.process_time() - opened)
            file = Path(folder) / "nest.ttb"
            nest.save(file)
            found.append(_Begun(compiled - started, first, min(later), file.stat().st_size))
    return min(found, key=lambda each: each.beginning)


def _onnx_scan(length: int, hidden: int) -> Result:
    """An ONNX file with a Scan of one LSTM cell, compiled."""
    _, batch = STACK
    name = f"compile an ONNX Scan of {length} LSTM cells (ONNX_SCAN_GOAL_S)"
    text = f"batch {batch}, hidden {hidden}, target {MACHINE}"
    try:
        from fractal_ways import onnx_peers

        weights = lstm_weights(1, hidden)
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "scan.onnx"
            file.write_bytes(onnx_peers.lstm_scans((length, batch, hidden), *weights))
            seconds = []
            for _ in range(TRIES):
                started = time.process_time()
                model = stitch.compile(file, target=MACHINE)
                seconds.append(time.process_time() - started)
    except (ImportError, StitchError) as error:
        figure = Figure(name, None, "s", ONNX_SCAN_GOAL_S, reason_of(error))
    else:
        operations = len(model.binary.programs[0].operations)
        note = f"{operations} operation{'s' * (operations != 1)}"
        figure = Figure(name, min(seconds), "s", ONNX_SCAN_GOAL_S, note)
    return Result("ONNX Scan", text, more=(figure,))
