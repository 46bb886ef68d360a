"""How much memory attention needs at most, as it grows with the length (Linux).

Each length of each way runs in a process of its own, which tells by how much its resident memory
grows at most beyond what it is before the first run.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import stitch
from fractal_ways.blockwise_cases import FLASH_BLOCK, attention_by_size, flash_attention
from fractal_ways.cases import Case, numbers
from fractal_ways.ours import MACHINE
from fractal_ways.results import Figure
from stitch import fractal as ops

#: MiB at the long length / at a quarter of it: four times is linear (pages and what is freed late
#: add some), sixteen times quadratic.
MEMORY_GOAL = 4.8
OURS, SINGLE, PEER = "stitch", "stitch (queries one by one)", "torch"
RUNS = 2


def _now(name: str) -> int:
    """KiB that Linux says of this process: VmRSS is what it has now, VmHWM the most it has had."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def grown_here(way: str, length: int, width: int) -> float:
    """MiB that this process has at most during runs, beyond what it has before the first."""
    case = _case(way, length, width)
    run: Callable[[], object]
    if way != PEER:
        # What loading code takes is none of the attention's.
        few = flash_attention(8, width, compiled=False, small=False)
        with stitch.open_device(MACHINE, executor="numpy") as device:
            for each in (few, case):
                nest = ops.compile(each.network, *each.given, target=MACHINE)
                nest.on(device)
                if each is few:
                    numbers(nest(*each.given))
            return _grown(lambda: numbers(nest(*case.given)))
    run = case.peers[-1].make()
    flash_attention(8, width, compiled=False, small=False).peers[-1].make()()
    return _grown(lambda: numbers(run()))


def _case(way: str, length: int, width: int) -> Case:
    if way == SINGLE:
        return attention_by_size(length, width, 1, min(FLASH_BLOCK, length // 4))
    return flash_attention(length, width, compiled=False, small=False)


def _grown(run: Callable[[], object]) -> float:
    before = _now("VmRSS")
    # Forgets the most so far, which compiling has needed.
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    for _ in range(RUNS):
        run()
    return (_now("VmHWM") - before) / 1024


def figures(script: str, length: int, words: Sequence[str]) -> list[Figure]:
    """Both lengths of each way: ours in blocks by hand and of single queries, and torch's
    attention; the ratio, with its goal."""
    short = length // 4
    found: list[Figure] = []
    for way in (OURS, SINGLE, PEER):
        mib: dict[int, float] = {}
        for each in (short, length):
            command = [sys.executable, script, *words, "--grown", f"{way},{each}"]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            name = f"peak memory of {way}, length {each}"
            if done.returncode:
                reason = [*done.stderr.strip().splitlines(), "no reason given"][-2:][0]
                found.append(Figure(name, None, "MiB", None, reason))
                continue
            mib[each] = float(done.stdout.split()[-1])
            found.append(Figure(name, mib[each], "MiB"))
        goal = MEMORY_GOAL if way != PEER else None
        name = f"peak memory of {way}, {length} / {short}" + (" (MEMORY_GOAL)" if goal else "")
        ratio = mib[length] / max(mib[short], 1e-3) if len(mib) == 2 else None
        found.append(Figure(name, ratio, "x", goal, "" if ratio is not None else "not measured"))
    return found
