"""Whether a network of the zoo gives by `torch.compile(backend="stitch")` what eager torch gives.

In float32 results and gradients are compared with eager's. Where they are not near, both are
compared with those of float64, in bfloat16 with those of float32, and ours may be as far from them
as eager's, and as far again: a norm over two numbers that are alike makes much of little. Where
they are farther, other weights and examples are drawn, and the means of all draws are compared: of
one draw's 5 % and 10 % neither says which way rounds better.
"""

from __future__ import annotations

import copy
import math
import warnings
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

import torch

from stitch.frontend.torch.compile.backend import CompileSettings, shared_storage_of
from stitch.frontend.torch.graph_report import Counts
from tests.support.torch.agreement import tensors_of
from tests.support.torch.zoo import made

#: Of the largest element: what results and gradients in float32 may differ by.
FORWARD, GRADIENT = 2e-5, 2e-4
#: What may differ by as many times as eager's does, and in bfloat16 at the least.
AS_FAR, LEAST_NARROW = 2.0, 8e-3
#: How often a network is drawn before it is called wrong.
DRAWS = 5

#: Of results and of gradients.
Errors = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of one network: its largest errors, of all results and of all gradients."""

    name: str
    forward: float
    gradient: float
    is_right: bool
    trouble: str = ""
    graphs: int = 0
    programs: int = 0
    #: What programs run, and what torch runs, of all graphs.
    operators: int = 0
    by_torch: tuple[tuple[str, int], ...] = ()


def dry(module: Any) -> Any:
    """A module in training mode that draws no numbers: dropout of all kinds is nought."""
    module.train()
    for part in module.modules():
        for name, value in vars(part).items():
            if isinstance(value, float) and (name == "p" or _draws(name)):
                setattr(part, name, 0.0)
        config = getattr(part, "config", None)
        for name, value in vars(config).items() if config is not None else ():
            if _draws(name) and isinstance(value, float):
                setattr(config, name, 0.0)
    return module


def _draws(name: str) -> bool:
    return "drop" in name or "jitter" in name


def run(module: Any, call: Any, examples: Any) -> tuple[list[Any], list[Any]]:
    """The floating results of one step, and the gradients of the parameters that have one."""
    results = call(**examples) if isinstance(examples, dict) else call(*examples)
    floating = [t for t in tensors_of(results) if t.is_floating_point()]
    loss = sum(weighed(t) for t in floating if t.requires_grad)
    if isinstance(loss, torch.Tensor):
        loss.backward()
    gradients = [p.grad for p in module.parameters() if p.grad is not None]
    return [t.detach() for t in tensors_of(results)], gradients


def weighed(tensor: Any) -> Any:
    """A loss whose gradient is no constant of what a norm gives: every element has a weight."""
    weights = torch.arange(tensor.numel(), dtype=torch.float32).cos().view(tensor.shape)
    return (tensor.float() * weights).mean()


def forward(call: Any, examples: Any) -> list[Any]:
    """The results without gradients."""
    with torch.no_grad():
        results = call(**examples) if isinstance(examples, dict) else call(*examples)
    return [t.clone() for t in tensors_of(results)]


def distance(found: list[Any], wanted: list[Any]) -> float:
    """The largest difference, of the largest element of all; infinite where they have other shapes
    or other whole numbers."""
    if len(found) != len(wanted):
        return math.inf
    floating = [b[b.isfinite()].abs().max() for b in wanted if b.is_floating_point()
                and bool(b.isfinite().any())]  # fmt: skip
    size = max(map(float, floating), default=0.0)
    most = 0.0
    for a, b in zip(found, wanted, strict=True):
        if a.shape != b.shape:
            return math.inf
        if not b.is_floating_point():
            most = most if torch.equal(a, b) else math.inf
            continue
        a, b = a.double(), b.double()
        same = (a == b) | (a.isnan() & b.isnan())
        if not bool(same.all()):
            away = (a - b)[~same].abs().nan_to_num(torch.inf).max()
            most = max(most, float(away) / max(size, 1e-6))
    return most


def judged(name: str, kind: Any = torch.float32, options: dict[str, Any] | None = None) -> Verdict:
    """One network: forward without gradients in evaluation mode, then one step of training."""
    storage = shared_storage_of(CompileSettings.of(options))
    before, storage.counts = storage.counts, Counts()
    counts = storage.counts
    least = (FORWARD, GRADIENT) if kind is torch.float32 else (LEAST_NARROW, LEAST_NARROW)
    verdicts: list[Verdict] = []
    drawn: list[tuple[Errors, Errors]] = []
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            while len(drawn) < DRAWS and not (verdicts and verdicts[-1].is_right):
                ours, theirs = _errors(name, len(drawn), kind, options)
                drawn.append((ours, theirs))
                verdicts.append(_verdict(name, drawn, least))
                storage.counts = Counts()  # Of the first draw alone.
    except Exception as error:  # Whatever it is, it is this network's trouble.
        text = " ".join(f"{type(error).__name__}: {error}".split())
        verdicts.append(Verdict(name, math.inf, math.inf, False, text[:400]))
    storage.counts = before
    return replace(
        verdicts[-1], graphs=counts.graphs, programs=counts.programs,
        operators=counts.by_stitch.total(), by_torch=tuple(sorted(counts.by_torch.items())),
    )  # fmt: skip


def _verdict(name: str, drawn: list[tuple[Errors, Errors]], least: Errors) -> Verdict:
    ours = tuple(fmean(mine[k] for mine, _ in drawn) for k in range(2))
    theirs = tuple(fmean(of_eager[k] for _, of_eager in drawn) for k in range(2))
    right = all(o <= max(n, AS_FAR * t) for o, n, t in zip(ours, least, theirs, strict=True))
    eager = f"eager: {theirs[0]:.1e}, {theirs[1]:.1e}, means of {len(drawn)}" if any(theirs) else ""
    return Verdict(name, ours[0], ours[1], right, eager)


def _errors(
    name: str, draw: int, kind: Any, options: dict[str, Any] | None
) -> tuple[Errors, Errors]:
    """How far our results and gradients are from eager's, and nought, where that is near; else how
    far ours and eager's are from those of wider numbers."""
    module, examples = made(name, draw)
    twin, examples = copy.deepcopy(module).to(kind), _in(kind, examples)
    module = module.to(kind)

    def compiled() -> Any:
        torch._dynamo.reset()
        return torch.compile(twin, backend="stitch", options=options)

    found, wanted = forward(compiled(), examples), forward(module, examples)
    for each in (module, twin):
        dry(each)
    results, gradients = run(twin, compiled(), examples)
    wanted_results, wanted_gradients = run(module, module, examples)
    if kind is torch.float32:
        result = max(distance(found, wanted), distance(results, wanted_results))
        gradient = distance(gradients, wanted_gradients)
        if result <= FORWARD and gradient <= GRADIENT:
            return (result, gradient), (0.0, 0.0)
    exact, exact_examples = made(name, draw)
    wide = torch.float64 if kind is torch.float32 else torch.float32
    exact, exact_examples = exact.to(wide), _in(wide, exact_examples)
    truth = forward(exact, exact_examples)
    true_results, true_gradients = run(dry(exact), exact, exact_examples)
    ours = (
        max(distance(found, truth), distance(results, true_results)),
        distance(gradients, true_gradients),
    )
    theirs = (
        max(distance(wanted, truth), distance(wanted_results, true_results)),
        distance(wanted_gradients, true_gradients),
    )
    for what, mine, wide in (
        ("forward", found, truth), ("results", results, true_results),
        ("gradients", gradients, true_gradients),
    ):  # fmt: skip
        if distance(mine, wide) == math.inf and math.inf not in theirs:
            raise AssertionError(f"draw {draw}, {what}: {unlike(mine, wide)}")
    return ours, theirs


def unlike(found: list[Any], wanted: list[Any]) -> str:
    """Return why these results are infinitely far from each other."""
    if len(found) != len(wanted):
        return f"{len(found)} tensors, expected {len(wanted)}"
    for index, (a, b) in enumerate(zip(found, wanted, strict=True)):
        if distance([a], [b]) == math.inf:
            finite = int(a.isfinite().sum())
            return (
                f"tensor {index}: {a.dtype} {tuple(a.shape)}, {finite} finite elements {a}, "
                f"expected {b.dtype} {tuple(b.shape)}, {int(b.isfinite().sum())} finite"
            )
    return "nothing"


def _in(kind: Any, examples: Any) -> Any:
    def one(value: Any) -> Any:
        return value.to(kind) if value.is_floating_point() else value

    if isinstance(examples, dict):
        return {name: one(value) for name, value in examples.items()}
    return tuple(one(value) for value in examples)
