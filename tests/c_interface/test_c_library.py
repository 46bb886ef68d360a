"""`libstitch.so` in C programs: built, linked, trained with, and used wrongly.

Needs a C and a C++ compiler and Python's headers; without them these tests fail with a sentence
that says so.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

import stitch
from stitch.c_interface.build import build_library
from stitch.c_interface.header import FUNCTIONS
from stitch.errors import StitchError, UsageError

pytestmark = pytest.mark.campaign("c_interface")

ROOT = Path(__file__).parents[2]
EXAMPLE, USE = ROOT / "examples" / "c", Path(__file__).parent / "use.c"
STRICT = ["-std=c11", "-Wall", "-Wextra", "-Werror", "-pedantic"]
SANITIZERS = ["-g", "-fsanitize=address,undefined", "-fno-sanitize-recover"]
#: Python never frees what it allocates at the start.
NO_LEAKS = {"ASAN_OPTIONS": "detect_leaks=0"}


def ran(*words: object, cwd: Path | None = None, environment: Mapping[str, str] = NO_LEAKS) -> str:
    """What a command prints; fails with its output."""
    done = subprocess.run(
        list(map(str, words)), cwd=cwd, capture_output=True, text=True, check=False,
        env={**os.environ, **environment}, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a library that the command built."""
    for tool in ("gcc", "g++"):
        assert shutil.which(tool), f"{tool} is missing: apt-get install gcc g++"
    folder = tmp_path_factory.mktemp("library")
    printed = ran(sys.executable, "-m", "stitch.c_interface", "build", "-o", folder, cwd=ROOT)
    assert printed.split() == [str(folder / n) for n in ("libstitch.so", "stitch.h", "stitch.pc")]
    return folder


@pytest.fixture(scope="module")
def doubling(library: Path) -> Path:
    path = library / "doubling.ttb"
    stitch.compile(lambda x: x * 2, [np.zeros((2, 3), np.float32)], target="host").save(path)
    return path


def compiled(library: Path, source: Path, *flags: str, compiler: str = "gcc") -> Path:
    """A program linked as `stitch.pc` says."""
    program = library / f"{source.stem}-{compiler}-{len(flags)}"
    there = [f"-I{library}", f"-L{library}", f"-Wl,-rpath,{library}", "-lstitch"]
    ran(compiler, *flags, source, *there, "-o", program)
    return program


def test_pkg_config_names_the_folder(library: Path) -> None:
    text = (library / "stitch.pc").read_text(encoding="utf-8")
    assert f"Version: {stitch.__version__}" in text
    if shutil.which("pkg-config"):
        words = ran(
            "pkg-config",
            "--libs",
            "--cflags",
            "stitch",
            environment={"PKG_CONFIG_PATH": str(library)},
        )
        assert {f"-I{library}", f"-L{library}", "-lstitch"} <= set(words.split())


@pytest.mark.parametrize(
    ("compiler", "flags"),
    [("gcc", STRICT), ("g++", ["-std=c++11", "-Wall", "-Wextra", "-Werror", "-x", "c++"])],
)
def test_the_header_alone_is_strict_c_and_cpp(
    library: Path, compiler: str, flags: list[str]
) -> None:
    source = library / "alone.c"
    source.write_text('#include "stitch.h"\n#include "stitch.h"\nint main(void) { return 0; }\n')
    ran(compiler, *flags, "-fsyntax-only", f"-I{library}", source)


def test_the_sequence_diagram_trains_digits_with_the_bits_of_python(library: Path) -> None:
    source = EXAMPLE / "train_digits.c"
    assert len(source.read_text(encoding="utf-8").splitlines()) <= 150
    ran(sys.executable, EXAMPLE / "digits_file.py", library / "digits.bin")
    flags = ["-std=c++11", "-Wall", "-Wextra", "-Werror", "-xc++"]
    texts = set()
    for program in (
        compiled(library, source, *STRICT, *SANITIZERS),
        compiled(library, source, *flags, compiler="g++"),
    ):
        printed = ran(program, "digits.bin", "trained.json", cwd=library)
        assert "the loss fell from 2.291 to 0.2" in printed
        texts.add((library / "trained.json").read_bytes())
        equal = ran(sys.executable, EXAMPLE / "compare.py", "trained.json", cwd=library)
        assert equal.count("equal elements") == 6
    assert len(texts) == 1


@pytest.mark.parametrize(
    "way", ["threads", "callback", "fork_after_calls", "fork_before_calls", "process"]
)
def test_ways_of_use(library: Path, doubling: Path, way: str) -> None:
    for flags in ([*STRICT, *SANITIZERS], STRICT):
        assert ran(compiled(library, USE, *flags), way, doubling) == "ok\n"


def wrong_calls() -> str:
    """C code that calls each function with NULL, 0 and a handle `id`."""
    calls = []
    for function in FUNCTIONS:
        values = [
            f"({p.type}){{id}}" if p.is_handle
            else "(stitch_tensor_t){id, id}" if p.type == "stitch_tensor_t"
            else "NULL" if p.type.endswith(("*", "callback_t"))
            else "0"
            for p in function.parameters
        ]  # fmt: skip
        calls.append(f"  wrong({function.name}({', '.join(values)}));")
    return "\n".join(calls)


