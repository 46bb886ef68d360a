"""What the first call of a compiled module takes: torch.compile by us, `aot_eager` and inductor.

Every measurement is a process of its own, whose bytecode is written before: torch is loaded, a
network of `--networks` made, and then the first call is timed, in seconds of processor time of all
threads and of what it starts (such as inductor's C++ compiler). Rounds go through all ways in turn.
Inductor's caches are off. `warm` is ours in a process that finds what another kept, `kept`
(`cache=FOLDER`). Printed are the least of the rounds, ratios, and of what parts each consists:

    dynamo    torch loads what torch.compile needs
    imports   the backend is loaded
    tracing   dynamo traces and makes guards, and torch calls what was compiled
    backend   what dynamo calls: aot_autograd, and what the backend makes of its graphs; for `warm`,
              finding and reading what was kept
    run       the rest of our first run: kernels are prepared and a plan is made

`--check` exits 1 where ours takes above 0.5 of inductor's, above 1.3 of aot_eager's, or the part
`backend` of `warm` above 0.2 of ours: the other parts no cache of a backend's can spare.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from itertools import pairwise
from typing import Any

os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = "1"

from command_line import bench_parser, exit_code_for, from_one

WAYS = ("stitch", "kept", "warm", "aot_eager", "inductor")
#: The most that ours may be of another way's time, and that part of `warm` which a cache can spare.
GOALS = {"inductor": 0.5, "aot_eager": 1.3}
WARM = 0.2
PARTS = ("dynamo", "imports", "tracing", "backend", "run")
NETWORKS = ("mlp", "encoder_layer", "conv_block", "resnet18", "mobilenet", "bert", "gpt", "vit",
            "lstm", "unet", "gpt2_small")  # fmt: skip


def first_call(network: str, way: str, *, is_small: bool, folder: str) -> dict[str, float]:
    """Seconds of processor time of the first call, in this process, by part."""
    import torch
    from peer_ways.networks import make

    torch.set_num_threads(1)
    torch.manual_seed(0)
    module, x = make(network, is_small=is_small)
    name, options = ("stitch", {"cache": folder}) if way in ("kept", "warm") else (way, None)
    with torch.no_grad():
        module(x)
        times = [_processor_seconds()]
        from torch._dynamo.backends.registry import list_backends, lookup_backend

        list_backends()
        times.append(_processor_seconds())
        backend = _Timed(lookup_backend(name))
        times.append(_processor_seconds())
        torch.compile(module, backend=backend, options=options, dynamic=False)(x)
        times.append(_processor_seconds())
    dynamo, imports, call = (after - before for before, after in pairwise(times))
    tracing = call - backend.compiling - backend.running
    return dict(
        zip(PARTS, (dynamo, imports, tracing, backend.compiling, backend.running), strict=True)
    )


class _Timed:
    """A backend of torch.compile, and the seconds it and the first run of what it made took."""

    def __init__(self, backend: Any) -> None:
        self.backend = backend
        self.compiling = self.running = 0.0

    def __call__(self, module: Any, examples: Any, **named: Any) -> Any:
        before = _processor_seconds()
        run = self.backend(module, examples, **named)
        self.compiling += _processor_seconds() - before

        def timed(*arguments: Any) -> Any:
            before = _processor_seconds()
            try:
                return run(*arguments)
            finally:
                self.running += _processor_seconds() - before

        return timed


def _processor_seconds() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def measured(network: str, way: str, folder: str, options: argparse.Namespace) -> dict[str, float]:
    """The same in a process of its own."""
    words = ["--child", way, "--folder", folder, "--networks", network]
    environment = {**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    if way not in ("kept", "warm"):
        environment["TORCHINDUCTOR_FORCE_DISABLE_CACHES"] = "1"
    done = subprocess.run(
        [sys.executable, __file__, *words, *(["--small"] if options.small else [])],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"{network} by {way} failed:\n{done.stderr[-2000:]}")
    parts: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return parts


def rounds_of(network: str, options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """The parts of each way's first call, of the round in which it took least."""
    least: dict[str, dict[str, float]] = {}
    for _ in range(options.rounds):
        with tempfile.TemporaryDirectory() as folder:
            for way in WAYS:
                parts = measured(network, way, folder, options)
                if way not in least or sum(parts.values()) < sum(least[way].values()):
                    least[way] = parts
    return least


def main(arguments: list[str] | None = None) -> int:
    """Measure and print; see the module's docstring for the exit code."""
    parser = bench_parser(__doc__)
    parser.add_argument("--networks", nargs="*", choices=NETWORKS, default=NETWORKS, metavar="NAME")
    parser.add_argument("--small", action="store_true", help="networks in a small size")
    parser.add_argument("--rounds", type=from_one, default=3, help="processes for each way (3)")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--folder", default="", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.child:
        (network,) = options.networks
        found = first_call(network, options.child, is_small=options.small, folder=options.folder)
        print(json.dumps(found))
        return 0
    missed, rows = [], []
    goals = {**{f"stitch / {way}": most for way, most in GOALS.items()}, "warm / kept": WARM}
    for network in options.networks:
        least = rounds_of(network, options)
        whole = {way: sum(parts.values()) for way, parts in least.items()}
        ratios = {f"stitch / {way}": whole["stitch"] / whole[way] for way in GOALS}
        ratios["warm / kept"] = least["warm"]["backend"] / least["kept"]["backend"]
        rows.append({"name": network, "seconds": whole, "parts": least, "ratios": ratios})
        if not options.json:
            said = ", ".join(f"{pair} {ratio:.2f}" for pair, ratio in ratios.items())
            print(f"{network}: {said}")
            print(f"{'':12}" + "".join(f"{part:>10}" for part in ("in all", *PARTS)))
            for way, parts in least.items():
                figures = (whole[way], *(parts[part] for part in PARTS))
                print(f"  {way:10}" + "".join(f"{figure:10.2f}" for figure in figures), flush=True)
        missed += [
            f"{network}: {pair} is {ratios[pair]:.2f}, not {most}"
            for pair, most in goals.items()
            if ratios[pair] > most
        ]
    if options.json:
        print(json.dumps(rows, indent=2))
    return exit_code_for(missed, check=options.check)


if __name__ == "__main__":
    sys.exit(main())
