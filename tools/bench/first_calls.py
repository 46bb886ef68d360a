"""What the first call of a compiled module takes: torch.compile by us, `aot_eager` and inductor.

Every measurement is a process of its own: torch is loaded, a network of `--networks` made, and then
the first call is timed, in seconds of processor time of all threads and of what it starts (such as
inductor's C++ compiler). Rounds go through all ways in turn. Inductor's caches are off. `warm` is
ours in a process that finds what another kept (`cache=FOLDER`). Printed are the least of the rounds
and ratios. `--check` exits 1 where ours takes above 0.5 of inductor's, above 1.3 of aot_eager's, or
`warm` above 0.2 of ours.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile

os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = "1"

from command_line import exit_code_for, from_one

WAYS = ("stitch", "warm", "aot_eager", "inductor")
#: The most that ours may be of another way's time, and `warm` of ours.
GOALS = {"inductor": 0.5, "aot_eager": 1.3}
WARM = 0.2
NETWORKS = ("mlp", "encoder_layer", "conv_block", "resnet18", "mobilenet", "bert", "gpt", "vit",
            "lstm", "unet", "gpt2_small")  # fmt: skip


def first_call(network: str, way: str, *, is_small: bool, folder: str) -> float:
    """Seconds of processor time of the first call, in this process."""
    import torch
    from peer_ways.networks import make

    torch.set_num_threads(1)
    module, x = make(network, is_small=is_small)
    backend, options = ("stitch", {"cache": folder}) if way in ("kept", "warm") else (way, None)
    with torch.no_grad():
        module(x)
        before = _processor_seconds()
        torch.compile(module, backend=backend, options=options, dynamic=False)(x)
        return _processor_seconds() - before


def _processor_seconds() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def measured(network: str, way: str, folder: str, options: argparse.Namespace) -> float:
    """The same in a process of its own."""
    words = ["--child", way, "--folder", folder, "--networks", network]
    environment = {
        **os.environ,
        "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1",
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, __file__, *words, *(["--small"] if options.small else [])],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"{network} by {way} failed:\n{done.stderr[-2000:]}")
    return float(done.stdout.splitlines()[-1])


def rounds_of(network: str, options: argparse.Namespace) -> dict[str, float]:
    """The least seconds of each way."""
    least: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        measured(network, "kept", folder, options)
        for _ in range(options.rounds):
            for way in WAYS:
                found = measured(network, way, folder, options)
                least[way] = min(found, least.get(way, found))
    return least


def main(arguments: list[str] | None = None) -> int:
    """Measure and print; see the module's docstring for the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--networks", nargs="*", choices=NETWORKS, default=NETWORKS, metavar="NAME")
    parser.add_argument("--small", action="store_true", help="networks in a small size")
    parser.add_argument("--rounds", type=from_one, default=3, help="processes for each way (3)")
    parser.add_argument("--json", action="store_true", help="print results as JSON")
    parser.add_argument("--check", action="store_true", help="exit 1 where a goal is missed")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--folder", default="", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.child:
        (network,) = options.networks
        print(first_call(network, options.child, is_small=options.small, folder=options.folder))
        return 0
    missed, rows = [], []
    for network in options.networks:
        least = rounds_of(network, options)
        ratios = {f"stitch / {way}": least["stitch"] / least[way] for way in GOALS}
        ratios["warm / stitch"] = least["warm"] / least["stitch"]
        rows.append({"name": network, "seconds": least, "ratios": ratios})
        if not options.json:
            seconds = ", ".join(f"{way} {seconds:.2f} s" for way, seconds in least.items())
            said = ", ".join(f"{pair} {ratio:.2f}" for pair, ratio in ratios.items())
            print(f"{network}: {seconds}; {said}", flush=True)
        goals = {**{f"stitch / {way}": most for way, most in GOALS.items()}, "warm / stitch": WARM}
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
