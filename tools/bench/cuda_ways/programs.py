"""Programs compiled apart: chains of small ones, networks in six files, single operations.

PyTorch has the same parts as modules: eager, through torch.compile (`reduce-overhead`: a CUDA graph
of each part), and eager in one CUDA graph that is made by hand. Stitch's are `.ttb` files.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch

import stitch
from cuda_ways.measuring import Bench, Run, first_line, numbers, relative_error
from cuda_ways.networks import NETWORKS, Sizes, graph_of, layered, network
from stitch import ComputationGraphBuilder
from stitch.errors import StitchError
from stitch.program import DataType

#: Goals of the issue: over the replay of its own graph, and microseconds; over what PyTorch does
#: part by part; over a graph by hand; relative error in float32.
REPLAY_GOAL, CALL_MICROSECONDS = 1.1, 6.0
EAGER_GOAL, COMPILED_GOAL, LAUNCHES_GOAL = 0.2, 0.1, 1
BY_HAND_GOAL, REDUCED_GOAL, ERROR_GOAL = 1.05, 1.0, 2e-6
#: Programs in a chain for which times of PyTorch are compared.
LONG = (8, 64)
#: Random operations of each operator with a kernel.
DRAWS = 3

#: What keeps dynamo from compiling many parts of one class.
LIMITS = ("recompile_limit", "accumulated_recompile_limit")

EAGER, COMPILED, REDUCED = "torch, eager", "torch.compile", "torch.compile, reduce-overhead"
BY_HAND, OURS = "torch, eager, CUDA graph by hand", "stitch, pipe(tensor)"
#: By inductor, and its goal over `REDUCED` by network.
BY_INDUCTOR, INDUCTOR_GOALS = "stitch, cuda-inductor, pipe(tensor)", {"ResNet": 0.3}


def in_turn(parts: Sequence[Any], x: Any) -> Run:
    """A run of parts one after the other."""

    def run() -> Any:
        y = x
        for part in parts:
            y = part(y)
        return y

    return run


def compiled_in_turn(bench: Bench, parts: Sequence[Any], x: Any, mode: str | None) -> Run:
    """The same of parts that torch.compile compiled one by one."""
    compiled = [torch.compile(part, mode=mode, dynamic=False) for part in parts]
    is_reduced = mode is not None and bench.is_card

    def run() -> Any:
        if is_reduced:
            torch.compiler.cudagraph_mark_step_begin()
        y = x
        for part in compiled:
            y = part(y)
        return y

    run()
    return run


def peers(
    bench: Bench, case: str, parts: Sequence[Any], x: Any, expected: Any, modes: Sequence[str]
) -> dict[str, float | None]:
    """What PyTorch takes, by way; `modes`: those of torch.compile."""
    there, given = [part.to(bench.place) for part in parts], x.to(bench.place)
    run = in_turn(there, given)
    found: dict[str, float | None]
    found = {EAGER: bench.measure(case, f"{EAGER}, part by part", lambda: run, expected)}
    found[BY_HAND] = bench.measure(case, BY_HAND, lambda: bench.by_hand(run), expected)
    for way in modes if bench.peers else ():
        mode = "reduce-overhead" if way == REDUCED else None
        torch.compiler.reset()
        for limit in LIMITS:
            if hasattr(torch._dynamo.config, limit):
                setattr(torch._dynamo.config, limit, 2048)

        def make(mode: Any = mode) -> Run:
            return compiled_in_turn(bench, there, given, mode)

        found[way] = bench.measure(case, f"{way}, part by part", make, expected)
    return found


def ours(bench: Bench, case: str, binaries: Sequence[Any], x: Any, expected: Any) -> dict[str, Any]:
    """Stitch's times, launches, and whether copies come between the parts."""
    with bench.device() as device:
        pipe = stitch.Pipeline([device.load(binary) for binary in binaries])
        own, array = x.to(bench.place), x.numpy()
        fixed = device.tensor(own, borrow=True)
        found: dict[str, Any] = {}
        found["error"] = relative_error(pipe(fixed), expected)
        bench.note(case, "stitch, error beside the executor numpy", "", found["error"])
        bench.measure(case, "stitch, pipe(array).numpy()", lambda: lambda: pipe(array).numpy())
        bench.measure(case, "stitch, pipe(torch tensor)", lambda: lambda: pipe(own), expected)
        graphs = bench.graphs_of(lambda: pipe(fixed))
        found[OURS] = bench.measure(case, OURS, lambda: lambda: pipe(fixed), expected)
        found["launches"] = bench.launches(lambda: pipe(fixed))
        if graphs:
            replay = graphs[-1].replay
            way = "stitch, the replay of its graph"
            found["replay"] = bench.measure(case, way, lambda: replay)
        try:
            with stitch.forbid_copies(device):
                pipe(fixed)
            found["copies"] = 0
        except StitchError as error:
            found["copies"] = 1
            bench.note(case, "stitch, copies between parts", first_line(error))
        counts, by_host = device.statistics(), sorted(device.backend.executor.left_to_numpy)
        seen = found["launches"]
        bench.note(
            case, "stitch, counts",
            f"{counts.graphs_captured} graphs, {counts.graphs_failed} not captured; "
            f"{'unknown' if seen is None else seen} launches a pass; by way of the host: "
            f"{', '.join(by_host) or 'nothing'}",
        )  # fmt: skip
    return found


