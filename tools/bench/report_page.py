"""What a report page costs: writing it, its size, its first picture, a zoom; and recording.

Two runs of `--events` events are shown by Chromium, from a file:

    repeated    passes of a chain of six programs: equal passes are stored once
    distinct    buffers allocated and freed at random, no event twice: nothing is stored once

Printed are seconds to write the page, its size, seconds from opening its data to the first
picture, and the longest of some zooms, of the page's own clock; of all rounds the least. The code
of a page is its size without data, uPlot and uPlot's style. `recorded` is the processor time of a
pass of the chain with a recorder ÷ without one, `unrecorded` that after a recorder was closed ÷
without one, the least of all rounds each. `--check` exits 1 where a goal is missed. Needs
playwright and Chromium (`--browser`).
"""

from __future__ import annotations

import json
import os
import random
import re
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

# Before NumPy is loaded: threads would measure the machine's other work.
os.environ["OMP_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = "1"

import numpy as np
from command_line import bench_parser, exit_code_for, from_one, refused

import stitch
from stitch import ComputationGraphBuilder
from stitch.errors import StitchError
from stitch.machine import load_machine
from stitch.planner import Cost
from stitch.report import Recorder, RunRecord, page_text

WRITE_SECONDS, PICTURE_SECONDS, ZOOM_SECONDS, NBYTES = 2.0, 2.0, 0.1, 10_000_000
SIX_PARTS_NBYTES, CODE_NBYTES = 200_000, 60_000
#: `unrecorded` has no more work to do; what it is above 1 is noise of the clock.
RECORDED, UNRECORDED = 1.5, 1.03
PARTS = 6
WIDTH = 64
FLAGS = ("--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking")


@dataclass(frozen=True, slots=True)
class Page:
    """The figures of one page."""

    name: str
    events: int
    rectangles: int
    write_seconds: float
    nbytes: int
    picture_seconds: float
    zoom_seconds: float


def chain(device: stitch.Device) -> stitch.Pipeline:
    """Six programs, every second of which wants its input in DRAM."""
    programs = []
    for part in range(PARTS):
        b = ComputationGraphBuilder(f"part{part}")
        weight = np.full((WIDTH, WIDTH), 0.01, np.float32)
        x = b.input("x", (8, WIDTH), "float32")
        b.output("y", b.op("Relu", b.op("MatMul", x, b.constant(weight))))
        space = "dram" if part % 2 else "l1"
        model = stitch.compile(
            b.build(), target=device.machine.name, placement=(f"input.x.space={space}",)
        )
        programs.append(device.load(model))
    return stitch.Pipeline(programs)


def repeated(events: int) -> RunRecord:
    """A run of the chain, in passes, until its plans have made so many steps."""
    with stitch.open_device("wormhole_n150", executor="null") as device:
        recorder = Recorder(device)
        pipeline = chain(device)
        x = np.ones((8, WIDTH), np.float32)
        for _ in range(4):
            pipeline(x)
        device.wait()
        first = recorder.record()
        steps = sum(len(plan.steps) for plan in first.plans.values()) / len(first.plans)
        for _ in range(round(events / steps) - 4):
            pipeline(x)
        device.wait()
        record = recorder.record()
        recorder.close()
    return record


def distinct(events: int, seed: int) -> RunRecord:
    """Random buffers of L1: half of the events allocate, half free."""
    chance, machine = random.Random(seed), load_machine("wormhole_n150")
    shape = machine.shape.l1
    assert shape is not None
    unit, live = 64, dict[int, int]()
    slots = shape.capacity // unit - 1
    made: list[dict[str, object]] = []
    while len(made) < events:
        address = shape.base + unit * chance.randrange(slots)
        if address in live:
            made.append(event("free", address, live.pop(address)))
        elif len(live) < 400 or chance.random() < 0.4:
            live[address] = chance.randrange(16, unit)
            made.append(event("reserve", address, live[address]))
        else:
            address = next(iter(live))
            made.append(event("free", address, live.pop(address)))
    return RunRecord(machine, {}, tuple(made), Cost(0, 0, 0.0))


def event(kind: str, address: int, size: int) -> dict[str, object]:
    """An event of a record."""
    origin = {"origin": f"buffer {address % 97}"} if kind == "reserve" else {}
    return {"event": kind, "space": "l1", "address": address, "size_per_bank": size, **origin}


def measured(name: str, record: RunRecord, folder: Path, browser: str, rounds: int) -> Page:
    """Write a page and open it, some times."""
    from playwright.sync_api import sync_playwright

    path, written, pictures, zoomed = folder / f"{name}.html", [], [], []
    for _ in range(rounds):
        began = time.perf_counter()
        path.write_text(page_text({name: record}))
        written.append(time.perf_counter() - began)
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=browser, args=[*FLAGS])
        for _ in range(rounds):
            page = chromium.new_page(viewport={"width": 1280, "height": 900})
            page.goto(path.as_uri())
            page.wait_for_function("stitchReport.ready || stitchReport.error", timeout=120_000)
            counts = page.evaluate("stitchReport.counts")
            pictures.append(page.evaluate("stitchReport.firstPicture") / 1e3)
            zooms = [page.evaluate("stitchReport.showAll()")]
            zooms += [page.evaluate(f"stitchReport.zoom({f})") for f in (0.5, 0.8, 1.25, 2, 2)]
            zoomed.append(max(zooms) / 1e3)
            page.close()
        chromium.close()
    return Page(name, counts["total"], counts["rectangles"], min(written), path.stat().st_size,
                min(pictures), min(zoomed))  # fmt: skip


