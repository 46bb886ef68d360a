"""Modules in YAML: a computation graph that people write by hand.

Comes in: the path of a YAML file, or its text. Goes out: a `ComputationGraph`, or every defect with
its line. Must not know: machines.
"""
