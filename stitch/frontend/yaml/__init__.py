"""Modules in YAML: a computation graph that people write by hand.

Comes in: the path of a YAML file, or its text. Goes out: a `ComputationGraph`, or every defect with
its line. Must not know: machines.
"""

from stitch.frontend.yaml.module_file import MODULE_KEYS, load_module, module_from_text

__all__ = ["MODULE_KEYS", "load_module", "module_from_text"]
