"""Reads handwritten digits from image files: one task graph of host functions and two programs.

For each sheet a host function decodes its PNG, one shrinks it, the detector (a program) says where
digits are, a host function cuts them out, the classifier (a program) says which they are, and a
host function writes a JSON file. No sheet waits for another. Exit code 1 if fewer than 97 % of the
digits are found, fewer than 95 % are read right, or more than 3 % are found where none is. Needs
Pillow.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

# Inter-op threads take the cores: threads of NumPy's products would be in their way.
os.environ.setdefault("OMP_NUM_THREADS", "1")

try:
    from PIL import Image
except ImportError:
    sys.exit("read_sheets.py needs Pillow: pip install pillow")

import numpy as np
from numpy.typing import NDArray
from sheet_networks import CUT, WEIGHTS, Floats, Pixels, boxes_on, cuts_of, shrunk
from sheet_networks import classifier as classifier_graph
from sheet_networks import detector as detector_graph
from sheets import SHEET, Sheet, draw_sheets, write_sheets

import stitch
from stitch.report import ChromeTrace, Device

MACHINE = "wormhole_n150"
SEED = 100
#: Boxes of one sheet, at most: the batch of the classifier.
MOST = 16
LEAST_FOUND, LEAST_READ, MOST_WRONG = 0.97, 0.95, 0.03
#: A box is of a digit if they share half of what they cover.
LEAST_OVERLAP = 0.5


def on_host(data_type: stitch.DataType, *shape: int) -> stitch.TensorDesc:
    """A value that a host function gives."""
    return stitch.TensorDesc(shape, stitch.Layout(data_type))


F32 = stitch.DataType.FLOAT32


# -- host functions ------------------------------------------------------------------------------


@stitch.task(returns=on_host(stitch.DataType.UINT8, *SHEET))
def decoded(file: Path) -> Pixels:
    """The pixels of an image file, in grey."""
    with Image.open(file) as image:
        return np.asarray(image.convert("L"))


@stitch.task(returns=on_host(F32, 1, 1, 96, 128))
def resized(image: Pixels) -> Floats:
    """What the detector looks at."""
    return shrunk(image)


@stitch.task(returns=(on_host(F32, MOST, 4), on_host(F32, MOST, CUT * CUT)))
def cut(maps: Floats, image: Pixels) -> tuple[Floats, Floats]:
    """The boxes that the detector found, and what is in them; rows that are left over are zero."""
    boxes, cuts = np.zeros((MOST, 4), np.float32), np.zeros((MOST, CUT * CUT), np.float32)
    found = boxes_on(maps[0], MOST)
    boxes[: len(found)], cuts[: len(found)] = found, cuts_of(image, found)
    return boxes, cuts


@stitch.task(returns=on_host(stitch.DataType.INT64, 1))
def written(file: Path, boxes: Floats, probabilities: Floats) -> NDArray[np.int64]:
    """Writes what was found, a line for each digit, whole or not at all; gives how many."""
    digits = [
        {
            "digit": int(row.argmax()),
            "probability": round(float(row.max()), 4),
            "box": [round(edge, 1) for edge in box.tolist()],
        }
        for box, row in zip(boxes, probabilities, strict=True)
        if box.any()
    ]
    part = file.with_name(f".{file.name}.part")
    listed = ",\n ".join(map(json.dumps, digits))
    part.write_text(f'{{"digits": [\n {listed}\n]}}\n', encoding="utf-8")
    part.replace(file)
    return np.array([len(digits)])


# -- programs, and the graph of it all -----------------------------------------------------------


def compile_programs(folder: Path) -> tuple[Path, Path]:
    """Detector and classifier, each compiled by itself, as files."""
    files = folder / "detector.ttb", folder / "classifier.ttb"
    with np.load(WEIGHTS) as weights:
        graphs = detector_graph(weights, 1), classifier_graph(weights, MOST)
    for graph, file in zip(graphs, files, strict=True):
        stitch.compile(graph, target=MACHINE).save(file)
    return files


def task_graph(device: Device, programs: tuple[Path, Path], images: list[Path]) -> stitch.TaskGraph:
    """What is done with the images; a result goes beside each.

    All sheets are looked at before any is cut: between host functions, which run one at a time,
    there is work for every thread.
    """
    detector, classifier = (device.load(file) for file in programs)
    graph = stitch.TaskGraph("read sheets")
    pages = [graph.host(decoded, file) for file in images]
    small = [resized(page) for page in pages]
    maps = [graph.call(detector, each) for each in small]
    found = [cut(each, page) for each, page in zip(maps, pages, strict=True)]
    read = [graph.call(classifier, cuts) for _, cuts in found]
    for file, (boxes, _), probabilities in zip(images, found, read, strict=True):
        count = graph.host(written, file.with_suffix(".json"), boxes, probabilities)
        graph.output(count, file.stem)
    return graph


# -- whether it is right -------------------------------------------------------------------------


def overlap(one: list[float], other: list[float]) -> float:
    """The area that two boxes share, of the area that they cover."""
    corners = np.array([one, other])
    width, height = (corners[:, 2:].min(axis=0) - corners[:, :2].max(axis=0)).clip(0)
    areas = (corners[:, 2:] - corners[:, :2]).prod(axis=1)
    return float(width * height / (areas.sum() - width * height))


def judged(sheet: Sheet, result: Path) -> tuple[int, int, int]:
    """How many digits of a sheet were found, how many read right, and how many boxes hold none."""
    told = json.loads(result.read_text(encoding="utf-8"))["digits"]
    found = right = 0
    for box, label in zip(sheet.boxes.tolist(), sheet.labels.tolist(), strict=True):
        best = max(told, key=lambda digit: overlap(digit["box"], box), default=None)
        if best is not None and overlap(best["box"], box) >= LEAST_OVERLAP:
            told.remove(best)
            found += 1
            right += best["digit"] == label
    return found, right, len(told)


def given_words() -> argparse.Namespace:
    """What the command line says; words that cannot be right end the process before anything runs.

    A trace overwrites the file that is there: its name must say that a trace is meant.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sheets", type=int, default=12, help="how many (default: 12)")
    parser.add_argument(
        "--folder", type=Path, help="where images and results go (default: nowhere)"
    )
    parser.add_argument(
        "--inter_op_threads", type=int, default=2, help="threads for programs (default: 2)"
    )
    parser.add_argument("--trace", type=Path, help="a file for Perfetto, such as trace.json.gz")
    words = parser.parse_args()
    folder, trace = words.folder, words.trace
    if words.sheets < 1:
        parser.error("--sheets takes how many sheets to read: at least 1")
    if words.inter_op_threads < 1:
        parser.error("--inter_op_threads takes how many threads compute: at least 1")
    if folder is not None and not all(p.is_dir() for p in (folder, *folder.parents) if p.exists()):
        parser.error(f"--folder takes a folder, there or not: {folder} is a file, or in one")
    if trace is not None and not trace.name.endswith((".json", ".json.gz")):
        parser.error(f"--trace takes a file that ends in .json or .json.gz, not {trace}")
    if trace is not None and (trace.is_dir() or not trace.parent.is_dir()):
        parser.error(f"--trace takes a file in a folder that is there, not {trace}")
    return words


