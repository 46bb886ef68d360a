"""Report pages in tests: counts from their data, their JavaScript in Node, pages in Chromium."""

from __future__ import annotations

import base64
import json
import re
import subprocess
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import stitch.report.page
from stitch.report.page.page_data import expanded

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

CHROMIUM = "/usr/bin/chromium"
FLAGS = (
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
)  # fmt: skip
_DATA = re.compile(r'<script type="text/plain" id="data">([A-Za-z0-9+/=]*)</script>')


def data_of(text: str) -> dict[str, Any]:
    """The data inside of a page."""
    (packed,) = _DATA.findall(text)
    body: dict[str, Any] = json.loads(zlib.decompress(base64.b64decode(packed)))
    return body


def with_data(text: str, body: dict[str, Any]) -> str:
    """A page with other data inside."""
    packed = base64.b64encode(zlib.compress(json.dumps(body).encode())).decode()
    return _DATA.sub(f'<script type="text/plain" id="data">{packed}</script>', text)


@dataclass(frozen=True)
class Counts:
    """What the data of a page says, added up."""

    copies: int
    nbytes: int
    reads: int
    read_nbytes: int
    allocations: int


def counts_of(data: dict[str, Any]) -> Counts:
    """Add up plans and runs of one run's data, independently of the page's own code."""
    copies = nbytes = reads = read_nbytes = allocations = 0
    for number in expanded(data["events"]):
        kind, *rest = data["kinds"][number]
        if kind in (2, 3):
            steps = data["plans"][rest[0]]["steps"]
            for at in range(len(steps)) if kind == 2 else rest[1]:
                step = steps[at]
                allocations += step[0] == 0 and step[1][2] >= 0
                if step[0] == 2:
                    copies, nbytes = copies + 1, nbytes + step[6]
                elif step[0] == 3:
                    copies += len(step[2])
                    nbytes += sum(own for *_, own in step[2])
        elif kind == 4:
            copies, nbytes = copies + 1, nbytes + rest[0]
        elif kind == 5:
            reads, read_nbytes = reads + 1, read_nbytes + rest[0]
        allocations += kind == 0
    return Counts(copies, nbytes, reads, read_nbytes, allocations)


_NODE = """
const { expand } = require(process.argv[1]);
let text = "";
process.stdin.on("data", (part) => { text += part; });
process.stdin.on("end", () => console.log(JSON.stringify(JSON.parse(text).map((run) => {
  const out = expand(run);
  return { ...out.counts, rows: out.rows, used: out.spaces.map((s) => s.used),
    peaks: Object.fromEntries(out.spaces.map((s) => [s.name, s.peak])) };
}))));
"""


def expanded_by_node(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What the page's own code makes of the data of runs."""
    from playwright._impl._driver import compute_driver_executable

    node = compute_driver_executable()[0]
    script = Path(stitch.report.page.__file__).with_name("page.js")
    done = subprocess.run(
        [node, "-e", _NODE, str(script)], input=json.dumps(runs), text=True, capture_output=True,
        timeout=120, check=True,
    )  # fmt: skip
    counts: list[dict[str, Any]] = json.loads(done.stdout)
    return counts


@contextmanager
def chromium() -> Iterator[Browser]:
    """Debian's Chromium, without a network."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=[*FLAGS])
        try:
            yield browser
        finally:
            browser.close()


@contextmanager
def opened(browser: Browser, path: Path, **options: Any) -> Iterator[Page]:
    """A page from disk, ready; afterwards: nothing on the console, no request but the file."""
    page = browser.new_page(**options)
    messages: list[str] = []
    requests: list[str] = []
    page.on("console", lambda message: messages.append(message.text))
    page.on("pageerror", lambda error: messages.append(str(error)))
    page.on("request", lambda request: requests.append(request.url))
    try:
        page.goto(path.as_uri())
        page.wait_for_function("stitchReport.ready || stitchReport.error", timeout=60_000)
        assert page.evaluate("stitchReport.error") is None
        yield page
        assert messages == []
        assert requests == [path.as_uri()]
    finally:
        page.close()
