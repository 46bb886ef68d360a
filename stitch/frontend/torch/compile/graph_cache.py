"""Compiled graphs that torch's cache of aot_autograd keeps on disk: the option `cache`.

A graph that is one program of known shapes is kept whole; where torch runs a part, or sizes are
symbols, its programs are (`stitch.compile_cache`). Nothing of a folder stops a compilation.
"""

from __future__ import annotations

import hashlib
import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch._functorch._aot_autograd.autograd_cache import BypassAOTAutogradCache
from torch._functorch._aot_autograd.schemas import SerializableAOTDispatchCompiler
from torch._inductor import codecache
from torch._inductor.output_code import OutputCode
from torch._inductor.runtime.cache_dir_utils import cache_dir

from stitch.compile_cache import CompileCache, digest_of
from stitch.frontend.torch.compile.graph_program import GraphProgram, ProgramForm
from stitch.frontend.torch.compile.shared_storage import SharedStorage

_log = logging.getLogger(__name__)
_torchs_key = codecache.torch_key
_FOLDER = "TORCHINDUCTOR_CACHE_DIR"
#: Rooms above the compiler in which it is decided what a graph becomes.
_ROOMS = ("frontend", "runtime")


class KeptGraph(OutputCode):  # type: ignore[misc]  # torch has no types here
    """A compiled graph as torch calls and keeps it; `restore` opens the storage it runs on."""

    def __init__(
        self, run: Callable[[list[Any]], Any], restore: Callable[[], SharedStorage]
    ) -> None:
        # It takes its arguments in a list, and empties that; wrappers copy what an object holds.
        self._boxed_call = True
        self.run: Callable[[list[Any]], Any] | None = run
        self.restore = restore
        self.form: bytes | None = None

    def __call__(self, inputs: list[Any]) -> Any:
        """Runs it."""
        assert self.run is not None, "torch calls post_compile before it calls what it has read"
        return self.run(inputs)

    def prepare_for_serialization(self) -> None:
        """Becomes what is written; torch asks a copy."""
        program = getattr(self.run, "__self__", None)
        if not isinstance(program, GraphProgram):
            raise BypassAOTAutogradCache("torch runs a part of the graph, or its sizes are symbols")
        self.run, self.form = None, program.form.as_bytes()

    def post_compile(self, example_inputs: Any, constants: Any, graph_kwargs: Any) -> None:
        """Becomes what runs again."""
        del example_inputs, constants, graph_kwargs
        if self.run is not None:
            return
        assert self.form is not None, "what was written has a form"
        storage, form = self.restore(), ProgramForm.of_bytes(self.form)
        self.run = GraphProgram(form, storage).__call__
        storage.counts.from_cache += 1
        _log.info("graph %s: read from the cache", form.name)


def kept_compiler(
    compile_graph: Callable[..., Callable[[list[Any]], Any]], restore: Callable[[], SharedStorage]
) -> Any:
    """A compiler of aot_autograd whose results torch keeps."""

    def compile_kept(module: Any, examples: Any) -> KeptGraph:
        return KeptGraph(compile_graph(module, examples), restore)

    return SerializableAOTDispatchCompiler(KeptGraph, compile_kept)


@contextmanager
def keeping(module: Any, folder: Path | None, *decisive: Any) -> Iterator[None]:
    """Within the block torch keeps what it compiles in a folder, by default in its own.

    `decisive`: what decides, beside the graph, how it is compiled. The backward pass is compiled at
    once, for torch keeps both together.
    """
    config = torch._functorch.config.patch(
        enable_autograd_cache=True, bundled_autograd_cache=True,
        force_non_lazy_backward_lowering=True,
    )  # fmt: skip
    # Among its attributes, by which torch's key tells graphs apart.
    module.stitch_versions = digest_of(decisive, _ROOMS)
    with ExitStack() as stack:
        stack.enter_context(config)
        stack.enter_context(_inductor_left_out())
        if folder is not None:
            stack.enter_context(_torchs_folder(folder))
        yield


def _nothing() -> None:
    pass


@contextmanager
def _inductor_left_out() -> Iterator[None]:
    """Within the block torch's key is of what decides here.

    Inductor writes no code of our graphs, and to ask for its kinds of devices loads all of it:
    which takes longer than dynamo's trace of GPT-2. Reading all of torch's source, as its key does,
    takes half as long. Dynamo compiles in one thread at a time.
    """
    ours = {
        "init_backend_registration": _nothing, "custom_backend_passes": {},
        "custom_backend_codegen_configs": {}, "torch_key": _torch_digest,
    }  # fmt: skip
    before = {name: getattr(codecache, name) for name in ours}
    lazy = None if _WRAPPER in sys.modules else _LazyWrapper(_WRAPPER)
    try:
        vars(codecache).update(ours)
        if lazy is not None:
            sys.modules[_WRAPPER] = lazy
        yield
    finally:
        vars(codecache).update(before)
        if lazy is not None and sys.modules.get(_WRAPPER) is lazy:
            del sys.modules[_WRAPPER]


#: What writes inductor's code, of which torch's key takes one function, for kernels in Triton.
_WRAPPER = "torch._inductor.codegen.wrapper"
_SOURCE_OF_KERNEL = "user_defined_triton_kernel_transitive_closure_source_code"


class _LazyWrapper(ModuleType):
    """That module, which is loaded when anything of it is used."""

    def __getattr__(self, name: str) -> Any:
        if name == _SOURCE_OF_KERNEL:
            return lambda kernel: getattr(self._loaded(), name)(kernel)
        if name.startswith("__"):
            # What Python asks of any module.
            raise AttributeError(name)
        return getattr(self._loaded(), name)

    def _loaded(self) -> ModuleType:
        if sys.modules.get(_WRAPPER) is self:
            del sys.modules[_WRAPPER]
        return import_module(_WRAPPER)


@cache
def _torch_digest() -> bytes:
    """Of torch as it was installed: the digests of its files that are kept with it. A torch that
    was built in place has none: then torch reads its source."""
    try:
        listed = distribution("torch").read_text("RECORD") or ""
    except PackageNotFoundError:
        listed = ""
    if "torch/__init__.py,sha256=" not in listed:
        key: bytes = _torchs_key()
        return key
    return hashlib.sha256(f"{torch.__version__}\n{listed}".encode()).digest()


@contextmanager
def _torchs_folder(folder: Path) -> Iterator[None]:
    before = os.environ.get(_FOLDER)
    os.environ[_FOLDER] = str(folder.absolute())
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(_FOLDER, None)
        else:
            os.environ[_FOLDER] = before


def program_cache(folder: Path | None) -> CompileCache | None:
    """Where programs are kept that torch's cache does not take; None where a folder takes no files,
    which is said once."""
    return _program_cache(
        Path(os.environ.get(_FOLDER) or cache_dir()) if folder is None else folder
    )


@cache
def _program_cache(folder: Path) -> CompileCache | None:
    try:
        (folder / "stitch").mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            raise PermissionError(f"no files may be written into {folder}")
    except OSError as error:
        _log.warning("what is compiled is not kept, the cache folder takes no files: %s", error)
        return None
    return CompileCache(folder / "stitch")