WRONG = """\
#include "stitch.h"
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
static stitch_program_t program;
static int plans;
static void wrong(stitch_error_t error) {
  int code = stitch_error_code(error);
  if (code != STITCH_ERROR_USAGE && code != STITCH_ERROR_INVALID_HANDLE) {
    printf("code %d: %s\\n", code, stitch_error_message(error));
    exit(1);
  }
  stitch_error_destroy(error);
}
static void all(uint64_t id) {
CALLS
}
static uint64_t freed;
static void *thread(void *argument) {
  uint64_t random = (uint64_t)(size_t)argument * 0x9e3779b97f4a7c15u;
  for (int i = 0; i < 20; i++) {
    all(0);
    all(freed);
    all(random | (uint64_t)1 << 63);
    random = random * 6364136223846793005u + 1442695040888963407u;
  }
  return NULL;
}
static void on_plan(void *context, size_t steps, size_t copies) {
  (void)context, (void)steps, (void)copies;
  all(0);
  all(freed);
  plans++;
}
int main(int argc, char **argv) {
  stitch_device_t device, other;
  pthread_t threads[8];
  float x[6] = {0}, y[6];
  const float *inputs[] = {x};
  float *outputs[] = {y};
  if (argc != 2 || stitch_open_device("host", NULL, &other) || stitch_close_device(other) ||
      stitch_open_device("host", NULL, &device) || stitch_load(device, argv[1], &program) ||
      stitch_on_plan(device, on_plan, NULL))
    return 1;
  freed = other.id;
  for (size_t i = 0; i < 8; i++) pthread_create(&threads[i], NULL, thread, (void *)(i + 1));
  if (stitch_run(program, inputs, 1, outputs, 1)) return 1;
  for (size_t i = 0; i < 8; i++) pthread_join(threads[i], NULL);
  if (!plans || stitch_run(program, inputs, 1, outputs, 1)) return 1;
  puts("ok");
  return 0;
}
"""


def test_every_function_with_wrong_arguments_from_threads_and_a_callback(
    library: Path, doubling: Path
) -> None:
    source = library / "wrong.c"
    source.write_text(WRONG.replace("CALLS", wrong_calls()))
    assert ran(compiled(library, source, *STRICT, *SANITIZERS), doubling) == "ok\n"


def test_memory_stays_flat(library: Path) -> None:
    assert "ok" in ran(compiled(library, USE, *STRICT), "flat_memory", 100_000)


def test_the_glue_passes_the_sanitizers(
    library: Path, doubling: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library itself is built with them as well."""
    monkeypatch.setenv("CFLAGS", " ".join(SANITIZERS))
    build_library(tmp_path)
    program = compiled(tmp_path, USE, *STRICT, *SANITIZERS)
    for way in ("threads", "callback", "process"):
        assert ran(program, way, doubling) == "ok\n"


def test_a_python_that_does_not_start_or_lacks_stitch_is_an_error(library: Path) -> None:
    """The interpreter that built the library has gone; or it is one without Stitch."""
    program = compiled(library, USE, *STRICT)
    whole = (library / "libstitch.so").read_bytes()
    try:
        broken = whole.replace(
            b"from stitch.c_interface.embedded", b"from sXitch.c_interface.embedded"
        )
        (library / "libstitch.so").write_bytes(broken)
        said = ran(program, "no_python", "-")
        assert "No module named 'sXitch'" in said and "build it again" in said
    finally:
        (library / "libstitch.so").write_bytes(whole)


def test_a_process_of_python_loads_it(library: Path, doubling: Path) -> None:
    """Also where other modules look Python's symbols up: ctypes opens it with RTLD_LOCAL."""
    code = (
        "import ctypes, sys\n"
        "c = ctypes.CDLL(sys.argv[1])\n"
        "out = ctypes.c_uint64()\n"
        "c.stitch_open_device.restype = ctypes.c_void_p\n"
        "assert c.stitch_open_device(b'host', None, ctypes.byref(out)) is None and out.value\n"
    )
    ran(sys.executable, "-c", code, library / "libstitch.so")


def test_it_may_be_opened_without_its_symbols(library: Path) -> None:
    source = library / "local.c"
    source.write_text(
        '#include "stitch.h"\n#include <dlfcn.h>\n#include <stdio.h>\n#include <string.h>\n'
        "int main(int argc, char **argv) {\n"
        "  stitch_error_t (*open)(const char *, const char *, stitch_device_t *);\n"
        "  const char *(*message)(stitch_error_t);\n"
        "  stitch_device_t device;\n"
        "  void *found, *library = argc == 2 ? dlopen(argv[1], RTLD_NOW | RTLD_LOCAL) : NULL;\n"
        "  if (!library) return 2;\n"
        '  found = dlsym(library, "stitch_open_device");\n'
        "  memcpy(&open, &found, sizeof open);\n"
        '  found = dlsym(library, "stitch_error_message");\n'
        "  memcpy(&message, &found, sizeof message);\n"
        '  stitch_error_t error = open("host", NULL, &device);\n'
        "  if (error) puts(message(error));\n"
        "  return error != NULL;\n}\n"
    )
    ran("gcc", *STRICT, f"-I{library}", source, "-ldl", "-o", library / "local")
    ran(library / "local", library / "libstitch.so")


def test_missing_tools_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    with pytest.raises(UsageError, match="'no-such-compiler' cannot be run"):
        build_library(tmp_path)
    monkeypatch.setenv("CC", "gcc -DSTITCH_OK")
    with pytest.raises(StitchError, match="could not build"):
        build_library(tmp_path)
    monkeypatch.setenv("CC", "gcc")
    monkeypatch.setitem(sys.modules, "cffi", None)
    with pytest.raises(UsageError, match="cffi is not installed"):
        build_library(tmp_path)
    assert list(tmp_path.iterdir()) == []
