"""A call of a program from C beside the same call in Python, on `host`.

Prints, for each shape, the microseconds of `stitch_run` in a C program, of
`y[...] = program(x).numpy()` in Python, and their difference and ratio. Both processes take turns;
the least of all rounds counts, each of which is the least of many calls. Needs a C compiler.
`--check` exits 1 where the difference is above 3 microseconds.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from command_line import bench_parser, exit_code_for, extents, from_one

import stitch
from stitch.c_interface.build import build_library

GOAL_US = 3.0
SHAPES = ((8, 64), (64, 64), (256, 256))
SOURCE = """\
#define _POSIX_C_SOURCE 199309L
#include "stitch.h"
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return 1e6 * (double)t.tv_sec + 1e-3 * (double)t.tv_nsec;
}
int main(int argc, char **argv) {
  int calls = argc == 4 ? atoi(argv[2]) : 0;
  size_t count = argc == 4 ? (size_t)atol(argv[3]) : 1;
  float *x = malloc(count * sizeof *x), *y = malloc(count * sizeof *y);
  const float *inputs[] = {x};
  float *outputs[] = {y};
  stitch_device_t device;
  stitch_program_t program;
  double best = 1e9;
  if (!x || !y || stitch_open_device("host", NULL, &device) ||
      stitch_load(device, argv[1], &program)) return 1;
  for (size_t i = 0; i < count; i++) x[i] = (float)i;
  for (int i = 0; i < calls; i++) {
    double began = now();
    if (stitch_run(program, inputs, 1, outputs, 1)) return 1;
    if (now() - began < best) best = now() - began;
  }
  if (y[count - 1] != 2 * x[count - 1] + 1) return 1;
  printf("%.3f", best);
  return 0;
}
"""
PYTHON = """\
import sys, time
import numpy as np
import stitch
program = stitch.open_device("host").load(sys.argv[1])
x, best = np.arange(int(sys.argv[3]), dtype=np.float32).reshape(program.ports[0].shape), 1e9
y = np.empty_like(x)
for _ in range(int(sys.argv[2])):
    began = time.perf_counter()
    y[...] = program(x).numpy()
    best = min(best, time.perf_counter() - began)
print(1e6 * best)
"""


def main() -> int:
    """Measure each shape; return the exit code."""
    parser = bench_parser(__doc__)
    parser.add_argument("--shapes", type=extents, nargs="+", default=SHAPES)
    parser.add_argument("--calls", type=from_one, default=20_000, help="calls of a round")
    parser.add_argument("--rounds", type=from_one, default=5)
    options = parser.parse_args()
    rows, missed = [], []
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        build_library(folder)
        (folder / "call.c").write_text(SOURCE)
        words = ["cc", "-std=c11", "-O2", "call.c", "-I.", "-L.", f"-Wl,-rpath,{folder}"]
        subprocess.run([*words, "-lstitch", "-o", "call"], cwd=folder, check=True)
        for shape in options.shapes:
            count, path = int(np.prod(shape)), folder / "program.ttb"
            model = stitch.compile(
                lambda x: x * 2 + 1, [np.zeros(shape, np.float32)], target="host"
            )
            model.save(path)
            arguments = [str(path), str(options.calls), str(count)]
            ways = {"c": [str(folder / "call")], "python": [sys.executable, "-c", PYTHON]}
            best = dict.fromkeys(ways, float("inf"))
            for _ in range(options.rounds):
                for way, command in ways.items():
                    done = subprocess.run(
                        [*command, *arguments], capture_output=True, text=True, check=True
                    )
                    best[way] = min(best[way], float(done.stdout))
            named = "x".join(map(str, shape))
            beyond = best["c"] - best["python"]
            rows.append({"shape": named, **best, "beyond": beyond})
            if beyond > GOAL_US:
                missed.append(f"{named}: {beyond:.2f} us beyond Python, goal {GOAL_US}")
            if not options.json:
                print(f"{named:>9}  C {best['c']:8.2f} us  Python {best['python']:8.2f} us  "
                      f"{beyond:+6.2f} us  x{best['c'] / best['python']:.3f}")  # fmt: skip
    if options.json:
        print(json.dumps(rows))
    return exit_code_for(missed, check=options.check)


if __name__ == "__main__":
    sys.exit(main())