def code_nbytes(text: str) -> int:
    """The bytes of a page without its data and uPlot."""
    parts = [re.search(r'(?s)<script type="text/plain" id="data">.*?</script>', text),
             re.search(r"(?s)<script>/\*! uPlot.*?</script>", text),
             re.search(r"(?s)\.uplot,.*?</style>", text)]  # fmt: skip
    return len(text.encode()) - sum(len(part[0].encode()) for part in parts if part)


def pass_ratios(rounds: int) -> tuple[float, float]:
    """The least processor time of a recorded pass, and of one after a recorder, ÷ without."""
    least = dict.fromkeys(("never", "during", "after"), float("inf"))
    x = np.ones((8, WIDTH), np.float32)
    for _ in range(rounds):
        for when in least:
            with stitch.open_device("wormhole_n150") as device:
                recorder = None if when == "never" else Recorder(device)
                if recorder is not None and when == "after":
                    recorder.close()
                pipeline = chain(device)
                for _ in range(20):
                    pipeline(x).numpy()
                for _ in range(100):
                    began = time.process_time()
                    for _ in range(10):
                        pipeline(x).numpy()
                    least[when] = min(least[when], (time.process_time() - began) / 10)
                if recorder is not None:
                    recorder.close()
    return least["during"] / least["never"], least["after"] / least["never"]


def missed(pages: list[Page], six_parts: int, code: int, ratios: tuple[float, float]) -> list[str]:
    """The goals that are missed."""
    goals = []
    for page in pages:
        for what, got, most in (
            ("writing", page.write_seconds, WRITE_SECONDS),
            ("the first picture", page.picture_seconds, PICTURE_SECONDS),
            ("a zoom", page.zoom_seconds, ZOOM_SECONDS),
        ):
            if got > most:
                goals.append(f"{page.name}: {what} takes {got:.3f} s, at most {most} s")
        if page.nbytes > NBYTES:
            goals.append(f"{page.name}: {page.nbytes} B, at most {NBYTES} B")
    if six_parts > SIX_PARTS_NBYTES:
        goals.append(f"a model in six parts: {six_parts} B, at most {SIX_PARTS_NBYTES} B")
    if code > CODE_NBYTES:
        goals.append(f"the code of a page: {code} B, at most {CODE_NBYTES} B")
    for what, ratio, most in zip(("a recorded", "an unrecorded"), ratios, (RECORDED, UNRECORDED),
                                 strict=True):  # fmt: skip
        if ratio > most:
            goals.append(f"{what} pass takes {ratio:.2f} x as long, at most {most}")
    return goals


def main(words: list[str] | None = None) -> int:
    """Measure, print, and compare with the goals."""
    parser = bench_parser(__doc__)
    parser.add_argument("--events", type=from_one, default=200_000, help="of each run")
    parser.add_argument("--rounds", type=from_one, default=3, help="of each measurement")
    parser.add_argument("--seed", type=int, default=0, help="of the random buffers")
    parser.add_argument("--browser", default="/usr/bin/chromium", help="Chromium's path")
    options = parser.parse_args(words)
    try:
        with tempfile.TemporaryDirectory() as folder:
            runs = {"repeated": repeated(options.events),
                    "distinct": distinct(options.events, options.seed)}  # fmt: skip
            pages = [measured(name, run, Path(folder), options.browser, options.rounds)
                     for name, run in runs.items()]  # fmt: skip
        text = page_text({"run": repeated(200)})
        six_parts, code = len(text.encode()), code_nbytes(text)
        recorded, unrecorded = ratios = pass_ratios(options.rounds)
    except StitchError as error:
        return refused("report_page", error)
    if options.json:
        print(json.dumps({"pages": [asdict(page) for page in pages],
                          "six_parts_nbytes": six_parts, "code_nbytes": code,
                          "recorded": recorded, "unrecorded": unrecorded}))  # fmt: skip
    else:
        print(f"{'run':10}{'moments':>9}{'rectangles':>12}{'write s':>9}{'kB':>8}"
              f"{'picture s':>11}{'zoom s':>8}")  # fmt: skip
        for page in pages:
            print(
                f"{page.name:10}{page.events:9}{page.rectangles:12}{page.write_seconds:9.2f}"
                f"{page.nbytes / 1e3:8.0f}{page.picture_seconds:11.2f}{page.zoom_seconds:8.3f}"
            )
        print(f"a model in six parts: {six_parts / 1e3:.0f} kB, of it code {code / 1e3:.1f} kB")
        print(f"a pass: recorded {recorded:.2f} x, unrecorded {unrecorded:.2f} x")
    return exit_code_for(missed(pages, six_parts, code, ratios), check=options.check)


if __name__ == "__main__":
    sys.exit(main())
