"""The option `cache`: store compiled graphs on disk in the cache of torch's aot_autograd.

A graph that is one program of known shapes is stored; one of which torch runs a part, or with
symbolic sizes, is compiled anew. A damaged or read-only folder never stops a compilation.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from stitch.compile_cache import digest_of
from stitch.frontend.torch.compile.graph_program import CompiledGraph, GraphProgram
from stitch.frontend.torch.shared_storage import SharedStorage
from stitch.frontend.torch.torch_internals import (
    BypassAOTAutogradCache,
    OutputCode,
    SerializableAOTDispatchCompiler,
    codecache,
    functorch_config,
)

_log = logging.getLogger(__name__)
_FOLDER = "TORCHINDUCTOR_CACHE_DIR"
#: Packages besides the compiler whose source the compiled graphs depend on.
_PACKAGES = ("frontend", "runtime")


class CachedGraph(OutputCode):  # type: ignore[misc]  # torch has no types here
    """A compiled graph as torch calls and stores it; `restore` opens the device that it runs on."""

    def __init__(
        self, run: Callable[[list[Any]], Any], restore: Callable[[], SharedStorage]
    ) -> None:
        # Arguments come in a list, which is emptied. Wrappers copy the attributes of an object.
        self._boxed_call = True
        self.run: Callable[[list[Any]], Any] | None = run
        self.restore = restore
        self.data: bytes | None = None

    def __call__(self, inputs: list[Any]) -> Any:
        """Run the graph."""
        assert self.run is not None, "torch calls post_compile first"
        return self.run(inputs)

    def prepare_for_serialization(self) -> None:
        """Replace the function by bytes; torch calls this on a copy."""
        program = getattr(self.run, "__self__", None)
        if not isinstance(program, GraphProgram):
            raise BypassAOTAutogradCache("torch runs a part of the graph, or its sizes are symbols")
        self.run, self.data = None, program.compiled.as_bytes()

    def post_compile(self, example_inputs: Any, constants: Any, graph_kwargs: Any) -> None:
        """Build the function of a graph that was read from the cache."""
        del example_inputs, constants, graph_kwargs
        if self.run is not None:
            return
        assert self.data is not None, "a stored graph has bytes"
        storage, compiled = self.restore(), CompiledGraph.of_bytes(self.data)
        self.run = GraphProgram(compiled, storage).__call__
        storage.counts.from_cache += 1
        _log.info("graph %s: read from the cache", compiled.name)


def caching_compiler(
    compile_graph: Callable[..., Callable[[list[Any]], Any]], restore: Callable[[], SharedStorage]
) -> Any:
    """A compiler for aot_autograd whose results torch stores."""

    def compile_cached(module: Any, examples: Any) -> CachedGraph:
        return CachedGraph(compile_graph(module, examples), restore)

    return SerializableAOTDispatchCompiler(CachedGraph, compile_cached)


@contextmanager
def autograd_cache(module: Any, folder: Path | None, *key: Any) -> Iterator[None]:
    """Make torch store compiled graphs in a folder, by default its own.

    `key`: what the result depends on besides the graph. The backward pass is compiled at once,
    because torch stores both together.
    """
    config = functorch_config.patch(
        enable_autograd_cache=True, bundled_autograd_cache=True,
        force_non_lazy_backward_lowering=True,
    )  # fmt: skip
    # torch's cache key includes the module's attributes.
    module.stitch_versions = digest_of(key, _PACKAGES)
    with ExitStack() as stack:
        stack.enter_context(config)
        stack.enter_context(_without_inductor())
        if folder is not None:
            stack.enter_context(_cache_folder(folder))
        yield


@contextmanager
def _without_inductor() -> Iterator[None]:
    """Keep torch's cache key from depending on inductor's devices and passes, which are not used
    here: loading them takes longer than dynamo's trace of GPT-2. Dynamo compiles in one thread at a
    time."""
    ours = {
        "init_backend_registration": lambda: None, "custom_backend_passes": {},
        "custom_backend_codegen_configs": {},
    }  # fmt: skip
    before = {name: getattr(codecache, name) for name in ours}
    try:
        vars(codecache).update(ours)
        yield
    finally:
        vars(codecache).update(before)


@contextmanager
def _cache_folder(folder: Path) -> Iterator[None]:
    before = os.environ.get(_FOLDER)
    os.environ[_FOLDER] = str(folder.absolute())
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(_FOLDER, None)
        else:
            os.environ[_FOLDER] = before
