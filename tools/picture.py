"""Draw docs/images/stitch.svg: the path of the data, and a device's memory during a planned run.

    python tools/picture.py            # writes the file

The right half is drawn from the record of a run: on the machine `tiny` two tensors fill L1, and a
third program wants each at the other one's address, so a piece of one passes through DRAM.
"""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from pathlib import Path

import numpy as np

import stitch
from stitch.planner import Allocate, Copy, Execute, Free, Plan, Relocate, Transfer
from stitch.report import Recorder, read_record

FILE = Path(__file__).resolve().parent.parent / "docs" / "images" / "stitch.svg"
ROWS, LOWER, UPPER = 60, "0x400", "0x2200"
BOTTOM, TOP, BANKS = 0x400, 0x4000, 4
COLORS = {"a": "#5b8ff9", "b": "#f6903d", "c": "#61b15a"}
#: The plot of L1: left, right, and the heights of its highest and lowest address; then DRAM's bar.
LEFT, RIGHT, HIGH, LOW = 450.0, 930.0, 70.0, 290.0
DRAM_HIGH, DRAM_LOW = 330.0, 352.0


def recorded_plans() -> Mapping[int, Plan]:
    """Run the three programs and return the plans that ran."""
    rows = stitch.TensorDesc((ROWS, 128), stitch.Layout(stitch.DataType.FLOAT32))
    made = ("input.x.space=host", "output.0.space=l1")
    crosswise = (f"input.x.address={UPPER}", f"input.y.address={LOWER}", "output.0.space=dram")
    double = stitch.compile(lambda x: x + x, [rows], target="tiny", name="a",
                            placement=[*made, f"output.0.address={LOWER}"])  # fmt: skip
    triple = stitch.compile(lambda x: x * np.float32(3), [rows], target="tiny", name="b",
                            placement=[*made, f"output.0.address={UPPER}"])  # fmt: skip
    minus = stitch.compile(lambda x, y: x - y, [rows] * 2, target="tiny", name="c",
                           placement=crosswise)  # fmt: skip
    with stitch.open_device("tiny") as device:
        recorder = Recorder(device)
        a, b, c = (device.load(model) for model in (double, triple, minus))
        ones = np.ones((ROWS, 128), np.float32)
        first, second = a(ones), b(ones)
        stitch.wait((first, second))
        result = c(first, second)
        assert isinstance(result, stitch.Tensor)
        assert (result.numpy() == -1).all()
        return read_record(recorder.text()).plans


