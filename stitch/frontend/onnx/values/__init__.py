"""What the names of a model stand for: tensors, lists of tensors, nothing.

Comes in: definitions of names, nodes on lists. Goes out: values by name, and which inputs decide
their shapes. Must not know: files.
"""
