"""The device of the benchmark, its clock, CUDA graphs made by hand, and what was measured."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch

import stitch

#: Computes once on tensors of the device; what it returns may not be ready yet.
Run = Callable[[], Any]
#: What the driver is asked for by a pass, as the profiler of PyTorch names it.
LAUNCHES = ("cudaGraphLaunch", "cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel",
            "cuLaunchKernelEx", "cudaMemcpyAsync", "cudaMemsetAsync")  # fmt: skip
#: Memory of the card that the device takes.
ARENA = "16GiB"
#: Relative error of results of single precision that ways may differ by.
TOLERANCE = 1e-3


class OutOfTime(Exception):
    """The time of a suite is over: what follows is not measured."""


@dataclass(frozen=True, slots=True)
class Row:
    """One way to compute a case.

    `microseconds`: a pass, the median of rounds; `error`: relative, beside the reference of the
    case; `note`: what else is to say, or why it was not measured.
    """

    suite: str
    case: str
    way: str
    microseconds: float | None = None
    error: float | None = None
    note: str = ""


@dataclass(frozen=True, slots=True)
class Goal:
    """A line of the issue: `found` may be at most `most`; None: not measured."""

    line: str
    name: str
    found: float | None
    most: float

    @property
    def is_met(self) -> bool | None:
        """None where it was not measured."""
        return None if self.found is None else self.found <= self.most


@dataclass(slots=True, eq=False)
class Bench:
    """What is measured on one device.

    Args:
        name: `cuda:0` or `torch:cpu`.
        seconds: Time for a suite; None without a limit.
        rounds: Rounds of each way.
        goals_of: Whether goals are compared: they are those of a card, at full size.
        peers: Whether torch.compile is measured too, which takes minutes.
        changed: Called after each row and goal.
    """

    name: str
    seconds: float | None
    rounds: int
    goals_of: bool
    peers: bool
    changed: Callable[[Bench], object] = lambda _: None
    suite: str = ""
    rows: list[Row] = field(default_factory=list)
    goals: list[Goal] = field(default_factory=list)
    _until: float | None = None

    @property
    def place(self) -> torch.device:
        """Where PyTorch has the tensors."""
        return torch.device("cpu" if self.name == "torch:cpu" else self.name)

    @property
    def is_card(self) -> bool:
        """Whether it is a CUDA card."""
        return self.name != "torch:cpu"

    def begin(self, suite: str) -> None:
        """Begin a suite, whose time runs from now on."""
        self.suite = suite
        self._until = None if self.seconds is None else time.monotonic() + self.seconds
        if self.is_card:
            torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False

    def check_time(self) -> None:
        """Raise `OutOfTime` where the time of the suite is over."""
        if self._until is not None and time.monotonic() > self._until:
            raise OutOfTime

    @contextmanager
    def device(self, **options: Any) -> Iterator[Any]:
        """The device, open within the block."""
        if self.is_card:
            # Of the one before: what its caller held is gone now.
            gc.collect()
            torch.cuda.empty_cache()
            options.setdefault("max_memory", ARENA)
        with stitch.open_device(self.name, **options) as device:
            yield device

    @contextmanager
    def guarded(self, case: str) -> Iterator[None]:
        """Within the block, what fails is a row, and the next case goes on."""
        try:
            yield
        except OutOfTime:
            raise
        except Exception as problem:
            self.note(case, "stitch", f"failed: {type(problem).__name__}: {first_line(problem)}")

    def tensor(self, array: Any) -> Any:
        """A tensor of PyTorch there."""
        return torch.from_numpy(np.array(array)).to(self.place)

    def wait(self) -> None:
        """Wait for what was launched."""
        if self.is_card:
            torch.cuda.synchronize()

    # -- measuring ---------------------------------------------------------------------------------

    def measure(
        self, case: str, way: str, make: Callable[[], Run], expected: Any = None,
        tolerance: float = TOLERANCE,
    ) -> float | None:  # fmt: skip
        """Measure what `make` returns, and return its microseconds a pass.

        None where it fails, or where its result is not the expected one: the row says so.
        """
        self.check_time()
        try:
            with torch.no_grad():
                run = make()
                error = None if expected is None else relative_error(run(), expected)
                spent = self._spent(run)
        except OutOfTime:
            raise
        except Exception as problem:  # Whatever torch.compile, or a driver, raises.
            self.note(case, way, f"failed: {type(problem).__name__}: {first_line(problem)}")
            return None
        is_right = error is None or error <= tolerance
        note = "" if is_right else f"wrong: expected an error of at most {tolerance:.0e}"
        self.rows.append(Row(self.suite, case, way, spent, error, note))
        self.changed(self)
        return spent if is_right else None

    def note(self, case: str, way: str, text: str, error: float | None = None) -> None:
        """Add a row without a time."""
        self.rows.append(Row(self.suite, case, way, None, error, text))
        self.changed(self)

    def goal(self, line: str, name: str, found: float | None, most: float) -> None:
        """Add what a line of the issue asks for."""
        self.goals.append(Goal(line, name, found if self.goals_of else None, most))
        self.changed(self)

    def ratio(
        self, line: str, name: str, ours: float | None, theirs: float | None, most: float,
        more: float = 0.0,
    ) -> None:  # fmt: skip
        """Add the goal that `ours` is at most `most` times `theirs`, and `more` microseconds."""
        found = None if ours is None or not theirs else (ours - more) / theirs
        self.goal(line, name, found, most)

    def _spent(self, run: Run) -> float:
        for _ in range(4):  # A binding is captured at its third run.
            run()
        self.wait()
        began = time.perf_counter()
        run()
        self.wait()
        once = time.perf_counter() - began
        count = max(1, min(400, int(0.02 / max(once, 1e-7)))) if self.is_card else 2
        spent = []
        for _ in range(self.rounds if once < 0.2 else 1):
            self.check_time()
            spent.append(self._events(run, count) if self.is_card else _clock(run, count))
        return statistics.median(spent)

    def _events(self, run: Run, count: int) -> float:
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        for _ in range(count):
            run()
        last.record()
        last.synchronize()
        return float(first.elapsed_time(last)) / count * 1e3

    # -- CUDA graphs -------------------------------------------------------------------------------

    def by_hand(self, run: Run) -> Run:
        """One CUDA graph of a run; without a card, the run."""
        if not self.is_card:
            return run
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                run()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            kept = run()

        def replay() -> Any:
            graph.replay()
            return kept

        return replay

    def graphs_of(self, run: Run) -> list[Any]:
        """The CUDA graphs that Stitch captures over ten runs, the newest last."""
        known = {id(graph) for graph in _graphs()}
        for _ in range(10):
            run()
        self.wait()
        return [graph for graph in _graphs() if id(graph) not in known]

    def launches(self, run: Run) -> int | None:
        """How often a pass asks the driver for something; None where that cannot be seen."""
        if not self.is_card:
            return None
        activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        run()
        self.wait()
        with torch.profiler.profile(activities=activities) as profile:
            run()
            self.wait()
        counts = {event.key: event.count for event in profile.key_averages()}
        found = sum(counts.get(name, 0) for name in LAUNCHES)
        return found or None


def _graphs() -> list[Any]:
    return [
        o for o in gc.get_objects() if type(o) is torch.cuda.CUDAGraph and hasattr(o, "launches")
    ]


def _clock(run: Run, count: int) -> float:
    began = time.perf_counter()
    for _ in range(count):
        run()
    return (time.perf_counter() - began) / count * 1e6


# Results ------------------------------------------------------------------------------------------


def numbers(value: Any) -> Any:
    """All numbers of a result, in order: of nests, tensors of any kind, several of them."""
    parts: list[Any] = []
    _collect(value, parts)
    return np.concatenate(parts) if parts else np.empty(0)


def _collect(value: Any, parts: list[Any]) -> None:
    if isinstance(value, tuple | list):
        for each in value:
            _collect(each, parts)
        return
    if isinstance(value, torch.Tensor):
        value = value.detach().float().cpu()
    array = value if isinstance(value, np.ndarray) else value.numpy()
    parts.append(np.asarray(array, np.float64).reshape(-1))


def relative_error(found: Any, expected: Any) -> float:
    """||found - expected|| / ||expected||; infinite for other sizes and for not-a-number."""
    mine, theirs = numbers(found), numbers(expected)
    if mine.shape != theirs.shape or np.isnan(mine).any():
        return float("inf")
    norm = float(np.linalg.norm(theirs))
    return float(np.linalg.norm(mine - theirs)) / max(norm, 1e-30)


def first_line(error: BaseException) -> str:
    """What went wrong, on one line."""
    return " ".join(str(error).split())[:160] or type(error).__name__


def as_data(bench: Bench) -> dict[str, Any]:
    """Rows and goals as plain data."""
    goals = [{**asdict(goal), "is_met": goal.is_met} for goal in bench.goals]
    return {"rows": [asdict(row) for row in bench.rows], "goals": goals}
