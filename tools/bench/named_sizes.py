"""What named sizes cost: `at()` by operation, a call at a known size beside a static program, and a
token of `generate()`, whose cache has a size not seen before.

For each network of `--networks`, compiled once with named sizes: microseconds of processor time an
operation that `at` takes at sizes not seen before (the least, median, mean and most of `--sizes`
random ones, after three that warm up; the networks take turns, and of `--batches` batches of each
that with the middle one of their medians counts), how many operations the programs have, and what
compiling at such a size takes beside it.
`transformer` is traced from NumPy, `resnet` is torchvision's form by `torch.nn`, `bert` and `llama`
are of `transformers` with random weights.

Then, for functions of one to three arguments with named axes, the microseconds of a call at a known
size, and of the program compiled at that size: both take turns, `--rounds` times `--calls` calls,
and the least of each counts; both are compiled three times, as they lie elsewhere in memory then.

Last the milliseconds of processor time of a token of a Llama of `transformers` that decodes with a
cache under `torch.compile(backend="stitch", dynamic=True)`: of `--tokens` tokens that each make the
cache longer than before (all that a new size costs: `at`, loading, preparing, planning, binding,
the run), and of the same ones when they are generated for the third time.

`--check` exits 1 where the median of `at` is above 20 us an operation, a call takes above 0.2 us
longer than the static program's, or the median token at a new size takes above 45 ms.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from itertools import repeat
from typing import Any

os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = "1"

import numpy as np
from command_line import bench_parser, exit_code_for, from_one

import stitch

AT_GOAL_US, CALL_GOAL_US, TOKEN_GOAL_MS = 20.0, 0.2, 45.0
#: Sizes at which `at` runs before it is timed.
WARMING = 3
#: How often a function is compiled whose calls are timed.
COMPILED = 3
BATCH, LENGTH = stitch.Dim("batch", 1, 64), stitch.Dim("length", 2, 256)
Compiled = tuple[stitch.DynamicModel, Callable[[dict[str, int]], object]]


def transformer(layers: int) -> Compiled:
    """Blocks of attention in NumPy's functions: batch and length are named."""
    width, heads, draw = 32, 4, np.random.default_rng(0)
    weights = [
        [draw.standard_normal((width, width), np.float32) for _ in range(4)] for _ in range(layers)
    ]

    def run(x: Any) -> Any:
        batch, length, _ = x.shape
        for query, key, value, out in weights:
            h = (x - x.mean(axis=-1, keepdims=True)) / np.sqrt((x * x).mean(-1, keepdims=True) + 1)
            q, k, v = (
                (h @ w).reshape(batch, length, heads, width // heads).transpose(0, 2, 1, 3)
                for w in (query, key, value)
            )
            scores = np.exp(q @ k.transpose(0, 1, 3, 2))
            attended = (scores / scores.sum(axis=-1, keepdims=True)) @ v
            x = x + np.maximum(
                attended.transpose(0, 2, 1, 3).reshape(batch, length, width) @ out, 0
            )
        return x

    def example(sizes: dict[str, int]) -> Any:
        return np.zeros((sizes["batch"], sizes["length"], width), np.float32)

    model: stitch.DynamicModel = stitch.compile(
        run, (example({"batch": 3, "length": 5}),), dynamic_shapes={"x": {0: BATCH, 1: LENGTH}}
    )
    return model, lambda sizes: stitch.compile(run, (example(sizes),))


def of_torch(
    module: Any, example: Callable[[dict[str, int]], Any], axes: dict[int, Any]
) -> Compiled:
    """A module of torch whose first argument has named axes."""
    import torch

    with torch.no_grad():
        first = {"batch": 3, "length": 5}
        model: stitch.DynamicModel = stitch.compile(
            module, (example(first),), dynamic_shapes=(axes,)
        )
    return model, lambda sizes: stitch.compile(module, (example(sizes),))


def resnet(layers: int) -> Compiled:
    """Basic blocks of ResNet, with a named batch."""
    import torch
    from peer_ways.networks import make

    module, x = make("resnet18", is_small=True)
    return of_torch(module, lambda sizes: torch.zeros(sizes["batch"], *x.shape[1:]), {0: BATCH})


def words(sizes: dict[str, int]) -> Any:
    """Indices of words."""
    import torch

    return torch.ones(sizes["batch"], sizes["length"], dtype=torch.int64)


def bert(layers: int) -> Compiled:
    """BERT of `transformers`: positions and masks are computed."""
    import transformers

    config = transformers.BertConfig(
        hidden_size=32, intermediate_size=64, num_attention_heads=4, num_hidden_layers=layers,
        vocab_size=60, max_position_embeddings=256,
    )  # fmt: skip
    return of_torch(transformers.BertModel(config).eval(), words, {0: BATCH, 1: LENGTH})


def llama_module(layers: int, width: int, *, use_cache: bool) -> Any:
    """Llama of `transformers` with random weights."""
    import transformers

    config = transformers.LlamaConfig(
        hidden_size=width, intermediate_size=2 * width, num_attention_heads=4,
        num_key_value_heads=2, num_hidden_layers=layers, vocab_size=60,
        max_position_embeddings=1024, use_cache=use_cache,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


def llama(layers: int) -> Compiled:
    """Llama of `transformers`: rotary positions and a causal mask are computed."""
    return of_torch(llama_module(layers, 32, use_cache=False), words, {0: BATCH, 1: LENGTH})


NETWORKS: dict[str, Callable[[int], Compiled]] = {
    made.__name__: made for made in (transformer, resnet, bert, llama)
}


class AtTimes:
    """What `at` of a network takes at random sizes, in microseconds an operation."""

    def __init__(self, compiled: Compiled, seed: int) -> None:
        self._model, self._compile_at = compiled
        self._draw = random.Random(seed)
        self._operations: list[int] = []
        self._batches: list[list[float]] = []
        for _ in range(WARMING):
            self._model.program.at(**self._drawn())

    def _drawn(self) -> dict[str, int]:
        dims = self._model.program.sizes.dims.values()
        return {dim.name: self._draw.randint(dim.least, dim.most) for dim in dims}

    def add_batch(self, count: int) -> None:
        """Time `at` at so many sizes."""
        self._batches.append([])
        for _ in range(count):
            sizes, began = self._drawn(), time.process_time()
            operations = len(self._model.program.at(**sizes).operations)
            self._batches[-1].append(1e6 * (time.process_time() - began) / operations)
            self._operations.append(operations)

    def row(self) -> dict[str, Any]:
        """What the middle batch by its median took, and what compiling at a size takes."""
        batches, began = sorted(self._batches, key=statistics.median), time.process_time()
        middle = batches[len(batches) // 2]
        self._compile_at({"batch": 3, "length": 5, **self._drawn()})
        compiling = 1e6 * (time.process_time() - began) / self._operations[-1]
        return {
            "operations": statistics.mean(self._operations), "least": min(middle),
            "median": statistics.median(middle), "mean": statistics.mean(middle),
            "most": max(middle),
            "compiling": compiling,
            "medians": [statistics.median(batch) for batch in self._batches],
        }  # fmt: skip


#: Functions whose calls are timed, and the named axes of their arguments; all are 8 x 8.
AXES = {0: BATCH, 1: LENGTH}
CALLS: dict[str, tuple[Callable[..., Any], dict[str, dict[int, stitch.Dim]]]] = {
    "x[b, 8]": (lambda x: x * 2 + 1, {"x": {0: BATCH}}),
    "x[b, l]": (lambda x: x * 2 + 1, {"x": AXES}),
    "x[b, l], y[b, l]": (lambda x, y: x * 2 + y, {"x": AXES, "y": AXES}),
    "x[b, l], y[b, l], z[b, l]": (lambda x, y, z: x * y + z, {"x": AXES, "y": AXES, "z": AXES}),
    "x[b, 8], y[l, 8]": (lambda x, y: x * 2 + y.sum(), {"x": {0: BATCH}, "y": {0: LENGTH}}),
}


def call_times(kind: str, rounds: int, calls: int) -> dict[str, float]:
    """Microseconds of a call at a known size, and of the static program's."""
    run, axes = CALLS[kind]
    arguments = tuple(np.ones((8, 8), np.float32) for _ in axes)
    best = dict.fromkeys(("named", "static"), float("inf"))
    for number in range(rounds):
        if number % -(-rounds // COMPILED) == 0:
            ways: dict[str, Callable[..., object]] = {
                "named": stitch.compile(run, arguments, dynamic_shapes=axes),
                "static": stitch.compile(run, arguments),
            }
            for model in ways.values():
                model(*arguments)
        for name, model in ways.items():
            began = time.perf_counter()
            for _ in repeat(None, calls):
                model(*arguments)
            best[name] = min(best[name], 1e6 * (time.perf_counter() - began) / calls)
    return {**best, "beyond": best["named"] - best["static"]}


def token_times(layers: int, width: int, tokens: int) -> dict[str, float]:
    """Milliseconds of processor time of a token, at new and at known lengths of the cache."""
    import torch

    model, taken = llama_module(layers, width, use_cache=True), list[float]()
    run = torch.compile(model.forward, backend="stitch", dynamic=True)

    def timed(*operands: Any, **named: Any) -> Any:
        began = time.process_time()
        result = run(*operands, **named)
        taken.append(1e3 * (time.process_time() - began))
        return result

    def generated(length: int, count: int) -> list[float]:
        taken.clear()
        prompt = torch.arange(length)[None] % 50 + 3
        model.generate(prompt, max_new_tokens=count, min_new_tokens=count, do_sample=False,
                       pad_token_id=0)  # fmt: skip
        return sorted(taken[1:])  # Not the prompt.

    model.forward = timed
    with torch.no_grad():
        generated(5, 8)
        new = generated(20, tokens + 1)
        generated(20, tokens + 1)
        known = generated(20, tokens + 1)
    torch._dynamo.reset()  # It keeps the programs.
    return {
        "width": width, "least": new[0], "median": statistics.median(new),
        "mean": statistics.mean(new), "known": statistics.median(known),
    }  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure each network and the calls; return the exit code."""
    parser = bench_parser(__doc__)
    parser.add_argument("--networks", nargs="*", choices=NETWORKS, default=list(NETWORKS))
    parser.add_argument("--layers", type=from_one, default=4, help="layers of a network")
    parser.add_argument("--batches", type=from_one, default=9, help="batches of sizes for at()")
    parser.add_argument("--sizes", type=from_one, default=40, help="random sizes of a batch")
    parser.add_argument("--seed", type=int, default=0, help="seed of the sizes")
    parser.add_argument("--rounds", type=from_one, default=400)
    parser.add_argument("--calls", type=from_one, default=300, help="calls of a round")
    parser.add_argument("--tokens", type=int, default=40, help="tokens at new sizes; 0: none")
    parser.add_argument("--widths", nargs="*", type=from_one, default=[64], help="of their Llamas")
    options = parser.parse_args(arguments)
    missed = []
    times = {name: AtTimes(NETWORKS[name](options.layers), options.seed)
             for name in options.networks}  # fmt: skip
    for _ in range(options.batches):
        for network in times.values():
            network.add_batch(options.sizes)
    rows = {name: network.row() for name, network in times.items()}
    for name, row in rows.items():
        if row["median"] > AT_GOAL_US:
            missed.append(f"at() of {name}: {row['median']:.1f} us, goal {AT_GOAL_US:.0f}")
        if not options.json:
            shown = "  ".join(f"{what} {row[what]:.1f}" for what in list(row)[1:-1])
            medians = " ".join(f"{median:.1f}" for median in row["medians"])
            print(f"{name:>12}  {row['operations']:.0f} operations  us each: {shown}  "
                  f"medians of the batches: {medians}")  # fmt: skip
    called = {kind: call_times(kind, options.rounds, options.calls) for kind in CALLS}
    missed += [
        f"a call of {kind}: {row['beyond']:.2f} us over the static one, goal {CALL_GOAL_US}"
        for kind, row in called.items() if row["beyond"] > CALL_GOAL_US
    ]  # fmt: skip
    tokens = [token_times(options.layers, width, options.tokens)
              for width in options.widths if options.tokens > 0]  # fmt: skip
    missed += [
        f"a token: {row['median']:.1f} ms, goal {TOKEN_GOAL_MS:.0f}"
        for row in tokens if row["median"] > TOKEN_GOAL_MS
    ]  # fmt: skip
    if options.json:
        print(json.dumps({"at": rows, "calls": called, "tokens": tokens}))
    else:
        for row in tokens:
            print(f"       token  width {row['width']:.0f}  ms at a new size: "
                  f"least {row['least']:.1f}  median {row['median']:.1f}  mean {row['mean']:.1f}  "
                  f"at known sizes: {row['known']:.2f}")  # fmt: skip
        for kind, row in called.items():
            print(f"        call  named {row['named']:.2f} us  static {row['static']:.2f} us  "
                  f"{row['beyond']:+.2f} us  {kind}")  # fmt: skip
    return exit_code_for(missed, check=options.check)


if __name__ == "__main__":
    sys.exit(main())
