"""Build `libstitch.so`, `stitch.h` and `stitch.pc` by cffi and a C compiler."""

from __future__ import annotations

import io
import os
import shlex
import subprocess
import sys
import sysconfig
from contextlib import redirect_stdout
from pathlib import Path
from tempfile import TemporaryDirectory

from stitch.c_interface.header import ERROR_FUNCTIONS, FUNCTIONS, header_text, types_text
from stitch.errors import StitchError, UsageError
from stitch.files import atomic_write, make_folder, read_bytes
from stitch.version import __version__

_MODULE = "_libstitch"

#: Runs once in the embedded Python: its path becomes that of the Python that built the library;
#: where Python ran already, the path's own entries come first.
_START = """\
import sys
from _libstitch import ffi, lib
if lib.stitch_started_python:
    sys.path.clear()
sys.path += [entry for entry in {path!r} if entry not in sys.path]
try:
    from stitch.c_interface.embedded import start
    start(ffi)
except BaseException as error:
    text = (type(error).__name__ + ": " + str(error)).encode(errors="replace")[:900]
    ffi.memmove(lib.stitch_start_failure, text, len(text))
"""

#: Starts Python once, with a configuration that neither reads the environment, nor installs signal
#: handlers, nor changes the locale; an error of it does not end the process, as Py_InitializeEx
#: would. After a fork nothing of Python is called: another thread may have held its locks.
_SOURCE = """\
#include <dlfcn.h>
#include <pthread.h>
#include <string.h>
{header}
{declarations}
struct stitch_error {{ int code; const char *message; const char *remedy; }};
static char stitch_start_failure[1000];
static int stitch_started_python;
static struct stitch_error not_started = {{
  STITCH_ERROR_FAILURE, stitch_start_failure,
  "check the Python environment that built libstitch.so (" {executable} "), or build it again"
}};
static struct stitch_error forked = {{
  STITCH_ERROR_FAILURE, "this process was forked from one that had called Stitch",
  "call Stitch after the fork only, or start another program by exec"
}};
static pthread_once_t once = PTHREAD_ONCE_INIT;
static struct stitch_error *refusal = &not_started;

static void refuse_child(void) {{ refusal = &forked; }}

static int initialize_python(void) {{
  Dl_info python;
  PyPreConfig before;
  PyConfig config;
  PyStatus status;
  /* NumPy's modules look Python's symbols up in the process, also if libstitch.so was opened with
   * RTLD_LOCAL. */
  if (dladdr((void *)Py_IsInitialized, &python) && python.dli_fname)
    dlopen(python.dli_fname, RTLD_NOW | RTLD_GLOBAL | RTLD_NOLOAD);
  if (Py_IsInitialized()) return 0;
  PyPreConfig_InitIsolatedConfig(&before);
  before.utf8_mode = 1;
  status = Py_PreInitialize(&before);
  if (!PyStatus_Exception(status)) {{
    PyConfig_InitIsolatedConfig(&config);
    status = PyConfig_SetBytesString(&config, &config.executable, {executable});
    if (!PyStatus_Exception(status)) status = Py_InitializeFromConfig(&config);
    PyConfig_Clear(&config);
  }}
  if (PyStatus_Exception(status)) {{
    strncpy(stitch_start_failure, status.err_msg ? status.err_msg : "Python did not start", 900);
    return -1;
  }}
  /* Importing `signal` takes Ctrl-C where it ended the process: give it back. */
  PyRun_SimpleString(
      "import signal\\n"
      "if signal.getsignal(signal.SIGINT) is signal.default_int_handler:\\n"
      "    signal.signal(signal.SIGINT, signal.SIG_DFL)\\n");
  stitch_started_python = 1;
  PyEval_SaveThread();
  return 0;
}}

static void start(void) {{
  if (initialize_python()) return;
  if (cffi_start_python() || stitch_start_failure[0]) {{
    if (!stitch_start_failure[0]) strcpy(stitch_start_failure, "Python did not start");
    return;
  }}
  refusal = NULL;
  pthread_atfork(NULL, NULL, refuse_child);
}}

static stitch_error_t refused(void) {{
  pthread_once(&once, start);
  return refusal;
}}
#define STITCH_API __attribute__((visibility("default")))

STITCH_API int stitch_error_code(stitch_error_t error) {{
  if (!error) return STITCH_OK;
  if (error == &not_started || error == &forked) return error->code;
  return refusal ? refusal->code : py_stitch_error_code(error);
}}
STITCH_API const char *stitch_error_message(stitch_error_t error) {{
  if (!error) return "";
  if (error == &not_started || error == &forked) return error->message;
  return refusal ? refusal->message : py_stitch_error_message(error);
}}
STITCH_API const char *stitch_error_remedy(stitch_error_t error) {{
  if (!error) return "";
  if (error == &not_started || error == &forked) return error->remedy;
  return refusal ? refusal->remedy : py_stitch_error_remedy(error);
}}
STITCH_API void stitch_error_destroy(stitch_error_t error) {{
  if (error && !refusal) py_stitch_error_destroy(error);
}}
{functions}
"""

