"""Modules in YAML: a computation graph that people write by hand."""

from stitch.frontend.yaml.module_file import MODULE_KEYS, load_module, module_from_text

__all__ = ["MODULE_KEYS", "load_module", "module_from_text"]