class Drawing:
    """The lines of an SVG."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def box(self, x: float, y: float, width: float, height: float, fill: str) -> None:
        """A rectangle by its upper left corner."""
        self.lines.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" rx="3" '
            f'fill="{fill}" stroke="#555"/>'
        )

    def text(self, x: float, y: float, words: str, size: int = 12, anchor: str = "middle") -> None:
        """Words, centred unless `anchor` says otherwise."""
        self.lines.append(
            f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}">'
            f"{escape(words)}</text>"
        )

    def arrow(self, x1: float, y1: float, x2: float, y2: float, color: str = "#555") -> None:
        """A line with a head."""
        self.lines.append(
            f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{color}" '
            'stroke-width="1.6" marker-end="url(#head)"/>'
        )

    def svg(self) -> str:
        """The whole file."""
        return "\n".join([
            '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 960 400" '
            'font-family="Helvetica, Arial, sans-serif">',
            '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="6" '
            'markerHeight="6" orient="auto"><path d="M0 0L8 4L0 8z" fill="#555"/></marker></defs>',
            '<rect width="960" height="400" fill="white"/>',
            *self.lines, "</svg>", "",
        ])  # fmt: skip


def draw_path(drawing: Drawing) -> None:
    """The left half: two modules, two compiler runs, two files, one runtime."""
    drawing.text(190, 28, "Compiled independently, run as one", 15)
    for x, name in ((30, "a"), (210, "b")):
        for y, words in ((50, f"module {name}"), (115, "compiler"), (180, f"{name}.ttb")):
            drawing.box(x, y, 140, 36, COLORS[name] if words.endswith("ttb") else "#f2f2f2")
            drawing.text(x + 70, y + 23, words)
        drawing.arrow(x + 70, 86, x + 70, 114)
        drawing.arrow(x + 70, 151, x + 70, 179)
        drawing.arrow(x + 70, 216, x + 70, 253)
    drawing.box(30, 254, 320, 62, "#f2f2f2")
    drawing.text(190, 278, "runtime: queue, plan, run")
    drawing.text(190, 299, "copies that are missing, addresses, reasons", 11)
    drawing.arrow(190, 316, 190, 345)
    drawing.text(190, 365, "result, and explain()")


def height(address: float) -> float:
    """The height of an address of L1."""
    return LOW - (address - BOTTOM) / (TOP - BOTTOM) * (LOW - HIGH)


class MemoryPlot:
    """The right half: addresses of L1 over the steps of the plans, with DRAM below."""

    def __init__(self, drawing: Drawing, plans: Mapping[int, Plan]) -> None:
        self.drawing = drawing
        moments = sum(self.moments(step) for plan in plans.values() for step in plan.steps) + 1
        self.unit = (RIGHT - LEFT) / moments
        self.now = 0.0
        #: Live buffers by space and address: the moment of their allocation, size and maker.
        self.live: dict[tuple[str, int], tuple[float, int, str]] = {}

    @staticmethod
    def moments(step: object) -> int:
        """How much of the time axis a step takes."""
        if isinstance(step, Relocate):
            return len(step.transfers)
        return 2 if isinstance(step, Execute) else 0

    def x(self, moment: float) -> float:
        """The place of a moment on the time axis."""
        return LEFT + moment * self.unit

    def draw(self, plans: Mapping[int, Plan]) -> None:
        """Draw all plans, one after the other."""
        self.drawing.text((LEFT + RIGHT) / 2, 28, "L1 of a small machine while they run", 15)
        self.drawing.lines.append(
            f'<rect x="{LEFT}" y="{HIGH}" width="{RIGHT - LEFT}" height="{LOW - HIGH}" '
            'fill="#fafafa" stroke="#aaa"/>'
        )
        for address in (BOTTOM, int(UPPER, 16), TOP):
            self.drawing.text(LEFT - 6, height(address) + 4, f"{address:#x}", 11, "end")
        self.drawing.text(LEFT - 6, (DRAM_HIGH + DRAM_LOW) / 2 + 4, "DRAM", 11, "end")
        self.drawing.text(LEFT - 6, HIGH - 10, "L1 address", 11, "end")
        for plan in plans.values():
            there = {buffer.number: buffer for buffer in plan.request.buffers}
            for step in plan.steps:
                if isinstance(step, Allocate):
                    there[step.buffer.number] = step.buffer
                    self.begin(step.buffer.space.value, step.buffer.address or 0,
                               step.buffer.size_per_bank, step.buffer.origin)  # fmt: skip
                elif isinstance(step, Free):
                    freed = there[step.buffer]
                    self.end(freed.space.value, freed.address or 0)
                elif isinstance(step, Relocate):
                    self.relocate(step)
                elif isinstance(step, Execute):
                    name = plan.request.tasks[step.task].transformation.name
                    middle = self.x(self.now + 1)
                    self.drawing.text(middle, HIGH - 10, f"{name} runs", 11)
                    self.now += 2
                else:
                    assert isinstance(step, Copy), step
        self.now += 1
        for space, address in list(self.live):
            self.end(space, address)
        self.drawing.text(
            (LEFT + RIGHT) / 2,
            380,
            "from a recorded run: c reads each tensor at the other one's address",
            11,
        )

    def begin(self, space: str, address: int, size: int, origin: str) -> None:
        """A buffer of L1 or DRAM begins; `origin` ends with the name of its program."""
        if space != "host":
            self.live[space, address] = (self.now, size, origin.split("'")[-2])

    def end(self, space: str, address: int) -> None:
        """A buffer ends: draw it."""
        if space == "host":
            return
        start, size, name = self.live.pop((space, address))
        x, width = self.x(start), self.x(self.now) - self.x(start)
        high = height(address + size) if space == "l1" else DRAM_HIGH
        low = height(address) if space == "l1" else DRAM_LOW
        self.drawing.box(x, high, width, low - high, COLORS[name])
        self.drawing.text(x + width / 2, (high + low) / 2 + 4, f"output of {name}", 11)

    def relocate(self, step: Relocate) -> None:
        """Buffers change places by transfers, drawn as arrows from source to target."""
        olds = [key for key in self.live if key[0] == step.space.value]
        assert len(olds) == len(step.targets)
        moved = {key: self.live[key] for key in olds}
        for key in olds:
            self.end(*key)
        start = self.now
        for transfer in step.transfers:
            self.transfer(transfer)
            self.now += 1
        assert step.certificate is not None
        self.drawing.box(self.x(start + 1), DRAM_HIGH, self.x(self.now - 1) - self.x(start + 1),
                         DRAM_LOW - DRAM_HIGH, "#ddd")  # fmt: skip
        middle = self.x((start + self.now) / 2)
        self.drawing.text(
            middle, (DRAM_HIGH + DRAM_LOW) / 2 + 4, f"bounce: {sum(step.certificate.pieces)} B", 11
        )
        self.drawing.text(middle, HIGH - 10, "they change places", 11)
        sources = sorted(olds, key=lambda key: key[1])
        # Two buffers that fill the space: each goes to the address of the other.
        for old, (_, address) in zip(sources, reversed(sources), strict=True):
            _, size, name = moved[old]
            self.live[step.space.value, address] = (self.now, size, name)

    def transfer(self, transfer: Transfer) -> None:
        """An arrow from where bytes are read to where they are written."""

        def middle(space: str, address: int) -> float:
            return height(address + transfer.nbytes / BANKS / 2) if space == "l1" else DRAM_HIGH

        self.drawing.arrow(
            self.x(self.now), middle(transfer.source_space.value, transfer.source_address),
            self.x(self.now + 1), middle(transfer.target_space.value, transfer.target_address),
        )  # fmt: skip


def picture() -> str:
    """The whole picture."""
    drawing = Drawing()
    draw_path(drawing)
    plans = recorded_plans()
    MemoryPlot(drawing, plans).draw(plans)
    return drawing.svg()


if __name__ == "__main__":
    FILE.parent.mkdir(exist_ok=True)
    FILE.write_text(picture(), encoding="utf-8")
    print(FILE)