_PKG_CONFIG = """\
prefix={prefix}

Name: stitch
Description: C interface of Stitch
Version: {version}
Cflags: -I${{prefix}}
Libs: -L${{prefix}} -Wl,-rpath,${{prefix}} -lstitch
"""


def build_library(folder: str | Path) -> tuple[Path, ...]:
    """Write `libstitch.so`, `stitch.h` and `stitch.pc` into a folder; return their paths.

    The library runs the Python environment that built it. The build takes `CC` and `CFLAGS`, as
    make does.

    Raises:
        UsageError: cffi, a C compiler or Python's headers are missing.
    """
    source, folder = library_source(), Path(folder).absolute()
    compiler, flags = (shlex.split(os.environ.get(n, d)) for n, d in (("CC", "cc"), ("CFLAGS", "")))
    include, libraries = sysconfig.get_path("include"), sysconfig.get_config_var("LIBDIR")
    if not Path(include, "Python.h").exists():
        raise UsageError(
            "Python's headers are missing", expected=f"{include}/Python.h",
            remedy="install them, for instance by apt-get install python3-dev",
        )  # fmt: skip
    with TemporaryDirectory() as scratch:
        library = Path(scratch, "libstitch.so")
        command = [
            *compiler, "-O2", "-fPIC", "-fvisibility=hidden", *flags, "-shared",
            "-Wl,-soname,libstitch.so", f"-I{include}", "-x", "c", "-", "-o", str(library),
            f"-L{libraries}", f"-Wl,-rpath,{libraries}",
            f"-lpython{sysconfig.get_config_var('LDVERSION')}", "-lpthread", "-ldl",
        ]  # fmt: skip
        try:
            done = subprocess.run(
                command, input=source, capture_output=True, text=True, check=False
            )
        except OSError as error:
            raise UsageError(
                f"the C compiler {compiler[0]!r} cannot be run: {error.strerror}",
                remedy="install one, for instance by apt-get install gcc, or name it: CC=clang",
            ) from error
        if done.returncode:
            raise StitchError(
                "the C compiler could not build libstitch.so",
                where=shlex.join(command), got=done.stderr[-2000:],
                remedy="a Python with a shared library and its headers is needed, such as Debian's "
                "with python3-dev",
            )  # fmt: skip
        built = read_bytes(library)
    make_folder(folder)
    paths = tuple(folder / name for name in ("libstitch.so", "stitch.h", "stitch.pc"))
    texts = (header_text(), _PKG_CONFIG.format(prefix=folder, version=__version__))
    for path, content in zip(paths, (built, *(text.encode() for text in texts)), strict=True):
        atomic_write(path, content)
    return paths


def library_source() -> str:
    """Return the C source of the library; raise `UsageError` if cffi is not installed."""
    try:
        from cffi import FFI
    except ImportError as error:
        raise UsageError(
            "cffi is not installed, which writes the glue between C and Python",
            remedy="pip install 'stitch-runtime[c]'",
        ) from error
    ffi = FFI()
    prototypes = [prototype.replace("stitch_error_", "py_stitch_error_", 1)
                  if not prototype.startswith("stitch_error_t") else prototype
                  for prototype in ERROR_FUNCTIONS]  # fmt: skip
    prototypes += [function.glue()[0] for function in FUNCTIONS]
    externs = "".join(f"{prototype};\n" for prototype in prototypes)
    declarations = "".join(f"static {prototype};\n" for prototype in prototypes)
    ffi.cdef(f"{types_text()}\nstatic char stitch_start_failure[1000];\n"
             "static int stitch_started_python;\n"
             f'extern "Python" {{\n{externs}}}\n')  # fmt: skip
    ffi.embedding_api("")
    functions = [
        f"STITCH_API {function.prototype()} {{\n  stitch_error_t error = refused();\n"
        f"  return error ? error : {function.glue()[1]};\n}}"
        for function in FUNCTIONS
    ]
    executable = '"' + sys.executable.replace("\\", "\\\\").replace('"', '\\"') + '"'
    source = _SOURCE.format(
        header=header_text(),
        declarations=declarations,
        functions="\n".join(functions),
        executable=executable,
    )
    ffi.set_source(_MODULE, source)
    # `python -m` puts the current folder first; a checkout that is not installed may be there.
    package, here = str(Path(__file__).resolve().parents[2]), str(Path.cwd())
    path = [entry for entry in sys.path if entry == package or entry not in ("", here)]
    if package not in path:
        path.append(package)
    ffi.embedding_init_code(_START.format(path=path))
    text = io.StringIO()
    with redirect_stdout(io.StringIO()):  # cffi prints what it does.
        ffi.emit_c_code(text)
    return text.getvalue()