def by_inductor(bench: Bench, case: str, binaries: Sequence[Any], x: Any, expected: Any) -> Any:
    """Stitch's time with functions that inductor compiles."""
    with bench.guarded(case), bench.device(executor="cuda-inductor") as device:
        pipe = stitch.Pipeline([device.load(binary) for binary in binaries])
        fixed = device.tensor(x.to(bench.place), borrow=True)
        return bench.measure(case, BY_INDUCTOR, lambda: lambda: pipe(fixed), expected)


def by_numpy(binaries: Sequence[Any], x: Any) -> Any:
    """What the programs mean: the executor `numpy`."""
    with stitch.open_device("cuda", executor="numpy") as device:
        return stitch.Pipeline([device.load(binary) for binary in binaries])(x.numpy()).numpy()


def chains(bench: Bench, counts: Sequence[int], rows: int, width: int) -> None:
    """Chains of so many programs, of one product each."""
    for count in counts:
        case = f"chain of {count}, {rows}x{width}"
        with bench.guarded(case):
            _chain(bench, case, count, rows, width)


def _chain(bench: Bench, case: str, count: int, rows: int, width: int) -> None:
    parts, x = layered(count, rows, width)
    binaries = [
        stitch.compile(graph_of(part, f"part{i}", x), target="cuda").binary
        for i, part in enumerate(parts)
    ]
    expected = by_numpy(binaries, x)
    mine = ours(bench, case, binaries, x, expected)
    theirs = peers(bench, case, parts, x, expected, (COMPILED, REDUCED))
    bench.ratio(
        "1", f"{case}: (pipe(tensor) - 6 us) / its graph", mine[OURS], mine.get("replay"),
        REPLAY_GOAL, CALL_MICROSECONDS,
    )  # fmt: skip
    bench.goal("1", f"{case}: launches a pass", mine["launches"], LAUNCHES_GOAL)
    if count in LONG:
        bench.ratio("1", f"{case}: / eager", mine[OURS], theirs[EAGER], EAGER_GOAL)
        bench.ratio(
            "1", f"{case}: / torch.compile", mine[OURS], theirs.get(COMPILED), COMPILED_GOAL
        )


def networks(bench: Bench, names: Sequence[str], batches: Sequence[int], sizes: Sizes) -> None:
    """Networks in six files; of the first batch their errors, and torch.compile, are measured."""
    for batch in batches:
        for name in names:
            with bench.guarded(case := f"{name}, 6 files, batch {batch}"):
                goal = INDUCTOR_GOALS.get(name) if bench.peers else None
                _network(bench, case, network(name, sizes, batch), batch == batches[0], goal)


