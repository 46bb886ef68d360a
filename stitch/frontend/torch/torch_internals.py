"""The private names of PyTorch that Stitch uses, in one table: what a new PyTorch may break.

A name is imported when it is first used, because dynamo and inductor take a second to load.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

#: By the module that has them: names, or `name=alias`; for a module of its own, its alias.
_NAMES = {
    "torch": "_check=check _foreach_add_=foreach_add",
    "torch._C": "DisableTorchFunction _get_mkldnn_enabled=is_mkldnn_enabled "
    "_is_any_autocast_enabled=is_autocast_enabled _set_mkldnn_enabled=set_mkldnn_enabled",
    "torch._decomp": "get_decompositions "
    "_core_aten_decompositions_post_autograd=core_decompositions",
    "torch._dynamo": "OptimizedModule",
    "torch._dynamo.backends.common": "aot_autograd",
    "torch._dynamo.eval_frame": "innermost_fn",
    "torch._export.utils": "_special_op_to_preserve_cia=keep_whole",
    "torch._functorch": "config=functorch_config",
    "torch._functorch._aot_autograd.autograd_cache": "BypassAOTAutogradCache",
    "torch._functorch._aot_autograd.schemas": "PlainTensorMeta SerializableAOTDispatchCompiler",
    "torch._functorch.compile_utils": "get_aten_target rand_ops",
    "torch._functorch.partitioners": "min_cut_rematerialization_partition",
    "torch._guards": "TracingContext",
    "torch._inductor": "codecache",
    "torch._inductor.output_code": "OutputCode",
    "torch._ops": "HigherOrderOperator OpOverload",
    "torch._prims": "rng_prims",
    "torch._subclasses": "FakeTensorMode",
    "torch.autograd": "forward_ad",
    "torch.export.exported_program": "_decompose_exported_program=decompose_exported_program "
    "_disable_prexisiting_fake_mode=disable_fake_mode "
    "_split_decomp_table_to_cia_and_python_decomp=split_decompositions",
    "torch.fx._lazy_graph_module": "_use_lazy_graph_module=lazy_graph_modules",
    "torch.utils": "_pytree=pytree",
    "torch.utils._python_dispatch": "_disable_current_modes=disable_current_modes",
}
_ORIGINS = {
    alias or name: (module, name)
    for module, names in _NAMES.items()
    for name, _, alias in (entry.partition("=") for entry in names.split())
}
#: torch.export loads this module at its first use.
EXPORT_TRACER = "torch.export._trace"
#: Converts TorchScript to an ExportedProgram; an error message recommends it.
TORCHSCRIPT_CONVERTER = "torch._export.converter.TS2EPConverter"


def __getattr__(name: str) -> Any:
    if name not in _ORIGINS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, original = _ORIGINS[name]
    value = globals()[name] = getattr(import_module(module), original)
    return value


def __dir__() -> list[str]:
    return sorted(_ORIGINS)
