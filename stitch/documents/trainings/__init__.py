"""Training files: which model, on which data, towards which loss, by which steps.

Comes in: the path of a YAML file. Goes out: a `TrainFile` and the data it names, or every defect
with its line. Must not know: commands, devices.
"""