def main() -> int:
    """Draw sheets, read them, say what was found; the exit code says whether it is right."""
    words = given_words()
    with ExitStack() as stack:
        folder = words.folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder.mkdir(parents=True, exist_ok=True)
        sheets = draw_sheets("held_out", words.sheets, SEED)
        images = write_sheets(sheets, folder)
        device = stack.enter_context(
            stitch.open_device(MACHINE, inter_op_threads=words.inter_op_threads)
        )
        graph = task_graph(device, compile_programs(folder), images)
        run = device.prepare(graph)
        if words.trace:
            stack.enter_context(ChromeTrace(device, words.trace))
        run()
        print(device.explain())
        scores = [judged(s, i.with_suffix(".json")) for s, i in zip(sheets, images, strict=True)]
        print(f"\n{images[0].name}: {images[0].with_suffix('.json').read_text(encoding='utf-8')}")
    found, right, wrong = np.sum(scores, axis=0)
    total = sum(len(sheet.labels) for sheet in sheets)
    print(f"\nfound       {found} of {total} digits on {len(sheets)} sheets")
    print(f"read right  {right} of {total}: {right / total:.4f}")
    print(f"not there   {wrong} of {found + wrong} boxes")
    enough = found >= LEAST_FOUND * total and right >= LEAST_READ * total
    return 0 if enough and wrong <= MOST_WRONG * total else 1


if __name__ == "__main__":
    sys.exit(main())