def _network(
    bench: Bench, case: str, made: tuple[list[Any], Any], is_first: bool, goal: float | None
) -> None:
    parts, x = made
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        files, y = list[Path](), x
        for i, part in enumerate(parts):
            files.append(Path(folder) / f"part{i}.ttb")
            stitch.compile(graph_of(part, f"part{i}", y), target="cuda").save(files[-1])
            y = part(y)
        # By the executor numpy, which takes seconds, or by PyTorch.
        expected = by_numpy(files, x) if is_first else y.numpy()
        mine = ours(bench, case, files, x, expected)
        if is_first and goal is not None:
            mine[BY_INDUCTOR] = by_inductor(bench, case, files, x, expected)
    theirs = peers(bench, case, parts, x, expected, (REDUCED,) if is_first else ())
    bench.ratio("2", f"{case}: / by hand", mine[OURS], theirs[BY_HAND], BY_HAND_GOAL)
    bench.goal("2", f"{case}: passes with copies", mine["copies"], 0)
    if is_first:
        bench.ratio(
            "2", f"{case}: / reduce-overhead", mine[OURS], theirs.get(REDUCED), REDUCED_GOAL
        )
        bench.goal("3", f"{case}: float32 error", mine["error"], ERROR_GOAL)
    if is_first and goal is not None:
        name = f"{case}: cuda-inductor / reduce-overhead"
        bench.ratio("2", name, mine[BY_INDUCTOR], theirs.get(REDUCED), goal)


def operations(bench: Bench, draws: int) -> None:
    """Random operations of each operator that has a kernel, beside the executor `numpy`."""
    case, way = f"{draws} operations of each operator", "stitch, error beside the executor numpy"
    try:
        from tests.support.operators.drawn_operands import operands_of
        from tests.support.operators.drawn_operations import draw_row, drawn_operators
    except ImportError as error:
        bench.note(case, way, f"not measured: {first_line(error)}")
        bench.goal("3", "operators with a kernel: float32 error", None, ERROR_GOAL)
        return
    from stitch.runtime.executors.cuda_kernels import KERNELS

    worst, worst_is, compared = 0.0, "", 0
    with bench.device() as there, stitch.open_device("cuda", executor="numpy") as here:
        known = [d for d in drawn_operators() if (d.domain, d.name) in KERNELS]
        for definition in known:
            for seed in range(draws):
                bench.check_time()
                row = draw_row(definition, Random(seed).randrange(1 << 30))
                operands = operands_of(row.specs, seed)
                try:
                    model, given = _one(row, operands)
                    wanted = here.load(model)(*given)
                    found = there.load(model)(*given)
                    differs = _error(found, wanted)
                except StitchError:  # It refuses these operands on both.
                    continue
                compared += 1
                if differs > worst:
                    worst, worst_is = differs, row.op
    bench.note(case, way, f"the worst of {compared}: {worst_is}", worst)
    bench.goal("3", "operators with a kernel: float32 error", worst, ERROR_GOAL)


def _one(row: Any, operands: Sequence[Any]) -> tuple[Any, list[Any]]:
    """A row compiled for `cuda`, and the arrays of its inputs."""
    b, given, values = ComputationGraphBuilder("one"), list[Any](), list[Any]()
    for spec, array in zip(row.specs, operands, strict=True):
        if array is None:
            values.append(None)
        elif isinstance(spec, str):
            kind = DataType.from_dtype(array.dtype)
            values.append(b.input(f"x{len(given)}", array.shape, kind))
            given.append(array)
        else:
            values.append(b.parameter(f"c{len(values)}", array))
    results = b.apply(row.op, values, row.outputs, row.attributes, row.domain)
    for index, result in enumerate(results):
        b.output(f"y{index}", result)
    return stitch.compile(b.build(), target="cuda"), given


def _error(found: Any, wanted: Any) -> float:
    """The relative error of results of single precision; of others, whether they differ at all."""
    mine, theirs = (value if isinstance(value, tuple) else (value,) for value in (found, wanted))
    worst = 0.0
    for one, other in zip(mine, theirs, strict=True):
        a, b = one.numpy(), other.numpy()
        if a.dtype == np.float32:
            usual = np.isfinite(b)
            alike = np.array_equal(a[~usual], b[~usual], equal_nan=True)
            error = relative_error(numbers(a)[usual.ravel()], numbers(b)[usual.ravel()])
            worst = max(worst, error if alike else float("inf"))
    return worst


__all__ = ["NETWORKS", "chains", "networks", "operations"]
