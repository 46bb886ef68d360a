"""A graph of dynamo by way of aot_autograd: without what torch's own class for that loads.

Comes in: a graph, examples of its arguments, compilers. Goes out: a function of its arguments,
which dynamo leaves alone. Must not know: devices, what compilers make.

`torch._dynamo.backends.common.AotAutograd` loads inductor, its scheduler and all, for a log that
`TORCH_COMPILE_DEBUG` asks for: a tenth of a second of each process.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch._dynamo import disable
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters, flatten_graph_inputs
from torch._functorch.aot_autograd import SerializableAOTDispatchCompiler, aot_module_simplified


def by_aot_autograd(
    module: Any, examples: Sequence[Any], *, bw_compiler: Any, **how: Any
) -> Callable[..., Any]:
    """The function; `how` is as `aot_module_simplified` takes it. Raises what compilers raise."""
    if os.environ.get("TORCH_COMPILE_DEBUG") == "1":
        logged: Callable[..., Any] = aot_autograd(bw_compiler=bw_compiler, **how)(module, examples)
        return logged
    if any(isinstance(example, list | tuple | dict) for example in examples):
        again = partial(by_aot_autograd, bw_compiler=bw_compiler, **how)
        flat: Callable[..., Any] = flatten_graph_inputs(module, examples, again)
        return flat
    counted, is_done = counters["aot_autograd"], False
    counted["total"] += 1
    try:
        run = aot_module_simplified(module, examples, bw_compiler=_untraced(bw_compiler), **how)
        is_done = True
    finally:
        counted["ok" if is_done else "not_ok"] += 1
    left_alone: Callable[..., Any] = disable(run, reason="it is compiled")
    return left_alone


def _untraced(compiler: Any) -> Any:
    """A compiler of backward passes that dynamo traces neither itself nor what it makes: it runs
    where others' code may be traced."""
    if isinstance(compiler, SerializableAOTDispatchCompiler):
        compiler.compiler_fn = _untraced(compiler.compiler_fn)
        return compiler

    def compile_backward(*arguments: Any, **named: Any) -> Any:
        made = disable(compiler, reason="it compiles")(*arguments, **named)
        return disable(made, reason="it is compiled")

    return compile_backward
